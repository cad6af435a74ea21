"""Which storages of compiled regions never exist, and which live longer in their place.

What a fused kernel computes and only itself reads is never in memory. Inductor decides that; the
kernels are those of `fused.py`, so the limits of that model are limits here. Not modelled are
buffers that a kernel writes over its own operands, and the room that a template of a matrix product
takes.

Of torch.compile (`Runner.runtime` "fsdp2"), forward and backward are compiled together, and a
partitioner chooses what is saved. It computes again in backward what fused kernels read there, if
what that takes is smaller, as in "min-cut partitioning" (github.com/pytorch/functorch, Horace He):
of a float32 loss only the logits are saved. The rule here looks at one value after another, not at
a minimum cut.
"""

from __future__ import annotations

from collections.abc import Collection

from torch import Tensor, fx

from graphshard.cost.fused import (
    base_of,
    compiled_regions,
    kernels_of,
    operator_of,
    read_outside,
    results_of,
)
from graphshard.program.aliases import aliases_of
from graphshard.program.program import FORWARD, Program
from graphshard.program.regions import Region
from graphshard.program.storages import Storages


def leave_out_fused(
    program: Program, storages: Storages, leave_eager: Collection[str] = (), *, split: bool = True
) -> None:
    """Set the bytes of storages that compiled code does not have to 0, and extend others' lives.

    Args:
        program: a program, with or without regions.
        storages: those of `program`, which are changed.
        leave_eager: FQNs of the units and modules that are not compiled.
        split: whether forward and backward are compiled apart, as graphshard does; otherwise values
            may be computed again in backward.
    """
    regions = compiled_regions(program, leave_eager)
    fused: set[fx.Node] = set()
    for region in regions:
        for kernel in kernels_of(region):
            inside = set(kernel)
            fused |= inside
            for node in kernel:
                for value in results_of(node):
                    if not read_outside(value, inside):
                        _drop(storages, value)
    if not split:
        _compute_again(regions, storages, fused)


def _drop(storages: Storages, value: fx.Node) -> None:
    """Leave out the storage that `value` is all of."""
    own = storages.of_node.get(value, ())
    if len(own) == 1 and own[0].node is operator_of(value):
        own[0].size = 0
        own[0].pieces = ()


def _compute_again(regions: list[Region], storages: Storages, fused: set[fx.Node]) -> None:
    """Leave out what forward saves and fused kernels of backward can compute from less."""
    for region in regions:
        if region.nodes[0].meta["phase"] != FORWARD:
            continue
        for kernel in kernels_of(region):
            inside = set(kernel)
            for node in kernel:
                for value in results_of(node):
                    if read_outside(value, inside):
                        _save_operands(value, inside, storages, fused)


def _save_operands(
    value: fx.Node, inside: set[fx.Node], storages: Storages, fused: set[fx.Node]
) -> None:
    """Save what `value` is computed from instead of itself, where only fused kernels read it."""
    own = storages.of_node.get(value, ())
    aliases = set(aliases_of(value))
    readers = {user for alias in aliases for user in alias.users} - aliases - inside
    if len(own) != 1 or not own[0].size or not readers <= fused:
        return
    if all(user.meta["phase"] == FORWARD for user in readers):
        return
    dies = own[0].dies
    operands = [s for base in _operands(value, inside) for s in storages.of_node.get(base, ())]
    longer = [storage for storage in operands if storage.dies < dies]
    if sum(storage.size for storage in longer) < own[0].size:
        own[0].size = 0
        own[0].pieces = ()
        for storage in longer:
            storage.dies = dies
            storage.ends = own[0].ends


def _operands(value: fx.Node, inside: set[fx.Node]) -> set[fx.Node]:
    """The values outside of a kernel that `value` is computed from."""
    found: set[fx.Node] = set()
    seen: set[fx.Node] = set()
    stack = [operator_of(value)]
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for operand in node.all_input_nodes:
            base = base_of(operand)
            if operator_of(base) in inside:
                stack.append(operator_of(base))
            elif isinstance(base.meta.get("val"), Tensor):
                found.add(base)
    return found

"""What runs a plan, and the storages that a program has under it.

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

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import Tensor, fx

from graphshard.cost.fused import (
    base_of,
    compiled_regions,
    is_left_eager,
    kernels_of,
    operator_of,
    read_outside,
    results_of,
)
from graphshard.errors import CostError
from graphshard.program.aliases import aliases_of
from graphshard.program.program import FORWARD, Program
from graphshard.program.regions import Region, regions_in
from graphshard.program.storages import END, RETURNED, Storage, Storages, storages_of

RUNTIMES = ("graphshard", "fsdp2")
"""The runtimes that an estimate can be of."""


@dataclass(frozen=True)
class Runner:
    """The runtime that an estimate is of.

    Args:
        runtime: "graphshard", whose gathers write each parameter in place, or "fsdp2", torch's
            `fully_shard`, which gathers into one buffer and copies each parameter out of it.
        leave_eager: FQNs of units and modules whose compute is not compiled although the program
            has regions; "" is the root unit. Models that are compiled block by block leave the
            root, with its norm, head and loss, eager.
        holds_outputs: whether the training loop holds what a call returned until the next call
            returns, as the variable of `outputs = model(**batch)` does.
    """

    runtime: str = "graphshard"
    leave_eager: frozenset[str] = frozenset()
    holds_outputs: bool = False

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            raise CostError(f"runtime must be one of {', '.join(RUNTIMES)}; got {self.runtime!r}")

    @classmethod
    def of(cls, runtime: str, leave_eager: Collection[str], holds_outputs: bool) -> Runner:
        """The runner of the arguments of `graphshard.simulate`."""
        if isinstance(leave_eager, str):
            raise CostError(
                f"leave_eager is a list of units and modules; got {leave_eager!r}; write "
                f"leave_eager=[{leave_eager!r}]"
            )
        return cls(runtime, frozenset(leave_eager), holds_outputs)

    def check(self, program: Program) -> None:
        """Check that each name of `leave_eager` keeps a part of `program` from being compiled."""
        if self.leave_eager and program.regions is None:
            raise CostError(
                "leave_eager has no effect where nothing is compiled; leave it out, or plan with "
                'backend="inductor"'
            )
        if self.leave_eager:
            nodes = [node for region in regions_in(program.graph) for node in region.nodes]
            for name in sorted(self.leave_eager):
                if not any(is_left_eager(node, [name]) for node in nodes):
                    raise CostError(
                        f"leave_eager names {name!r}, but nothing that is compiled belongs to a "
                        "unit or module of that name"
                    )

    def storages(self, program: Program) -> tuple[Storages, list[Storage]]:
        """The storages of a step of `program`, and the outputs of the call before that are held."""
        storages = storages_of(program)
        _leave_out_fused(program, storages, self)
        return storages, _hold_outputs(program, storages) if self.holds_outputs else []

    @property
    def copies_gathers(self) -> bool:
        """Whether each gathered parameter is copied out of the collective's buffer."""
        return self.runtime == "fsdp2"


OWN, FSDP2 = Runner(), Runner("fsdp2")


# -- storages --------------------------------------------------------------------------------------


def _leave_out_fused(program: Program, storages: Storages, runner: Runner) -> None:
    """Set the bytes of storages that compiled code does not have to 0, and extend others' lives.

    graphshard compiles forward and backward apart; otherwise backward may compute values again.
    """
    regions = compiled_regions(program, runner.leave_eager)
    fused: set[fx.Node] = set()
    for value, inside in _computed_in(regions):
        fused.add(operator_of(value))
        own = storages.of_node.get(value, ())
        if not read_outside(value, inside) and len(own) == 1 and own[0].node is operator_of(value):
            own[0].size, own[0].pieces = 0, ()
    if runner.copies_gathers:
        forward = [r for r in regions if r.nodes[0].meta["phase"] == FORWARD]
        for value, inside in _computed_in(forward):
            if read_outside(value, inside):
                _save_operands(value, inside, storages, fused)


def _computed_in(regions: Iterable[Region]) -> Iterator[tuple[fx.Node, set[fx.Node]]]:
    """Each value that fused kernels of `regions` compute, with the operators of its kernel."""
    for region in regions:
        for kernel in kernels_of(region):
            inside = set(kernel)
            yield from ((value, inside) for node in kernel for value in results_of(node))


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
    operands = [s for base in _operands(value, inside) for s in storages.of_node.get(base, ())]
    longer = [storage for storage in operands if storage.dies < own[0].dies]
    if sum(storage.size for storage in longer) < own[0].size:
        own[0].size, own[0].pieces = 0, ()
        for storage in longer:
            storage.dies, storage.ends = own[0].dies, own[0].ends


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


def _hold_outputs(program: Program, storages: Storages) -> list[Storage]:
    """Let outputs outlive their step, and return those of the step before.

    The variable of `outputs = model(**batch)` holds what a call returned until the next call
    returns. So in forward the outputs of two calls are alive.
    """
    backward = program.first_backward()
    outputs = [node for node in program.results().outputs if isinstance(node, fx.Node)]
    held = {id(s): s for node in outputs for s in storages.of_node.get(node, ())}
    before = []
    for storage in held.values():
        storage.dies, storage.ends = END, []
        last = storages.place[backward] - 1
        before.append(replace(storage, kind=RETURNED, born=0, dies=last, ends=[backward]))
    return before

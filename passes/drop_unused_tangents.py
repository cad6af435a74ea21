"""drop_unused_tangents: remove the work of backward for outputs that got no gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.errors import PassError
from graphshard.passes.release_early import ReleaseEarly
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import gather_waits, transfers_after
from graphshard.program.collective import begins_replay, device_of, generator_of
from graphshard.program.edit import insert_node, keep_operands, prune_gather
from graphshard.program.finite import values_of
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, REPLAYS, Program, signature
from graphshard.program.size_nodes import as_arguments
from graphshard.program.sizes import is_contiguous
from graphshard.torch_private.compat import same_sizes
from graphshard.torch_private.random_ops import may_draw

aten = torch.ops.aten


# Operators that use only the shape and dtype of their input, so they are not linear in it.
_ONLY_SHAPE = frozenset(
    {
        aten.empty_like,
        aten.full_like,
        aten.new_empty,
        aten.new_empty_strided,
        aten.new_full,
        aten.new_ones,
        aten.new_zeros,
        aten.ones_like,
        aten.rand_like,
        aten.randint_like,
        aten.randn_like,
        aten.zeros_like,
    }
)


@dataclass(frozen=True)
class DropUnusedTangents(Pass):
    """Specialise a finished program to outputs whose gradients are undefined.

    Backward is linear in the tangents: a node is zero if all its inputs that depend on a tangent
    are zero. As in autograd, such undefined gradients are not computed, added or reduced. Where an
    undefined gradient meets a defined one in an op other than a sum, zeros are inserted. A
    parameter whose gradient is zero gets None, and reduces and gathers without a reader are
    dropped; with the policy's `gather_unused` zeros are reduced. Forward does not change, and the
    unused tangents remain as placeholders.

    Args:
        unused: indices into `program.outputs` of the outputs without a gradient.
    """

    unused: frozenset[int]

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        tangents = {i: o.tangent for i, o in enumerate(program.outputs) if o.tangent is not None}
        wrong = sorted(self.unused - tangents.keys())
        if wrong:
            raise PassError(
                f"pass {self.name}: outputs {wrong} have no tangent; those that have one are "
                f"{sorted(tangents)}"
            )
        dropped = [tangents[index] for index in sorted(self.unused)]
        read = {node for node in program.nodes(BACKWARD) if node.users}
        released = [node for node in program.nodes(BACKWARD) if node.target is ops.release]
        for node in released:  # their last readers may be dropped
            program.graph.erase_node(node)
        zeros = _Zeros(program, set(tangents.values()), set(dropped))
        for node in list(program.nodes(BACKWARD)):
            zeros.visit(node)
        if plan.policy.gather_unused:
            zeros.reduce_all()
        _drop_results(program, zeros.zero)
        _erase_dead(program, read)
        for wait in list(gather_waits(program)):
            if wait.meta["phase"] == BACKWARD:
                prune_gather(wait)
        for tangent in dropped:
            if tangent.users:
                user = next(iter(tangent.users))
                raise PassError(
                    f"pass {self.name}: node {user.name} still reads {tangent.name}, the gradient "
                    "of an output that gets none"
                )
        if released:
            ReleaseEarly().apply(program, plan)


class _Zeros:
    """The values of backward that are zero, collected by visiting its nodes in order."""

    def __init__(self, program: Program, tangents: set[fx.Node], dropped: set[fx.Node]) -> None:
        self.program = program
        self.dependent = tangents  # values that depend on a tangent
        self.zero = dropped
        self._zeros_of: dict[fx.Node, fx.Node] = {}

    def visit(self, node: fx.Node) -> None:
        if not ops.is_compute(node) and not ops.is_transfer(node):
            return
        if node.target is ops.add_accumulated:  # the accumulated gradient is not zero
            for value in node.all_input_nodes:
                if value in self.zero:
                    node.replace_input_with(value, self._zeros(value, node))
            return
        linear_in = [value for value in node.all_input_nodes if value in self.dependent]
        zero = [value for value in linear_in if value in self.zero]
        if (
            linear_in
            and _holds_tensor(node.meta["val"])
            and getattr(node.target, "overloadpacket", None) not in _ONLY_SHAPE
        ):
            self.dependent.add(node)
            if len(zero) == len(linear_in) and not ops.has_effect(node):
                self.zero.add(node)
                return
        if not zero:
            return
        summand = _other_summand(node, self.zero)
        if summand is not None:
            node.replace_all_uses_with(summand)
            return
        for value in zero:
            node.replace_input_with(value, self._zeros(value, node))

    def reduce_all(self) -> None:
        """Reduce zeros in place of gradients that are zero, as other ranks may have others."""
        for reduce in [node for node in self.program.nodes(BACKWARD) if node.target in ops.REDUCES]:
            for value in reduce.all_input_nodes:
                if value in self.zero:
                    reduce.replace_input_with(value, self._zeros(value, reduce))

    def _zeros(self, value: fx.Node, before: fx.Node) -> fx.Node:
        """Zeros with the shape, strides, dtype and device of `value`."""
        if value not in self._zeros_of:
            val: Tensor = value.meta["val"]
            place = {"unit": before.meta["unit"], "phase": BACKWARD}
            dense = is_contiguous(val)
            options = {"dtype": val.dtype, "device": val.device}
            with self.program.graph.inserting_before(before):
                shape = as_arguments(self.program, val.shape, **place)
                strides = as_arguments(self.program, val.stride(), **place)
                size = val.shape if dense else [_elements(val)]
                zeros = insert_node(
                    self.program,
                    aten.zeros.default,
                    (as_arguments(self.program, size, **place),),
                    options,
                    name="undefined_zeros",
                    val=val if dense else val.new_zeros(size),
                    **place,
                )
                if not dense:
                    zeros = insert_node(
                        self.program,
                        aten.as_strided.default,
                        (zeros, shape, strides),
                        name="undefined_zeros",
                        val=val,
                        **place,
                    )
            self._zeros_of[value] = zeros
        return self._zeros_of[value]


def _elements(val: Tensor) -> Any:
    """The number of elements of the memory from the first to the last element of `val`."""
    if any(type(size) is int and size == 0 for size in val.shape):
        return 0
    return 1 + sum((n - 1) * s for n, s in zip(val.shape, val.stride(), strict=True))


def _other_summand(node: fx.Node, zero: set[fx.Node]) -> fx.Node | None:
    """The value that equals the sum `node`, if its other summand is zero; None if there is none."""
    if node.target is not aten.add.Tensor or node.kwargs.get("alpha", 1) != 1:
        return None
    left, right = node.args[:2]
    other = right if left in zero else left
    if not isinstance(other, fx.Node):
        return None
    sum_val, val = node.meta["val"], other.meta["val"]
    same = signature(val) == signature(sum_val) and same_sizes(val.stride(), sum_val.stride())
    return other if same else None


def _drop_results(program: Program, zero: set[fx.Node]) -> None:
    """Remove gradients that are zero from reduces and results."""
    results = program.results()
    results.input_grads = [None if grad in zero else grad for grad in results.input_grads]
    dropped: set[fx.Node] = set()
    partly: list[tuple[fx.Node, list[int]]] = []
    for reduce in [node for node in program.nodes(BACKWARD) if node.target in ops.REDUCES]:
        operands: list[Any] = reduce.args[0]  # type: ignore[assignment]
        keep = [i for i, grad in enumerate(operands) if grad not in zero and grad not in dropped]
        if len(keep) < len(operands):
            (wait,) = reduce.users
            for user in [user for user in wait.users if user.args[1] not in keep]:
                dropped.update((user, *transfers_after(user)))
            partly.append((wait, keep))
    _drop_checks(program, dropped | zero)
    for node in list(program.nodes(BACKWARD)):
        if node.target is ops.accumulate_grad and node.args[0] in zero:
            program.graph.erase_node(node)
    # The gradient of an ignored parameter is returned without a reduce.
    results.grads = [None if grad in dropped | zero else grad for grad in results.grads]
    program.set_results(results)
    for wait, keep in reversed(partly):  # readers of a reduced shard are erased before it
        erased = [user for user in wait.users if user in dropped]
        erased += [transfer for node in erased for transfer in transfers_after(node)]
        for node in sorted(erased, reverse=True):
            program.graph.erase_node(node)
        if keep:
            keep_operands(wait, keep)
        else:
            reduce = ops.collective_of(wait)
            program.graph.erase_node(wait)
            program.graph.erase_node(reduce)
            # The transfers of its operands are zero; `_erase_dead` erases them.


def _drop_checks(program: Program, gone: set[fx.Node]) -> None:
    """Remove the values `gone` from the checks for NaN, and checks that are left with none."""
    for node in reversed([node for node in program.nodes(BACKWARD) if node.target in ops.CHECKS]):
        kept = [value for value in values_of(node) if value not in gone]
        if node.target is ops.report_finite:
            kept = [check for check in kept if not gone.issuperset(values_of(check))]
        if len(kept) == len(values_of(node)):
            continue
        if kept or node.target is ops.report_finite:
            node.args = (kept,)
        else:
            program.graph.erase_node(node)


def _erase_dead(program: Program, read: set[fx.Node]) -> None:
    """Erase unread compute of backward, except nodes that write, and draws that were never `read`.

    Autograd does not call the backward that made a draw which is no longer read. The last draws
    done again are erased, as no other needs the state that they leave; and where none is left, so
    are the nodes that set the generator's state.
    """
    puts_back: dict[str, fx.Node] = {}  # by type of device, behind the draws visited
    for node in reversed(list(program.nodes(BACKWARD))):
        erasable = ops.is_compute(node) or ops.is_transfer(node)
        if begins_replay(node):
            last = puts_back.pop(device_of(node), None)
            if last is not None:
                program.graph.erase_node(last)
                program.graph.erase_node(node)
        elif node.target is ops.set_random_state:
            puts_back[device_of(node)] = node
        elif erasable and may_draw(node) and REPLAYS in node.meta:
            device = generator_of(program, node)
            if node.users:
                puts_back.pop(device, None)
            elif device in puts_back:
                program.graph.erase_node(node)
        elif erasable and not node.users and node.target is not ops.touch:
            unread_now = ops.is_random(node) and node in read and not ops.writes(node)
            if unread_now or not ops.has_effect(node):
                program.graph.erase_node(node)


def _holds_tensor(val: Any) -> bool:
    if isinstance(val, (tuple, list)):
        return any(map(_holds_tensor, val))
    return isinstance(val, Tensor)

"""precision: shards are cast before they are gathered, gradients to what they are reduced in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import cast_dtype, gather_waits, unpacks
from graphshard.program.collective import params_of
from graphshard.program.edit import fake_as, insert_node
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import Program


@dataclass(frozen=True)
class Precision(Pass):
    """Move the casts of mixed precision to where they save bytes.

    Capture cast the full parameter after it is gathered; here its shard is cast before, so that
    half the bytes travel. A gradient is cast to what the plan reduces it in right before it is
    reduced, and its shard, or the whole where that stays replicated, to the dtype the optimizer is
    to find after that.
    """

    establishes: ClassVar[Stage] = Stage.CAST

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: a parameter is read in a dtype other than the plan says.
        """
        if plan.precisions is None:
            return
        for wait in list(gather_waits(program)):
            _Gather(program, plan, wait).rewrite()
        reduces = [node for node in program.nodes() if node.target in ops.REDUCES]
        for reduce in reduces:
            _cast_operands(program, plan, reduce)
        _cast_results(program, plan)
        self._check(program, plan)

    def _check(self, program: Program, plan: ShardingPlan) -> None:
        for node in program.nodes():
            if not ops.is_collective(node):
                continue
            gathers = node.target is ops.all_gather
            for name, operand in _operands(node).items():
                layout = plan.layouts[name]
                wanted = layout.compute_dtype if gathers else layout.reduce_dtype
                found = operand.meta["val"].dtype
                if found != wanted:
                    raise PassError(
                        f"pass {self.name}: {node.name} moves {name!r} in {found}; the plan says "
                        f"{wanted}"
                    )
        for param, grad in zip(program.params, program.results().grads, strict=True):
            wanted = plan.layouts[param.fqn].grad_dtype
            if isinstance(grad, fx.Node) and grad.meta["val"].dtype != wanted:
                raise PassError(
                    f"pass {self.name}: the gradient of {param.fqn!r} is returned in "
                    f"{grad.meta['val'].dtype}; the plan says {wanted}"
                )


@dataclass
class _Gather:
    """The rewrite of one gather, which `wait` ends."""

    program: Program
    plan: ShardingPlan
    wait: fx.Node

    def rewrite(self) -> None:
        gather = ops.collective_of(self.wait)
        shards = _operands(gather)
        values = list(self.wait.meta["val"])
        for full in unpacks(self.wait):
            index: int = full.args[1]  # type: ignore[assignment]
            name = list(shards)[index]
            dtype = self.plan.layouts[name].compute_dtype
            if full.meta["val"].dtype == dtype:
                continue
            values[index] = self._cast_no_more(full, name, dtype)
            if shards[name].meta["val"].dtype != dtype:
                shards[name] = _inserted_cast(
                    self.program, shards[name], dtype, name, gather, before=gather
                )
        self.wait.meta["val"] = values
        gather.args = (list(shards.values()),)

    def _cast_no_more(self, full: fx.Node, name: str, dtype: torch.dtype) -> Any:
        """Let who read the cast of `full` read `full`; its new value."""
        casts = [user for user in full.users if cast_dtype(user) == dtype]
        parts = [user for user in full.users if user.target is ops.reshard]
        others = [user.name for user in full.users if user not in casts and user not in parts]
        if others:
            raise PassError(
                f"{others[0]} reads parameter {name!r} in {full.meta['val'].dtype}, which the plan "
                f"computes in {dtype}; read its cast"
            )
        for cast in casts:
            cast.replace_all_uses_with(full)
            self.program.graph.erase_node(cast)
        for node in (full, *parts):  # parts are kept as they were gathered
            node.meta["val"] = fake_as(node.meta["val"], dtype)
        return full.meta["val"]


def _inserted_cast(
    program: Program,
    tensor: fx.Node,
    dtype: torch.dtype,
    param: str,
    collective: fx.Node,
    before: fx.Node,
) -> fx.Node:
    """`tensor`, of `param`, cast to `dtype` before the node `before`, for `collective`."""
    unit = collective.meta["unit"]
    with program.graph.inserting_before(before):
        return insert_node(
            program,
            ops.cast,
            (tensor,),
            {"dtype": dtype, "unit": unit, "param": param},
            name=f"{param}_{str(dtype).removeprefix('torch.')}_cast",
            unit=unit,
            phase=collective.meta["phase"],
            val=fake_as(tensor.meta["val"], dtype),
        )


def _operands(collective: fx.Node) -> dict[str, fx.Node]:
    """The operands of a collective by parameter, in order."""
    operands: list[fx.Node] = collective.args[0]  # type: ignore[assignment]
    params = params_of(collective)
    return dict(zip(params, operands, strict=True))


def _cast_operands(program: Program, plan: ShardingPlan, reduce: fx.Node) -> None:
    """Reduce in the plan's dtype: the gradient as it was computed, cast if that is another."""
    (wait,) = reduce.users
    grads = _operands(reduce)
    for name, grad in grads.items():
        wanted = plan.layouts[name].reduce_dtype
        computed = grad
        if cast_dtype(grad) is not None and grad.target is not ops.cast:
            source: fx.Node = grad.args[0]  # type: ignore[assignment]
            if source.meta["val"].dtype == plan.layouts[name].compute_dtype:
                computed = source
        if computed.meta["val"].dtype != wanted:
            computed = _inserted_cast(program, computed, wanted, name, reduce, before=reduce)
        grads[name] = computed
    was: list[fx.Node] = reduce.args[0]  # type: ignore[assignment]
    reduce.args = (list(grads.values()),)
    for grad in was:
        if not grad.users:
            program.graph.erase_node(grad)
    vals = [
        fake_as(val, grad.meta["val"].dtype)
        for val, grad in zip(wait.meta["val"], grads.values(), strict=True)
    ]
    wait.meta["val"] = vals
    for picked in unpacks(wait):
        picked.meta["val"] = vals[picked.args[1]]  # type: ignore[index]


def _cast_results(program: Program, plan: ShardingPlan) -> None:
    """Return each reduced gradient in the dtype the optimizer is to find."""
    results = program.results()
    for index, param in enumerate(program.params):
        grad = results.grads[index]
        wanted = plan.layouts[param.fqn].grad_dtype
        if not isinstance(grad, fx.Node) or grad.meta["val"].dtype == wanted:
            continue
        after = grad.next
        while ops.is_unpack(after) or ops.is_transfer(after):
            after = after.next
        reduce = ops.collective_of(grad)
        results.grads[index] = _inserted_cast(program, grad, wanted, param.fqn, reduce, after)
    program.set_results(results)

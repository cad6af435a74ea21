"""precision: cast shards before their gather, and gradients before and after their reduce."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from graphshard.errors import PassError, PolicyError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import (
    cast_dtype,
    gather_waits,
    storage_root,
    tensor_inputs,
    unpacks,
)
from graphshard.program.collective import params_of
from graphshard.program.edit import fake_as, insert_node
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import Program

aten = torch.ops.aten


@dataclass(frozen=True)
class Precision(Pass):
    """Move the casts of mixed precision to where they save bytes.

    The captured program casts the full parameter behind its gather. This pass casts the shard
    before the gather instead, so half the bytes are sent. A gradient is cast to the plan's reduce
    dtype right before its reduce, and the result to the dtype that the optimizer expects right
    behind it.
    """

    establishes: ClassVar[Stage] = Stage.CAST

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        if plan.precisions is None:
            return
        _require_equal_dtypes(program, plan)
        for wait in list(gather_waits(program)):
            _gather_cast(program, plan, wait)
        reduces = [node for node in program.nodes() if node.target in ops.REDUCES]
        for reduce in reduces:
            _cast_operands(program, plan, reduce)
        _cast_results(program, plan)


# Torch's fake kernels let these take operands of two dtypes; the real ones do not.
_PRODUCTS = frozenset(
    {
        aten.addbmm,
        aten.addmm,
        aten.addmv,
        aten.baddbmm,
        aten.bmm,
        aten.convolution,
        aten.linear,
        aten.mm,
        aten.mv,
    }
)


def _require_equal_dtypes(program: Program, plan: ShardingPlan) -> None:
    """Check that no ignored parameter, which is not cast, meets values of another dtype."""
    ignored = {entry.node: entry.fqn for entry in program.params if plan.layouts[entry.fqn].ignored}
    for node in program.nodes() if ignored else ():
        if getattr(node.target, "overloadpacket", None) not in _PRODUCTS:
            continue
        operands = tensor_inputs(node)
        dtypes = {value.meta["val"].dtype for value in operands}
        names = [ignored[root] for root in map(storage_root, operands) if root in ignored]
        if names and len(dtypes) > 1:
            raise PolicyError(
                f"mixed_precision: {node.target} in {node.meta.get('fqn') or 'the root'} takes "
                f"operands in {' and '.join(sorted(map(str, dtypes)))}, which torch refuses; among "
                f"them is {', '.join(map(repr, names))}, which `ignored` keeps out of mixed "
                "precision; cast the inputs of that module in its forward, or ignore no parameter "
                "of it"
            )


def _gather_cast(program: Program, plan: ShardingPlan, wait: fx.Node) -> None:
    """Cast shards before the gather that `wait` ends, instead of its results behind it."""
    gather = ops.collective_of(wait)
    shards = _operands(gather)
    values = list(wait.meta["val"])
    for full in unpacks(wait):
        index: int = full.args[1]  # type: ignore[assignment]
        name = list(shards)[index]
        dtype = plan.layouts[name].compute_dtype
        if full.meta["val"].dtype == dtype:
            continue
        values[index] = _drop_cast(full, name, dtype)
        if shards[name].meta["val"].dtype != dtype:
            shards[name] = _insert_cast(program, shards[name], dtype, name, gather, before=gather)
    wait.meta["val"] = values
    gather.args = (list(shards.values()),)


def _drop_cast(full: fx.Node, name: str, dtype: torch.dtype) -> Any:
    """Redirect readers of the cast of `full` to `full`; returns its FakeTensor in `dtype`."""
    casts = [user for user in full.users if cast_dtype(user) == dtype]
    parts = [user for user in full.users if user.target is ops.reshard]
    touches = [user for user in full.users if user.target is ops.touch]
    others = full.users.keys() - {*casts, *parts, *touches}
    if others:
        raise PassError(
            f"{min(others).name} reads parameter {name!r} in {full.meta['val'].dtype}, which the "
            f"plan computes in {dtype}; read its cast"
        )
    for cast in casts:
        cast.replace_all_uses_with(full)
        full.graph.erase_node(cast)
    for node in (full, *parts):  # parts have the dtype of the gather
        node.meta["val"] = fake_as(node.meta["val"], dtype)
    return full.meta["val"]


def _insert_cast(
    program: Program,
    tensor: fx.Node,
    dtype: torch.dtype,
    param: str,
    collective: fx.Node,
    before: fx.Node,
) -> fx.Node:
    """Insert a cast of `tensor`, the shard or gradient of `param`, before the node `before`."""
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
    """Reduce gradients in the plan's dtype, cast from the dtype they were computed in."""
    (wait,) = reduce.users
    grads = _operands(reduce)
    for name, grad in grads.items():
        dtype = plan.layouts[name].reduce_dtype
        computed = grad
        if cast_dtype(grad) is not None and grad.target is not ops.cast:
            source: fx.Node = grad.args[0]  # type: ignore[assignment]
            if source.meta["val"].dtype == plan.layouts[name].compute_dtype:
                computed = source
        if computed.meta["val"].dtype != dtype:
            computed = _insert_cast(program, computed, dtype, name, reduce, before=reduce)
        grads[name] = computed
    old_operands: list[fx.Node] = reduce.args[0]  # type: ignore[assignment]
    reduce.args = (list(grads.values()),)
    for grad in old_operands:
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
    """Cast each reduced gradient to the dtype that the optimizer expects."""
    results = program.results()
    for index, param in enumerate(program.params):
        grad = results.grads[index]
        dtype = plan.layouts[param.fqn].grad_dtype
        if not isinstance(grad, fx.Node) or grad.meta["val"].dtype == dtype:
            continue
        after = grad.next
        while ops.is_unpack(after) or ops.is_transfer(after):
            after = after.next
        reduce = ops.collective_of(grad)
        results.grads[index] = _insert_cast(program, grad, dtype, param.fqn, reduce, after)
    program.set_results(results)

"""The plan that a rewritten program shows: which parameters are sharded, over what, in which units.

For a program that stands alone. Its placeholders say what a rank stores, its collectives which
parameters go together, and its table of parameters what their full shapes are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphshard.planning.layout import ParamLayout, Unit
from graphshard.planning.options import UnitOptions
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.base import Policy
from graphshard.policy.placement import IGNORED, REPLICATED, SHARDED
from graphshard.policy.precision import MixedPrecision
from graphshard.program import ops
from graphshard.program.collective import Collective, operands_of, param_of
from graphshard.program.program import ParamEntry, Program


class PolicyOfProgram(Policy):
    """What of a policy a program shows: what lies on the host. Its other fields mean nothing."""


def plan_of(program: Program) -> ShardingPlan:
    """The sharding plan of `program`, rewritten or just captured (then nothing is sharded).

    Its policy is a `PolicyOfProgram`: which options led to the program cannot be read off it.
    """
    served = {name: use for use in map(_Use, _collectives(program)) for name in use.params}
    gathered = {
        name: use
        for use in map(_Use, _collectives(program))
        if use.node.target is ops.all_gather
        for name in use.params
    }
    owned: dict[str, list[ParamLayout]] = {"": []}
    ignored: list[ParamLayout] = []
    for param in program.params:
        layout = _layout(param, program, served.get(param.fqn), gathered.get(param.fqn))
        if layout.ignored:
            ignored.append(layout)
        else:
            use = served.get(param.fqn)
            owned.setdefault(use.unit[param.fqn] if use else "", []).append(layout)
    options = _options(program)
    units = tuple(
        Unit(fqn, "", tuple(layouts), options.get(fqn, UnitOptions()))
        for fqn, layouts in owned.items()
    )
    copied = [node for node in program.nodes() if node.target in ops.COPIES]
    offload = {"activations" if param_of(n) is None else "params" for n in copied}
    return ShardingPlan(
        units,
        PolicyOfProgram(offload=frozenset(offload) or None),
        program.world_size,
        program.mesh_shape,
        program=program,
        ignored=tuple(ignored),
    )


class _Use:
    """A collective, and the parameters it serves."""

    def __init__(self, node: fx.Node) -> None:
        collective = Collective.of(node)
        self.node = node
        self.params = collective.params
        self.in_place = collective.in_place
        self.unit = dict(zip(self.params, collective.units, strict=True))
        self.dim = dict(zip(self.params, collective.dims, strict=True))
        self.dtype = {
            name: operand.meta["val"].dtype
            for name, operand in zip(self.params, operands_of(node), strict=True)
        }


def _collectives(program: Program) -> Iterator[fx.Node]:
    return (node for node in program.nodes() if ops.is_collective(node))


def _layout(
    param: ParamEntry, program: Program, served: _Use | None, gathered: _Use | None
) -> ParamLayout:
    stored: torch.Tensor = param.node.meta["val"]
    scattered = served is not None and ops.is_scatter(served.node)
    sharded = gathered is not None or scattered
    whole = tuple(stored.shape) == param.shape
    resident = sharded and (
        gathered.in_place if gathered is not None else whole and program.shard_size > 1
    )
    computed = None if gathered is None else gathered.dtype[param.fqn]
    reduced = None if served is None else served.dtype[param.fqn]
    precision = MixedPrecision(
        param_dtype=computed if computed != param.dtype else None,
        reduce_dtype=reduced if param.requires_grad else None,
    )
    use = gathered or served
    placement = IGNORED if param.ignored else SHARDED if sharded else REPLICATED
    return ParamLayout(
        fqn=param.fqn,
        names=param.names,
        shape=param.shape,
        dtype=param.dtype,
        requires_grad=param.requires_grad,
        placement=placement,
        world_size=program.shard_size,
        dim=use.dim[param.fqn] if use is not None and sharded else 0,
        resident=resident,
        precision=precision if param.dtype.is_floating_point else None,
    )


def _options(program: Program) -> dict[str, UnitOptions]:
    """By unit, the groups of ranks that keep it in parts after forward."""
    found: dict[str, UnitOptions] = {}
    for node in _collectives(program):
        collective = Collective.of(node)
        if collective.ranks is not None:
            found[collective.unit] = UnitOptions(reshard=collective.ranks)
    return found

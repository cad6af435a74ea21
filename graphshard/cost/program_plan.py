"""Read a sharding plan off a rewritten program that has none.

Placeholders say what a rank stores, collectives which parameters form a unit, and the table of
parameters their full shapes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from graphshard.planning.layout import ParamLayout, Unit, UnitOptions
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.base import Policy
from graphshard.policy.placement import IGNORED, REPLICATED, SHARDED
from graphshard.policy.precision import MixedPrecision
from graphshard.program import ops
from graphshard.program.collective import Collective, operands_of, param_of
from graphshard.program.program import ParamEntry, Program


class PolicyOfProgram(Policy):
    """The policy of a plan read off a program. Only `offload` is meaningful."""


def plan_of(program: Program) -> ShardingPlan:
    """The sharding plan of `program`; in a captured program no parameter is sharded.

    Its policy is a `PolicyOfProgram`, as the options that led to the program cannot be read off it.
    """
    every = [_Served(node) for node in _collectives(program)]
    by_param = {name: served for served in every for name in served.params}
    gathers = {
        name: served
        for served in every
        if served.node.target is ops.all_gather
        for name in served.params
    }
    by_unit: dict[str, list[ParamLayout]] = {"": []}
    ignored: list[ParamLayout] = []
    for param in program.params:
        layout = _layout(param, program, by_param.get(param.fqn), gathers.get(param.fqn))
        if layout.ignored:
            ignored.append(layout)
        else:
            served = by_param.get(param.fqn)
            by_unit.setdefault(served.unit[param.fqn] if served else "", []).append(layout)
    options = _options(program)
    units = tuple(
        Unit(fqn, "", tuple(layouts), options.get(fqn, UnitOptions()))
        for fqn, layouts in by_unit.items()
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


class _Served:
    """A collective and the parameters it gathers or whose gradients it reduces."""

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
    param: ParamEntry, program: Program, served: _Served | None, gather: _Served | None
) -> ParamLayout:
    """The layout of a parameter, by its last collective (`served`) and its all_gather."""
    stored: torch.Tensor = param.node.meta["val"]
    scattered = served is not None and ops.is_scatter(served.node)
    sharded = gather is not None or scattered
    whole = tuple(stored.shape) == param.shape
    resident = sharded and (
        gather.in_place if gather is not None else whole and program.shard_size > 1
    )
    param_dtype = None if gather is None else gather.dtype[param.fqn]
    reduce_dtype = None if served is None else served.dtype[param.fqn]
    precision = MixedPrecision(
        param_dtype=param_dtype if param_dtype != param.dtype else None,
        reduce_dtype=reduce_dtype if param.requires_grad else None,
    )
    collective = gather or served
    placement = IGNORED if param.ignored else SHARDED if sharded else REPLICATED
    return ParamLayout(
        fqn=param.fqn,
        names=param.names,
        shape=param.shape,
        dtype=param.dtype,
        requires_grad=param.requires_grad,
        placement=placement,
        world_size=program.shard_size,
        dim=collective.dim[param.fqn] if collective is not None and sharded else 0,
        resident=resident,
        precision=precision if param.dtype.is_floating_point else None,
    )


def _options(program: Program) -> dict[str, UnitOptions]:
    """The options of each unit that is resharded over smaller groups of ranks."""
    options: dict[str, UnitOptions] = {}
    for node in _collectives(program):
        collective = Collective.of(node)
        if collective.ranks is not None:
            options[collective.unit] = UnitOptions(reshard=collective.ranks)
    return options

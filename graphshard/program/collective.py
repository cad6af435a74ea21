"""Typed access to the arguments of vocabulary nodes, and the insertion of collectives.

No other module reads these arguments by name.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from graphshard.policy.placement import Along
from graphshard.program import ops
from graphshard.program.ops import OPS, Op
from graphshard.program.program import Program
from graphshard.torch_private.random_ops import drawn_on


@dataclass(frozen=True)
class Collective:
    """The arguments of a collective's node; see `graphshard.program.ops` for each.

    `named_group` is None if the node names no group; `unit`, with several, is that of the first
    operand. `params`, `units` and `dims` have one entry for each operand.
    """

    target: Any
    unit: str
    params: tuple[str, ...]
    named_group: str | None = None
    ranks: int | None = None
    units: tuple[str, ...] = ()
    dims: tuple[Along, ...] = ()
    in_place: bool = False

    def __post_init__(self) -> None:
        operands = len(self.params or ())
        if not self.units:
            object.__setattr__(self, "units", (self.unit,) * operands)
        if not self.dims:
            object.__setattr__(self, "dims", (0,) * operands)

    @classmethod
    def of(cls, node: fx.Node) -> Collective:
        """Read the arguments of the collective `node`; a missing required one is None."""
        arguments: dict[str, Any] = {"unit": None, "params": None, **node.kwargs}
        return cls(node.target, named_group=arguments.pop("group", None), **arguments)

    @property
    def op(self) -> Op:
        """The op in the vocabulary."""
        return OPS[self.target]

    @property
    def group(self) -> str:
        """The group that it joins; "shard" by default."""
        return self.named_group or ops.SHARD

    @property
    def several_units(self) -> bool:
        """Whether its operands belong to more than one unit."""
        return len(set(self.units)) > 1

    @property
    def kwargs(self) -> dict[str, Any]:
        """The keyword arguments of its node, without defaults."""
        written: dict[str, Any] = {"unit": self.unit, "params": self.params}
        if self.named_group is not None:
            written["group"] = self.named_group
        if self.ranks is not None:
            written["ranks"] = self.ranks
        if self.several_units:
            written["units"] = self.units
        if any(self.dims):
            written["dims"] = self.dims
        if self.in_place:
            written["in_place"] = True
        return written

    def pick(self, indices: Iterable[int]) -> Collective:
        """The same collective of only the operands at `indices`."""
        chosen = list(indices)
        units = tuple(self.units[index] for index in chosen)
        return replace(
            self,
            params=tuple(self.params[index] for index in chosen),
            dims=tuple(self.dims[index] for index in chosen),
            unit=units[0],
            units=units,
        )

    def __add__(self, other: Collective) -> Collective:
        """A collective of the operands of both."""
        return replace(
            self,
            params=self.params + other.params,
            units=self.units + other.units,
            dims=self.dims + other.dims,
        )


GRADIENT, SHARD = "gradient", "shard"
"""What is accumulated: full gradients before their reduce, or reduced shards."""


Mode = tuple[str | None, tuple[str, ...], tuple[str, ...]]
"""The mode of accumulation of a program.

The kind of gradient it accumulates (None: it reduces), the FQNs whose accumulated full gradients
it adds to its own, and the FQNs whose accumulated shards it adds.
"""


REDUCED: Mode = (None, (), ())


@dataclass(frozen=True)
class OneTensor:
    """The arguments of a node that takes one tensor: transfers, `accumulate_grad` and `reshard`.

    `param` is the parameter whose shard or gradient it takes; None for an activation.
    `accumulated_as` is GRADIENT or SHARD; `dtype` is of a cast, `ranks` of a reshard.
    """

    target: Any
    unit: str
    param: str | None
    dtype: torch.dtype | None = None
    accumulated_as: str | None = None
    ranks: int | None = None

    @classmethod
    def of(cls, node: fx.Node) -> OneTensor:
        """Read the arguments of `node`; a missing required one is None."""
        arguments: dict[str, Any] = {"unit": None, "param": None, **node.kwargs}
        return cls(node.target, accumulated_as=arguments.pop("of", None), **arguments)


def fault_in(node: fx.Node) -> str | None:
    """Describe the fault in the arguments of a vocabulary node; None if there is none."""
    arguments = node.kwargs
    if not ops.is_collective(node):
        param = arguments.get("param", 0)
        named = isinstance(arguments.get("unit"), str) and (param is None or isinstance(param, str))
        return None if named else f"{ops.op_name(node)} must say its unit and its param"
    unit, params = arguments.get("unit"), arguments.get("params")
    if not isinstance(unit, str) or not isinstance(params, (tuple, list)):
        return "a collective must say its unit and its params"
    operands = operands_of(node)
    if not operands or len(operands) != len(params):
        return f"{len(operands)} operands for {len(params)} parameters"
    units = arguments.get("units", (unit,) * len(params))
    if not isinstance(units, (tuple, list)) or len(units) != len(params) or unit != units[0]:
        return "a collective of several units names one per parameter"
    return None


def param_of(node: fx.Node) -> str | None:
    """FQN of the parameter that a node of one tensor names; None if it names none."""
    name: Any = node.kwargs.get("param")
    return name if isinstance(name, str) else None


def params_of(collective: fx.Node) -> tuple[str, ...]:
    """FQNs of the parameters that a collective moves, one for each operand."""
    names: Any = collective.kwargs["params"]
    return tuple(names)


def operands_of(collective: fx.Node) -> list[fx.Node]:
    """The operands of a collective, in the order of its parameters."""
    operands: Any = collective.args[0]
    return list(operands)


def wait_of(collective: fx.Node) -> fx.Node:
    """The `wait` that ends a collective."""
    return next(user for user in collective.users if user.target is ops.wait)


def insert_collective(
    program: Program,
    collective: Collective,
    operands: Sequence[fx.Node],
    vals: Sequence[Any],
    *,
    issue: fx.Node,
    wait: fx.Node,
    phase: str,
) -> tuple[fx.Node, list[fx.Node]]:
    """Insert a collective before `issue`, and its wait and picked results before `wait`.

    `vals` are the results as FakeTensors, one for each operand. Returns the wait and the results.
    """
    label, gathers = collective.unit or "root", collective.op.gathers
    whole, each = ("full", "full") if gathers else ("reduced", "grad")

    def node(before: fx.Node, target: Any, args: Any, kwargs: Any, name: str, val: Any) -> fx.Node:
        with program.graph.inserting_before(before):
            new = program.graph.create_node("call_function", target, args, kwargs, name=name)
        new.meta.update(val=val, phase=phase, fqn=collective.unit, unit=collective.unit)
        return new

    name = f"{label}_{collective.op.name}"
    launched = node(issue, collective.target, (list(operands),), collective.kwargs, name, None)
    waited = node(wait, ops.wait, (launched,), {}, f"{label}_{whole}", list(vals))
    results = [
        node(wait, operator.getitem, (waited, index), {}, f"{param}_{each}", val)
        for index, (param, val) in enumerate(zip(collective.params, vals, strict=True))
    ]
    return waited, results


def generator_of(program: Program, draw: fx.Node) -> str:
    """The type of the device, "cpu" or "cuda", from whose generator `draw` draws when it runs."""
    traced = drawn_on(draw)
    if traced == torch.device(program.capture_device).type:
        return torch.device(program.device).type
    return traced


def device_of(node: fx.Node) -> str:
    """The type of the device whose generator a node saves or sets."""
    return str(node.kwargs.get("device"))


def begins_replay(node: fx.Node) -> bool:
    """Whether `node` sets a state that forward saved, so that what follows draws again."""
    if node.target is not ops.set_random_state or not node.args:
        return False
    state = node.args[0]
    return isinstance(state, fx.Node) and state.target is ops.save_random_state

"""The vocabulary: the communication ops that passes insert into a program and the runtime executes.

In a program an op is the `target` of a `call_function` node. Lowering replaces it by an operation
that is bound to its unit, so calling one of these functions directly raises an error.

A collective takes a list of operands, one for each parameter, and these keyword arguments:

    unit      FQN of the unit that it serves ("" is the root)
    params    FQNs of the parameters, one for each operand
    group     the ranks that take part; omitted for "shard"
                "shard"      the ranks along the last dimension of the mesh: all, if it has only one
                "replicate"  the ranks along the first dimension, which hold equal shards
                "all"        every rank of the mesh
                "reshard"    `ranks` neighbours within the "shard" group (all_gather only)
    ranks     size of a "reshard" group
    dims      what each parameter is split along, an `Along` for each operand; omitted if all are 0
    units     FQN of the unit of each operand; omitted if all are `unit`, which is the first of them
    in_place  True for a gather that refreshes the whole copies which ranks keep (SHARD_OPTIMIZER).
              Shards lie in the memory of these copies, never freed. Omitted for new buffers

The collective returns a pending value, its `wait` returns the list of results, and `getitem` nodes
pick single tensors from that list.

Shapes, for a group of W ranks and a parameter of shape (d0, d1, ...):

    full    (d0, d1, ...)             the parameter itself, or its gradient
    shard   (ceil(d0 / W), d1, ...)   the part of one rank, padded if it is smaller

A parameter split along another dim k has shards (d0, ..., ceil(dk / W), ...), one along two dims
has both cut. Then the `wait` of a gather copies the full tensors out of the communication buffer
and drops the buffer, and a reduce sends a copy of the gradients, arranged by rank.

A transfer changes the dtype or the device of one tensor: of a parameter's shard before a gather, of
a gradient before or after a reduce, or of an activation between forward and backward. It carries
`unit` and `param` (None for an activation). The full chains are:

    shard       placeholder -> to_device -> arrive -> cast -> all_gather
    gradient    full gradient -> cast -> reduce_scatter -> wait -> cast -> to_host -> arrive
    activation  computed -> to_host -> arrive -> saved for backward -> to_device -> arrive -> used

Checks look at values and change none. A `check_finite` returns one number, which only the program's
`report_finite`, its last node, reads.

A region that is recomputed draws its random numbers again. Forward saves the state that the
generator has before the first of them; in backward the generator is put into that state, the
operators draw, and the generator is put back:

    forward     state = save_random_state(device="cpu"); the region's draws
    backward    present = set_random_state(state); the same draws; set_random_state(present)
"""

from __future__ import annotations

import enum
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, fx

from graphshard.errors import GraphshardError
from graphshard.program.sizes import check_sizes
from graphshard.torch_private.random_ops import is_random as is_random

_F = TypeVar("_F", bound=Callable[..., Any])

SHARD, REPLICATE, ALL, RESHARD = "shard", "replicate", "all", "reshard"
"""The groups a collective may name."""

"""The operators of a reduce."""


class Kind(enum.Enum):
    """The kind of an op; passes, checks and the runtime treat ops of one kind alike."""

    COLLECTIVE = "moves data between ranks"
    WAIT = "ends a collective"
    FREE = "frees storage"
    TRANSFER = "changes the dtype or device of one tensor, or adds to it"
    COPY = "a transfer between host and device"
    PART = "copies this rank's part of a gathered parameter"
    ACCUMULATE = "adds to the gradients accumulated on this rank"
    CHECK = "looks at values and changes none"
    RANDOM = "reads or sets the state of a generator of random numbers"


class Value(enum.Enum):
    """The shape of a collective's operand or result, by the layout of its parameter."""

    FULL = "the shape of the parameter itself"
    SHARD = "the padded part of one rank; the whole tensor, if the parameter is replicated"


@dataclass(frozen=True)
class Op:
    """One op of the vocabulary, with the traits that dumps, cost, checks and lowering read.

    Attributes:
        target: the function that nodes call.
        kind: see `Kind`.
        takes: shape of each operand, for a collective.
        gives: shape of each result, for a collective.
        moves: for a collective or a report, the backend's collective that moves its bytes and sets
            its time: "all_gather", "reduce_scatter" or "all_reduce".
        groups: the groups that it may join, if the mesh has them.
        streams_bytes: it runs on the compute stream, bound by memory bandwidth.
        drawn_as: the Graphviz shape of its nodes in a drawn schedule.
    """

    target: Callable[..., Any]
    kind: Kind
    takes: Value | None = None
    gives: Value | None = None
    moves: str = ""
    groups: frozenset[str] = frozenset()
    streams_bytes: bool = False
    drawn_as: str = "ellipse"

    @property
    def name(self) -> str:
        """The name that schedules, dumps and errors show."""
        return self.target.__name__

    @property
    def is_transfer(self) -> bool:
        """Whether it casts, copies or adds to one tensor, as part of a chain of transfers."""
        return self.kind in (Kind.TRANSFER, Kind.COPY)

    @property
    def gathers(self) -> bool:
        """Whether it gathers shards into full parameters."""
        return self.takes is Value.SHARD and self.gives is Value.FULL

    @property
    def scatters(self) -> bool:
        """Whether it averages full gradients and returns the shard of this rank."""
        return self.takes is Value.FULL and self.gives is Value.SHARD

    @property
    def reduces(self) -> bool:
        """Whether it averages gradients over ranks."""
        return self.kind is Kind.COLLECTIVE and not self.gathers

    @property
    def in_runs(self) -> bool:
        """Whether consecutive nodes of this op in one unit form one event of a schedule."""
        return self.is_transfer or self.kind in (Kind.PART, Kind.ACCUMULATE, Kind.CHECK)


OPS: dict[Any, Op] = {}
"""The vocabulary, by the function that nodes call."""


def _op(kind: Kind, **traits: Any) -> Callable[[_F], _F]:
    """Add the decorated function to the vocabulary; its parameters are the op's arguments."""

    def enter(function: _F) -> _F:
        function.__module__ = "graphshard.ops"  # as dumped code imports it
        OPS[function] = Op(function, kind, **traits)
        # fx drops nodes whose result nobody reads, such as every free, unless they have a side
        # effect. An unread transfer may be dropped.
        if not OPS[function].is_transfer:
            fx.node.has_side_effect(function)
        return function

    return enter


def _only_in_graphs(name: str) -> NoReturn:
    raise GraphshardError(
        f"graphshard.ops.{name} names a node of a program and cannot be called by itself; "
        "run the program through graphshard.compile(...)"
    )


@_op(
    Kind.COLLECTIVE,
    takes=Value.SHARD,
    gives=Value.FULL,
    moves="all_gather",
    groups=frozenset({SHARD, RESHARD}),
)
def all_gather(
    shards: Sequence[Tensor],
    *,
    unit: str,
    params: tuple[str, ...],
    group: str = SHARD,
    ranks: int | None = None,
) -> Any:
    """Start gathering `shards`, each `(ceil(d0/W), ...)`, over the group.

    Returns a pending value; its `wait` returns the full tensors, each `(d0, ...)`.
    """
    _only_in_graphs("all_gather")


@_op(
    Kind.COLLECTIVE,
    takes=Value.FULL,
    gives=Value.SHARD,
    moves="reduce_scatter",
    groups=frozenset({SHARD}),
)
def reduce_scatter(
    grads: Sequence[Tensor],
    *,
    unit: str,
    params: tuple[str, ...],
    group: str = SHARD,
) -> Any:
    """Start averaging full gradients, each `(d0, ...)`, over the group.

    Returns a pending value; its `wait` returns this rank's shards, each `(ceil(d0/W), ...)`.
    """
    _only_in_graphs("reduce_scatter")


@_op(
    Kind.COLLECTIVE,
    takes=Value.SHARD,
    gives=Value.SHARD,
    moves="all_reduce",
    groups=frozenset({SHARD, REPLICATE, ALL}),
)
def all_reduce(
    grads: Sequence[Tensor],
    *,
    unit: str,
    params: tuple[str, ...],
    group: str = SHARD,
) -> Any:
    """Start averaging gradients over the group; ranks have equal shapes.

    The gradients are those of replicated parameters, or reduced shards over the "replicate" group.
    Returns a pending value; its `wait` returns tensors of the same shapes.
    """
    _only_in_graphs("all_reduce")


@_op(Kind.WAIT, drawn_as="diamond")
def wait(pending: Any) -> list[Tensor]:
    """Finish a pending collective; returns its results, one for each operand."""
    _only_in_graphs("wait")


@_op(Kind.FREE, drawn_as="cds")
def free(gathered: list[Tensor]) -> None:
    """Free the storage of all tensors that a gather's `wait` returned, even if referenced."""
    _only_in_graphs("free")


@_op(Kind.FREE)
def release(full: Tensor) -> None:
    """Free the storage of one gathered parameter, ahead of the `free` of its whole gather.

    `full` is the node that picks the parameter from the gather's `wait`, in the phase of the
    `free`. In a compiled region (see `graphshard.program.regions`) the storage is freed after the
    last operator of the region that reads it.
    """
    _only_in_graphs("release")


@_op(Kind.PART, streams_bytes=True, drawn_as="parallelogram")
def reshard(full: Tensor, *, ranks: int, unit: str, param: str) -> Tensor:
    """Copy this rank's part `(ceil(d0/ranks), ...)` of the gathered `param`, to gather it again."""
    _only_in_graphs("reshard")


@_op(Kind.TRANSFER, streams_bytes=True, drawn_as="parallelogram")
def cast(tensor: Tensor, *, dtype: torch.dtype, unit: str, param: str | None) -> Tensor:
    """Cast `tensor`, the shard or a gradient of `param`, to `dtype`."""
    _only_in_graphs("cast")


@_op(Kind.COPY, drawn_as="parallelogram")
def to_device(tensor: Tensor, *, unit: str, param: str | None) -> Any:
    """Start copying `tensor` from the host to the compute device; returns a pending copy."""
    _only_in_graphs("to_device")


@_op(Kind.COPY, drawn_as="parallelogram")
def to_host(tensor: Tensor, *, unit: str, param: str | None) -> Any:
    """Start copying `tensor` from the compute device to the host; returns a pending copy."""
    _only_in_graphs("to_host")


@_op(Kind.TRANSFER, drawn_as="diamond")
def arrive(copy: Any, *, unit: str, param: str | None) -> Tensor:
    """Finish a pending copy; returns the copied tensor.

    From here on the memory of the source may be reused.
    """
    _only_in_graphs("arrive")


@_op(Kind.ACCUMULATE, streams_bytes=True, drawn_as="cylinder")
def accumulate_grad(grad: Tensor, *, unit: str, param: str, of: str) -> Tensor:
    """Add `grad` to the gradient of `param` accumulated on this rank; returns the sum.

    The sum has the dtype of the gradient's reduce, which may be another one than that of `grad`.
    `of` is "gradient" for a full gradient before any reduce, or "shard" for a shard that is
    averaged within its shard group but not over the replicas.
    """
    _only_in_graphs("accumulate_grad")


@_op(Kind.TRANSFER, streams_bytes=True, drawn_as="cylinder")
def add_accumulated(grad: Tensor, *, unit: str, param: str, of: str) -> Tensor:
    """Return `grad` plus the gradient that `accumulate_grad` left of `param`, which is dropped."""
    _only_in_graphs("add_accumulated")


OUTPUTS, GRADIENTS, REDUCED = "outputs", "gradients", "reduced gradients"
"""The values that a `check_finite` looks at."""


@_op(Kind.CHECK, streams_bytes=True, drawn_as="octagon")
def check_finite(values: Sequence[Tensor], *, unit: str, of: str, masked: bool = False) -> Tensor:
    """Return the largest magnitude in `values`, `()`: NaN or infinity if any element is.

    `of` is "outputs" of a unit in forward, or in backward "gradients" of this rank or "reduced
    gradients". With `masked`, -inf counts as finite, as in a mask that is added to scores.
    """
    _only_in_graphs("check_finite")


@_op(Kind.CHECK, moves="all_gather", drawn_as="octagon")
def report_finite(numbers: Sequence[Tensor]) -> None:
    """Tell all ranks the first of `numbers` that is not finite on any of them.

    Here the host waits, once in a step, for the numbers of all its `check_finite`.
    """
    _only_in_graphs("report_finite")


@_op(Kind.RANDOM, drawn_as="note")
def save_random_state(*, device: str) -> Tensor:
    """Return the state of torch's default generator of `device`: bytes `(n,)` on the host.

    `device` is "cpu" or "cuda". The draws of forward that follow are done again in backward.
    """
    _only_in_graphs("save_random_state")


@_op(Kind.RANDOM, drawn_as="note")
def set_random_state(state: Tensor, *, device: str) -> Tensor:
    """Put torch's default generator of `device` into `state`; return the state it was in.

    Backward sets a saved state before the operators that draw again, and the returned one after
    them, so the generator goes on as if they had not drawn.
    """
    _only_in_graphs("set_random_state")


@fx.node.has_side_effect
def touch(params: Sequence[Tensor]) -> None:
    """Compute nothing: a read of parameters `(d0, ...)`, which are gathered for it.

    It is no op of the vocabulary, but an operator of the unit that holds `params`, so that passes
    treat a unit which the step does not use as one that it does.
    """


touch.__module__ = "graphshard.ops"  # as dumped code imports it

_Function = type(wait)


def targets(trait: Callable[[Op], bool]) -> frozenset[Any]:
    """The functions of all ops for which `trait` is true."""
    return frozenset(target for target, op in OPS.items() if trait(op))


VOCABULARY = targets(lambda op: True)
COLLECTIVES = targets(lambda op: op.kind is Kind.COLLECTIVE)
REDUCES = targets(lambda op: op.reduces)
SCATTERS = targets(lambda op: op.scatters)
COPIES = targets(lambda op: op.kind is Kind.COPY)
TRANSFERS = targets(lambda op: op.is_transfer)
CHECKS = targets(lambda op: op.kind is Kind.CHECK)
RANDOM_STATES = targets(lambda op: op.kind is Kind.RANDOM)


def op_of(node: fx.Node) -> Op | None:
    """The op of the vocabulary that `node` calls, None if it calls none."""
    # Torch operators are hashed in Python, so comparing types first is faster.
    return OPS.get(node.target) if type(node.target) is _Function else None


def op_name(node: fx.Node) -> str | None:
    """The vocabulary name of `node` ("all_gather", "wait", ...), or None for any other node."""
    op = op_of(node)
    return None if op is None else op.name


def is_collective(node: fx.Node) -> bool:
    """Whether `node` starts a collective."""
    return type(node.target) is _Function and node.target in COLLECTIVES


def is_gather(node: fx.Node) -> bool:
    """Whether `node` starts gathering parameters."""
    return node.target is all_gather


def is_scatter(node: fx.Node) -> bool:
    """Whether `node` starts averaging full gradients into shards."""
    return type(node.target) is _Function and node.target in SCATTERS


def is_transfer(node: fx.Node) -> bool:
    """Whether `node` casts, copies or adds to one tensor; see `Op.is_transfer`."""
    return type(node.target) is _Function and node.target in TRANSFERS


def origin(node: fx.Node) -> fx.Node:
    """The node at the start of the chain of transfers that ends in `node`."""
    while is_transfer(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def group_of(node: fx.Node) -> str:
    """The name of the group that the collective `node` joins."""
    return str(node.kwargs.get("group", SHARD))


def is_unpack(node: fx.Node) -> bool:
    """Whether `node` picks one result from a `wait`."""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and source.target is wait


def is_reduced(node: fx.Node) -> bool:
    """Whether `node` is a result of a reduce, possibly after transfers."""
    node = origin(node)
    return is_unpack(node) and collective_of(node).target in REDUCES


def writes(node: fx.Node) -> bool:
    """Whether `node` writes into one of its operands."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def has_effect(node: fx.Node) -> bool:
    """Whether `node` draws random numbers, writes or checks sizes, besides returning its value."""
    return is_random(node) or writes(node) or node.target is check_sizes


def is_compute(node: fx.Node) -> bool:
    """Whether `node` is the model's own compute: no placeholder, output or vocabulary op."""
    target = node.target
    if node.op != "call_function" or (type(target) is _Function and target in VOCABULARY):
        return False
    return target is not operator.getitem or not is_unpack(node)


def released(node: fx.Node) -> tuple[fx.Node, int]:
    """The all_gather whose result a `release` frees, and the index of that result."""
    full = node.args[0]
    assert isinstance(full, fx.Node)
    index = full.args[1]
    assert isinstance(index, int)
    return collective_of(full), index


def collective_of(node: fx.Node) -> fx.Node:
    """The collective that a `wait`, a `free` or a picked result belongs to, or `node` itself."""
    current = node
    while not is_collective(current):
        if current.target not in (wait, free) and not is_unpack(current):
            raise GraphshardError(f"node {node.name} belongs to no collective")
        source = current.args[0]
        assert isinstance(source, fx.Node)
        current = source
    return current

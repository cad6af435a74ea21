"""The graph vocabulary: the communication nodes that passes insert and the runtime executes.

In a program these functions are only the `target` of `call_function` nodes; the runtime replaces
each by the bound operation of its unit when it lowers the program, so calling one directly is an
error. Every collective node carries keyword arguments:

    unit    the FQN of the unit it serves ("" is the root)
    params  the FQNs of the parameters its operands belong to, in operand order
    group   the ranks it joins; left out on a mesh of one dimension, where they are all of them:
            "shard"      (also if left out) those along the last dimension of the mesh
            "replicate"  those along the first, which hold equal shards
            "all"        the whole mesh
            "reshard"    `ranks` neighbours among those of "shard" (an all_gather only)
    ranks   the number of them, with "reshard"
    dims    the dim each parameter is split along, in operand order; left out if all are dim 0
    units   the FQN of the unit of each operand, if they are of several, `unit` being the first's
    columns  (a reduce_scatter's of one operand) where it starts and ends along the last dim: the
            operand and the result are these columns of the gradient and of its shard, of which
            all are there, from one reduce or another; left out for a whole gradient
    in_place  (a gather's) True: its results are the whole copies that ranks keep (SHARD_OPTIMIZER),
            of which the shards are parts, and are never freed; left out where buffers are new

Shapes, for a group of W ranks and a parameter of shape (d0, ...):

    shard   (ceil(d0 / W), ...)   one rank's padded part along dim 0
    full    (d0, ...)             the parameter itself, a prefix view of the gathered buffer

Along another dim k the shard is (d0, ..., dk / W, ...); W divides dk. A gather's `wait` copies the
full value out of the buffer, which goes away right then; a reduce sends a copy of the gradient in
the order of the ranks.

Transfers say in which dtype, and on which device, one tensor is: a parameter's shard on its way
into a collective, a gradient on its way out of one, an activation between forward and backward.
They say their unit, and their parameter (None for an activation):

    shard       placeholder -> to_device -> arrive -> cast -> all_gather
    gradient    full gradient -> cast -> reduce_scatter -> wait -> cast -> to_host -> arrive
    activation  computed -> to_host -> arrive -> kept for backward -> to_device -> arrive -> used
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

_F = TypeVar("_F", bound=Callable[..., Any])

SHARD, REPLICATE, ALL, RESHARD = "shard", "replicate", "all", "reshard"
"""The groups a collective may name."""


class Kind(enum.Enum):
    """How the readers of a program treat an op."""

    COLLECTIVE = "moves data between ranks"
    WAIT = "ends a collective"
    FREE = "gives storage back"
    TRANSFER = "changes the dtype or device of one tensor, or adds to it"
    COPY = "a transfer between host and device"
    PART = "keeps a part of a gathered parameter"
    KEEP = "adds to the gradients that stay on this rank"


class Value(enum.Enum):
    """The shapes that operands and results of a collective have, by the parameter's layout."""

    FULL = "the parameter's own shape"
    SHARD = "one rank's padded part; the whole of a replicated parameter"


@dataclass(frozen=True)
class Op:
    """One op of the vocabulary: all that text, cost, storages, verify and lowering ask of it.

    Attributes:
        target: the function that nodes call.
        kind: see `Kind`.
        takes: shape of each operand, for a collective.
        gives: shape of each result, for a collective.
        moves: the collective of the backend that moves the bytes, and whose time it takes
            ("all_gather", "reduce_scatter" or "all_reduce"), for a collective.
        groups: the groups it may join on a mesh of one dimension.
        groups_with_replicas: likewise on a mesh of two dimensions.
        streams_bytes: it reads and writes its tensor on the compute stream at the memory's speed.
        drawn_as: its shape in the drawn schedule (Graphviz).
    """

    target: Callable[..., Any]
    kind: Kind
    takes: Value | None = None
    gives: Value | None = None
    moves: str = ""
    groups: frozenset[str] = frozenset()
    groups_with_replicas: frozenset[str] = frozenset()
    streams_bytes: bool = False
    drawn_as: str = "ellipse"

    @property
    def name(self) -> str:
        """As schedules, dumps and errors show it."""
        return self.target.__name__

    @property
    def is_transfer(self) -> bool:
        """Whether it takes one tensor on its way into or out of a collective, or to the host."""
        return self.kind in (Kind.TRANSFER, Kind.COPY)

    @property
    def gathers(self) -> bool:
        """Whether it makes full parameters of shards."""
        return self.takes is Value.SHARD and self.gives is Value.FULL

    @property
    def scatters(self) -> bool:
        """Whether it averages full gradients and leaves each rank its shard."""
        return self.takes is Value.FULL and self.gives is Value.SHARD

    @property
    def reduces(self) -> bool:
        """Whether it averages gradients over ranks."""
        return self.kind is Kind.COLLECTIVE and not self.gathers

    @property
    def in_runs(self) -> bool:
        """Whether nodes of it that follow each other in one unit are one event of a schedule."""
        return self.is_transfer or self.kind in (Kind.PART, Kind.KEEP)


OPS: dict[Any, Op] = {}
"""The vocabulary, by the function that nodes call."""


def _op(kind: Kind, **traits: Any) -> Callable[[_F], _F]:
    """Enter a function into the vocabulary; its parameters are the op's typed arguments."""

    def enter(function: _F) -> _F:
        function.__module__ = "graphshard.ops"  # as dumped code imports it
        OPS[function] = Op(function, kind, **traits)
        # Without this, fx drops nodes whose result nobody reads: every free. A transfer nobody
        # reads may go.
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
    groups_with_replicas=frozenset({SHARD, RESHARD}),
)
def all_gather(
    shards: Sequence[Tensor],
    *,
    unit: str,
    params: tuple[str, ...],
    group: str = SHARD,
    ranks: int | None = None,
) -> Any:
    """Start gathering `shards` (each `(ceil(d0/W), ...)`) over the group; gives a pending value."""
    _only_in_graphs("all_gather")


@_op(
    Kind.COLLECTIVE,
    takes=Value.FULL,
    gives=Value.SHARD,
    moves="reduce_scatter",
    groups=frozenset({SHARD}),
    groups_with_replicas=frozenset({SHARD}),
)
def reduce_scatter(
    grads: Sequence[Tensor], *, unit: str, params: tuple[str, ...], group: str = SHARD
) -> Any:
    """Start averaging full gradients `(d0, ...)` over the group, each rank keeping its shard."""
    _only_in_graphs("reduce_scatter")


@_op(
    Kind.COLLECTIVE,
    takes=Value.SHARD,
    gives=Value.SHARD,
    moves="all_reduce",
    groups=frozenset({SHARD}),
    groups_with_replicas=frozenset({REPLICATE, ALL}),
)
def all_reduce(
    grads: Sequence[Tensor], *, unit: str, params: tuple[str, ...], group: str = SHARD
) -> Any:
    """Start averaging over the group what each of its ranks has in equal shape: the gradients of
    replicated parameters, or reduced shards over the "replicate" group.
    """
    _only_in_graphs("all_reduce")


@_op(
    Kind.COLLECTIVE,
    takes=Value.FULL,
    gives=Value.SHARD,
    moves="all_reduce",
    groups=frozenset({SHARD}),
    groups_with_replicas=frozenset({SHARD}),
)
def all_reduce_shard(
    grads: Sequence[Tensor], *, unit: str, params: tuple[str, ...], group: str = SHARD
) -> Any:
    """Start averaging full gradients `(d0, ...)` over the group by one all_reduce of a copy of
    them all, each rank keeping its shard of it.
    """
    _only_in_graphs("all_reduce_shard")


@_op(Kind.WAIT, drawn_as="diamond")
def wait(pending: Any) -> list[Tensor]:
    """Finish a pending collective: a list of its results in operand order."""
    _only_in_graphs("wait")


@_op(Kind.FREE, drawn_as="cds")
def free(gathered: list[Tensor]) -> None:
    """Give back the storage of what a gather's `wait` returned, whatever still refers to it."""
    _only_in_graphs("free")


@_op(Kind.FREE)
def release(full: Tensor) -> None:
    """Give back the storage of one parameter of what a gather's `wait` returned, before its free.

    It is the node that picks the parameter out of the `wait`, in the phase that frees the rest. In
    a region (see `graphshard.program.regions`) it goes with the last operator there that reads it.
    """
    _only_in_graphs("release")


@_op(Kind.PART, streams_bytes=True, drawn_as="parallelogram")
def reshard(full: Tensor, *, ranks: int, unit: str, param: str) -> Tensor:
    """A copy of this rank's part `(ceil(d0/ranks), ...)` of the gathered `param`, to be kept."""
    _only_in_graphs("reshard")


@_op(Kind.TRANSFER, streams_bytes=True, drawn_as="parallelogram")
def cast(tensor: Tensor, *, dtype: torch.dtype, unit: str, param: str | None) -> Tensor:
    """`tensor`, the shard or a gradient of `param`, in `dtype`."""
    _only_in_graphs("cast")


@_op(Kind.COPY, drawn_as="parallelogram")
def to_device(tensor: Tensor, *, unit: str, param: str | None) -> Any:
    """Start copying `tensor`, which lies on the host, to the device that computes."""
    _only_in_graphs("to_device")


@_op(Kind.COPY, drawn_as="parallelogram")
def to_host(tensor: Tensor, *, unit: str, param: str | None) -> Any:
    """Start copying `tensor`, which lies on the device that computes, to the host."""
    _only_in_graphs("to_host")


@_op(Kind.TRANSFER, drawn_as="diamond")
def arrive(copy: Any, *, unit: str, param: str | None) -> Tensor:
    """What `to_device` or `to_host` copied, for whatever runs from here on.

    From here on, too, the memory that was copied may be given to someone else.
    """
    _only_in_graphs("arrive")


@_op(Kind.KEEP, streams_bytes=True, drawn_as="cylinder")
def keep(grad: Tensor, *, unit: str, param: str, of: str) -> Tensor:
    """Add `grad` to what this rank keeps of `param`'s gradient; gives all of it.

    `of` says what is kept: "gradient", whole and not reduced, or "shard", averaged in this rank's
    group but not over the replicas.
    """
    _only_in_graphs("keep")


@_op(Kind.TRANSFER, streams_bytes=True, drawn_as="cylinder")
def add_kept(grad: Tensor, *, unit: str, param: str, of: str) -> Tensor:
    """`grad` plus what this rank kept of `param`'s gradient (see `keep`), which is taken away."""
    _only_in_graphs("add_kept")


_Function = type(wait)


def targets(trait: Callable[[Op], bool]) -> frozenset[Any]:
    """The functions of the ops that have a trait."""
    return frozenset(target for target, op in OPS.items() if trait(op))


VOCABULARY = targets(lambda op: True)
COLLECTIVES = targets(lambda op: op.kind is Kind.COLLECTIVE)
REDUCES = targets(lambda op: op.reduces)
SCATTERS = targets(lambda op: op.scatters)
COPIES = targets(lambda op: op.kind is Kind.COPY)
TRANSFERS = targets(lambda op: op.is_transfer)


def op_of(node: fx.Node) -> Op | None:
    """The op of the vocabulary that `node` calls, None if it calls none."""
    # An operator of torch has a hash in Python: its type tells sooner.
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
    """Whether `node` starts averaging full gradients, each rank keeping its shard."""
    return type(node.target) is _Function and node.target in SCATTERS


def is_transfer(node: fx.Node) -> bool:
    """Whether `node` moves, casts or adds to one tensor on its way into or out of a collective."""
    return type(node.target) is _Function and node.target in TRANSFERS


def origin(node: fx.Node) -> fx.Node:
    """What `node` is before all transfers: `node` itself, if it is no transfer."""
    while is_transfer(node):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node = source
    return node


def group_of(node: fx.Node) -> str:
    """The group whose ranks the collective `node` joins."""
    return str(node.kwargs.get("group", SHARD))


def is_unpack(node: fx.Node) -> bool:
    """Whether `node` picks one tensor out of a `wait`."""
    if node.target is not operator.getitem:
        return False
    source = node.args[0]
    return isinstance(source, fx.Node) and source.target is wait


def is_reduced(node: fx.Node) -> bool:
    """Whether `node` is what a reduce returned, through whatever transfers."""
    node = origin(node)
    node = next(iter(joined(node)), node)
    return is_unpack(node) and collective_of(node).target in REDUCES


def joined(node: fx.Node) -> list[fx.Node]:
    """The reduced pieces, column by column, that `node` puts side by side; none if it does not."""
    if node.target is not torch.ops.aten.cat.default:
        return []
    pieces = node.all_input_nodes
    parts = (is_unpack(piece) and "columns" in collective_of(piece).kwargs for piece in pieces)
    return pieces if all(parts) else []


def is_random(node: fx.Node) -> bool:
    """Whether `node` draws random numbers.

    Attention operators are tagged as random whatever their arguments; without dropout they are not.
    """
    if torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return False
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(schema.arguments if schema is not None else ()):
        if argument.name == "dropout_p":
            given = (
                node.args[position] if position < len(node.args) else node.kwargs.get("dropout_p")
            )
            return bool(argument.default_value if given is None else given)
    return True


def writes(node: fx.Node) -> bool:
    """Whether `node` writes into one of its operands."""
    schema = getattr(node.target, "_schema", None)
    return schema is not None and bool(schema.is_mutable)


def has_effect(node: fx.Node) -> bool:
    """Whether `node` does more than give its value: draws random numbers, or writes."""
    return is_random(node) or writes(node)


def is_compute(node: fx.Node) -> bool:
    """Whether `node` is the model's own work: no placeholder, no output, no communication."""
    target = node.target
    if node.op != "call_function" or (type(target) is _Function and target in VOCABULARY):
        return False
    return target is not operator.getitem or not is_unpack(node)


def released(node: fx.Node) -> tuple[fx.Node, int]:
    """The all_gather whose operand a `release` gives back, and the operand's index."""
    picked = node.args[0]
    assert isinstance(picked, fx.Node)
    index = picked.args[1]
    assert isinstance(index, int)
    return collective_of(picked), index


def collective_of(node: fx.Node) -> fx.Node:
    """The collective a `wait`, `free` or unpacking node belongs to (or the collective itself).

    Raises:
        GraphshardError: `node` belongs to no collective.
    """
    current = node
    while not is_collective(current):
        if current.target not in (wait, free) and not is_unpack(current):
            raise GraphshardError(f"node {node.name} belongs to no collective")
        source = current.args[0]
        assert isinstance(source, fx.Node)
        current = source
    return current

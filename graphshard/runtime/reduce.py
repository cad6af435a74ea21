"""Averaging a unit's gradients over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from graphshard.errors import PlanError
from graphshard.planning.layout import ParamLayout
from graphshard.program import ops
from graphshard.program.collective import operands_of, params_of
from graphshard.program.packing import MOVABLE
from graphshard.runtime.collectives import Collective, Message, Operand, Pending
from graphshard.runtime.group import Group
from graphshard.torch_private import compat as torch_compat


def require_reducible(graph: fx.Graph, group: Group) -> None:
    """Check that every gradient `graph` reduces is of a kind the ranks can average.

    Raises:
        PlanError: one is sparse, or of a dtype the backend cannot add up; names its parameter.
    """
    for node in graph.nodes:
        if node.target not in ops.REDUCES:
            continue
        for name, operand in zip(params_of(node), operands_of(node), strict=True):
            grad = operand.meta["val"]
            if grad.layout != torch.strided:
                raise PlanError(
                    f"the gradient of parameter {name!r} is sparse, and only dense ones can be "
                    "averaged over the ranks; make it dense, e.g. nn.Embedding(..., sparse=False)"
                )
            if group.size > 1 and grad.dtype not in MOVABLE:
                raise PlanError(
                    f"the gradient of parameter {name!r} is {str(grad.dtype)[6:]}, which the "
                    f"backend {group.backend!r} cannot average; freeze the parameter, cast it, or "
                    "(a complex one) train its torch.view_as_real"
                )


def averaging(dtype: torch.dtype, size: int) -> tuple[int, Any, float]:
    """How a backend averages over `size` ranks: (divide by before, operator, divide by after).

    The backends' own average of float16 adds up first (Gloo) and may overflow, or divides first
    (NCCL multiplies each operand by 1/size as it adds) and underflows on many ranks. So here, as
    in FSDP, float16 is divided by a power of two near the square root of `size` on either side.
    """
    if dtype is not torch.float16:
        return 1, dist.ReduceOp.AVG, 1
    before = 1
    while size % before == 0 and size / before > before:
        before *= 2
    return before, dist.ReduceOp.SUM, size / before


@dataclass(frozen=True)
class Way:
    """How gradients of one dtype are averaged: see `averaging`; with the options of the call."""

    before: int
    after: float
    options: Any


def averaging_ways(
    operands: Sequence[Operand], group: Group, options: str
) -> dict[torch.dtype, Way]:
    """How those of each dtype among `operands` are averaged over `group`."""
    ways = {}
    for dtype in {operand.dtype for operand in operands}:
        call = torch_compat.collective_options(options)
        call.asyncOp = group.side_stream is None
        before, call.reduceOp, after = averaging(dtype, group.size)
        ways[dtype] = Way(before, after, call)
    return ways


class ReduceScatter(Collective):
    """Averages full gradients `(d0, ...)`, each rank keeping its shard `(ceil(d0/W), ...)`."""

    op = "reduce_scatter"

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        super().__init__(group, unit, phase, operands)
        self.launches = self.messages(self.pack_below(), lambda o: o.shard_bytes * group.size)
        packed = {i for each in self.launches for m in each if m.packed for i in m.indices}
        self.by_rank = [_by_rank(o.layout, i in packed) for i, o in enumerate(self.operands)]
        self.shapes = [shape_of_part(o.layout) for o in self.operands]

    def pack_below(self) -> int:
        """Gradients of fewer bytes travel in one message."""
        return self.group.pack_reduce_below

    def __call__(self, tensors: Sequence[Tensor]) -> Pending:
        """Start one launch per dtype, reading large gradients where they lie."""
        grads = [
            grad if by_rank is None else by_rank(grad)
            for by_rank, grad in zip(self.by_rank, tensors, strict=True)
        ]
        pending = Pending(self, [], [])
        for messages in self.launches:
            sent = [self.divided(self._sent(grads, message)) for message in messages]
            pending.operands += sent
            self.move(pending, sent)
        return pending

    def _sent(self, grads: list[Tensor], message: Message) -> Tensor:
        """The gradients of a message, one rank's parts after the other's, as one flat tensor."""
        if not message.packed:
            return grads[message.indices[0]].view(-1)
        return torch_compat.rows_by_rank([grads[i] for i in message.indices], self.group.size).view(
            -1
        )

    def divided(self, sent: Tensor) -> Tensor:
        """`sent` as it is moved."""
        return sent

    def move(self, pending: Pending, sent: list[Tensor]) -> None:
        """Start moving `sent`, and note the works and what each is received in."""
        raise NotImplementedError

    def average(self, sent: Tensor, received: Tensor) -> Tensor:
        """This rank's part of the average, once `received` is there."""
        raise NotImplementedError

    def results(self, pending: Pending) -> list[Tensor]:
        """The averaged shards, padding included."""
        shards: list[Any] = [None] * len(self.operands)
        moved = iter(zip(pending.operands, pending.buffers, strict=True))
        for messages in self.launches:
            for message in messages:
                flat = self.average(*next(moved))
                for i, part in zip(message.indices, parts_of(flat, message), strict=True):
                    shape = self.shapes[i]
                    shards[i] = part if shape is None else part.view(shape)
        return shards


class ReduceScatterByReduce(ReduceScatter):
    """With the backend's own reduce_scatter (NCCL)."""

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        super().__init__(group, unit, phase, operands)
        self.ways = averaging_ways(self.operands, group, "ReduceScatterOptions")

    def divided(self, sent: Tensor) -> Tensor:
        """`sent` as it may be added up."""
        before = self.ways[sent.dtype].before
        return sent if before == 1 else sent / before

    def move(self, pending: Pending, sent: list[Tensor]) -> None:
        """One coalesced launch."""
        outputs = [s.new_empty(s.numel() // self.group.size) for s in sent]
        pending.buffers += outputs
        launch = self.group.process_group.reduce_scatter_tensor_coalesced
        self.start(pending, launch, outputs, sent, self.ways[sent[0].dtype].options)

    def average(self, sent: Tensor, received: Tensor) -> Tensor:
        """What was received, or the rest of the division."""
        after = self.ways[received.dtype].after
        return received if after == 1 else received.div_(after)


class ReduceScatterByExchange(ReduceScatter):
    """By an exchange of parts and a local mean (Gloo), which adds up 16-bit floats in float32.

    Every element is averaged on one rank, in rank order, so the result does not depend on timing,
    and on 2 ranks it equals the all-reduce's bit for bit. See README.md (gloo.py).
    """

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        super().__init__(group, unit, phase, operands)
        self.options = torch_compat.collective_options("AllToAllOptions")
        self.options.asyncOp = group.side_stream is None

    def move(self, pending: Pending, sent: list[Tensor]) -> None:
        """Send every other rank its parts of each message."""
        received = [torch.empty_like(s) for s in sent]
        pending.buffers += received
        if self.group.peers is None:
            launch = self.group.process_group.alltoall_base
            for parts, into in zip(sent, received, strict=True):
                self.start(pending, launch, into, parts, [], [], self.options)
            return
        size, rank = self.group.size, self.group.rank
        parts_to = [s.view(size, s.numel() // size).unbind() for s in sent]
        parts_of = [r.view(size, r.numel() // size).unbind() for r in received]
        self.exchange(pending, parts_to, parts_of)
        pending.own += [(of[rank], to[rank]) for of, to in zip(parts_of, parts_to, strict=True)]

    def average(self, sent: Tensor, received: Tensor) -> Tensor:
        """The mean over the parts the ranks sent."""
        return received.view(self.group.size, -1).mean(0)


class ReduceScatterByPairExchange(ReduceScatterByExchange):
    """The same on two ranks, where one's own part need not be copied: half the time and memory."""

    def move(self, pending: Pending, sent: list[Tensor]) -> None:
        """Send the other rank its parts only."""
        parts = [self._halves(own_and_other)[1] for own_and_other in sent]
        received = [torch.empty_like(part) for part in parts]
        pending.buffers += received
        if self.group.peers is not None:
            self.exchange(pending, [(p, p) for p in parts], [(r, r) for r in received])
            return
        launch = self.group.process_group.alltoall_base
        for part, into in zip(parts, received, strict=True):
            counts = [0, 0]
            counts[1 - self.group.rank] = part.numel()
            self.start(pending, launch, into, part, counts, counts, self.options)

    def average(self, sent: Tensor, received: Tensor) -> Tensor:
        """The mean of the own part and the other's, in the other's storage."""
        own = self._halves(sent)[0]
        if received.dtype is torch.float16:  # whose sum may overflow
            return received.copy_(received.float().add_(own).div_(2))
        return received.add_(own).div_(2)

    def _halves(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """(own part, the other rank's part) of `sent`."""
        first, second = sent.chunk(2)
        return (first, second) if self.group.rank == 0 else (second, first)


class ReduceScatterByAllReduce(ReduceScatter):
    """One all_reduce of a copy of all gradients, of which each rank copies its shards.

    Twice the bytes of a reduce_scatter, and fewer steps on many ranks (NCCL sums along a tree).
    """

    op = "all_reduce_shard"

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        super().__init__(group, unit, phase, operands)
        self.ways = averaging_ways(self.operands, group, "AllreduceOptions")

    def pack_below(self) -> int:
        """All gradients of a dtype travel in one message."""
        return 1 << 62

    def divided(self, sent: Tensor) -> Tensor:
        """A copy of `sent` as it may be added up: all_reduce works in place."""
        before = self.ways[sent.dtype].before
        return sent.clone() if before == 1 else sent / before

    def move(self, pending: Pending, sent: list[Tensor]) -> None:
        """One launch for the message of a dtype."""
        pending.buffers += sent
        for flat in sent:
            launch = self.group.process_group.allreduce
            self.start(pending, launch, [flat], self.ways[flat.dtype].options)

    def average(self, sent: Tensor, received: Tensor) -> Tensor:
        """A copy of this rank's part, so that the whole goes away."""
        after = self.ways[received.dtype].after
        part = received.view(self.group.size, -1)[self.group.rank].clone()
        return part if after == 1 else part.div_(after)


class AllReduce(Collective):
    """Averages gradients of replicated parameters, or reduced shards; one launch per dtype."""

    op = "all_reduce"

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        super().__init__(group, unit, phase, operands)
        self.launches = self.messages(1 << 62, lambda o: o.shard_bytes)
        self.shapes = [shape_of_part(o.layout) for o in self.operands]
        self.ways = averaging_ways(self.operands, group, "AllreduceOptions")

    def __call__(self, tensors: Sequence[Tensor]) -> Pending:
        """Copy the gradients together (all_reduce works in place, they may be shared) and start."""
        pending = Pending(self, [], [])
        for (message,) in self.launches:
            flat = torch.cat([tensors[i].reshape(-1) for i in message.indices])
            pending.buffers.append(flat)
            launch = self.group.process_group.allreduce
            way = self.ways[flat.dtype]
            if way.before != 1:
                flat.div_(way.before)
            self.start(pending, launch, [flat], way.options)
        return pending

    def results(self, pending: Pending) -> list[Tensor]:
        """The averages, views of the message they travelled in."""
        grads: list[Any] = [None] * len(self.operands)
        for (message,), flat in zip(self.launches, pending.buffers, strict=True):
            after = self.ways[flat.dtype].after
            if after != 1:
                flat.div_(after)
            for i, part in zip(message.indices, parts_of(flat, message), strict=True):
                shape = self.shapes[i]
                grads[i] = part if shape is None else part.view(shape)
        return grads


class LocalReduce(Collective):
    """On a single rank a gradient is its own average."""

    def __init__(self, op: str, group: Group, unit: str, phase: str) -> None:
        self.op = op
        super().__init__(group, unit, phase, ())

    def __call__(self, tensors: Sequence[Tensor]) -> Pending:
        """Copies, since `.grad` must share its storage with nothing else."""
        return Pending(self, [], [t.clone(memory_format=torch.contiguous_format) for t in tensors])

    def results(self, pending: Pending) -> list[Tensor]:
        """The copies."""
        return pending.buffers


def reduce_kind(op: ops.Op, group: Group) -> type[Collective]:
    """The class that runs a reduce over `group`, of more than one rank."""
    kinds = _OVER_GLOO if group.backend == "gloo" else _OVER_NCCL
    kind = kinds[op.target]
    if kind is ReduceScatterByExchange and group.size == 2:
        return ReduceScatterByPairExchange
    return kind


_OVER_NCCL: dict[Any, type[Collective]] = {
    ops.reduce_scatter: ReduceScatterByReduce,
    ops.all_reduce: AllReduce,
    ops.all_reduce_shard: ReduceScatterByAllReduce,
}


_OVER_GLOO: dict[Any, type[Collective]] = {
    **_OVER_NCCL,
    ops.reduce_scatter: ReduceScatterByExchange,
}


def parts_of(flat: Tensor, message: Message) -> Sequence[Tensor]:
    """What a message holds of each operand, as views."""
    return torch.split_with_sizes(flat, message.numels) if message.packed else (flat,)


def shape_of_part(layout: ParamLayout) -> tuple[int, ...] | None:
    """The shape of one rank's padded part; None if that is flat, as parts of a message are."""
    return None if len(layout.shard_shape) == 1 else layout.shard_shape


def _by_rank(layout: ParamLayout, packed: bool) -> Callable[[Tensor], Tensor] | None:
    """What puts a full gradient in order: one rank's part after the other's, in as many elements
    as are gathered.

    It gives the gradient itself where it lies so already. None where packing does it.
    """
    if layout.dim:

        def in_order(grad: Tensor) -> Tensor:
            parts = grad.unflatten(layout.dim, (layout.world_size, -1))
            return parts.movedim(layout.dim, 0).contiguous()

        return in_order
    if packed:
        return None
    shape = layout.gathered_shape
    if shape == layout.shape:
        return Tensor.contiguous

    def padded(grad: Tensor) -> Tensor:
        full = grad.new_zeros(shape)
        full[: grad.shape[0]] = grad
        return full

    return padded

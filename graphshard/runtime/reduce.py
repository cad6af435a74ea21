"""Averaging a unit's gradients over the ranks, with the backend's own collectives.

Gloo has no reduce_scatter of its own: `ReduceScatterByExchange` exchanges shares and adds them up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx
from torch.nn import functional

from graphshard.errors import CollectiveError, PlanError
from graphshard.planning.layout import ParamLayout
from graphshard.program import ops
from graphshard.program.collective import operands_of, params_of
from graphshard.program.packing import PACKABLE, REDUCE_BELOW
from graphshard.runtime.collectives import BoundCollective, Message, Operand, Pending
from graphshard.runtime.group import Group, as_reals
from graphshard.runtime.shards import take_apart
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.coalesced import Works, coalesced


def require_reducible(graph: fx.Graph, group: Group) -> None:
    """Check that the ranks can average every gradient that `graph` reduces."""
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
            if group.size > 1 and grad.dtype not in PACKABLE:
                raise PlanError(
                    f"the gradient of parameter {name!r} is {str(grad.dtype)[6:]}, which the "
                    f"backend {group.backend!r} cannot average; freeze the parameter, or cast it"
                )


@dataclass(frozen=True)
class Averaging:
    """The average over ranks: options of the call, with its operator, and divisors around it.

    float16 may overflow where a backend adds up first (Gloo), and underflow on many ranks where it
    divides first (NCCL multiplies each operand by 1/size as it adds). So, as in FSDP, it is divided
    by a power of two near the square root of the number of ranks before the sum, and by the rest
    after it.
    """

    options: Any
    divide_before: int = 1
    divide_after: float = 1


def averaging_by_dtype(
    operands: Sequence[Operand], group: Group, options_class: str
) -> dict[torch.dtype, Averaging]:
    """The average over `group` of gradients of each dtype, with torch's class of options."""
    by_dtype = {}
    for dtype in {operand.dtype.to_real() for operand in operands}:
        options = torch_compat.collective_options(options_class)
        options.asyncOp = group.side_stream is None
        if dtype is torch.float16:
            before = 1
            while group.size % before == 0 and group.size / before > before:
                before *= 2
            options.reduceOp = dist.ReduceOp.SUM
            by_dtype[dtype] = Averaging(options, before, group.size / before)
        else:
            options.reduceOp = dist.ReduceOp.AVG
            by_dtype[dtype] = Averaging(options)
    return by_dtype


class _Reduce(BoundCollective):
    """A reduce over several ranks; `launches` has the messages of each launch."""

    launches: list[list[Message]]

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        super().__init__(group, unit, phase, operands)
        # None of one dimension, as the parts of a message have.
        shapes = [operand.layout.shard_shape for operand in self.operands]
        self.shapes = [None if len(shape) == 1 else shape for shape in shapes]

    def views(self, moved: Iterable[Tensor]) -> list[Tensor]:
        """The gradients in the messages `moved`, each in its shape, padding included."""
        grads: list[Any] = [None] * len(self.operands)
        messages = [message for messages in self.launches for message in messages]
        for message, flat in zip(messages, moved, strict=True):
            dtype = self.operands[message.indices[0]].dtype
            parts = [flat.view(dtype) if dtype.is_complex else flat]
            if message.packed:
                parts = [*torch.split_with_sizes(parts[0], message.numels)]
            for i, grad in zip(message.indices, parts, strict=True):
                shape = self.shapes[i]
                grads[i] = grad if shape is None else grad.view(shape)
        return grads


class ReduceScatter(_Reduce):
    """Averages full gradients `(d0, ...)` into shards `(ceil(d0/W), ...)`, one per rank.

    pack_below: bytes of a gradient's shard below which it is packed with others into one message;
        None: as the backend needs it.
    """

    op = "reduce_scatter"
    pack_below: int | None = None

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        super().__init__(group, unit, phase, operands)
        below = REDUCE_BELOW.get(group.backend, 0) if self.pack_below is None else self.pack_below
        self.launches = self.messages(below)
        packed = {i for launch in self.launches for m in launch if m.packed for i in m.indices}
        self.in_rank_order = [
            _in_rank_order(o.layout, i in packed) for i, o in enumerate(self.operands)
        ]

    def given_shape(self, layout: ParamLayout) -> tuple[int, ...]:
        """That of the whole gradient."""
        return layout.shape

    def __call__(self, tensors: Sequence[Tensor]) -> Pending:
        """Start one launch per dtype, reading large gradients where they lie."""
        grads = [
            grad if reorder is None else reorder(grad)
            for reorder, grad in zip(self.in_rank_order, tensors, strict=True)
        ]
        pending = Pending(self, [], [])
        for messages in self.launches:
            sent = [self.prepare(self._flat(grads, message)) for message in messages]
            pending.operands += sent
            self.move(pending, sent)
        return pending

    def _flat(self, grads: list[Tensor], message: Message) -> Tensor:
        """The gradients of a message as one flat tensor, each rank's parts after another's."""
        if not message.packed:
            return as_reals(grads[message.indices[0]]).view(-1)
        parts = [as_reals(grads[i]) for i in message.indices]
        return torch_compat.rows_by_rank(parts, self.group.size).view(-1)

    def prepare(self, sent: Tensor) -> Tensor:
        """The tensor to move for `sent`: itself, a copy, or a quotient."""
        return sent

    def move(self, pending: Pending, sent: list[Tensor]) -> None:
        """Start moving `sent`; add the works and the tensors they write to `pending`."""
        raise NotImplementedError

    def average(self, sent: Tensor, received: Tensor) -> Tensor:
        """The average of this rank's shards in a message, flat, once `received` is complete."""
        raise NotImplementedError

    def results(self, pending: Pending) -> list[Tensor]:
        """The averaged shards, padding included."""
        return self.views(map(self.average, pending.operands, pending.buffers))


class ReduceScatterByReduce(ReduceScatter):
    """Averages with the backend's own reduce_scatter (NCCL)."""

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        super().__init__(group, unit, phase, operands)
        self.averaging = averaging_by_dtype(self.operands, group, "ReduceScatterOptions")

    def prepare(self, sent: Tensor) -> Tensor:
        """`sent`, divided so that the sum cannot overflow."""
        before = self.averaging[sent.dtype].divide_before
        return sent if before == 1 else sent / before

    def move(self, pending: Pending, sent: list[Tensor]) -> None:
        """Start one coalesced reduce_scatter."""
        outputs = [s.new_empty(s.numel() // self.group.size) for s in sent]
        pending.buffers += outputs
        group = self.group
        launch = coalesced(group.process_group, "reduce_scatter_tensor_coalesced", group.backend)
        self.start(pending, launch, outputs, sent, self.averaging[sent[0].dtype].options)

    def average(self, sent: Tensor, received: Tensor) -> Tensor:
        """`received`, after the rest of the division."""
        after = self.averaging[received.dtype].divide_after
        return received if after == 1 else received.div_(after)


class AllReduce(_Reduce):
    """Averages gradients of replicated parameters, or shards that another reduce returned.

    The results have the shapes of the operands. There is one launch per dtype: one message with
    copies, since all_reduce works in place and other nodes may read the gradients, and one for each
    gradient that is this node's own.
    """

    op = "all_reduce"

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        super().__init__(group, unit, phase, operands)
        self.launches = []
        for dtype in sorted({o.dtype for o in self.operands}, key=str):
            indices = [i for i, o in enumerate(self.operands) if o.dtype is dtype]
            copied = [i for i in indices if not self.operands[i].own]
            own = [self.message(i) for i in indices if self.operands[i].own]
            self.launches.append([self.message(*copied), *own] if copied else own)
        self.averaging = averaging_by_dtype(self.operands, group, "AllreduceOptions")
        self.coalesced = averaging_by_dtype(self.operands, group, "AllreduceCoalescedOptions")

    def __call__(self, tensors: Sequence[Tensor]) -> Pending:
        """Start one all_reduce for the gradients of each dtype."""
        pending = Pending(self, [], [])
        for messages in self.launches:
            sent = [self.flat(tensors, message) for message in messages]
            pending.buffers += sent
            averaging = self.averaging[sent[0].dtype]
            if averaging.divide_before != 1:
                for flat in sent:
                    flat.div_(averaging.divide_before)
            if len(sent) == 1:
                self.start(pending, self.group.process_group.allreduce, sent, averaging.options)
            else:
                options = self.coalesced[sent[0].dtype].options
                self.start(pending, self.group.process_group.allreduce_coalesced, sent, options)
        return pending

    def flat(self, tensors: Sequence[Tensor], message: Message) -> Tensor:
        """The gradients of a message as one flat tensor: a copy, unless it is this node's own."""
        first = message.indices[0]
        if self.operands[first].own and tensors[first].is_contiguous():
            return as_reals(tensors[first]).view(-1)
        return torch.cat([as_reals(tensors[i]).reshape(-1) for i in message.indices])

    def results(self, pending: Pending) -> list[Tensor]:
        """The averages, as views of the messages."""
        for flat in pending.buffers:
            after = self.averaging[flat.dtype].divide_after
            if after != 1:
                flat.div_(after)
        return self.views(pending.buffers)


class AllReduceByCaller(AllReduce):
    """Averages over replicas by a function of the caller's, in place of the process group.

    group: the ranks of the mesh that are replicas of each other; often this rank alone.
    average: the function; it averages a flat tensor in place, and returns what to wait for (an
        object with `wait()`, such as a `torch.distributed.Work`), or None if it is done.
    """

    def __init__(
        self,
        group: Group,
        unit: str,
        phase: str,
        operands: Sequence[Operand],
        average: Callable[[Tensor], Any],
    ) -> None:
        super().__init__(group, unit, phase, operands)
        self.average = average

    def __call__(self, tensors: Sequence[Tensor]) -> Pending:
        """Copy the gradients of each dtype into one tensor and pass it to the function."""
        pending = Pending(self, [], [])
        for (message,) in self.launches:
            flat = self.flat(tensors, message)
            pending.buffers.append(flat)
            self.start(pending, self._launch, flat)
        return pending

    def take_part(self, tensors: Sequence[Any]) -> None:
        """Nothing: ranks of other jobs, which wait in the function, are not told of the error."""
        for _ in self.launches:
            self.here.has_done()

    def _launch(self, flat: Tensor) -> Any:
        with self._errors(), torch.no_grad():
            work = self.average(flat)
        return Works(()) if work is None else work

    def wait(self, pending: Pending) -> list[Tensor]:
        """As of other collectives; an error of the caller's `wait()` is a `CollectiveError` too."""
        with self._errors():
            return super().wait(pending)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (CollectiveError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise self.peer_error(error) from error

    def peer_error(self, error: Exception) -> CollectiveError:
        """The error to raise when the caller's function, or what it returned, raised `error`."""
        return self.error(
            "failed",
            "the function passed as replica_all_reduce raised an error; no gradient was set, so "
            "clear gradients and repeat the step once it can average again",
            error,
        )

    def results(self, pending: Pending) -> list[Tensor]:
        """What the function left in the tensors, as views."""
        return self.views(pending.buffers)


class LocalReduce(BoundCollective):
    """Copies gradients on a single rank, where each is its own average."""

    def __init__(self, op: str, group: Group, unit: str, phase: str) -> None:
        self.op = op
        super().__init__(group, unit, phase, ())

    def __call__(self, tensors: Sequence[Tensor]) -> Pending:
        """Copy the gradients, since `.grad` must share its storage with nothing else."""
        return Pending(self, [], [t.clone(memory_format=torch.contiguous_format) for t in tensors])

    def results(self, pending: Pending) -> list[Tensor]:
        """The copies."""
        return pending.buffers


REDUCES: dict[Any, type[BoundCollective]] = {
    ops.reduce_scatter: ReduceScatterByReduce,
    ops.all_reduce: AllReduce,
}
"""The class that runs each reduce over more than one rank; Gloo has others for a reduce_scatter."""


def _in_rank_order(layout: ParamLayout, packed: bool) -> Callable[[Tensor], Tensor] | None:
    """The function that lays out a full gradient rank by rank, padded to the gathered shape.

    It returns the gradient itself where that has this layout already. None where packing lays it
    out.
    """
    if not layout.is_prefix:
        return lambda grad: take_apart(grad, layout)
    if packed:
        return None
    shape = layout.gathered_shape
    if shape == layout.shape:
        return Tensor.contiguous

    def padded(grad: Tensor) -> Tensor:
        full = grad.new_empty(shape)
        full[: grad.shape[0]] = grad
        full[grad.shape[0] :] = 0
        return full

    return padded


_IN_ORDER = 4
"""Rows that torch adds up in order in every column."""

_VECTORS = 32
"""Columns of which torch adds up whole multiples in the order of the rows, in any dtype."""


class ReduceScatterByExchange(ReduceScatter):
    """Averages by an exchange of parts and a local mean, which adds up 16-bit floats in float32."""

    def __init__(self, group: Group, unit: str, phase: str, operands: Sequence[Operand]) -> None:
        super().__init__(group, unit, phase, operands)
        self.options = torch_compat.collective_options("AllToAllOptions")
        self.options.asyncOp = group.side_stream is None

    def move(self, pending: Pending, sent: list[Tensor]) -> None:
        """Send every other rank its parts of each message."""
        received = [torch.empty_like(flat) for flat in sent]
        pending.buffers += received
        if self.group.pairwise is None:
            launch = self.group.process_group.alltoall_base
            for source, target in zip(sent, received, strict=True):
                self.start(pending, launch, target, source, [], [], self.options)
            return
        size, rank = self.group.size, self.group.rank
        to_ranks = [flat.view(size, flat.numel() // size).unbind() for flat in sent]
        from_ranks = [flat.view(size, flat.numel() // size).unbind() for flat in received]
        self.exchange(pending, to_ranks, from_ranks)
        pending.copies += [
            (target[rank], source[rank])
            for target, source in zip(from_ranks, to_ranks, strict=True)
        ]

    def average(self, sent: Tensor, received: Tensor) -> Tensor:
        """The mean over the parts that the ranks sent."""
        parts = received.view(self.group.size, -1)
        mean = parts.mean(0)
        # The CPU adds up the last columns of many rows in another order, unless they fill vectors.
        if self.group.size > _IN_ORDER and (rest := parts.shape[1] % _VECTORS):
            padded = functional.pad(parts[:, -rest:], (0, _VECTORS - rest))
            mean[-rest:] = padded.mean(0)[:rest]
        return mean


class ReduceScatterByPairExchange(ReduceScatterByExchange):
    """The exchange on two ranks, without a copy of this rank's own part."""

    def move(self, pending: Pending, sent: list[Tensor]) -> None:
        """Send the other rank its part of each message."""
        outgoing = [self._split(flat)[1] for flat in sent]
        received = [torch.empty_like(part) for part in outgoing]
        pending.buffers += received
        if self.group.pairwise is not None:
            self.exchange(pending, [(p, p) for p in outgoing], [(r, r) for r in received])
            return
        launch = self.group.process_group.alltoall_base
        for part, target in zip(outgoing, received, strict=True):
            counts = [0, 0]
            counts[1 - self.group.rank] = part.numel()
            self.start(pending, launch, target, part, counts, counts, self.options)

    def average(self, sent: Tensor, received: Tensor) -> Tensor:
        """The mean of both ranks' parts, in the storage of `received`."""
        local = self._split(sent)[0]
        if received.dtype is torch.float16:  # whose sum may overflow
            return received.copy_(received.float().add_(local).div_(2))
        return received.add_(local).div_(2)

    def _split(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """(this rank's part, the other rank's part) of `sent`."""
        first, second = sent.chunk(2)
        return (first, second) if self.group.rank == 0 else (second, first)

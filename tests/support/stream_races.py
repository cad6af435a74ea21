"""Streams on a machine without any: the runtime's own side streams over recorded streams, and a
detector.

Everything runs at once, on the CPU, and each operation is noted with the stream it would have been
queued on. Streams, and the host, have vector clocks (Fidge 1988; Mattern 1989), ordered by the
runtime's own calls: `wait_stream`, `wait_event`, `synchronize`. Two accesses to a storage, one of
them a write, must be ordered by them, or they race. Giving a storage back is a write too, at the
point the stream it was allocated on has reached by then: what is allocated next, wherever, is
queued behind that point and no other.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphshard.runtime import streams as side_streams
from graphshard.runtime.streams import SideStream

Clock = dict[str, int]


class Stream:
    """A stream's name, and how much of every stream is known to come before what it does next."""

    def __init__(self, cuda: RecordedCuda, name: str) -> None:
        self.cuda = cuda
        self.name = name
        self.device = torch.device("cpu")
        self.clock: Clock = {}

    def wait_stream(self, other: Stream) -> None:
        self.learn(other.clock, f"{self.name} waits for {other.name}")

    def record_event(self) -> Clock:
        return dict(self.clock)

    def wait_event(self, event: Clock) -> None:
        self.learn(event, f"{self.name} waits for an event")

    def synchronize(self) -> None:
        self.cuda.host.learn(self.clock, f"the host waits for {self.name}")

    def learn(self, clock: Clock, how: str) -> None:
        self.cuda.waits.append(how)
        if self.cuda.forgets is not None and len(self.cuda.waits) - 1 in self.cuda.forgets:
            return
        for name, count in clock.items():
            self.clock[name] = max(count, self.clock.get(name, 0))

    def knows(self, who: str, count: int) -> bool:
        return who == self.name or self.clock.get(who, 0) >= count


class RecordedCuda:
    """What `SideStream` uses of `torch.cuda`. `forgets`: the numbers of waits that are not made."""

    def __init__(self, forgets: frozenset[int] | None = None) -> None:
        self.forgets = forgets
        self.waits: list[str] = []
        self.compute, self.host = Stream(self, "compute"), Stream(self, "host")
        self.current = self.compute
        self.made = 0
        self.priorities: list[int] = []

    def Stream(self, device: torch.device, priority: int = 0) -> Stream:  # noqa: N802  # as torch's
        self.made += 1
        self.priorities.append(priority)
        return Stream(self, f"side stream {self.made}")

    def current_stream(self, device: torch.device) -> Stream:
        return self.current

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before


@dataclass
class _Block:
    """A storage: who allocated it, wrote it last, and read it since; as (stream, its count)."""

    home: Stream
    what: str
    on_host: bool
    wrote: tuple[str, int] | None = None
    reads: dict[str, int] = field(default_factory=dict)


class Races(TorchDispatchMode):
    """A context that notes each access to memory and whether it races; `found` says which do."""

    def __init__(self, cuda: RecordedCuda) -> None:
        super().__init__()
        self.cuda = cuda
        self.found: list[str] = []
        self.accesses = 0
        self.freed_behind_side_streams = 0  # blocks given back that a side stream had used
        self._blocks: dict[int, _Block] = {}
        self._watches: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._on_host: set[int] = set()

    # -- what happens ---------------------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # its operations on local tensors come by next
        kwargs = kwargs or {}
        given = tensors_in((args, kwargs))
        if func.namespace == "c10d":
            written = tensors_in(args[0])
        else:
            written = [
                tensor
                for argument, value in self._arguments(func, args, kwargs)
                if argument.alias_info is not None and argument.alias_info.is_write
                for tensor in tensors_in(value)
            ]
        stream = self._stream_of(given)
        if not _only_views(func):
            read = [t for t in given if not any(t is w for w in written)]
            self._note(stream, str(func), read=read, written=written)
        result = func(*args, **kwargs)
        known = {t.untyped_storage()._cdata for t in given}
        new = [t for t in tensors_in(result) if t.untyped_storage()._cdata not in known]
        self._note(stream, str(func), read=[], written=new)
        return result

    def by_host(self, what: str, tensors: Any) -> None:
        """The host reads and writes `tensors`, as an optimizer does with what was offloaded."""
        self._note(self.cuda.host, what, read=[], written=tensors_in(tensors))

    def lies_on_host(self, tensors: Any) -> None:
        """These stand for memory of the host."""
        self._on_host.update(t.untyped_storage()._cdata for t in tensors_in(tensors))

    def _stream_of(self, given: list[Tensor]) -> Stream:
        current = self.cuda.current
        on_host = all(t.untyped_storage()._cdata in self._on_host for t in given)
        return self.cuda.host if current is self.cuda.compute and given and on_host else current

    @staticmethod
    def _arguments(func: Any, args: Any, kwargs: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
        for position, argument in enumerate(func._schema.arguments):
            if argument.name in kwargs:
                yield argument, kwargs[argument.name]
            elif position < len(args):
                yield argument, args[position]

    # -- whether it may -------------------------------------------------------------------------

    def _note(
        self, stream: Stream, what: str, *, read: list[Tensor], written: list[Tensor]
    ) -> None:
        # What the host has waited for comes before whatever it queues from then on.
        for name, count in self.cuda.host.clock.items():
            stream.clock[name] = max(count, stream.clock.get(name, 0))
        stream.clock[stream.name] = count = stream.clock.get(stream.name, 0) + 1
        for tensor in read:
            block = self._block(tensor, stream, what)
            self._ordered(stream, block, what, block.wrote, "reads what", "wrote")
            block.reads[stream.name] = count
        for tensor in written:
            block = self._block(tensor, stream, what)
            self._ordered(stream, block, what, block.wrote, "writes over what", "wrote")
            for reader in block.reads.items():
                self._ordered(stream, block, what, reader, "writes over what", "reads")
            block.wrote, block.reads = (stream.name, count), {}
        self.accesses += len(read) + len(written)

    def _ordered(
        self,
        stream: Stream,
        block: _Block,
        what: str,
        other: tuple[str, int] | None,
        does: str,
        did: str,
    ) -> None:
        if other is not None and not stream.knows(*other):
            self.found.append(f"{what} on {stream.name} {does} {other[0]} {did} ({block.what})")

    def _give_back(self, address: int) -> None:
        block = self._blocks.pop(address, None)
        if block is None or block.on_host:
            return
        wrote = [] if block.wrote is None else [block.wrote]
        used = [*wrote, *block.reads.items()]
        self.freed_behind_side_streams += any(name != block.home.name for name, _ in used)
        for other in used:
            self._ordered(block.home, block, "free", other, "gives back what", "uses")

    def _block(self, tensor: Tensor, stream: Stream, what: str) -> _Block:
        storage = tensor.untyped_storage()
        address = storage._cdata
        if address not in self._watches:
            self._watches[address] = weakref.ref(storage, lambda _: self._forget(address))
        if address not in self._blocks:
            home = self.cuda.compute if stream is self.cuda.host else stream
            on_host = address in self._on_host
            self._blocks[address] = _Block(home, f"{list(tensor.shape)} of {what}", on_host)
        return self._blocks[address]

    def _forget(self, address: int) -> None:
        self._give_back(address)
        self._watches.pop(address, None)
        self._on_host.discard(address)

    # -- the context ----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._resize, self._new_host = torch.UntypedStorage.resize_, side_streams.new_host
        resize, new_host = self._resize, self._new_host

        def noted_resize(storage: torch.UntypedStorage, size: int) -> None:
            if size == 0:
                self._give_back(storage._cdata)
            resize(storage, size)

        def noted_host(like: Tensor) -> Tensor:
            made = torch.empty(0, dtype=like.dtype)  # allocated by no stream
            with torch.utils._python_dispatch._disable_current_modes():
                made = new_host(like)
            self._on_host.add(made.untyped_storage()._cdata)
            return made

        torch.UntypedStorage.resize_ = noted_resize  # type: ignore[method-assign]
        side_streams.new_host = noted_host
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        side_streams.new_host = self._new_host


@contextmanager
def recorded_streams(cuda: RecordedCuda) -> Iterator[None]:
    """Inside, groups made and copies started on the CPU have side streams, recorded by `cuda`."""
    made, copying = side_streams.communicator_stream, side_streams.copy_stream
    found: dict[Any, SideStream] = {}

    def copy_stream(device: torch.device, direction: str) -> SideStream:
        return found.setdefault(direction, SideStream(device, cuda))

    side_streams.communicator_stream = lambda device: SideStream(device, cuda, priority=-1)
    side_streams.copy_stream = copy_stream
    try:
        yield
    finally:
        side_streams.communicator_stream, side_streams.copy_stream = made, copying


def tensors_in(tree: Any) -> list[Tensor]:
    """The plain tensors of a pytree, and the local ones of its DTensors."""
    found = []
    for leaf in tree_leaves(tree):
        if isinstance(leaf, DTensor):
            leaf = leaf._local_tensor
        if isinstance(leaf, Tensor):
            found.append(leaf)
    return found


def _only_views(func: Any) -> bool:
    """Whether `func` reads no memory: all it returns are views of its arguments."""
    returns = func._schema.returns
    return bool(returns) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in returns
    )

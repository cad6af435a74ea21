"""The memory of a GPU: what torch's allocator reserves, by a replay of a step's requests, and more.

Steps are replayed until one reserves nothing more, since the first ones leave holes behind: the
optimizer's states are made in what the first step gave back. A hardware file may state its own
figures of what a process takes beside tensors, as `overhead = {"context": ..., ...}`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Any

from graphshard.cost.allocations import Request, StepRequests
from graphshard.cost.caching_allocator import (
    EXPANDABLE,
    MIB,
    SEGMENTS,
    Block,
    CachingAllocator,
    OutOfDeviceMemoryError,
)
from graphshard.cost.collective_cost import ranks_of
from graphshard.hardware.hardware import Hardware
from graphshard.program import ops
from graphshard.program.program import COMPUTE, Program

STEPS = 12
"""Steps that are replayed at most; most programs reserve nothing more from the third on."""

EAGER_STEPS = 2
"""Steps before a program's forward and backward are captured as CUDA graphs."""

GRAPHS = "CUDA graphs"

CLONES = "cloned out of graphs"

SHOWN = 5
"""Segments that `Usage.largest` names."""

WORKSPACES = "cuBLAS workspaces"


@dataclass(frozen=True)
class SegmentUse:
    """One segment when most bytes are in use, in bytes.

    used: of tensors. largest: of its largest free block. stream: whose pool it is in. holders: what
    lies in it, largest first.
    """

    size: int
    used: int
    largest: int
    stream: str
    holders: tuple[str, ...]

    @property
    def free(self) -> int:
        """Bytes that nothing uses."""
        return self.size - self.used


@dataclass(frozen=True)
class Usage:
    """Where reserved bytes are in a step of its own, when tensors ask for most.

    Attributes:
        live: bytes that tensors ask for.
        rounding: bytes by which their blocks are larger.
        holes: free bytes in segments that also hold tensors.
        unused: bytes of segments that hold none.
        by_stream: bytes of segments by the stream or pool they belong to.
        largest: the segments with the most free bytes.
    """

    live: int
    rounding: int
    holes: int
    unused: int
    by_stream: Mapping[str, int]
    largest: tuple[SegmentUse, ...]


@dataclass(frozen=True)
class ReservedMemory:
    """What torch's allocator reserves for a training step, in bytes.

    Attributes:
        bytes: the most that segments take: `torch.cuda.max_memory_reserved()`.
        allocated: the most in blocks in use: `torch.cuda.max_memory_allocated()`.
        steps: the steps replayed until no more was reserved.
        retries: how often the device was full, and free segments went back to it.
        failed: the request that did not fit, even so, as text; "" if all did. Then all other
            figures are those of a device without a limit.
        settings: of the allocator.
    """

    bytes: int
    allocated: int
    steps: int
    retries: int
    failed: str
    settings: str
    _replay: _Replay = field(repr=False, compare=False)

    @cached_property
    def usage(self) -> Usage:
        """Where the bytes are, by one more step."""
        return self._replay.usage()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        usage = asdict(self.usage)
        return {
            "reserved_bytes": self.bytes,
            "allocated_bytes": self.allocated,
            "live_bytes": usage.pop("live"),
            **usage,
            "steps": self.steps,
            "retries": self.retries,
            "failed": self.failed,
            "settings": self.settings,
        }


def reserved_memory(
    requests: StepRequests,
    workspaces: tuple[int, ...] = (),
    *,
    capacity: int | None = None,
    settings: str = SEGMENTS,
) -> ReservedMemory:
    """Replay the `requests` of a step until steps reserve nothing more.

    The `workspaces` of cuBLAS are requested at the first step and kept. At most `capacity` bytes
    may be reserved; None for no limit.
    """
    expandable = settings == EXPANDABLE
    allocator = CachingAllocator(capacity, expandable=expandable)
    replay = _Replay(requests, workspaces, allocator)
    failed = ""
    try:
        replay.run()
    except OutOfDeviceMemoryError as error:
        failed = f"{replay.asked}: {error}"
        replay = _Replay(requests, workspaces, CachingAllocator(expandable=expandable))
        replay.run()
    allocator = replay.allocator
    return ReservedMemory(
        allocator.peak_reserved,
        allocator.peak_allocated,
        replay.steps,
        allocator.retries,
        failed,
        settings,
        replay,
    )


class _Replay:
    """Steps of `requests` on `allocator`.

    asked: the request that failed, as text. live: bytes of tensors; most: their maximum in the
    last step.
    """

    def __init__(
        self, requests: StepRequests, workspaces: tuple[int, ...], allocator: CachingAllocator
    ) -> None:
        self.requests, self.workspaces, self.allocator = requests, workspaces, allocator
        self.asked = ""
        self.live = 0
        self.most = 0
        self.steps = 0
        self.blocks: dict[int, Block] = {}
        self._request: Request | None = None
        self._target: int | None = None
        self._usage: Usage | None = None

    def run(self) -> None:
        """Replay until a step reserves nothing more."""
        try:
            for request in self.requests.held:
                self._malloc(request)
            reserved = -1
            least = EAGER_STEPS + self.requests.graphs
            while self.steps < STEPS and reserved != self.allocator.peak_reserved:
                reserved = self.allocator.peak_reserved if self.steps >= least else -1
                self._step()
        except OutOfDeviceMemoryError:
            self.asked = f"{self._request} in step {self.steps + 1}"
            raise

    def usage(self) -> Usage:
        if self._usage is None:
            self.most = 0
            self._step()
            self._target, self.most = self.most, 0
            self._step()
        assert self._usage is not None
        return self._usage

    def _step(self) -> None:
        requests, blocks, free = self.requests, self.blocks, self.allocator.free
        first = self.steps == 0
        if first:
            for size in self.workspaces:
                self._malloc(Request(size, COMPUTE, WORKSPACES))
        graphs = requests.graphs and self.steps >= EAGER_STEPS
        if graphs and self.steps == EAGER_STEPS:
            self.allocator.empty_cache()  # as `torch.cuda.graph` does
        self._forward_and_backward(graphs)
        if first:
            for request in requests.states:
                self._malloc(request)
        temporary = [self._malloc(request) for request in requests.temporary]
        if graphs:  # results are cloned out of the pool
            for key in requests.outliving:
                size = blocks[key].requested
                temporary.append(self._malloc(Request(size, COMPUTE, CLONES)))
        for block in (*temporary, *(blocks.pop(key) for key in requests.outliving)):
            self.live -= block.requested
            free(block)
        self.steps += 1

    def _forward_and_backward(self, graphs: bool) -> None:
        for event in self.requests.events:
            if event.new is None:
                block = self.blocks.pop(event.key)
                self.live -= block.requested
                self.allocator.free(block)
            else:
                asked = replace(event.new, stream=GRAPHS) if graphs else event.new
                self.blocks[event.key] = self._malloc(asked)

    def _malloc(self, request: Request) -> Block:
        self._request = request
        block = self.allocator.malloc(request.size, request.stream, request)
        self.live += request.size
        if self.live > self.most:
            self.most = self.live
            if self.live == self._target:
                self._usage = self._look()
        return block

    def _look(self) -> Usage:
        segments = tuple(self._segments())
        by_stream: Counter[str] = Counter()
        for segment in segments:
            by_stream[segment.stream] += segment.size
        return Usage(
            self.live,
            self.allocator.allocated - self.live,
            sum(segment.free for segment in segments if segment.used),
            sum(segment.size for segment in segments if not segment.used),
            dict(by_stream),
            tuple(sorted(segments, key=lambda segment: -segment.free)[:SHOWN]),
        )

    def _segments(self) -> Iterator[SegmentUse]:
        for address in self.allocator.segments:
            size = used = largest = 0
            held: Counter[str] = Counter()
            stream = ""
            for block in self.allocator.blocks(address):
                stream = f"{block.pool.stream}, {'small' if block.pool.small else 'large'}"
                if not block.mapped:
                    continue
                size += block.size
                if block.used:
                    used += block.size
                    held[str(block.label)] += block.size
                else:
                    largest = max(largest, block.size)
            names = tuple(name for name, _ in held.most_common(3))
            yield SegmentUse(size, used, largest, stream, names)


# -- what a process takes beside torch's tensors ------------------------------------------------

CONTEXT = 500 * MIB
"""The CUDA context with the kernels that a training step loads.

A context alone takes 287 MB with lazy loading (pytorch/pytorch pull 86509), 426 MiB with CUDA 13
(unslothai/unsloth-zoo pull 1053); cuBLAS, attention and NCCL add their kernels. An estimate.
"""

COMMUNICATOR = 560 * MIB
"""NCCL's buffers of one communicator within a node.

8 H100 hold 1.06 GB outside torch once they have communicated (NVIDIA/nccl issue 1685), context
included. By NCCL's sources a connection has 4 MiB for Simple, 4.7 for LL128 and 0.5 for LL, in
pages of 2 MiB 10, and 24 channels have a ring's and a tree's connections. An estimate: connections
over a network, NVLS and NCCL_BUFFSIZE change it, and 1.6 GB were seen (NVIDIA/nccl issue 864).
"""

WORKSPACE = 8_519_680
"""cuBLAS's workspace for one handle and stream, which torch takes of its own allocator.

The default of torch, :4096:2:16:8, is 8,519,680 bytes (seen in discuss.pytorch.org 178671); on
Hopper and later 32 MiB (pytorch/pytorch pull 120925).
"""

HANDLES = 2
"""The threads that call cuBLAS: forward's and autograd's, each with a handle of its own."""

DRIVER = 0.011
"""The part of the datasheet's memory that the driver keeps: of 80 GiB torch finds 79.1 or 79.25."""


@dataclass(frozen=True)
class Overheads:
    """Bytes on a GPU beside tensors.

    context: of CUDA. communicators: NCCL's buffers, of all communicators of the program.
    workspaces: of cuBLAS, one for each handle; these are part of what torch reserves. driver: what
    the driver keeps of the device's memory.
    """

    context: int
    communicators: int
    workspaces: tuple[int, ...]
    driver: int

    @property
    def outside(self) -> int:
        """Bytes that torch's allocator does not count."""
        return self.context + self.communicators

    @classmethod
    def of(cls, program: Program, hardware: Hardware) -> Overheads:
        """The overheads of a rank that runs `program`."""
        groups = {
            ops.group_of(node)
            for node in program.nodes()
            if ops.is_collective(node) and ranks_of(node, program) > 1
        }
        return _overheads(hardware, len(groups))


def usable_bytes(hardware: Hardware, communicators: int) -> int:
    """Bytes of a device that torch can reserve, with so many communicators; on hosts all."""
    if hardware.is_host:
        return hardware.memory_bytes
    overheads = _overheads(hardware, communicators)
    return hardware.memory_bytes - overheads.driver - overheads.outside


def _overheads(hardware: Hardware, communicators: int) -> Overheads:
    given = hardware.overhead
    workspace = int(given.get("workspace", WORKSPACE))
    return Overheads(
        int(given.get("context", CONTEXT)),
        int(given.get("communicator", COMMUNICATOR)) * communicators,
        (workspace,) * HANDLES if workspace else (),
        int(given.get("driver", DRIVER * hardware.memory_bytes)),
    )

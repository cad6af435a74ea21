"""The rules of torch's caching allocator for CUDA, on addresses that are only numbers.

A request is rounded up to 512 bytes and belongs to the small pool (up to 1 MiB) or the large one of
its stream. It takes the smallest cached block that is large enough, the lowest address first, or
else a new segment of the device: 2 MiB for small requests, 20 MiB below 10 MiB, else the request
rounded up to 2 MiB. What a block has too much is split off if it is worth it: 512 bytes in the
small pool, more than 1 MiB in the large one. A freed block merges with its free neighbours in its
segment. If the device is full, segments without a block in use go back to it, and the request is
tried again.

With `expandable_segments` each stream and pool has one range of addresses, which is mapped page by
page: 2 MiB in the small pool, 20 MiB in the large one. A request may grow the free block at the end
of what is mapped; pages that nothing uses go back when the device is full.

Written after the comments and the behaviour of c10/cuda/CUDACachingAllocator.cpp. Left out are CUDA
graphs' private pools and garbage collection by age.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field

from graphshard.errors import CostError
from graphshard.format import human_bytes

KIB, MIB = 1 << 10, 1 << 20

MIN_BLOCK = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_REQUEST = 10 * MIB
LARGE_ROUNDING = 2 * MIB

_NO_LIMIT = 1 << 62


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings of torch's allocator, as in PYTORCH_CUDA_ALLOC_CONF.

    Args:
        expandable_segments: map pages behind a growing range in place of segments.
        max_split_bytes: cached blocks of this size or more are not split, and serve only requests
            of this size or more that leave at most 20 MiB of them; None for no limit.
        roundup_divisions: sizes are rounded up to the next of so many steps between two powers of
            2; 0 or 1 for multiples of 512 bytes.
        large_segment_bytes: of the segment that requests between 1 and 10 MiB share.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    roundup_divisions: int = 0
    large_segment_bytes: int = 20 * MIB

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Read the text of PYTORCH_CUDA_ALLOC_CONF, such as "expandable_segments:True"."""
        values: dict[str, bool | int] = {}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            name, colon, value = (part.strip() for part in entry.partition(":"))
            try:
                if not colon:
                    raise ValueError("no value")
                if name == "expandable_segments":
                    values[name] = {"true": True, "false": False}[value.lower()]
                elif name == "max_split_size_mb":
                    values["max_split_bytes"] = _at_least(value, 20) * MIB
                elif name == "large_segment_size_mb":
                    values["large_segment_bytes"] = _at_least(value, 20) * MIB
                elif name == "roundup_power2_divisions":
                    values["roundup_divisions"] = _power_of_2(value)
                elif name not in _WITHOUT_EFFECT:
                    raise CostError(
                        f"the allocator's setting {name!r} is not modelled; modelled are "
                        "expandable_segments, max_split_size_mb, roundup_power2_divisions (one "
                        "number) and large_segment_size_mb"
                    )
            except (KeyError, ValueError) as error:
                raise CostError(
                    f"the allocator's setting {entry!r} is malformed ({error}); write it as in "
                    "PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True"
                ) from None
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The text that `parse` reads."""
        parts = []
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        if self.max_split_bytes is not None:
            parts.append(f"max_split_size_mb:{self.max_split_bytes // MIB}")
        if self.roundup_divisions > 1:
            parts.append(f"roundup_power2_divisions:{self.roundup_divisions}")
        if self.large_segment_bytes != 20 * MIB:
            parts.append(f"large_segment_size_mb:{self.large_segment_bytes // MIB}")
        return ",".join(parts)


DEFAULT = AllocatorSettings()

NO_CACHE = "none"
"""The text for PYTORCH_NO_CUDA_MEMORY_CACHING=1."""


def allocator_settings(text: str) -> AllocatorSettings | None:
    """The settings that `text` names, as in PYTORCH_CUDA_ALLOC_CONF; None for "none"."""
    return None if text == NO_CACHE else AllocatorSettings.parse(text)


_WITHOUT_EFFECT = frozenset(
    {
        "release_lock_on_cudamalloc",
        "pinned_use_cuda_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_reserve_segment_size_mb",
    }
)
"""Settings that change neither sizes nor places on the device."""


def _at_least(text: str, least: int) -> int:
    value = int(text)
    if value < least:
        raise ValueError(f"at least {least}")
    return value


def _power_of_2(text: str) -> int:
    value = int(text)
    if value < 1 or value & (value - 1):
        raise ValueError("a power of 2")
    return value


class OutOfDeviceMemoryError(Exception):
    """A request that the device cannot serve, even after all free segments went back to it.

    bytes: the request, rounded. reserved, allocated: bytes when it failed.
    """

    def __init__(self, size: int, reserved: int, allocated: int) -> None:
        super().__init__(
            f"{human_bytes(size)} asked for, with {human_bytes(reserved)} reserved and "
            f"{human_bytes(allocated)} of it in use"
        )
        self.bytes, self.reserved, self.allocated = size, reserved, allocated


class Block:
    """A range of addresses in a segment: in use, waiting for an event, free, or not mapped.

    `before` and `after` are its neighbours in the segment.
    """

    __slots__ = (
        "address",
        "after",
        "before",
        "label",
        "mapped",
        "pool",
        "requested",
        "segment",
        "size",
        "used",
        "waiting",
    )

    def __init__(self, pool: Pool, segment: int, address: int, size: int) -> None:
        self.pool, self.segment = pool, segment
        self.address, self.size, self.requested = address, size, 0
        self.used, self.waiting, self.mapped = False, False, True
        self.before: Block | None = None
        self.after: Block | None = None
        self.label: Hashable = None

    @property
    def free(self) -> bool:
        """Whether nothing uses it; it may still not be mapped."""
        return not self.used and not self.waiting

    @property
    def alone(self) -> bool:
        """Whether it is a whole segment."""
        return self.before is None and self.after is None


Key = tuple[int, int]
"""Size and address, the order in which free blocks are tried."""


@dataclass
class Pool:
    """The small or large blocks of one stream; `free` is sorted by size, then address."""

    stream: Hashable
    small: bool
    free: list[Key] = field(default_factory=list)
    blocks: dict[int, Block] = field(default_factory=dict)  # by address, the free ones
    unmapped: list[Block] = field(default_factory=list)

    def put(self, block: Block) -> None:
        """Add a free block."""
        insort(self.free, (block.size, block.address))
        self.blocks[block.address] = block

    def take(self, block: Block) -> None:
        """Remove a free block."""
        del self.free[bisect_left(self.free, (block.size, block.address))]
        del self.blocks[block.address]


class CachingAllocator:
    """torch's caching allocator of one device, with `capacity` bytes for segments if given.

    place: the address of a new segment of so many bytes; None for one of the allocator's own.
    reserved, allocated: bytes of segments, and of the blocks in use, rounding included; peak_*:
    their maxima. retries: how often segments went back to the device to make room.
    """

    def __init__(
        self,
        capacity: int | None = None,
        settings: AllocatorSettings | None = None,
        place: Callable[[int], int | None] | None = None,
    ) -> None:
        self.capacity = _NO_LIMIT if capacity is None else capacity
        self.settings = settings or AllocatorSettings()
        self.max_split = self.settings.max_split_bytes or _NO_LIMIT
        self.reserved = self.allocated = 0
        self.peak_reserved = self.peak_allocated = 0
        self.retries = 0
        self.segments: dict[int, Block] = {}  # the first block of each, by the segment's address
        self._pools: dict[tuple[Hashable, bool], Pool] = {}
        self._waiting: dict[int, Block] = {}  # by address
        self._place = place
        self._next = SMALL_SEGMENT  # the address of the next segment

    # -- requests ---------------------------------------------------------------------------------

    def rounded(self, size: int) -> int:
        """The bytes of the block that a request of `size` bytes needs."""
        if size < MIN_BLOCK:
            return MIN_BLOCK
        steps = self.settings.roundup_divisions
        if steps > 1 and size > MIN_BLOCK * steps:
            if size & (size - 1) == 0:
                return size
            step = (1 << (size.bit_length() - 1)) // steps
            return -(-size // step) * step
        return -(-size // MIN_BLOCK) * MIN_BLOCK

    def malloc(self, size: int, stream: Hashable = 0, label: Hashable = None) -> Block:
        """Allocate `size` bytes, 1 or more, for `stream`."""
        rounded = self.rounded(size)
        pool = self._pool(stream, small=rounded <= SMALL_REQUEST)
        block = (
            self._cached(pool, rounded)
            or self._new_segment(pool, rounded)
            or (self._release_oversize(pool, rounded) and self._new_segment(pool, rounded))
            or self._retry(pool, rounded)
        )
        if not block:
            raise OutOfDeviceMemoryError(rounded, self.reserved, self.allocated)
        if self._worth_splitting(block, rounded):
            block = self._split(block, rounded)
        block.used, block.requested, block.label = True, size, label
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block, *, after_event: bool = False) -> None:
        """Give `block` back; with `after_event`, only `events_passed` makes it free.

        So it is with a block that `record_stream` named: events on the other streams have to pass.
        """
        block.used = False
        self.allocated -= block.size
        if after_event:
            block.waiting = True
            self._waiting[block.address] = block
        else:
            self._freed(block)

    def events_passed(self) -> None:
        """Free the blocks that waited for events; torch looks for them at each request."""
        for block in list(self._waiting.values()):
            self.event_passed(block)

    def event_passed(self, block: Block) -> None:
        """Free `block`, which waited for events."""
        del self._waiting[block.address]
        block.waiting = False
        self._freed(block)

    def empty_cache(self) -> None:
        """Give all segments, or pages, without a block in use back to the device."""
        self.events_passed()
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if self.settings.expandable_segments:
                    self._unmap(block)
                elif block.alone:
                    self._release(block)

    # -- segments ---------------------------------------------------------------------------------

    def blocks(self, segment: int) -> Iterator[Block]:
        """The blocks of the segment at the address `segment`, in the order of addresses."""
        block: Block | None = self.segments[segment]
        while block is not None:
            yield block
            block = block.after

    def _pool(self, stream: Hashable, *, small: bool) -> Pool:
        pool = self._pools.get((stream, small))
        if pool is None:
            pool = self._pools[stream, small] = Pool(stream, small)
        return pool

    def _cached(self, pool: Pool, size: int) -> Block | None:
        """The best cached block for `size` bytes, taken out of the pool."""
        index = bisect_left(pool.free, (size, 0))
        if index == len(pool.free):
            return None
        block = pool.blocks[pool.free[index][1]]
        if self.settings.expandable_segments:
            # A block that can grow counts with what it can grow to.
            for _, address in pool.free[index + 1 :]:
                other = pool.blocks[address]
                if _can_grow_to(other) >= _can_grow_to(block):
                    break
                block = other
        if size < self.max_split <= block.size:
            return None
        if size >= self.max_split and block.size >= size + 20 * MIB:
            return None
        pool.take(block)
        return block

    def _segment_size(self, size: int) -> int:
        if size <= SMALL_REQUEST:
            return SMALL_SEGMENT
        if size < LARGE_REQUEST:
            return self.settings.large_segment_bytes
        return -(-size // LARGE_ROUNDING) * LARGE_ROUNDING

    def _reserve(self, size: int) -> bool:
        if self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        if self.settings.expandable_segments:
            return self._grow(pool, size)
        bytes_ = self._segment_size(size)
        if not self._reserve(bytes_):
            return None
        address = None if self._place is None else self._place(bytes_)
        if address is None:
            address = self._next
            self._next += bytes_
        block = self.segments[address] = Block(pool, address, address, bytes_)
        return block

    def _retry(self, pool: Pool, size: int) -> Block | None:
        self.retries += 1
        self.empty_cache()
        return self._new_segment(pool, size)

    def _release_oversize(self, pool: Pool, size: int) -> bool:
        """Give back cached blocks that are too large to split, until `size` bytes are free."""
        if self.settings.max_split_bytes is None or self.settings.expandable_segments:
            return False
        need = max(size, self.max_split)
        index = bisect_left(pool.free, (need, 0))
        if index < len(pool.free):
            self._release(pool.blocks[pool.free[index][1]])
            return True
        released = 0
        while pool.free and released < need and pool.free[-1][0] >= self.max_split:
            released += pool.free[-1][0]
            self._release(pool.blocks[pool.free[-1][1]])
        return released >= need

    def _release(self, block: Block) -> None:
        block.pool.take(block)
        del self.segments[block.segment]
        self.reserved -= block.size

    # -- splitting and merging --------------------------------------------------------------------

    def _worth_splitting(self, block: Block, size: int) -> bool:
        left = block.size - size
        if block.pool.small or self.settings.expandable_segments:
            return left >= MIN_BLOCK
        return size < self.max_split and left > SMALL_REQUEST

    def _split(self, block: Block, size: int) -> Block:
        """Cut `size` bytes off the beginning of `block`, whose rest goes back to its pool."""
        first = Block(block.pool, block.segment, block.address, size)
        self._link(block.before, first)
        self._link(first, block)
        block.address += size
        block.size -= size
        block.pool.put(block)
        return first

    def _freed(self, block: Block) -> None:
        self._merge(block)
        block.label = None
        block.pool.put(block)

    def _merge(self, block: Block) -> None:
        """Merge `block` with its neighbours if they are free, and mapped or not as it is."""
        before, after = block.before, block.after
        if before is not None and before.free and before.mapped == block.mapped:
            self._take(before)
            block.address = before.address
            block.size += before.size
            self._link(before.before, block)
        if after is not None and after.free and after.mapped == block.mapped:
            self._take(after)
            block.size += after.size
            self._link(block, after.after)

    def _link(self, before: Block | None, after: Block | None) -> None:
        """Make two blocks of a segment neighbours; None is its beginning, or its end."""
        if after is not None:
            after.before = before
        if before is not None:
            before.after = after
        elif after is not None:
            self.segments[after.segment] = after

    def _take(self, block: Block) -> None:
        if block.mapped:
            block.pool.take(block)
        else:
            block.pool.unmapped.remove(block)

    # -- expandable segments ----------------------------------------------------------------------

    def _page(self, pool: Pool) -> int:
        return SMALL_SEGMENT if pool.small else self.settings.large_segment_bytes

    def _grow(self, pool: Pool, size: int) -> Block | None:
        """Map pages for `size` bytes at the lowest address of the pool's range that has room."""
        block = self._place_to_grow(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            after = block.after
            assert after is not None
            if not self._map(after, min(size - block.size, after.size)):
                return None
            block = after  # mapping merged `block` into it
        pool.take(block)
        return block

    def _place_to_grow(self, pool: Pool, size: int) -> Block:
        for unmapped in sorted(pool.unmapped, key=lambda block: block.address):
            before = unmapped.before
            start = before if before is not None and before.free else unmapped
            if _room(start) >= size:
                return start
        # torch reserves addresses for 1.125 times the device's memory, so there is always room.
        block = Block(pool, self._next, self._next, 1 << 50)
        block.mapped = False
        pool.unmapped.append(block)
        self.segments[block.segment] = block
        self._next += 1 << 50
        return block

    def _map(self, block: Block, size: int) -> bool:
        """Map the first `size` bytes of `block`, rounded up to pages, and merge what is free."""
        page = self._page(block.pool)
        bytes_ = min(-(-size // page) * page, block.size)
        if not self._reserve(bytes_):
            return False
        block.pool.unmapped.remove(block)
        if bytes_ < block.size:
            rest = Block(block.pool, block.segment, block.address + bytes_, block.size - bytes_)
            rest.mapped = False
            self._link(rest, block.after)
            self._link(block, rest)
            block.size = bytes_
            block.pool.unmapped.append(rest)
        block.mapped = True
        self._freed(block)
        return True

    def _unmap(self, block: Block) -> None:
        """Give the whole pages inside the free `block` back to the device."""
        page = self._page(block.pool)
        start = block.segment + -(-(block.address - block.segment) // page) * page
        end = block.segment + (block.address + block.size - block.segment) // page * page
        if end <= start:
            return
        block.pool.take(block)
        for address, size, front in (
            (block.address, start - block.address, True),
            (end, block.address + block.size - end, False),
        ):
            if not size:
                continue
            part = Block(block.pool, block.segment, address, size)
            if front:
                self._link(block.before, part)
                self._link(part, block)
            else:
                self._link(part, block.after)
                self._link(block, part)
            block.pool.put(part)
        block.address, block.size, block.mapped = start, end - start, False
        self.reserved -= block.size
        self._merge(block)
        block.pool.unmapped.append(block)


def _room(block: Block) -> int:
    """The bytes of `block` and of the free ones behind it."""
    room, end = 0, block.after
    while end is not None and end.free:
        room += end.size
        end = end.after
    return block.size + room


def _can_grow_to(block: Block) -> int:
    """The bytes of a free block, with those behind it that are not mapped yet."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)

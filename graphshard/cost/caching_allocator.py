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
graphs' private pools, blocks that wait for another stream's events, and all other settings.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

from graphshard.errors import CostError
from graphshard.format import human_bytes

MIB = 1 << 20

MIN_BLOCK = 512
SMALL_REQUEST = MIB
SMALL_SEGMENT = 2 * MIB
LARGE_REQUEST = 10 * MIB
LARGE_SEGMENT = 20 * MIB
LARGE_ROUNDING = 2 * MIB

_NO_LIMIT = 1 << 62


SEGMENTS, EXPANDABLE, NO_CACHE = "", "expandable_segments:True", "none"
"""The settings that are modelled: torch's own, pages behind a growing range in place of segments,
and none of it (PYTORCH_NO_CUDA_MEMORY_CACHING=1)."""


def checked_settings(text: str) -> str:
    """The settings that `text` names, as in PYTORCH_CUDA_ALLOC_CONF: one of the three above."""
    known = {SEGMENTS: SEGMENTS, "expandable_segments:false": SEGMENTS, NO_CACHE: NO_CACHE}
    known[EXPANDABLE.lower()] = EXPANDABLE
    found = known.get(text.replace(" ", "").strip(",").lower())
    if found is None:
        raise CostError(
            f"the allocator's settings {text!r} are not modelled; modelled are {EXPANDABLE}, as in "
            f'PYTORCH_CUDA_ALLOC_CONF, and "{NO_CACHE}" for PYTORCH_NO_CUDA_MEMORY_CACHING=1'
        )
    return found


class OutOfDeviceMemoryError(Exception):
    """A request that the device cannot serve, even after all free segments went back to it."""


class Block:
    """A range of addresses in a segment: in use, free, or not mapped.

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
    )

    def __init__(self, pool: Pool, segment: int, address: int, size: int) -> None:
        self.pool, self.segment = pool, segment
        self.address, self.size, self.requested = address, size, 0
        self.used, self.mapped = False, True
        self.before: Block | None = None
        self.after: Block | None = None
        self.label: Hashable = None


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

    expandable: with `expandable_segments`.
    reserved, allocated: bytes of segments, and of the blocks in use, rounding included; peak_*:
    their maxima. retries: how often segments went back to the device to make room.
    """

    def __init__(self, capacity: int | None = None, *, expandable: bool = False) -> None:
        self.capacity = _NO_LIMIT if capacity is None else capacity
        self.expandable = expandable
        self.reserved = self.allocated = 0
        self.peak_reserved = self.peak_allocated = 0
        self.retries = 0
        self.segments: dict[int, Block] = {}  # the first block of each, by the segment's address
        self._pools: dict[tuple[Hashable, bool], Pool] = {}
        self._next = SMALL_SEGMENT  # the address of the next segment

    # -- requests ---------------------------------------------------------------------------------

    def rounded(self, size: int) -> int:
        """The bytes of the block that a request of `size` bytes needs."""
        return max(1, -(-size // MIN_BLOCK)) * MIN_BLOCK

    def malloc(self, size: int, stream: Hashable = 0, label: Hashable = None) -> Block:
        """Allocate `size` bytes, 1 or more, for `stream`."""
        rounded = self.rounded(size)
        pool = self._pool(stream, small=rounded <= SMALL_REQUEST)
        block = self._cached(pool, rounded) or self._new_segment(pool, rounded)
        if block is None:
            self.retries += 1
            self.empty_cache()
            block = self._new_segment(pool, rounded)
        if block is None:
            raise OutOfDeviceMemoryError(
                f"{human_bytes(rounded)} asked for, with {human_bytes(self.reserved)} reserved and "
                f"{human_bytes(self.allocated)} of it in use"
            )
        left = block.size - rounded
        if left >= MIN_BLOCK if pool.small or self.expandable else left > SMALL_REQUEST:
            block = self._split(block, rounded)
        block.used, block.requested, block.label = True, size, label
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return block

    def free(self, block: Block) -> None:
        """Give `block` back."""
        block.used = False
        self.allocated -= block.size
        self._freed(block)

    def empty_cache(self) -> None:
        """Give all segments, or pages, without a block in use back to the device."""
        for pool in self._pools.values():
            for block in list(pool.blocks.values()):
                if self.expandable:
                    self._unmap(block)
                elif block.before is None and block.after is None:  # a whole segment
                    pool.take(block)
                    del self.segments[block.segment]
                    self.reserved -= block.size

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
        if self.expandable:
            # A block that can grow counts with what it can grow to.
            for _, address in pool.free[index + 1 :]:
                other = pool.blocks[address]
                if _can_grow_to(other) >= _can_grow_to(block):
                    break
                block = other
        pool.take(block)
        return block

    def _reserve(self, size: int) -> bool:
        if self.reserved + size > self.capacity:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _new_segment(self, pool: Pool, size: int) -> Block | None:
        if self.expandable:
            return self._grow(pool, size)
        bytes_ = -(-size // LARGE_ROUNDING) * LARGE_ROUNDING
        if size < LARGE_REQUEST:
            bytes_ = SMALL_SEGMENT if size <= SMALL_REQUEST else LARGE_SEGMENT
        if not self._reserve(bytes_):
            return None
        block = self.segments[self._next] = Block(pool, self._next, self._next, bytes_)
        self._next += bytes_
        return block

    # -- splitting and merging --------------------------------------------------------------------

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
        if before is not None and not before.used and before.mapped == block.mapped:
            self._take(before)
            block.address = before.address
            block.size += before.size
            self._link(before.before, block)
        if after is not None and not after.used and after.mapped == block.mapped:
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
            start = before if before is not None and not before.used else unmapped
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
        page = _page(block.pool)
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
        page = _page(block.pool)
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


def _page(pool: Pool) -> int:
    return SMALL_SEGMENT if pool.small else LARGE_SEGMENT


def _room(block: Block) -> int:
    """The bytes of `block` and of the free ones behind it."""
    room, end = 0, block.after
    while end is not None and not end.used:
        room += end.size
        end = end.after
    return block.size + room


def _can_grow_to(block: Block) -> int:
    """The bytes of a free block, with those behind it that are not mapped yet."""
    after = block.after
    return block.size + (after.size if after is not None and not after.mapped else 0)

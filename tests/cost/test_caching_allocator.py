"""torch's caching allocator: its rules on sequences worked out by hand, and what always holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.cost.caching_allocator import (
    EXPANDABLE,
    MIB,
    SEGMENTS,
    CachingAllocator,
    OutOfDeviceMemoryError,
    checked_settings,
)
from graphshard.errors import CostError


def segments(allocator: CachingAllocator) -> list[int]:
    """The mapped bytes of each segment, by address."""
    return [
        sum(block.size for block in allocator.blocks(address) if block.mapped)
        for address in sorted(allocator.segments)
    ]


@pytest.mark.parametrize(
    ("size", "rounded", "segment"),
    [
        (1, 512, 2 * MIB),
        (512, 512, 2 * MIB),
        (513, 1024, 2 * MIB),
        (MIB, MIB, 2 * MIB),
        (MIB + 1, MIB + 512, 20 * MIB),
        (10 * MIB - 512, 10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (10 * MIB + 1, 10 * MIB + 512, 12 * MIB),
        (21 * MIB, 21 * MIB, 22 * MIB),
    ],
)
def test_sizes_of_blocks_and_of_segments(size, rounded, segment):
    allocator = CachingAllocator()
    assert allocator.rounded(size) == rounded
    block = allocator.malloc(size)
    assert allocator.reserved == segment
    # What a large segment has too much is split off only above 1 MiB.
    assert block.size == rounded if segment - rounded > MIB else segment


SCRIPTS: dict[str, tuple[str, int | None, list[tuple[Any, ...]], list[int]]] = {
    "a large block keeps a rest of 1 MiB and gives up more": (
        "", None, [("a", 11, 0), ("b", 11 - 1 / 2048, 12), ("c", 1 + 1 / 2048, 23 - 1 / 2048)],
        [12, 12],
    ),
    "small requests share a segment down to 512 bytes": (
        "", None, [("a", 1, 0), ("b", 1 - 1 / 2048, 1), ("c", 1 / 4096, 2 - 1 / 2048),
                   ("d", 1 / 4096, 2)],
        [2, 2],
    ),
    "the smallest block that fits is taken, of equal ones the lowest, and its rest": (
        "", None, [("a", 40, 0), ("b", 30, 40), ("c", 50, 70), ("d", 30, 120), "d", "c", "b", "a",
                   ("e", 29, 40), ("f", 30, 120), ("g", 31, 0), ("h", 9, 31)],
        [40, 30, 50, 30],
    ),
    "pools of sizes and of streams share nothing": (
        "", None, [("a", 30, 0), "a", ("b", 30, 30, "gathers"), ("c", 1 / 4096, 60), ("d", 30, 0)],
        [30, 30, 2],
    ),
    "free neighbours merge and others do not": (
        "", None, [("a", 60, 0), "a", ("b", 20, 0), ("c", 20, 20), ("d", 20, 40), "b", "d",
                   ("e", 40, 60), "c", ("f", 60, 0)],
        [60, 40],
    ),
    "a full device gets back the segments that hold nothing": (
        "", 100, [("a", 40, 0), ("b", 30, 40), "b", ("c", 10, 40), ("d", 20, 70, "gathers"), "d",
                  ("e", 26, 90)],
        [40, 30, 26],
    ),
    "expandable segments map pages behind each other": (
        EXPANDABLE, None,
        [("a", 25, 0), ("b", 15, 25), "b", ("c", 30, 25)],
        [60],
    ),
    "expandable segments prefer a hole to the end that can grow": (
        EXPANDABLE, None, [("a", 18, 0), ("b", 10, 18), "a", ("c", 11, 0)], [40],
    ),
    "expandable segments give back whole pages": (
        EXPANDABLE, 80,
        [("a", 50, 0), ("b", 10, 50), "a", ("c", 40, None, "gathers"), ("d", 10, 40)],
        [20, 40],
    ),
}  # fmt: skip
"""By what it shows: settings, MiB of the device, steps, and the MiB of the segments at the end.

A step requests a block, named, of so many MiB, which must lie so many behind the first one, on a
stream; or gives the block of a name back."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_blocks_lie_where_torch_puts_them(name):
    text, most, steps, mapped = SCRIPTS[name]
    capacity = None if most is None else most * MIB
    allocator = CachingAllocator(capacity, expandable=text == EXPANDABLE)
    blocks: dict[str, Any] = {}
    first = None
    for step in steps:
        if isinstance(step, str):
            allocator.free(blocks.pop(step))
        else:
            name, size, place, *stream = step
            block = blocks[name] = allocator.malloc(int(size * MIB), *stream)
            first = block.address if first is None else first
            assert place is None or block.address - first == place * MIB, step
        check(allocator, list(blocks.values()))
    assert segments(allocator) == [size * MIB for size in mapped]


def test_a_device_that_stays_full_refuses_and_says_what_it_holds():
    allocator = CachingAllocator(capacity=100 * MIB)
    block = allocator.malloc(60 * MIB)
    with pytest.raises(OutOfDeviceMemoryError, match=r"50.00 MiB asked for"):
        allocator.malloc(50 * MIB)
    allocator.free(block)
    assert allocator.malloc(90 * MIB).size == 90 * MIB
    assert allocator.reserved == 90 * MIB


def test_settings_are_read_as_torch_writes_them():
    assert checked_settings("Expandable_Segments: true") == EXPANDABLE
    assert checked_settings("expandable_segments:False,") == checked_settings("") == SEGMENTS


@pytest.mark.parametrize(
    "text", ["expandable_segments", "expandable_segments:yes", "max_split_size_mb:50"]
)
def test_settings_that_are_wrong_or_not_modelled(text):
    with pytest.raises(CostError, match=r"are not modelled; modelled are expandable_segments:True"):
        checked_settings(text)


KIB = 1 << 10
SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 3 * MIB),
    st.integers(1, 60).map(lambda size: size * MIB),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.sampled_from(["a", "b"])),
        st.tuples(st.just("free"), st.integers(0, 1 << 30), st.just(0)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=60,
)


def check(allocator: CachingAllocator, used: list) -> None:
    """No block overlaps another, free ones are where the pools say, and all bytes are there."""
    mapped = inside = 0
    free = set()
    for address in allocator.segments:
        before = None
        for block in allocator.blocks(address):
            assert block.before is before
            if before is None:
                assert block.address == address
            else:
                assert block.address == before.address + before.size
                # Free neighbours are merged, except across the border of what is mapped.
                assert block.used or before.used or block.mapped != before.mapped
            if block.mapped:
                mapped += block.size
            if block.used:
                inside += block.size
                assert block.mapped
                assert block.size >= block.requested
            elif block.mapped:
                free.add((block.size, block.address))
            before = block
    pooled = [key for pool in allocator._pools.values() for key in pool.free]
    assert len(pooled) == len(set(pooled))
    assert set(pooled) == free
    assert all(pool.free == sorted(pool.free) for pool in allocator._pools.values())
    assert allocator.reserved == mapped <= allocator.capacity
    assert allocator.allocated == inside == sum(block.size for block in used)
    assert allocator.reserved >= allocator.allocated
    assert allocator.peak_reserved >= allocator.reserved
    assert allocator.peak_allocated >= allocator.allocated


def malloc(allocator: CachingAllocator, size: int, stream: str) -> list:
    """The block; none if the device is full, and then even after all went back that could."""
    try:
        return [allocator.malloc(size, stream)]
    except OutOfDeviceMemoryError:
        pass
    reserved, retries = allocator.reserved, allocator.retries
    allocator.empty_cache()
    assert allocator.reserved <= reserved
    assert retries > 0
    assert reserved + max(size, 2 * MIB) + 20 * MIB > allocator.capacity
    return []


@settings(max_examples=150, deadline=None)
@given(st.booleans(), STEPS, st.sampled_from([None, 200 * MIB]))
def test_what_always_holds(expandable, steps, capacity):
    allocator = CachingAllocator(capacity, expandable=expandable)
    used: list = []
    for step, what, more in steps:
        if step == "malloc":
            used += malloc(allocator, what, more)
        elif step == "free" and used:
            allocator.free(used.pop(what % len(used)))
        elif step == "empty":
            allocator.empty_cache()
        check(allocator, used)
    for block in used:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 0

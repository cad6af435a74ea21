"""torch's caching allocator: its rules on sequences worked out by hand, and what always holds."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.cost.caching_allocator import (
    KIB,
    MIB,
    AllocatorSettings,
    CachingAllocator,
    OutOfDeviceMemoryError,
)
from graphshard.errors import CostError

EXPANDABLE = AllocatorSettings(expandable_segments=True)


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


SPLIT_100 = "max_split_size_mb:100"
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
    "a block used on another stream waits for its event": (
        "", None, [("a", 30, 0), "a later", ("b", 30, 30), "events", ("c", 30, 0)],
        [30, 30],
    ),
    "a full device gets back the segments that hold nothing": (
        "", 100, [("a", 40, 0), ("b", 30, 40), "b", ("c", 10, 40), ("d", 20, 70, "gathers"), "d",
                  ("e", 26, 90)],
        [40, 30, 26],
    ),
    "and waits for events before": ("", 60, [("a", 60, 0), "a later", ("b", 40, 60)], [40]),
    "expandable segments map pages behind each other": (
        "expandable_segments:True", None,
        [("a", 25, 0), ("b", 15, 25), "b", ("c", 30, 25)],
        [60],
    ),
    "expandable segments prefer a hole to the end that can grow": (
        "expandable_segments:True", None, [("a", 18, 0), ("b", 10, 18), "a", ("c", 11, 0)], [40],
    ),
    "expandable segments give back whole pages": (
        "expandable_segments:True", 80,
        [("a", 50, 0), ("b", 10, 50), "a", ("c", 40, None, "gathers"), ("d", 10, 40)],
        [20, 40],
    ),
    "blocks above max_split_size stay whole": (
        SPLIT_100, None, [("a", 200, 0), "a", ("b", 50, 200), ("c", 190, 0), ("d", 120, 250)],
        [200, 50, 120],
    ),
    "of those a full device gets back one first": (
        SPLIT_100, 400, [("a", 50, 0), "a", ("b", 300, 50), "b", ("c", 150, 350)],
        [50, 150],
    ),
}  # fmt: skip
"""By what it shows: settings, MiB of the device, steps, and the MiB of the segments at the end.

A step requests a block, named, of so many MiB, which must lie so many behind the first one, on a
stream; or gives the block of a name back, at once or when the events have passed."""


@pytest.mark.parametrize("name", SCRIPTS)
def test_blocks_lie_where_torch_puts_them(name):
    text, most, steps, mapped = SCRIPTS[name]
    capacity = None if most is None else most * MIB
    allocator = CachingAllocator(capacity, AllocatorSettings.parse(text))
    blocks: dict[str, Any] = {}
    first = None
    for step in steps:
        if step == "events":
            allocator.events_passed()
        elif isinstance(step, str):
            name, _, later = step.partition(" ")
            allocator.free(blocks.pop(name), after_event=bool(later))
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


@pytest.mark.parametrize(
    ("divisions", "size", "rounded"),
    [(4, 1200 * KIB, 1280 * KIB), (4, MIB, MIB), (8, 1025 * KIB, 1152 * KIB), (4, 1000, 1024)],
)
def test_rounding_to_parts_of_powers_of_two(divisions, size, rounded):
    settings_ = AllocatorSettings.parse(f"roundup_power2_divisions:{divisions}")
    assert CachingAllocator(settings=settings_).rounded(size) == rounded


def test_settings_are_read_as_torch_writes_them():
    text = "expandable_segments:True,max_split_size_mb:64,roundup_power2_divisions:8"
    read = AllocatorSettings.parse(text)
    assert read == AllocatorSettings(True, 64 * MIB, 8)
    assert str(read) == text
    assert AllocatorSettings.parse("") == AllocatorSettings()
    assert AllocatorSettings.parse("release_lock_on_cudamalloc:True") == AllocatorSettings()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("expandable_segments", "malformed"),
        ("expandable_segments:yes", "malformed"),
        ("max_split_size_mb:5", "at least 20"),
        ("roundup_power2_divisions:3", "power of 2"),
        ("garbage_collection_threshold:0.6", "is not modelled"),
        ("backend:cudaMallocAsync", "is not modelled"),
    ],
)
def test_settings_that_are_wrong_or_not_modelled(text, message):
    with pytest.raises(CostError, match=message):
        AllocatorSettings.parse(text)


SIZES = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 3 * MIB),
    st.integers(1, 60).map(lambda size: size * MIB),
)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("malloc"), SIZES, st.sampled_from(["a", "b"])),
        st.tuples(st.just("free"), st.integers(0, 1 << 30), st.booleans()),
        st.tuples(st.just("events"), st.just(0), st.just(0)),
        st.tuples(st.just("empty"), st.just(0), st.just(0)),
    ),
    max_size=60,
)
SETTINGS = st.sampled_from(
    [AllocatorSettings(), EXPANDABLE, AllocatorSettings(max_split_bytes=32 * MIB)]
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
                assert not (block.free and before.free and block.mapped == before.mapped)
            if block.mapped:
                mapped += block.size
            if block.used:
                inside += block.size
                assert block.mapped
                assert block.size >= block.requested
            elif block.mapped and not block.waiting:
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
    except OutOfDeviceMemoryError as error:
        refused = error
    reserved, retries = allocator.reserved, allocator.retries
    allocator.empty_cache()
    assert allocator.reserved <= reserved
    assert retries > 0
    assert reserved + max(refused.bytes, 2 * MIB) + 20 * MIB > allocator.capacity
    return []


@settings(max_examples=150, deadline=None)
@given(SETTINGS, STEPS, st.sampled_from([None, 200 * MIB]))
def test_what_always_holds(settings_, steps, capacity):
    allocator = CachingAllocator(capacity, settings_)
    used: list = []
    for step, what, more in steps:
        if step == "malloc":
            used += malloc(allocator, what, more)
        elif step == "free" and used:
            block = used.pop(what % len(used))
            address, size = block.address, block.size
            allocator.free(block, after_event=more)
            if more:
                assert block.waiting
                assert (block.address, block.size) == (address, size)
        elif step == "events":
            allocator.events_passed()
        elif step == "empty":
            allocator.empty_cache()
        check(allocator, used)
    for block in used:
        allocator.free(block)
    allocator.empty_cache()
    assert allocator.reserved == allocator.allocated == 0

"""torch's caching allocator: its rules on sequences worked out by hand, and what always holds."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.cost.allocator_settings import KIB, MIB, AllocatorSettings
from graphshard.cost.caching_allocator import CachingAllocator, OutOfDeviceMemoryError
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


def test_a_large_block_keeps_a_rest_of_one_mebibyte_and_gives_up_more():
    allocator = CachingAllocator()
    assert allocator.malloc(11 * MIB).size == 12 * MIB  # the rest is exactly 1 MiB
    assert allocator.allocated == 12 * MIB
    block = allocator.malloc(11 * MIB - 512)  # 1 MiB and 512 bytes
    assert block.size == 11 * MIB - 512
    assert allocator.reserved == 24 * MIB


def test_small_requests_share_a_segment_down_to_512_bytes():
    allocator = CachingAllocator()
    first = allocator.malloc(MIB)
    second = allocator.malloc(MIB - 512)
    third = allocator.malloc(300)
    assert [b.address - first.address for b in (first, second, third)] == [0, MIB, 2 * MIB - 512]
    assert allocator.reserved == 2 * MIB
    allocator.malloc(1)
    assert allocator.reserved == 4 * MIB


def test_the_smallest_block_that_fits_is_taken_and_of_equal_ones_the_lowest():
    allocator = CachingAllocator()
    sizes = [40, 30, 50, 30]
    blocks = [allocator.malloc(size * MIB) for size in sizes]
    places = [block.address for block in blocks]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.malloc(29 * MIB).address == places[1]
    assert allocator.malloc(30 * MIB).address == places[3]
    assert allocator.malloc(31 * MIB).address == places[0]  # its rest of 9 MiB is split off
    assert allocator.malloc(9 * MIB).address == places[0] + 31 * MIB
    assert allocator.reserved == 150 * MIB


def test_pools_of_sizes_and_of_streams_share_nothing():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(30 * MIB, "compute"))
    allocator.malloc(30 * MIB, "gathers")
    assert allocator.reserved == 60 * MIB
    allocator.malloc(100, "compute")  # the small pool
    assert allocator.reserved == 62 * MIB
    allocator.malloc(30 * MIB, "compute")
    assert allocator.reserved == 62 * MIB


def test_free_neighbours_merge_and_others_do_not():
    allocator = CachingAllocator()
    whole = allocator.malloc(60 * MIB)
    place = whole.address
    allocator.free(whole)
    left, middle, right = (allocator.malloc(20 * MIB) for _ in range(3))
    assert segments(allocator) == [60 * MIB]
    allocator.free(left)
    allocator.free(right)
    allocator.malloc(40 * MIB)  # 40 MiB are free, in two places
    assert segments(allocator) == [60 * MIB, 40 * MIB]
    allocator.free(middle)
    assert allocator.malloc(60 * MIB).address == place
    assert allocator.reserved == 100 * MIB


def test_a_block_used_on_another_stream_waits_for_its_event():
    allocator = CachingAllocator()
    block = allocator.malloc(30 * MIB)
    allocator.free(block, after_event=True)
    assert allocator.allocated == 0
    other = allocator.malloc(30 * MIB)
    assert allocator.reserved == 60 * MIB
    allocator.events_passed()
    assert allocator.malloc(30 * MIB).address == block.address
    assert other.address != block.address


def test_a_full_device_gets_back_the_segments_that_hold_nothing():
    allocator = CachingAllocator(capacity=100 * MIB)
    kept = allocator.malloc(40 * MIB)
    cached = allocator.malloc(30 * MIB)
    place = cached.address
    allocator.free(cached)
    held = allocator.malloc(10 * MIB)  # splits the segment of 30
    assert held.address == place
    allocator.free(allocator.malloc(20 * MIB, "gathers"))
    assert segments(allocator) == [40 * MIB, 30 * MIB, 20 * MIB]
    allocator.malloc(26 * MIB)  # the 20 go back; the 30 hold something
    assert allocator.retries == 1
    assert segments(allocator) == [40 * MIB, 30 * MIB, 26 * MIB]
    assert kept.used


def test_a_device_that_stays_full_refuses_and_says_what_it_holds():
    allocator = CachingAllocator(capacity=100 * MIB)
    block = allocator.malloc(60 * MIB)
    with pytest.raises(OutOfDeviceMemoryError, match=r"50.00 MiB asked for"):
        allocator.malloc(50 * MIB)
    allocator.free(block)
    assert allocator.malloc(90 * MIB).size == 90 * MIB
    assert allocator.reserved == 90 * MIB


def test_a_retry_waits_for_events():
    allocator = CachingAllocator(capacity=60 * MIB)
    allocator.free(allocator.malloc(60 * MIB), after_event=True)
    assert allocator.malloc(40 * MIB).size == 40 * MIB
    assert allocator.reserved == 40 * MIB


def test_expandable_segments_map_pages_behind_each_other():
    allocator = CachingAllocator(settings=EXPANDABLE)
    first = allocator.malloc(25 * MIB)
    assert segments(allocator) == [40 * MIB]
    second = allocator.malloc(15 * MIB)  # what is left of the second page
    assert (second.address - first.address, allocator.reserved) == (25 * MIB, 40 * MIB)
    allocator.free(second)
    third = allocator.malloc(30 * MIB)  # grows the free end by 15 MiB: one page
    assert (third.address, allocator.reserved) == (second.address, 60 * MIB)
    allocator.malloc(600)
    assert segments(allocator) == [60 * MIB, 2 * MIB]


def test_expandable_segments_prefer_a_hole_to_the_end_that_can_grow():
    allocator = CachingAllocator(settings=EXPANDABLE)
    hole = allocator.malloc(18 * MIB)
    place = hole.address
    allocator.malloc(10 * MIB)  # 12 MiB are left at the end
    allocator.free(hole)
    assert allocator.malloc(11 * MIB).address == place
    assert allocator.reserved == 40 * MIB


def test_expandable_segments_give_back_whole_pages():
    allocator = CachingAllocator(capacity=80 * MIB, settings=EXPANDABLE)
    first = allocator.malloc(50 * MIB)
    place = first.address
    last = allocator.malloc(10 * MIB)
    allocator.free(first)
    assert allocator.reserved == 60 * MIB
    allocator.malloc(40 * MIB, "gathers")  # two of three pages hold nothing
    assert allocator.retries == 1
    assert allocator.reserved == 60 * MIB
    assert last.used
    assert allocator.malloc(10 * MIB).address == place + 40 * MIB


def test_blocks_above_max_split_size_stay_whole():
    allocator = CachingAllocator(settings=AllocatorSettings.parse("max_split_size_mb:100"))
    large = allocator.malloc(200 * MIB)
    allocator.free(large)
    allocator.malloc(50 * MIB)  # not out of the large one
    assert allocator.reserved == 250 * MIB
    assert allocator.malloc(190 * MIB).size == 200 * MIB
    assert allocator.reserved == 250 * MIB
    allocator.malloc(120 * MIB)
    assert allocator.reserved == 370 * MIB


def test_a_full_device_gets_back_one_large_block_first():
    settings_ = AllocatorSettings.parse("max_split_size_mb:100")
    allocator = CachingAllocator(capacity=400 * MIB, settings=settings_)
    small = allocator.malloc(50 * MIB)
    allocator.free(small)
    allocator.free(allocator.malloc(300 * MIB))
    allocator.malloc(150 * MIB)
    assert allocator.retries == 0
    assert sorted(segments(allocator)) == [50 * MIB, 150 * MIB]


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

"""Histories of torch's allocator, replayed: what is equal, and what is seen not to be."""

from __future__ import annotations

import random

import pytest

from examples.benchmarks.gpu_reserved import replay_trace
from graphshard.cost.caching_allocator import MIB, AllocatorSettings, CachingAllocator
from graphshard.errors import CostError
from graphshard.torch_private.compat import private

TOP = 0x7F00_0000_0000


def entry(action: str, address: int, size: int, stream: int = 0) -> dict:
    return {"action": action, "addr": address, "size": size, "stream": stream, "time_us": 0}


def by_hand() -> list[dict]:
    """Two segments, the later one lower; the freed one of them is split, and one waits."""
    low = TOP - 64 * MIB
    return [
        entry("segment_alloc", TOP, 40 * MIB),
        entry("alloc", TOP, 40 * MIB),
        entry("segment_alloc", low, 40 * MIB),
        entry("alloc", low, 39 * MIB + 5),
        entry("free_requested", TOP, 40 * MIB),
        entry("free_completed", TOP, 40 * MIB),
        entry("free_requested", low, 39 * MIB + 5),
        entry("free_completed", low, 39 * MIB + 5),
        entry("alloc", low, 15 * MIB),  # of two equal blocks the lower one
        entry("alloc", low + 15 * MIB, 20 * MIB),
        entry("free_requested", low, 15 * MIB),  # an event has not passed yet
        {"action": "snapshot", "size": 0, "stream": 0},
        entry("alloc", TOP, 15 * MIB),
        entry("free_completed", low, 15 * MIB),
        entry("alloc", low, 14 * MIB),
        entry("segment_alloc", TOP + 64 * MIB, 2 * MIB, 7),
        entry("alloc", TOP + 64 * MIB, 100, 7),
        entry("free_requested", TOP + 64 * MIB, 100, 7),
        entry("free_completed", TOP + 64 * MIB, 100, 7),
        entry("segment_free", TOP + 64 * MIB, 2 * MIB, 7),
    ]


def test_a_history_by_hand_is_replayed_address_by_address():
    replayed = replay_trace(by_hand())
    assert not replayed.differences
    assert (replayed.requests, replayed.other_places) == (7, 0)
    assert replayed.peak == replayed.model.peak_reserved == 82 * MIB
    assert replayed.reserved == replayed.model.reserved == 80 * MIB


def test_an_allocator_with_other_rules_is_found_out():
    entries = by_hand()
    entries[8:8] = [entry("segment_alloc", TOP + 128 * MIB, 16 * MIB)]  # instead of a cached block
    entries[9] = entry("alloc", TOP + 128 * MIB, 15 * MIB)
    entries[11] = entry("free_requested", TOP + 128 * MIB, 15 * MIB)
    del entries[14]
    entries = entries[:12]
    replayed = replay_trace(entries)
    assert replayed.differences
    assert replayed.other_places >= 1
    assert replayed.differences[0] == (
        "request 3 for 15,728,640 bytes on stream 0: torch has 100,663,296 reserved, the model "
        "83,886,080"
    )


def test_a_history_that_is_not_whole_is_refused():
    with pytest.raises(CostError, match="has no requests; call"):
        replay_trace([entry("segment_alloc", TOP, 2 * MIB)])
    with pytest.raises(CostError, match="gives back 0x7f0000000000, which it never requested"):
        replay_trace([entry("free_requested", TOP, 512)])


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_histories_of_the_model_itself_come_out_equal(text):
    """A long random history, recorded from the model with entries as torch writes them."""
    settings = AllocatorSettings.parse(text)
    model, chance, entries, blocks = CachingAllocator(None, settings), random.Random(3), [], []
    mapped = "segment_map" if settings.expandable_segments else "segment_alloc"
    freed = "segment_unmap" if settings.expandable_segments else "segment_free"
    for _ in range(3000):
        before = model.reserved
        if blocks and chance.random() < 0.48:
            block = blocks.pop(chance.randrange(len(blocks)))
            address, size, stream = block.address, block.requested, block.pool.stream
            entries += [
                entry(a, address, size, stream) for a in ("free_requested", "free_completed")
            ]
            model.free(block)
        elif chance.random() < 0.01:
            model.empty_cache()
            if before > model.reserved:
                entries.append(entry(freed, 0, before - model.reserved))
        else:
            size = int(2 ** chance.uniform(3, 26))
            block = model.malloc(size, chance.choice([0, 5]))
            if model.reserved > before:
                entries.append(entry(mapped, block.address, model.reserved - before))
            entries.append(entry("alloc", block.address, size, block.pool.stream))
            blocks.append(block)
    replayed = replay_trace(entries, settings)
    assert not replayed.differences
    assert replayed.model.peak_reserved == replayed.peak == model.peak_reserved
    assert replayed.other_places == 0


def test_this_torch_has_what_records_a_history():
    for name in ("_set_allocator_settings", "_record_memory_history", "_snapshot"):
        assert callable(private("torch.cuda.memory", name))

"""Reserved memory: the model of torch's allocator against torch's own, and predictions against it.

A training step is run with the allocator's history on. The model replays that history, and has to
reserve the same bytes at every request; so rules that torch changes are found. Then
`Estimate.reserved_bytes`, which knows only the program, is compared with what was reserved.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import torch

import graphshard
from examples.benchmarks import allocator_trace
from examples.benchmarks.gpu_checks import BF16, config, fake_ranks, hardware, step_of
from examples.benchmarks.gpu_table import Place, Row
from examples.benchmarks.stand_in import stand_in
from examples.gpt import GPT, Block
from graphshard.cost.caching_allocator import AllocatorSettings

RANKS = 8
WITHIN = 0.05
"""The part by which predicted reserved bytes may be off."""

CASES: dict[str, dict[str, Any]] = {
    "bf16": {"mixed_precision": BF16},
    "bf16, recompute": {"mixed_precision": BF16, "recompute": "units"},
}


def reserved(place: Place) -> Iterator[Row]:
    """A rank of 8 with segments, as torch has them by default."""
    yield from reserved_with(place, "")


def reserved_expandable(place: Place) -> Iterator[Row]:
    """A rank of 8 with expandable segments."""
    yield from reserved_with(place, "expandable_segments:True")


def reserved_with(place: Place, settings: str) -> Iterator[Row]:
    """History, replay and prediction with these settings of the allocator."""
    name = "reserved_expandable" if settings else "reserved"
    if place.cuda:
        if settings:
            allocator_trace.use_settings(settings)
        allocator_trace.record_history()
    fake_ranks(RANKS)
    where = hardware(place)
    for case, fields in CASES.items():
        if place.cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        policy = graphshard.BlockPolicy({Block}, **fields)
        sharded = graphshard.compile(GPT(config(place)), policy, device=place.device)
        stand_in(sharded)
        asked = step_of(sharded, place)[0]
        estimate = graphshard.simulate(
            sharded, hardware=where, optimizer="adamw", backend="nccl", allocator=settings
        )
        yield from compared(name, case, estimate, asked, place)
        del sharded
        gc.collect()
    if place.cuda:
        entries = allocator_trace.history(torch.cuda.current_device())
        yield from replayed(name, entries, settings, torch.cuda.max_memory_reserved())
        yield place.retries(name)


def compared(
    name: str, case: str, estimate: graphshard.Estimate, asked: int, place: Place
) -> Iterator[Row]:
    """Predicted against measured bytes; on a CPU nothing is reserved, and only live ones count."""
    if not place.cuda:
        off = estimate.peak_bytes / asked - 1
        yield Row(name, f"{case}: live", f"{asked / 2**20:.2f} MiB, predicted {off:+.1%}")
        return
    stats = torch.cuda.memory_stats()
    held = stats["reserved_bytes.all.peak"]
    off = estimate.reserved_bytes / held - 1
    said = f"{held / 2**20:.1f} MiB, predicted {off:+.1%}"
    ok = abs(off) <= WITHIN if not place.small else None
    yield Row(name, f"{case}: reserved", said, f"{WITHIN:.0%}", ok)
    assert estimate.reserved is not None
    used = stats["allocated_bytes.all.peak"]
    off = estimate.reserved.allocated / used - 1
    said = f"{used / 2**20:.1f} MiB, predicted {off:+.1%}"
    ok = abs(off) <= WITHIN if not place.small else None
    yield Row(name, f"{case}: allocated", said, f"{WITHIN:.0%}", ok)
    free, total = torch.cuda.mem_get_info()
    outside = total - free - torch.cuda.memory_reserved()
    assert estimate.overheads is not None
    said = f"{outside / 2**20:.0f} MiB, counted as {estimate.overheads.context / 2**20:.0f}"
    yield Row(name, f"{case}: outside torch (other processes included)", said)


def replayed(name: str, entries: list[dict[str, Any]], settings: str, held: int) -> Iterator[Row]:
    """The history replayed: equal bytes at every request, at equal places."""
    found = allocator_trace.replay_trace(entries, AllocatorSettings.parse(settings))
    said = f"{found.requests:,} requests, at most {found.peak / 2**20:.0f} MiB"
    yield Row(name, "history", said)
    said = found.differences[0] if found.differences else "equal bytes at every request"
    yield Row(name, "the model reserves what torch did", said, "equal", found.equal)
    same = found.model_peak == found.peak
    said = f"{found.model_peak / 2**20:.1f} of {found.peak / 2**20:.1f} MiB"
    yield Row(name, "most reserved", said, "equal", same)
    yield Row(name, "other addresses", f"{found.other_places:,}", "0", found.other_places == 0)
    said = f"{found.peak / 2**20:.1f} MiB in the history, {held / 2**20:.1f} in the statistics"
    yield Row(name, "the history is whole", said, "no less", found.peak >= held)

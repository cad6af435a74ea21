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
from examples.benchmarks.gpu_checks import BF16, hardware, mib, off_by, sharded_gpt, step_of
from examples.benchmarks.gpu_table import Place, Row
from examples.benchmarks.harness import fake_ranks
from examples.benchmarks.stand_in import stand_in
from graphshard.cost.allocator_settings import AllocatorSettings

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
        sharded = sharded_gpt(place, **fields)
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
        yield off_by(name, f"{case}: live", asked, estimate.peak_bytes, WITHIN, mib(asked), False)
        return
    assert estimate.reserved is not None
    stats, real = torch.cuda.memory_stats(), not place.small
    for kind, expected in (
        ("reserved", estimate.reserved_bytes),
        ("allocated", estimate.reserved.allocated),
    ):
        found = stats[f"{kind}_bytes.all.peak"]
        yield off_by(name, f"{case}: {kind}", found, expected, WITHIN, mib(found), real)
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
    yield Row(name, "the model reserves what torch did", said, "equal", not found.differences)
    same = found.model.peak_reserved == found.peak
    said = f"{found.model.peak_reserved / 2**20:.1f} of {found.peak / 2**20:.1f} MiB"
    yield Row(name, "most reserved", said, "equal", same)
    yield Row(name, "other addresses", f"{found.other_places:,}", "0", found.other_places == 0)
    said = f"{found.peak / 2**20:.1f} MiB in the history, {held / 2**20:.1f} in the statistics"
    yield Row(name, "the history is whole", said, "no less", found.peak >= held)

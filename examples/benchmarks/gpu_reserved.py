"""Reserved memory: the model of torch's allocator against torch's own, and predictions against it.

A training step is run with the allocator's history on. The model replays that history, and has to
reserve the same bytes at every request; so rules that torch changes are found. Then
`Estimate.reserved_bytes`, which knows only the program, is compared with what was reserved.
"""

from __future__ import annotations

import gc
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

import graphshard
from examples.benchmarks.gpu_checks import BF16, hardware, mib, off_by, sharded_gpt, step_of
from examples.benchmarks.gpu_table import Place, Row
from examples.benchmarks.harness import fake_ranks
from examples.benchmarks.stand_in import stand_in
from graphshard.cost.caching_allocator import AllocatorSettings, Block, CachingAllocator
from graphshard.errors import CostError
from graphshard.torch_private.compat import private

# -- a history, replayed ---------------------------------------------------------------------------

_SHOWN = 5

_GIVES_BACK = ("segment_free", "segment_unmap")

_ACTIONS = frozenset(
    {"segment_alloc", "segment_map", "alloc", "free_requested", "free_completed", *_GIVES_BACK}
)


class TraceReplay:
    """What torch's allocator did, and what the model of it did with the same requests.

    The model is given each request and return, and has to ask the device for the same segments at
    the same requests, and to hand out the same addresses. Segments begin where CUDA put them, as
    which one is lower decides between equal blocks.

    requests: replayed. reserved, peak: bytes of torch's segments at the end, and at most.
    other_places: requests that the model served from another address. differences: the first
    requests at which the two reserved different bytes, as text.
    """

    def __init__(self, settings: AllocatorSettings) -> None:
        self.places: deque[int] = deque()
        self.model = CachingAllocator(None, settings, place=self._place)
        self.expandable = settings.expandable_segments
        self.blocks: dict[int, Block] = {}
        self.going: dict[int, Block] = {}
        self.requests = self.reserved = self.peak = self.other_places = 0
        self.giving_back = False
        self.differences: list[str] = []

    def _place(self, size: int) -> int | None:
        return self.places.popleft() if self.places and not self.expandable else None

    def take(self, entry: Mapping[str, Any]) -> None:
        """Replay one entry; kinds that say nothing about memory are passed over."""
        action = str(entry["action"])
        if action not in _ACTIONS:
            return
        address, size = int(entry["addr"]), int(entry["size"])
        giving_back, self.giving_back = self.giving_back, action in _GIVES_BACK
        if action in ("segment_alloc", "segment_map"):
            self.places.append(address)
            self.reserved += size
            self.peak = max(self.peak, self.reserved)
        elif action in _GIVES_BACK:
            # A full device, or empty_cache, takes all back that holds nothing: one entry for each.
            self.reserved -= size
            if not giving_back:
                self.model.empty_cache()
        elif action == "alloc":
            self._alloc(address, size, entry["stream"])
        elif action == "free_requested":
            block = self._block(self.blocks, address)
            self.model.free(block, after_event=True)
            self.going[address] = block
        elif action == "free_completed":
            self.model.event_passed(self._block(self.going, address))

    def _alloc(self, address: int, size: int, stream: Any) -> None:
        self.requests += 1
        block = self.model.malloc(size, stream)
        self.places.clear()
        self.blocks[address] = block
        self.other_places += block.address != address and not self.expandable
        if self.model.reserved != self.reserved and len(self.differences) < _SHOWN:
            self.differences.append(
                f"request {self.requests:,} for {size:,} bytes on stream {stream}: torch has "
                f"{self.reserved:,} reserved, the model {self.model.reserved:,}"
            )

    def _block(self, blocks: dict[int, Block], address: int) -> Block:
        block = blocks.pop(address, None)
        if block is None:
            raise CostError(
                f"the history gives back {address:#x}, which it never requested; it has to begin "
                "before the first tensor, and to hold all entries"
            )
        return block


def replay_trace(
    entries: Iterable[Mapping[str, Any]], settings: AllocatorSettings | None = None
) -> TraceReplay:
    """Replay a history of one device: entries in order, each with action, addr, size, stream."""
    replay = TraceReplay(settings or AllocatorSettings())
    for entry in entries:
        replay.take(entry)
    if not replay.requests:
        raise CostError(
            "the history has no requests; call torch.cuda.memory._record_memory_history before "
            "the first tensor is made on the device"
        )
    return replay


# -- the section -----------------------------------------------------------------------------------

ENTRIES = 2_000_000
"""Requests and returns that a history holds; older ones are lost."""

RANKS = 8
WITHIN = 0.05
"""The part by which predicted reserved bytes may be off."""

CASES: dict[str, dict[str, Any]] = {
    "bf16": {"mixed_precision": BF16},
    "bf16, recompute": {"mixed_precision": BF16, "recompute": "units"},
}


def reserved(place: Place, settings: str = "") -> Iterator[Row]:
    """History, replay and prediction of a rank of 8, with these settings of the allocator."""
    name = "reserved_expandable" if settings else "reserved"
    if place.cuda:
        if settings:
            private("torch.cuda.memory", "_set_allocator_settings")(settings)
        record = private("torch.cuda.memory", "_record_memory_history")
        record(enabled="all", context=None, max_entries=ENTRIES)
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
            sharded, hardware=where, optimizer="adamw", allocator=settings
        )
        yield from compared(name, case, estimate, asked, place)
        del sharded
        gc.collect()
    if place.cuda:
        torch.cuda.synchronize()
        traces = private("torch.cuda.memory", "_snapshot")()["device_traces"]
        yield from replayed(name, traces[torch.cuda.current_device()], settings)
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


def replayed(name: str, entries: list[dict[str, Any]], settings: str) -> Iterator[Row]:
    """The history replayed: equal bytes at every request, at equal places."""
    found = replay_trace(entries, AllocatorSettings.parse(settings))
    held = torch.cuda.max_memory_reserved()
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

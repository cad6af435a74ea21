"""A history of torch's own allocator, replayed by the model of it.

The entries are those of `torch.cuda.memory._snapshot()["device_traces"][device]`, recorded from
before the first request on. The model is given each request and return, and has to ask the device
for the same segments at the same requests, and to hand out the same addresses. Segments begin where
CUDA put them, as which one is lower decides between equal blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from graphshard.cost.allocator_settings import AllocatorSettings
from graphshard.cost.caching_allocator import Block, CachingAllocator
from graphshard.errors import CostError
from graphshard.torch_private.compat import private

_SHOWN = 5

_GIVES_BACK = ("segment_free", "segment_unmap")

_ACTIONS = frozenset(
    {"segment_alloc", "segment_map", "alloc", "free_requested", "free_completed", *_GIVES_BACK}
)


class TraceReplay:
    """What torch's allocator did, and what the model of it did with the same requests.

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


# -- the history of torch's allocator --------------------------------------------------------------

_MODULE = "torch.cuda.memory"

ENTRIES = 2_000_000
"""Requests and returns that a history holds; older ones are lost."""


def use_settings(text: str) -> None:
    """Set what PYTORCH_CUDA_ALLOC_CONF would have, before anything is allocated."""
    private(_MODULE, "_set_allocator_settings")(text)


def record_history() -> None:
    """Begin to record every request to the allocator, without stacks."""
    record = private(_MODULE, "_record_memory_history")
    record(enabled="all", context=None, max_entries=ENTRIES)


def history(device: int) -> list[dict[str, Any]]:
    """What the allocator of the CUDA device with this index did since `record_history`, in order.

    Each entry has `action`, `addr`, `size` and `stream`.
    """
    torch.cuda.synchronize(device)
    traces = private(_MODULE, "_snapshot")()["device_traces"]
    return list(traces[device]) if device < len(traces) else []

"""What a rank takes of its GPU, as lines of text: reserved, and why it is more than the peak."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from graphshard.cost.reserved import ReservedMemory
from graphshard.format import human_bytes, sentence

if TYPE_CHECKING:
    from graphshard.cost.estimate import Estimate

_MIN_SHARE = 0.02  # of what is reserved, for a segment's free bytes to be shown

_MOST = 3


def device_lines(estimate: Estimate) -> Iterator[str]:
    """Lines on the bytes of the device and of the allocator; none on hosts."""
    overheads = estimate.overheads
    if overheads is None:
        return
    outside = [("CUDA context", overheads.context), ("NCCL", overheads.communicators)]
    outside.append(("driver", overheads.driver))
    shown = ", ".join(f"{name} {human_bytes(size)}" for name, size in outside if size)
    yield sentence(
        f"device     {human_bytes(estimate.device_bytes)}: reserved "
        f"{human_bytes(estimate.reserved_bytes)}, {shown}"
    )
    if estimate.reserved is not None:
        workspaces = sum(overheads.workspaces)
        yield from (sentence(line) for line in _reserved(estimate.reserved, workspaces))


def _reserved(reserved: ReservedMemory, workspaces: int) -> Iterator[str]:
    usage = reserved.usage
    parts = [
        ("tensors at their peak", usage.live - workspaces),
        ("cuBLAS workspaces", workspaces),
        ("rounding", usage.rounding),
        ("holes between tensors", usage.holes),
        ("segments without tensors", usage.unused),
    ]
    shown = ", ".join(f"{human_bytes(size)} {name}" for name, size in parts if size)
    conf = f" with {reserved.settings}" if str(reserved.settings) else ""
    yield f"reserved   {human_bytes(reserved.bytes)}{conf}: {shown}"
    least = _MIN_SHARE * reserved.bytes
    for segment in [s for s in usage.largest if s.free > least][:_MOST]:
        held = f", beside {segment.holders[0]}" if segment.holders else ""
        yield (
            f"  {human_bytes(segment.free)} free in a segment of {human_bytes(segment.size)}"
            f" ({segment.stream}): the largest hole {human_bytes(segment.largest)}{held}"
        )
    if reserved.retries:
        yield (
            f"  the device is full {reserved.retries:,} times in {reserved.steps} steps: then free "
            "segments go back to it, and compute waits"
        )
    if reserved.failed:
        yield f"  no room for {reserved.failed}"

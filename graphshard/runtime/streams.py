"""CUDA streams beside the compute stream, and when memory that they use may be given back.

A side stream waits at a launch for all that compute was given so far; at a wait compute waits for
the event behind the launched work. Tensors are allocated and given back on the compute stream only,
after compute has waited for every use on a side stream. See README.md for why that is safe.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import torch


class Launched:
    """What is behind a launch: the event after it, and the compute stream it was launched from."""

    __slots__ = ("_cuda", "compute", "event")

    def __init__(self, event: Any, compute: Any, cuda: Any) -> None:
        self.event = event
        self.compute = compute
        self._cuda = cuda

    def join(self) -> None:
        """Make the compute stream wait for it."""
        self._cuda.current_stream(self.compute.device).wait_event(self.event)

    def drop(self) -> None:
        """Make the stream it was launched from wait for it, whichever is current on this thread.

        Of a capture that CUDA gave up nothing runs, and there is no waiting for it; whatever else
        ails the device, the next call says so.
        """
        with contextlib.suppress(RuntimeError):
            self.compute.wait_event(self.event)


class SideStream:
    """A stream beside the compute stream.

    Args:
        device: a CUDA device.
        cuda: where streams come from; `torch.cuda`, but for a test that records what they are told.
    """

    def __init__(self, device: torch.device, cuda: Any = torch.cuda) -> None:
        self.device = device
        self.cuda = cuda
        self.stream = cuda.Stream(device)

    def launch(self, work: Callable[..., Any], *args: Any) -> Launched:
        """Queue what `work(*args)` queues, after all that the compute stream was given so far."""
        compute = self.cuda.current_stream(self.device)
        self.stream.wait_stream(compute)
        with self.cuda.stream(self.stream):
            work(*args)
        return Launched(self.stream.record_event(), compute, self.cuda)

    def synchronize(self) -> None:
        """Return once all of it is done: the host waits."""
        self.stream.synchronize()


def new_side_stream(device: torch.device) -> SideStream | None:
    """A side stream on `device`; None where the host computes, and what is launched is done by
    then.
    """
    return SideStream(device) if device.type == "cuda" else None


@cache
def copy_stream(device: torch.device, direction: str) -> SideStream | None:
    """The side stream of copies "in" from the host, or "out" to it."""
    return new_side_stream(device)

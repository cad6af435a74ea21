"""CUDA streams: what runs beside the compute stream, and who may use which memory when.

A rank has the compute stream (torch's current one), one side stream for each communicator, on
which the
gathers and reduces of one group of ranks run in the order of the program, and one for each
direction of copies between device and host. A side stream is a stream with one rule:

    launch   the side stream waits for all that the compute stream has been given so far; then what
    is
             launched is queued on the side stream, and an event is recorded behind it
    wait     the compute stream waits for that event

These are the program's `all_gather`, `reduce_scatter`, `all_reduce`, `to_host` and `to_device`, and
its `wait` and `arrive`: the only events there are, and the host waits for none of them. It runs
ahead by as much as the queues of the device take.

Whose memory it is. Every tensor of a step is allocated on the compute stream, whatever fills it,
and is given back there: by a `free`, or by the last reference to it, which the code of the program
drops behind its last use. The allocator then hands it out in the order in which the host asks, at
once, to whoever asks next on the compute stream. That is safe, whenever the device gets there:

    rule     at the moment the host gives a tensor back, every access to it that was queued on a
             side stream is behind some event that the compute stream has waited for by then; what
             is given
             the memory next is queued on the compute stream, behind that wait, or on a side stream
             that at its launch waits for the compute stream, hence behind it as well
    gather   its full buffers are written by the side stream between launch and wait, read by
    compute
             between wait and `free`; `verify` proves that order of the nodes. The shards, and
             copies of small ones that travel together, are referred to by the `Pending` until the
             wait; casts of shards are copied into the buffers by compute, and gone.
    reduce   gradients are read where they lie, by the side stream between launch and wait, and
    referred to
             by the `Pending` until the wait; so is what it writes, which compute has from then on
    copies   what is read, and what is written, is referred to by the `Copy` until `arrive`
    dropped  a `Pending` or `Copy` that is never waited for (an error in between, or a forward whose
             backward never comes) lets the stream it was launched from wait for it as it goes,
             before its memory does

So no tensor is recorded on a second stream (`record_stream`), which would make the allocator ask
the device, at a later allocation, whether an event has passed, and so make the memory that is at
hand depend on how far the device is. Here it depends on the sequence of allocations alone, which is
that of the program: it is the same in each step from the second on, when the optimizer has made its
state. The second may still ask the device for more, where that state lies in what the first step
left free; once the cache holds what a step needs, most often from the third on, every tensor has
the address it had in the step before.

How far gathers run ahead. A gather begins when the side stream has waited for the compute that the
program
has in front of it, so never earlier than its place in the program, however far ahead the host is;
and its buffers are allocated, in the order of the program, among what is allocated there. The bytes
the allocator has given out after the host issued a node are those of the program's live values at
that node, which `memory_budget` bounds and `verify` checks; the device holds no others. A gather
whose memory was freed by node f, at a place behind f, waits in its side stream for the compute
stream as
of its launch, hence for whatever used that memory up to f: the event of the free needs no event of
its own. Nothing else limits gathers and nothing else must: how many are in flight is what
`forward_prefetch`, `backward_prefetch` or `schedule="overlap"` put between launches and waits.

One communicator runs one collective after the other, in the order of launch, whatever streams they
are on; so it has one side stream, as the simulation has one clock for it. Gathers and reduces of
one group
of ranks share both: a gather launched behind a reduce waits for it, though it could run beside it.
Where they did not, each would have a part of the same links, and of the multiprocessors that
compute runs on, and torch would hold two sets of a communicator's buffers. Whether that is ever
worth it has not been measured, so it is not done; `schedule="overlap"` knows of the one clock, and
orders gathers and reduces by it.
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

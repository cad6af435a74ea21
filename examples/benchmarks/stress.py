"""Trying to break the order of streams: delays by chance on all of them, freed memory poisoned.

The same training is run twice: once with all communication on the compute stream, in the order of
the program, where nothing can overtake anything; and once on side streams of its own, with a delay
by chance before and after whatever is launched, on either side, and before and after each wait,
while what a gather yielded is filled with NaN before its memory goes back. Every loss and the
parameters at the end must be bit-equal: what is read too early, or after it was given to someone
else, differs.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from examples.benchmarks.stand_in import Delay, stand_in
from graphshard.runtime import gather, lower
from graphshard.runtime.gather import AllGather, Gathered
from graphshard.runtime.streams import Launched, SideStream

WIDTH, BATCH = 256, 64
MOST = 1e-4


class Block(nn.Module):
    """Norm, two linear layers, dropout: kernels that give the same bits every time."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH + 8), nn.Linear(2 * WIDTH + 8, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.drop(F.gelu(self.up(self.norm(x)))))


class Stack(nn.Module):
    """Blocks, and the mean square of what comes out."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


@contextmanager
def in_program_order() -> Iterator[None]:
    """Inside, what is launched runs on the compute stream, where it stands."""

    def inline(self: SideStream, work: Callable[..., Any], *args: Any) -> Launched:
        compute = self.cuda.current_stream(self.device)
        work(*args)
        return Launched(compute.record_event(), compute, self.cuda)

    def synchronize_compute(self: SideStream) -> None:
        self.cuda.current_stream(self.device).synchronize()

    with patch.multiple(SideStream, launch=inline, synchronize=synchronize_compute):
        yield


def _poisoning(release_for: Callable[..., Callable[[Tensor], None]]) -> Any:
    """`release_for`, but what is released is poisoned first."""

    def poisoned(of: AllGather, *, copied: bool) -> Callable[[Tensor], None]:
        release = release_for(of, copied=copied)

        def poison_and_release(full: Tensor) -> None:
            gather.poison(full)
            release(full)

        return poison_and_release

    return poisoned


@contextmanager
def stressed(device: torch.device, seed: int) -> Iterator[None]:
    """Inside, streams are delayed by up to `MOST` seconds at a time, and frees poison."""
    chance, delay = random.Random(seed), Delay(device)
    launch, join, free = SideStream.launch, Launched.join, AllGather.free

    def wait() -> None:
        if chance.random() < 0.5:
            delay(MOST * chance.random())

    def delayed_launch(self: SideStream, work: Callable[..., Any], *args: Any) -> Launched:
        def late(*given: Any) -> None:
            wait()
            work(*given)
            wait()

        wait()
        return launch(self, late, *args)

    def delayed_join(self: Launched) -> None:
        wait()
        join(self)
        wait()

    def poisoned_free(self: AllGather, gathered: Gathered) -> None:
        for tensor in gathered:
            # A taken one is None, and a released one has no bytes.
            if tensor is not None and tensor.untyped_storage().nbytes():
                gather.poison(tensor)
        free(self, gathered)

    with (
        patch.object(SideStream, "launch", delayed_launch),
        patch.object(Launched, "join", delayed_join),
        patch.object(AllGather, "free", poisoned_free),
        patch.object(lower, "release_for", _poisoning(lower.release_for)),
    ):
        yield


def trained(device: torch.device, steps: int, **fields: Any) -> tuple[list[float], list[Tensor]]:
    """The losses of every tenth step, and this rank's parameters at the end."""
    torch.manual_seed(0)
    sharded = graphshard.compile(Stack(), graphshard.BlockPolicy({Block}, **fields), device=device)
    stand_in(sharded)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1e-2)
    torch.manual_seed(1)
    batches = [torch.randn(BATCH, WIDTH, device=device) for _ in range(8)]
    losses = []
    for step in range(steps):
        loss = sharded(batches[step % len(batches)])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            losses.append(loss.detach().clone())
    numbers = torch.stack(losses).tolist()
    return numbers, [p.to_local().detach().clone() for p in sharded.parameters()]


def broken(device: torch.device, steps: int, seed: int, **fields: Any) -> str:
    """The difference under stress; "" if there is none. Call it on a "fake" group.

    `steps` training steps under a policy with these fields.
    """
    with in_program_order():
        expected = trained(device, steps, **fields)
    with stressed(device, seed):
        found = trained(device, steps, **fields)
    for number, (one, other) in enumerate(zip(expected[0], found[0], strict=True)):
        if one != other:
            return f"the loss of step {10 * number} is {other}, not {one}"
    if not all(map(torch.equal, expected[1], found[1])):
        return "parameters differ at the end"
    return ""

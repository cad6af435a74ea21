"""Processes in one group, which play one case after another."""

from __future__ import annotations

import faulthandler
import os
import signal
import tempfile
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import torch
from fuzz_case import Case
from fuzz_model import DEVICE
from fuzz_play import CRASH, EQUAL, FAILURES, Outcome, play
from ranks import start_rank

from graphshard.passes import offload_activations

LIMITS = {"eager": 90.0, "inductor": 300.0}
"""Seconds that a case may take, by backend. Two busy cores compile slowly."""

HUNG = "hung"


class Pair:
    """The processes; after a failure they are replaced at the next case."""

    def __init__(self) -> None:
        self._ranks = 0
        self._processes: list[Any] = []
        self._pipes: list[Any] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def play(self, case: Case, *, eager: bool = False) -> list[Outcome]:
        """The outcome of `fuzz_play.play` on each rank. One that hangs or dies has crashed."""
        if self._processes and self._ranks != case.ranks:
            self.stop()
        if not self._processes:
            self._ranks = case.ranks
            self._start()
        for pipe in self._pipes:
            pipe.send((case, eager))
        deadline = time.monotonic() + LIMITS[case.backend]
        outcomes = [self._receive(rank, deadline) for rank in range(self._ranks)]
        kinds = {outcome.kind for outcome in outcomes}
        places = {outcome.where for outcome in outcomes}
        errors_stay = os.environ.get("FUZZ_DEVICE") == "cuda" and kinds != {EQUAL}
        if errors_stay or kinds & {*FAILURES} or len(kinds) > 1 or len(places) > 1:
            self.stop()
        return outcomes

    def _receive(self, rank: int, deadline: float) -> Outcome:
        pipe = self._pipes[rank]
        if not pipe.poll(max(0.0, deadline - time.monotonic())):
            stacks = self._stacks(rank)
            return Outcome(CRASH, "an unknown step", f"{HUNG}: rank {rank} did not end\n{stacks}")
        try:
            return pipe.recv()
        except EOFError:
            return Outcome(CRASH, "an unknown step", f"rank {rank} died\n{self._said(rank)}")

    def _stacks(self, rank: int) -> str:
        """The Python stacks of a rank that hangs."""
        os.kill(self._processes[rank].pid, signal.SIGUSR1)
        time.sleep(1.0)
        return self._said(rank)

    def _said(self, rank: int) -> str:
        assert self._folder is not None
        return (Path(self._folder.name) / f"stderr_{rank}").read_text(errors="replace")[-6000:]

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        for rank in range(self._ranks):
            ours, theirs = Pipe()
            args = (_serve, rank, self._ranks, Path(self._folder.name), (theirs,))
            device = os.environ.get("FUZZ_DEVICE", "cpu")
            self._processes.append(start_rank(*args, device=device))
            theirs.close()
            self._pipes.append(ours)

    def stop(self) -> None:
        """End the processes, if they can by themselves."""
        for pipe in self._pipes:
            with suppress(OSError):
                pipe.send(None)
        deadline = time.monotonic() + 2.0
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()
        self._processes, self._pipes = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


def _serve(rank: int, pipe: Any) -> None:
    """Play what the pipe gives."""
    faulthandler.register(signal.SIGUSR1)
    if DEVICE.type == "cuda":
        torch.set_default_device("cuda")  # of tensors that models make in forward
        # FSDP2's `finalize_backward` lets this stream wait for the event of a gather that nobody
        # used, but torch 2.13's `torch.Stream.wait_event` takes a CUDA event for one not recorded.
        torch.accelerator.current_stream = torch.cuda.current_stream
        offload_activations.ON_CUDA = offload_activations.ELSEWHERE  # models are small
    while (task := pipe.recv()) is not None:
        case, eager = task
        pipe.send(play(case, eager=eager))

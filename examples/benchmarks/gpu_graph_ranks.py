"""CUDA graphs on several ranks: the same losses, captures that fail, and an end without a hang."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import graphshard
from examples.benchmarks.gpu_checks import config, gap_of, tokens, trained
from examples.benchmarks.gpu_ranks import join, nccl_said, number_of_ranks
from examples.benchmarks.gpu_table import Place, Row, patience
from examples.gpt import GPT, Block
from graphshard.errors import FingerprintError
from graphshard.runtime.cuda_graphs import Recorder

LIMIT = 40.0
"""Seconds for each end on GPUs; elsewhere `patience` times as long."""

ENDS = {
    "destroy": "destroy_process_group with graphs alive",
    "abort": "abort with graphs alive",
    "exit": "Python ends with graphs alive",
}


def graph_ranks(place: Place) -> Iterator[Row]:
    """Graphs whose collectives are NCCL's, and each way in which a process group ends."""
    count, alone = number_of_ranks(place)
    for end, how in ENDS.items():
        folder = place.folder / f"graph_{end}"
        folder.mkdir(exist_ok=True)
        given = (count, str(folder), place.device.type, place.small, alone, end)
        began = time.monotonic()
        said, ok = "", True
        try:
            started = torch.multiprocessing.spawn(_rank, given, nprocs=count, join=False)
            while not started.join(timeout=1.0):
                if time.monotonic() - began > LIMIT * patience(place.device.type):
                    for process in started.processes:
                        process.kill()
                    trained_already = (folder / "rank0").exists()
                    raise TimeoutError("it hangs" if trained_already else "training hangs")
        except Exception as error:
            said, ok = str(error).strip().splitlines()[-1][:160], False
            for line in nccl_said(folder):
                yield Row("graph_ranks", "NCCL said", line[:160])
        if (folder / "rank0").exists() and end == "destroy":
            yield from _rows(place, (folder / "rank0").read_text().splitlines())
        took = f"{time.monotonic() - began:.0f} s in all"
        yield Row("graph_ranks", how, said or took, "no hang", ok)


def _rows(place: Place, lines: list[str]) -> Iterator[Row]:
    worst, note, given_up, refused = lines
    is_captured = note.startswith("one for") if place.cuda else None
    yield Row("graph_ranks", "rank 0", note[:120], "captured", is_captured)
    close = float(worst) <= 1e-4
    yield Row("graph_ranks", "losses of 6 steps, with graphs and without", worst, "1e-4", close)
    said = "capture failed" in given_up if place.cuda else None
    yield Row("graph_ranks", "a capture that fails on rank 1", given_up[:120], "given up", said)
    ok = refused == "FingerprintError" if place.cuda else None
    yield Row("graph_ranks", "unequal shapes", refused, "FingerprintError", ok)


def _rank(
    rank: int, count: int, folder: str, kind: str, small: bool, alone: bool, end: str
) -> None:  # pragma: no cover  # in processes of their own
    device = join(rank, count, folder, kind, alone)
    place = Place(device, small, Path(folder))
    losses: dict[bool, list[float]] = {}
    kept: Any = None  # so that its graphs live to the end
    for graphs in (False, True):
        torch.manual_seed(0)
        policy = graphshard.BlockPolicy({Block}, cuda_graph=graphs)
        kept = graphshard.compile(GPT(config(place)), policy, device=device)
        losses[graphs] = trained(kept, place, steps=6, seed=rank)
    worst = max(map(gap_of, *(torch.tensor(losses[graphs]) for graphs in (True, False))))
    lines = [f"{worst:.3e}", str(kept.program.cuda_graphs), "", ""]
    if end == "destroy":
        lines[2] = _failing(place, rank)
        lines[3] = _unequal(kept, place, rank)
    if rank == 0:
        Path(folder, "rank0").write_text("\n".join(line or "none" for line in lines))
    place.synchronize()
    if end == "destroy":
        dist.destroy_process_group()
    elif end == "abort" and place.cuda:
        dist.distributed_c10d._abort_process_group()
    if kind != "cuda" or end != "exit":
        os._exit(0)  # Gloo at times aborts a process that exits in order


def _failing(place: Place, rank: int) -> str:  # pragma: no cover
    """What the program says when a capture fails on rank 1 after all that it records."""
    capture = Recorder.capture

    def fails(self: Recorder, run: Any, args: list[Any]) -> Any:
        captured = capture(self, run, args)
        if rank == 1:
            raise RuntimeError("on purpose")
        return captured

    policy = graphshard.BlockPolicy({Block}, cuda_graph=True)
    sharded = graphshard.compile(GPT(config(place)), policy, device=place.device)
    Recorder.capture = fails  # type: ignore[method-assign]
    try:
        trained(sharded, place, steps=4, seed=rank)
    finally:
        Recorder.capture = capture  # type: ignore[method-assign]
    return str(sharded.program.cuda_graphs)


def _unequal(sharded: Any, place: Place, rank: int) -> str:  # pragma: no cover
    """The name of the error that ranks get for inputs of other shapes on each."""
    length = 8 + rank
    ids, targets = (each[:, :length].contiguous() for each in tokens(place))
    try:
        sharded(ids, targets)
    except FingerprintError as error:
        return type(error).__name__
    return "no error"

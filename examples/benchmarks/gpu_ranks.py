"""Several ranks, over NCCL where there are GPUs: each case against one process, and their end.

Ranks share the GPUs there are. Where a GPU has several, each rank pretends to be on a host of its
own, and NCCL moves everything through sockets.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from examples.benchmarks.gpu_cases import CASES, GRAPH_CASES, Run, Told
from examples.benchmarks.gpu_checks import gap
from examples.benchmarks.gpu_table import Place, Row, patience

COUNT = 4

FIRST, EACH, END = 60.0, 40.0, 20.0
"""Seconds for a GPU's ranks to start, for a case, and to end; `patience` times as long
elsewhere."""

STARTS = 4
"""How often ranks are started again behind a case that failed."""

LONE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "4",  # each communicator of each rank has buffers for every channel
}
"""What NCCL needs for several ranks on one GPU."""

ENDS = {
    "destroy": "destroy_process_group, exit",
    "abort": "abort with graphs alive",
    "exit": "Python ends with graphs alive",
}


def ranks(place: Place) -> Iterator[Row]:
    shares = place.cuda and torch.cuda.device_count() < COUNT
    how = "NCCL on shared GPUs" if shares else "NCCL" if place.cuda else "Gloo"
    yield Row("ranks", "ranks", f"{COUNT} over {how}")
    names = list(CASES)
    for _ in range(STARTS):
        for name, row in rows_of("ranks", Ranks(place, names, COUNT)):
            yield row
            if name in names:
                names = names[names.index(name) + 1 :]
        if not names:
            break
    if names:
        yield Row("ranks", f"{len(names)} more cases", ", ".join(names)[:160], "run", False)


def graph_ranks(place: Place) -> Iterator[Row]:
    """Graphs whose collectives are NCCL's, and each way in which a process group ends."""
    count = max(2, min(COUNT, torch.cuda.device_count()))
    for end in ENDS:
        names = list(GRAPH_CASES) if end == "destroy" else list(GRAPH_CASES)[:1]
        for _, row in rows_of("graph_ranks", Ranks(place, names, count, end)):
            yield row


def rows_of(section: str, started: Ranks) -> Iterator[tuple[str, Row]]:
    """The rows of cases and of the end of ranks, each with the name of its case."""
    for name, told in started.results():
        if isinstance(told, str):
            for line in nccl_said(started.folder):
                yield "", Row(section, "NCCL said", line[:160])
            yield name, Row(section, name, told[:160], "no error", False)
            return
        indent = ""
        if told[0].expected:
            worst, bar = max(gap(each.numbers, each.expected) for each in told), told[0].bar
            said, indent = "bit-equal" if worst == 0 else f"within {worst:.1e}", "  "
            yield name, Row(section, name, said, f"{bar:g}", worst <= bar)
        notes = [each.note for each in told if each.ok is False] or [each.note for each in told]
        if notes[0]:
            oks = [each.ok for each in told]
            ok = None if None in oks else all(oks)
            yield name, Row(section, f"{indent}{name}", notes[0][:160], ok=ok)
    ended = started.wait_for_end()
    yield "", Row(section, ENDS[started.end], ended, "code 0", ended == "code 0")


# -- processes -------------------------------------------------------------------------------------


class Ranks:
    """Processes that run cases one after the other, and write what each told to files."""

    started = 0

    def __init__(
        self, place: Place, names: Sequence[str], count: int, end: str = "destroy"
    ) -> None:
        Ranks.started += 1
        self.names, self.count, self.end = list(names), count, end
        self.patience = patience(place.device.type)
        self.folder = place.folder / f"ranks{Ranks.started}"
        self.folder.mkdir()
        context = multiprocessing.get_context("spawn")
        given = (count, self.names, str(self.folder), place.device.type, place.small, end)
        self.processes: list[Any] = [
            context.Process(target=_rank, args=(rank, *given), daemon=True) for rank in range(count)
        ]
        for process in self.processes:
            process.start()

    def results(self) -> Iterator[tuple[str, list[Told] | str]]:
        """Each case with what its ranks told; a failure in words, after which none comes."""
        limit = FIRST
        for number, name in enumerate(self.names):
            deadline = time.monotonic() + (limit + EACH) * self.patience
            limit = 0.0
            failure = self._wait(number, deadline)
            if failure:
                self.kill()
                yield name, failure
                return
            files = [self.folder / f"{number}.{rank}" for rank in range(self.count)]
            # Of processes of this file.
            yield name, [torch.load(file, weights_only=False) for file in files]

    def _wait(self, number: int, deadline: float) -> str:
        """Wait until every rank is done with a case; what failed, or ""."""
        while True:
            missing = [r for r in range(self.count) if not (self.folder / f"{number}.{r}").exists()]
            if not missing:
                return ""
            errors = sorted(self.folder.glob("error.*"), key=lambda file: file.stat().st_mtime)
            if errors:
                return f"rank {errors[0].suffix[1:]}: {errors[0].read_text()}"
            gone = [rank for rank in missing if self.processes[rank].exitcode is not None]
            if gone:
                return f"rank {gone[0]} ended with code {self.processes[gone[0]].exitcode}"
            if time.monotonic() > deadline:
                return f"ranks {missing} hang"
            time.sleep(0.05)

    def wait_for_end(self) -> str:
        """ "code 0" once every rank has ended in order, or what did not."""
        deadline = time.monotonic() + END * self.patience
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        if None in codes:
            return f"ranks {[r for r, code in enumerate(codes) if code is None]} hang"
        return "code 0" if not any(codes) else f"codes {codes}"

    def kill(self) -> None:
        """End what is left."""
        for process in self.processes:
            process.kill()
            process.join()


def nccl_said(folder: Path) -> list[str]:
    """The warnings that NCCL wrote, without their time and place."""
    lines = [line for file in folder.rglob("nccl.*") for line in file.read_text().splitlines()]
    return sorted({line.split("NCCL WARN", 1)[1].strip() for line in lines if "NCCL WARN" in line})


def join(rank: int, count: int, folder: str, kind: str, alone: bool) -> torch.device:
    """Make this process a rank of `count`; returns its device.

    alone: ranks share GPUs, each as if on its own host.
    """
    device, own = torch.device("cpu"), rank
    if kind == "cuda":
        os.environ["NCCL_DEBUG"] = "WARN"
        os.environ["NCCL_DEBUG_FILE"] = f"{folder}/nccl.%p"
        if alone:
            os.environ.update(LONE, NCCL_HOSTID=f"graphshard{rank}")
            own = rank % torch.cuda.device_count()
        device = torch.device("cuda", own)
        torch.cuda.set_device(device)
        torch.empty(1, device=device)  # meshes choose a device where none is in use yet
    else:
        torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(own))
    store = dist.FileStore(f"{folder}/store", count)
    backend = "cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo"
    limit = timedelta(seconds=EACH * patience(kind))
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=limit)
    return device


def _rank(
    rank: int, count: int, names: Sequence[str], folder: str, kind: str, small: bool, end: str
) -> None:
    try:
        crowded = kind == "cuda" and torch.cuda.device_count() < count
        device = join(rank, count, folder, kind, crowded)
        run = Run(Place(device, small, Path(folder)), rank, count)
        for number, name in enumerate(names):
            told = (CASES | GRAPH_CASES)[name](run)
            part = Path(folder, f"part.{rank}")
            torch.save(told, part)
            part.rename(Path(folder, f"{number}.{rank}"))
    except Exception as error:
        traceback.print_exc()
        said = str(error).strip().splitlines() or [""]
        Path(folder, f"error.{rank}").write_text(f"{type(error).__name__}: {said[0]}")
        sys.stderr.flush()
        os._exit(1)
    run.place.synchronize()
    if end == "destroy":
        dist.destroy_process_group()
    elif end == "abort" and kind == "cuda":
        dist.distributed_c10d._abort_process_group()
    if kind != "cuda" or end == "abort":
        os._exit(0)  # Gloo at times aborts a process that exits in order

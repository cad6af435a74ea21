"""Several ranks, over NCCL where there are GPUs: each case against one process and against Gloo.

Four ranks share the GPUs there are. Where a GPU has several, each rank pretends to be on a host of
its own, and NCCL moves everything through sockets.
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

from examples.benchmarks.gpu_cases import CASES, CLOSE, Numbers, Run, Told
from examples.benchmarks.gpu_table import Place, Row, patience

COUNT = 4

FIRST, EACH, END = 60.0, 40.0, 20.0
"""Seconds for a GPU's ranks to start, for a case, and to end; `patience` times as long
elsewhere."""

STARTS = 4
"""How often ranks are started again behind a case that failed."""

ON_GPUS_ONLY = ("cuda_graph", "inductor", "calibrate", "parting ways")
"""Cases that Gloo's ranks on a machine with GPUs leave out."""

LONE = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "4",  # each communicator of each rank has buffers for every channel
}
"""What NCCL needs for several ranks on one GPU."""


def crowded(place: Place, count: int) -> bool:
    """Whether `count` ranks are more than there are GPUs."""
    return place.cuda and torch.cuda.device_count() < count


def number_of_ranks(place: Place) -> tuple[int, bool]:
    """(how many ranks to start where two are enough, whether they share GPUs)."""
    count = min(COUNT, torch.cuda.device_count()) if place.cuda else 2
    return max(2, count), crowded(place, max(2, count))


def ranks(place: Place) -> Iterator[Row]:
    """Every case, the end of the ranks, and on GPUs the same numbers over Gloo."""
    shares = crowded(place, COUNT)
    how = "NCCL on shared GPUs" if shares else "NCCL" if place.cuda else "Gloo"
    yield Row("ranks", "ranks", f"{COUNT} over {how}")
    gloo = None
    if place.cuda:  # meanwhile, on the CPU
        cpu = Place(torch.device("cpu"), place.small, place.folder / "gloo")
        cpu.folder.mkdir(exist_ok=True)
        gloo = Ranks(cpu, [name for name in CASES if name not in ON_GPUS_ONLY])
    found: dict[str, list[Told]] = {}
    names = list(CASES)
    for _ in range(STARTS):
        started = Ranks(place, names)
        for name, told in started.results():
            names = names[names.index(name) + 1 :]
            if isinstance(told, str):
                for line in nccl_said(place.folder):
                    yield Row("ranks", "NCCL said", line[:160])
                yield Row("ranks", name, told[:160], "no error", False)
            else:
                found[name] = told
                yield from rows_of(name, told)
        if not started.failed:
            ended = started.end()
            yield Row("ranks", "destroy_process_group, exit", ended, "code 0", ended == "code 0")
        if not names:
            break
    if names:
        yield Row("ranks", f"{len(names)} more cases", ", ".join(names)[:160], "run", False)
    if gloo is not None:
        yield from beside_gloo(found, gloo)


def beside_gloo(found: dict[str, list[Told]], gloo: Any) -> Iterator[Row]:
    """The rows of cases that ran over Gloo as well."""
    for name, told in gloo.results():
        if isinstance(told, str):
            yield Row("ranks", f"{name}, over Gloo", told[:160], "no error", False)
        elif name in found:
            bar = max(told[0].bar, CLOSE)
            worst = max(
                gap(mine.numbers, its.numbers) for mine, its in zip(found[name], told, strict=True)
            )
            said = f"within {worst:.1e}"
            yield Row("ranks", f"{name}, NCCL as Gloo", said, f"{bar:g}", worst <= bar)
    gloo.kill()


def rows_of(name: str, told: Sequence[Told]) -> Iterator[Row]:
    """The rows of one case."""
    if told[0].expected:
        worst, bar = max(gap(each.numbers, each.expected) for each in told), told[0].bar
        said = "bit-equal" if worst == 0 else f"within {worst:.1e}"
        yield Row("ranks", name, said, f"{bar:g}", worst <= bar)
    notes = [each.note for each in told if each.ok is False] or [each.note for each in told]
    if notes[0]:
        oks = [each.ok for each in told]
        ok = None if None in oks else all(oks)
        yield Row("ranks", f"  {name}" if told[0].expected else name, notes[0][:160], ok=ok)


def gap(found: Numbers, expected: Numbers) -> float:
    """The largest difference of any tensor, by the norm of what it should be."""
    if found.keys() != expected.keys():
        return float("inf")
    largest = max(float(tensor.norm()) for tensor in expected.values())
    gaps = [0.0]
    for name, wanted in expected.items():
        scale = max(float(wanted.norm()), 1e-3 * largest)
        off = float((found[name] - wanted).norm()) / max(scale, 1e-30)
        gaps.append(off if off == off else float("inf"))
    return max(gaps)


# -- processes -------------------------------------------------------------------------------------


class Ranks:
    """Processes that run cases one after the other, and write what each told to files."""

    started = 0

    def __init__(self, place: Place, names: Sequence[str]) -> None:
        Ranks.started += 1
        self.names, self.failed = list(names), False
        self.patience = patience(place.device.type)
        self.folder = place.folder / f"ranks{Ranks.started}"
        self.folder.mkdir()
        context = multiprocessing.get_context("spawn")
        given = (self.names, str(self.folder), place.device.type, place.small)
        self.processes: list[Any] = [
            context.Process(target=_rank, args=(rank, *given, crowded(place, COUNT)), daemon=True)
            for rank in range(COUNT)
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
                self.failed = True
                self.kill()
                yield name, failure
                return
            files = [self.folder / f"{number}.{rank}" for rank in range(COUNT)]
            # Of processes of this file.
            yield name, [torch.load(file, weights_only=False) for file in files]

    def _wait(self, number: int, deadline: float) -> str:
        """Wait until every rank is done with a case; what failed, or ""."""
        while True:
            missing = [r for r in range(COUNT) if not (self.folder / f"{number}.{r}").exists()]
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

    def end(self) -> str:
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
    rank: int, names: Sequence[str], folder: str, kind: str, small: bool, alone: bool
) -> None:
    try:
        device = join(rank, COUNT, folder, kind, alone)
        run = Run(Place(device, small, Path(folder)), rank, COUNT)
        for number, name in enumerate(names):
            told = CASES[name](run)
            part = Path(folder, f"part.{rank}")
            torch.save(told, part)
            part.rename(Path(folder, f"{number}.{rank}"))
    except Exception as error:
        traceback.print_exc()
        said = str(error).strip().splitlines() or [""]
        Path(folder, f"error.{rank}").write_text(f"{type(error).__name__}: {said[0]}")
        sys.stderr.flush()
        os._exit(1)
    dist.destroy_process_group()
    if kind != "cuda":
        os._exit(0)  # Gloo at times aborts a process that exits in order

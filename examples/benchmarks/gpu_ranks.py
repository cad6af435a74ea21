"""Several ranks, over NCCL where there are GPUs: each case against one process, and their end.

Ranks share the GPUs there are. Where a GPU has several, each rank pretends to be on a host of its
own, and NCCL moves everything through sockets.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
import traceback
from collections.abc import Generator, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import get_context
from torch.multiprocessing.spawn import ProcessException, start_processes

from examples.benchmarks.gpu_cases import CASES, Run, Told
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


def ranks(place: Place) -> Iterator[Row]:
    shares = place.cuda and torch.cuda.device_count() < COUNT
    how = "NCCL on shared GPUs" if shares else "NCCL" if place.cuda else "Gloo"
    yield Row("ranks", "ranks", f"{COUNT} over {how}")
    names = list(CASES)
    for _ in range(STARTS):
        names = yield from rows_of(place, names)
        if not names:
            return
    yield Row("ranks", f"{len(names)} more cases", ", ".join(names)[:160], "run", False)


def rows_of(place: Place, names: Sequence[str]) -> Generator[Row, None, list[str]]:
    """The rows of cases and of the end of ranks; returns the cases behind one that failed."""
    folder = Path(tempfile.mkdtemp(dir=place.folder))
    told = get_context("spawn").SimpleQueue()
    given = (names, folder, place, told)
    started = start_processes(_rank, given, nprocs=COUNT, join=False, daemon=True)
    waits = patience(place.device.type)
    done, failure, ended = 0, "", False
    deadline = time.monotonic() + (FIRST + EACH) * waits
    while not (ended or failure):
        try:
            ended = started.join(timeout=0.1)
        except ProcessException as error:
            failure = str(error).strip().splitlines()[-1]
        while not told.empty():
            said = told.get()
            if isinstance(said, str):
                failure = said
                break
            yield from rows_of_case(names[done], said)
            done += 1
            limit = EACH if done < len(names) else END
            deadline = time.monotonic() + limit * waits
        if time.monotonic() > deadline:
            failure = failure or "ranks hang"
    for process in started.processes:
        process.kill()
        process.join()
    if failure:
        for line in nccl_said(folder):
            yield Row("ranks", "NCCL said", line[:160])
    if done == len(names):
        yield Row("ranks", "the end of the ranks", failure[:160] or "code 0", "code 0", not failure)
        return []
    yield Row("ranks", names[done], failure[:160], "no error", False)
    return list(names[done + 1 :])


def rows_of_case(name: str, ranks: Sequence[Told]) -> Iterator[Row]:
    """What ranks told of a case: how far off the worst is, and the words of one that is wrong."""
    gaps, bar = [told.worst for told in ranks if told.worst is not None], ranks[0].bar
    if gaps:
        said = "bit-equal" if max(gaps) == 0 else f"within {max(gaps):.1e}"
        yield Row("ranks", name, said, f"{bar:g}", max(gaps) <= bar)
    notes = [each.note for each in ranks if each.ok is False] or [each.note for each in ranks]
    if notes[0]:
        oks = [each.ok for each in ranks]
        yield Row("ranks", f"  {name}", notes[0][:160], ok=None if None in oks else all(oks))


def nccl_said(folder: Path) -> list[str]:
    """The warnings that NCCL wrote, without their time and place."""
    lines = [line for file in folder.rglob("nccl.*") for line in file.read_text().splitlines()]
    return sorted({line.split("NCCL WARN", 1)[1].strip() for line in lines if "NCCL WARN" in line})


# -- in a rank -------------------------------------------------------------------------------------


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


def _rank(rank: int, names: Sequence[str], folder: Path, place: Place, told: Any) -> None:
    """Run cases one after the other; rank 0 puts what all ranks told of each into a queue."""
    kind = place.device.type
    try:
        crowded = kind == "cuda" and torch.cuda.device_count() < COUNT
        device = join(rank, COUNT, str(folder), kind, crowded)
        run = Run(Place(device, place.small, folder), rank, COUNT)
        for name in names:
            every: list[Any] = [None] * COUNT
            dist.all_gather_object(every, CASES[name](run))
            if rank == 0:
                told.put(every)
    except Exception as error:
        traceback.print_exc()
        said = str(error).strip().splitlines() or [""]
        told.put(f"rank {rank}: {type(error).__name__}: {said[0]}")
        sys.stderr.flush()
        os._exit(1)
    run.place.synchronize()
    dist.destroy_process_group()
    if kind != "cuda":
        os._exit(0)  # Gloo at times aborts a process that exits in order

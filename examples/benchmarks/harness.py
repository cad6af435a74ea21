"""What the benchmarks share: arguments, ranks, steps that take turns, and their statistics."""

from __future__ import annotations

import argparse
import gc
import os
import pickle
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from math import comb
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def parser(text: str) -> argparse.ArgumentParser:
    """A parser whose help is the docstring of a script, as it stands there."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


# -- ranks -----------------------------------------------------------------------------------------


@contextmanager
def started_by_torchrun(kind: str = "cpu", threads: int = 1) -> Iterator[torch.device]:
    """The device of this rank of torchrun, in a process group of all of them."""
    torch.set_num_threads(threads)
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=timedelta(minutes=10))
    yield device
    gc.collect()  # nothing refers to the group any more: its threads end before the interpreter
    dist.destroy_process_group()


def on_ranks(work: Callable[..., Any], count: int, *args: Any, kind: str = "cpu") -> Any:
    """Run `work(rank, *args)` on ranks in processes of their own; what rank 0 returns.

    They meet over Gloo, or with the kind "cuda" over NCCL, on a GPU each.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (count, port, folder, kind, work, args), nprocs=count)
        return pickle.loads(Path(folder, "result").read_bytes())


def _rank(
    rank: int, count: int, port: int, folder: str, kind: str, work: Callable[..., Any], args: Any
) -> None:
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(rank)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(count), LOCAL_RANK=str(rank))
    address = f"tcp://127.0.0.1:{port}"
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=count)
    result = work(rank, *args)
    if rank == 0:
        Path(folder, "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo at times aborts a process that exits in order


def fake_ranks(size: int, rank: int = 0) -> None:
    """Make this process one rank of `size` on torch's "fake" backend, which packs as NCCL does."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def worst_rank(values: Sequence[float], device: torch.device) -> list[float]:
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


# -- steps that take turns -------------------------------------------------------------------------

Timer = Callable[[Callable[[], Any]], tuple[float, Any]]


def alternate(
    works: dict[str, Callable[[int], Any]], warmup: int, pairs: int, timer: Timer
) -> tuple[dict[str, list[float]], dict[str, list[Any]]]:
    """The seconds of each work in each round but those for warming up, and all its results.

    A round has one of each, in an order that turns and reverses from round to round, so that what
    disturbs the machine falls on all alike.
    """
    times: dict[str, list[float]] = {name: [] for name in works}
    results: dict[str, list[Any]] = {name: [] for name in works}
    for index in range(warmup + pairs):
        turn = index // 2 % max(1, len(works))
        names = [*works][turn:] + [*works][:turn]
        for name in names[::-1] if index % 2 else names:
            gc.collect()  # not in the middle of somebody's step
            took, result = timer(partial(works[name], index))
            times[name].append(took)
            results[name].append(result)
    return {name: each[warmup:] for name, each in times.items()}, results


def seconds(
    work: Callable[[], Any], device: torch.device, clock: Callable[[], float] = time.perf_counter
) -> tuple[float, Any]:
    """Seconds of `work` from a common start until this rank's device is done, and its result."""
    dist.barrier()
    begin = clock()
    result = work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return clock() - begin, result


def ratios(mine: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(mine, theirs, strict=True)]


def median_interval(values: list[float], confidence: float = 0.95) -> tuple[float, float]:
    """Order statistics between which the median lies with at least `confidence`.

    Each value is below the true median with probability 1/2, so the number below it is binomial
    (the sign test). With fewer than six values the range itself covers less than 95 %.
    """
    ordered, n = sorted(values), len(values)
    drop, tail = 0, 0.5**n
    while 2 * (tail + comb(n, drop + 1) * 0.5**n) <= 1 - confidence:
        drop += 1
        tail += comb(n, drop) * 0.5**n
    return ordered[drop], ordered[n - 1 - drop]

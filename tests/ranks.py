"""Running a function on several ranks, each a process of its own over Gloo."""

from __future__ import annotations

import faulthandler
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


class RankError(AssertionError):
    """A rank raised, died or hung; holds its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    group_timeout: float = 60.0,
    dying: frozenset[int] = frozenset(),
) -> list[Any]:
    """`function(rank, *args)` on every rank inside a Gloo group: the results in rank order.

    A rank that wrote its result and then aborted while exiting (Gloo does at times, groups
    destroyed or not) has succeeded. One that raised fails the test with its traceback; one that is
    still running after `timeout` seconds is killed and fails it too, with the Python stacks it had
    then. Ranks in `dying` may end without a result (None then).
    """
    context = get_context("spawn")
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        dumps_at = time.time() + timeout
        ranks = [
            context.Process(
                target=_rank_main,
                args=(function, rank, world_size, folder, group_timeout, dumps_at, args),
                daemon=True,
            )
            for rank in range(world_size)
        ]
        for process in ranks:
            process.start()
        deadline = time.monotonic() + timeout + 2.0  # in which stacks are written
        try:
            for process in ranks:
                process.join(max(0.0, deadline - time.monotonic()))
            hung = [rank for rank, process in enumerate(ranks) if process.is_alive()]
        finally:
            for process in ranks:
                process.kill()
                process.join()
        return _results(folder, ranks, hung, dying, timeout)


def _results(
    folder: Path, ranks: list[Any], hung: list[int], dying: frozenset[int], timeout: float
) -> list[Any]:
    results: list[Any] = []
    errors = []
    for rank, process in enumerate(ranks):
        file = folder / f"result_{rank}"
        if file.exists():
            ok, value = pickle.loads(file.read_bytes())
            results.append(value)
            if not ok:
                errors.append(f"rank {rank} raised:\n{value}")
        elif rank in dying:
            results.append(None)
        elif rank in hung:
            stacks = folder / f"stacks_{rank}"
            shown = stacks.read_text() if stacks.exists() else ""
            errors.append(f"rank {rank} was still running after {timeout:g} s\n{shown}")
        else:
            errors.append(f"rank {rank} ended with code {process.exitcode} and no result")
    if errors:
        raise RankError("\n".join(errors))
    return results


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: Path,
    group_timeout: float,
    deadline: float,
    args: tuple[Any, ...],
) -> None:
    stacks = (folder / f"stacks_{rank}").open("w")
    faulthandler.dump_traceback_later(max(0.1, deadline - time.time()), file=stacks)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=group_timeout),
        )
        outcome = (True, function(rank, *args))
    except BaseException:
        outcome = (False, traceback.format_exc())
    part = folder / f"part_{rank}"
    part.write_bytes(pickle.dumps(outcome))
    part.rename(folder / f"result_{rank}")
    if outcome[0]:
        _leave_together(folder, world_size)
    os._exit(0)


def _leave_together(folder: Path, world_size: int) -> None:
    """Wait a little for the others: a rank that leaves early breaks their last collective."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        if all((folder / f"result_{rank}").exists() for rank in range(world_size)):
            return
        time.sleep(0.01)


class Checks:
    """Several checks in one set of processes, which cost seconds to start.

    Each check is a function `check(rank)` that asserts. They run in order on all ranks; once one
    fails on a rank that rank runs no more, and the later ones fail too.
    """

    def __init__(
        self, checks: list[Callable[[int], None]], world_size: int, **options: Any
    ) -> None:
        reports = run_ranks(_run_checks, world_size, checks, **options)
        self._failures = {
            check.__name__: [report.get(check.__name__, "not reached") for report in reports]
            for check in checks
        }

    def require(self, check: Callable[[int], None]) -> None:
        """Fail with the rank's traceback unless `check` passed on every rank."""
        for rank, failure in enumerate(self._failures[check.__name__]):
            if failure is not None:
                raise RankError(f"{check.__name__} on rank {rank}: {failure}")


def _run_checks(rank: int, checks: list[Callable[[int], None]]) -> dict[str, str | None]:
    report: dict[str, str | None] = {}
    for check in checks:
        try:
            check(rank)
            dist.barrier()
            report[check.__name__] = None
        except Exception:
            report[check.__name__] = traceback.format_exc()
            break
    return report

"""Running a function on several ranks, each a process of its own, over Gloo or NCCL."""

from __future__ import annotations

import faulthandler
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable, Collection
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from examples.benchmarks.gpu_table import is_gpu, patience
from graphshard.torch_private.dtensors import full_tensor

Check = Callable[[int], None]

# Ranks are forked from a process that has imported these, which takes seconds, and runs nothing.
_START = get_context("forkserver")
_START.set_forkserver_preload(
    [
        "graphshard.api",
        "graphshard.capture.entry",
        "graphshard.hf.accelerators",
        "graphshard.pipeline",
        "graphshard.runtime.step",
        "graphshard.state.checkpoints",
        "networkx",
        "torch._dynamo",
        "torch._functorch.aot_autograd",
        "torch._inductor.output_code",
        "torch._functorch._aot_autograd.graph_compile",
        "torch._export.serde.serialize",
        "torch.distributed.checkpoint",
        "torch.distributed.fsdp",
        "torch.testing",
        "transformers.modeling_utils",
        "pytest",
    ]
)

ON_ONE_GPU = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_NCHANNELS": "4",  # each communicator of each rank has buffers for every channel
}
"""What NCCL needs for several ranks on one GPU."""

_SAID = 8000
"""Characters of a dead rank's stderr that are told."""


class RankError(AssertionError):
    """A rank raised, died or hung; holds its traceback."""


def run_ranks(
    function: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 120.0,
    group_timeout: float = 60.0,
    dying: frozenset[int] = frozenset(),
    device: str = "cpu",
) -> list[Any]:
    """`function(rank, *args)` on every rank inside a group: the results in rank order.

    The group is Gloo's; with the device "cuda" NCCL's on GPUs, which ranks share if they are few.

    A rank that raised fails the test with its traceback; one that is still running after `timeout`
    seconds is killed and fails it too, with the Python stacks it had then; one that a signal ended,
    before or after it wrote its result, with the last it wrote to stderr. The failure that came
    first is told first: those of other ranks mostly follow from it. Ranks in `dying` may end
    without a result (None then).
    """
    results, errors = _once(function, world_size, args, timeout, group_timeout, dying, device)
    if errors:
        raise RankError(errors)
    return results


def _once(
    function: Callable[..., Any],
    world_size: int,
    args: tuple[Any, ...],
    timeout: float,
    group_timeout: float,
    dying: frozenset[int],
    device: str,
) -> tuple[list[Any], str]:
    """(Results in rank order, what failed if anything)."""
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        options = {"device": device, "group_timeout": group_timeout, "dumps_after": timeout}
        ranks = [
            start_rank(function, rank, world_size, folder, args, **options)
            for rank in range(world_size)
        ]
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
) -> tuple[list[Any], str]:
    results: list[Any] = []
    errors: list[tuple[float, str]] = []  # when, and what
    for rank, process in enumerate(ranks):
        file, stderr = folder / f"result_{rank}", folder / f"stderr_{rank}"
        ended = file.exists()
        ok, value = pickle.loads(file.read_bytes()) if ended else (True, None)
        results.append(value)
        if not ok:
            errors.append((file.stat().st_mtime, f"rank {rank} raised:\n{value}"))
        elif rank not in dying and not (ended and process.exitcode == 0):
            how = f"rank {rank} ended with code {process.exitcode} and "
            how += "a result" if ended else "no result"
            if rank in hung:
                how = f"rank {rank} was still running after {timeout:g} s"
            said = stderr.read_text(errors="replace") if stderr.exists() else ""
            when = stderr.stat().st_mtime if said else float("inf")
            errors.append((when, f"{how}\n{said[-_SAID:]}"))
    errors.sort()
    return results, "\n".join(error for _, error in errors)


def start_rank(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    folder: Path,
    args: tuple[Any, ...],
    *,
    device: str = "cpu",
    group_timeout: float = 60.0,
    dumps_after: float = 1e6,
) -> Any:
    """A process that runs `function(rank, *args)` inside a group; its result is a file of `folder`.

    It writes its Python stacks to stderr, a file there too, after so many seconds.
    """
    # CUDA may have been used in the process that forks.
    start = _START if device == "cpu" else get_context("spawn")
    state = (folder, group_timeout, time.time() + dumps_after, {**os.environ}, device)
    process = start.Process(
        target=_rank_main, args=(function, rank, world_size, args, *state), daemon=True
    )
    process.start()
    return process


def _rank_main(
    function: Callable[..., Any],
    rank: int,
    world_size: int,
    args: tuple[Any, ...],
    folder: Path,
    group_timeout: float,
    deadline: float,
    environ: dict[str, str],
    device: str,
) -> None:
    os.environ.clear()  # the server's, as it was at its start
    os.environ.update(environ)
    # Of the process, so that what C++ says when it aborts is in it too.
    os.dup2(os.open(folder / f"stderr_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable()
    faulthandler.dump_traceback_later(max(0.1, deadline - time.time()))
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    torch.manual_seed(0)  # or a model that is made without a seed differs between ranks
    if device == "cpu":
        _gather_without_torch()
    try:
        if device == "cuda":
            _join_over_nccl(rank, world_size, folder, group_timeout)
        else:
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


def _join_over_nccl(rank: int, world_size: int, folder: Path, group_timeout: float) -> None:
    """Make this process a rank on a GPU, which several ranks share, each as if on its own host."""
    own = rank
    os.environ["NCCL_DEBUG"] = "WARN"
    if torch.cuda.device_count() < world_size:
        os.environ.update(ON_ONE_GPU, NCCL_HOSTID=f"graphshard{rank}")
        own = rank % torch.cuda.device_count()
    torch.cuda.set_device(own)
    torch.empty(1, device="cuda")  # meshes choose a device where none is in use yet
    os.environ["LOCAL_RANK"] = str(own)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl",
        store=dist.FileStore(f"{folder}/store", world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=group_timeout * patience("cuda")),
    )


def _gather_without_torch() -> None:
    """Make `DTensor.full_tensor()` of this rank graphshard's, which does not abort over Gloo.

    torch's gathers by a coalesced call, whose end may overwrite the memory of the next one.
    """
    torch_does, within = DTensor.full_tensor, False

    def gathered(dtensor: Any, **options: Any) -> torch.Tensor:
        nonlocal within
        if options or within:
            return torch_does(dtensor, **options)
        within = True
        try:
            if dtensor.is_complex():  # which a coalesced call over Gloo does not gather
                return torch.view_as_complex(full_tensor(torch.view_as_real(dtensor.detach())))
            return full_tensor(dtensor)
        finally:
            within = False

    DTensor.full_tensor = gathered  # type: ignore[method-assign]


def _leave_together(folder: Path, world_size: int) -> None:
    """Wait a little for the others: a rank that leaves early breaks their last collective."""
    deadline = time.monotonic() + 2.0
    while time.monotonic() < deadline:
        if all((folder / f"result_{rank}").exists() for rank in range(world_size)):
            return
        time.sleep(0.01)


class Checks:
    """Several checks in one set of processes, which cost seconds to start.

    Each check is a function `check(rank)` that asserts. They run in order on all ranks, which the
    first `require` starts; once one fails on a rank that rank runs no more, and the later ones fail
    too.

    Args:
        checks: functions that another process can import by their module and name.
        world_size: number of ranks.
        options: those of `run_ranks`.
    """

    def __init__(self, checks: list[Check], world_size: int, **options: Any) -> None:
        self._checks = checks
        self._world_size = world_size
        self._options = options
        self._reports: list[dict[str, tuple[float, str] | None]] = []
        self._error: BaseException | None = None

    def _run(self) -> None:
        """Start the ranks, once: if they die every check fails by the same error."""
        if self._error is not None:
            raise self._error
        if not self._reports:
            try:
                self._reports = run_ranks(
                    _run_checks, self._world_size, self._checks, **self._options
                )
            except BaseException as error:
                self._error = error
                raise

    def require(self, check: Check) -> None:
        """Fail with the traceback of the rank that failed first unless `check` passed on all."""
        self._run()
        reports = [report.get(check.__name__, (0.0, "not reached")) for report in self._reports]
        failures = [(*failure, rank) for rank, failure in enumerate(reports) if failure is not None]
        if failures:
            _, failure, rank = min(failures)
            raise RankError(f"{check.__name__} on rank {rank}: {failure}")


def checks_of(test_file: dict[str, Any], *, but: Collection[Check] = ()) -> list[Check]:
    """Every function `check(rank: int) -> None` that a test file has defined so far, in order.

    Args:
        test_file: its `globals()`.
        but: those to leave out.
    """
    return [
        check
        for check in test_file.values()
        if isinstance(check, FunctionType)
        and check.__module__ == test_file["__name__"]
        and check.__annotations__ == {"rank": "int", "return": "None"}
        and check not in but
    ]


def on_ranks(checks: list[Check], world_size: int, **options: Any) -> Callable[..., None]:
    """A test for each of `checks`, all of which run in one set of processes.

    Bind it to a name that pytest collects: `test_on_two_ranks = on_ranks(checks_of(globals()), 2)`.
    """
    started = Checks(checks, world_size, **options)

    @pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)
    def passes(check: Check) -> None:
        started.require(check)

    return passes


def on_two_or_four_ranks(checks: list[Check], **options: Any) -> Callable[..., None]:
    """As `on_ranks`, on two ranks and (slow) on four."""
    started = {world_size: Checks(checks, world_size, **options) for world_size in (2, 4)}

    @pytest.mark.parametrize("check", checks, ids=lambda check: check.__name__)
    @pytest.mark.parametrize(
        "world_size", [2, pytest.param(4, marks=pytest.mark.slow)], ids=["2 ranks", "4 ranks"]
    )
    def passes(world_size: int, check: Check) -> None:
        started[world_size].require(check)

    return passes


def _run_checks(rank: int, checks: list[Check]) -> dict[str, tuple[float, str] | None]:
    """By check that ran, when it failed and its traceback, or None."""
    report: dict[str, tuple[float, str] | None] = {}
    for check in checks:
        torch.manual_seed(0)
        try:
            check(rank)
            dist.barrier()
            report[check.__name__] = None
        except Exception:
            report[check.__name__] = time.time(), traceback.format_exc()
            break
    return report


def error_of(call: Callable[[], object], kind: type[Exception]) -> str:
    """The message, after checking that it is the same on every rank."""
    with pytest.raises(kind) as caught:
        call()
    messages: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(messages, str(caught.value))
    assert len(set(messages)) == 1, messages
    return str(caught.value)


# -- the CUDA runtime made of CPU threads, tests/cuda_on_cpu, as tests see it ----------------------


def is_made_up() -> bool:
    """Whether CUDA's device is the one made of CPU threads."""
    return torch.cuda.is_available() and not is_gpu()

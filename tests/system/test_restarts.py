"""A run that is killed goes on by itself, and ends with the bits of one that was not."""

from __future__ import annotations

import importlib
import json
import os
import random
import re
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import pytest
import torch
from paths import EXAMPLES, ROOT, SUPPORT
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import graphshard
from examples.gpt import GPT, Block, GPTConfig
from graphshard.state.dcp import empty_like, open_checkpoint, read_entries
from graphshard.state.state_tensors import StateTensor

# -- a script of which one rank kills itself -------------------------------------------------------


class Killer:
    """Kills this process at the `after`-th event within the `call`-th call of a function."""

    def __init__(self, kill: dict[str, Any]) -> None:
        self.kill = kill
        self.calls = self.events = 0
        self.active = False

    def event(self, what: str) -> None:
        if not self.active:
            return
        self.events += 1
        if self.events == self.kill["after"]:
            with Path(os.environ["KILLED"]).open("a") as file:
                file.write(f"rank {os.environ['RANK']} in {self.kill['in']}: {what}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function: Callable[..., Any], *, operators: bool) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls != self.kill["call"]:
                return function(*args, **kwargs)
            self.active = True
            try:
                if not operators:
                    return function(*args, **kwargs)
                with Operators(self):
                    return function(*args, **kwargs)
            finally:
                self.active = False

        return inner

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            self.event(function.__name__)
            return function(*args, **kwargs)

        return inner


class Operators(TorchDispatchMode):
    """Each operator is an event."""

    def __init__(self, killer: Killer) -> None:
        super().__init__()
        self.killer = killer

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.killer.event(str(function))
        return function(*args, **(kwargs or {}))


PLACES: dict[str, tuple[Any, str, bool]] = {
    "forward": (graphshard.ShardedModule, "forward", True),
    "backward": (torch.Tensor, "backward", True),
    "optimizer": (torch.optim.AdamW, "step", True),
    "save": (graphshard.ShardedModule, "save_checkpoint", False),
    "load": (graphshard.ShardedModule, "load_checkpoint", False),
}


def drawing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def inner(*args: Any, **kwargs: Any) -> Any:
        random.random()
        numpy.random.random()
        time.sleep(float(os.environ["PAUSE"]))
        return forward(*args, **kwargs)

    return inner


def main() -> None:
    """Run the script of the arguments on a rank that may kill itself in the midst of what it does.

    KILLS, in the environment, is a JSON list of kills: {"rank": 1, "in": "forward", "call": 3,
    "after": 20} is a SIGKILL of rank 1 in its third call of forward, at the 20th operator. Each
    writes a line to the file KILLED before, and the next start of the ranks by torchrun takes the
    next one; a start that failed otherwise, as where a port was taken, is made up for. The ranks
    also draw from Python's and numpy's random numbers in every forward, so that their states
    change, and wait PAUSE seconds.
    """
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    kills = json.loads(os.environ["KILLS"])
    seed = 1000 * int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + int(os.environ["RANK"])
    random.seed(seed)
    numpy.random.seed(seed)
    told = Path(os.environ["KILLED"])
    kills = kills[len(told.read_text().splitlines()) if told.exists() else 0 :]
    kill = kills[0] if kills else None
    module = graphshard.ShardedModule
    with patch.object(module, "forward", drawing(module.forward)):
        if kill is None or kill["rank"] != int(os.environ["RANK"]):
            runpy.run_path(sys.argv[0], run_name="__main__")
            return
        killer = Killer(kill)
        owner, name, operators = PLACES[kill["in"]]
        around = killer.around(getattr(owner, name), operators=operators)
        with (
            patch.object(owner, name, around),
            patch("os.fsync", killer.before(os.fsync)),
            patch.object(StateTensor, "write", killer.before(StateTensor.write)),
        ):
            runpy.run_path(sys.argv[0], run_name="__main__")


# -- tests -----------------------------------------------------------------------------------------


SCRIPT = EXAMPLES / "train_restartable.py"
STEPS = 8
TIMEOUT = 300.0
LINE = re.compile(r"^step (\d+)  loss ([\d.]+)$", re.MULTILINE)


def kill(rank: int, where: str, call: int, after: int) -> dict[str, Any]:
    return {"rank": rank, "in": where, "call": call, "after": after}


class Run:
    """An agent of torchrun, and what its ranks print."""

    def __init__(
        self,
        folder: Path,
        *options: str,
        kills: Sequence[Any] = (),
        more: str = "",
        pause: float = 0.0,
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.folder = folder
        self.killed = folder / "killed"
        self.log = folder / f"log {time.monotonic_ns()}"
        script = (__file__, SCRIPT, folder / "saved", "--steps", STEPS)
        command = (sys.executable, "-m", "torch.distributed.run", *options)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, (*command, *script, "--every", 2)), *more.split()],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}",
                    "OMP_NUM_THREADS": "1",
                    "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
                    "KILLS": json.dumps(kills),
                    "KILLED": str(self.killed),
                    "PAUSE": str(pause),
                },
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    @property
    def losses(self) -> dict[int, str]:
        """The loss of each step, as last printed."""
        return {int(step): loss for step, loss in LINE.findall(self.output)}

    @property
    def begins(self) -> list[tuple[int, int]]:
        """(Ranks, step) of each start."""
        found = re.findall(r"^(\d+) ranks begin at step (\d+)$", self.output, re.MULTILINE)
        return [(int(ranks), int(step)) for ranks, step in found]

    def wait(self) -> None:
        try:
            code = self.process.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            self.end()
            code = None
        assert code == 0, self.output[-6000:]

    def wait_for(self, text: str, told: Callable[[], str] | None = None) -> None:
        """Until `text` is printed, by this agent or in what `told` gives."""
        told = told or (lambda: self.output)
        deadline = time.monotonic() + TIMEOUT
        while re.search(text, told(), re.MULTILINE) is None:
            assert self.process.poll() is None, told()[-6000:]
            assert time.monotonic() < deadline, told()[-6000:]
            time.sleep(0.02)

    def end(self) -> None:
        """Kill the agent and its ranks, as if their machine lost its power."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children")
        ranks = [int(rank) for rank in children.read_text().split()] if children.exists() else []
        for pid in (self.process.pid, *ranks):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait()


@contextmanager
def running(*arguments: Any, **options: Any) -> Iterator[Run]:
    run = Run(*arguments, **options)
    try:
        yield run
    finally:
        if run.process.poll() is None:
            run.end()


def alone(ranks: int) -> tuple[str, ...]:
    return ("--standalone", "--max-restarts", "5", "--nproc-per-node", str(ranks))


def completed(folder: Path, ranks: int, kills: Sequence[Any] = ()) -> Run:
    with running(folder, *alone(ranks), kills=kills) as run:
        run.wait()
    return run


def entries_of(run: Run) -> dict[str, Any]:
    """Everything in the last checkpoint: weights, moments, schedule, scaler, random states."""
    last = graphshard.latest_checkpoint(run.folder / "saved")
    assert last is not None
    assert last.name == f"step-{STEPS}"
    stored = open_checkpoint(last)
    tensors = {key: stored.tensor(key) for key in stored.paths}
    into = {key: None if entry is None else empty_like(entry) for key, entry in tensors.items()}
    read_entries(stored, into)
    return into


def assert_equal_bits(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert first.keys() == second.keys()
    for key, value in first.items():
        if isinstance(value, Tensor):
            assert torch.equal(value, second[key]), key
        else:
            assert value == second[key], key


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return completed(tmp_path_factory.mktemp("undisturbed"), 2)


KILLS = {
    "computing": [
        kill(1, "forward", 4, 20),
        kill(0, "backward", 2, 40),
        kill(1, "optimizer", 3, 3),
    ],
    # fsync: of a rank's data; on rank 0 then of manifest, metadata and folder; rename; of folder.
    "saving and loading": [
        kill(1, "save", 2, 1),
        kill(0, "load", 1, 3),
        kill(0, "save", 1, 5),
    ],
}


@pytest.mark.slow
@pytest.mark.parametrize("name", KILLS)
def test_killed_ranks_are_started_again_and_end_with_the_same_bits(
    name: str, undisturbed: Run, tmp_path: Path
) -> None:
    kills = KILLS[name]
    run = completed(tmp_path, 2, kills)
    told = run.killed.read_text().splitlines()
    assert [line.partition(":")[0] for line in told] == [
        f"rank {k['rank']} in {k['in']}" for k in kills
    ], run.output[-20000:]
    assert run.losses == undisturbed.losses
    assert_equal_bits(entries_of(run), entries_of(undisturbed))


# -- other numbers of ranks -----------------------------------------------------------------------

TOLERANCE = 1e-4
"""Nats; that of `examples/train_gpt.py --check`."""


@pytest.fixture(scope="module")
def plain() -> dict[int, float]:
    """The losses of the plain model in one process, without dropout."""
    sharded = graphshard.compile(gpt(), graphshard.BlockPolicy({Block}))
    sharded.init_weights(seed=0)
    model = GPT(GPTConfig(layers=2, width=64))
    model.load_state_dict(sharded.full_state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        samples = importlib.import_module("train_restartable").Samples(64)
    losses = {}
    for step in range(STEPS):
        loss = model(*samples[range(12 * step, 12 * step + 12)])
        losses[step + 1] = loss.item()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return losses


def gpt() -> GPT:
    with torch.device("meta"):
        return GPT(GPTConfig(layers=2, width=64))


def assert_close(losses: dict[int, str], expected: dict[int, float]) -> None:
    assert sorted(losses) == sorted(expected)
    for step, loss in losses.items():
        assert abs(float(loss) - expected[step]) <= TOLERANCE, (step, losses, expected)


@pytest.mark.slow
def test_started_again_on_fewer_and_more_ranks(plain: dict[int, float], tmp_path: Path) -> None:
    losses: dict[int, str] = {}
    for ranks, until in ((4, "step 3  "), (2, "step 5  "), (3, None)):
        with running(tmp_path, *alone(ranks), more="--dropout 0", pause=0.3) as run:
            if until is None:
                run.wait()
            else:
                run.wait_for(f"^{until}")
                run.end()
        losses |= run.losses
        assert [world for world, _ in run.begins] == [ranks]
        assert (run.begins[0][1] > 0) == (ranks != 4), "the later ones resume"
    assert_close(losses, plain)


@pytest.mark.slow
def test_an_agent_is_lost_and_another_joins(plain: dict[int, float], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    options = (
        *("--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
        *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", "elastic"),
        *("--local-addr", "127.0.0.1", "--rdzv-conf"),
        "keep_alive_interval=1,keep_alive_max_attempt=3,last_call_timeout=8,join_timeout=120",
    )
    how: dict[str, Any] = {"more": "--dropout 0", "pause": 1.0}
    runs: list[Run] = []

    def told() -> str:
        return "".join(run.output for run in runs)

    with running(tmp_path, *options, **how) as first:
        runs.append(first)
        wait_until_listening(port)
        with running(tmp_path, *options, **how) as second:
            runs.append(second)
            first.wait_for("^step 3  ", told)
            second.end()
        first.wait_for("^1 ranks begin at step [2-6]")
        with running(tmp_path, *options, **how) as third:
            runs.append(third)
            first.wait()
            third.wait()
    begins = sorted(start for run in runs for start in run.begins)
    # A slow second agent may have found the first one at work already.
    assert [world for world, _ in sorted(begins, key=lambda s: s[1])][-3:] == [2, 1, 2], begins
    losses: dict[int, str] = {}
    for run in runs:
        losses |= run.losses
    assert_close(losses, plain)


def wait_until_listening(port: int) -> None:
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.05)


if __name__ == "__main__":
    main()

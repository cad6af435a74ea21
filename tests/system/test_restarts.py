"""A run that is killed goes on by itself, and ends with the bits of one that was not."""

from __future__ import annotations

import importlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import EXAMPLES, ROOT, SUPPORT
from torch import Tensor

import graphshard
from examples.gpt import GPT, Block, GPTConfig
from graphshard.state.dcp import empty_like, open_checkpoint, read_entries

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
        script = (SUPPORT / "killed_script.py", SCRIPT, folder / "saved", "--steps", STEPS)
        command = (sys.executable, "-m", "torch.distributed.run", *options)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*map(str, (*command, *script, "--every", 2)), *more.split()],
                cwd=ROOT,
                env={
                    **os.environ,
                    "PYTHONPATH": str(ROOT),
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

    def wait_for(self, text: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while re.search(text, self.output, re.MULTILINE) is None:
            assert self.process.poll() is None, self.output[-6000:]
            assert time.monotonic() < deadline, self.output[-6000:]
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
    if name == "committed":
        assert run.begins[-1] == (2, 2), "the save counts, though the rank died right after it"


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

    def wait_for(text: str) -> None:
        deadline = time.monotonic() + TIMEOUT
        while re.search(text, told(), re.MULTILINE) is None:
            assert runs[0].process.poll() is None, told()[-6000:]
            assert time.monotonic() < deadline, told()[-6000:]
            time.sleep(0.05)

    with running(tmp_path, *options, **how) as first:
        runs.append(first)
        wait_until_listening(port)
        with running(tmp_path, *options, **how) as second:
            runs.append(second)
            wait_for("^step 3  ")
            second.end()
        wait_for("^1 ranks begin at step [2-6]")
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

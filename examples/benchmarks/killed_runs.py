"""A run whose ranks are killed at random times must end with the bits of an undisturbed one.

    python examples/benchmarks/killed_runs.py --kills 20

torchrun trains `train_restartable.py` on two ranks. One of them, or both, get SIGKILL at a random
time, in whatever they do then, until enough were killed: a quarter of the times counts from the
start of the processes, the others from the first step. The last checkpoint of this run (weights,
moments, scheduler, scaler, position in the data, torch's random states) is then compared with that
of a run without kills. Random states of Python and numpy are left out, since the script neither
seeds them nor draws from them. It prints when the kills came, and ends with 1 if a bit differs.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch

import graphshard
from graphshard.state.dcp import empty_like, open_checkpoint, read_entries

SCRIPT = Path(__file__).parents[1] / "train_restartable.py"
RANKS = 2


def start(folder: Path, args: argparse.Namespace, restarts: int) -> subprocess.Popen[bytes]:
    """torchrun with its ranks; they write to the file "log"."""
    options = ["--standalone", "--nproc-per-node", str(RANKS), "--max-restarts", str(restarts)]
    model = ["--layers", "4", "--width", "128", "--batch", "16", "--context", "128"]
    arguments = [str(folder), "--steps", str(args.steps), "--every", "2", *model]
    with (folder / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", *options, str(SCRIPT), *arguments],
            env={**os.environ, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def children(agent: int) -> list[int]:
    try:
        text = Path(f"/proc/{agent}/task/{agent}/children").read_text()
    except OSError:
        return []
    return [int(pid) for pid in text.split()]


def begun(folder: Path) -> int:
    """How often the ranks had come to their first step."""
    return len(re.findall(r"^\d+ ranks begin", (folder / "log").read_text(), re.MULTILINE))


def killed(folder: Path, args: argparse.Namespace, generator: random.Random) -> Counter[str]:
    """Train while killing; counts of kills by what the ranks were doing."""
    counts: Counter[str] = Counter()
    agent = start(folder, args, restarts=args.kills)
    while sum(counts.values()) < args.kills and agent.poll() is None:
        from_first_step = generator.random() < 0.75
        ranks = wait_for_ranks(agent)
        before = begun(folder)
        while from_first_step and agent.poll() is None and begun(folder) == before:
            time.sleep(0.01)
        time.sleep(generator.uniform(0, args.longest))
        chosen = generator.sample(ranks, generator.choice((1, 1, RANKS)))
        if agent.poll() is not None or set(children(agent.pid)) != set(ranks):
            continue
        stepping = begun(folder) > before
        for pid in chosen:
            os.kill(pid, signal.SIGKILL)
        which = "in a step, or a save" if stepping else "before the first step"
        counts[f"{len(chosen)} of {RANKS} ranks {which}"] += 1
        while agent.poll() is None and set(children(agent.pid)) & set(ranks):
            time.sleep(0.01)
    if agent.wait() != 0:
        raise SystemExit((folder / "log").read_text()[-4000:])
    return counts


def wait_for_ranks(agent: subprocess.Popen[bytes]) -> list[int]:
    while agent.poll() is None and len(children(agent.pid)) < RANKS:
        time.sleep(0.01)
    return children(agent.pid)


def entries(folder: Path) -> dict[str, Any]:
    """All entries of the last checkpoint."""
    last = graphshard.latest_checkpoint(folder)
    assert last is not None
    stored = open_checkpoint(last)
    tensors = {key: stored.tensor(key) for key in stored.paths}
    into = {key: None if entry is None else empty_like(entry) for key, entry in tensors.items()}
    read_entries(stored, into)
    unseeded = re.compile(r"rng\.\d+\.(python|numpy)")
    return {"name": last.name, **{k: v for k, v in into.items() if not unseeded.fullmatch(k)}}


def equal(first: Any, second: Any) -> bool:
    return torch.equal(first, second) if isinstance(first, torch.Tensor) else first == second


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--longest", type=float, default=5.0, help="seconds until a kill")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        quiet, disturbed = Path(name, "quiet"), Path(name, "disturbed")
        for folder in (quiet, disturbed):
            folder.mkdir()
        if start(quiet, args, restarts=0).wait() != 0:
            raise SystemExit((quiet / "log").read_text()[-4000:])
        counts = killed(disturbed, args, random.Random(args.seed))
        expected, found = entries(quiet), entries(disturbed)
        differing = [key for key in expected if not equal(expected[key], found.get(key))]
    for what, count in sorted(counts.items()):
        print(f"{count:4d} kills: {what}")
    print(f"{len(expected)} entries of the last checkpoint, {len(differing)} differ", *differing)
    return 1 if differing or expected.keys() != found.keys() else 0


if __name__ == "__main__":
    sys.exit(main())

"""Saves killed at random times: the checkpoint must be the old one or the new one, whole.

    python examples/benchmarks/killed_saves.py --trials 200

Each trial forks two ranks over Gloo, which save a model and its AdamW state full of ones, and then
one full of twos over it. One or both of them get SIGKILL at a random time of the second save; a
third of the trials saves in the background. Two other ranks then load the checkpoint. It prints a
count of each outcome, and ends with 1 if a checkpoint was lost or mixes both saves.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks import harness
from graphshard.errors import CheckpointError

WIDTH = 512


def sharded_and_optimizer() -> tuple[graphshard.ShardedModule, torch.optim.Optimizer]:
    """A model of 1.5 M parameters, and its optimizer after a step."""
    torch.manual_seed(0)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(6)]
    model = graphshard.compile(nn.Sequential(*layers), graphshard.BlockPolicy({nn.Linear}))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    return model, optimizer


def tensors_of(module: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    states = [s[key] for s in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [tensor.to_local() for tensor in (*module.parameters(), *states)]


def fill(module: nn.Module, optimizer: torch.optim.Optimizer, value: float) -> None:
    with torch.no_grad():
        for tensor in tensors_of(module, optimizer):
            tensor.fill_(value)


def save_twice(rank: int, folder: Path, background: bool) -> None:
    """Save ones, make the file "go", save twos, and make the file "done"."""
    module, optimizer = sharded_and_optimizer()
    fill(module, optimizer, 1.0)
    module.save_checkpoint(folder / "saved", optimizer)
    fill(module, optimizer, 2.0)
    dist.barrier()
    (folder / "go").touch()
    saving = module.save_checkpoint(folder / "saved", optimizer, background=background)
    if saving is not None:
        fill(module, optimizer, 3.0)
        saving.result()
    (folder / "done").touch()


def load_and_tell(rank: int, folder: Path) -> None:
    """Write which values this rank loaded into a file."""
    module, optimizer = sharded_and_optimizer()
    try:
        module.load_checkpoint(folder / "saved", optimizer)
        values = {v for t in tensors_of(module, optimizer) for v in t.unique().tolist()}
        outcome = {(1.0,): "old", (2.0,): "new"}.get(tuple(values), f"mixture {sorted(values)}")
    except CheckpointError as error:
        outcome = f"lost: {error}"
    (folder / f"outcome{rank}").write_text(outcome)


def fork_ranks(work: Callable[..., None], folder: Path, *args: Any) -> list[int]:
    """Start `work(rank, folder, ...)` on two ranks, in forks of this process; their pids."""
    path = folder / f"store-{work.__name__}"
    pids = []
    for rank in range(2):
        pid = os.fork()
        if pid:
            pids.append(pid)
            continue
        try:
            store, limit = dist.FileStore(str(path), 2), timedelta(seconds=20)
            dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=limit)
            work(rank, folder, *args)
        except Exception as error:
            (folder / f"error{rank}").write_text(f"{type(error).__name__}: {error}")
        finally:
            os._exit(0)  # no clean-up of the parent's
    return pids


def trial(folder: Path, chance: random.Random, longest: float) -> tuple[str, float]:
    """One trial in an empty folder: its outcome, and the seconds until the kill."""
    background = chance.random() < 1 / 3
    both = chance.random() < 0.5
    victims = [0, 1] if both else [chance.randrange(2)]
    pids = fork_ranks(save_twice, folder, background)
    while not (folder / "go").exists():
        if os.waitpid(pids[0], os.WNOHANG) != (0, 0):
            error = folder / "error0"
            raise SystemExit(error.read_text() if error.exists() else "rank 0 died at its start")
        time.sleep(0.001)
    delay = chance.random() * longest
    time.sleep(delay)
    for victim in victims:
        os.kill(pids[victim], signal.SIGKILL)
    if not both:  # the survivor gets an error once it waits for the other
        time.sleep(0.2)
        os.kill(pids[1 - victims[0]], signal.SIGKILL)
    for pid in (*pids, *fork_ranks(load_and_tell, folder)):
        os.waitpid(pid, 0)
    outcomes = {(folder / f"outcome{rank}").read_text() for rank in range(2)}
    return " / ".join(sorted(outcomes)), delay


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--trials", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--longest", type=float, default=0.3, help="seconds until the kill")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chance = random.Random(options.seed)
    counts: Counter[str] = Counter()
    for number in range(options.trials):
        with tempfile.TemporaryDirectory() as folder:
            outcome, delay = trial(Path(folder), chance, options.longest)
        counts[outcome] += 1
        if outcome not in ("old", "new"):
            print(f"trial {number}, killed after {delay:.3f} s: {outcome}", flush=True)
    for outcome, count in counts.most_common():
        print(f"{outcome}: {count} of {options.trials}")
    return 0 if set(counts) <= {"old", "new"} else 1


if __name__ == "__main__":
    sys.exit(main())

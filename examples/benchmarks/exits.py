"""Thousands of starts and ends of ranks: does one abort without a cause?

    python examples/benchmarks/exits.py --trials 1000 --ranks 4

Each trial is a process group over Gloo whose ranks compile a model, take a few steps, and end in a
way drawn from `ENDS`: orderly or with everything alive, in the middle of a backward, after an error
on one rank, with a background save or dropped collectives under way. Half of the groups move data
as groups of more than 8 ranks do, by Gloo's collectives and threads. Ranks are forked from this
process, which has imported what they need, and end as any Python process does: threads, destructors
and all.

It prints how often each way ended with which exit codes, and for each rank that a signal ended the
last lines of its stderr, with the stacks of `faulthandler`. It ends with 1 if there is one.
"""

from __future__ import annotations

import faulthandler
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks import harness
from graphshard.runtime import group as groups
from graphshard.runtime.collectives import BoundCollective

LIMIT = 90.0
"""Seconds after which a rank counts as hung."""

ENDS = (
    "module dropped, group destroyed",
    "group destroyed, module alive",
    "nothing destroyed",
    "nothing destroyed, between forward and backward",
    "group destroyed between forward and backward",
    "background save under way",
    "one rank raises before its backward",
    "one rank exits at once",
    "one rank is late",
    "two groups, one destroyed",
    "collectives dropped in flight",
)


def life(rank: int, ranks: int, end: str, seed: int, folder: str) -> None:
    os.dup2(os.open(f"{folder}/stderr_{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    faulthandler.enable()
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", ranks)
    timeout = timedelta(seconds=30)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timeout)
    drawn = random.Random(seed)
    if drawn.random() < 0.5:
        groups.MAX_RANKS = 1
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16))
    prefetch = drawn.choice([None, 0, 2])
    policy = graphshard.BlockPolicy({nn.Linear}, forward_prefetch=prefetch)
    sharded = graphshard.compile(model, policy)
    optimizer = sharded.optimizer(torch.optim.AdamW, lr=1e-3)
    for _ in range(drawn.randint(1, 4)):
        sharded(torch.randn(4, 16)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    pending = end_like(end, rank, sharded, optimizer, folder)  # noqa: F841
    if end.startswith("module dropped"):
        del sharded, optimizer
    if "group destroyed" in end:
        dist.destroy_process_group()


def end_like(end: str, rank: int, sharded: Any, optimizer: Any, folder: str) -> Any:
    """What a rank does last; returns what then is under way."""
    batch = torch.randn(4, 16)
    if end == "background save under way":
        return sharded.save_checkpoint(Path(folder, "saved"), optimizer, background=True)
    if end == "two groups, one destroyed":
        other = dist.new_group(timeout=timedelta(seconds=30))
        dist.all_reduce(torch.ones(1), group=other)
        dist.destroy_process_group(other)
    if end.endswith("between forward and backward"):
        return sharded(batch).sum()
    if end == "collectives dropped in flight":
        interrupt(late=rank == 0, seconds=random.random() / 10)
        with suppress(InterruptedError, graphshard.CollectiveError):
            sharded(batch)
    if end == "one rank is late" and rank == 0:
        time.sleep(0.5)
    if end.startswith(("one rank raises", "one rank exits")):
        loss = sharded(batch).sum()
        if rank == 0 and "exits" in end:
            os._exit(0)
        if rank == 0:
            raise ValueError("of the trial")
        loss.backward()
    return None


def interrupt(late: bool, seconds: float) -> None:
    """From now on launch after `seconds` if `late`; else raise before a wait, as a signal may."""
    launch = BoundCollective.start

    def start(self: BoundCollective, *args: Any) -> None:
        time.sleep(seconds)
        launch(self, *args)

    def wait(self: BoundCollective, pending: Any) -> list[torch.Tensor]:
        raise InterruptedError

    if late:
        BoundCollective.start = start
    else:
        BoundCollective.wait = wait


def trial(ranks: int, end: str, seed: int) -> tuple[list[int], str] | None:
    """The exit codes of the ranks, and what those wrote that a signal ended; None in a rank."""
    folder = tempfile.mkdtemp()
    started = []
    for rank in range(ranks):
        started.append(os.fork())
        if not started[-1]:
            life(rank, ranks, end, seed, folder)
            return None
    codes = _ended(started)
    said = "".join(
        f"rank {rank}, {end}, seed {seed}: exit code {code}\n"
        + "".join(Path(folder, f"stderr_{rank}").read_text().splitlines(True)[-40:])
        for rank, code in enumerate(codes)
        if code < 0
    )
    shutil.rmtree(folder)
    return codes, said


def _ended(started: list[int]) -> list[int]:
    """The exit codes of processes; those that hang are killed, with -9."""
    codes: dict[int, int] = {}
    until = time.monotonic() + LIMIT
    while len(codes) < len(started):
        for process in started:
            if process not in codes:
                if time.monotonic() > until:
                    os.kill(process, signal.SIGKILL)
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    codes[process] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    return [codes[process] for process in started]


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--trials", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--end", choices=ENDS)
    options = parser.parse_args()
    codes: dict[str, Counter[int]] = {end: Counter() for end in ENDS}
    signalled = 0
    for seed in range(options.seed, options.seed + options.trials):
        end = options.end or ENDS[seed % len(ENDS)]
        result = trial(options.ranks, end, seed)
        if result is None:
            return  # a rank, which ends here
        found, said = result
        codes[end].update(found)
        if said:
            signalled += 1
            print(said, flush=True)
    for end, counted in codes.items():
        if counted:
            print(f"{end}: " + ", ".join(f"{n} x {code}" for code, n in sorted(counted.items())))
    print(f"{signalled} of {options.trials} trials had a rank that a signal ended")
    sys.exit(bool(signalled))


if __name__ == "__main__":
    main()

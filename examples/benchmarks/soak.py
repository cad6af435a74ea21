"""A long run that has to stay as it was: memory, descriptors, threads, keys of the Store, time.

    python examples/benchmarks/soak.py --steps 20000

Two ranks over Gloo train a small GPT with sequences of four lengths. They evaluate, drop forwards
whose backward never comes, clip, and save checkpoints, every second one in the background; half
way all processes end, and new ones go on from the last checkpoint. For each tenth of a half it
prints a row, of the rank that needs most, and ends with 1 if something grows.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
import warnings
from dataclasses import astuple, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks import harness
from examples.gpt import GPT, Block, GPTConfig
from graphshard.torch_private import compat as torch_compat

RANKS = 2
LENGTHS = (16, 24, 32, 40)
VOCAB = 64


@dataclass
class Row:
    """What a rank holds after `step` steps, and the median times of a step in milliseconds."""

    step: int
    megabytes: float
    descriptors: int
    threads: int
    keys: int
    clock: float
    processor: float

    @staticmethod
    def now(step: int, seconds: list[float], busy: list[float]) -> Row:
        """The row of this process."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return Row(
            step,
            pages * os.sysconf("SC_PAGESIZE") / 2**20,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            torch_compat.group_store(dist.group.WORLD).num_keys(),
            1e3 * median(seconds),
            1e3 * median(busy),
        )


def batch(step: int, rank: int) -> torch.Tensor:
    """Token ids of shape (4, length)."""
    generator = torch.Generator().manual_seed(RANKS * step + rank)
    return torch.randint(VOCAB, (4, LENGTHS[step % len(LENGTHS)]), generator=generator)


def train(rank: int, folder: Path, first: int, last: int, window: int) -> list[Row]:
    """Train on from the latest checkpoint; rows of what the rank that needs most holds."""
    warnings.simplefilter("ignore")
    logging.disable()
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=VOCAB, layers=2, heads=2, width=32, dropout=0.1))
    sharded = graphshard.compile(model, graphshard.BlockPolicy({Block}))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3)
    if (latest := graphshard.latest_checkpoint(folder)) is not None:
        sharded.load_checkpoint(latest, optimizer)
    rows, seconds, busy = list[Row](), list[float](), list[float]()
    for step in range(first, last):
        ids = batch(step, rank)
        start, begin = time.perf_counter(), time.process_time()
        sharded(ids, ids).backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
        busy.append(time.process_time() - begin)
        if step % 20 == 0:
            sharded(ids, ids)  # its backward never comes
        if step % 50 == 0:
            sharded.eval()
            with torch.no_grad():
                sharded(ids, ids)
            sharded.train()
        done = step + 1
        if done % window == 0:
            path = folder / f"step-{done}"
            sharded.save_checkpoint(path, optimizer, keep=2, background=bool(done // window % 2))
            rows.append(Row.now(done, seconds, busy))
            seconds.clear()
            busy.clear()
    sharded.save_checkpoint(folder / f"step-{last}", optimizer, keep=2)
    each: list[list[Row]] = [[]] * RANKS
    dist.all_gather_object(each, rows)
    return [Row(*map(max, zip(*map(astuple, now), strict=True))) for now in zip(*each, strict=True)]


def growth(rows: list[Row]) -> list[str]:
    """What is more at the end of a half than after its first rows, in which programs are made."""
    early, late = rows[2:5], rows[-3:]
    grown = []
    for name in ("descriptors", "threads", "keys"):
        before, after = (max(getattr(row, name) for row in part) for part in (early, late))
        if after > before:
            grown.append(f"{name}: {before} to {after}")
    for name, share in (("megabytes", 1.02), ("processor", 1.1)):
        before, after = (median(getattr(row, name) for row in part) for part in (early, late))
        if after > share * before:
            grown.append(f"{name}: {before:.1f} to {after:.1f}")
    return grown


def main() -> int:
    """Parse the arguments, run, print the table; 1 if something grew."""
    parser = harness.parser(__doc__)
    parser.add_argument("--steps", type=int, default=20000)
    options = parser.parse_args()
    grown, half, window = list[str](), options.steps // 2, options.steps // 20
    print(
        "| step | memory (MiB) | descriptors, threads, keys in the Store "
        "| step (ms) | of the processor (ms) |"
    )
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for first in (0, half):
            rows = harness.on_ranks(train, RANKS, Path(folder), first, first + half, window)
            for row in rows:
                print(
                    f"| {row.step:,} | {row.megabytes:.1f} | {row.descriptors}, {row.threads}, "
                    f"{row.keys} | {row.clock:.2f} | {row.processor:.2f} |"
                )
            grown += growth(rows)
    print("\n".join(f"grows: {line}" for line in grown) or "nothing grows")
    return 1 if grown else 0


if __name__ == "__main__":
    sys.exit(main())

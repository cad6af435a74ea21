"""Seconds from the call of `compile` to the first step, with `backend="inductor"`, by depth.

    OMP_NUM_THREADS=1 python examples/benchmarks/first_step.py    # a GPT of 12 and of 48 blocks

Regions of equal structure are compiled once, so a deeper model should cost little more. Each line
is one depth, with Inductor's cache on disk empty or filled by the run before; each run is `--ranks`
processes of their own over Gloo, that have compiled a toy before. Seconds are of the wall clock on
rank 0, the median of `--rounds`: capture; passes with the checks after each; compile, which is
Inductor's part; the rest of the call (shards, the check of what was captured, lowering); the first
step, forward and backward; a second one, which is the first one's work without what is done once.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks import harness
from examples.gpt import GPT, Block, GPTConfig
from graphshard.progress import Progress

PARTS = ("capture", "passes", "compile", "rest", "step", "again")


def first_step(layers: int, width: int) -> dict[str, float]:
    """Seconds of each part, for a GPT of `layers` blocks."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(layers=layers, width=width, heads=4))
    ids, targets = torch.randint(0, 256, (2, 2, 64))
    stages = Progress(visible=False)
    dist.barrier()
    began = time.perf_counter()
    sharded = graphshard.compile(
        model,
        graphshard.BlockPolicy({Block}),
        example_inputs=(ids, targets),
        backend="inductor",
        progress=stages,
    )
    called = time.perf_counter()
    sharded(ids, targets).backward()
    stepped = time.perf_counter()
    sharded(ids, targets).backward()
    again = time.perf_counter() - stepped
    found = {
        name: sum(stage.seconds for stage in stages.times if stage.name == name)
        for name in ("capture", "passes", "compile")
    }
    found["rest"] = called - began - sum(found.values())
    return found | {"step": stepped - called, "again": again}


def one_rank(rank: int, layers: int, width: int) -> dict[str, float]:
    first_step(1, 32)  # what a first call imports is no cost of the model's
    return first_step(layers, width)


def after_capture(seconds: dict[str, float], *, with_step: bool) -> float:
    """Seconds from the end of capture to the first step, or to its end."""
    parts = ("passes", "compile", "rest", *(("step",) if with_step else ()))
    return sum(seconds[part] for part in parts)


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--depths", type=int, nargs="+", default=[12, 48])
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    taken: dict[tuple[int, str], list[dict[str, float]]] = {}
    for _ in range(asked.rounds):
        for layers in asked.depths:
            with tempfile.TemporaryDirectory() as cache:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
                for state in ("empty", "filled"):
                    found = harness.on_ranks(one_rank, asked.ranks, layers, asked.width)
                    taken.setdefault((layers, state), []).append(found)
    print(f"blocks   cache  {'  '.join(f'{part:>7}' for part in PARTS)}   after capture")
    for (layers, state), rows in taken.items():
        parts = "  ".join(f"{median(row[part] for row in rows):7.2f}" for part in PARTS)
        whole = median(after_capture(row, with_step=True) for row in rows)
        print(f"{layers:6}  {state:>6}  {parts}  {whole:14.2f}")
    few, many = min(asked.depths), max(asked.depths)
    for state in ("empty", "filled"):
        ratios = [
            median(after_capture(row, with_step=with_step) for row in taken[many, state])
            / median(after_capture(row, with_step=with_step) for row in taken[few, state])
            for with_step in (False, True)
        ]
        print(
            f"{state} cache, after capture, {many} blocks of {few}: {ratios[0]:.2f} to the first "
            f"step, {ratios[1]:.2f} with it"
        )


if __name__ == "__main__":
    main()

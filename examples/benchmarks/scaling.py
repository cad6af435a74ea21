"""The growth of planning with depth, width and ranks: CPU seconds and memory of every stage.

    python examples/benchmarks/scaling.py             # a GPT, 8 to 128 blocks; minutes
    python examples/benchmarks/scaling.py --llama     # Llama-3-70B, from meta to verified program
    python examples/benchmarks/scaling.py --schedule overlap --backend inductor

Each row is one configuration, each time in a process of its own: seconds are CPU time of that
process, the least of `--best` times for each stage; memory is the growth of its peak resident set
(ru_maxrss) over the stages up to then. Stages are capture, plan, passes (all of them), verify
(after every pass), simulate (on H100s) and dump (text of the schedule and of every node). Below the
rows over depth stands, per stage, the exponent: the slope of log seconds over log nodes, fitted to
the deeper half of the rows (at least three), where constant costs matter less. A stage is linear if
it is at most 1.15. Over widths and ranks it is flat if no row costs more than 1.3 times the first.
A stage that takes less than 50 ms everywhere is not compared. Ends with status 1 if a stage is not.
"""

from __future__ import annotations

import argparse
import gc
import math
import resource
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks import benchmark_models, harness
from examples.gpt import GPT, GPTConfig
from graphshard.program.text import full_text, schedule_text

STAGES = ("capture", "plan", "passes", "verify", "simulate", "dump")
DEPTHS = (8, 16, 32, 64, 128)
WIDTHS = (64, 512, 4096, 16_384)
WORLDS = (2, 64, 1024, 16_384)
LINEAR, FLAT = 1.15, 1.3
SMALL = 0.05  # seconds below which a stage is not compared


class StageTimes:
    """Seconds by `clock` of each stage, whole and without stages inside of it."""

    def __init__(self, clock: Callable[[], float] = time.process_time) -> None:
        self.clock = clock
        self.whole: Counter[str] = Counter()
        self.seconds: Counter[str] = Counter()
        self._inside = 0.0  # seconds of stages that ended inside of the open one

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[None]:
        """See `graphshard.pipeline.Stages`."""
        start, before, self._inside = self.clock(), self._inside, 0.0
        try:
            yield
        finally:
            took = self.clock() - start
            self.whole[name] += took
            self.seconds[name] += took - self._inside
            self._inside = before + took

    def advance(self) -> None:
        """Nothing is shown."""


def gpt(layers: int, width: int) -> tuple[Any, tuple[str, ...], dict[str, Any]]:
    with torch.device("meta"):
        ids = torch.zeros(1, 128, dtype=torch.long)
        model = GPT(GPTConfig(vocab=1024, layers=layers, heads=8, width=width))
    return model, ("Block",), {"idx": ids, "targets": ids}


def llama(layers: int, width: int) -> tuple[Any, tuple[str, ...], dict[str, Any]]:
    with torch.device("meta"):
        ids = torch.zeros(1, 4096, dtype=torch.long)
        model = benchmark_models.llama(width, 28_672, layers, 64, 8, 128_256)()
    return model, ("LlamaDecoderLayer",), {"input_ids": ids, "labels": ids}


MODELS = {"gpt": gpt, "llama": llama}

Case = tuple[str, int, int, int, str, str]
"""The model, its blocks and width, the ranks, the schedule and the backend."""


def row(rank: int, case: Case) -> dict[str, Any]:
    """Seconds of each stage, nodes, and MiB of peak resident set that all of it added."""
    build, layers, width, world, schedule, backend = case
    model, units, call = MODELS[build](layers, width)
    precision = graphshard.MixedPrecision(param_dtype=torch.bfloat16)
    hardware = "h100-sxm" if schedule == "overlap" else None
    policy = graphshard.BlockPolicy(
        units, mixed_precision=precision, schedule=schedule, hardware=hardware
    )
    # What the first capture of a process imports is no cost of the model's.
    small, units, small_call = MODELS[build](1, 64)
    warm = graphshard.plan(small, policy, world_size=2, example_kwargs=small_call, backend=backend)
    graphshard.simulate(warm, hardware="h100-sxm")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = StageTimes()
    start = time.process_time()
    plan = graphshard.plan(
        model, policy, world_size=world, example_kwargs=call, progress=times, backend=backend
    )
    text = str(plan)
    total = time.process_time() - start
    program = plan.program
    assert program is not None
    assert text
    gc.collect()
    gc.freeze()  # or a full collection of all that planning made falls into one stage by chance
    with times.stage("simulate"):
        graphshard.simulate(plan, hardware="h100-sxm")
    with times.stage("dump"):
        schedule_text(program)
        full_text(program)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    known = {name: times.seconds.pop(name) for name in STAGES if name != "passes"}
    known["passes"] = sum(times.seconds.values())  # each pass is a stage of its own
    return {
        "layers": layers,
        "width": width,
        "world": world,
        "nodes": len(program.graph.nodes),
        "seconds": known,
        "total": total,
        "mib": (after - before) / 1024,
    }


def least_of(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Measurements of one case as one: the least seconds of each stage, and the least memory."""
    least = found[0] | {key: min(each[key] for each in found) for key in ("total", "mib")}
    least["seconds"] = {name: min(each["seconds"][name] for each in found) for name in STAGES}
    return least


def exponent(rows: list[dict[str, Any]], stage: str) -> float:
    """Least squares slope of log seconds over log nodes, of the deeper half of `rows`."""
    deep = rows[-max(3, len(rows) - len(rows) // 2) :]
    if max(each["seconds"][stage] for each in deep) < SMALL:
        return 0.0
    xs = [math.log(each["nodes"]) for each in deep]
    ys = [math.log(max(each["seconds"][stage], 1e-4)) for each in deep]
    return linear_regression(xs, ys).slope


def over(args: argparse.Namespace, cases: list[tuple[str, int, int, int]]) -> list[dict[str, Any]]:
    """Each of `cases`, measured in rounds over all of them: what disturbs falls on all alike."""
    rounds = [
        [harness.on_ranks(row, 1, (*case, args.schedule, args.backend)) for case in cases]
        for _ in range(args.best)
    ]
    found = [least_of(list(of_case)) for of_case in zip(*rounds, strict=True)]
    for each in found:
        cells = "".join(f"{each['seconds'][stage]:>10.2f}" for stage in STAGES)
        print(
            f"{each['layers']:6} {each['width']:6,} {each['world']:7,} {each['nodes']:7,}{cells}"
            f"{each['total']:>9.1f}{each['mib']:>8,.0f}",
            flush=True,
        )
    return found


def judged(found: dict[str, float], most: float, title: str, good: str) -> bool:
    """Print a figure of each stage, of which none may be above `most`; whether none is."""
    cells = "".join(f"{one:>9.2f}{' ' if one <= most else '!'}" for one in found.values())
    fine = max(found.values()) <= most
    print(f"{title:>28}{cells}   {good if fine else f'NOT {good}'}\n")
    return fine


def flat(rows: list[dict[str, Any]], what: str) -> bool:
    """Whether no stage costs more with `what`; says so."""
    dearest = {}
    for stage in STAGES:
        seconds = [each["seconds"][stage] for each in rows]
        ratio = max(seconds) / max(seconds[0], 1e-4)
        dearest[stage] = 0.0 if max(seconds) < SMALL else ratio
    return judged(dearest, FLAT, "dearest row over first", f"flat in {what}")


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("--llama", action="store_true", help="Llama-3-70B alone, on 64 ranks")
    parser.add_argument("--layers", type=int, default=80, help="of the Llama")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--schedule", choices=["fsdp", "overlap"], default="fsdp")
    parser.add_argument("--backend", choices=["eager", "inductor"], default="eager")
    parser.add_argument("--best", type=int, default=2, help="times that each row is measured")
    parser.add_argument("--only-depth", action="store_true", help="neither widths nor ranks")
    args = parser.parse_args()
    cells = "".join(f"{stage:>10}" for stage in STAGES)
    print(f"{'blocks':>6} {'width':>6} {'ranks':>7} {'nodes':>7}{cells}{'planned':>9}{'MiB':>8}")
    if args.llama:
        (found,) = over(args, [("llama", args.layers, 8192, 64)])
        return int(found["total"] > 30)
    rows = over(args, [("gpt", layers, 256, 8) for layers in args.depths])
    slopes = {stage: exponent(rows, stage) for stage in STAGES}
    fine = judged(slopes, LINEAR, "exponent", "linear in nodes")
    memory = rows[-1]["mib"] / rows[0]["mib"]
    times = rows[-1]["nodes"] / rows[0]["nodes"]
    print(f"{'memory':>28}: {memory:.1f} times for {times:.1f} times the nodes\n")
    fine &= memory <= 1.2 * times
    if not args.only_depth:
        fine &= flat(over(args, [("gpt", 16, width, 8) for width in WIDTHS]), "width")
        fine &= flat(over(args, [("gpt", 16, 256, world) for world in WORLDS]), "ranks")
    return int(not fine)


if __name__ == "__main__":
    sys.exit(main())

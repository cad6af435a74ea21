"""The growth of planning with depth, width and ranks: seconds and memory of every stage.

    python examples/benchmarks/scaling.py             # a GPT, 8 to 128 blocks; minutes
    python examples/benchmarks/scaling.py --llama     # Llama-3-70B, from meta to verified program
    python examples/benchmarks/scaling.py --schedule overlap --backend inductor

Each row is one configuration, each time in a process of its own: seconds are the least of `--best`
times for each stage; memory is the growth of its peak resident set (ru_maxrss) over the stages up
to then. Stages are capture, plan, passes (all of them), verify (after every pass), simulate (on
H100s) and dump (text of the schedule and of every node). Below the rows over depth stands, per
stage, the exponent: the slope of log seconds over log nodes, fitted to the deeper half of the rows
(at least three), where constant costs matter less.
"""

from __future__ import annotations

import gc
import math
import resource
import sys
from pathlib import Path
from statistics import linear_regression
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks import benchmark_models, harness
from examples.gpt import GPT, GPTConfig
from graphshard.program.text import full_text, schedule_text
from graphshard.progress import Progress

STAGES = ("capture", "plan", "passes", "verify", "simulate", "dump")
DEPTHS = (8, 16, 32, 64, 128)
WIDTHS = (64, 512, 4096, 16_384)
WORLDS = (2, 64, 1024, 16_384)


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


def row(rank: int, case: Case) -> dict[str, float]:
    """Seconds of each stage, nodes, and MiB of peak resident set that all of it added."""
    build, layers, width, world, schedule, backend = case
    model, units, call = MODELS[build](layers, width)
    policy = graphshard.BlockPolicy(
        units,
        mixed_precision=graphshard.MixedPrecision(param_dtype=torch.bfloat16),
        schedule=schedule,
        hardware="h100-sxm" if schedule == "overlap" else None,
    )
    # What the first capture of a process imports is no cost of the model's.
    small, _, small_call = MODELS[build](1, 64)
    warm = graphshard.plan(small, policy, world_size=2, example_kwargs=small_call, backend=backend)
    graphshard.simulate(warm, hardware="h100-sxm")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    times = Progress(visible=False)
    plan = graphshard.plan(
        model, policy, world_size=world, example_kwargs=call, progress=times, backend=backend
    )
    program = plan.program
    assert program is not None
    gc.collect()
    gc.freeze()  # or a full collection of all that planning made falls into one stage by chance
    with times.stage("simulate"):
        graphshard.simulate(plan, hardware="h100-sxm")
    with times.stage("dump"):
        schedule_text(program)
        full_text(program)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {n: sum(t.seconds for t in times.times if t.name == n) for n in STAGES}
    found["passes"] -= sum(t.seconds for t in times.times if t.name == "verify" and t.depth)
    found["planned"] = sum(t.seconds for t in times.times if not t.depth)
    found["planned"] -= found["simulate"] + found["dump"]
    return found | {"nodes": len(program.graph.nodes), "MiB": (after - before) / 1024}


def exponent(rows: list[dict[str, float]], stage: str) -> float:
    """Least squares slope of log seconds over log nodes, of the deeper half of `rows`."""
    deep = rows[-max(3, len(rows) - len(rows) // 2) :]
    xs = [math.log(each["nodes"]) for each in deep]
    return linear_regression(xs, [math.log(max(each[stage], 1e-4)) for each in deep]).slope


def main() -> None:
    parser = harness.parser(__doc__)
    parser.add_argument("--llama", action="store_true", help="Llama-3-70B alone, on 64 ranks")
    parser.add_argument("--layers", type=int, default=80, help="of the Llama")
    parser.add_argument("--depths", type=int, nargs="+", default=DEPTHS)
    parser.add_argument("--schedule", choices=["fsdp", "overlap"], default="fsdp")
    parser.add_argument("--backend", choices=["eager", "inductor"], default="eager")
    parser.add_argument("--best", type=int, default=2, help="times that each row is measured")
    parser.add_argument("--only-depth", action="store_true", help="neither widths nor ranks")
    args = parser.parse_args()

    def over(cases: list[tuple[str, int, int, int]]) -> list[dict[str, float]]:
        """Measure each case in rounds over all of them: what disturbs falls on all alike."""
        rounds = [
            [harness.on_ranks(row, 1, (*case, args.schedule, args.backend)) for case in cases]
            for _ in range(args.best)
        ]
        found = []
        for (_, layers, width, world), same in zip(cases, zip(*rounds, strict=True), strict=True):
            one = {key: min(each[key] for each in same) for key in same[0]}
            cells = "".join(f"{one[name]:>10.2f}" for name in (*STAGES, "planned"))
            print(f"{layers:6} {width:6,} {world:7,} {one['nodes']:7,}{cells}{one['MiB']:>8,.0f}")
            found.append(one)
        return found

    cells = "".join(f"{name:>10}" for name in (*STAGES, "planned"))
    print(f"{'blocks':>6} {'width':>6} {'ranks':>7} {'nodes':>7}{cells}{'MiB':>8}")
    if args.llama:
        over([("llama", args.layers, 8192, 64)])
        return
    rows = over([("gpt", layers, 256, 8) for layers in args.depths])
    if len(rows) > 2:
        slopes = "".join(f"{exponent(rows, stage):>10.2f}" for stage in STAGES)
        print(f"{'exponent':>29}{slopes}")
    if not args.only_depth:
        over([("gpt", 16, width, 8) for width in WIDTHS])
        over([("gpt", 16, 256, world) for world in WORLDS])


if __name__ == "__main__":
    main()

"""Is it true? Predicted step times of seven models against measured ones.

    python examples/benchmarks/time_truth.py

It starts ranks of one thread each, one and then two of them (`--ranks`), calibrates them, and then
times each model's training step (forward, backward, AdamW) on the same ranks. `--hardware FILE`
takes a file of `graphshard calibrate` instead of calibrating. On a machine with CUDA devices it
does the same with NCCL ranks; batches are larger there (`--scale`).

The prediction knows the calibrated figures and the program, and nothing of the measurement. A step
is timed from a common start to the end of the slowest rank; the median over steps is compared. A
rank alone on one thread is timed by its CPU time, as its operators are, since a virtual machine may
lose a tenth of the clock's time to others.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from benchmark_models import TIMED, Model, loss_of

import graphshard
from graphshard.calibrate.ranks import joined
from graphshard.calibrate.run import calibrate
from graphshard.hardware.hardware import Hardware
from graphshard.progress import Progress
from graphshard.runtime.group import Group
from graphshard.runtime.measure import Effort

BAR = 0.15


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hardware", metavar="FILE", help="or preset, instead of calibrating")
    parser.add_argument("--save", type=Path, metavar="FILE", help="keep the last calibration here")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="N", help="default: 1 and 2")
    parser.add_argument("--steps", type=int, default=15, help="timed ones, at least")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--models", nargs="+", choices=[m.name for m in TIMED], metavar="NAME")
    parser.add_argument("--threads", type=int, default=1, help="per rank on a CPU")
    parser.add_argument("--scale", type=int, help="of batches (default: 1 on a CPU, 16 on CUDA)")
    parser.add_argument("--device", choices=["cpu", "cuda"])
    parser.add_argument("--units", action="store_true", help="print each estimate as well")
    return parser.parse_args()


# -- on a rank -------------------------------------------------------------------------------------


def rank_main(args: argparse.Namespace, device: torch.device, out: Path) -> None:
    with joined(device) as group:
        if args.hardware is not None:
            hardware = Hardware.load(args.hardware)
        else:
            begin = time.perf_counter()
            found = calibrate(group, dtypes=(), effort=Effort(), progress=Progress())
            hardware = found.hardware
            if group.rank == 0:
                print(f"calibrated {group.size} rank(s) in {time.perf_counter() - begin:.0f} s")
                if args.save is not None:
                    hardware.save(args.save)
        lines = []
        for model in TIMED:
            if args.models and model.name not in args.models:
                continue
            line = compare(model, args, group, hardware)
            lines.append(line)
            if group.rank == 0:
                print(shown(line), flush=True)
        if group.rank == 0:
            out.write_text(json.dumps(lines))
        gc.collect()  # nothing refers to the group any more


def compare(
    model: Model, args: argparse.Namespace, group: Group, hardware: Hardware
) -> dict[str, Any]:
    """Predicted and measured seconds of a model's step."""
    torch.manual_seed(0)
    scale = args.scale or (1 if group.device.type == "cpu" else 16)
    generator = torch.Generator().manual_seed(group.rank)
    batch = {k: v.to(group.device) for k, v in model.batch(scale, generator).items()}
    policy = graphshard.BlockPolicy(list(model.blocks))
    sharded = graphshard.compile(
        model.build().train(), policy, example_kwargs=batch, device=group.device
    )
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4)
    estimate = graphshard.simulate(sharded, hardware=hardware)
    if args.units and group.rank == 0:
        print(estimate)
    times = []
    for _ in range(args.warmup + args.steps):
        gc.collect()  # not in the middle of a step
        times.append(step_seconds(sharded, optimizer, batch, group))
    if any(group.all_gather_object(spread(times[args.warmup :]) > 0.1)):  # disturbed: as many again
        times += [step_seconds(sharded, optimizer, batch, group) for _ in range(args.steps)]
    times = times[args.warmup :]
    slowest = [max(each) for each in zip(*group.all_gather_object(times), strict=True)]
    return {
        "model": model.name,
        "ranks": group.size,
        "predicted": estimate.step_seconds,
        "measured": median(slowest),
        "spread": spread(slowest),
        "exposed": estimate.exposed_seconds,
        "optimizer": estimate.optimizer_seconds,
        "steps": len(slowest),
    }


def step_seconds(sharded: Any, optimizer: Any, batch: dict[str, Any], group: Group) -> float:
    """One step from a common start until this rank's device is done."""
    if group.size > 1:
        dist.barrier()
    in_thread = group.device.type == "cpu" and group.size == 1 and torch.get_num_threads() == 1
    clock = time.thread_time if in_thread else time.perf_counter
    begin = clock()
    loss_of(sharded(**batch)).backward()
    optimizer.step()
    if group.device.type == "cuda":
        torch.cuda.synchronize()
    took = clock() - begin
    optimizer.zero_grad()
    return took


def spread(times: list[float]) -> float:
    """Interquartile range, as a part of the median."""
    low, middle, high = quantiles(times, n=4)
    return (high - low) / middle


# -- the start and the table -----------------------------------------------------------------------


HEAD = f"{'model':10}  ranks  {'predicted':>10}  {'measured':>10}  ratio  {'spread':>6}  exposed"


def shown(line: dict[str, Any]) -> str:
    ratio = line["predicted"] / line["measured"]
    return (
        f"{line['model']:10}  {line['ranks']:5}  {line['predicted'] * 1e3:7.1f} ms  "
        f"{line['measured'] * 1e3:7.1f} ms  {ratio:5.2f}  {line['spread']:6.1%}  "
        f"{line['exposed'] / line['predicted']:7.1%}"
    )


def summary(lines: list[dict[str, Any]]) -> str:
    said = []
    for ranks in sorted({line["ranks"] for line in lines}):
        errors = [
            abs(line["predicted"] / line["measured"] - 1)
            for line in lines
            if line["ranks"] == ranks
        ]
        said.append(
            f"{ranks} rank(s): median absolute error {median(errors):.1%} over {len(errors)} "
            f"models (bar {BAR:.0%}), worst {max(errors):.1%}"
        )
    return "\n".join(said)


def main() -> None:
    args = parse_args()
    kind = args.device or ("cuda" if torch.cuda.is_available() else "cpu")
    if "TIME_TRUTH_OUT" in os.environ:
        device = torch.device(kind)
        if kind == "cuda":
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
            torch.cuda.set_device(device)
        torch.set_num_threads(args.threads)
        rank_main(args, device, Path(os.environ["TIME_TRUTH_OUT"]))
        return
    most = torch.cuda.device_count() if kind == "cuda" else 2
    print(HEAD, flush=True)
    lines: list[dict[str, Any]] = []
    for ranks in args.ranks or [n for n in (1, 2) if n <= most]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "lines.json"
            env = {
                **os.environ, "OMP_NUM_THREADS": str(args.threads), "TIME_TRUTH_OUT": str(out)
            }  # fmt: skip
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = [sys.executable, *launcher, __file__, *sys.argv[1:]]
            ended = subprocess.run(command, env=env)
            if not out.exists():
                sys.exit(ended.returncode or 1)
            lines += json.loads(out.read_text())
    print(summary(lines))


if __name__ == "__main__":
    main()

"""graphshard against torch's `fully_shard`: paired, alternating steps in one process group.

    torchrun --nproc-per-node 2 examples/benchmarks/compare_fsdp2.py

Both train the same GPT from the same weights on the same batches with the same AdamW, each block a
unit. Steps come in pairs whose order alternates (A B, B A, ...), so that drift of the machine falls
on both alike; a step's time is the slowest rank's. The ratio is the median over pairs, with the
distribution-free confidence interval that the sign test gives for a median. Peaks are those of
steps of their own, which are not timed.

`--host` takes the CPU time of the thread that trains in place of the clock's: with blocks a few
numbers wide nearly all of it is the host's work. Threads of Gloo are left out: the one that reads
sockets spins while another holds a connection.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from examples.benchmarks import harness
from examples.benchmarks.benchmark_models import Model, gpt_tokens
from examples.benchmarks.rival_systems import System, fully_shard_step, graphshard_step
from examples.benchmarks.rivals import Case, Result, pairs_arguments
from examples.gpt import GPT, GPTConfig


def parse_args() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4, help="sequences per rank")
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--backend", default="eager", help="graphshard's")
    parser.add_argument("--strategy", choices=["FULL_SHARD", "SHARD_GRAD_OP"], default="FULL_SHARD")
    parser.add_argument("--backward-prefetch", choices=["pre", "post", "none"], default="pre")
    parser.add_argument("--forward-prefetch", type=int, default=0)
    parser.add_argument("--host", action="store_true", help="CPU time of the training thread")
    pairs_arguments(parser, warmup=3)
    parser.set_defaults(scale=1, hardware=None)
    return parser.parse_args()


def systems(args: argparse.Namespace) -> tuple[System, System]:
    ours = partial(
        graphshard_step,
        backend=args.backend,
        strategy=args.strategy,
        backward_prefetch=None if args.backward_prefetch == "none" else args.backward_prefetch,
        forward_prefetch=args.forward_prefetch,
    )
    theirs = partial(fully_shard_step, reshard_after_forward=args.strategy == "FULL_SHARD")
    return System("graphshard", ours), System("fully_shard", theirs)


def run(args: argparse.Namespace, device: torch.device, folder: str) -> None:
    config = GPTConfig(layers=args.layers, width=args.width, heads=args.heads)
    batches = gpt_tokens(args.batch, args.context, config.vocab)
    model = Model("gpt", lambda: GPT(config), ("Block",), batches)
    ours, theirs = Case(model, "fp32", args, device, folder).run(systems(args))
    failed = [f"{result.system}: {result.why_not}" for result in (ours, theirs) if result.why_not]
    if failed:
        raise SystemExit("\n".join(failed))
    gaps = [abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)]
    (gap,) = harness.worst_rank([max(gaps)], device)
    if dist.get_rank() == 0:
        report(args, ours, theirs, gap)


def report(args: argparse.Namespace, ours: Result, theirs: Result, gap: float) -> None:
    ratios = harness.ratios(ours.times, theirs.times)
    low, high = harness.median_interval(ratios)
    print(
        f"{args.layers}-layer, {args.width}-wide GPT, {args.strategy}, {args.pairs} pairs; "
        f"{dist.get_world_size()} ranks of {args.threads} thread(s), "
        f"{args.batch} x {args.context} tokens each\n"
    )
    print(f"{'':12}  {'median step':>11}  {'peak live bytes per rank':>24}")
    for who in (ours, theirs):
        print(f"{who.system:12}  {median(who.times) * 1e3:8.1f} ms  {who.peak:24,}")
    print(f"{'ratio':12}  {median(ratios):11.3f}  {ours.peak / theirs.peak:24.3f}")
    print(f"\n95 % interval of the time ratio: {low:.3f} to {high:.3f}")
    same = "bit-equal on every step" if gap == 0 else f"up to {gap:.1e} apart"
    print(f"losses: {same}")


def main() -> None:
    args = parse_args()
    with (
        harness.started_by_torchrun(args.device, args.threads) as device,
        tempfile.TemporaryDirectory() as folder,
    ):
        run(args, device, folder)


if __name__ == "__main__":
    main()

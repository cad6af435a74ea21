"""graphshard against torch's `fully_shard`: paired, alternating steps in one process group.

    torchrun --nproc-per-node 2 examples/benchmarks/compare_fsdp2.py

Both train the same GPT from the same weights on the same batches with the same AdamW, each block a
unit. Steps come in pairs whose order alternates (A B, B A, ...), so that drift of the machine falls
on both alike; a step's time is the slowest rank's. The ratio is the median over pairs, with the
distribution-free confidence interval that the sign test gives for a median. Peaks are those of
steps of their own, which are not timed.

`--sweep` does so for a GPT, a Llama and a ConvNet of each depth and width that has at most 60 M
parameters in its blocks, and prints the worst five.

`--host` takes the CPU time of the thread that trains in place of the clock's: with blocks a few
numbers wide nearly all of it is the host's work. Threads of Gloo are left out.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from examples.benchmarks import harness
from examples.benchmarks.benchmark_models import (
    VOCAB,
    Model,
    gpt_tokens,
    images,
    llama,
    regnet,
    tokens,
)
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
    parser.add_argument("--sweep", action="store_true", help="models of many depths and widths")
    parser.add_argument("--depths", nargs="+", type=int, default=[2, 8, 24, 64])
    parser.add_argument("--widths", nargs="+", type=int, default=[32, 128, 512, 1024])
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
    is_compiled = args.backend != "eager"
    theirs = partial(
        fully_shard_step,
        compiled="blocks" if is_compiled else "",
        reshard_after_forward=args.strategy == "FULL_SHARD",
    )
    return System("graphshard", ours, is_compiled), System("fully_shard", theirs, is_compiled)


def run(args: argparse.Namespace, device: torch.device, folder: str) -> None:
    if not args.sweep:
        report(
            args, *compared(gpt(args, args.layers, args.width, args.heads), args, device, folder)
        )
        return
    ratio_of: dict[str, float] = {}
    for model in cells(args):
        ours, theirs, gap = compared(model, args, device, folder)
        ratios = harness.ratios(ours.times, theirs.times)
        low, high = harness.median_interval(ratios)
        ratio_of[model.name] = median(ratios)
        if dist.get_rank() == 0:
            print(
                f"{model.name:24} {median(ratios):.3f}  {low:.3f} to {high:.3f}  "
                f"{median(ours.times) * 1e3:8.1f} ms  peak {ours.peak / theirs.peak:.3f}  "
                f"losses {gap:.0e} apart",
                flush=True,
            )
    if dist.get_rank() == 0:
        worst = sorted(ratio_of, key=ratio_of.__getitem__)[-5:]
        print(f"median of {len(ratio_of)}: {median(ratio_of.values()):.3f}")
        print("worst: " + ", ".join(f"{name} {ratio_of[name]:.3f}" for name in worst))


def gpt(args: argparse.Namespace, layers: int, width: int, heads: int) -> Model:
    config = GPTConfig(layers=layers, width=width, heads=heads)
    batches = gpt_tokens(args.batch, args.context, config.vocab)
    return Model(f"gpt {layers} x {width}", lambda: GPT(config), ("Block",), batches)


def cells(args: argparse.Namespace) -> Iterator[Model]:
    """A GPT, a Llama and a ConvNet of each depth and width."""
    for layers, width in itertools.product(args.depths, args.widths):
        if 12 * layers * width**2 > 60e6:
            continue
        heads = max(1, width // 32)
        yield gpt(args, layers, width, heads)
        yield Model(
            f"llama {layers} x {width}",
            llama(width, 8 * width // 3, layers, heads, max(1, heads // 2), VOCAB),
            ("LlamaDecoderLayer",),
            tokens(args.batch, args.context),
        )
        convnet = regnet(min(width, 32), [width], [layers], 16, 100)
        yield Model(f"convnet {layers} x {width}", convnet, ("RegNetYLayer",), images(4, 32))


def compared(
    model: Model, args: argparse.Namespace, device: torch.device, folder: str
) -> tuple[Result, Result, float]:
    """Both systems' results, and the largest difference of their losses on any rank."""
    ours, theirs = Case(model, "fp32", args, device, folder).run(systems(args))
    failed = [f"{result.system}: {result.why_not}" for result in (ours, theirs) if result.why_not]
    if failed:
        raise SystemExit("\n".join(failed))
    gaps = [abs(a - b) for a, b in zip(ours.losses, theirs.losses, strict=True)]
    (gap,) = harness.worst_rank([max(gaps)], device)
    return ours, theirs, gap


def report(args: argparse.Namespace, ours: Result, theirs: Result, gap: float) -> None:
    if dist.get_rank() != 0:
        return
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

"""Is a default order ever worse than FSDP2's, or "overlap" than the default? By simulation.

    python examples/benchmarks/schedules.py                                       # the whole table
    python examples/benchmarks/schedules.py --models llama-8b --worlds 8 --hardware h100-sxm

Each model is captured once and planned again for every number of ranks. A line gives the step's
time in FSDP2's own order, by default (schedule="fsdp") and by "overlap", and the most bytes a step
holds in each besides what stays between steps.

In FSDP2's order a gather is launched when the results of the one before are copied out: its stream
waits for nothing else (implicit prefetch in forward, explicit in backward). A reduce is waited for
before the next one. The copies of FSDP2 into and out of flat buffers are left out, in time and in
bytes. Exits with 1 if a default step is slower or larger than FSDP2's, or one by "overlap" than the
default one. Small units that move together may take the bytes of their collectives more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from examples.benchmarks import harness
from examples.benchmarks.benchmark_models import (
    Model,
    bert,
    images,
    llama,
    regnet,
    t5,
    tokens,
    transformer,
)
from graphshard import BlockPolicy, Hardware, MixedPrecision
from graphshard.capture.entry import capture
from graphshard.cost.memory import memory_of
from graphshard.cost.timeline import timeline_of
from graphshard.passes.merge_gathers import MergeGathers
from graphshard.passes.prefetch import Prefetch
from graphshard.passes.skip_reshard import SkipReshard
from graphshard.passes.split_gathers import SplitGathers
from graphshard.passes.split_reduces import SplitReduces
from graphshard.pipeline import default_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.planning.planner import make_plan
from graphshard.policy.base import MERGE_BELOW
from graphshard.program.edit import issue_of
from graphshard.program.pass_protocol import Pass, apply_passes
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.spans import assign_units, find_spans, gathers_by_span

WORLDS = (8, 16, 64, 256, 1024)
HARDWARE = ("a100-40gb", "a100-80gb", "h100-sxm")
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

mixture = transformer(
    "Qwen3Moe",
    "ForCausalLM",
    hidden_size=2048,
    intermediate_size=6144,
    moe_intermediate_size=768,
    num_hidden_layers=24,
    num_attention_heads=32,
    num_key_value_heads=4,
    num_experts=32,
    num_experts_per_tok=4,
    vocab_size=151_936,
    use_cache=False,
    output_router_logits=False,
)
"""A mixture of 32 experts of which each token takes 4."""

MODELS = {
    model.name: model
    for model in (
        Model("gpt2", transformer("GPT2", "LMHeadModel", use_cache=False), (), tokens(8, 1024)),
        Model("bert-base", bert(768, 3072, 12, 12), (), tokens(32, 128)),
        Model("bert-large", bert(1024, 4096, 24, 16), (), tokens(16, 512)),
        Model("t5-3b", t5(1024, 128, 16_384, 24, 32), (), tokens(8, 512)),
        Model(
            "regnet-10b",
            regnet(32, [2020, 4040, 11110, 28280], [2, 7, 17, 1], 1010, 1000),
            (),
            images(64, 224, 1000),
        ),
        Model("moe-15b", mixture, (), tokens(2, 4096)),
        Model("llama-7b", llama(4096, 11_008, 32, 32, 32, 32_000), (), tokens(2, 4096)),
        Model("llama-8b", llama(4096, 14_336, 32, 32, 8, 128_256), (), tokens(1, 8192)),
        Model("llama-70b", llama(8192, 28_672, 80, 64, 8, 128_256), (), tokens(1, 8192)),
    )
}
IN_FLIGHT = 3
"""Collectives of small units that hold their bytes at once: two gathers and a reduce."""

RECOMPUTED = ("moe", "llama")
"""Models whose units are computed again begin so."""


@dataclass(frozen=True)
class Line:
    """A model on ranks of some hardware: seconds and bytes of three orders.

    The orders are FSDP2's, the default one and that by "overlap".
    """

    model: str
    ranks: int
    hardware: str
    seconds: tuple[float, ...]
    held: tuple[int, ...]

    @property
    def faults(self) -> list[str]:
        (fsdp2, default, overlap), held = self.seconds, self.held
        in_flight = IN_FLIGHT * MERGE_BELOW["nccl"] * self.ranks
        found = {
            "default slower": default > fsdp2 * (1 + 1e-9),
            "default larger": held[1] > held[0] + in_flight,
            "slower": overlap > default * (1 + 1e-9),
            "larger": held[2] > held[1],
        }
        return [fault for fault, is_one in found.items() if is_one]

    def __str__(self) -> str:
        times = "  ".join(f"{each * 1e3:>9.1f}" for each in self.seconds)
        held = "  ".join(f"{each / 2**30:>7.2f}" for each in self.held)
        change = self.seconds[2] / self.seconds[1] - 1
        return (
            f"{self.model:<11} {self.ranks:>5}  {self.hardware:<9}  {times}  {change:>+7.1%}  "
            f"{held}  {', '.join(self.faults)}".rstrip()
        )


HEAD = f"{'model':<11} ranks  {'hardware':<9}  FSDP2, ms    default    overlap   change" + (
    f"{'GiB':>9}{'GiB':>9}{'GiB':>9}"
)


class Fsdp2Order(Pass):
    """Each gather right behind the wait for the one before, which is where its unit's span begins.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param_group.py, `unshard`, `wait_for_unshard`,
    `pre_backward` and `post_backward`.
    """

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        spans = find_spans(program, plan)
        gathers = gathers_by_span(spans)
        for phase in (FORWARD, BACKWARD):
            every = [span for span in spans.in_order if span.phase == phase]
            # The root's hook comes first of all and prefetches even where the root is not gathered.
            order = [span for span in every if span in gathers or span is every[0]]
            for before, span in pairwise(order):
                for node in issue_of(gathers[span]):
                    before.first.prepend(node)


def lines(name: str, worlds: list[int], hardware: list[str]) -> Iterator[Line]:
    with torch.device("meta"):
        module = MODELS[name].build().train()
        inputs = MODELS[name].batch(1, None)
    recompute = "units" if name.startswith(RECOMPUTED) else None
    policy = BlockPolicy(mixed_precision=BF16, recompute=recompute)
    captured = None
    for ranks in worlds:
        plan = make_plan(module, policy, world_size=ranks)
        if captured is None:
            captured = capture(module, (), inputs, device="cpu", precisions=plan.precisions).program
        started = captured.copy()
        assign_units(started, plan)
        every = default_passes(plan.policy)
        fsdp2 = started.copy()
        its_order = [
            Fsdp2Order() if isinstance(step, Prefetch) else step
            for step in every
            if not isinstance(step, SplitGathers | SplitReduces | SkipReshard | MergeGathers)
        ]
        apply_passes(its_order, fsdp2, plan)
        shared, rest = parts(every)
        apply_passes(shared, started, plan)
        plain = started.copy()
        apply_passes(rest, plain, plan)
        for one in map(Hardware.load, hardware):
            by_cost = replace(plan.policy, schedule="overlap", hardware=one)
            of_cost = replace(plan, policy=by_cost)
            program = started.copy()
            apply_passes(parts(default_passes(by_cost))[1], program, of_cost)
            every_order = (fsdp2, plain, program)
            seconds = tuple(timeline_of(each, of_cost, one).seconds for each in every_order)
            memory = [memory_of(each, of_cost, optimizer="none") for each in every_order]
            held = tuple(curve.peak.bytes - curve.valley for curve in memory)
            yield Line(name, ranks, one.name, seconds, held)


def parts(passes: tuple[Pass, ...]) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """The passes that both schedules begin with, and the others."""
    after = [type(step) for step in passes].index(SplitReduces) + 1
    return passes[:after], passes[after:]


def main() -> int:
    torch.set_num_threads(1)
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--worlds", nargs="+", type=int, default=list(WORLDS))
    parser.add_argument("--hardware", nargs="+", default=list(HARDWARE))
    options = parser.parse_args()
    print(HEAD)
    faults = 0
    for name in options.models:
        for one in lines(name, options.worlds, options.hardware):
            print(one, flush=True)
            faults += bool(one.faults)
    print(f"{faults} lines with a fault" if faults else "never slower, never larger")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())

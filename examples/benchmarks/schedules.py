"""Is `schedule="overlap"` ever worse than FSDP's order? By simulation, with no accelerator.

    python examples/benchmarks/schedules.py                                       # the whole table
    python examples/benchmarks/schedules.py --models llama-8b --worlds 8 --hardware h100-sxm

Each model is captured once and planned again for every number of ranks. A line gives the step's
time in FSDP's order ("pre": backward gathers a unit ahead) and by "overlap", the most bytes a step
holds besides what stays between steps, and which share of the step by "overlap" the bound is:
compute or communication alone, whichever takes longer, with the first gather, before which there
is nothing to compute, and the last reduce, behind which there is nothing. Exits with 1 if a step is
slower or larger than in FSDP's order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
import transformers as hf
from torch import nn

from graphshard import BlockPolicy, Hardware, MixedPrecision
from graphshard.capture.entry import capture
from graphshard.cost.memory import bytes_held
from graphshard.cost.streams import COMPUTE
from graphshard.cost.timeline import Timeline, timeline_of
from graphshard.passes.insert_free import InsertFree
from graphshard.pipeline import default_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.planning.planner import make_plan
from graphshard.program import ops
from graphshard.program.pass_protocol import Pass, apply_passes
from graphshard.program.program import Program
from graphshard.program.spans import assign_units

WORLDS = (8, 16, 64, 256, 1024)
HARDWARE = ("a100-40gb", "a100-80gb", "h100-sxm")
BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BAR = {("llama-8b", 8, "h100-sxm"): 0.97, ("llama-70b", 64, "h100-sxm"): 0.97}


@dataclass(frozen=True)
class Model:
    """What is trained: how it is built, a rank's batch, what is recomputed."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], dict[str, torch.Tensor]]
    recompute: str | None = None


def tokens(batch: int, length: int, **more: int) -> Callable[[], dict[str, torch.Tensor]]:
    """Token ids and labels on meta; `more` are the lengths of further inputs of token ids."""

    def make() -> dict[str, torch.Tensor]:
        ids = {"input_ids": length, "labels": length} | more
        return {k: torch.zeros(batch, n, dtype=torch.int64, device="meta") for k, n in ids.items()}

    return make


def llama(width: int, ffn: int, layers: int, heads: int, kv: int, vocab: int) -> Any:
    """A Llama of these sizes."""
    return hf.LlamaForCausalLM(
        hf.LlamaConfig(
            hidden_size=width,
            intermediate_size=ffn,
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=kv,
            vocab_size=vocab,
            max_position_embeddings=8192,
            use_cache=False,
        )
    )


def mixture() -> Any:
    """A mixture of 32 experts of which each token takes 4."""
    return hf.Qwen3MoeForCausalLM(
        hf.Qwen3MoeConfig(
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
    )


def images() -> dict[str, torch.Tensor]:
    """A batch of images with their classes."""
    return {
        "pixel_values": torch.zeros(64, 3, 224, 224, device="meta"),
        "labels": torch.zeros(64, dtype=torch.int64, device="meta"),
    }


MODELS = {
    "gpt2": Model(lambda: hf.GPT2LMHeadModel(hf.GPT2Config(use_cache=False)), tokens(8, 1024)),
    "bert-large": Model(
        lambda: hf.BertForMaskedLM(
            hf.BertConfig(
                hidden_size=1024,
                num_hidden_layers=24,
                num_attention_heads=16,
                intermediate_size=4096,
            )
        ),
        tokens(16, 512),
    ),
    "t5-3b": Model(
        lambda: hf.T5ForConditionalGeneration(
            hf.T5Config(
                d_model=1024,
                d_kv=128,
                d_ff=16_384,
                num_layers=24,
                num_heads=32,
                use_cache=False,
                decoder_start_token_id=0,
            )
        ),
        tokens(8, 512),
    ),
    "regnet-10b": Model(
        lambda: hf.RegNetForImageClassification(
            hf.RegNetConfig(
                embedding_size=32,
                hidden_sizes=[2020, 4040, 11110, 28280],
                depths=[2, 7, 17, 1],
                groups_width=1010,
                num_labels=1000,
            )
        ),
        images,
    ),
    "moe-15b": Model(mixture, tokens(2, 4096), "units"),
    "llama-7b": Model(lambda: llama(4096, 11_008, 32, 32, 32, 32_000), tokens(2, 4096), "units"),
    "llama-8b": Model(lambda: llama(4096, 14_336, 32, 32, 8, 128_256), tokens(1, 8192), "units"),
    "llama-70b": Model(lambda: llama(8192, 28_672, 80, 64, 8, 128_256), tokens(1, 8192), "units"),
}


@dataclass(frozen=True)
class Line:
    """A model on ranks of some hardware: seconds and bytes of both schedules, and the bound."""

    model: str
    ranks: int
    hardware: str
    fsdp: float
    overlap: float
    fsdp_bytes: int
    overlap_bytes: int
    bound: float

    @property
    def share(self) -> float:
        """The bound, as a part of the step by "overlap"."""
        return self.bound / self.overlap

    @property
    def faults(self) -> list[str]:
        """What must not be."""
        found = []
        if self.overlap > self.fsdp * (1 + 1e-9):
            found.append("slower")
        if self.overlap_bytes > self.fsdp_bytes:
            found.append("larger")
        bar = BAR.get((self.model, self.ranks, self.hardware), 0.0)
        if self.share < bar:
            found.append(f"below {bar:.0%} of the bound")
        return found

    def __str__(self) -> str:
        return (
            f"{self.model:<11} {self.ranks:>5}  {self.hardware:<9}  {self.fsdp * 1e3:>9.1f}  "
            f"{self.overlap * 1e3:>9.1f}  {self.overlap / self.fsdp - 1:>+7.1%}  "
            f"{self.fsdp_bytes / 2**30:>7.2f}  {self.overlap_bytes / 2**30:>7.2f}  "
            f"{self.share:>7.1%}  {', '.join(self.faults)}".rstrip()
        )


HEAD = (
    "model       ranks  hardware    fsdp, ms  overlap, ms  change     GiB      GiB  of bound"
).replace("overlap, ms  change", "overlap    change")


def lines(name: str, worlds: list[int], hardware: list[str]) -> Iterator[Line]:
    """The lines of one model."""
    model = MODELS[name]
    with torch.device("meta"):
        module = model.build().train()
    policy = BlockPolicy(mixed_precision=BF16, recompute=model.recompute)
    captured = None
    for ranks in worlds:
        plan = make_plan(module, policy, world_size=ranks)
        if captured is None:
            inputs = model.inputs()
            captured = capture(module, (), inputs, device="cpu", precisions=plan.precisions).program
        started = captured.copy()
        assign_units(started, plan)
        shared, rest = parts(default_passes(policy))
        apply_passes(shared, started, plan)
        plain = started.copy()
        apply_passes(rest, plain, plan)
        for one in hardware:
            yield line(name, ranks, Hardware.load(one), started, plain, plan)


def parts(passes: tuple[Pass, ...]) -> tuple[tuple[Pass, ...], tuple[Pass, ...]]:
    """The passes that both schedules begin with, and the others."""
    after = [type(step) for step in passes].index(InsertFree) + 1
    return passes[:after], passes[after:]


def line(
    name: str,
    ranks: int,
    hardware: Hardware,
    started: Program,
    plain: Program,
    plan: ShardingPlan,
) -> Line:
    """The line of a program: `started` is what both schedules begin with, `plain` FSDP's order."""
    by_cost = replace(plan.policy, schedule="overlap", hardware=hardware)
    plan = replace(plan, policy=by_cost)
    program = started.copy()
    apply_passes(parts(default_passes(by_cost))[1], program, plan)
    before, now = timeline_of(plain, plan, hardware), timeline_of(program, plan, hardware)
    held = [bytes_held(p, plan, False, "nccl") for p in (plain, program)]
    return Line(
        name, ranks, hardware.name, before.seconds, now.seconds, held[0], held[1], bound(before)
    )


def bound(timeline: Timeline) -> float:
    """No order of the collectives of FSDP takes less time."""
    compute = sum(span.seconds for span in timeline.spans if span.stream == COMPUTE)
    moved = [transfer.span for transfer in timeline.transfers if transfer.group]
    if not moved:
        return compute
    by_stream: dict[str, float] = {}
    for span in moved:
        by_stream[span.stream] = by_stream.get(span.stream, 0.0) + span.seconds
    first, last = min(moved, key=lambda s: s.place), max(moved, key=lambda s: s.place)
    head = first.seconds if first.name == ops.all_gather.__name__ else 0.0
    tail = last.seconds if last.name != ops.all_gather.__name__ else 0.0
    return max(compute + head + tail, *by_stream.values())


def main() -> int:
    """Print the table; 1 if a line has a fault."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
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

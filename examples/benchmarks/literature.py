"""Predicted against published speed of FSDP runs, from presets alone.

    python examples/benchmarks/literature.py            # all runs, a few minutes
    python examples/benchmarks/literature.py GPT T5     # those whose name begins so

Every run is captured at its full size on the meta device and simulated on a preset, with the one
set of efficiencies of `graphshard/cost/presets.toml` and nothing set for a single run. Torch's FSDP
issues a gather in forward while the unit before computes, at most two ahead: `forward_prefetch=1`.

How speed was counted. The GPT figures count recomputation as work: at 159 TFLOP/s counted so, 300 G
tokens take 128 GPUs 240 days, which is what their authors say; and 186 TFLOP/s without it would be
80 % of an A100's peak with it. torchtitan's are tokens a second, which need no convention.

The column "unhidden" is the speed were all communication waited for, by the same estimate.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard

BF16 = graphshard.MixedPrecision(torch.bfloat16, torch.bfloat16)
FP16 = graphshard.MixedPrecision(torch.float16, torch.float16)
BF16_SUM = graphshard.MixedPrecision(torch.bfloat16, torch.float32)


# -- models ----------------------------------------------------------------------------------------


class Block(nn.Module):
    """A block of minGPT as it was in 2022: attention in full matrices, GELU, dropout of 0.1."""

    def __init__(self, width: int, heads: int, context: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.key, self.query, self.value = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )
        self.attn_drop, self.resid_drop = nn.Dropout(0.1), nn.Dropout(0.1)
        mask = torch.tril(torch.ones(context, context)).view(1, 1, context, context)
        self.register_buffer("mask", mask)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.ln1(x))
        out: Tensor = x + self.mlp(self.ln2(x))
        return out

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape

        def split(y: Tensor) -> Tensor:
            return y.view(batch, length, self.heads, -1).transpose(1, 2)

        q, k, v = split(self.query(x)), split(self.key(x)), split(self.value(x))
        att = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.shape[-1]))
        att = att.masked_fill(self.mask[:, :, :length, :length] == 0, float("-inf"))
        y = self.attn_drop(F.softmax(att, dim=-1)) @ v
        out: Tensor = self.resid_drop(self.proj(y.transpose(1, 2).reshape(batch, length, width)))
        return out


class MinGPT(nn.Module):
    """minGPT of 175 B parameters: 96 layers, 12,288 wide, 96 heads, a vocabulary of 50,000."""

    def __init__(self, context: int, layers: int = 96, width: int = 12288, heads: int = 96) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(50_000, width), nn.Embedding(context, width)
        self.drop = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(Block(width, heads, context) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 50_000, bias=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        x = self.drop(self.tokens(idx) + self.positions.weight[: idx.shape[1]])
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


Case = tuple[nn.Module, tuple[Any, ...], dict[str, Any], str]
"""A model on meta, a call of it, and the class of its units."""


def gpt(batch: int, length: int) -> Case:
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    return MinGPT(length), (tokens, tokens), {}, "Block"


def llama(batch: int, length: int, **sizes: int) -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**sizes, use_cache=False, attn_implementation="sdpa")  # type: ignore
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    call = {"input_ids": tokens, "labels": tokens}
    return LlamaForCausalLM(config), (), call, "LlamaDecoderLayer"


def llama3_8b(batch: int) -> Case:
    return llama(
        batch,
        8192,
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )


def llama3_70b(batch: int) -> Case:
    return llama(
        batch,
        8192,
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
    )


def llama2_13b(batch: int) -> Case:
    return llama(
        batch,
        4096,
        vocab_size=32_000,
        hidden_size=5120,
        intermediate_size=13_824,
        num_hidden_layers=40,
        num_attention_heads=40,
    )


def t5_11b(batch: int, length: int) -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=32_128,
        d_model=1024,
        d_kv=128,
        d_ff=65_536,
        num_layers=24,
        num_heads=128,
        decoder_start_token_id=0,
        use_cache=False,
    )
    tokens = torch.zeros(batch, length, dtype=torch.int64)
    return (
        T5ForConditionalGeneration(config),
        (),
        {"input_ids": tokens, "labels": tokens},
        "T5Block",
    )


# -- runs ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """One published run: its model, its settings, and what was measured.

    published: TFLOP/s per GPU, recomputation counted, or with `tokens` tokens per second and GPU.
    """

    name: str
    setting: str
    case: Callable[[], Case]
    ranks: int
    hardware: str
    published: float
    source: str
    options: dict[str, Any]
    tokens: int = 0  # of a step on one GPU
    optimizer: str = "adamw"


RUNS = (
    Run(
        "GPT-175B",
        "128 x A100-40GB, EFA; batch 20 x 512, fp16, recompute, parameters offloaded",
        lambda: gpt(20, 512),
        128,
        "a100-40gb",
        159,
        "PyTorch FSDP blog, March 2022",
        {"mixed_precision": FP16, "recompute": "units", "offload": "params"},
        optimizer="sgd",
    ),
    Run(
        "minGPT-175B",
        "128 x A100-80GB, RoCE; batch 1 x 2048, bf16, recompute",
        lambda: gpt(1, 2048),
        128,
        "a100-80gb",
        173,
        "arXiv:2304.11277",
        {"mixed_precision": BF16, "recompute": "units"},
    ),
    Run(
        "minGPT-175B",
        "128 x A100-80GB, RoCE; batch 2 x 2048, bf16, recompute",
        lambda: gpt(2, 2048),
        128,
        "a100-80gb",
        186,
        "arXiv:2304.11277",
        {"mixed_precision": BF16, "recompute": "units"},
    ),
    Run(
        "Llama-3-8B",
        "64 x A100-80GB; batch 1 x 8192, bf16, selective recompute",
        lambda: llama3_8b(1),
        64,
        "a100-80gb",
        2973,
        "torchtitan, docs/performance.md of 2024",
        {"mixed_precision": BF16_SUM, "recompute": "selective"},
        tokens=8192,
    ),
    Run(
        "Llama-3-70B",
        "64 x A100-80GB; batch 1 x 8192, bf16, recompute",
        lambda: llama3_70b(1),
        64,
        "a100-80gb",
        331,
        "torchtitan, docs/performance.md of 2024",
        {"mixed_precision": BF16_SUM, "recompute": "units"},
        tokens=8192,
    ),
    Run(
        "Llama-2-13B",
        "64 x A100-80GB; batch 2 x 4096, bf16",
        lambda: llama2_13b(2),
        64,
        "a100-80gb",
        2162,
        "torchtitan, docs/performance.md of 2024",
        {"mixed_precision": BF16_SUM},
        tokens=8192,
    ),
    Run(
        "Llama-3.1-8B",
        "8 x H100 (500 W, 2.4 TB/s); batch 2 x 8192, bf16, selective recompute",
        lambda: llama3_8b(2),
        8,
        "h100-sxm",
        5762,
        "torchtitan, benchmarks of 2025, Table 1, without torch.compile",
        {"mixed_precision": BF16_SUM, "recompute": "selective"},
        tokens=16384,
    ),
)

T5 = {"mixed_precision": BF16, "recompute": "units"}


def simulate(case: Case, ranks: int, hardware: str, options: dict[str, Any], **more: Any) -> Any:
    model, args, kwargs, block = case
    policy = graphshard.BlockPolicy([block], forward_prefetch=1, **options)
    return graphshard.simulate(
        model,
        policy=policy,
        hardware=hardware,
        world_size=ranks,
        example_inputs=args,
        example_kwargs=kwargs,
        **more,
    )


def rows(names: tuple[str, ...]) -> Iterator[tuple[str, str, str, str, str, str]]:
    for run in RUNS:
        if not run.name.startswith(names):
            continue
        with torch.device("meta"):
            case = run.case()
        estimate = simulate(case, run.ranks, run.hardware, run.options, optimizer=run.optimizer)
        work, unit = (run.tokens, "tokens/s") if run.tokens else (estimate.flops / 1e12, "TFLOP/s")
        found = work / estimate.step_seconds
        unhidden = work / (estimate.compute_seconds + estimate.communication_seconds)
        yield (
            run.name,
            f"{run.published:,} {unit}",
            f"{found:,.0f}",
            f"{found / run.published - 1:+.0%}",
            f"{unhidden:,.0f}",
            run.setting,
        )
    if "T5-11B".startswith(names):
        with torch.device("meta"):
            case = t5_11b(8, 512)
        few, many = (simulate(case, ranks, "a100-80gb", T5).step_seconds for ranks in (8, 512))
        setting = "8 to 512 x A100-80GB, RoCE; bf16, recompute; batch 8 x 512 (not published)"
        yield "T5-11B", "-7 %", f"{few / many - 1:+.1%}", "", "", setting


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", help="how the names of the runs begin; all if none")
    names = tuple(parser.parse_args().names) or ("",)
    heading = ("model", "published", "predicted", "error", "unhidden", "setting")
    for name, published, found, error, unhidden, setting in chain([heading], rows(names)):
        cells = f"{name:<13} {published:>14} {found:>10} {error:>6} {unhidden:>9}  {setting}"
        print(cells, flush=True)


if __name__ == "__main__":
    main()

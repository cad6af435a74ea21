"""Policies of one small model: schedule, every node and plan stay the same to the byte.

Golden files show a person what changed; these hashes prove that a change of the code's structure
changed nothing at all. A change that is meant to alter programs updates them in its own commit:

    python tests/system/test_program_hashes.py
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import graphshard
from graphshard import BlockPolicy, MixedPrecision, Policy
from graphshard.program.text import full_text

HASHES = {
    "full": "ccacec73cb76fef1",
    "freed": "b333357208b0b0f3",
    "zero2": "e1a4f8ac451b3a3e",
    "zero1": "08219589ea97e53f",
    "ddp": "549d266d80f733a8",
    "hybrid": "181a7d851321e5a7",
    "partial": "7fd94f13d655b3f6",
    "mixed": "7eda3237fd67b9f9",
    "offload": "7528ba8eb44b79bf",
    "overlap": "e433845059bad9fb",
    "overlap_gloo": "e6a84492c56b494a",
    "overlap_hybrid": "0b2085974393c706",
    "odd": "e9b304a7bf3b35a5",
    "recompute": "5690765316ebd226",
    "merged": "ea1960e2ddb103c5",
    "merged_zero2": "67e72a7ea59a7b98",
    "merged_zero1": "c8b2d46d585d1955",
    "merged_hybrid": "b8d4bb2e1d791f38",
    "merged_overlap": "71a237d124da13fa",
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.a = nn.Linear(width, 4 * width)
        self.b = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b(torch.relu(self.a(x)))


class Net(nn.Module):
    """Three blocks between an embedding and a head that share one weight."""

    def __init__(self, width: int = 64, words: int = 97) -> None:
        super().__init__()
        self.e = nn.Embedding(words, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.e.weight

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.e(x)
        for block in self.blocks:
            h = block(h)
        return nn.functional.cross_entropy(self.head(h), y)


def blocks(**options: object) -> Callable[[], Policy]:
    return lambda: BlockPolicy({Block}, **options)  # type: ignore[arg-type]


def apart(**options: object) -> Callable[[], Policy]:
    return blocks(merge_below=0, **options)


BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, tuple[Callable[[], Policy], tuple[int, ...]]] = {
    "full": (apart(), (4,)),
    "freed": (apart(reshard_after_forward=True), (4,)),
    "zero2": (apart(strategy="SHARD_GRAD_OP"), (4,)),
    "zero1": (apart(strategy="SHARD_OPTIMIZER"), (4,)),
    "ddp": (apart(strategy="NO_SHARD"), (4,)),
    "hybrid": (apart(strategy="HYBRID_SHARD"), (2, 4)),
    "partial": (apart(reshard_after_forward=2), (4,)),
    "mixed": (apart(mixed_precision=BF16), (4,)),
    "offload": (apart(offload=("params", "activations")), (4,)),
    "overlap": (apart(schedule="overlap", hardware="h100-sxm"), (8,)),
    "overlap_gloo": (apart(schedule="overlap", hardware="cpu-gloo"), (2,)),
    "overlap_hybrid": (
        apart(strategy="HYBRID_SHARD", schedule="overlap", hardware="h100-sxm"),
        (2, 4),
    ),
    "odd": (apart(), (7,)),
    "recompute": (apart(recompute="units"), (4,)),
    "merged": (blocks(), (4,)),
    "merged_zero2": (blocks(strategy="SHARD_GRAD_OP"), (4,)),
    "merged_zero1": (blocks(strategy="SHARD_OPTIMIZER"), (4,)),
    "merged_hybrid": (blocks(strategy="HYBRID_SHARD", merge_below=40_000), (2, 4)),
    "merged_overlap": (blocks(schedule="overlap", hardware="h100-sxm"), (8,)),
}


def program_hash(name: str) -> str:
    make_policy, mesh_shape = CASES[name]
    with torch.device("meta"):
        model = Net()
    batch = torch.zeros(4, dtype=torch.int64)
    plan = graphshard.plan(
        model, make_policy(), mesh_shape=mesh_shape, example_inputs=(batch, batch)
    )
    assert plan.program is not None
    plan.program.notes = ()  # of torch without CUDA, which captures on the CPU
    text = str(plan.program) + full_text(plan.program) + str(plan)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Operators, and so the names of nodes, are those that torch's decompositions give.
@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."), reason="hashes were taken on torch 2.13"
)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_the_program_is_the_same_to_the_byte(name: str) -> None:
    assert program_hash(name) == HASHES[name]


if __name__ == "__main__":
    for case in CASES:
        print(f'    "{case}": "{program_hash(case)}",')

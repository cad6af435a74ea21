"""Thirteen policies of one small model: schedule, every node and plan stay the same to the byte.

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
    "full": "79b458502540f23b",
    "zero2": "c5dc09e2c55aacd4",
    "zero1": "7a625f7619838d0e",
    "ddp": "2d28bf47844beb4e",
    "hybrid": "1c6d843e5918f7b8",
    "partial": "7510c6afb00da57a",
    "mixed": "d7496d5ec7df28da",
    "offload": "c260afa4b63ef681",
    "overlap": "feb41de358a762b6",
    "overlap_gloo": "034fd68c278334e6",
    "overlap_hybrid": "f699eb4af9ff94a7",
    "odd": "2a0518750e4eeb24",
    "recompute": "2387460720fbd76f",
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


BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CASES: dict[str, tuple[Callable[[], Policy], tuple[int, ...]]] = {
    "full": (blocks(), (4,)),
    "zero2": (blocks(strategy="SHARD_GRAD_OP"), (4,)),
    "zero1": (blocks(strategy="SHARD_OPTIMIZER"), (4,)),
    "ddp": (blocks(strategy="NO_SHARD"), (4,)),
    "hybrid": (blocks(strategy="HYBRID_SHARD"), (2, 4)),
    "partial": (blocks(reshard_after_forward=2), (4,)),
    "mixed": (blocks(mixed_precision=BF16), (4,)),
    "offload": (blocks(offload=("params", "activations")), (4,)),
    "overlap": (blocks(schedule="overlap", hardware="h100-sxm"), (8,)),
    "overlap_gloo": (blocks(schedule="overlap", hardware="cpu-gloo"), (2,)),
    "overlap_hybrid": (
        blocks(strategy="HYBRID_SHARD", schedule="overlap", hardware="h100-sxm"),
        (2, 4),
    ),
    "odd": (blocks(), (7,)),
    "recompute": (blocks(recompute="units"), (4,)),
}


def program_hash(name: str) -> str:
    make_policy, mesh_shape = CASES[name]
    with torch.device("meta"):
        model = Net()
    batch = torch.zeros(4, dtype=torch.int64)
    plan = graphshard.plan(
        model, make_policy(), mesh_shape=mesh_shape, example_inputs=(batch, batch)
    )
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

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
    "full": "09d439c8ecab5599",
    "freed": "3dc7e50404c78bd9",
    "zero2": "9df0fc2e7dec3d33",
    "zero1": "162e94f6f34ab8c4",
    "ddp": "f999abd04a8151e9",
    "hybrid": "74cf17473c8005ba",
    "partial": "2f88872534b09746",
    "mixed": "38e470b612b1fe68",
    "offload": "02f7cdc387a5b4c8",
    "overlap": "7ef5148ef30aac8e",
    "overlap_gloo": "41e863fae3c62910",
    "overlap_hybrid": "16fefed2f0547d7f",
    "odd": "6824ff2d7209e24d",
    "recompute": "c94ffa4f72689937",
    "merged": "795ba817b97fa003",
    "merged_zero2": "98246255aac3727e",
    "merged_zero1": "7508ada0e6916ecd",
    "merged_hybrid": "63767cb3fc515bf1",
    "merged_overlap": "bccd68b291694e73",
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

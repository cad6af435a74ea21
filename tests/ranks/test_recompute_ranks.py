"""Recompute on ranks: as `fully_shard` with torch's checkpoint, and bytes that really fall."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import graphshard
from examples.benchmarks.live_bytes import LiveBytes
from examples.gpt import GPT, GPTConfig
from graphshard.program.storages import SAVED, storages_of
from graphshard.recompute.regions import compute_intensive_packets

pytestmark = pytest.mark.slow  # each of its ranks starts and compiles for tens of seconds

WIDTH, BATCH, LAYERS = 128, 256, 4
ACTIVATION = WIDTH * BATCH * 4
MANY = 8  # rows of a batch whose masks are larger than a state of the generator


def model_of() -> nn.Module:
    torch.manual_seed(1)
    return GPT(GPTConfig(vocab=67, layers=2, heads=2, width=24, dropout=0.1))


def batch(rank: int, step: int, rows: int = 2) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    ids = torch.randint(67, (rows, 17), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def train(model: nn.Module, rank: int, rows: int = 2) -> list[Tensor]:
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(2):
        torch.manual_seed(100 + step * dist.get_world_size() + rank)
        loss = model(*batch(rank, step, rows))
        loss.backward()
        losses += [loss.detach().clone(), torch.rand(2)]
        optim.step()
        optim.zero_grad()
    return losses + [p.full_tensor() for p in model.parameters()]


@cache
def reference(rank: int, context: Callable | None, rows: int = 2) -> list[Tensor]:
    """`fully_shard` over blocks that call torch's checkpoint."""
    model = model_of()
    extra = {} if context is None else {"context_fn": context}
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **extra)
        fully_shard(block)
    fully_shard(model)
    return train(model, rank, rows)


def selective() -> object:
    ops = [
        getattr(packet, name)
        for packet in compute_intensive_packets()
        for name in packet.overloads()
    ]
    return create_selective_checkpoint_contexts(ops)


def ours(rank: int, **fields: object) -> list[Tensor]:
    policy = graphshard.BlockPolicy({"Block"}, **fields)
    return train(graphshard.compile(model_of(), policy, example_inputs=batch(rank, 0)), rank)


def compare(found: list[Tensor], expected: list[Tensor]) -> None:
    exact = dist.get_world_size() == 2
    for a, b in zip(found, expected, strict=True):
        if exact:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def units_train_as_fully_shard_with_checkpoint(rank: int) -> None:
    compare(ours(rank, recompute="units"), reference(rank, None))


def classes_and_selective_train_as_its_selective_checkpoint(rank: int) -> None:
    expected = reference(rank, selective)
    compare(ours(rank, recompute="selective"), expected)
    compare(ours(rank, recompute={"Block"}, strategy="SHARD_GRAD_OP"), reference(rank, None))


def a_budget_trains_as_without(rank: int) -> None:
    compare(ours(rank, recompute="budget", memory_budget=180_000), reference(rank, None))


def masks_are_drawn_again_as_by_its_checkpoint(rank: int) -> None:
    policy = graphshard.BlockPolicy({"Block"}, recompute="units")
    inputs = batch(rank, 0, MANY)
    sharded = graphshard.compile(model_of(), policy, example_inputs=inputs, check=True)
    assert [event.op for event in sharded.program.schedule()].count("save_random_state") == 4
    compare(train(sharded, rank, MANY), reference(rank, None, MANY))


class Layer(nn.Module):
    """Saves four activations: its input, and the results of the three in between."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(WIDTH, WIDTH, bias=False)
        self.b = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(torch.tanh(torch.sigmoid(self.a(x))))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH, bias=False)
        self.layers = nn.ModuleList([Layer() for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


def measured(**fields: object) -> tuple[int, int, int, int]:
    """(bytes more after forward than before, most above before; both as the program says)."""
    torch.manual_seed(0)
    policy = graphshard.BlockPolicy({Layer}, reshard_root=True, **fields)
    sharded = graphshard.compile(Stack(), policy)
    x = torch.randn(BATCH, WIDTH)
    for _ in range(2):
        sharded(x).backward()
        sharded.zero_grad()
    with LiveBytes() as live:
        live.add([*sharded.parameters(), x])
        before = live.current
        loss = sharded(x)
        saved = live.current - before
        loss.backward()
        most = live.peak - before
    storages = storages_of(sharded.program)
    return saved, most, sum(s.size for s in storages.all if s.kind == SAVED), max(storages.live())


def what_is_saved_falls_as_the_program_says(rank: int) -> None:
    seen = {}
    for what in (None, "selective", "units"):
        saved, most, told_saved, told_most = measured(recompute=what)
        # The loss lives too; gradients' shards come to live while others are reduced.
        assert abs(saved - told_saved) <= 64, (what, saved, told_saved)
        shards = sum(p.numel() for p in Stack().parameters()) * 4 // dist.get_world_size()
        assert told_most * 0.9 <= most <= told_most + shards + WIDTH * WIDTH * 4, (
            what,
            most,
            told_most,
        )
        seen[what] = saved
    # Of each layer: its input, sigmoid and tanh; the input and the product; the input.
    assert seen[None] // ACTIVATION == 3 * LAYERS
    assert seen["selective"] // ACTIVATION == 2 * LAYERS
    assert seen["units"] // ACTIVATION == LAYERS


CHECKS = [
    units_train_as_fully_shard_with_checkpoint,
    classes_and_selective_train_as_its_selective_checkpoint,
    a_budget_trains_as_without,
    masks_are_drawn_again_as_by_its_checkpoint,
    what_is_saved_falls_as_the_program_says,
]

test_on_two_ranks = on_ranks(CHECKS, 2, timeout=300)
test_on_four_ranks = pytest.mark.slow(on_ranks(CHECKS[:4], 4, timeout=300))

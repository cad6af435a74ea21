"""Parameters without elements, on two ranks."""

from __future__ import annotations

import copy

import torch
from full_tensors import full
from ranks import on_ranks
from torch import Tensor, nn

import graphshard


class Empty(nn.Module):
    """Nothing but a parameter without elements."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Parameter(torch.zeros(0, 4))

    def forward(self) -> Tensor:
        return self.rows.sum()


class Holds(nn.Module):
    """A layer beside empty parameters, one of them in a unit of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.columns = nn.Parameter(torch.zeros(3, 0))
        self.rows = nn.Parameter(torch.zeros(0, 4))
        self.empty = Empty()

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.rows.sum() + self.columns.sum() + self.empty()


def empty_parameters_train(rank: int) -> None:
    for strategy in ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD"):
        torch.manual_seed(0)
        eager = Holds()
        policy = graphshard.BlockPolicy({Empty}, strategy=strategy)
        sharded = graphshard.compile(copy.deepcopy(eager), policy, check=True)
        optims = [torch.optim.AdamW(m.parameters(), lr=0.1) for m in (sharded, eager)]
        for _ in range(3):
            for module, optim in zip((sharded, eager), optims, strict=True):
                module(torch.ones(1, 4)).sum().backward()
                optim.step()
                optim.zero_grad()
        for (name, param), expected in zip(
            sharded.named_parameters(), eager.parameters(), strict=True
        ):
            assert torch.equal(full(param), expected), (strategy, name)
            assert full(param).shape == expected.shape


test_on_two_ranks = on_ranks([empty_parameters_train], 2)

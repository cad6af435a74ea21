"""Python state on two ranks: set on both it takes effect, set on one it is an error on both."""

from __future__ import annotations

import copy
import time

import torch
from ranks import error_of, on_ranks
from torch import Tensor, nn

import graphshard
from graphshard.errors import FingerprintError

LINEAR = graphshard.BlockPolicy({nn.Linear})
X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Merging(nn.Module):
    """Merges a product of parameters into a weight for eval, as loralib does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.extra = nn.Linear(4, 4)
        self.deep = True
        self.scale = 1.0
        self.merged = False

    def train(self, mode: bool = True) -> nn.Module:
        super().train(mode)
        if mode == self.merged:
            self.fc.weight.data += (-1 if mode else 1) * (self.extra.weight @ self.extra.weight)
            self.merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = self.fc(x) * self.scale
        return self.extra(x) if self.deep else x


def _pair() -> tuple[nn.Module, graphshard.ShardedModule]:
    torch.manual_seed(0)
    model = Merging()
    return model, graphshard.compile(copy.deepcopy(model), LINEAR)


def set_on_both(rank: int) -> None:
    model, sharded = _pair()
    for name, value in (("scale", 2.0), ("deep", False), ("scale", 1.0), ("deep", True)):
        for each in (model, sharded):
            setattr(each, name, value)
            each.zero_grad()
            each(X).sum().backward()
        for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
            assert (mine.grad is None) == (theirs.grad is None)
            assert mine.grad is None or torch.equal(mine.grad.full_tensor(), theirs.grad)
    assert len(sharded.programs) == 4


def merged_on_the_shards(rank: int) -> None:
    model, sharded = _pair()
    for mode in (False, True, False):
        for each in (model, sharded):
            each.train(mode)
        assert sharded.merged is model.merged
        assert torch.equal(sharded.fc.weight.full_tensor(), model.fc.weight)
        with torch.no_grad():
            assert torch.equal(sharded(X), model(X))


def set_on_one(rank: int) -> None:
    _, sharded = _pair()
    sharded(X).sum().backward()
    sharded.zero_grad()
    if rank == 1:
        sharded.deep = False
    begin = time.monotonic()
    message = error_of(lambda: sharded(X), FingerprintError)
    assert time.monotonic() - begin < 20.0  # not the group's timeout of 60
    assert "rank 0: forward all_gather of extra" in message
    sharded.deep = True
    sharded(X).sum().backward()


ON_TWO = [set_on_both, merged_on_the_shards, set_on_one]

test_on_two_ranks = on_ranks(ON_TWO, 2)

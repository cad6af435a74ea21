"""Ranks whose batches differ in size and length train with one program each, as `fully_shard`."""

from __future__ import annotations

from dataclasses import replace

import parity
import pytest
import torch
import torch.distributed as dist
from models import CASES, VOCAB
from ranks import on_ranks
from torch import nn

import graphshard

pytestmark = pytest.mark.slow  # each of its ranks starts and compiles for tens of seconds

IDS = {0: "batch", 1: "seq"}


def ragged(name):
    """The case with batches whose sizes the seed draws: other ones on each rank and step."""
    names = tuple(CASES[name].batch())

    def batch():
        shape = (int(torch.randint(2, 6, ())), int(torch.randint(2, 31, ())))
        ids = torch.randint(VOCAB, shape)
        return dict(zip(names, (ids, ids.clone()), strict=True))

    return replace(CASES[name], batch=batch), dict.fromkeys(names, IDS)


def train(rank, name):
    world_size = dist.get_world_size()
    case, dynamic = ragged(name)
    shapes = {
        tuple(next(iter(case.inputs(100 + index).values())).shape)
        for index in range(parity.STEPS * world_size)
    }
    assert len(shapes) >= 4, shapes
    model = graphshard.compile(
        case.model(),
        graphshard.BlockPolicy(case.blocks),
        example_kwargs=case.inputs(rank),
        dynamic=dynamic,
    )
    exact = parity.check(parity.by_ranks(model, case), case)
    assert len(model.programs) == 1
    assert all(exact) or world_size > 2


def gpt_with_dropout(rank):
    train(rank, "gpt")


def llama_of_transformers(rank):
    train(rank, "llama")


class Parity(nn.Module):
    """Takes another branch for odd lengths; the collectives are the same."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        y = self.b(self.a(x))
        return (y * 2).sum() if x.shape[1] % 2 else y.sum()


def one_rank_captures_anew(rank):
    torch.manual_seed(0)
    model = Parity()
    sharded = graphshard.compile(model, graphshard.SizePolicy(20), dynamic={"x": IDS})
    programs = []
    for step in range(4):
        torch.manual_seed(step)
        # In the last step one rank has a batch of one sample, traced with that size fixed.
        batches = [1 + r if step == 3 else 2 + r for r in range(dist.get_world_size())]
        xs = [torch.randn(batch, 4 + step * r, 4) for r, batch in enumerate(batches)]
        model.zero_grad()
        sharded.zero_grad()
        for x in xs:
            (model(x) / len(xs)).backward()
        loss = sharded(xs[rank])
        assert torch.equal(loss, model(xs[rank]))
        loss.backward()
        for p, q in zip(model.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)
        programs.append(len(sharded.programs))
    assert programs == ([1, 2, 2, 2] if rank % 2 else [1, 1, 1, 2 if rank == 0 else 1])


class Sums(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, mask):
        return (self.b(self.a(x).relu()).sum(-1) * mask).sum()


def ranks_learn_sizes_each_by_itself(rank, **fields):
    torch.manual_seed(0)
    model = Sums()
    sharded = graphshard.compile(model, graphshard.SizePolicy(20, **fields))
    # (batch, length) of even and odd ranks: at first only the even ones meet a new length.
    steps = [
        ((3, 5), (3, 5)),
        ((3, 7), (3, 5)),
        ((3, 4), (3, 5)),
        ((2, 9), (3, 8)),
        ((4, 2), (1, 8)),
    ]
    programs = []
    for step, shapes in enumerate(steps):
        torch.manual_seed(step)
        batches = [
            (torch.randn(*shapes[r % 2], 4), torch.rand(shapes[r % 2]))
            for r in range(dist.get_world_size())
        ]
        model.zero_grad()
        sharded.zero_grad()
        for batch in batches:
            (model(*batch) / len(batches)).backward()
        with torch.no_grad():
            assert torch.equal(sharded(*batches[rank]), model(*batches[rank]))
        loss = sharded(*batches[rank])
        assert torch.equal(loss, model(*batches[rank]))
        loss.backward()
        for p, q in zip(model.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)
        programs.append(len(sharded.programs))
    assert programs == ([2, 2, 2, 4, 6] if rank % 2 else [2, 4, 4, 6, 6])


def ranks_learn_sizes_under_an_order_by_cost(rank):
    """Their programs are timed at other sizes, and communicate in one order all the same."""
    ranks_learn_sizes_each_by_itself(rank, schedule="overlap", hardware="cpu-gloo")


CHECKS = [
    gpt_with_dropout,
    one_rank_captures_anew,
    ranks_learn_sizes_each_by_itself,
    ranks_learn_sizes_under_an_order_by_cost,
]

test_on_two_ranks = on_ranks([*CHECKS, llama_of_transformers], 2, timeout=500)
test_on_four_ranks = on_ranks(CHECKS, 4, timeout=500)

"""A model with stacked experts, and its training on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from full_tensors import full, full_grads
from torch import Tensor, nn
from torch.nn import functional as F

import graphshard

History = list[tuple[Tensor, dict[str, Tensor]]]


class Experts(nn.Module):
    """Two stacked experts of 64 KiB each, which no group above two ranks divides along dim 0."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(128, 2)
        self.w = nn.Parameter(torch.randn(2, 128, 128) / 12)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.w, std=1 / 12)

    def forward(self, x: Tensor) -> Tensor:
        each = torch.einsum("bi,eij->bej", x, self.w)
        return x + (F.softmax(self.gate(x), -1).unsqueeze(-1) * each).sum(1)


class MoE(nn.Module):
    """An embedding of odd rows, blocks, a tied head and a frozen scale."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(19, 128)
        self.blocks = nn.ModuleList(Experts() for _ in range(blocks))
        self.norm = nn.LayerNorm(128)
        self.norm.weight.requires_grad_(False)
        self.head = nn.Linear(128, 19, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)), targets)


def model() -> MoE:
    torch.manual_seed(3)
    return MoE()


def batch(rank: int, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    ids = torch.randint(19, (2, 6), generator=generator)
    return ids[0], ids[1]


def trained(
    module: nn.Module, rank: int, optimizer: Callable[..., Any] = torch.optim.AdamW, steps: int = 3
) -> History:
    """(loss, full gradients) of each step, and the parameters at the end."""
    optim = optimizer([p for p in module.parameters() if p.requires_grad], lr=1e-2)
    history: History = []
    for step in range(steps):
        loss = module(*batch(rank, step))
        loss.backward()
        history.append((loss.detach().clone(), full_grads(module)))
        optim.step()
        optim.zero_grad()
    ends = {n: full(p).detach().clone() for n, p in module.named_parameters()}
    history.append((torch.zeros(()), ends))
    return history


def assert_same(got: History, expected: History, *, exact: bool) -> None:
    for (loss, grads), (their_loss, their_grads) in zip(got, expected, strict=True):
        assert grads.keys() == their_grads.keys(), grads.keys() ^ their_grads.keys()
        pairs = [(loss, their_loss), *((grads[n], their_grads[n]) for n in grads)]
        for mine, theirs in pairs:
            if exact:
                assert torch.equal(mine, theirs)
            else:
                torch.testing.assert_close(mine, theirs, rtol=2e-5, atol=2e-6)


def compiled(rank: int, strategy: str) -> graphshard.ShardedModule:
    policy = graphshard.BlockPolicy({Experts}, strategy=strategy, merge_below=0)
    return graphshard.compile(model(), policy, example_inputs=batch(rank, 0), check=True)

"""The models that `rivals.py` trains: five without dropout, their batches, the numbers to expect.

Weights are random and nothing is downloaded. Dropout is off since compilers draw other random
numbers, and losses are to be compared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call

from examples.benchmarks.benchmark_models import (
    TIMED,
    Batch,
    Model,
    gpt,
    gpt_tokens,
    images,
    loss_of,
    tokens,
)

LEARNING_RATE = 3e-4


def without_dropout(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    """The model that `build` makes, with the probability of every dropout set to 0."""

    def built() -> nn.Module:
        model = build()
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
        return model

    return built


MODELS = (
    Model("gpt-512", gpt(8, 512, 8, dropout=0.0), ("Block",), gpt_tokens(1, 128)),
    Model("gpt-deep", gpt(24, 256, 4, dropout=0.0), ("Block",), gpt_tokens(1, 128)),
    replace(TIMED["llama"], batch=tokens(1, 128)),
    replace(TIMED["bert"], build=without_dropout(TIMED["bert"].build), batch=tokens(1, 128)),
    replace(TIMED["regnet"], name="convnet", batch=images(4, 64)),
)
"""A GPT of 8 blocks 512 wide, one of 24 blocks 256 wide (many small units: overhead), Llama's shape
with grouped queries, BERT, and a convolutional network with BatchNorm (RegNet)."""


class _Toy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x).relu().square().mean()


def _rows(scale: int, generator: torch.Generator) -> Batch:
    return {"x": torch.randn(scale, 8, generator=generator)}


TOY = Model("toy", _Toy, ("Linear",), _rows)
"""The model that every system trains once before its time counts."""

TINY = Model("tiny", gpt(2, 32, 2, dropout=0.0), ("Block",), gpt_tokens(1, 16))
"""For tests of the script."""


@dataclass(frozen=True)
class Data:
    """Batches of a model: another on every rank and step, the same for every system."""

    model: Model
    ranks: int
    scale: int
    device: torch.device

    def batch(self, step: int, rank: int) -> Batch:
        """The keyword inputs of a step."""
        generator = torch.Generator().manual_seed(step * self.ranks + rank)
        drawn = self.model.batch(self.scale, generator)
        return {name: value.to(self.device).contiguous() for name, value in drawn.items()}


def made(model: Model, device: torch.device) -> nn.Module:
    """The model with the weights that every system starts from."""
    torch.manual_seed(0)
    return model.build().train().to(device)


def expected_losses(data: Data, steps: int, rank: int, dtype: torch.dtype | None) -> list[float]:
    """The losses of `rank` over AdamW steps of a single process that has every rank's batch.

    Each rank's batch goes through the model by itself (BatchNorm sees no other), and gradients are
    averaged. Under `dtype` parameters and floating-point inputs are cast to it, as sharded systems
    do; sums of gradients and the optimizer stay in float32.
    """
    model = made(data.model, data.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for step in range(steps):
        for other in range(data.ranks):
            loss = _loss(model, data.batch(step, other), dtype)
            (loss / data.ranks).backward()
            if other == rank:
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _loss(model: nn.Module, batch: Batch, dtype: torch.dtype | None) -> Tensor:
    if dtype is None:
        return loss_of(model(**batch))
    cast = {
        name: value.to(dtype) if value.is_floating_point() else value
        for name, value in batch.items()
    }
    return loss_of(functional_call(model, dict(_low(model, dtype)), (), cast))


def _low(model: nn.Module, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        owner = model.get_submodule(name.rpartition(".")[0])
        # BatchNorm computes in float32 here, with statistics in it.
        low = not isinstance(owner, nn.modules.batchnorm._BatchNorm)
        yield name, parameter.to(dtype) if low else parameter

"""The same training with and without offload, compared bit for bit; runs on every rank."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from models import VOCAB
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import graphshard
from examples.gpt import GPT, Block, GPTConfig

STEPS = 2
MICRO_BATCHES = 2

Step = tuple[float, dict[str, Tensor]]


def gpt() -> nn.Module:
    """A GPT with dropout and a tied head, in train mode, the same at every call."""
    torch.manual_seed(1)
    return GPT(GPTConfig(vocab=VOCAB, layers=2, heads=2, width=24, dropout=0.1, tied=True)).train()


def sharded(**fields: Any) -> graphshard.ShardedModule:
    """The GPT, sharded over a mesh of 2 x 2 if the strategy needs one of two dimensions."""
    hybrid = str(fields.get("strategy", "")).startswith("HYBRID")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")) if hybrid else None
    return graphshard.compile(gpt(), graphshard.BlockPolicy({Block}, **fields), mesh=mesh)


def train(model: nn.Module, rank: int, *, sync: bool = True) -> list[Step]:
    """Loss and this rank's gradients of each AdamW step, of two micro-batches; then the weights.

    sync: reduce each micro-batch's gradients, not their sum.
    """
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(MICRO_BATCHES):
            torch.manual_seed(100 * step + 10 * micro + rank)
            ids = torch.randint(VOCAB, (2, 18))
            last = micro == MICRO_BATCHES - 1
            with nullcontext() if sync or last else model.no_sync():  # type: ignore[operator]
                loss = model(ids[:, :-1], ids[:, 1:])
                loss.backward()
            total += loss.item()
        grads = ((name, param.grad) for name, param in model.named_parameters())
        history.append((total, own_parts(grads)))
        optim.step()
        optim.zero_grad()
    history.append((0.0, own_parts(model.named_parameters())))
    return history


def own_parts(named: Iterable[tuple[str, Tensor | None]]) -> dict[str, Tensor]:
    return {name: _own(t.detach()).clone() for name, t in named if t is not None}


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def require_equal(history: list[Step], expected: list[Step], what: Any) -> None:
    for index, ((loss, tensors), (wanted, theirs)) in enumerate(
        zip(history, expected, strict=True)
    ):
        assert loss == wanted, (what, index)
        assert tensors.keys() == theirs.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, theirs[name]), (what, index, name)


def trains_the_same(rank: int, *offloads: Any, sync: bool = True, **fields: Any) -> None:
    """With each of `offloads` and without, under a policy with these fields."""
    expected = train(sharded(**fields), rank, sync=sync)
    for offload in offloads:
        history = train(sharded(**fields, offload=offload), rank, sync=sync)
        require_equal(history, expected, offload)

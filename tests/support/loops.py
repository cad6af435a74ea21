"""One process that does what all ranks do: the reference for training loops."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from full_tensors import full
from models import Block, TiedGPT, loss_of
from torch import Tensor, nn

import graphshard


class OneProcess:
    """A replica for each rank, which run that rank's batches and share the averaged gradient.

    `optim` makes an optimizer of a replica's parameters.
    """

    def __init__(self, model: nn.Module, world_size: int, optim: Callable[..., Any] | None = None):
        self.replicas = [copy.deepcopy(model) for _ in range(world_size)]
        self.optims = [optim(replica) for replica in self.replicas] if optim else []

    @property
    def model(self) -> nn.Module:
        return self.replicas[0]

    def average(self, backward: Callable[[int, nn.Module], Any]) -> list[Any]:
        """What `backward` gives for each rank and its replica; then gradients are averaged."""
        results = [backward(rank, replica) for rank, replica in enumerate(self.replicas)]
        for params in zip(*(replica.parameters() for replica in self.replicas), strict=True):
            grads = [p.grad for p in params if p.grad is not None]
            if grads:
                mean = sum(grads[1:], grads[0]).resolve_conj()
                # A complex number divided by a number is rounded as by a complex one.
                (torch.view_as_real(mean) if mean.is_complex() else mean).div_(len(params))
                for p in params:
                    p.grad = mean.clone()
        return results

    def backward(self, batches: Callable[[int], Iterable[tuple[Any, ...]]]) -> None:
        """Each rank's micro-batches, gradients summed on the rank, then averaged."""

        def on_rank(rank: int, replica: nn.Module) -> None:
            for batch in batches(rank):
                backward(replica, rank, *batch)

        self.average(on_rank)

    def step(self) -> None:
        for optim in self.optims:
            optim.step()
            optim.zero_grad()


def same_params(ours: nn.Module, reference: nn.Module, *, exact: bool = True) -> None:
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    for name, param in ours.named_parameters(remove_duplicate=False):
        same(full(param), theirs[name].detach(), name, exact=exact)


def same_grads(ours: nn.Module, reference: nn.Module, *, exact: bool = True) -> None:
    theirs = dict(reference.named_parameters(remove_duplicate=False))
    for name, param in ours.named_parameters(remove_duplicate=False):
        assert (param.grad is None) == (theirs[name].grad is None), name
        if param.grad is not None:
            same(full(param.grad), theirs[name].grad, name, exact=exact)


def same(ours: Tensor, theirs: Tensor, name: str, *, exact: bool) -> None:
    if exact:
        assert torch.equal(ours, theirs), f"{name}: {(ours - theirs).abs().max()}"
    else:
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7, msg=lambda m: f"{name}: {m}")


def same_step(
    model: nn.Module,
    other: nn.Module,
    *args: Any,
    objective: Callable[[Any], Tensor] = loss_of,
    exact: bool = True,
    **kwargs: Any,
) -> None:
    """Both compute the same loss and gradients, from the same seed; `exact`: to the bit."""
    losses = []
    for each in (model, other):
        each.zero_grad()
        torch.manual_seed(3)
        losses.append(objective(each(*args, **kwargs)))
        losses[-1].backward()
    same(losses[1], losses[0], "loss", exact=exact)
    same_grads(other, model, exact=exact)


def gpt(layers: int = 1) -> nn.Module:
    torch.manual_seed(0)
    return TiedGPT(layers)


def compiled(model: nn.Module, **fields: Any) -> graphshard.ShardedModule:
    return graphshard.compile(model, graphshard.BlockPolicy({Block}, **fields))


def exact() -> bool:
    """Whether sums over ranks have one order only: on two ranks."""
    return dist.get_world_size() == 2


def backward(model: nn.Module, rank: int, *batch: Any) -> None:
    torch.manual_seed(rank)
    model(*batch).backward()

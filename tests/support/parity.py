"""Three ways to train the same model: graphshard, `fully_shard`, and one process that does it all.

The one process is the reference: each rank has a replica with buffers of its own, which runs that
rank's batches under that rank's seeds; the replicas share the averaged gradient.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from full_tensors import full, full_grads
from loops import OneProcess
from models import Case, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import graphshard

STEPS = 3
LR = 1e-3


@dataclass
class Training:
    """What training gave: per step the losses of the ranks and the gradients; the end state."""

    losses: list[list[float]] = field(default_factory=list)
    grads: list[dict[str, Tensor]] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)  # of this rank


@dataclass
class Difference:
    """How far a training is from the reference."""

    exact: bool  # every loss and gradient of every step is bit-equal
    grads: dict[str, float]  # per tensor |dg| / |g| in the first step, when weights are equal
    params: float  # largest absolute difference after the last step
    buffers: float
    losses: float


def by_one_process(case: Case) -> Training:
    """Train all ranks' replicas in this process."""
    one = OneProcess(case.model(), dist.get_world_size(), adamw)
    result = Training()
    for step in range(STEPS):
        result.losses.append(one.average(partial(_backward, case, step)))
        result.grads.append(full_grads(one.model))
        one.step()
    result.params = _full(one.model.named_parameters())
    result.buffers = _full(one.replicas[dist.get_rank()].named_buffers())
    return result


def by_ranks(model: nn.Module, case: Case) -> Training:
    """Train a sharded model on this rank; gradients and parameters are gathered."""
    optim = adamw(model)
    result = Training()
    for step in range(STEPS):
        losses: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(losses, _backward(case, step, dist.get_rank(), model))
        result.losses.append(losses)
        result.grads.append(full_grads(model))
        optim.step()
        optim.zero_grad()
    result.params = _full(model.named_parameters())
    result.buffers = _full(model.named_buffers())
    return result


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=LR)


def by_fully_shard(case: Case, **options: Any) -> Training:
    """`options` are those of `fully_shard`; the root only takes its mesh."""
    model = case.model()
    for module in model.modules():
        if type(module).__name__ in case.blocks:
            fully_shard(module, **options)
    fully_shard(model, mesh=options.get("mesh"))
    return by_ranks(model, case)


def by_graphshard(case: Case, mesh: DeviceMesh | None = None, **fields: Any) -> Training:
    policy = graphshard.BlockPolicy(case.blocks, **fields)
    model = graphshard.compile(case.model(), policy, example_kwargs=case.inputs(0), mesh=mesh)
    return by_ranks(model, case)


def difference(got: Training, expected: Training) -> Difference:
    """Compare with the reference; both must have the same parameters, gradients and buffers."""
    largest = max(g.norm() for g in expected.grads[0].values())
    relative = {}
    for name, reference in expected.grads[0].items():
        norm = reference.norm()
        scale = norm if norm > 1e-6 * largest else largest  # a near-zero gradient is noise
        relative[name] = ((got.grads[0][name] - reference).norm() / scale).item()
    return Difference(
        exact=got.losses == expected.losses and all(map(_identical, got.grads, expected.grads)),
        grads=relative,
        params=_furthest(got.params, expected.params),
        buffers=_furthest(got.buffers, expected.buffers),
        losses=max(abs(a - b) for a, b in zip(got.losses[0], expected.losses[0], strict=True)),
    )


def _backward(case: Case, step: int, rank: int, model: nn.Module) -> float:
    seed = 100 + step * dist.get_world_size() + rank
    inputs = case.inputs(seed)
    torch.manual_seed(seed)
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.item()


def _full(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    return {name: full(tensor).clone() for name, tensor in tensors}


def _identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max((_gap(a[name], b[name]) for name in a), default=0.0)


def _gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item()


def check(ours: Training, case: Case, *, fully_shard: bool = True) -> tuple[bool, bool]:
    """Assert parity with one process: bit-equal where `fully_shard` is, else within rounding.

    Returns whether ours is bit-equal and whether that of `fully_shard` is, which cannot run some
    models: with `fully_shard=False` it counts as bit-equal.
    """
    expected = by_one_process(case)
    found = difference(ours, expected)
    exact = not fully_shard or difference(by_fully_shard(case), expected).exact
    assert found.losses == 0, "the first loss comes from equal weights: it must be bit-equal"
    if exact:
        assert found.exact, found
        assert found.params == 0
        assert found.buffers == 0
    worst = max(found.grads, key=found.grads.__getitem__)
    assert found.grads[worst] <= 1e-6, f"gradient of {worst}: {found.grads[worst]:.1e}"
    assert found.params <= 0.01 * LR * STEPS
    assert found.buffers <= 1e-6
    return found.exact, exact

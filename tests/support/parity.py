"""Three ways to train the same model: graphshard, `fully_shard`, and one process that does it all.

The one process is the reference: each rank has a replica with buffers of its own, which runs that
rank's batches under that rank's seeds; the replicas share the averaged gradient.
"""

from __future__ import annotations

import traceback
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from models import CASES, Case, loss_of
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

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


def by_one_process(case: Case, world_size: int, rank: int) -> Training:
    """Train all ranks' replicas in this process."""
    replicas = [case.model() for _ in range(world_size)]
    optims = [torch.optim.AdamW(replica.parameters(), lr=LR) for replica in replicas]
    result = Training()
    for step in range(STEPS):
        losses = [
            _backward(replica, case, step, r, world_size) for r, replica in enumerate(replicas)
        ]
        result.losses.append(losses)
        for params in zip(*(replica.parameters() for replica in replicas), strict=True):
            grads = [p.grad for p in params if p.grad is not None]
            if grads:
                mean = sum(grads[1:], grads[0]) / world_size
                for p in params:
                    p.grad = mean.clone()
        result.grads.append(_full(_named_grads(replicas[0])))
        for optim in optims:
            optim.step()
            optim.zero_grad()
    result.params = _full(dict(replicas[0].named_parameters()))
    result.buffers = _full(dict(replicas[rank].named_buffers()))
    return result


def by_ranks(model: nn.Module, case: Case, world_size: int, rank: int) -> Training:
    """Train a sharded model, this process being `rank`; gradients and parameters are gathered."""
    optim = torch.optim.AdamW(model.parameters(), lr=LR)
    result = Training()
    for step in range(STEPS):
        losses: list[object] = [None] * world_size
        dist.all_gather_object(losses, _backward(model, case, step, rank, world_size))
        result.losses.append([float(loss) for loss in losses])  # type: ignore[arg-type]
        result.grads.append(_full(_named_grads(model)))
        optim.step()
        optim.zero_grad()
    result.params = _full(dict(model.named_parameters()))
    result.buffers = _full(dict(model.named_buffers()))
    return result


def by_fully_shard(case: Case, world_size: int, rank: int, **options: Any) -> Training:
    """`options` are those of `fully_shard`; the root only takes its mesh."""
    model = case.model()
    for module in model.modules():
        if type(module).__name__ in case.blocks:
            fully_shard(module, **options)
    fully_shard(model, mesh=options.get("mesh"))
    return by_ranks(model, case, world_size, rank)


def by_graphshard(
    case: Case, world_size: int, rank: int, mesh: DeviceMesh | None = None, **fields: Any
) -> Training:
    policy = graphshard.BlockPolicy(case.blocks, **fields)
    model = graphshard.compile(case.model(), policy, example_kwargs=case.inputs(0), mesh=mesh)
    return by_ranks(model, case, world_size, rank)


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


def _backward(model: nn.Module, case: Case, step: int, rank: int, world_size: int) -> float:
    seed = 100 + step * world_size + rank
    inputs = case.inputs(seed)
    torch.manual_seed(seed)
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.item()


def _named_grads(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def _full(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        name: (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()
        for name, t in tensors.items()
    }


def _identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def _furthest(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    return max((_gap(a[name], b[name]) for name in a), default=0.0)


def _gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return (a.double() - b.double()).abs().max().item()


@dataclass
class Outcome:
    """How graphshard and `fully_shard` compare with the reference on one rank."""

    graphshard: Difference
    fully_shard: Difference


def compare(rank: int, names: tuple[str, ...], fields: dict[str, Any]) -> dict[str, Outcome | str]:
    """Runs on every rank: by model, the outcome or the traceback of what went wrong."""
    world_size = dist.get_world_size()
    outcomes: dict[str, Outcome | str] = {}
    for name in names:
        case = CASES[name]
        try:
            expected = by_one_process(case, world_size, rank)
            outcomes[name] = Outcome(
                difference(by_graphshard(case, world_size, rank, **fields), expected),
                difference(by_fully_shard(case, world_size, rank), expected),
            )
        except Exception:
            outcomes[name] = traceback.format_exc()
    return outcomes


def check(outcome: Outcome | str) -> None:
    """Assert parity: bit-equal where `fully_shard` is, else within rounding."""
    assert isinstance(outcome, Outcome), outcome
    ours = outcome.graphshard
    assert ours.losses == 0, "the first loss comes from equal weights: it must be bit-equal"
    if outcome.fully_shard.exact:
        assert ours.exact, ours
        assert ours.params == 0
        assert ours.buffers == 0
    worst = max(ours.grads, key=ours.grads.__getitem__)
    assert ours.grads[worst] <= 1e-6, f"gradient of {worst}: {ours.grads[worst]:.1e}"
    assert ours.params <= 0.01 * LR * STEPS
    assert ours.buffers <= 1e-6

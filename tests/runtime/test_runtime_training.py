"""Training on ranks: bit-equal to `fully_shard` on two, equal to one process within rounding."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from full_tensors import full, full_grads
from models import Block, Normed, Odd, TiedGPT, features_of, tokens_of
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import graphshard

Batches = Callable[[int, int], tuple[Any, ...]]


def train(model: nn.Module, batches: Batches, rank: int) -> list[tuple[Tensor, dict[str, Tensor]]]:
    """(loss, full gradients by name) of three AdamW steps."""
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for step in range(3):
        torch.manual_seed(1000 * rank + step)
        loss = model(*batches(rank, step))
        loss.backward()
        history.append((loss.detach(), full_grads(model)))
        optim.step()
        optim.zero_grad()
    return history


def same_as_fully_shard(
    model: nn.Module, batches: Batches, rank: int, units: set[type], **policy: Any
) -> graphshard.ShardedModule:
    reference = copy.deepcopy(model)
    for module in reference.modules():
        if type(module) in units:
            fully_shard(module)
    fully_shard(reference)
    sharded = graphshard.compile(model, graphshard.BlockPolicy(units, **policy))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about views that its own blocks return
        expected = train(reference, batches, rank)
    for (loss, grads), (their_loss, their_grads) in zip(
        train(sharded, batches, rank), expected, strict=True
    ):
        assert torch.equal(loss, their_loss)
        assert grads.keys() == their_grads.keys()
        for name, grad in grads.items():
            assert torch.equal(grad, their_grads[name]), name
    for (name, mine), (their_name, theirs) in zip(
        sharded.named_parameters(), reference.named_parameters(), strict=True
    ):
        assert name == their_name
        assert torch.equal(full(mine.detach()), full(theirs.detach())), name
    return sharded


def gpt_with_dropout(rank: int) -> None:
    torch.manual_seed(0)
    sharded = same_as_fully_shard(TiedGPT(), tokens_of, rank, {Block})
    assert sharded.head.weight is sharded.embed.weight
    for param in sharded.parameters():
        assert isinstance(param, DTensor)


def gathered_once(rank: int) -> None:
    torch.manual_seed(0)
    same_as_fully_shard(TiedGPT(2), tokens_of, rank, {Block}, strategy="SHARD_GRAD_OP")


def replicated(rank: int) -> None:
    torch.manual_seed(0)
    sharded = same_as_fully_shard(TiedGPT(2), tokens_of, rank, {Block}, strategy="NO_SHARD")
    for param in sharded.parameters():
        assert param.placements[0].is_replicate()


def other_schedules(rank: int) -> None:
    for policy in (
        {"backward_prefetch": None, "forward_prefetch": 2},
        {"backward_prefetch": "post", "reshard_root": True},
    ):
        torch.manual_seed(0)
        same_as_fully_shard(TiedGPT(2), tokens_of, rank, {Block}, **policy)


def batch_norm(rank: int) -> None:
    torch.manual_seed(0)
    model = Normed()
    sharded = same_as_fully_shard(
        model, lambda r, s: features_of(r, s, 8), rank, {nn.Linear, nn.BatchNorm1d}
    )
    buffers = dict(sharded.named_buffers())
    assert buffers["body.1.num_batches_tracked"] == 3
    assert not torch.equal(buffers["body.1.running_mean"], model.body[1].running_mean)


def odd_parameters(rank: int) -> None:
    """`fully_shard` refuses parameters without dimensions: one process is the reference."""
    torch.manual_seed(0)
    model = Odd()
    sharded = graphshard.compile(model, graphshard.BlockPolicy({Block}))
    replicas = [copy.deepcopy(model) for _ in range(2)]
    for r, replica in enumerate(replicas):
        torch.manual_seed(r)
        replica(*features_of(r, 0, 16)).backward()
    torch.manual_seed(rank)
    sharded(*features_of(rank, 0, 16)).backward()
    grads = full_grads(sharded)
    params = [dict(replica.named_parameters()) for replica in replicas]
    for name in params[0]:
        each = [p[name].grad for p in params]
        if each[0] is None:
            assert name not in grads, name
        else:
            assert torch.equal(grads[name], (each[0] + each[1]) / 2), name
    assert "scale" in grads
    assert not any(name.startswith(("frozen", "unused")) for name in grads)


def thawed(rank: int) -> None:
    """requires_grad may change between steps: another program."""
    torch.manual_seed(0)
    sharded = graphshard.compile(Odd(), graphshard.BlockPolicy({Block}))
    sharded(*features_of(rank, 0, 16)).backward()
    for name, param in sharded.named_parameters():
        param.grad = None
        param.requires_grad_(name.startswith("frozen"))
    sharded(*features_of(rank, 0, 16)).backward()
    for name, param in sharded.named_parameters():
        assert (param.grad is not None) == name.startswith("frozen"), name
    assert len(sharded.programs) == 2


def accumulated(rank: int) -> None:
    torch.manual_seed(0)
    sharded = graphshard.compile(TiedGPT(1), graphshard.BlockPolicy({Block}))
    seen: list[str] = []
    sharded.embed.weight.register_post_accumulate_grad_hook(lambda p: seen.append("hook"))
    separate = []
    for step in range(2):
        torch.manual_seed(step)
        sharded(*tokens_of(rank, step)).backward()
        separate.append(full_grads(sharded))
        sharded.zero_grad()
    for step in range(2):
        torch.manual_seed(step)
        sharded(*tokens_of(rank, step)).backward()
    for name, grad in full_grads(sharded).items():
        assert torch.equal(grad, separate[0][name] + separate[1][name]), name
    assert len(seen) == 4


def clipped(rank: int) -> None:
    torch.manual_seed(0)
    sharded = graphshard.compile(TiedGPT(1), graphshard.BlockPolicy({Block}))
    sharded(*tokens_of(rank, 0)).backward()
    norm = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 0.01)
    assert full(norm) > 0.01
    clipped_norm = torch.stack([g.norm() for g in full_grads(sharded).values()]).norm()
    torch.testing.assert_close(clipped_norm, torch.tensor(0.01), rtol=1e-3, atol=0)


ON_TWO = [
    gpt_with_dropout,
    gathered_once,
    replicated,
    other_schedules,
    batch_norm,
    odd_parameters,
    thawed,
    accumulated,
    clipped,
]

test_on_two_ranks = on_ranks(ON_TWO, 2)


def on_four_ranks(rank: int) -> list[float]:
    """Some ranks own no row of some parameters; in checking mode."""
    torch.manual_seed(0)
    model = TiedGPT(2)
    replicas = [copy.deepcopy(model) for _ in range(4)]
    sharded = graphshard.compile(model, graphshard.BlockPolicy({Block}), check=True)
    history = train(sharded, tokens_of, rank)
    for r, replica in enumerate(replicas):
        torch.manual_seed(1000 * r)
        replica(*tokens_of(r, 0)).backward()
    errors = []
    for name in dict(replicas[0].named_parameters()):
        mean = torch.stack([dict(r.named_parameters())[name].grad for r in replicas]).mean(0)
        errors.append(float((history[0][1][name] - mean).norm() / mean.norm()))
    return errors


def test_on_four_ranks_gradients_are_the_mean() -> None:
    for errors in run_ranks(on_four_ranks, 4):
        assert max(errors) < 1e-6

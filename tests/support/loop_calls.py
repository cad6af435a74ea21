"""Checks of calls other than forward's, and of hooks, to be run on ranks (see `ranks.Checks`)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from loops import OneProcess, backward, compiled, exact, gpt, same_grads
from runtime_models import Block, Odd, features_of, tokens_of
from torch import Tensor, nn

from graphshard.errors import PolicyError, RuntimeStateError


class Encoder(nn.Module):
    """Has a method besides forward, which uses a block of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(dropout=0.0)
        self.head = nn.Linear(16, 3)

    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.block(x * scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)).pow(2).mean()


def methods_are_called(rank: int) -> None:
    torch.manual_seed(0)
    model = Encoder()
    sharded = compiled(model)
    (x,) = features_of(rank, 0, 16)
    assert torch.equal(sharded.call_method("encode", x, scale=2.0), model.encode(x, scale=2.0))
    assert torch.equal(sharded.call_method("block.up.forward", x), model.block.up(x))
    with pytest.raises(AttributeError, match=r"sharded.call_method\('encode', ...\)"):
        sharded.encode(x)
    with pytest.raises(AttributeError, match="no attribute 'decode'"):
        sharded.decode(x)
    with pytest.raises(PolicyError, match="no method 'decode'"):
        sharded.call_method("decode", x)
    sharded.call_method("encode", x).sum().backward()
    model.encode(x).sum().backward()
    assert sharded.head.weight.grad is None
    assert sharded.block.up.weight.grad is not None


def unused_in_one_call(rank: int) -> None:
    """A parameter used in one program and not in the next: no gradient there, no hang."""
    torch.manual_seed(0)
    sharded = compiled(Odd())
    (x,) = features_of(rank, 0, 16)
    backward(sharded, rank, x)
    assert sharded.unused.up.weight.grad is None
    sharded.zero_grad()
    sharded.submodule_forward("unused", x).sum().backward()
    assert sharded.unused.up.weight.grad is not None
    assert sharded.first.up.weight.grad is None


# -- hooks ------------------------------------------------------------------------------------


def hooks_on_the_model(rank: int) -> None:
    """What hooks compute is captured, backward hooks too; that they are there is said."""
    torch.manual_seed(0)
    model = Encoder()
    model.block.up.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))
    model.block.register_forward_hook(lambda module, args, out: out * 2.0)
    model.block.norm.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 3.0,))
    model.head.register_full_backward_pre_hook(lambda module, outs: (outs[0] * 0.5,))
    reference = OneProcess(model, dist.get_world_size())
    with pytest.warns(UserWarning, match=r"hooks on modules .* block \(Block\): .*lambda"):
        sharded = compiled(model)
    (x,) = features_of(rank, 0, 16)
    sharded(x.requires_grad_()).backward()
    reference.backward(lambda r: [(features_of(r, 0, 16)[0].requires_grad_(),)])
    same_grads(sharded, reference.model, exact=exact())


def hooks_on_parts(rank: int) -> None:
    sharded = compiled(gpt(1))
    for register in ("register_forward_hook", "register_full_backward_hook"):
        with pytest.raises(RuntimeStateError, match=r"blocks.0.up \(Linear\) is a part"):
            getattr(sharded.blocks[0].up, register)(lambda *args: None)
    seen: list[str] = []
    sharded.register_forward_hook(lambda module, args, out: seen.append("whole"))
    sharded(*tokens_of(rank, 0))
    assert seen == ["whole"]

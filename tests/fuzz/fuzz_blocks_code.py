"""Kinds of blocks whose forward is unusual code: views, writes, branches, randomness, hooks, and
tensors left elsewhere than in the result.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from fuzz_blocks import VOCAB, Block, kind, matrix, weights
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import checkpoint


@kind(lambda d: {"trained": nn.Linear(d, d), "tested": nn.Linear(d, d)}, mixes=True)
def branch_on_training(self, x, ids):
    """Other parameters in training than in evaluation."""
    return x + (self.trained(x) if self.training else self.tested(x))


@kind(lambda d: {"short": nn.Linear(d, d), "long": nn.Linear(d, d)})
def branch_on_shape(self, x, ids):
    return x + (self.short(x) if x.shape[1] < 4 else self.long(x))


@kind()
def called_twice(self, x, ids):
    return x + self.fc(self.fc(x).relu())


@kind(mixes=True, name="checkpoint")
def checkpointed(self, x, ids):
    return x + checkpoint(lambda x: self.fc(x.tanh()).sigmoid(), x, use_reentrant=False)


@kind()
def random_checkpoint(self, x, ids):
    def inner(x):
        return F.dropout(self.fc(x), 0.4, self.training).sin()

    return x + checkpoint(inner, x, use_reentrant=False)


@kind()
def views(self, x, ids):
    """Writes through views of activations."""
    y = self.fc(x).clone()
    y[..., ::2] *= 0.5
    y[:, 0].add_(x[:, -1])
    y.view(-1)[:3].zero_()
    y.transpose(0, 1)[0].mul_(2)
    return x + y


@kind()
def writes(self, x, ids):
    """Operators that write into their result."""
    y = torch.zeros_like(x)
    y[ids == 3] = 1.0
    y.add_(self.fc(x)).clamp_(-2, 2)
    y.index_fill_(1, torch.tensor([0]), 0.5)
    out = torch.empty_like(y)
    torch.mul(y.detach(), 2, out=out)
    return x + y + out


@kind()
def more_outputs(self, x, ids):
    y = self.fc(x)
    return x + y, y.mean(), y[0], y.detach(), (y > 0)


@kind()
def noise(self, x, ids):
    drawn = torch.randn_like(x) + torch.rand(x.shape[-1], dtype=x.dtype)
    order = torch.randperm(x.shape[-1])
    return x + self.fc(x) * 0.1 * drawn + x[..., order] * 0.1


@kind()
def bernoulli(self, x, ids):
    return x + self.fc(x) * torch.bernoulli(torch.full_like(x, 0.6))


@kind()
def gumbel(self, x, ids):
    chosen = F.gumbel_softmax(self.fc(x), tau=0.8, hard=True)
    return x + chosen + F.rrelu(x, training=self.training) * 0.1


class Straight(torch.autograd.Function):
    """Rounds; its gradient is cut off at 1."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return (x * weight).round()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        inside = (x.abs() < 1).to(grad.dtype)
        return grad * weight * inside, (grad * x).sum((0, 1))


@kind(lambda d: {**matrix(d), "scale": weights(d)})
def custom_function(self, x, ids):
    return x + self.fc(Straight.apply(x, self.scale))


@kind()
def indexing(self, x, ids):
    """Gathers, scatters, sorts and counts by integers."""
    y = self.fc(x)
    sums = y.new_zeros(VOCAB, self.dim).index_add(0, ids.flatten(), y.flatten(0, 1))
    counts = F.one_hot(ids, VOCAB).sum((0, 1)).clamp(min=1)
    order = x.sum(-1).argsort(-1)
    sorted_rows = torch.gather(y, 1, order[..., None].expand_as(y))
    return x + (sums / counts[:, None])[ids] + sorted_rows.cumsum(1) * 0.1


@kind()
def statistics(self, x, ids):
    """Reductions of several kinds, some with integer results."""
    y = self.fc(x)
    values, where = y.max(-1)
    low = torch.logsumexp(y, -1, keepdim=True)
    y = y - low + y.std(1, keepdim=True) + torch.linalg.vector_norm(y, dim=-1, keepdim=True)
    return x + 0.1 * y, values, where


@kind()
def stop_gradient(self, x, ids):
    with torch.no_grad():
        scale = self.fc(x).norm()
    with torch.enable_grad():
        return x + self.fc(x.detach()) / (1 + scale)


@kind(lambda d: {**matrix(d), "head": nn.Linear(d, 3)})
def early_exit(self, x, ids):
    """A head that only another output uses."""
    return x + self.fc(x), self.head(x)


def _hooked(dim: int) -> dict[str, Any]:
    fc = nn.Linear(dim, dim)
    fc.register_forward_hook(lambda module, args, out: out * 1.5)
    fc.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))
    return {"fc": fc}


@kind(_hooked)
def hooks(self, x, ids):
    """Hooks of modules and of activations, as they stand before the model is compiled."""
    y = self.fc(x)
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 0.5)
    return x + y


@kind()
def cast(self, x, ids):
    y = self.fc(x).float().softmax(-1).to(x.dtype)
    return x + y + ids[..., None].to(x.dtype) * 0.01


@kind(mixes=True)
def same_object(self, x, ids):
    """Returns its input itself."""
    return x, self.fc(x)


@kind()
def vmap(self, x, ids):
    return x + torch.vmap(lambda row: self.fc(row).softmax(-1))(x)


@kind()
def functional(self, x, ids):
    """A submodule called with other values than its own, made of them."""
    params = {name: value * 0.5 for name, value in self.fc.named_parameters()}
    return x + torch.func.functional_call(self.fc, params, (x,))


@kind()
def loop(self, x, ids):
    """The same matrix in a loop, with an early product of two parameters."""
    square = self.fc.weight @ self.fc.weight.t() * 0.1
    y = x
    for _ in range(3):
        y = torch.tanh(y @ square + self.fc.bias)
    return x + y


@kind()
def penalty(self, x, ids):
    """A term of the loss that parameters alone make."""
    return x + self.fc(x), sum(p.square().sum() for p in self.parameters()) * 0.1


@kind()
def linear_algebra(self, x, ids):
    a = self.fc.weight @ self.fc.weight.t() + torch.eye(self.dim, dtype=x.dtype)
    return x + torch.linalg.solve(a, x.mT).mT * 0.3 + torch.linalg.cholesky(a).sum() * 0.01


class _Part(Block):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.weight = weights(dim, dim)

    def forward(self, *, hidden, mask, scale):
        assert mask is None
        return {"y": (hidden["x"] @ self.weight + hidden["more"][0]) * scale, "unused": 3}


@kind(lambda d: {**matrix(d), "part": _Part(d)})
def keyword(self, x, ids):
    """A submodule called by keywords, with an argument that is None."""
    result = self.part(hidden={"x": self.fc(x), "more": [x]}, mask=None, scale=0.5)
    return x + result["y"]


# -- tensors left elsewhere than in the result ----------------------------------------------------

DOORS = ("last", "kept", "named", "pool")
"""The attributes in which blocks leave tensors."""


def left_in(module: nn.Module) -> list[Tensor]:
    """The tensors that the last call of a `Fuzzed`, or of a sharded one, left."""
    blocks: Any = module.blocks
    values = [getattr(block, door, None) for block in blocks for door in DOORS]
    return [leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, Tensor)]


@kind()
def left_on_attribute(self, x, ids):
    y = self.fc(x)
    self.last = y.square().mean()
    return x + y.tanh()


@kind(lambda d: {**matrix(d), "kept": []})
def left_in_containers(self, x, ids):
    """A list that each call empties, with a dict in it, and a list made anew."""
    y = self.fc(x)
    self.kept.clear()
    self.kept.append(y.mean((0, 1)))
    self.kept.append({"std": y.std(), "n": 2})
    self.last = [y[0], y.detach()]
    return x + y.tanh()


def _noting(dim: int) -> dict[str, Any]:
    fc, named = nn.Linear(dim, dim), {}
    fc.register_forward_hook(lambda module, args, out: named.update(fc=out, half=out / 2))
    return {"fc": fc, "named": named}


@kind(_noting)
def left_by_hook(self, x, ids):
    return x + self.fc(x).tanh()


@kind(lambda d: {**matrix(d), "pool": torch.zeros(d)})
def left_in_buffer(self, x, ids):
    y = self.fc(x)
    self.pool = y.mean((0, 1)).to(self.pool.dtype)
    return x + y.tanh()


@kind()
def left_in_checkpoint(self, x, ids):
    def inner(x):
        y = self.fc(x)
        self.last = (y * y).mean((0, 1))
        return x + y.tanh()

    return checkpoint(inner, x, use_reentrant=False)

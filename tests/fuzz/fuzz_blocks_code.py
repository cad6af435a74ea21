"""Kinds of blocks whose forward is unusual code: views, writes, branches, randomness, hooks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fuzz_blocks import VOCAB, Block, kind
from fuzz_blocks_state import weights
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Plain(Block):
    """Base: a block with one matrix."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.fc = nn.Linear(dim, dim)


@kind("branch_on_training")
class Branches(Block):
    """Other parameters in training than in evaluation."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.trained, self.tested = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + (self.trained(x) if self.training else self.tested(x))


@kind("branch_on_shape")
class BranchesOnShape(Block):
    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.short, self.long = nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + (self.short(x) if x.shape[1] < 4 else self.long(x))


@kind("called_twice")
class Twice(Plain):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.fc(self.fc(x).relu())


@kind("checkpoint")
class Checkpointed(Plain):
    mixes = True

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + checkpoint(self._inner, x, use_reentrant=False)

    def _inner(self, x: Tensor) -> Tensor:
        return self.fc(x.tanh()).sigmoid()


@kind("random_checkpoint")
class RandomCheckpoint(Plain):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        def inner(x):
            return F.dropout(self.fc(x), 0.4, self.training).sin()

        return x + checkpoint(inner, x, use_reentrant=False)


@kind("views")
class Views(Plain):
    """Writes through views of activations."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.fc(x).clone()
        y[..., ::2] *= 0.5
        y[:, 0].add_(x[:, -1])
        y.view(-1)[:3].zero_()
        y.transpose(0, 1)[0].mul_(2)
        return x + y


@kind("writes")
class Writes(Plain):
    """Operators that write into their result."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[ids == 3] = 1.0
        y.add_(self.fc(x)).clamp_(-2, 2)
        y.index_fill_(1, torch.tensor([0]), 0.5)
        out = torch.empty_like(y)
        torch.mul(y.detach(), 2, out=out)
        return x + y + out


@kind("more_outputs")
class MoreOutputs(Plain):
    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        y = self.fc(x)
        return x + y, y.mean(), y[0], y.detach(), (y > 0)


@kind("noise")
class Noise(Plain):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        noise = torch.randn_like(x) + torch.rand(x.shape[-1], dtype=x.dtype)
        order = torch.randperm(x.shape[-1])
        return x + self.fc(x) * 0.1 * noise + x[..., order] * 0.1


@kind("bernoulli")
class Bernoulli(Plain):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        kept = torch.bernoulli(torch.full_like(x, 0.6))
        return x + self.fc(x) * kept


@kind("gumbel")
class Gumbel(Plain):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
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


@kind("custom_function")
class Custom(Plain):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.scale = weights(dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.fc(Straight.apply(x, self.scale))


@kind("indexing")
class Indexing(Plain):
    """Gathers, scatters, sorts and counts by integers."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.fc(x)
        sums = y.new_zeros(VOCAB, self.dim).index_add(0, ids.flatten(), y.flatten(0, 1))
        counts = F.one_hot(ids, VOCAB).sum((0, 1)).clamp(min=1)
        order = x.sum(-1).argsort(-1)
        sorted_rows = torch.gather(y, 1, order[..., None].expand_as(y))
        return x + (sums / counts[:, None])[ids] + sorted_rows.cumsum(1) * 0.1


@kind("statistics")
class Statistics(Plain):
    """Reductions of several kinds, some with integer results."""

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        y = self.fc(x)
        values, where = y.max(-1)
        low = torch.logsumexp(y, -1, keepdim=True)
        y = y - low + y.std(1, keepdim=True) + torch.linalg.vector_norm(y, dim=-1, keepdim=True)
        return x + 0.1 * y, values, where


@kind("stop_gradient")
class Stop(Plain):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.fc(x).norm()
        with torch.enable_grad():
            return x + self.fc(x.detach()) / (1 + scale)


@kind("early_exit")
class Auxiliary(Plain):
    """A head that only another output uses."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.head = nn.Linear(dim, 3)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.fc(x), self.head(x)


@kind("hooks")
class Hooked(Plain):
    """Hooks of modules and of activations, as they stand before the model is compiled."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.fc.register_forward_hook(lambda module, args, out: out * 1.5)
        self.fc.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.fc(x)
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        return x + y


@kind("cast")
class Cast(Plain):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.fc(x).float().softmax(-1).to(x.dtype)
        return x + y + ids[..., None].to(x.dtype) * 0.01


@kind("same_object")
class Same(Block):
    """Returns its input itself."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.fc = nn.Linear(dim, dim)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.fc(x)


@kind("vmap")
class Mapped(Plain):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + torch.vmap(lambda row: self.fc(row).softmax(-1))(x)


@kind("functional")
class Functional(Plain):
    """A submodule called with other values than its own, made of them."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        params = {name: value * 0.5 for name, value in self.fc.named_parameters()}
        return x + torch.func.functional_call(self.fc, params, (x,))


@kind("loop")
class Loop(Plain):
    """The same matrix in a loop, with an early product of two parameters."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        square = self.fc.weight @ self.fc.weight.t() * 0.1
        y = x
        for _ in range(3):
            y = torch.tanh(y @ square + self.fc.bias)
        return x + y


@kind("penalty")
class Penalty(Plain):
    """A term of the loss that parameters alone make."""

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        return x + self.fc(x), sum(p.square().sum() for p in self.parameters()) * 0.1


@kind("linear_algebra")
class Algebra(Plain):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        a = self.fc.weight @ self.fc.weight.t() + torch.eye(self.dim, dtype=x.dtype)
        return x + torch.linalg.solve(a, x.mT).mT * 0.3 + torch.linalg.cholesky(a).sum() * 0.01


@kind("keyword")
class Keyword(Plain):
    """A submodule called by keywords, with an argument that is None."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.part = _Part(dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        result = self.part(hidden={"x": self.fc(x), "more": [x]}, mask=None, scale=0.5)
        return x + result["y"]


class _Part(Block):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.weight = weights(dim, dim)

    def forward(self, *, hidden, mask, scale):
        assert mask is None
        return {"y": (hidden["x"] @ self.weight + hidden["more"][0]) * scale, "unused": 3}

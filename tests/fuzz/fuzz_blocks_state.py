"""Kinds of blocks with parameters and buffers of unusual shapes, dtypes and uses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from fuzz_blocks import VOCAB, Block, kind
from torch import Tensor, nn


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.3)


@kind("odd_shapes")
class OddShapes(Block):
    """No dims, one element, one row, and rows that two ranks do not divide."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.scalar = nn.Parameter(torch.tensor(0.7))
        self.one = weights(1)
        self.row = weights(1, dim)
        self.odd = weights(5, dim)
        self.deep = weights(3, 1, 2, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = (x @ self.odd.t()).tanh() @ self.odd
        return x * self.scalar + self.one * self.row + y + self.deep.sum()


@kind("empty")
class Empty(Block):
    """Parameters without elements."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.none = nn.Parameter(torch.empty(0, dim))
        self.flat = nn.Parameter(torch.empty(dim, 0))
        self.scale = weights(dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x * self.scale + self.none.sum(0) + self.flat.sum()


@kind("frozen")
class Frozen(Block):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.base = nn.Linear(dim, dim)
        self.base.requires_grad_(False)
        self.down, self.up = nn.Linear(dim, 2, bias=False), nn.Linear(2, dim, bias=False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.base(x) + self.up(self.down(x))


@kind("all_frozen")
class AllFrozen(Block):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.fc = nn.Linear(dim, dim).requires_grad_(False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.fc(x).tanh()


@kind("tied")
class Tied(Block):
    """One matrix as embedding and head."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.embed = nn.Embedding(VOCAB, dim)
        self.head = nn.Linear(dim, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        y = x + self.embed(ids) * 0.3
        return y, F.cross_entropy(self.head(y).flatten(0, 1), ids.flatten())


@kind("shared")
class Shared(Block):
    """One module under two names, called under both."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.first = nn.Linear(dim, dim)
        self.norm = nn.LayerNorm(dim)
        self.second = self.first

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.second(self.norm(self.first(x)).tanh())


@kind("parameter_lists")
class Lists(Block):
    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.scales = nn.ParameterList([weights(dim), weights(1), weights(dim, dim)])
        self.named = nn.ParameterDict({"a": weights(dim), "b": weights(dim)})

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        stacked = torch.stack([self.named["a"], self.named["b"]]).mean(0)
        return x * self.scales[0] + self.scales[1] + x @ self.scales[2] * stacked


@kind("counter")
class Counter(Block):
    """Integer, boolean and float buffers; written in forward, and one not in the state dict."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.fc = nn.Linear(dim, dim)
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("mean", torch.zeros(dim))
        self.register_buffer("last", torch.zeros(dim), persistent=False)
        self.register_buffer("flags", torch.tensor([True, False]))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.fc(x)
        if self.training:
            self.calls += 1
            self.mean.lerp_(y.detach().mean((0, 1)), 0.1)
            self.last.copy_(y[0, 0].detach())
        return x + y * (1 + 0.01 * self.calls) - self.mean + self.flags.sum() * 0.1


@kind("read_buffers")
class ReadBuffers(Block):
    """Buffers that are only read, one of which has other names."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.fc = nn.Linear(dim, dim)
        self.register_buffer("shift", torch.linspace(0, 1, dim))
        self.register_buffer("again", self.shift)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.fc(x) * self.shift.to(x.dtype) + self.again.to(x.dtype).sum()


@kind("teacher")
class Teacher(Block):
    """A moving average of a parameter in a buffer, written in forward."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.fc = nn.Linear(dim, dim)
        self.register_buffer("slow", self.fc.weight.detach().clone())

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = self.fc(x)
        with torch.no_grad():
            self.slow.mul_(0.9).add_(self.fc.weight, alpha=0.1)
            target = x @ self.slow.t()
        return x + y - 0.1 * target


@kind("two_dtypes")
class TwoDtypes(Block):
    """A float32 layer in a model of any dtype."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.fc = nn.Linear(dim, dim)
        self.low = nn.Linear(dim, dim)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self.low.float()
        return self

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.fc(x) + self.low(x.float()).to(x.dtype)


@kind("integers")
class Integers(Block):
    """Integer parameters that need no gradient, as quantized weights have."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.codes = nn.Parameter(torch.randint(-8, 8, (dim, dim), dtype=torch.int8), False)
        self.scale = weights(dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + (x @ self.codes.to(x.dtype)) * 0.05 * self.scale


@kind("complex")
class Complex(Block):
    """A complex parameter, a spectrum and a rotation by complex numbers."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.filter = nn.Parameter(torch.randn(dim // 2 + 1, 2) * 0.3)
        self.angle = weights(dim // 2)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        spectrum = torch.fft.rfft(x, dim=-1, norm="ortho") * torch.view_as_complex(self.filter)
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
        rotated = pairs * torch.polar(torch.ones_like(self.angle), self.angle)
        y = torch.fft.irfft(spectrum, n=self.dim, dim=-1, norm="ortho")
        return x + y + torch.view_as_real(rotated).flatten(-2)


@kind("unused")
class Unused(Block):
    """A submodule that is never called, and a parameter that nothing reads."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.fc = nn.Linear(dim, dim)
        self.never = nn.Linear(dim, dim)
        self.idle = weights(dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.fc(x)


@kind("no_parameters")
class Nothing(Block):
    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x.tanh()


@kind("pieces")
class Pieces(Block):
    """Rows, columns and views of one parameter, each used for something else."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.weight = weights(3 * dim, dim)
        self.bias = weights(2 * dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = self.weight.split(self.dim)
        y = F.linear(x, q, self.bias[: self.dim]) * F.linear(x, k).sigmoid()
        return x + y @ v.t() + self.bias.view(2, -1)[1] + self.weight[::2].diagonal()


@kind("nested")
class Nested(Block):
    """A block in a block, with parameters between."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.before = nn.Linear(dim, dim)
        self.inner = Frozen(dim)
        self.after = nn.Linear(dim, dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.after(self.inner(self.before(x), ids).relu())


@kind("shows_weights")
class ShowsWeights(Block):
    """Returns a parameter, a view of one and a buffer."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.fc = nn.Linear(dim, dim)
        self.register_buffer("shift", torch.ones(dim))

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, ...]:
        return x + self.fc(x), self.fc.bias, self.fc.weight.t(), self.shift

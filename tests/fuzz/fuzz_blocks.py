"""Kinds of blocks: layers as models have them, and parameters and buffers of unusual kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 11

AGAIN = "again"
"""In place of a kind: the block before stands in the row twice."""

KINDS: dict[str, type[Block]] = {}
"""By name. A block takes `(B, T, D)` and ids `(B, T)`; it returns `(B, T, D)`, or that and more."""


class Block(nn.Module):
    """Base of all blocks, so that a policy may name it.

    mixes: whether `fully_shard` computes it in mixed precision by the same rules.
    """

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim


def matrix(dim: int) -> dict[str, Any]:
    """The parts of a block with one matrix."""
    return {"fc": nn.Linear(dim, dim)}


def kind(
    parts: Callable[[int], dict[str, Any]] = matrix, *, mixes: bool = False, name: str = ""
) -> Callable[[Callable[..., Any]], type[Block]]:
    """A kind whose forward is the function below, of a block, x and ids.

    parts: what a block of a width has: modules, parameters, tensors as its buffers, and values.
    name: of the kind; that of the function if left out.
    """

    def add(forward: Callable[..., Any]) -> type[Block]:
        class Made(Block):
            def __init__(self, dim: int) -> None:
                super().__init__(dim)
                for key, part in parts(dim).items():
                    if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                        self.register_buffer(key, part)
                    else:
                        setattr(self, key, part)

        Made.forward = forward  # type: ignore[method-assign]
        Made.mixes = mixes
        return named(name or forward.__name__, Made)

    return add


def named(name: str, block: type[Block]) -> type[Block]:
    """Add a class to `KINDS`."""
    assert name not in KINDS
    block.__name__ = name
    KINDS[name] = block
    return block


def weights(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.3)


# -- one layer, whose result is added -------------------------------------------------------------


def _layer(self, x, ids):
    return x + self.layer(x)


def _on_channels(self, x, ids):
    return x + self.layer(x.transpose(1, 2)).transpose(1, 2)


def _recurrent(self, x, ids):
    return x + self.layer(x)[0]


def layer(
    name: str,
    make: Callable[[int], nn.Module],
    forward: Callable[..., Any] = _layer,
    *,
    mixes: bool = True,
) -> None:
    kind(lambda dim: {"layer": make(dim)}, mixes=mixes, name=name)(forward)


norms = nn.utils.parametrizations

layer("linear", lambda d: nn.Linear(d, d))
layer("no_bias", lambda d: nn.Linear(d, d, bias=False))
layer("mlp", lambda d: nn.Sequential(nn.Linear(d, 2 * d + 1), nn.GELU(), nn.Linear(2 * d + 1, d)))
layer("silu", lambda d: nn.Sequential(nn.Linear(d, 3), nn.SiLU(), nn.Linear(3, d)))
layer("layer_norm", nn.LayerNorm)
layer("norm_without_weights", lambda d: nn.LayerNorm(d, elementwise_affine=False))
layer("rms_norm", nn.RMSNorm)
layer("prelu", lambda d: nn.PReLU())
layer("dropout", lambda d: nn.Sequential(nn.Linear(d, d), nn.Dropout(0.3)), mixes=False)
layer("inplace_relu", lambda d: nn.Sequential(nn.Linear(d, d), nn.ReLU(inplace=True)))
layer("weight_norm", lambda d: norms.weight_norm(nn.Linear(d, d)), mixes=False)
layer("spectral_norm", lambda d: norms.spectral_norm(nn.Linear(d, d)), mixes=False)
layer("adaptive_pool", lambda d: nn.Sequential(nn.AdaptiveAvgPool1d(d), nn.Linear(d, d)))
layer("conv1d", lambda d: nn.Conv1d(d, d, 3, padding=1), _on_channels)
layer("depthwise", lambda d: nn.Conv1d(d, d, 3, padding="same", groups=d), _on_channels)
layer("transposed_conv", lambda d: nn.ConvTranspose1d(d, d, 3, padding=1), _on_channels)
layer("group_norm", lambda d: nn.GroupNorm(2, d), _on_channels)
layer("instance_norm", lambda d: nn.InstanceNorm1d(d, affine=True), _on_channels)
layer(
    "tracked_instance_norm",
    lambda d: nn.InstanceNorm1d(d, affine=True, track_running_stats=True),
    _on_channels,
    mixes=False,
)
layer("batch_norm_view", nn.BatchNorm1d, _on_channels, mixes=False)
layer(
    "dropout1d",
    lambda d: nn.Sequential(nn.Conv1d(d, d, 1), nn.Dropout1d(0.3)),
    _on_channels,
    mixes=False,
)


# -- layers as models have them -------------------------------------------------------------------


@kind(lambda d: {"fc": nn.Linear(d, d), "norm": nn.BatchNorm1d(d)})
def batch_norm(self, x, ids):
    return x + self.norm(self.fc(x).flatten(0, 1)).view_as(x)


@kind(
    lambda d: {
        "conv": nn.Conv2d(1, 3, 3, padding=1, bias=False).to(memory_format=torch.channels_last),
        "norm": nn.BatchNorm2d(3),
        "back": nn.Conv2d(3, 1, 1),
    }
)
def conv2d(self, x, ids):
    return x + self.back(torch.relu(self.norm(self.conv(x[:, None]))))[:, 0]


@kind(lambda d: {"conv": nn.Conv1d(d, d, 1)}, mixes=True)
def interpolate(self, x, ids):
    y = F.interpolate(self.conv(x.mT), scale_factor=2.0, mode="linear")
    return x + F.avg_pool1d(y, 2).mT


# It does not mix: without gradients eager takes one fused operator, which rounds differently.
@kind(lambda d: {"attend": nn.MultiheadAttention(d, 2, batch_first=True)})
def mha(self, x, ids):
    return x + self.attend(x, x, x, need_weights=False)[0]


@kind(
    lambda d: {
        "attend": nn.MultiheadAttention(
            d, 2, kdim=d, vdim=d, add_bias_kv=True, batch_first=True, dropout=0.2
        )
    }
)
def mha_weights(self, x, ids):
    y, attention = self.attend(x, x, x, key_padding_mask=ids == 0)
    return x + y, attention


@kind(lambda d: {"qkv": nn.Linear(d, 3 * d)}, mixes=True)
def sdpa(self, x, ids):
    q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return x + y.transpose(1, 2).flatten(2)


@kind(lambda d: {"q": nn.Linear(d, d), "kv": nn.Linear(d, 2 * d, bias=False)})
def sdpa_mask(self, x, ids):
    k, v = self.kv(x).chunk(2, -1)
    mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() | (ids == 1)[:, None]
    return x + F.scaled_dot_product_attention(self.q(x), k, v, mask, dropout_p=0.1)


@kind(
    lambda d: {
        "layer": nn.TransformerEncoderLayer(d, 2, d + 3, 0.1, batch_first=True, norm_first=d == 8)
    }
)
def encoder_layer(self, x, ids):
    return self.layer(x)


@kind(lambda d: {"embed": nn.Embedding(VOCAB, d, padding_idx=0)}, mixes=True)
def embedding(self, x, ids):
    return x + self.embed(ids)


@kind(lambda d: {"bag": nn.EmbeddingBag(VOCAB, d, mode="mean")})
def embedding_bag(self, x, ids):
    return x + self.bag(ids)[:, None]


@kind(lambda d: {"pair": nn.Bilinear(d, d, d)}, mixes=True)
def bilinear(self, x, ids):
    return x + 0.2 * torch.tanh(self.pair(x, x.roll(1, 1)))


layer("lstm", lambda d: nn.LSTM(d, d, batch_first=True), _recurrent, mixes=False)
layer(
    "lstm_two_ways",
    lambda d: nn.LSTM(d, d // 2, 2, batch_first=True, bidirectional=True, dropout=0.2),
    _recurrent,
    mixes=False,
)
layer("gru", lambda d: nn.GRU(d, d, batch_first=True), _recurrent, mixes=False)
layer(
    "rnn",
    lambda d: nn.RNN(d, d, 2, batch_first=True, nonlinearity="relu"),
    _recurrent,
    mixes=False,
)


@kind(lambda d: {"cell": nn.LSTMCell(d, d)})
def lstm_cell(self, x, ids):
    h = c = x.new_zeros(x.shape[0], self.dim)
    steps = []
    for part in x.unbind(1):
        h, c = self.cell(part, (h, c))
        steps.append(h)
    return x + torch.stack(steps, 1)


@kind(
    lambda d: {
        "gate": nn.Linear(d, 3, bias=False),
        "up": weights(3, d, 5),
        "down": weights(3, 5, d),
    }
)
def experts(self, x, ids):
    """Every expert on every token, weighted by a gate that keeps the best two."""
    scores = self.gate(x).softmax(-1)
    top, index = scores.topk(2, -1)
    gate = torch.zeros_like(scores).scatter(-1, index, top)
    hidden = torch.einsum("btd,edh->beth", x, self.up).relu()
    y = torch.einsum("beth,ehd,bte->btd", hidden, self.down, gate)
    return x + y, scores.mean((0, 1)).square().sum()


@kind(
    lambda d: {
        "gate": nn.Linear(d, 3),
        "experts": nn.ModuleList(nn.Linear(d, d) for _ in range(4)),
    }
)
def masked_experts(self, x, ids):
    """Experts as modules, each added where a mask chose it; the last one is never chosen."""
    scores = self.gate(x).softmax(-1)
    best = scores.argmax(-1, keepdim=True)
    y = torch.zeros_like(x)
    for index, expert in enumerate(self.experts[:3]):
        chosen = torch.where(best == index, scores[..., index : index + 1], 0)
        y = y + expert(x).masked_fill(best != index, 0) * chosen
    return x + y


# -- parameters and buffers of unusual shapes, dtypes and uses ------------------------------------


@kind(
    lambda d: {
        "scalar": nn.Parameter(torch.tensor(0.7)),
        "one": weights(1),
        "row": weights(1, d),
        "odd": weights(5, d),
        "deep": weights(3, 1, 2, 1),
    }
)
def odd_shapes(self, x, ids):
    """No dims, one element, one row, and rows that two ranks do not divide."""
    y = (x @ self.odd.t()).tanh() @ self.odd
    return x * self.scalar + self.one * self.row + y + self.deep.sum()


@kind(
    lambda d: {
        "none": nn.Parameter(torch.empty(0, d)),
        "flat": nn.Parameter(torch.empty(d, 0)),
        "scale": weights(d),
    }
)
def empty(self, x, ids):
    """Parameters without elements."""
    return x * self.scale + self.none.sum(0) + self.flat.sum()


@kind(
    lambda d: {
        "base": nn.Linear(d, d).requires_grad_(False),
        "down": nn.Linear(d, 2, bias=False),
        "up": nn.Linear(2, d, bias=False),
    },
    mixes=True,
)
def frozen(self, x, ids):
    return x + self.base(x) + self.up(self.down(x))


@kind(lambda d: {"fc": nn.Linear(d, d).requires_grad_(False)}, mixes=True)
def all_frozen(self, x, ids):
    return x + self.fc(x).tanh()


def _tied(dim: int) -> dict[str, Any]:
    embed, head = nn.Embedding(VOCAB, dim), nn.Linear(dim, VOCAB, bias=False)
    head.weight = embed.weight
    return {"embed": embed, "head": head}


@kind(_tied)
def tied(self, x, ids):
    """One matrix as embedding and head."""
    y = x + self.embed(ids) * 0.3
    return y, F.cross_entropy(self.head(y).flatten(0, 1), ids.flatten())


def _shared(dim: int) -> dict[str, Any]:
    fc = nn.Linear(dim, dim)
    return {"first": fc, "norm": nn.LayerNorm(dim), "second": fc}


@kind(_shared)
def shared(self, x, ids):
    """One module under two names, called under both."""
    return x + self.second(self.norm(self.first(x)).tanh())


@kind(
    lambda d: {
        "scales": nn.ParameterList([weights(d), weights(1), weights(d, d)]),
        "named": nn.ParameterDict({"a": weights(d), "b": weights(d)}),
    }
)
def parameter_lists(self, x, ids):
    stacked = torch.stack([self.named["a"], self.named["b"]]).mean(0)
    return x * self.scales[0] + self.scales[1] + x @ self.scales[2] * stacked


class _Counter(Block):
    """Integer, boolean and float buffers; written in forward, and one not in the state dict."""

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


named("counter", _Counter)


def _read_buffers(dim: int) -> dict[str, Any]:
    shift = torch.linspace(0, 1, dim)
    return {**matrix(dim), "shift": shift, "again": shift}


@kind(_read_buffers, mixes=True)
def read_buffers(self, x, ids):
    """Buffers that are only read, one of which has other names."""
    return x + self.fc(x) * self.shift.to(x.dtype) + self.again.to(x.dtype).sum()


def _teacher(dim: int) -> dict[str, Any]:
    fc = nn.Linear(dim, dim)
    return {"fc": fc, "slow": fc.weight.detach().clone()}


@kind(_teacher)
def teacher(self, x, ids):
    """A moving average of a parameter in a buffer, written in forward."""
    y = self.fc(x)
    with torch.no_grad():
        self.slow.mul_(0.9).add_(self.fc.weight, alpha=0.1)
        target = x @ self.slow.t()
    return x + y - 0.1 * target


class _TwoDtypes(Block):
    """A float32 layer in a model of any dtype."""

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


named("two_dtypes", _TwoDtypes)


@kind(
    lambda d: {
        "codes": nn.Parameter(torch.randint(-8, 8, (d, d), dtype=torch.int8), False),
        "scale": weights(d),
    }
)
def integers(self, x, ids):
    """Integer parameters that need no gradient, as quantized weights have."""
    return x + (x @ self.codes.to(x.dtype)) * 0.05 * self.scale


@kind(lambda d: {"filter": weights(d // 2 + 1, 2), "angle": weights(d // 2)}, name="complex")
def complex_numbers(self, x, ids):
    """A complex parameter, a spectrum and a rotation by complex numbers."""
    spectrum = torch.fft.rfft(x, dim=-1, norm="ortho") * torch.view_as_complex(self.filter)
    pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous())
    rotated = pairs * torch.polar(torch.ones_like(self.angle), self.angle)
    y = torch.fft.irfft(spectrum, n=self.dim, dim=-1, norm="ortho")
    return x + y + torch.view_as_real(rotated).flatten(-2)


@kind(lambda d: {"fc": nn.Linear(d, d), "never": nn.Linear(d, d), "idle": weights(d)}, mixes=True)
def unused(self, x, ids):
    """A submodule that is never called, and a parameter that nothing reads."""
    return x + self.fc(x)


@kind(lambda d: {}, mixes=True)
def no_parameters(self, x, ids):
    return x.tanh()


@kind(lambda d: {"weight": weights(3 * d, d), "bias": weights(2 * d)})
def pieces(self, x, ids):
    """Rows, columns and views of one parameter, each used for something else."""
    q, k, v = self.weight.split(self.dim)
    y = F.linear(x, q, self.bias[: self.dim]) * F.linear(x, k).sigmoid()
    return x + y @ v.t() + self.bias.view(2, -1)[1] + self.weight[::2].diagonal()


@kind(
    lambda d: {"before": nn.Linear(d, d), "inner": frozen(d), "after": nn.Linear(d, d)},
    mixes=True,
)
def nested(self, x, ids):
    """A block in a block, with parameters between."""
    return x + self.after(self.inner(self.before(x), ids).relu())


@kind(lambda d: {**matrix(d), "shift": torch.ones(d)})
def shows_weights(self, x, ids):
    """Returns a parameter, a view of one and a buffer."""
    return x + self.fc(x), self.fc.bias, self.fc.weight.t(), self.shift

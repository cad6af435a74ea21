"""Kinds of blocks: layers as models have them."""

from __future__ import annotations

from collections.abc import Callable

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

    mixes = True

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.dim = dim


def kind(name: str) -> Callable[[type[Block]], type[Block]]:
    """Add a class to `KINDS`."""

    def add(block: type[Block]) -> type[Block]:
        assert name not in KINDS
        KINDS[name] = block
        return block

    return add


def layer(name: str, make: Callable[[int], nn.Module], *, mixes: bool = True) -> None:
    """A kind whose block adds the result of a layer of `(B, T, D)`."""

    class Layer(Block):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.layer = make(dim)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return x + self.layer(x)

    Layer.__name__ = f"Layer_{name}"
    Layer.mixes = mixes
    kind(name)(Layer)


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
layer("weight_norm", lambda d: nn.utils.parametrizations.weight_norm(nn.Linear(d, d)), mixes=False)
layer(
    "spectral_norm",
    lambda d: nn.utils.parametrizations.spectral_norm(nn.Linear(d, d)),
    mixes=False,
)
layer("adaptive_pool", lambda d: nn.Sequential(nn.AdaptiveAvgPool1d(d), nn.Linear(d, d)))


class Channels(Block):
    """Base: applies `self.layer` to `(B, D, T)`."""

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.layer(x.transpose(1, 2)).transpose(1, 2)


def channels(name: str, make: Callable[[int], nn.Module], *, mixes: bool = True) -> None:
    """A kind whose block adds the result of a layer of `(B, D, T)`."""

    class OnChannels(Channels):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.layer = make(dim)

    OnChannels.__name__ = f"Channels_{name}"
    OnChannels.mixes = mixes
    kind(name)(OnChannels)


channels("conv1d", lambda d: nn.Conv1d(d, d, 3, padding=1))
channels("depthwise", lambda d: nn.Conv1d(d, d, 3, padding="same", groups=d))
channels("transposed_conv", lambda d: nn.ConvTranspose1d(d, d, 3, padding=1))
channels("group_norm", lambda d: nn.GroupNorm(2, d))
channels("instance_norm", lambda d: nn.InstanceNorm1d(d, affine=True))
channels(
    "tracked_instance_norm",
    lambda d: nn.InstanceNorm1d(d, affine=True, track_running_stats=True),
    mixes=False,
)
channels("batch_norm_view", nn.BatchNorm1d, mixes=False)
channels("dropout1d", lambda d: nn.Sequential(nn.Conv1d(d, d, 1), nn.Dropout1d(0.3)), mixes=False)


@kind("batch_norm")
class FlatBatchNorm(Block):
    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.fc = nn.Linear(dim, dim)
        self.norm = nn.BatchNorm1d(dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.norm(self.fc(x).flatten(0, 1)).view_as(x)


@kind("conv2d")
class Image(Block):
    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.conv = nn.Conv2d(1, 3, 3, padding=1, bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(3)
        self.back = nn.Conv2d(3, 1, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.back(torch.relu(self.norm(self.conv(x[:, None]))))[:, 0]


@kind("interpolate")
class Resampled(Block):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.conv = nn.Conv1d(dim, dim, 1)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = F.interpolate(self.conv(x.mT), scale_factor=2.0, mode="linear")
        return x + F.avg_pool1d(y, 2).mT


@kind("mha")
class Attention(Block):
    mixes = False  # without gradients eager takes one fused operator, which rounds differently

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.attend = nn.MultiheadAttention(dim, 2, batch_first=True)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.attend(x, x, x, need_weights=False)[0]


@kind("mha_weights")
class AttentionWeights(Block):
    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.attend = nn.MultiheadAttention(dim, 2, kdim=dim, vdim=dim, add_bias_kv=True,
                                            batch_first=True, dropout=0.2)  # fmt: skip

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        y, weights = self.attend(x, x, x, key_padding_mask=ids == 0)
        return x + y, weights


@kind("sdpa")
class Causal(Block):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.qkv = nn.Linear(dim, 3 * dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + y.transpose(1, 2).flatten(2)


@kind("sdpa_mask")
class Masked(Block):
    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.q, self.kv = nn.Linear(dim, dim), nn.Linear(dim, 2 * dim, bias=False)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        k, v = self.kv(x).chunk(2, -1)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril() | (ids == 1)[:, None]
        return x + F.scaled_dot_product_attention(self.q(x), k, v, mask, dropout_p=0.1)


@kind("encoder_layer")
class Encoder(Block):
    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.layer = nn.TransformerEncoderLayer(dim, 2, dim + 3, 0.1, batch_first=True,
                                                norm_first=dim == 8)  # fmt: skip

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.layer(x)


@kind("embedding")
class Embedded(Block):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.embed = nn.Embedding(VOCAB, dim, padding_idx=0)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.embed(ids)


@kind("embedding_bag")
class Bags(Block):
    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.bag = nn.EmbeddingBag(VOCAB, dim, mode="mean")

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + self.bag(ids)[:, None]


@kind("bilinear")
class Pairs(Block):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.pair = nn.Bilinear(dim, dim, dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        return x + 0.2 * torch.tanh(self.pair(x, x.roll(1, 1)))


def recurrent(name: str, make: Callable[[int], nn.Module]) -> None:
    """A kind whose block adds the output of a recurrent layer."""

    class Recurrent(Block):
        mixes = False

        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.layer = make(dim)

        def forward(self, x: Tensor, ids: Tensor) -> Tensor:
            return x + self.layer(x)[0]

    Recurrent.__name__ = f"Recurrent_{name}"
    kind(name)(Recurrent)


recurrent("lstm", lambda d: nn.LSTM(d, d, batch_first=True))
recurrent(
    "lstm_two_ways",
    lambda d: nn.LSTM(d, d // 2, 2, batch_first=True, bidirectional=True, dropout=0.2),
)
recurrent("gru", lambda d: nn.GRU(d, d, batch_first=True))
recurrent("rnn", lambda d: nn.RNN(d, d, 2, batch_first=True, nonlinearity="relu"))


@kind("lstm_cell")
class Unrolled(Block):
    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.cell = nn.LSTMCell(dim, dim)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = c = x.new_zeros(x.shape[0], self.dim)
        steps = []
        for part in x.unbind(1):
            h, c = self.cell(part, (h, c))
            steps.append(h)
        return x + torch.stack(steps, 1)


@kind("experts")
class Experts(Block):
    """Every expert on every token, weighted by a gate that keeps the best two."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.gate = nn.Linear(dim, 3, bias=False)
        self.up = nn.Parameter(torch.randn(3, dim, 5) * 0.3)
        self.down = nn.Parameter(torch.randn(3, 5, dim) * 0.3)

    def forward(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
        scores = self.gate(x).softmax(-1)
        top, index = scores.topk(2, -1)
        gate = torch.zeros_like(scores).scatter(-1, index, top)
        hidden = torch.einsum("btd,edh->beth", x, self.up).relu()
        y = torch.einsum("beth,ehd,bte->btd", hidden, self.down, gate)
        return x + y, scores.mean((0, 1)).square().sum()


@kind("masked_experts")
class MaskedExperts(Block):
    """Experts as modules, each added where a mask chose it; the last one is never chosen."""

    mixes = False

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.gate = nn.Linear(dim, 3)
        self.experts = nn.ModuleList(nn.Linear(dim, dim) for _ in range(4))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        best = scores.argmax(-1, keepdim=True)
        y = torch.zeros_like(x)
        for index, expert in enumerate(self.experts[:3]):
            chosen = torch.where(best == index, scores[..., index : index + 1], 0)
            y = y + expert(x).masked_fill(best != index, 0) * chosen
        return x + y

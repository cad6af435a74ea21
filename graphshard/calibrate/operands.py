"""The operands that probed operators are called with: like those of a training step.

A function makes them of a `Draw` and a size: elements of the largest, or what the name of its
argument says.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


Operands = tuple[Any, ...]


Make = Callable[["Draw", int], Operands]


_POOL = 1 << 24
"""Elements of a pool on a CPU; the largest operand has half of them."""


class Draw:
    """Makes operands of one dtype on one device: parts of one pool of random numbers.

    Each part begins where the last one ended, so that what is made one after the other lies apart,
    and many operands take no more memory than the pool. They are only to be read.

    Args:
        dtype: of what is drawn.
        device: where.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        numel = _POOL if device.type == "cpu" else 16 * _POOL
        self._pool = torch.randn(numel, device=device).to(dtype)
        self._next = 0

    def __call__(self, *shape: int) -> Tensor:
        """Random numbers, `shape`, contiguous."""
        count = prod(shape)
        if self._next + count > self._pool.numel():
            self._next = 0
        part = self._pool[self._next : self._next + count].view(shape)
        self._next += -(-count // 64) * 64
        return part

    def like(self, tensor: Tensor) -> Tensor:
        """Random numbers of its shape, contiguous."""
        return self(*tensor.shape)

    def indices(self, count: int, below: int) -> Tensor:
        """Random int64 indices, `(count,)`."""
        return torch.randint(below, (count,), device=self.device)


_WIDTH = 512


_HEADS, _HEAD = 8, 64


def _rows(draw: Draw, numel: int) -> Tensor:
    """Activations, `(tokens, width)`."""
    width = min(_WIDTH, numel)
    return draw(numel // width, width)


def pair(draw: Draw, numel: int) -> Operands:
    """Two of the same shape."""
    return _rows(draw, numel), _rows(draw, numel)


def single(*rest: Any) -> Make:
    """One, and `rest`."""
    return lambda draw, numel: (_rows(draw, numel), *rest)


def _by_head(draw: Draw, numel: int) -> Tensor:
    """Queries as attention has them, `(batch, heads, tokens, head)`, strided."""
    tokens = max(1, numel // (_HEADS * _HEAD))
    return draw(1, tokens, _HEADS, _HEAD).transpose(1, 2)


def product(transposed: int) -> Make:
    """Square operands, as forward (right one transposed), or the two products of backward."""

    def make(draw: Draw, n: int) -> Operands:
        left, right = draw(n, n), draw(n, n)
        return (left.t() if transposed == 1 else left, right.t() if transposed == 2 else right)

    return make


def products(draw: Draw, n: int) -> Operands:
    """Scores of `n` heads of 128 tokens."""
    return draw(n, 128, _HEAD), draw(n, _HEAD, 128)


def grouped(transposed: bool) -> Make:
    """Tokens over 8 experts, `(tokens, width)` by `(8, width, width)`."""

    def make(draw: Draw, tokens: int) -> Operands:
        experts = draw(8, _WIDTH, 256).transpose(1, 2) if transposed else draw(8, 256, _WIDTH)
        return draw(tokens, 256), experts, _ends(draw, tokens)

    return make


def grouped_weights(draw: Draw, tokens: int) -> Operands:
    """The experts' gradients: tokens by tokens, group by group."""
    return draw(tokens, 256).t(), draw(tokens, _WIDTH), _ends(draw, tokens)


def _ends(draw: Draw, tokens: int) -> Tensor:
    return torch.arange(1, 9, device=draw.device, dtype=torch.int32) * (tokens // 8)


def _heads(draw: Draw, tokens: int) -> list[Tensor]:
    return [draw(1, tokens, _HEADS, _HEAD).transpose(1, 2) for _ in range(3)]


def attention(causal: bool) -> Make:
    """Query, key and value, and what scaled dot-product attention is told."""
    return lambda draw, tokens: (*_heads(draw, tokens), 0.0, causal)


def attention_backward(causal: bool) -> Make:
    """What its backward reads, as the CPU's kernel gives it."""

    def make(draw: Draw, tokens: int) -> Operands:
        q, k, v = _heads(draw, tokens)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return draw.like(out), q, k, v, out, lse, 0.0, causal

    return make


def cuda_attention_backward(causal: bool) -> Make:
    """What its backward reads, as the accelerator's kernel gives it."""

    def make(draw: Draw, tokens: int) -> Operands:
        q, k, v = _heads(draw, tokens)
        made = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset = made[:8]
        grad = draw.like(out)
        return (grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)

    return make


def images(window: int, group_width: int = 0, stride: int = 1) -> Make:
    """Images and filters of a stage of a pyramid: 64 channels of 56 x 56 pixels to 512 of 7 x 7.

    A size is `4 * batch + stage`; 0 is one pixel, as where channels are weighed.
    """

    def make(draw: Draw, size: int) -> Operands:
        batch, stage = divmod(size, 4)
        channels, side = (64 << stage, 56 >> stage) if batch else (64, 1)
        groups = channels // group_width if group_width else 1
        images = draw(max(1, batch), channels, side, side)
        filters = draw(channels, channels // groups, window, window)
        half = window // 2
        return (
            images, filters, None, [stride, stride], [half, half], [1, 1], False, [0, 0], groups
        )  # fmt: skip

    return make


def images_backward(*kind: int) -> Make:
    """What the backward of a convolution of `images` reads."""
    forward = images(*kind)

    def make(draw: Draw, size: int) -> Operands:
        images, filters, _, *rest = forward(draw, size)
        grad = draw.like(aten.convolution(images, filters, None, *rest))
        return grad, images, filters, None, *rest, [True, True, False]

    return make


def normed(draw: Draw, numel: int) -> Operands:
    """A layer norm's."""
    x = _rows(draw, numel)
    scale = draw(x.shape[1])
    return x, [x.shape[1]], scale, scale, 1e-5


def normed_backward(draw: Draw, numel: int) -> Operands:
    """Those of a layer norm's backward."""
    x, shape, scale, bias, epsilon = normed(draw, numel)
    _, mean, deviation = aten.native_layer_norm(x, shape, scale, bias, epsilon)
    return draw.like(x), x, shape, mean, deviation, scale, bias, [True, True, True]


def _batch(draw: Draw, numel: int) -> Tensor:
    """Feature maps, `(4, channels, 16, 16)`."""
    return draw(4, max(1, numel // 1024), 16, 16)


def batch_normed(draw: Draw, numel: int) -> Operands:
    """A batch norm's, in training."""
    x = _batch(draw, numel)
    ones = torch.ones(x.shape[1], device=draw.device)
    return x, ones, ones, ones.clone(), ones.clone(), True, 0.1, 1e-5


def batch_normed_backward(draw: Draw, numel: int) -> Operands:
    """Those of a batch norm's backward."""
    x, scale, _, mean, variance, train, _, epsilon = batch_normed(draw, numel)
    grad = draw.like(x)
    return grad, x, scale, mean, variance, mean, variance, train, epsilon, [True, True, True]


def softmax_backward(draw: Draw, numel: int) -> Operands:
    """Those of a softmax's backward."""
    x = _rows(draw, numel)
    return draw.like(x), x.softmax(-1), -1, draw.dtype


def dropped(draw: Draw, numel: int) -> Operands:
    """Those of a dropout's backward."""
    grad = _rows(draw, numel)
    return grad, torch.rand_like(grad, dtype=torch.float32) < 0.9, 1.1


def picked(draw: Draw, numel: int) -> Operands:
    """An embedding's."""
    rows = max(1, numel // _WIDTH)
    return draw(2048, min(_WIDTH, numel)), draw.indices(rows, 2048)


def indexed(draw: Draw, numel: int) -> Operands:
    """An index's."""
    table, rows = picked(draw, numel)
    return table, [rows]


def put(draw: Draw, numel: int) -> Operands:
    """An index_put's, of rows in another order."""
    x = _rows(draw, numel)
    return x, [torch.randperm(len(x), device=draw.device)], draw.like(x)


def embedded_backward(draw: Draw, numel: int) -> Operands:
    """Those of an embedding's backward."""
    rows = max(1, numel // _WIDTH)
    return draw(rows, min(_WIDTH, numel)), draw.indices(rows, rows), rows, -1, False


def rotated(draw: Draw, numel: int) -> Operands:
    """LoweredGraph of each head by its position's angle, as rotary embeddings multiply."""
    x = _by_head(draw, 2 * numel)[..., : _HEAD // 2]
    return x, draw(x.shape[2], _HEAD // 2)


def joined(draw: Draw, numel: int) -> Operands:
    """A cat's: two halves, as rotary embeddings join them."""
    return [_by_head(draw, numel // 2), _by_head(draw, numel // 2)], -1


def sliced_back(draw: Draw, numel: int) -> Operands:
    """Those of a slice's backward."""
    x = _rows(draw, numel // 2)
    return x, [2 * x.shape[0], x.shape[1]], 0, 0, x.shape[0], 1


def moved_heads(draw: Draw, numel: int) -> Operands:
    """Activations by head, not contiguous."""
    return (_by_head(draw, numel),)


def pooled(draw: Draw, numel: int) -> Operands:
    """A max pool's."""
    return _batch(draw, numel), [3, 3], [2, 2], [1, 1]


def pooled_backward(draw: Draw, numel: int) -> Operands:
    """Those of a max pool's backward."""
    x, window, step, pad = pooled(draw, numel)
    out, where = aten.max_pool2d_with_indices(x, window, step, pad)
    return draw.like(out), x, window, step, pad, [1, 1], False, where

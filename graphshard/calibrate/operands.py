"""Operands for the measured operators, like those of a training step.

Each function makes them from an `OperandFactory` and a size: the number of elements of the largest
operand (`numel`), or what the parameter's name says (`tokens`, `n`).
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


Operands = tuple[Any, ...]


MakeOperands = Callable[["OperandFactory", int], Operands]


_POOL = 1 << 24
"""Elements of the pool on a CPU; the largest operand has half as many."""


class OperandFactory:
    """Makes read-only random operands of one dtype on one device, as views of one pool.

    Each view begins where the last one ended, so that successive operands do not overlap, and many
    operands need no more memory than the pool.

    Args:
        dtype: of the operands.
        device: of the operands.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self.dtype, self.device = dtype, device
        numel = _POOL if device.type == "cpu" else 16 * _POOL
        self._pool = torch.randn(numel, device=device).to(dtype)
        self._next = 0

    def __call__(self, *shape: int) -> Tensor:
        """Return a contiguous tensor of random numbers with this shape."""
        count = prod(shape)
        if self._next + count > self._pool.numel():
            self._next = 0
        operand = self._pool[self._next : self._next + count].view(shape)
        self._next += -(-count // 64) * 64
        return operand

    def like(self, tensor: Tensor) -> Tensor:
        """Return a contiguous tensor of random numbers with the shape of `tensor`."""
        return self(*tensor.shape)

    def indices(self, count: int, below: int) -> Tensor:
        """Return random int64 indices below `below`, of shape `(count,)`."""
        return torch.randint(below, (count,), device=self.device)


_WIDTH = 512


_HEADS, _HEAD = 8, 64


def _rows(draw: OperandFactory, numel: int) -> Tensor:
    """Return activations of shape `(tokens, width)`."""
    width = min(_WIDTH, numel)
    return draw(numel // width, width)


def pair(draw: OperandFactory, numel: int) -> Operands:
    """Make two operands of the same shape."""
    return _rows(draw, numel), _rows(draw, numel)


def single(*rest: Any) -> MakeOperands:
    """Make one operand, followed by the arguments `rest`."""
    return lambda draw, numel: (_rows(draw, numel), *rest)


def _by_head(draw: OperandFactory, numel: int) -> Tensor:
    """Return strided queries as in attention, of shape `(batch, heads, tokens, head)`."""
    tokens = max(1, numel // (_HEADS * _HEAD))
    return draw(1, tokens, _HEADS, _HEAD).transpose(1, 2)


def product(transposed: int) -> MakeOperands:
    """Make square matrices, the `transposed`-th one transposed (0: none).

    Forward transposes the right one; the two products of backward transpose the left one or none.
    """

    def make(draw: OperandFactory, n: int) -> Operands:
        left, right = draw(n, n), draw(n, n)
        return (left.t() if transposed == 1 else left, right.t() if transposed == 2 else right)

    return make


def products(draw: OperandFactory, n: int) -> Operands:
    """Make the operands of the scores of `n` heads of 128 tokens."""
    return draw(n, 128, _HEAD), draw(n, _HEAD, 128)


def grouped(transposed: bool) -> MakeOperands:
    """Make tokens for 8 experts: `(tokens, width)` by `(8, width, width)`."""

    def make(draw: OperandFactory, tokens: int) -> Operands:
        experts = draw(8, _WIDTH, 256).transpose(1, 2) if transposed else draw(8, 256, _WIDTH)
        return draw(tokens, 256), experts, _ends(draw, tokens)

    return make


def grouped_weights(draw: OperandFactory, tokens: int) -> Operands:
    """Make the operands of the experts' weight gradients: tokens by tokens, in groups."""
    return draw(tokens, 256).t(), draw(tokens, _WIDTH), _ends(draw, tokens)


def _ends(draw: OperandFactory, tokens: int) -> Tensor:
    return torch.arange(1, 9, device=draw.device, dtype=torch.int32) * (tokens // 8)


def _heads(draw: OperandFactory, tokens: int) -> list[Tensor]:
    return [draw(1, tokens, _HEADS, _HEAD).transpose(1, 2) for _ in range(3)]


def attention(causal: bool) -> MakeOperands:
    """Make query, key and value, and the other arguments of scaled dot-product attention."""
    return lambda draw, tokens: (*_heads(draw, tokens), 0.0, causal)


def attention_backward(causal: bool) -> MakeOperands:
    """Make the operands of attention's backward, with the results of the CPU's kernel."""

    def make(draw: OperandFactory, tokens: int) -> Operands:
        q, k, v = _heads(draw, tokens)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return draw.like(out), q, k, v, out, lse, 0.0, causal

    return make


def cuda_attention_backward(causal: bool) -> MakeOperands:
    """Make the operands of attention's backward, with the results of the accelerator's kernel."""

    def make(draw: OperandFactory, tokens: int) -> Operands:
        q, k, v = _heads(draw, tokens)
        results = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset = results[:8]
        grad = draw.like(out)
        return (grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)

    return make


def images(window: int, group_width: int = 0, stride: int = 1) -> MakeOperands:
    """Make images and filters of a ResNet stage, from 64 channels of 56 x 56 to 512 of 7 x 7.

    The size is `4 * batch + stage`; size 0 is a single pixel, as in squeeze-and-excitation.
    """

    def make(draw: OperandFactory, size: int) -> Operands:
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


def images_backward(*kind: int) -> MakeOperands:
    """Make the operands of the backward of a convolution of `images`."""
    forward = images(*kind)

    def make(draw: OperandFactory, size: int) -> Operands:
        images, filters, _, *rest = forward(draw, size)
        grad = draw.like(aten.convolution(images, filters, None, *rest))
        return grad, images, filters, None, *rest, [True, True, False]

    return make


def normed(draw: OperandFactory, numel: int) -> Operands:
    """Make the operands of a layer norm."""
    x = _rows(draw, numel)
    scale = draw(x.shape[1])
    return x, [x.shape[1]], scale, scale, 1e-5


def normed_backward(draw: OperandFactory, numel: int) -> Operands:
    """Make the operands of a layer norm's backward."""
    x, shape, scale, bias, epsilon = normed(draw, numel)
    _, mean, deviation = aten.native_layer_norm(x, shape, scale, bias, epsilon)
    return draw.like(x), x, shape, mean, deviation, scale, bias, [True, True, True]


def _batch(draw: OperandFactory, numel: int) -> Tensor:
    """Return feature maps of shape `(4, channels, 16, 16)`."""
    return draw(4, max(1, numel // 1024), 16, 16)


def batch_normed(draw: OperandFactory, numel: int) -> Operands:
    """Make the operands of a batch norm in training mode."""
    x = _batch(draw, numel)
    ones = torch.ones(x.shape[1], device=draw.device)
    return x, ones, ones, ones.clone(), ones.clone(), True, 0.1, 1e-5


def batch_normed_backward(draw: OperandFactory, numel: int) -> Operands:
    """Make the operands of a batch norm's backward."""
    x, scale, _, mean, variance, train, _, epsilon = batch_normed(draw, numel)
    grad = draw.like(x)
    return grad, x, scale, mean, variance, mean, variance, train, epsilon, [True, True, True]


def softmax_backward(draw: OperandFactory, numel: int) -> Operands:
    """Make the operands of a softmax's backward."""
    x = _rows(draw, numel)
    return draw.like(x), x.softmax(-1), -1, draw.dtype


def dropped(draw: OperandFactory, numel: int) -> Operands:
    """Make the operands of a dropout's backward."""
    grad = _rows(draw, numel)
    return grad, torch.rand_like(grad, dtype=torch.float32) < 0.9, 1.1


def picked(draw: OperandFactory, numel: int) -> Operands:
    """Make the operands of an embedding."""
    rows = max(1, numel // _WIDTH)
    return draw(2048, min(_WIDTH, numel)), draw.indices(rows, 2048)


def indexed(draw: OperandFactory, numel: int) -> Operands:
    """Make the operands of an indexing."""
    table, rows = picked(draw, numel)
    return table, [rows]


def put(draw: OperandFactory, numel: int) -> Operands:
    """Make the operands of an index_put of permuted rows."""
    x = _rows(draw, numel)
    return x, [torch.randperm(len(x), device=draw.device)], draw.like(x)


def embedded_backward(draw: OperandFactory, numel: int) -> Operands:
    """Make the operands of an embedding's backward."""
    rows = max(1, numel // _WIDTH)
    return draw(rows, min(_WIDTH, numel)), draw.indices(rows, rows), rows, -1, False


def rotated(draw: OperandFactory, numel: int) -> Operands:
    """Make half of each head and the angles of its positions, as rotary embeddings multiply."""
    x = _by_head(draw, 2 * numel)[..., : _HEAD // 2]
    return x, draw(x.shape[2], _HEAD // 2)


def joined(draw: OperandFactory, numel: int) -> Operands:
    """Make two halves of heads to concatenate, as in rotary embeddings."""
    return [_by_head(draw, numel // 2), _by_head(draw, numel // 2)], -1


def sliced_back(draw: OperandFactory, numel: int) -> Operands:
    """Make the operands of a slice's backward."""
    x = _rows(draw, numel // 2)
    return x, [2 * x.shape[0], x.shape[1]], 0, 0, x.shape[0], 1


def moved_heads(draw: OperandFactory, numel: int) -> Operands:
    """Make activations by head that are not contiguous."""
    return (_by_head(draw, numel),)


def pooled(draw: OperandFactory, numel: int) -> Operands:
    """Make the operands of a max pool."""
    return _batch(draw, numel), [3, 3], [2, 2], [1, 1]


def pooled_backward(draw: OperandFactory, numel: int) -> Operands:
    """Make the operands of a max pool's backward."""
    x, window, step, pad = pooled(draw, numel)
    out, where = aten.max_pool2d_with_indices(x, window, step, pad)
    return draw.like(out), x, window, step, pad, [1, 1], False, where

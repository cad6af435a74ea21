"""The measured operators, each over a range of sizes, on operands like those of a training step.

A probe calls one operator from Python, as a lowered program does. Its amount (FLOPs, or bytes read
and written) comes from `op_cost`, as it does when a curve is looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.cost.op_cost import op_cost, tensors_in
from graphshard.hardware.hardware import dtype_name

aten = torch.ops.aten


Operands = tuple[Any, ...]


MakeOperands = Callable[["OperandFactory", int], Operands]


# -- operands --------------------------------------------------------------------------------------

# Each function makes them from an `OperandFactory` and a size: the number of elements of the
# largest operand (`numel`), or what the parameter's name says (`tokens`, `n`).

_POOL = 1 << 24
"""Elements of the pool on a CPU; the largest operand has half as many."""


class OperandFactory:
    """Makes read-only random operands of one dtype on one device, as views of one pool.

    Each view begins where the last one ended, so that successive operands do not overlap, and many
    operands need no more memory than the pool.
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


def _pair(draw: OperandFactory, numel: int) -> Operands:
    return _rows(draw, numel), _rows(draw, numel)


def _single(*rest: Any) -> MakeOperands:
    return lambda draw, numel: (_rows(draw, numel), *rest)


def _by_head(draw: OperandFactory, numel: int) -> Tensor:
    """Return strided queries as in attention, of shape `(batch, heads, tokens, head)`."""
    tokens = max(1, numel // (_HEADS * _HEAD))
    return draw(1, tokens, _HEADS, _HEAD).transpose(1, 2)


def _product(transposed: int) -> MakeOperands:
    """Make square matrices, the `transposed`-th one transposed (0: none).

    Forward transposes the right one; the two products of backward transpose the left one or none.
    """

    def make(draw: OperandFactory, n: int) -> Operands:
        left, right = draw(n, n), draw(n, n)
        return (left.t() if transposed == 1 else left, right.t() if transposed == 2 else right)

    return make


def _products(draw: OperandFactory, n: int) -> Operands:
    return draw(n, 128, _HEAD), draw(n, _HEAD, 128)


def _grouped(transposed: bool) -> MakeOperands:
    """Make tokens for 8 experts: `(tokens, width)` by `(8, width, width)`."""

    def make(draw: OperandFactory, tokens: int) -> Operands:
        experts = draw(8, _WIDTH, 256).transpose(1, 2) if transposed else draw(8, 256, _WIDTH)
        return draw(tokens, 256), experts, _ends(draw, tokens)

    return make


def _grouped_weights(draw: OperandFactory, tokens: int) -> Operands:
    return draw(tokens, 256).t(), draw(tokens, _WIDTH), _ends(draw, tokens)


def _ends(draw: OperandFactory, tokens: int) -> Tensor:
    return torch.arange(1, 9, device=draw.device, dtype=torch.int32) * (tokens // 8)


def _heads(draw: OperandFactory, tokens: int) -> list[Tensor]:
    return [draw(1, tokens, _HEADS, _HEAD).transpose(1, 2) for _ in range(3)]


def _attention(causal: bool) -> MakeOperands:
    """Make query, key and value, and the other arguments of scaled dot-product attention."""
    return lambda draw, tokens: (*_heads(draw, tokens), 0.0, causal)


def _attention_backward(causal: bool) -> MakeOperands:

    def make(draw: OperandFactory, tokens: int) -> Operands:
        q, k, v = _heads(draw, tokens)
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
        return draw.like(out), q, k, v, out, lse, 0.0, causal

    return make


def _cuda_attention_backward(causal: bool) -> MakeOperands:

    def make(draw: OperandFactory, tokens: int) -> Operands:
        q, k, v = _heads(draw, tokens)
        results = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)
        out, lse, cum_q, cum_k, max_q, max_k, seed, offset = results[:8]
        grad = draw.like(out)
        return (grad, q, k, v, out, lse, cum_q, cum_k, max_q, max_k, 0.0, causal, seed, offset)

    return make


def _images(window: int, group_width: int = 0, stride: int = 1) -> MakeOperands:
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


def _images_backward(*kind: int) -> MakeOperands:
    forward = _images(*kind)

    def make(draw: OperandFactory, size: int) -> Operands:
        images, filters, _, *rest = forward(draw, size)
        grad = draw.like(aten.convolution(images, filters, None, *rest))
        return grad, images, filters, None, *rest, [True, True, False]

    return make


def _normed(draw: OperandFactory, numel: int) -> Operands:
    x = _rows(draw, numel)
    scale = draw(x.shape[1])
    return x, [x.shape[1]], scale, scale, 1e-5


def _normed_backward(draw: OperandFactory, numel: int) -> Operands:
    x, shape, scale, bias, epsilon = _normed(draw, numel)
    _, mean, deviation = aten.native_layer_norm(x, shape, scale, bias, epsilon)
    return draw.like(x), x, shape, mean, deviation, scale, bias, [True, True, True]


def _batch(draw: OperandFactory, numel: int) -> Tensor:
    """Return feature maps of shape `(4, channels, 16, 16)`."""
    return draw(4, max(1, numel // 1024), 16, 16)


def _batch_normed(draw: OperandFactory, numel: int) -> Operands:
    x = _batch(draw, numel)
    ones = torch.ones(x.shape[1], device=draw.device)
    return x, ones, ones, ones.clone(), ones.clone(), True, 0.1, 1e-5


def _batch_normed_backward(draw: OperandFactory, numel: int) -> Operands:
    x, scale, _, mean, variance, train, _, epsilon = _batch_normed(draw, numel)
    grad = draw.like(x)
    return grad, x, scale, mean, variance, mean, variance, train, epsilon, [True, True, True]


def _softmax_backward(draw: OperandFactory, numel: int) -> Operands:
    x = _rows(draw, numel)
    return draw.like(x), x.softmax(-1), -1, draw.dtype


def _dropped(draw: OperandFactory, numel: int) -> Operands:
    grad = _rows(draw, numel)
    return grad, torch.rand_like(grad, dtype=torch.float32) < 0.9, 1.1


def _picked(draw: OperandFactory, numel: int) -> Operands:
    rows = max(1, numel // _WIDTH)
    return draw(2048, min(_WIDTH, numel)), draw.indices(rows, 2048)


def _indexed(draw: OperandFactory, numel: int) -> Operands:
    table, rows = _picked(draw, numel)
    return table, [rows]


def _put(draw: OperandFactory, numel: int) -> Operands:
    x = _rows(draw, numel)
    return x, [torch.randperm(len(x), device=draw.device)], draw.like(x)


def _embedded_backward(draw: OperandFactory, numel: int) -> Operands:
    rows = max(1, numel // _WIDTH)
    return draw(rows, min(_WIDTH, numel)), draw.indices(rows, rows), rows, -1, False


def _rotated(draw: OperandFactory, numel: int) -> Operands:
    """Make half of each head and the angles of its positions, as rotary embeddings multiply."""
    x = _by_head(draw, 2 * numel)[..., : _HEAD // 2]
    return x, draw(x.shape[2], _HEAD // 2)


def _joined(draw: OperandFactory, numel: int) -> Operands:
    return [_by_head(draw, numel // 2), _by_head(draw, numel // 2)], -1


def _sliced_back(draw: OperandFactory, numel: int) -> Operands:
    x = _rows(draw, numel // 2)
    return x, [2 * x.shape[0], x.shape[1]], 0, 0, x.shape[0], 1


def _moved_heads(draw: OperandFactory, numel: int) -> Operands:
    """Make activations by head that are not contiguous."""
    return (_by_head(draw, numel),)


def _pooled(draw: OperandFactory, numel: int) -> Operands:
    return _batch(draw, numel), [3, 3], [2, 2], [1, 1]


def _pooled_backward(draw: OperandFactory, numel: int) -> Operands:
    x, window, step, pad = _pooled(draw, numel)
    out, where = aten.max_pool2d_with_indices(x, window, step, pad)
    return draw.like(out), x, window, step, pad, [1, 1], False, where


# -- probes ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Probe:
    """An operator to measure at several sizes.

    name: of its curve. target: the operator. make: makes its operands for one of `sizes`.
    dtypes: whether it is measured in other dtypes than float32 too.
    """

    name: str
    target: Any
    make: MakeOperands
    sizes: tuple[int, ...]
    dtypes: bool = False


@dataclass(frozen=True)
class SizedProbe:
    """A probe at one size, ready to run.

    amount: FLOPs or bytes of a call. operands: sets of operands, used in turn, so that they are no
    longer in a cache than in a step. call_bytes: bytes of a call's operands and results.
    """

    curve: str
    amount: float
    target: Any
    operands: tuple[Operands, ...]
    call_bytes: int = 0
    group: str = "operators"
    wall: bool = False

    def run(self, times: int) -> None:
        """Call it `times` times, keeping as many results as there are sets of operands."""
        target, operands, count = self.target, self.operands, len(self.operands)
        results: list[Any] = [None] * count
        for turn in range(times):
            results[turn % count] = target(*operands[turn % count])


# -- the list --------------------------------------------------------------------------------------

_NUMEL = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 23)


_STAGES = (0, 4, 5, 6, 7, 16, 17, 18, 19)


_TOKENS = (16, 128, 512, 1024)


_PRODUCTS = (16, 64, 128, 256, 512, 1024)


def _probes(device: torch.device) -> Iterator[Probe]:
    # The curve is the mean of three products: forward's (weight transposed), and backward's two
    # (weight as it is, activations transposed).
    for transposed in range(3):
        sizes = _PRODUCTS if device.type == "cpu" else (*_PRODUCTS, 2048, 4096, 8192)
        yield Probe("matmul", aten.mm.default, _product(transposed), sizes, dtypes=True)
    yield Probe("bmm", aten.bmm.default, _products, (1, 8, 64, 256), dtypes=True)
    for make in (
        _grouped(transposed=False),
        _grouped(transposed=True),
        _grouped_weights,
    ):
        yield Probe("grouped_mm", aten._grouped_mm.default, make, (64, 512, 2048), dtypes=True)
    if device.type == "cuda":
        attention, backward = (
            aten._scaled_dot_product_flash_attention,
            _cuda_attention_backward,
        )
        attention_back = aten._scaled_dot_product_flash_attention_backward
    else:
        attention, backward = (
            aten._scaled_dot_product_flash_attention_for_cpu,
            _attention_backward,
        )
        attention_back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    tokens = _TOKENS if device.type == "cpu" else (*_TOKENS, 4096, 8192)
    for causal, end in ((False, ""), (True, ".causal")):
        name = f"attention{end}"
        yield Probe(name, attention.default, _attention(causal), tokens, dtypes=True)
        name = f"attention_backward{end}"
        yield Probe(name, attention_back.default, backward(causal), tokens, dtypes=True)
    for end, kind in (
        ("", (3,)),
        (".strided", (3, 0, 2)),
        (".grouped", (3, 32)),
        (".grouped.strided", (3, 32, 2)),
        (".pointwise", (1,)),
        (".pointwise.strided", (1, 0, 2)),
    ):
        yield Probe(f"convolution{end}", aten.convolution.default, _images(*kind), _STAGES)
        make, backward_op = _images_backward(*kind), aten.convolution_backward.default
        yield Probe(f"convolution_backward{end}", backward_op, make, _STAGES)
    # The largest size on a GPU exceeds its caches: the second level of an H200 has 60 MB.
    numels = _NUMEL if device.type == "cpu" else (*_NUMEL, 1 << 25)
    for name, target, make in _STREAMING:
        yield Probe(name, target, make, numels, dtypes=name in ("add", "clone"))


_STREAMING: tuple[tuple[str, Any, MakeOperands], ...] = (
    ("add", aten.add.Tensor, _pair),
    ("add.strided", aten.mul.Tensor, _rotated),
    ("clone", aten.clone.default, _single()),
    ("clone.strided", aten.clone.default, _moved_heads),
    ("cat", aten.cat.default, _joined),
    ("gelu", aten.gelu.default, _single()),
    ("gelu_backward", aten.gelu_backward.default, _pair),
    ("silu", aten.silu.default, _single()),
    ("silu_backward", aten.silu_backward.default, _pair),
    ("pow", aten.pow.Tensor_Scalar, _single(2)),
    ("sum", aten.sum.dim_IntList, _single([0], True)),
    ("_softmax", aten._softmax.default, _single(-1, False)),
    ("_safe_softmax", aten._safe_softmax.default, _single(-1)),
    ("_softmax_backward_data", aten._softmax_backward_data.default, _softmax_backward),
    ("native_layer_norm", aten.native_layer_norm.default, _normed),
    ("native_layer_norm_backward", aten.native_layer_norm_backward.default, _normed_backward),
    ("native_batch_norm", aten.native_batch_norm.default, _batch_normed),
    ("native_batch_norm_backward", aten.native_batch_norm_backward.default,
     _batch_normed_backward),
    ("native_dropout", aten.native_dropout.default, _single(0.1, True)),
    ("native_dropout_backward", aten.native_dropout_backward.default, _dropped),
    ("embedding", aten.embedding.default, _picked),
    ("embedding_dense_backward", aten.embedding_dense_backward.default, _embedded_backward),
    ("index", aten.index.Tensor, _indexed),
    ("index_put", aten.index_put.default, _put),
    ("slice_backward", aten.slice_backward.default, _sliced_back),
    ("topk", aten.topk.default, _single(2)),
    ("max_pool2d_with_indices", aten.max_pool2d_with_indices.default, _pooled),
    ("max_pool2d_with_indices_backward", aten.max_pool2d_with_indices_backward.default,
     _pooled_backward),
)  # fmt: skip


@dataclass(frozen=True)
class Cold:
    """How operands are kept out of caches.

    bytes: what calls touch before a set of operands is used again, if `most_sets` sets are enough
    for it. most_sets: sets of operands at most; no fewer than the runs of a timing, where a cache
    is emptied before each timing.
    """

    bytes: int = 16 * 2**20
    most_sets: int = 12

    def sets(self, call_bytes: int) -> int:
        """How many sets of operands there must be if one call touches `call_bytes`."""
        return max(1, min(self.most_sets, -(-self.bytes // max(1, call_bytes))))


def sized_probes(
    device: torch.device,
    dtypes: tuple[torch.dtype, ...],
    *,
    share: float = 1.0,
    cold: Cold | None = None,
) -> Iterator[SizedProbe]:
    """Yield every probe at every size in float32, and some probes in the other `dtypes`.

    These are matrix products, attention and plain copies. A `share` below 1 takes that fraction of
    each probe's sizes, smallest first, and at least two.
    """
    cold = cold or Cold()
    all_dtypes = (torch.float32, *(d for d in dtypes if d is not torch.float32))
    factories = [OperandFactory(dtype, device) for dtype in all_dtypes]
    for probe in _probes(device):
        sizes = probe.sizes[: max(2, round(share * len(probe.sizes)))]
        for draw in factories if probe.dtypes else factories[:1]:
            for size in sizes:
                sized = _at_size(probe, draw, size, cold)
                if sized is not None:
                    yield sized


def _at_size(probe: Probe, draw: OperandFactory, size: int, cold: Cold) -> SizedProbe | None:
    """Return the probe at one size; None if the device has no kernel for it."""
    try:
        first = probe.make(draw, size)
        result = probe.target(*first)
    except torch.OutOfMemoryError:
        raise
    except (NotImplementedError, RuntimeError):
        return None
    end = "" if draw.dtype is torch.float32 else f".{dtype_name(draw.dtype)}"
    call_bytes = sum(t.nbytes for t in tensors_in((first, result)))
    operands = (first, *(probe.make(draw, size) for _ in range(cold.sets(call_bytes) - 1)))
    amount = amount_of(probe.target, first, result)
    return SizedProbe(f"{probe.name}{end}", amount, probe.target, operands, call_bytes)


def amount_of(target: Any, operands: Operands, result: Any) -> float:
    """Return the FLOPs of a call, or else the bytes that it moves, as `op_cost` counts them."""
    graph = fx.Graph()

    def to_node(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, torch.utils._pytree.tree_map(to_node, operands))
    node.meta.update(val=result, phase="forward")
    cost = op_cost(node)
    return float(cost.flops or cost.moved or 1)

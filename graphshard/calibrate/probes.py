"""The measured operators, each over a range of sizes.

A probe calls one operator from Python, as a lowered program does, on operands like those of a
training step. Its amount (FLOPs, or bytes read and written) comes from `op_cost`, as it does when a
curve is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.calibrate import operands as inputs
from graphshard.calibrate.operands import MakeOperands, OperandFactory, Operands
from graphshard.cost.op_cost import op_cost
from graphshard.hardware.hardware import dtype_name

aten = torch.ops.aten


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

    Args:
        curve: the name of the curve.
        amount: FLOPs or bytes of a call.
        target: the operator.
        operands: sets of operands, used in turn, so that they are no longer in a cache than in a
            step.
        call_bytes: bytes of a call's operands and results.
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
        yield Probe("matmul", aten.mm.default, inputs.product(transposed), sizes, dtypes=True)
    yield Probe("bmm", aten.bmm.default, inputs.products, (1, 8, 64, 256), dtypes=True)
    for make in (
        inputs.grouped(transposed=False),
        inputs.grouped(transposed=True),
        inputs.grouped_weights,
    ):
        yield Probe("grouped_mm", aten._grouped_mm.default, make, (64, 512, 2048), dtypes=True)
    if device.type == "cuda":
        attention, backward = (
            aten._scaled_dot_product_flash_attention,
            inputs.cuda_attention_backward,
        )
        attention_back = aten._scaled_dot_product_flash_attention_backward
    else:
        attention, backward = (
            aten._scaled_dot_product_flash_attention_for_cpu,
            inputs.attention_backward,
        )
        attention_back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    tokens = _TOKENS if device.type == "cpu" else (*_TOKENS, 4096, 8192)
    for causal, end in ((False, ""), (True, ".causal")):
        name = f"attention{end}"
        yield Probe(name, attention.default, inputs.attention(causal), tokens, dtypes=True)
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
        yield Probe(f"convolution{end}", aten.convolution.default, inputs.images(*kind), _STAGES)
        make, backward_op = inputs.images_backward(*kind), aten.convolution_backward.default
        yield Probe(f"convolution_backward{end}", backward_op, make, _STAGES)
    # The largest size on a GPU exceeds its caches: the second level of an H200 has 60 MB.
    numels = _NUMEL if device.type == "cpu" else (*_NUMEL, 1 << 25)
    for name, target, make in _STREAMING:
        yield Probe(name, target, make, numels, dtypes=name in ("add", "clone"))


_STREAMING: tuple[tuple[str, Any, MakeOperands], ...] = (
    ("add", aten.add.Tensor, inputs.pair),
    ("add.strided", aten.mul.Tensor, inputs.rotated),
    ("clone", aten.clone.default, inputs.single()),
    ("clone.strided", aten.clone.default, inputs.moved_heads),
    ("cat", aten.cat.default, inputs.joined),
    ("gelu", aten.gelu.default, inputs.single()),
    ("gelu_backward", aten.gelu_backward.default, inputs.pair),
    ("silu", aten.silu.default, inputs.single()),
    ("silu_backward", aten.silu_backward.default, inputs.pair),
    ("pow", aten.pow.Tensor_Scalar, inputs.single(2)),
    ("sum", aten.sum.dim_IntList, inputs.single([0], True)),
    ("_softmax", aten._softmax.default, inputs.single(-1, False)),
    ("_safe_softmax", aten._safe_softmax.default, inputs.single(-1)),
    ("_softmax_backward_data", aten._softmax_backward_data.default, inputs.softmax_backward),
    ("native_layer_norm", aten.native_layer_norm.default, inputs.normed),
    ("native_layer_norm_backward", aten.native_layer_norm_backward.default, inputs.normed_backward),
    ("native_batch_norm", aten.native_batch_norm.default, inputs.batch_normed),
    ("native_batch_norm_backward", aten.native_batch_norm_backward.default,
     inputs.batch_normed_backward),
    ("native_dropout", aten.native_dropout.default, inputs.single(0.1, True)),
    ("native_dropout_backward", aten.native_dropout_backward.default, inputs.dropped),
    ("embedding", aten.embedding.default, inputs.picked),
    ("embedding_dense_backward", aten.embedding_dense_backward.default, inputs.embedded_backward),
    ("index", aten.index.Tensor, inputs.indexed),
    ("index_put", aten.index_put.default, inputs.put),
    ("slice_backward", aten.slice_backward.default, inputs.sliced_back),
    ("topk", aten.topk.default, inputs.single(2)),
    ("max_pool2d_with_indices", aten.max_pool2d_with_indices.default, inputs.pooled),
    ("max_pool2d_with_indices_backward", aten.max_pool2d_with_indices_backward.default,
     inputs.pooled_backward),
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

    Args:
        device: where to measure.
        dtypes: dtypes besides float32 for matrix products, attention and plain copies.
        share: the fraction of each probe's sizes to measure, smallest first; at least two.
        cold: how operands are kept out of caches.
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
    call_bytes = sum(t.nbytes for t in _tensors((first, result)))
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


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)

"""The operators that are measured, each over a range of sizes.

A probe calls one operator as a lowered program does, from Python, on operands like those of a
training step. What it counts as (FLOPs, or bytes read and written) is what `op_cost` says of the
same call, so that a curve means here what it means when it is looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.calibrate import operands as drawn
from graphshard.calibrate.operands import Draw, Make, Operands
from graphshard.cost.op_cost import op_cost
from graphshard.hardware.hardware import dtype_name

aten = torch.ops.aten


@dataclass(frozen=True)
class Probe:
    """One operator over sizes.

    name: of its curve. target: the operator. make: its operands for a size. sizes: what `make`
    takes. dtypes: False if it is measured in float32 only.
    """

    name: str
    target: Any
    make: Make
    sizes: tuple[int, ...]
    dtypes: bool = False


@dataclass(frozen=True)
class Shot:
    """A probe at one size, ready to run.

    Args:
        curve: the name of the curve.
        amount: FLOPs, or bytes.
        target: what is called.
        operands: sets of them, used in turn, so that none is found in a cache that a step, too,
            would not find it in.
    """

    curve: str
    amount: float
    target: Any
    operands: tuple[Operands, ...]
    group: str = "operators"
    wall: bool = False

    def run(self, times: int) -> None:
        """Call it `times` times, keeping as many results as there are sets of operands."""
        target, operands, count = self.target, self.operands, len(self.operands)
        kept: list[Any] = [None] * count
        for turn in range(times):
            kept[turn % count] = target(*operands[turn % count])


# -- the list --------------------------------------------------------------------------------------

_NUMEL = (1 << 10, 1 << 14, 1 << 17, 1 << 20, 1 << 22, 1 << 23)


_STAGES = (0, 4, 5, 6, 7, 16, 17, 18, 19)


_TOKENS = (16, 128, 512, 1024)


_PRODUCTS = (16, 64, 128, 256, 512, 1024)


def _probes(device: torch.device) -> Iterator[Probe]:
    # Forward multiplies by a transposed weight, backward by the weight, and by activations
    # transposed; the curve is the mean of the three.
    for transposed in range(3):
        sizes = _PRODUCTS if device.type == "cpu" else (*_PRODUCTS, 2048, 4096, 8192)
        yield Probe("matmul", aten.mm.default, drawn.product(transposed), sizes, dtypes=True)
    yield Probe("bmm", aten.bmm.default, drawn.products, (1, 8, 64, 256), dtypes=True)
    for make in (
        drawn.grouped(transposed=False),
        drawn.grouped(transposed=True),
        drawn.grouped_weights,
    ):
        yield Probe("grouped_mm", aten._grouped_mm.default, make, (64, 512, 2048), dtypes=True)
    if device.type == "cuda":
        attention, backward = (
            aten._scaled_dot_product_flash_attention,
            drawn.cuda_attention_backward,
        )
        attention_back = aten._scaled_dot_product_flash_attention_backward
    else:
        attention, backward = (
            aten._scaled_dot_product_flash_attention_for_cpu,
            drawn.attention_backward,
        )
        attention_back = aten._scaled_dot_product_flash_attention_for_cpu_backward
    tokens = _TOKENS if device.type == "cpu" else (*_TOKENS, 4096, 8192)
    for causal, end in ((False, ""), (True, ".causal")):
        name = f"attention{end}"
        yield Probe(name, attention.default, drawn.attention(causal), tokens, dtypes=True)
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
        yield Probe(f"convolution{end}", aten.convolution.default, drawn.images(*kind), _STAGES)
        make, backward_op = drawn.images_backward(*kind), aten.convolution_backward.default
        yield Probe(f"convolution_backward{end}", backward_op, make, _STAGES)
    # The largest of a GPU lies in no cache of it: the second level of an H200 has 60 MB.
    numels = _NUMEL if device.type == "cpu" else (*_NUMEL, 1 << 25)
    for name, target, make in _STREAMING:
        yield Probe(name, target, make, numels, dtypes=name in ("add", "clone"))


_STREAMING: tuple[tuple[str, Any, Make], ...] = (
    ("add", aten.add.Tensor, drawn.pair),
    ("add.strided", aten.mul.Tensor, drawn.rotated),
    ("clone", aten.clone.default, drawn.single()),
    ("clone.strided", aten.clone.default, drawn.moved_heads),
    ("cat", aten.cat.default, drawn.joined),
    ("gelu", aten.gelu.default, drawn.single()),
    ("gelu_backward", aten.gelu_backward.default, drawn.pair),
    ("silu", aten.silu.default, drawn.single()),
    ("silu_backward", aten.silu_backward.default, drawn.pair),
    ("pow", aten.pow.Tensor_Scalar, drawn.single(2)),
    ("sum", aten.sum.dim_IntList, drawn.single([0], True)),
    ("_softmax", aten._softmax.default, drawn.single(-1, False)),
    ("_safe_softmax", aten._safe_softmax.default, drawn.single(-1)),
    ("_softmax_backward_data", aten._softmax_backward_data.default, drawn.softmax_backward),
    ("native_layer_norm", aten.native_layer_norm.default, drawn.normed),
    ("native_layer_norm_backward", aten.native_layer_norm_backward.default, drawn.normed_backward),
    ("native_batch_norm", aten.native_batch_norm.default, drawn.batch_normed),
    ("native_batch_norm_backward", aten.native_batch_norm_backward.default,
     drawn.batch_normed_backward),
    ("native_dropout", aten.native_dropout.default, drawn.single(0.1, True)),
    ("native_dropout_backward", aten.native_dropout_backward.default, drawn.dropped),
    ("embedding", aten.embedding.default, drawn.picked),
    ("embedding_dense_backward", aten.embedding_dense_backward.default, drawn.embedded_backward),
    ("index", aten.index.Tensor, drawn.indexed),
    ("index_put", aten.index_put.default, drawn.put),
    ("slice_backward", aten.slice_backward.default, drawn.sliced_back),
    ("topk", aten.topk.default, drawn.single(2)),
    ("max_pool2d_with_indices", aten.max_pool2d_with_indices.default, drawn.pooled),
    ("max_pool2d_with_indices_backward", aten.max_pool2d_with_indices_backward.default,
     drawn.pooled_backward),
)  # fmt: skip


_COLD_BYTES = 16 * 2**20


_MOST_SETS = 12


def shots(
    device: torch.device, dtypes: tuple[torch.dtype, ...], *, share: float = 1.0
) -> Iterator[Shot]:
    """Every probe at every size, in float32 and, where it says so, in the other `dtypes`.

    Args:
        device: where.
        dtypes: of matrix products, attention and plain copies, besides float32.
        share: of the sizes of each probe, smallest first; at least two are taken.
    """
    wanted = (torch.float32, *(d for d in dtypes if d is not torch.float32))
    draws = [Draw(dtype, device) for dtype in wanted]
    for probe in _probes(device):
        sizes = probe.sizes[: max(2, round(share * len(probe.sizes)))]
        for draw in draws if probe.dtypes else draws[:1]:
            for size in sizes:
                shot = _shot(probe, draw, size)
                if shot is not None:
                    yield shot


def _shot(probe: Probe, draw: Draw, size: int) -> Shot | None:
    """None where the device has no kernel for it."""
    try:
        first = probe.make(draw, size)
        result = probe.target(*first)
    except (NotImplementedError, RuntimeError):
        return None
    end = "" if draw.dtype is torch.float32 else f".{dtype_name(draw.dtype)}"
    held = sum(t.nbytes for t in _tensors((first, result)))
    sets = max(1, min(_MOST_SETS, _COLD_BYTES // max(1, held)))
    operands = (first, *(probe.make(draw, size) for _ in range(sets - 1)))
    amount = amount_of(probe.target, first, result)
    return Shot(f"{probe.name}{end}", amount, probe.target, operands)


def amount_of(target: Any, operands: Operands, result: Any) -> float:
    """FLOPs of a call, or bytes that it moves, as `op_cost` counts them."""
    graph = fx.Graph()

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder("x")
        node.meta["val"] = value
        return node

    node = graph.call_function(target, torch.utils._pytree.tree_map(placed, operands))
    node.meta.update(val=result, phase="forward")
    cost = op_cost(node)
    return float(cost.flops or cost.moved or 1)


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _tensors(entry)

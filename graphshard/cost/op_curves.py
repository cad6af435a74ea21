"""The measured curves that apply to an operator.

A calibrated file has curves of seconds over sizes for some operators. An operator without a curve
uses that of the most similar measured operator, or that of elementwise addition ("add").
"""

from __future__ import annotations

from functools import cache
from math import prod
from typing import Any

import torch
from torch import fx

from graphshard.torch_private.compat import size_hint

_LIKE = {
    "gelu": ("erf", "mish", "tanh", "sin", "cos", "exp", "expm1", "log", "log1p", "sigmoid",
             "atan2"),
    "silu": ("hardswish", "elu", "softplus", "logit", "log_sigmoid_forward"),
    "gelu_backward": ("mish_backward", "elu_backward", "softplus_backward"),
    "silu_backward": ("hardswish_backward", "tanh_backward", "sigmoid_backward"),
    "pow": ("sqrt", "rsqrt", "reciprocal"),
    "sum": ("mean", "amax", "amin", "var", "var_mean", "std", "linalg_vector_norm", "norm", "prod",
            "max", "min", "argmax", "argmin", "any", "all", "logsumexp", "cumsum", "avg_pool2d",
            "adaptive_avg_pool2d", "_adaptive_avg_pool2d"),
    "_softmax": ("_log_softmax",),
    "_softmax_backward_data": ("_log_softmax_backward_data",),
    "native_layer_norm": ("native_group_norm", "_fused_rms_norm", "rms_norm"),
    "native_layer_norm_backward": ("native_group_norm_backward", "_fused_rms_norm_backward"),
    "native_batch_norm": ("_native_batch_norm_legit", "_native_batch_norm_legit_functional",
                          "_native_batch_norm_legit_no_training", "_batch_norm_with_update",
                          "_batch_norm_with_update_functional", "cudnn_batch_norm"),
    "native_batch_norm_backward": ("batch_norm_backward", "cudnn_batch_norm_backward"),
    "native_dropout": ("bernoulli", "rand", "rand_like", "randn", "randn_like", "rrelu_with_noise"),
    "native_dropout_backward": ("masked_fill", "where"),
    "embedding": ("index_select",),
    "index": ("gather",),
    "embedding_dense_backward": ("index_add", "scatter_add"),
    "index_put": ("_unsafe_index_put", "scatter", "scatter_reduce", "select_scatter",
                  "slice_scatter"),
    "slice_backward": ("select_backward", "constant_pad_nd", "new_zeros", "zeros", "zeros_like",
                       "full", "full_like", "fill", "new_ones", "ones", "ones_like", "new_full"),
    "cat": ("stack", "repeat", "roll", "flip"),
    "clone": ("_to_copy", "copy", "convert_element_type", "_reshape_copy"),
    "topk": ("sort", "argsort"),
    "_safe_softmax": (),
    "max_pool2d_with_indices": (),
    "max_pool2d_with_indices_backward": (),
}  # fmt: skip


RELATIVES = {name: like for like, names in _LIKE.items() for name in (like, *names)}
"""By operator name, the operator whose curve is used for it."""


ELEMENTWISE = "add"
"""The curve of all other operators."""


STRIDED = ".strided"
"""Suffix of a curve that was measured with non-contiguous operands."""


_BY_LAYOUT = {ELEMENTWISE, "clone", "gelu", "silu"}


def curves_of(packet: Any, kind: str, node: fx.Node) -> tuple[str, ...]:
    """Names of the curves that apply to an operator, the best first.

    Args:
        packet: the operator, an `OpOverloadPacket`.
        kind: the kind of its cost (see `OpCost`).
        node: the call of the operator.
    """
    name = _name(packet)
    if kind == "attention":
        family = "attention_backward" if name.endswith("_backward") else "attention"
        return (f"{family}.causal", family) if _is_causal(node) else (family,)
    if kind == "convolution":
        return _convolution_curves(name, node)
    if kind == "matmul":
        if name in ("bmm", "baddbmm"):
            return ("bmm", "matmul")
        return ("grouped_mm", "matmul") if name == "_grouped_mm" else ("matmul",)
    like = RELATIVES.get(name, ELEMENTWISE)
    if like in _BY_LAYOUT and _strided(node):
        return (f"{like}{STRIDED}", f"{ELEMENTWISE}{STRIDED}", like, ELEMENTWISE)
    return (like, ELEMENTWISE)


@cache
def _name(packet: Any) -> str:
    return str(packet).rpartition(".")[2]


def _is_causal(node: fx.Node) -> bool:
    schema: Any = node.target._schema  # type: ignore[union-attr]
    for position, argument in enumerate(schema.arguments):
        if argument.name == "is_causal":
            positional = node.args[position] if position < len(node.args) else None
            return bool(node.kwargs.get("is_causal", positional))
    return False


def _convolution_curves(name: str, node: fx.Node) -> tuple[str, ...]:
    """Curves by window size, stride and groups, on which libraries choose their algorithm."""
    family = "convolution_backward" if name.endswith("_backward") else "convolution"
    backward = family == "convolution_backward"
    weight: Any = node.args[2 if backward else 1]
    rest: Any = node.args[4:] if backward else node.args[3:]
    stride, groups = rest[0], rest[5]
    shape = family
    if groups > 1:
        shape += ".grouped"
    elif prod(map(size_hint, weight.meta["val"].shape[2:])) == 1:
        shape += ".pointwise"
    return (shape if max(stride) == 1 else f"{shape}{STRIDED}", shape, family)


def _strided(node: fx.Node) -> bool:
    """Whether an operand with at least as many dimensions as the result is not contiguous."""
    result = node.meta.get("val")
    if not isinstance(result, torch.Tensor):
        return False
    for value in node.all_input_nodes:
        operand = value.meta.get("val")
        if isinstance(operand, torch.Tensor) and operand.dim() >= result.dim():
            sizes = [size_hint(size) for size in operand.shape]
            expected = 1
            for size, stride in zip(reversed(sizes), reversed(operand.stride()), strict=True):
                if size != 1 and size_hint(stride) != expected:
                    return True
                expected *= size
    return False

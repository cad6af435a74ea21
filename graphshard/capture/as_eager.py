"""Tracing the operators that eager runs, where torch or transformers would trace others.

Torch's tracing rules decompose interpolation into indexing, which gives other numbers and takes
more memory and time. BatchNorm keeps its rule, since the schemas of its operators do not declare
that they write running statistics.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphshard.capture.ctc import CTC_RULES
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.patches import patched

_INTERPOLATIONS = (
    "upsample_nearest1d",
    "upsample_nearest2d",
    "upsample_nearest3d",
    "_upsample_nearest_exact1d",
    "_upsample_nearest_exact2d",
    "_upsample_nearest_exact3d",
    "upsample_linear1d",
    "upsample_bilinear2d",
    "upsample_trilinear3d",
    "upsample_bicubic2d",
)


INTERPOLATION_BACKWARDS = frozenset(
    getattr(torch.ops.aten, f"{name}_backward").default for name in _INTERPOLATIONS
)


_OTHERS = (
    "hardshrink",
    "softshrink",
    "multi_margin_loss",
    "multilabel_margin_loss_forward",
)


@contextlib.contextmanager
def eager_kernels() -> Iterator[None]:
    """Trace the operators named above as single nodes, forward and backward."""
    packets = [getattr(torch.ops.aten, name) for name in (*_INTERPOLATIONS, *_OTHERS)]
    operators = [getattr(packet, overload) for packet in packets for overload in packet.overloads()]
    rules: dict[Any, Callable[..., Any] | None] = dict.fromkeys(operators)
    for name in _INTERPOLATIONS:
        packet = getattr(torch.ops.aten, name)
        rules[packet.vec] = partial(_interpolate, packet.default)
    rules[torch.ops.aten.max_pool1d.default] = _max_pool1d
    rules |= CTC_RULES
    with torch_trace.tracing_rules(rules):
        yield


def _interpolate(operator: Any, x: Tensor, size: Sequence[int] | None, *options: Any) -> Any:
    """Interpolate as ATen does for `aten.upsample_*.vec`, which would fix symbolic sizes."""
    *align_corners, scales = options
    if size is None:
        size = [
            extent * int(scale) if scale == int(scale) else torch.sym_int(extent * scale)
            for extent, scale in zip(x.shape[2:], scales, strict=True)
        ]
    return operator(x, size, *align_corners, *(scales or ()))


def _max_pool1d(x: Tensor, *options: Any) -> Tensor:
    """Pool as ATen does where gradients are wanted; its own check would fix symbolic sizes."""
    result: Tensor = torch.ops.aten.max_pool1d_with_indices.default(x, *options)[0]
    return result


def interpolation_gradient(
    grad_output: Tensor, output_size: Sequence[Any], input_size: Sequence[Any], *_: Any
) -> Tensor:
    """An empty tensor like the result of one of `INTERPOLATION_BACKWARDS`.

    Torch's own rule for that takes no symbolic sizes.
    """
    return grad_output.new_empty(input_size)


_TRANSFORMERS = "transformers.utils.import_utils"


@contextlib.contextmanager
def transformers_as_in_eager() -> Iterator[None]:
    """Make transformers run the same code on the tensors of a trace as on those of eager.

    For a fake tensor it materializes an attention mask where eager needs none, which changes the
    numbers and takes more memory. `torch.compiler.is_compiling()` is left as it is.
    """
    module: Any = sys.modules.get(_TRANSFORMERS)
    if not hasattr(module, "is_fake_tensor"):
        yield
        return
    with patched(module, "is_fake_tensor", lambda value: False):
        yield


_RULES = "torch._decomp.decompositions"


@dataclass(frozen=True)
class _WithoutGradient:
    """Stands for the input of an LSTM where torch chooses the kernel."""

    device: torch.device
    dtype: torch.dtype
    requires_grad: bool = False


@contextlib.contextmanager
def recurrent_layers() -> Iterator[None]:
    """Trace nn.LSTM, nn.GRU and nn.RNN with the dropout between their layers.

    LSTMs run in oneDNN's kernel where eager runs it. Torch's rule takes that for constant inputs
    alone and else computes step by step, which gives other last bits and fixes the length.
    """
    stack = torch_compat.private(_RULES, "_rnn_helper")
    choose = torch_compat.private(_RULES, "select_one_layer_lstm_function")

    def as_in_eager(x: Tensor, hidden: Any, params: Any) -> Any:
        if x.dtype == torch.float32:
            return choose(_WithoutGradient(x.device, x.dtype), hidden, params)
        return choose(x, hidden, params)

    def with_dropout(
        x: Tensor,
        hidden: Sequence[Any],
        params: Sequence[Any],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
        layer: Any,
    ) -> tuple[Tensor, list[Any]]:
        x = x.transpose(0, 1) if batch_first else x
        directions = 2 if bidirectional else 1
        last_hidden: list[Any] = []
        for start in range(0, num_layers * directions, directions):
            if start and train and dropout:
                x = torch.dropout(x, dropout, train=True)
            one_layer = slice(start, start + directions)
            x, layer_hidden = stack(
                x,
                hidden[one_layer],
                params[one_layer],
                has_biases,
                1,
                0.0,
                train,
                bidirectional,
                False,
                layer,
            )
            last_hidden += layer_hidden
        return (x.transpose(0, 1) if batch_first else x), last_hidden

    with (
        patched(_RULES, "_rnn_helper", with_dropout),
        patched(_RULES, "select_one_layer_lstm_function", as_in_eager),
    ):
        yield


@contextlib.contextmanager
def encoder_layers(model: nn.Module) -> Iterator[None]:
    """Trace nn.TransformerEncoder and its layers to the results of eager's paths without gradients.

    Eager takes one fused operator for a layer then, which a trace never does. Under autocast on the
    CPU its sums and norms are of the lower dtype too, and so is its result. Float masks are made
    bool. An encoder with padding takes nested tensors through its layers, and leaves zeros.
    """
    forward = nn.TransformerEncoderLayer.forward
    encode = nn.TransformerEncoder.forward
    hooked = {m for m in model.modules() if m._forward_hooks or m._forward_pre_hooks}

    def as_in_eager(
        layer: Any,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
    ) -> Any:
        if _is_fused(layer, src) and hooked.isdisjoint(layer.modules()):
            src_mask, src_key_padding_mask = _as_bool(src_mask), _as_bool(src_key_padding_mask)
            low = torch.is_autocast_enabled("cpu") and src.device.type == "cpu"
            if low and src.dtype != torch.float64:  # which has no autocast
                src = src.to(torch.get_autocast_dtype("cpu"))
        return forward(layer, src, src_mask, src_key_padding_mask, is_causal)

    def encode_as_in_eager(
        encoder: Any,
        src: Tensor,
        mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool | None = None,
    ) -> Any:
        if (
            src_key_padding_mask is not None
            and mask is None
            and getattr(encoder, "use_nested_tensor", False)
            and _is_fused(encoder.layers[0], src)
        ):
            return _encode_nested(encoder, src, src_key_padding_mask)
        # A trace takes no nested tensor, whatever the values say.
        with patched(torch, "_nested_tensor_from_mask_left_aligned", lambda *_: False):
            return encode(encoder, src, mask, src_key_padding_mask, is_causal)

    with (
        patched(nn.TransformerEncoderLayer, "forward", as_in_eager),
        patched(nn.TransformerEncoder, "forward", encode_as_in_eager),
    ):
        yield


def _as_bool(mask: Tensor | None) -> Tensor | None:
    return mask.bool() if mask is not None and mask.is_floating_point() else mask


def _encode_nested(encoder: Any, src: Tensor, mask: Tensor) -> Any:
    """The forward of an encoder where eager's would take nested tensors, by the values of `mask`.

    A nested tensor has as many positions of a row as are not padding, and always the first ones:
    without `mask_check` also of a row that has its padding elsewhere.
    """
    padding = mask.bool()
    zeros = padding.sort(dim=1).values
    if getattr(encoder, "mask_check", True):
        zeros = zeros & (zeros == padding).all()
        if mask.is_floating_point():  # and may be finite
            mask = mask.masked_fill(zeros, float("-inf"))
    else:
        mask = zeros
    for layer in encoder.layers:
        src = layer(src, src_mask=None, is_causal=False, src_key_padding_mask=mask)
    src = src.masked_fill(zeros.unsqueeze(-1), 0.0)
    return src if encoder.norm is None else encoder.norm(src)


def _is_fused(layer: Any, src: Tensor) -> bool:
    """Whether eager takes the fused operator where there are no hooks."""
    fused: bool = (
        not layer.training
        and torch.backends.mha.get_fastpath_enabled()
        and src.dim() == 3
        and layer.self_attn.batch_first
        and layer.self_attn.in_proj_bias is not None
        and layer.self_attn.num_heads % 2 == 0
        and layer.activation_relu_or_gelu > 0
        and layer.norm1.eps == layer.norm2.eps
        and not torch.is_autocast_enabled()  # on CUDA
        and not (
            torch.is_grad_enabled() and any(t.requires_grad for t in (src, *layer.parameters()))
        )
    )
    return fused


def lstm_layer_with_workspace(*args: Any) -> tuple[Tensor, ...]:
    """Run `aten.mkldnn_rnn_layer` (oneDNN's LSTM) in grad mode, where ATen makes its workspace.

    Arguments and results are those of the operator.
    """
    with torch.enable_grad():
        return tuple(torch.ops.aten.mkldnn_rnn_layer.default(*args))


def keep_lstm_workspaces(graph: fx.Graph) -> None:
    """Give the LSTM layers of `graph` their workspace if their backward is in it."""
    backward = torch.ops.aten.mkldnn_rnn_layer_backward.default
    if graph.find_nodes(op="call_function", target=backward):
        forward = torch.ops.aten.mkldnn_rnn_layer.default
        for node in graph.find_nodes(op="call_function", target=forward):
            node.target = lstm_layer_with_workspace


# -- traced on the CPU for CUDA ------------------------------------------------------------------


_SDPA = torch.ops.aten.scaled_dot_product_attention.default
_FLASH = torch.ops.aten._scaled_dot_product_flash_attention.default
_EFFICIENT = torch.ops.aten._scaled_dot_product_efficient_attention.default

_LARGEST_HEAD = 256
"""The size of a head up to which CUDA takes flash attention."""


@contextlib.contextmanager
def attention_of_cuda() -> Iterator[None]:
    """Trace attention with dropout as the fused operator that CUDA takes.

    The CPU's fused attention has no dropout, so torch takes such attention apart into matrices of
    the length squared, which CUDA's kernels never make.
    """
    with torch_trace.tracing_rules({_SDPA: _attention}):
        yield


def _attention(*args: Any, **kwargs: Any) -> Any:
    """Run `aten.scaled_dot_product_attention`, with dropout in the kernel."""
    fused = _fused(*args, **kwargs)
    return torch_trace.by_own_kernel(_SDPA, *args, **kwargs) if fused is None else fused


def _fused(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The result of CUDA's flash or memory-efficient attention; None if neither takes this."""
    heads = {tensor.shape[-1] for tensor in (query, key, value)}
    if not dropout_p or query.dim() != 4 or len(heads) != 1:
        return None
    head, bits = heads.pop(), 8 * query.dtype.itemsize
    if bits not in (16, 32) or not query.dtype.is_floating_point or head % (128 // bits):
        return None
    options = (dropout_p, is_causal)
    if bits == 16 and attn_mask is None and head <= _LARGEST_HEAD:
        return _FLASH(query, key, value, *options, scale=scale)[0]
    if enable_gqa:
        return None
    bias = None if attn_mask is None else _bias(attn_mask, query, key)
    saves = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    return _EFFICIENT(query, key, value, bias, saves, *options, scale=scale)[0]


def _bias(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """What is added to the products of `query` and `key`, of a mask that may hold bools."""
    if mask.dtype == torch.bool:
        blocked = torch.zeros((), dtype=query.dtype, device=mask.device).expand(mask.shape)
        mask = blocked.masked_fill(mask.logical_not(), float("-inf"))
    return mask.expand(*query.shape[:2], query.shape[2], key.shape[2])

"""Packed sequences: `pack_padded_sequence`, recurrent layers on what it returns, and back.

Torch's own operators for them have no kernels for tracing: the number of rows and of steps depends
on the lengths. The operators here stand for them. They run torch's kernels, and the backward of a
recurrent layer runs its forward once more, by which its gradients equal eager's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from graphshard.errors import CaptureError
from graphshard.torch_private.patches import patched

_MODES = ("lstm", "gru", "rnn_tanh", "rnn_relu")

_LAYER = (
    "Tensor data, Tensor batch_sizes, Tensor[] hidden, Tensor[] params, bool has_biases, "
    "int layers, bool bidirectional"
)

_library = torch.library.Library("graphshard", "FRAGMENT")
_library.define("pack_padded(Tensor padded, Tensor lengths, bool batch_first) -> (Tensor, Tensor)")
_library.define(
    "pack_padded_backward(Tensor grad, SymInt[] size, Tensor batch_sizes, bool batch_first) "
    "-> Tensor"
)
_library.define(
    "pad_packed(Tensor data, Tensor batch_sizes, bool batch_first, float value, SymInt steps, "
    "SymInt sequences) -> (Tensor, Tensor)"
)
_library.define(
    "pad_packed_backward(Tensor grad, Tensor lengths, SymInt rows, bool batch_first) -> Tensor"
)
_library.define(f"packed_rnn(str mode, {_LAYER}) -> Tensor[]")
_library.define(f"packed_rnn_backward(str mode, Tensor[] grads, {_LAYER}) -> Tensor[]")

_ops = torch.ops.graphshard


def _register(name: str, kernel: Any, fake: Any) -> None:
    torch.library.impl(_library, name, "CompositeExplicitAutograd")(kernel)
    torch.library.register_fake(f"graphshard::{name}", fake, lib=_library)


# -- packing and padding --------------------------------------------------------------------------


def _pack(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    data, batch_sizes = torch.ops.aten._pack_padded_sequence(padded, lengths.cpu(), batch_first)
    return data, batch_sizes


def _pack_fake(padded: Tensor, lengths: Tensor, batch_first: bool) -> tuple[Tensor, Tensor]:
    sequences, steps = padded.shape[:2] if batch_first else (padded.shape[1], padded.shape[0])
    most = sequences * steps
    known = isinstance(most, int)
    context = torch.library.get_ctx()
    rows = context.new_dynamic_size(min=1, max=most if known else None)
    longest = context.new_dynamic_size(min=1, max=steps if known else None)
    return (
        padded.new_empty((rows, *padded.shape[2:])),
        torch.empty(longest, dtype=torch.int64, device="cpu"),
    )


def _pack_backward(
    grad: Tensor, size: Sequence[int], batch_sizes: Tensor, batch_first: bool
) -> Tensor:
    result: Tensor = torch.ops.aten._pack_padded_sequence_backward(
        grad, size, batch_sizes, batch_first
    )
    return result.contiguous()


def _pad(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, steps: int, sequences: int
) -> tuple[Tensor, Tensor]:
    padded, lengths = torch.ops.aten._pad_packed_sequence(
        data, batch_sizes, batch_first, value, steps
    )
    return padded.contiguous(), lengths


def _pad_fake(
    data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, steps: Any, sequences: Any
) -> tuple[Tensor, Tensor]:
    first = (sequences, steps) if batch_first else (steps, sequences)
    return (
        data.new_empty((*first, *data.shape[1:])),
        torch.empty(sequences, dtype=torch.int64, device="cpu"),
    )


def _pad_backward(grad: Tensor, lengths: Tensor, rows: int, batch_first: bool) -> Tensor:
    data: Tensor = torch.ops.aten._pack_padded_sequence(grad, lengths, batch_first)[0]
    return data


_register("pack_padded", _pack, _pack_fake)
_register(
    "pack_padded_backward",
    _pack_backward,
    lambda grad, size, batch_sizes, batch_first: grad.new_empty(size),
)
_register("pad_packed", _pad, _pad_fake)
_register(
    "pad_packed_backward",
    _pad_backward,
    lambda grad, lengths, rows, batch_first: grad.new_empty((rows, *grad.shape[2:])),
)


def _keep_of_pack(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.size, ctx.batch_first = inputs[0].shape, inputs[2]
    ctx.save_for_backward(output[1])


def _keep_of_pad(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.rows, ctx.batch_first = inputs[0].shape[0], inputs[2]
    ctx.save_for_backward(output[1])


def _gradient_of_pack(ctx: Any, grad: Tensor, _: Any) -> Any:
    (batch_sizes,) = ctx.saved_tensors
    return _ops.pack_padded_backward(grad, ctx.size, batch_sizes, ctx.batch_first), None, None


def _gradient_of_pad(ctx: Any, grad: Tensor, _: Any) -> Any:
    (lengths,) = ctx.saved_tensors
    data = _ops.pad_packed_backward(grad, lengths, ctx.rows, ctx.batch_first)
    return data, None, None, None, None, None


torch.library.register_autograd(
    "graphshard::pack_padded", _gradient_of_pack, setup_context=_keep_of_pack, lib=_library
)
torch.library.register_autograd(
    "graphshard::pad_packed", _gradient_of_pad, setup_context=_keep_of_pad, lib=_library
)


# -- recurrent layers -----------------------------------------------------------------------------


def _run(
    mode: str,
    data: Tensor,
    batch_sizes: Tensor,
    hidden: Sequence[Tensor],
    params: Sequence[Tensor],
    has_biases: bool,
    layers: int,
    bidirectional: bool,
) -> list[Tensor]:
    layer = getattr(torch._VF, mode)
    first = list(hidden) if mode == "lstm" else hidden[0]
    rest = (list(params), has_biases, layers, 0.0, True, bidirectional)
    return list(layer(data, batch_sizes, first, *rest))


def _run_backward(mode: str, grads: Sequence[Tensor], *layer: Any) -> list[Tensor]:
    data, batch_sizes, hidden, params, *rest = layer
    with torch.enable_grad():
        data, *others = (t.detach().requires_grad_() for t in (data, *hidden, *params))
        hidden, params = others[: len(hidden)], others[len(hidden) :]
        results = _run(mode, data, batch_sizes, hidden, params, *rest)
    inputs = [data, *others]
    into: Any = torch.autograd.grad(results, inputs, list(grads), allow_unused=True)
    return [
        torch.zeros_like(t) if grad is None else grad.contiguous()
        for t, grad in zip(inputs, into, strict=True)
    ]


def _run_fake(mode: str, *layer: Any) -> list[Tensor]:
    data, _, hidden, _, _, _, bidirectional = layer
    width = hidden[0].shape[-1] * (2 if bidirectional else 1)
    return [data.new_empty((data.shape[0], width)), *map(torch.empty_like, hidden)]


def _run_backward_fake(mode: str, grads: Any, *layer: Any) -> list[Tensor]:
    data, _, hidden, params, *_ = layer
    return [t.new_empty(t.shape) for t in (data, *hidden, *params)]


_register("packed_rnn", _run, _run_fake)
_register("packed_rnn_backward", _run_backward, _run_backward_fake)


def _keep_of_run(ctx: Any, inputs: Any, output: Any) -> None:
    mode, data, batch_sizes, hidden, params, *rest = inputs
    ctx.mode, ctx.counts, ctx.rest = mode, (len(hidden), len(params)), rest
    ctx.results = [result.shape for result in output]
    ctx.save_for_backward(data, batch_sizes, *hidden, *params)


def _gradient_of_run(ctx: Any, grads: Any) -> Any:
    data, batch_sizes, *others = ctx.saved_tensors
    hidden, params = others[: ctx.counts[0]], others[ctx.counts[0] :]
    full = [
        data.new_zeros(shape) if grad is None else grad
        for grad, shape in zip(grads, ctx.results, strict=True)
    ]
    into_data, *into = _ops.packed_rnn_backward(
        ctx.mode, full, data, batch_sizes, hidden, params, *ctx.rest
    )
    into_hidden, into_params = into[: len(hidden)], into[len(hidden) :]
    return None, into_data, None, into_hidden, into_params, *(None for _ in ctx.rest)


torch.library.register_autograd(
    "graphshard::packed_rnn", _gradient_of_run, setup_context=_keep_of_run, lib=_library
)


# -- in place of torch's --------------------------------------------------------------------------


class _Functions:
    """torch's functions behind `nn.LSTM` and `nn.utils.rnn`, those on packed sequences replaced."""

    def __init__(self) -> None:
        self.sequences = WeakTensorKeyDictionary()  # their number, by batch sizes

    def __getattr__(self, name: str) -> Any:
        function = getattr(torch._VF, name)
        return self._layer(name, function) if name in _MODES else function

    def _pack_padded_sequence(self, padded: Tensor, lengths: Tensor, batch_first: bool) -> Any:
        data, batch_sizes = _ops.pack_padded(padded, lengths, batch_first)
        self.sequences[batch_sizes] = padded.shape[0 if batch_first else 1]
        return data, batch_sizes

    def _pad_packed_sequence(
        self, data: Tensor, batch_sizes: Tensor, batch_first: bool, value: float, steps: Any
    ) -> Any:
        sequences = self._number_of(batch_sizes)
        return _ops.pad_packed(data, batch_sizes, batch_first, float(value), steps, sequences)

    def _number_of(self, batch_sizes: Tensor) -> Any:
        if batch_sizes not in self.sequences:
            raise CaptureError(
                "a packed sequence is unpacked that pack_padded_sequence did not make in this "
                "forward; pack it in the forward, from padded sequences and their lengths"
            )
        return self.sequences[batch_sizes]

    def _layer(self, mode: str, function: Any) -> Any:
        def run(data: Tensor, second: Any, *rest: Any) -> Any:
            if _is_packed(rest):
                return self._run_packed(mode, data, second, *rest)
            return function(data, second, *rest)

        return run

    def _run_packed(
        self,
        mode: str,
        data: Tensor,
        batch_sizes: Tensor,
        hidden: Any,
        params: Sequence[Tensor],
        has_biases: bool,
        layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
    ) -> Any:
        if torch.is_autocast_enabled(data.device.type):
            raise CaptureError(
                "a recurrent layer on a packed sequence runs under autocast, which a program "
                "cannot do as eager does; disable autocast there, or use a policy's MixedPrecision"
            )
        if dropout and train and layers > 1:
            raise CaptureError(
                "a recurrent layer on a packed sequence drops values out between its layers, which "
                "a program cannot do again in backward; use one module for each layer, with "
                "nn.Dropout between them, or dropout=0"
            )
        first = list(hidden) if mode == "lstm" else [hidden]
        rest = (list(params), has_biases, layers, bidirectional)
        return tuple(_ops.packed_rnn(mode, data, batch_sizes, first, *rest))


def _is_packed(rest: tuple[Any, ...]) -> bool:
    """Whether the arguments behind the first two are those of the form for packed sequences."""
    return len(rest) == 7 and isinstance(rest[1], (list, tuple))


@contextlib.contextmanager
def packed_sequences() -> Iterator[None]:
    """Trace packed sequences by the operators of this file."""
    functions = _Functions()
    plain = Tensor.__getitem__

    def item(self: Tensor, index: Any) -> Any:
        if type(index) is int and index == 0 and self in functions.sequences:
            return functions.sequences[self]  # each sequence has a first step
        return plain(self, index)

    with (
        patched("torch.nn.modules.rnn", "_VF", functions),
        patched("torch.nn.utils.rnn", "_VF", functions),
        patched(Tensor, "__getitem__", item),
    ):
        yield

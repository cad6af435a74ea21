"""The CTC loss: a trace of its own, as torch's operator keeps a table as wide as the targets.

The width of torch's table depends on the lengths of the targets, which are values. The operators
here keep none: their backward makes the table once more, so that gradients equal eager's.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ARGUMENTS = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank, "
    "bool zero_infinity"
)

_library = torch.library.Library("graphshard", "FRAGMENT")
_library.define(f"ctc_loss({_ARGUMENTS}) -> Tensor")
_library.define(f"ctc_loss_backward(Tensor grad, {_ARGUMENTS}) -> Tensor")

_ops = torch.ops.graphshard
_aten = torch.ops.aten


@torch.library.impl(_library, "ctc_loss", "CompositeExplicitAutograd")
def _losses(*arguments: Any) -> Tensor:
    losses: Tensor = _aten._ctc_loss.Tensor(*arguments)[0]
    return losses


@torch.library.register_fake("graphshard::ctc_loss", lib=_library)
def _losses_fake(log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape[1])


@torch.library.impl(_library, "ctc_loss_backward", "CompositeExplicitAutograd")
def _backward(grad: Tensor, *arguments: Any) -> Tensor:
    tensors, rest = arguments[:4], arguments[4:]
    made = _aten._ctc_loss.Tensor(*arguments)
    result: Tensor = _aten._ctc_loss_backward.Tensor(grad, *tensors, *made, *rest)
    return result.contiguous()


@torch.library.register_fake("graphshard::ctc_loss_backward", lib=_library)
def _backward_fake(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.rest = inputs[4:]


def _gradient(ctx: Any, grad: Tensor) -> Any:
    into = _ops.ctc_loss_backward(grad, *ctx.saved_tensors, *ctx.rest)
    return into, None, None, None, None, None


torch.library.register_autograd(
    "graphshard::ctc_loss", _gradient, setup_context=_keep, lib=_library
)


def _by_tensors(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> tuple[Tensor, Tensor]:
    tensors = (log_probs, targets, input_lengths, target_lengths)
    losses = _ops.ctc_loss(*tensors, blank, zero_infinity)
    return losses, losses.new_empty(0)  # in place of the table, which no caller reads


CTC_RULES = {_aten._ctc_loss.Tensor: _by_tensors}
"""How torch's operator is traced; given lengths as lists of numbers, torch's own code ends it."""

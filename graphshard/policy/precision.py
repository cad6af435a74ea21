"""Mixed precision: the dtypes of computation, communication and storage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import nn

from graphshard.policy.fields import FLAG, Check, check_fields, named_arguments
from graphshard.torch_private import compat as torch_compat

_DTYPE: Check = (
    lambda value: value is None or (isinstance(value, torch.dtype) and value.is_floating_point),
    "a floating-point torch.dtype, its name or None",
)

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
"""By the names that a field, or an option of the command line, may give instead."""


_CHECKS = {
    "param_dtype": _DTYPE,
    "reduce_dtype": _DTYPE,
    "buffer_dtype": _DTYPE,
    "output_dtype": _DTYPE,
    "keep_low_precision_grads": FLAG,
    "cast_forward_inputs": FLAG,
}


@named_arguments
@dataclass(frozen=True)
class MixedPrecision:
    """The dtypes to compute and communicate in, where they differ from the parameters' own.

    Shards keep the parameters' dtype (the master weights), and the optimizer updates them. Only
    floating-point tensors are cast. A BatchNorm module always computes in the dtype of its own
    parameters and buffers, usually float32: its input is cast to it, and its output back to the
    dtype of the input.

    A dtype may be given by name, such as "bf16" or "bfloat16".

    The semantics are those of FSDP2's MixedPrecisionPolicy, except that `buffer_dtype`,
    `keep_low_precision_grads` and BatchNorm follow FSDP1's MixedPrecision.

    Args:
        param_dtype: the dtype of gathered parameters and of compute; shards are cast before their
            gather. None: the parameter's own.
        reduce_dtype: the dtype gradients are reduced in. None: the dtype they were computed in, as
            FSDP2 did until torch 2.14; its None of torch 2.15 is the dtype of the shard here. The
            gradients of a parameter that is used more than once, or accumulated, are added as they
            were computed and the sum is rounded; FSDP2 of torch 2.15 rounds each of them first.
        buffer_dtype: the dtype in which forward sees floating-point buffers; they are stored, and
            new values are written back, in their own dtype. None: their own.
        output_dtype: the dtype that floating-point outputs of every unit are cast to. None: they
            are not cast.
        keep_low_precision_grads: leave reduced gradients in `reduce_dtype` instead of casting them
            to the dtype of the shard. The optimizer must accept such gradients: torch's SGD does,
            its AdamW raises.
        cast_forward_inputs: cast floating-point inputs of every unit to `param_dtype`.

    Raises:
        PolicyError: a dtype is no floating-point torch.dtype, or a flag is no bool.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            name = getattr(self, field.name)
            if isinstance(name, str) and (dtype := DTYPES.get(name.removeprefix("torch."))):
                object.__setattr__(self, field.name, dtype)
        check_fields(self, _CHECKS, prefix="mixed_precision: ")

    def __str__(self) -> str:
        """The fields that differ from their defaults, as stable text."""
        texts = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                texts.append(f"{field.name}={str(value).removeprefix('torch.')}")
        return f"({', '.join(texts)})"


@dataclass(frozen=True)
class Precisions:
    """The precision of each part of a model, as capture needs it.

    units: the precision of every unit by FQN; None where nothing is cast.
    params: the dtype each parameter is computed in, by every one of its names.
    """

    units: Mapping[str, MixedPrecision | None]
    params: Mapping[str, torch.dtype]

    def around(self, fqn: str) -> MixedPrecision | None:
        """The precision of the innermost unit around the module `fqn`."""
        while fqn and fqn not in self.units:
            fqn = fqn.rpartition(".")[0]
        return self.units.get(fqn)


def keeps_its_dtype(module: nn.Module) -> bool:
    """Whether `module` is a BatchNorm, which computes in its own dtype under every precision."""
    return isinstance(module, torch_compat.batch_norm())

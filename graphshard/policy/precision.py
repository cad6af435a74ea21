"""Mixed precision: what is computed, moved and kept in which dtype."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import torch
from torch import nn

from graphshard.errors import PolicyError
from graphshard.torch_private import compat as torch_compat


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes other than the parameters' own.

    Parameters keep their dtype on the shards (the master weights), which the optimizer updates.
    Only floating-point tensors are cast. A module of a BatchNorm class keeps the dtype of its own
    parameters and buffers, float32, whatever is said here: its input is cast to that, its output
    back to the dtype of the input.

    The semantics are those of FSDP2's MixedPrecisionPolicy; `buffer_dtype`,
    `keep_low_precision_grads` and what is said of BatchNorm those of FSDP1's MixedPrecision.

    Args:
        param_dtype: of gathered parameters and of compute; a shard is cast before its gather. None:
            the parameter's own.
        reduce_dtype: gradients are reduced in it. None: the dtype they were computed in.
        buffer_dtype: floating-point buffers are seen by the forward in it; they keep their own
            dtype, in which new values are written back. None: their own.
        output_dtype: floating-point outputs of every unit are cast to it. None: left alone.
        keep_low_precision_grads: leave reduced gradients in `reduce_dtype` rather than cast them to
            the dtype of the shard. The optimizer must take such gradients: torch's SGD does, its
            AdamW raises.
        cast_forward_inputs: cast floating-point inputs of every unit to `param_dtype`.

    Raises:
        PolicyError: a dtype is none, or not a floating-point one; or a flag is no bool.
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    buffer_dtype: torch.dtype | None = None
    output_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    cast_forward_inputs: bool = True

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_dtype"):
                if value is None:
                    continue
                if not isinstance(value, torch.dtype) or not value.is_floating_point:
                    raise PolicyError(
                        f"mixed_precision: {field.name} must be a floating-point torch.dtype or "
                        f"None; got {value!r}"
                    )
            elif not isinstance(value, bool):
                raise PolicyError(
                    f"mixed_precision: {field.name} must be True or False; got {value!r}"
                )

    def __str__(self) -> str:
        """The fields that are not the default, as stable text."""
        said = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                said.append(f"{field.name}={str(value).removeprefix('torch.')}")
        return f"({', '.join(said)})"


@dataclass(frozen=True)
class Precisions:
    """Which precision applies where in a model: what capture needs to know of a plan.

    units: of every unit by FQN, None where nothing is cast.
    params: the dtype each parameter is computed in, by any of its names.
    """

    units: Mapping[str, MixedPrecision | None]
    params: Mapping[str, torch.dtype]

    def around(self, fqn: str) -> MixedPrecision | None:
        """That of the innermost unit around the module `fqn`."""
        while fqn and fqn not in self.units:
            fqn = fqn.rpartition(".")[0]
        return self.units.get(fqn)


def keeps_its_dtype(module: nn.Module) -> bool:
    """Whether `module` computes in its own dtype under every precision: a BatchNorm."""
    return isinstance(module, torch_compat.batch_norm())

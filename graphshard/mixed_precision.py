"""Mixed precision: what is computed, moved and kept in which dtype."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from graphshard.errors import PolicyError


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes other than the parameters' own.

    Parameters keep their dtype on the shards (the master weights), which the optimizer updates.
    Modules of BatchNorm classes compute in float32 whatever is said here.

    Args:
        param_dtype: of gathered parameters and of compute; a shard is cast before its gather. None:
            the parameter's own.
        reduce_dtype: gradients are reduced in it. None: `param_dtype`.
        buffer_dtype: floating-point buffers are seen by the forward in it. None: their own.
        output_dtype: floating-point outputs of every unit are cast to it. None: left alone.
        keep_low_precision_grads: leave reduced gradients in `reduce_dtype` rather than cast them to
            the dtype of the shard.
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

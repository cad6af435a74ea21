"""Captured constants, remembered without a copy, and how two of them differ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from graphshard.program.program import Program


@dataclass(frozen=True)
class Constant:
    """A constant as it was when the values of a program were numbered.

    Attributes:
        fqn: its name in the table of buffers.
        value: the tensor itself; it may be large, so nothing is copied.
        version: torch's count of the writes into it; None for an inference tensor, which has none.
    """

    fqn: str
    value: Tensor | None
    version: int | None

    def difference(self, now: Constant) -> str | None:
        """Describe how `now` differs from this constant; None if it does not."""
        if now.value is self.value:
            return None if now.version == self.version else "was written in place"
        if now.value is None or self.value is None:
            return "has lost its value" if now.value is None else "has a value, and had none"
        if _form(now.value) != _form(self.value):
            return f"is {_form_text(now.value)}, and was {_form_text(self.value)}"
        return None if _same_bits(now.value, self.value) else "has other values"


def constants_of(program: Program) -> tuple[Constant, ...]:
    """The constants of `program`, in the order of its buffers."""
    return tuple(
        Constant(entry.fqn, entry.value, _version_of(entry.value))
        for entry in program.buffers
        if entry.constant
    )


def _version_of(value: Tensor | None) -> int | None:
    return None if value is None or value.is_inference() else value._version


def _form(value: Tensor) -> tuple[object, ...]:
    strides = value.stride() if value.layout is torch.strided else None
    return value.dtype, value.shape, strides, value.device, value.layout


def _form_text(value: Tensor) -> str:
    strided = value.layout is torch.strided
    at = f"strides {value.stride()}" if strided else str(value.layout)
    return f"{value.dtype} of shape {tuple(value.shape)}, {at}, on {value.device}"


_AS_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors of one form have equal bits; any NaN equals any other.

    Sparse and quantized tensors count as different unless they are one object.
    """
    if a.layout is not torch.strided or a.is_quantized:
        return False
    if a.is_complex():
        a, b = torch.view_as_real(a.resolve_conj()), torch.view_as_real(b.resolve_conj())
    a, b = a.resolve_neg(), b.resolve_neg()
    as_integers = _AS_INTEGERS[a.dtype.itemsize]
    equal = a.view(as_integers) == b.view(as_integers)
    if a.is_floating_point() and not equal.all():
        equal |= a.float().isnan() & b.float().isnan()
    return bool(equal.all())

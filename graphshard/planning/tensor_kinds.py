"""Tensors that are more than dense values: subclasses with code of their own, other layouts.

A program computes with plain dense tensors. What a tensor's class adds to them is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.format import some_of
from graphshard.torch_private import compat as torch_compat

_NO_BEHAVIOUR = frozenset(
    {
        "__annotations__",
        "__copy__",
        "__deepcopy__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__getstate__",
        "__init__",
        "__init_subclass__",
        "__module__",
        "__new__",
        "__orig_bases__",
        "__reduce__",
        "__reduce_ex__",
        "__repr__",
        "__setstate__",
        "__slots__",
        "__static_attributes__",
        "__weakref__",
    }
)


_HOOKS = "fsdp_"  # fsdp_pre_all_gather and the like, by which FSDP2 gathers such a parameter


def is_plain(tensor: Tensor) -> bool:
    """Whether the class of `tensor` is torch's own, with nothing to lose."""
    kind = type(tensor)
    return kind is Tensor or kind is nn.Parameter or kind is torch_compat.fake_tensor()


@dataclass(frozen=True)
class Unfit:
    """Why a program cannot hold a tensor (the end of a sentence about it), and what it can hold."""

    reason: str
    instead: str


def unfit(tensor: Tensor) -> Unfit | None:
    """Why a program cannot hold `tensor`; None if it can."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        names: Sequence[Any] = mesh.mesh_dim_names or range(mesh.ndim)
        placed = ", ".join(
            f"{placement!r} over mesh dim {name!r} of size {size}"
            for placement, name, size in zip(tensor.placements, names, mesh.shape, strict=True)
        )
        return Unfit(
            f"is a DTensor: {placed}; another system (tensor parallel, fully_shard) shards it",
            "to_local() or full_tensor()",
        )
    own = () if is_plain(tensor) else own_behaviour(type(tensor))
    if own:
        reason = f"is a {class_name(tensor)}, and a program would not run its own {some_of(own)}"
        if own[0].startswith(_HOOKS):
            return Unfit(
                f"{reason}, but gather the values as they are",
                "plain parameters, as torchao's enable_fsdp_float8_all_gather=False leaves them",
            )
        return Unfit(reason, "a torch.Tensor of its values")
    if tensor.is_nested:
        return Unfit("is a nested tensor, whose rows differ in size", "to_padded_tensor(0.0)")
    if tensor.layout is not torch.strided:
        return Unfit(f"has the layout {tensor.layout}, not torch.strided", "to_dense()")
    if tensor.is_quantized:
        return Unfit(f"is quantized ({tensor.dtype}); a program has no scales", "dequantize()")
    return None


@cache
def own_behaviour(kind: type) -> tuple[str, ...]:
    """The differences of a class of tensors from torch's: hooks of FSDP2, overridden attributes.

    The hooks come first, then torch's protocols.
    """
    names: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Parameter or base is Tensor:
            break
        overridden = {name for name in vars(base) if hasattr(nn.Parameter, name)} - _NO_BEHAVIOUR
        names |= overridden | {name for name in vars(base) if name.startswith(_HOOKS)}
    return tuple(sorted(names, key=lambda n: (not n.startswith(_HOOKS), n[:8] != "__torch_", n)))


def class_name(tensor: Tensor) -> str:
    """The class of `tensor` after the package that it is from, e.g. "torchao.Int8Tensor"."""
    kind = type(tensor)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ if package == "__main__" else f"{package}.{kind.__qualname__}"

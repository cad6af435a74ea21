"""DTensors on several meshes in torch's `clip_grad_norm_`.

It stacks norms and multiplies gradients, both of DTensors of one mesh only. So it refuses
parameters of which some are split along one dim and some along two, on the same ranks as a grid.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor

from graphshard.torch_private.full_tensors import full_tensor
from graphshard.torch_private.patches import dtensor_handlers, patched_for_good


@cache
def let_meshes_mix() -> None:
    """Let `torch.stack` and `torch._foreach_mul_` by a number take several meshes, for good.

    A stack is a plain tensor then, the same on every rank.
    """
    handlers = dtensor_handlers()
    for op, handler in _HANDLERS.items():
        handlers.setdefault(op, None)
        patched_for_good(handlers, op, handler, where=f"the handler of DTensors for {op}")


def _stack(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensors: Sequence[Any] = args[0]
    by_mesh = _places_by_mesh(tensors)
    with _by_torch(op):
        if len(by_mesh) == 1:
            return op(*args, **kwargs)
        whole: list[Tensor] = list(tensors)
        for mesh, places in by_mesh.items():
            if mesh is not None:
                alike = torch.stack([tensors[place] for place in places])
                for place, one in zip(places, full_tensor(alike).unbind(), strict=True):
                    whole[place] = one
        return op(whole, *args[1:], **kwargs)


def _multiply(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    tensors, *others = args
    with _by_torch(op):
        for places in _places_by_mesh(tensors).values():
            op([tensors[place] for place in places], *others, **kwargs)


_HANDLERS = {
    torch.ops.aten.stack.default: _stack,
    torch.ops.aten._foreach_mul_.Tensor: _multiply,
}


def _places_by_mesh(tensors: Sequence[Any]) -> dict[Any, list[int]]:
    places: dict[Any, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault(getattr(tensor, "device_mesh", None), []).append(place)
    return places


@contextmanager
def _by_torch(op: Any) -> Iterator[None]:
    """A context without the handler of `op`, which torch calls in place of its own rules."""
    handler = dtensor_handlers().pop(op)
    try:
        yield
    finally:
        dtensor_handlers()[op] = handler

"""Check the tensors of a call, as a program takes plain dense ones, and tell calls apart."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from graphshard.capture.dynamic import Names, strides_of
from graphshard.capture.structure import Structure
from graphshard.errors import CaptureError, warn_user
from graphshard.planning.model_checks import Unfit, class_name, is_plain, unfit

_NO_NAMES: Names = {}


def require_fit(tensors: Sequence[Tensor], structure: Structure) -> None:
    """Check that a program can take the `tensors` of a call."""
    for index, tensor in enumerate(tensors):
        problem = unfit(tensor)
        if problem is None and (tensor.is_conj() or tensor.is_neg()):
            lazy = "is conjugated or negated when it is read"
            problem = Unfit(lazy, "resolve_conj().resolve_neg()")
        if problem is not None:
            raise CaptureError(
                f"{structure.paths[index]} {problem.reason}; a program takes plain dense tensors, "
                f"so pass {problem.instead}"
            )


def require_values_of(tensors: Sequence[Tensor], structure: Structure) -> None:
    """Check that the `tensors` of a call that is to run are not on meta."""
    for path, tensor in zip(structure.paths, tensors, strict=True):
        if tensor.device.type == "meta":
            raise CaptureError(
                f"{path} is on the meta device, so the call has nothing to compute with; pass a "
                "tensor with values (example_inputs of graphshard.compile and graphshard.plan may "
                "be on meta)"
            )


def as_plain(tensors: Sequence[Tensor], structure: Structure, noted: set[type]) -> list[Tensor]:
    """The tensors of a call as instances of torch.Tensor itself.

    A warning tells of each other class that is not in `noted`, which is added to it.
    """
    require_fit(tensors, structure)
    plain = []
    for path, tensor in zip(structure.paths, tensors, strict=True):
        if is_plain(tensor):
            plain.append(tensor)
            continue
        if type(tensor) not in noted:
            noted.add(type(tensor))
            warn_user(
                f"{path} is a {class_name(tensor)}; a captured forward sees a plain tensor with "
                "its values, so it takes no path that asks for the class, and returns none",
            )
        plain.append(tensor.as_subclass(Tensor))
    return plain


def signature_of(
    tensors: Sequence[Tensor],
    structure: Structure,
    names: Sequence[Names] | None = None,
    *,
    by_identity: bool = False,
) -> tuple[Any, ...]:
    """The properties of a call, taken apart, that a captured program depends on, hashable.

    A tensor counts by shape, dtype, device type, requires_grad, strides if it is not contiguous,
    and by whether it is conjugated or negated when it is read. Functions, classes and modules count
    by identity, everything else by value. A dimension in `names` counts by its name instead of its
    size. With `by_identity` it counts which arguments are one tensor.
    """
    same = first_places(tensors) if by_identity else ()
    try:
        if names is None:
            return tuple(map(_tensor_key, tensors)), structure, same
        return tuple(map(_tensor_key, tensors, names)), structure, same
    except RuntimeError:  # a nested or compressed tensor has no shape or strides
        require_fit(tensors, structure)
        raise


def first_places(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """For each of `tensors` the first place where the same object is; () if all are distinct."""
    ids = list(map(id, tensors))
    return () if len(set(ids)) == len(ids) else tuple(map(ids.index, ids))


def _tensor_key(tensor: Tensor, names: Names = _NO_NAMES) -> tuple[Any, ...]:
    rest: tuple[Any, ...] = (tensor.dtype, tensor.device.type, tensor.requires_grad)
    if tensor.dtype.is_complex:
        rest += (tensor.is_conj(),)
    if names:
        shape = tuple([names.get(dim, size) for dim, size in enumerate(tensor.shape)])
        return (shape, *rest, strides_of(tensor))
    strides = None if tensor.is_contiguous() else (*tensor.stride(), tensor.is_neg())
    return (tuple(tensor.shape), *rest, strides)

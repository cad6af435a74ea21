"""Check the tensors of a call: a program takes plain dense ones."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from torch import Tensor

from graphshard.capture.structure import Structure
from graphshard.errors import CaptureError
from graphshard.planning.model_checks import Unfit, class_name, is_plain, unfit


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


def as_plain(
    tensors: Sequence[Tensor], structure: Structure, noted: set[type], stacklevel: int
) -> list[Tensor]:
    """The tensors of a call as instances of torch.Tensor itself.

    A warning tells of each other class that is not in `noted`, which is added to it. `stacklevel`
    is seen from the caller of this function.
    """
    require_fit(tensors, structure)
    plain = []
    for path, tensor in zip(structure.paths, tensors, strict=True):
        if is_plain(tensor):
            plain.append(tensor)
            continue
        if type(tensor) not in noted:
            noted.add(type(tensor))
            warnings.warn(
                f"{path} is a {class_name(tensor)}; a captured forward sees a plain tensor with "
                "its values, so it takes no path that asks for the class, and returns none",
                stacklevel=stacklevel + 1,
            )
        plain.append(tensor.as_subclass(Tensor))
    return plain

"""Taking the tensors out of nested values and putting them back.

Containers that torch's pytree knows (tuples, lists, dicts, transformers' ModelOutput, ...) are
flattened by it. Any other object that holds tensors (a transformers cache, a user's batch class) is
pickled with numbered holes where its tensors are; unpickling it later with other tensors in the
holes gives an equal object around them. Functions, classes and modules inside such an object are
kept by reference.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphshard.errors import CaptureError

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size,
)  # fmt: skip
_BY_REFERENCE = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    nn.Module, torch.Generator,
)  # fmt: skip


@dataclass(frozen=True)
class _Hole:
    """Stands for the tensor of this number in a flattened value."""

    index: int


@dataclass(frozen=True)
class _Opaque:
    """An object pytree does not know, as bytes; `holes` are the numbers of its tensors."""

    type_name: str
    data: bytes
    holes: tuple[int, ...]
    references: tuple[Any, ...]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.references: list[Any] = []

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if isinstance(obj, Tensor):
            return "tensor", _position(self.tensors, obj)
        if isinstance(obj, _BY_REFERENCE):
            return "reference", _position(self.references, obj)
        return None


class _Unpickler(pickle.Unpickler):
    def __init__(self, data: bytes, tensors: Sequence[Any], references: Sequence[Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._kinds = {"tensor": tensors, "reference": references}

    def persistent_load(self, pid: tuple[str, int]) -> Any:
        kind, index = pid
        return self._kinds[kind][index]


@dataclass(frozen=True)
class Structure:
    """A nested value without its tensors; `build` puts tensors in."""

    spec: pytree.TreeSpec
    leaves: tuple[Any, ...]  # _Hole, _Opaque or a plain value
    paths: tuple[str, ...]  # where each tensor was, e.g. "args[0]['ids']"

    def build(self, tensors: Sequence[Any]) -> Any:
        """The value with `tensors` (in the order of `paths`) in its holes."""
        return pytree.tree_unflatten([_fill(leaf, tensors) for leaf in self.leaves], self.spec)

    def same_as(self, other: Structure) -> bool:
        """Whether both have the same containers, plain values and tensor positions."""
        return self.spec == other.spec and _comparable(self) == _comparable(other)


def take_apart(value: Any, *, name: str) -> tuple[list[Tensor], Structure]:
    """Flatten `value` into its tensors and the structure around them.

    Args:
        value: any nest of containers, tensors and other objects.
        name: what the value is called in paths and errors, e.g. "args".

    Raises:
        CaptureError: an object pytree does not know cannot be pickled either.
    """
    keyed, spec = pytree.tree_flatten_with_path(value)
    tensors: list[Tensor] = []
    leaves: list[Any] = []
    paths: list[str] = []
    for key_path, leaf in keyed:
        path = name + pytree.keystr(key_path)
        if isinstance(leaf, Tensor):
            leaves.append(_Hole(len(tensors)))
            tensors.append(leaf)
            paths.append(path)
        elif isinstance(leaf, (*_PLAIN, *_BY_REFERENCE)):
            leaves.append(leaf)
        else:
            found, opaque = _freeze(leaf, path, start=len(tensors))
            leaves.append(opaque if found else leaf)
            tensors.extend(found)
            paths.extend(f"{path}<{opaque.type_name}>[{i}]" for i in range(len(found)))
    return tensors, Structure(spec, tuple(leaves), tuple(paths))


def _freeze(obj: Any, path: str, start: int) -> tuple[list[Tensor], _Opaque]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    type_name = type(obj).__name__
    try:
        pickler.dump(obj)
    except Exception as error:
        raise CaptureError(
            f"{path} is a {type_name}, which holds what cannot be taken apart ({error}); "
            "return or pass tensors in tuples, lists, dicts or dataclasses, or register the class "
            "with torch.utils._pytree.register_pytree_node"
        ) from error
    holes = tuple(range(start, start + len(pickler.tensors)))
    opaque = _Opaque(type_name, file.getvalue(), holes, tuple(pickler.references))
    return pickler.tensors, opaque


def _fill(leaf: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(leaf, _Hole):
        return tensors[leaf.index]
    if isinstance(leaf, _Opaque):
        inside = [tensors[hole] for hole in leaf.holes]
        return _Unpickler(leaf.data, inside, leaf.references).load()
    return leaf


def _comparable(structure: Structure) -> tuple[Any, ...]:
    return tuple(
        (leaf.type_name, leaf.data, leaf.holes, tuple(map(id, leaf.references)))
        if isinstance(leaf, _Opaque)
        else leaf
        for leaf in structure.leaves
    )


def signature_of_structure(structure: Structure) -> tuple[Any, ...]:
    """What of `structure` a captured program depends on, hashable.

    Plain values count by value and type (True is not 1), anything else by identity.
    """
    return structure.spec, tuple(_leaf_key(leaf) for leaf in structure.leaves)


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, _Hole):
        return leaf
    if isinstance(leaf, _Opaque):
        return leaf.type_name, leaf.data, leaf.holes, tuple(map(id, leaf.references))
    if isinstance(leaf, _PLAIN):
        return type(leaf), leaf
    return type(leaf), id(leaf)


def _position(items: list[Any], obj: Any) -> int:
    for index, item in enumerate(items):
        if item is obj:
            return index
    items.append(obj)
    return len(items) - 1

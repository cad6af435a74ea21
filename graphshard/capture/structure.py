"""Taking tensors (and symbolic sizes) out of nested values and putting them back.

Containers that torch's pytree knows (tuples, lists, dicts, transformers' ModelOutput, ...) are
flattened by it. Any other object (a transformers cache, a user's batch class) is pickled with
numbered holes where its tensors are; unpickling it later with other tensors in the holes gives an
equal object around them. Functions, classes and modules inside such an object are kept by
reference.
"""

from __future__ import annotations

import io
import pickle
import types
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from graphshard.errors import CaptureError

_PLAIN = (
    type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.layout,
    torch.memory_format, torch.Size,
)  # fmt: skip


_TAKEN_OUT = (Tensor, torch.SymInt, torch.SymFloat, torch.SymBool)


_BY_REFERENCE = (
    type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType,
    nn.Module, torch.Generator,
)  # fmt: skip


@dataclass(frozen=True)
class _Hole:
    """Stands for the tensor of this number in a flattened value."""

    index: int


@dataclass(frozen=True, eq=False)
class _Same:
    """An object compared by identity, and kept alive so that no other gets its id."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class _Opaque:
    """An object pytree does not know, as bytes; `holes` are the numbers of its tensors."""

    type_name: str
    data: bytes
    holes: tuple[int, ...]
    references: tuple[_Same, ...]


class _Pickler(pickle.Pickler):
    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.tensors: list[Tensor] = []
        self.references: list[Any] = []

    def persistent_id(self, obj: Any) -> tuple[str, int] | None:
        if isinstance(obj, _TAKEN_OUT):
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


CALL = ""
"""The name of the value `(args, kwargs)`, whose paths read "args[0]" and "kwargs['x']"."""


@dataclass(frozen=True)
class Structure:
    """A nested value without its tensors; `build` puts tensors in. Hashable, equal by content.

    Plain values count by value and type (True is not 1), other objects by what they hold, and
    functions, classes and modules by identity.
    """

    name: str
    spec: pytree.TreeSpec
    leaves: tuple[tuple[type, Any], ...]  # with the type: a _Hole, _Same, _Opaque or plain value

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.spec, self.leaves))

    def build(self, tensors: Sequence[Any]) -> Any:
        """The value with `tensors` (in the order of `paths`) in its holes."""
        if self._is_tensor:
            return tensors[0]
        filled = [_fill(leaf, tensors) for _, leaf in self.leaves]
        return pytree.tree_unflatten(filled, self.spec)

    @cached_property
    def _is_tensor(self) -> bool:
        return self.spec.is_leaf() and self.leaves[0][0] is _Hole

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Where each tensor is, e.g. "args[0]['ids']"."""
        numbered = pytree.tree_unflatten(range(len(self.leaves)), self.spec)
        paths = []
        for (key_path, _), (_, leaf) in zip(
            pytree.tree_flatten_with_path(numbered)[0], self.leaves, strict=True
        ):
            path = _readable(self.name, key_path)
            if isinstance(leaf, _Hole):
                paths.append(path)
            elif isinstance(leaf, _Opaque):
                paths += [f"{path}<{leaf.type_name}>[{i}]" for i in range(len(leaf.holes))]
        return tuple(paths)


def take_apart(value: Any, *, name: str) -> tuple[list[Tensor], Structure]:
    """Flatten `value` into its tensors and the structure around them.

    Symbolic sizes among the results of a model count as tensors.

    Args:
        value: any nest of containers, tensors and other objects.
        name: what the value is called in paths and errors, e.g. "out"; `CALL` for a call's
            `(args, kwargs)`.

    Raises:
        CaptureError: an object pytree does not know cannot be pickled either.
    """
    leaves, spec = pytree.tree_flatten(value)
    tensors: list[Any] = []
    stand_ins: list[tuple[type, Any]] = []
    for leaf in leaves:
        if isinstance(leaf, _TAKEN_OUT):
            stand_ins.append((_Hole, _Hole(len(tensors))))
            tensors.append(leaf)
        elif isinstance(leaf, _PLAIN):
            stand_ins.append((type(leaf), leaf))
        elif isinstance(leaf, _BY_REFERENCE):
            stand_ins.append((_Same, _Same(leaf)))
        else:
            inner_tensors, opaque = _freeze(leaf, name, start=len(tensors))
            stand_ins.append((_Opaque, opaque))
            tensors.extend(inner_tensors)
    return tensors, Structure(name, spec, tuple(stand_ins))


def _freeze(obj: Any, name: str, start: int) -> tuple[list[Tensor], _Opaque]:
    file = io.BytesIO()
    pickler = _Pickler(file)
    type_name = type(obj).__name__
    try:
        pickler.dump(obj)
    except Exception as error:
        where = "an argument" if name == CALL else f"a part of {name}"
        raise CaptureError(
            f"{where} is a {type_name}, which holds what cannot be taken apart ({error}); "
            "return or pass tensors in tuples, lists, dicts or dataclasses, or register the class "
            "with torch.utils._pytree.register_pytree_node"
        ) from error
    holes = tuple(range(start, start + len(pickler.tensors)))
    references = tuple(_Same(reference) for reference in pickler.references)
    return pickler.tensors, _Opaque(type_name, file.getvalue(), holes, references)


def _fill(leaf: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(leaf, _Hole):
        return tensors[leaf.index]
    if isinstance(leaf, _Same):
        return leaf.value
    if isinstance(leaf, _Opaque):
        inside = [tensors[hole] for hole in leaf.holes]
        return _Unpickler(leaf.data, inside, [same.value for same in leaf.references]).load()
    return leaf


def _readable(name: str, key_path: tuple[Any, ...]) -> str:
    if name != CALL:
        return name + pytree.keystr(key_path)
    return ("kwargs" if key_path[0].idx else "args") + pytree.keystr(key_path[1:])


def _position(items: list[Any], obj: Any) -> int:
    for index, item in enumerate(items):
        if item is obj:
            return index
    items.append(obj)
    return len(items) - 1

"""Taking tensors (and symbolic sizes) out of nested values and putting them back.

Containers that torch's pytree knows (tuples, lists, dicts, transformers' ModelOutput, ...) are
flattened by it. Any other object (a transformers cache, a user's batch class) is pickled with
numbered holes where its tensors are; unpickling it later with other tensors in the holes gives an
equal object around them. Functions, classes and modules inside such an object are kept by
reference.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
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


_CONTAINERS = (tuple, list, dict, OrderedDict, defaultdict, deque)


@dataclass(frozen=True)
class _Hole:
    """Stands for the tensor of this number in a flattened value."""

    index: int


@dataclass(frozen=True, eq=False)
class Same:
    """An object compared by identity, and kept alive so that no other gets its id."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return self.value is other.value if isinstance(other, Same) else NotImplemented

    def __hash__(self) -> int:
        return id(self.value)


@dataclass(frozen=True)
class _Opaque:
    """An object pytree does not know, as bytes; `holes` are the numbers of its tensors."""

    type_name: str
    data: bytes
    holes: tuple[int, ...]
    references: tuple[Same, ...]


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


@dataclass(frozen=True)
class _Number:
    """A zero or NaN, told from others by its text: 0.0 is not -0.0, and NaN is NaN."""

    text: str
    value: Any = field(compare=False)


def comparable(number: Any) -> Any:
    """Return a float or complex, which == and != may not tell apart as needed, as what may."""
    return _Number(repr(number), number) if number == 0 or number != number else number


CALL = ""
"""The name of the value `(args, kwargs)`, whose paths read "args[0]" and "kwargs['x']".

A trace may add a list of drawn numbers, whose paths read "draws[0]".
"""


@dataclass(frozen=True)
class Structure:
    """A nested value without its tensors; `build` puts tensors in. Hashable, equal by content.

    Plain values count by value and type (True is not 1), other objects by what they hold, and
    functions, classes and modules by identity.
    """

    name: str
    spec: pytree.TreeSpec
    leaves: tuple[tuple[type, Any], ...]  # with the type: a _Hole, Same, _Opaque or plain value

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
        if self._holds_sizes:
            return _with_sizes(self.spec, iter(filled))
        return pytree.tree_unflatten(filled, self.spec)

    @cached_property
    def _is_tensor(self) -> bool:
        return self.spec.is_leaf() and self.leaves[0][0] is _Hole

    @property
    def references(self) -> tuple[Any, ...]:
        """The functions, classes and modules in it, which are kept by reference."""
        values = [value for _, value in self.leaves]
        inside = [
            same for value in values if isinstance(value, _Opaque) for same in value.references
        ]
        return tuple(same.value for same in (*values, *inside) if isinstance(same, Same))

    @property
    def is_plain(self) -> bool:
        """Whether it holds plain values and tensors alone, in containers that pytree knows."""
        return not any(kind in (Same, _Opaque) for kind, _ in self.leaves)

    @cached_property
    def _holds_sizes(self) -> bool:
        stack = [self.spec]
        while stack:
            spec = stack.pop()
            if spec.type is torch.Size:
                return True
            stack += spec.children()
        return False

    @cached_property
    def paths(self) -> tuple[str, ...]:
        """Where each tensor is, e.g. "args[0]['ids']"."""
        parts = [(self.name, self.spec)]
        if self.name == CALL:
            parts = [*zip(("args", "kwargs", "draws"), self.spec.children(), strict=False)]
        leaf_paths = [path for name, spec in parts for path in _leaf_paths(name, spec)]
        paths = []
        for path, (_, leaf) in zip(leaf_paths, self.leaves, strict=True):
            if isinstance(leaf, _Hole):
                paths.append(path)
            elif isinstance(leaf, _Opaque):
                paths += [f"{path}<{leaf.type_name}>[{i}]" for i in range(len(leaf.holes))]
        return tuple(paths)


def take_apart(value: Any, *, name: str) -> tuple[list[Tensor], Structure]:
    """Flatten any nest of containers, tensors and other objects into tensors and the rest.

    Symbolic sizes among the results of a model count as tensors. What is in a `Same` stays as it
    is, tensors included, and is taken out of it when the value is built. Paths and errors call the
    value `name`, e.g. "out"; `CALL` is for a call's `(args, kwargs)`.
    """
    leaves, spec = pytree.tree_flatten(value)
    _refuse_hidden_tensors(spec, name)
    tensors: list[Any] = []
    stand_ins: list[tuple[type, Any]] = []
    for leaf in leaves:
        if isinstance(leaf, _TAKEN_OUT):
            stand_ins.append((_Hole, _Hole(len(tensors))))
            tensors.append(leaf)
        elif isinstance(leaf, Same):
            stand_ins.append((Same, leaf))
        elif type(leaf) in (float, complex):
            stand_ins.append((type(leaf), comparable(leaf)))
        elif isinstance(leaf, _PLAIN):
            stand_ins.append((type(leaf), leaf))
        elif isinstance(leaf, _BY_REFERENCE):
            stand_ins.append((Same, Same(leaf)))
        else:
            inner_tensors, opaque = _freeze(leaf, name, start=len(tensors))
            stand_ins.append((_Opaque, opaque))
            tensors.extend(inner_tensors)
    return tensors, Structure(name, spec, tuple(stand_ins))


_TENSORS = (Tensor, nn.Parameter)

_FLAT = frozenset({type(None), bool, int, float, str})


class FlatCalls:
    """A cache of the structures of calls without nested arguments."""

    def __init__(self) -> None:
        self._by_form: dict[tuple[Any, ...], Structure] = {}

    def take_apart(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[list[Tensor], Structure]:
        """Flatten a call as `take_apart` does, faster for known forms."""
        tensors: list[Tensor] = []
        form: list[Any] = [len(args), *kwargs]
        for value in (*args, *kwargs.values()):
            kind = type(value)
            if kind in _TENSORS:
                form.append(Tensor)
                tensors.append(value)
            elif kind in _FLAT:
                # With the type: True is not 1.
                form += (kind, comparable(value) if kind is float else value)
            else:
                return take_apart((args, kwargs), name=CALL)
        structure = self._by_form.get(tuple(form))
        if structure is None:
            tensors, structure = take_apart((args, kwargs), name=CALL)
            self._by_form[tuple(form)] = structure
        return tensors, structure


def holds_tensors(value: Any) -> bool:
    """Whether `value`, taken apart, gives any tensor or symbolic size."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, _TAKEN_OUT):
            return True
        if not isinstance(leaf, (Same, *_PLAIN, *_BY_REFERENCE)):
            pickler = _Pickler(io.BytesIO())
            with contextlib.suppress(Exception):  # what an object raises that cannot be pickled
                pickler.dump(leaf)
            if pickler.tensors:
                return True
    return False


def _refuse_hidden_tensors(spec: pytree.TreeSpec, name: str) -> None:
    stack = [spec]
    while stack:
        spec = stack.pop()
        stack += spec.children()
        if spec.is_leaf() or spec.type in _CONTAINERS:
            continue
        if any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(spec.context)):
            raise CaptureError(
                f"{'an argument' if name == CALL else f'a part of {name}'} is a "
                f"{spec.type.__name__}, whose flatten function keeps a tensor in its context, "
                "where a program cannot replace it; return the tensor among the children"
            )


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
    references = tuple(Same(reference) for reference in pickler.references)
    return pickler.tensors, _Opaque(type_name, file.getvalue(), holes, references)


def _fill(leaf: Any, tensors: Sequence[Any]) -> Any:
    if isinstance(leaf, _Hole):
        return tensors[leaf.index]
    if isinstance(leaf, Same):
        return leaf.value
    if isinstance(leaf, _Number):
        return leaf.value
    if isinstance(leaf, _Opaque):
        inside = [tensors[hole] for hole in leaf.holes]
        return _Unpickler(leaf.data, inside, [same.value for same in leaf.references]).load()
    return leaf


def _leaf_paths(path: str, spec: pytree.TreeSpec) -> Iterator[str]:
    if spec.is_leaf():
        yield path
        return
    for key, child in zip(_keys(spec), spec.children(), strict=True):
        yield from _leaf_paths(path + key, child)


def _keys(spec: pytree.TreeSpec) -> list[str]:
    """The path to each child of a container, e.g. "[0]" or ".loss"."""
    count = spec.num_children
    if hasattr(spec.context, "_fields"):  # the class of a namedtuple
        return [f".{name}" for name in spec.context._fields]
    if issubclass(spec.type, Mapping) and _is_list_of(count, spec.context):
        return [f"[{key!r}]" for key in spec.context]
    node = pytree.SUPPORTED_NODES[spec.type]
    if node.flatten_with_keys_fn is not None:
        # Only a container tells its keys. Its class is the user's and may refuse numbers.
        with contextlib.suppress(Exception):
            container = node.unflatten_fn([*range(count)], spec.context)
            keyed, _ = node.flatten_with_keys_fn(container)
            keys = [pytree.keystr((key,)) for key, _ in keyed]
            if len(keys) == count:
                return keys
    return [f"<{spec.type.__name__}>[{index}]" for index in range(count)]


def _is_list_of(count: int, context: Any) -> bool:
    return isinstance(context, list | tuple) and len(context) == count


def _with_sizes(spec: pytree.TreeSpec, leaves: Iterator[Any]) -> Any:
    """As `tree_unflatten`, which makes a plain tuple of a torch.Size."""
    if spec.is_leaf():
        return next(leaves)
    children = [_with_sizes(child, leaves) for child in spec.children()]
    if spec.type is torch.Size:
        return torch.Size(children)
    return pytree.SUPPORTED_NODES[spec.type].unflatten_fn(children, spec.context)


def _position(items: list[Any], obj: Any) -> int:
    for index, item in enumerate(items):
        if item is obj:
            return index
    items.append(obj)
    return len(items) - 1

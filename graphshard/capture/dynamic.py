"""The `dynamic` argument: which dimensions of a call's tensors may differ from call to call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from graphshard.capture.structure import CALL, Structure, take_apart
from graphshard.errors import PolicyError
from graphshard.program.sizes import Sizes, contiguous_strides

_POSITIONAL = re.compile(r"args\[(\d+)\](.*)", re.DOTALL)


_KEYWORD = re.compile(r"kwargs\['(\w+)'\](.*)", re.DOTALL)


@dataclass(frozen=True)
class Arguments:
    """The parameters of a forward."""

    parameters: tuple[str, ...]  # without *args and **kwargs
    rest: str | None  # the name of *args
    takes_any: bool  # has *args or **kwargs
    _labels: dict[Structure, tuple[str, ...]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, model: nn.Module) -> Arguments:
        """The arguments that the forward of `model` takes."""
        parameters: list[str] = []
        rest = None
        takes_any = False
        for name, parameter in inspect.signature(model.forward).parameters.items():
            if parameter.kind is parameter.VAR_POSITIONAL:
                rest, takes_any = name, True
            elif parameter.kind is parameter.VAR_KEYWORD:
                takes_any = True
            else:
                parameters.append(name)
        return cls(tuple(parameters), rest, takes_any)

    def may_be_passed(self, name: str) -> bool:
        """Whether some call could pass a tensor of that name or path."""
        root = root_of(name)
        return self.takes_any or root in self.parameters or root in ("args", "kwargs")

    def labels(self, structure: Structure) -> tuple[str, ...]:
        """The path of each tensor, beginning with the parameter's name: "batch['ids']"."""
        labels = self._labels.get(structure)
        if labels is None:
            labels = self._labels[structure] = tuple(map(self._label, structure.paths))
        return labels

    def _label(self, path: str) -> str:
        if match := _KEYWORD.fullmatch(path):
            return match[1] + match[2]
        if match := _POSITIONAL.fullmatch(path):
            position = int(match[1])
            if position < len(self.parameters):
                return self.parameters[position] + match[2]
            return f"{self.rest}[{position - len(self.parameters)}]{match[2]}"
        return path


def root_of(label: str) -> str:
    """The argument that holds the tensor `label`."""
    return re.split(r"[\[.<]", label, maxsplit=1)[0]


Names = Mapping[int, str]
"""The dynamic dimensions of one tensor, by number, with their names."""


Strides = tuple[Any, ...] | None
"""The layout in memory of a tensor of dynamic sizes: None if contiguous, else one entry per dim.

An entry is "0" or "1", the stride itself; the number of another dim, whose stride times size it is;
or None for any other stride."""


AUTO: Final = "auto"
"""The value of the argument that leaves the choice to `graphshard.module.call_sizes`."""


_EXAMPLE = (
    'for instance dynamic={"input_ids": {0: "batch", 1: "seq"}}, or be "auto" in graphshard.compile'
)


@dataclass(frozen=True)
class Dynamic:
    """Dimensions that have no fixed size, by argument; checked against a model's forward.

    An argument is a parameter of forward, however the call passes it, or the path of a tensor in a
    nested one: "batch['ids']", or as a dump shows it, "args[0]['ids']". Dimensions of one name have
    one size in each call.
    """

    dimensions: Mapping[str, Mapping[int, str]]
    arguments: Arguments
    _resolved: dict[Structure, tuple[Names, ...]] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, model: nn.Module, dynamic_argument: object) -> Dynamic | None:
        """The user's `dynamic` argument, checked; None if it names no dimension."""
        dimensions = _check_mapping(dynamic_argument)
        if not dimensions:
            return None
        arguments = Arguments.of(model)
        for name in dimensions:
            if not arguments.may_be_passed(name):
                raise PolicyError(
                    f"dynamic names {name!r}, which the forward of {type(model).__name__} does not "
                    f"take; its arguments are {', '.join(arguments.parameters) or 'none'}"
                )
        return cls(dimensions, arguments)

    def names(self, tensors: Sequence[Tensor], structure: Structure) -> tuple[Names, ...]:
        """The dynamic dimensions of each tensor of a call."""
        names = self._resolved.get(structure)
        if names is None:
            names = self._resolved[structure] = self._resolve(tensors, structure)
        first: dict[str, tuple[int, int, int]] = {}  # size, tensor, dimension by name
        for index, dims in enumerate(names):
            shape = tensors[index].shape
            for dim, name in dims.items():
                if dim >= len(shape):
                    self._refuse_dim(self.arguments.labels(structure)[index], dim, tensors[index])
                size, other, place = first.setdefault(name, (shape[dim], index, dim))
                if size != shape[dim]:
                    labels = self.arguments.labels(structure)
                    raise PolicyError(
                        f"dynamic calls both dim {place} of {labels[other]} and dim {dim} of "
                        f"{labels[index]} {name!r}, but in this call their sizes are {size} and "
                        f"{shape[dim]}; give sizes that may differ different names"
                    )
        return names

    def of_example(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Names, ...]]:
        """(args, kwargs, dynamic dimensions) of an example, with dynamic sizes of at least 2."""
        tensors, structure = take_apart((args, kwargs), name=CALL)
        names = self.names(tensors, structure)
        args, kwargs = structure.build(enlarge_small_dims(tensors, names))
        return args, kwargs, names

    def _resolve(self, tensors: Sequence[Tensor], structure: Structure) -> tuple[Names, ...]:
        labels = self.arguments.labels(structure)
        names: list[dict[int, str]] = [{} for _ in tensors]
        for name, dims in self.dimensions.items():
            matches = [i for i, both in enumerate(zip(labels, structure.paths, strict=True))
                       if name in both]  # fmt: skip
            if not matches:
                self._refuse_unless_absent(name, labels, tensors, structure)
                continue
            (index,) = matches
            for dim, size in dims.items():
                at = dim + tensors[index].ndim if dim < 0 else dim
                if not 0 <= at < tensors[index].ndim:
                    self._refuse_dim(name, dim, tensors[index])
                if names[index].setdefault(at, size) != size:
                    raise PolicyError(
                        f"dynamic gives dim {at} of {name} two names, {names[index][at]!r} and "
                        f"{size!r}; give it one"
                    )
        return tuple(names)

    def _refuse_unless_absent(
        self, name: str, labels: Sequence[str], tensors: Sequence[Tensor], structure: Structure
    ) -> None:
        inside = [label for label in labels if label.startswith((f"{name}[", f"{name}.",
                                                                 f"{name}<"))]  # fmt: skip
        if inside:
            raise PolicyError(
                f"dynamic names {name!r}, which holds several tensors; name one of them: "
                f"{', '.join(inside)}"
            )
        if name != root_of(name) or name not in self.arguments.parameters:
            raise PolicyError(
                f"dynamic names {name!r}, which is no tensor of this call; its tensors are "
                f"{', '.join(labels) or 'none'}"
            )
        value = self._passed(name, *structure.build(tensors))
        if value is not None:
            raise PolicyError(
                f"dynamic names {name!r}, which in this call is a {type(value).__name__} and no "
                "tensor; only dimensions of tensors can be dynamic"
            )
        # Passed as None or not at all, as labels may be in evaluation.

    def _passed(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        position = self.arguments.parameters.index(name)
        return args[position] if position < len(args) else kwargs.get(name)

    @staticmethod
    def _refuse_dim(name: str, dim: int, tensor: Tensor) -> None:
        raise PolicyError(
            f"dynamic names dim {dim} of {name}, a tensor of {tensor.ndim} dimensions; its "
            f"shape is {list(tensor.shape)}"
        )


def _check_mapping(dynamic_argument: object) -> dict[str, dict[int, str]]:
    if dynamic_argument is None:
        return {}
    rule = "dynamic must map names of the forward's arguments to {dimension: name}"
    if dynamic_argument == AUTO:
        raise PolicyError(
            'dynamic="auto" learns from the calls of a sharded module, and a plan has one example; '
            "name the dimensions that change"
        )
    if not isinstance(dynamic_argument, Mapping):
        raise PolicyError(f"{rule}, {_EXAMPLE}; got {dynamic_argument!r}")
    for argument, dims in dynamic_argument.items():
        if not isinstance(argument, str) or not isinstance(dims, Mapping):
            raise PolicyError(f"{rule}, {_EXAMPLE}; got {argument!r}: {dims!r}")
        for dim, name in dims.items():
            if type(dim) is not int or not isinstance(name, str) or not name.isidentifier():
                raise PolicyError(
                    f"{rule}, a name being letters, digits and underscores, {_EXAMPLE}; got "
                    f"{argument!r}: {dict(dims)!r}"
                )
    return {argument: dict(dims) for argument, dims in dynamic_argument.items() if dims}


# -- shapes of a call -----------------------------------------------------------------------------


def dims_above_one(tensors: Sequence[Tensor], names: Sequence[Names]) -> tuple[Names, ...]:
    """The dimensions in `names` whose size in this call is at least 2.

    A size of 1 may broadcast, and a size of 0 leaves nothing to compute. Code takes other paths
    then, so such calls have programs of their own, in which the size is fixed.
    """
    return tuple(
        {dim: name for dim, name in dims.items() if tensor.shape[dim] > 1}
        for tensor, dims in zip(tensors, names, strict=True)
    )


def drop_names(names: Sequence[Names], unwanted: Collection[str]) -> tuple[Names, ...]:
    """`names` without those in `unwanted`."""
    return tuple(
        {dim: name for dim, name in dims.items() if name not in unwanted} for dims in names
    )


def enlarge_small_dims(tensors: Sequence[Tensor], names: Sequence[Names]) -> list[Tensor]:
    """The tensors of an example; one with a dynamic size below 2 becomes a larger, empty one."""
    used_sizes = {size for tensor in tensors for size in tensor.shape}
    sizes: dict[str, int] = {}
    result: list[Tensor] = []
    for tensor, dims in zip(tensors, names, strict=True):
        shape = list(tensor.shape)
        for dim, name in dims.items():
            if shape[dim] < 2 and name not in sizes:
                # No other dimension has this size, so that the model cannot confuse two sizes.
                sizes[name] = next(n for n in range(2, len(used_sizes) + 3) if n not in used_sizes)
                used_sizes.add(sizes[name])
            shape[dim] = sizes.get(name, shape[dim])
        if shape == list(tensor.shape):
            result.append(tensor)
        else:
            larger = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
            result.append(larger.requires_grad_(tensor.requires_grad))
    return result


def strides_of(tensor: Tensor) -> Strides:
    """The layout in memory of `tensor`, independent of its sizes; see `Strides`."""
    if tensor.is_contiguous():
        return None
    shape, strides = tensor.shape, tensor.stride()
    pattern: list[Any] = []
    for stride in strides:
        if stride in (0, 1):
            pattern.append(str(stride))
            continue
        inner = [
            dim for dim, other in enumerate(strides)
            if 0 < other < stride and other * shape[dim] == stride
        ]  # fmt: skip
        pattern.append(inner[0] if inner else None)
    return tuple(pattern)


def symbolic_shapes(
    tensors: Sequence[Tensor], names: Sequence[Names], labels: Sequence[str], sizes: Sizes
) -> list[tuple[list[Any], list[Any]]]:
    """Shape and strides of each tensor, with one symbol of `sizes` for each name."""
    symbols: dict[str, Any] = {}
    places: dict[str, list[tuple[int, int]]] = {}
    for index, dims in enumerate(names):
        for dim, name in dims.items():
            places.setdefault(name, []).append((index, dim))
    for name, (first, *others) in places.items():
        index, dim = first
        hint = tensors[index].shape[dim]
        symbols[name] = sizes.new(name, hint, input=index, dim=dim, others=tuple(others))
    result = []
    for index, (tensor, dims) in enumerate(zip(tensors, names, strict=True)):
        shape = [
            symbols[dims[dim]] if dim in dims else size for dim, size in enumerate(tensor.shape)
        ]
        strides = list(tensor.stride())
        if dims:
            strides = _symbolic_strides(tensor, shape, index, labels[index], sizes)
        result.append((shape, strides))
    return result


def _symbolic_strides(
    tensor: Tensor, shape: Sequence[Any], index: int, label: str, sizes: Sizes
) -> list[Any]:
    pattern = strides_of(tensor)
    if pattern is None:
        return contiguous_strides(shape)
    by_dim: dict[int, Any] = {}
    for dim in sorted(range(tensor.ndim), key=tensor.stride):
        entry = pattern[dim]
        if isinstance(entry, str):
            by_dim[dim] = int(entry)
        elif entry is not None:
            by_dim[dim] = by_dim[entry] * shape[entry]
        else:
            name = re.sub(r"\W+", "_", label).strip("_") + f"_stride_{dim}"
            by_dim[dim] = sizes.new(name, tensor.stride(dim), input=index, dim=dim, is_stride=True)
    return [by_dim[dim] for dim in range(tensor.ndim)]

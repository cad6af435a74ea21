"""The copy of a model on meta that captures trace, and initial values for a model built on meta.

The copy has code and structure, and no parameter memory. Values are made one unit at a time: every
rank computes the same full ones from the same seed, keeps its shard and drops the rest, so nothing
is sent and no rank ever holds more than one unit's full parameters.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import enum
import inspect
import random
import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.capture.code_walk import in_library
from graphshard.capture.guards import CONTAINERS, items_of
from graphshard.capture.traced_module import ORIGINALS
from graphshard.errors import RuntimeStateError
from graphshard.runtime.collectives import poison_of
from graphshard.runtime.lower import Bindings
from graphshard.torch_private import compat as torch_compat

_OF_ANY_MODULE = frozenset(vars(nn.Module()))

_PLAIN = (
    int, float, complex, str, bytes, type, enum.Enum, types.FunctionType, types.BuiltinFunctionType,
    types.ModuleType, torch.dtype, torch.device, random.Random,
)  # fmt: skip

_NAMESPACES = (types.SimpleNamespace, argparse.Namespace)


def meta_model_of(model: nn.Module, copies: dict[int, Any] | None = None) -> nn.Module:
    """A copy of `model` with its parameters and buffers on meta.

    The copy has attributes of its own. Objects and containers that hold plain data alone, such as a
    configuration, are shared with the model and whoever else holds them, and so are attributes that
    cannot be copied (locks, process groups, generators). With `copies`, the memo of a
    `copy.deepcopy` that `model` is part of, plain data are copied as well, with what else is.
    """
    twins: dict[int, Any] = dict(copies or {})
    for value in _plain_data(model):
        twins[id(value)] = value
        if copies is not None:
            with contextlib.suppress(Exception):  # of objects that cannot be copied: shared
                twins[id(value)] = copy.deepcopy(value, copies)
    twins |= {id(tensor): twin for tensor, twin in _on_meta(model)}
    try:
        meta_model = copy.deepcopy(model, dict(twins))
    except Exception:  # whatever the attributes of a module raise
        meta_model = _copied_by_attribute(model, dict(twins))
    _follow_closures(model, meta_model)
    named = (*model.named_parameters(), *model.named_buffers())
    vars(meta_model)[ORIGINALS] = [(name, weakref.ref(tensor)) for name, tensor in named]
    return meta_model


def _follow_closures(model: nn.Module, twin: nn.Module) -> None:
    """Let hooks of `twin` that close over a module of `model` close over its twin.

    Such a hook keeps what it collects on that module, where forward may read it.
    """
    twins = dict(zip(model.modules(), twin.modules(), strict=True))
    for module in twin.modules():
        for table in (module._forward_pre_hooks, module._forward_hooks):
            for key, hook in table.items():
                if not isinstance(hook, types.FunctionType):
                    continue
                cells = hook.__closure__ or ()
                ours = [_twin_cell(cell, twins) for cell in cells]
                if any(mine is not cell for mine, cell in zip(ours, cells, strict=True)):
                    table[key] = _with_cells(hook, tuple(ours))


def _with_cells(function: types.FunctionType, cells: tuple[Any, ...]) -> types.FunctionType:
    code, namespace, defaults = function.__code__, function.__globals__, function.__defaults__
    copied = types.FunctionType(code, namespace, function.__name__, defaults, cells)
    copied.__kwdefaults__, copied.__qualname__ = function.__kwdefaults__, function.__qualname__
    copied.__module__ = function.__module__
    return copied


def _twin_cell(cell: Any, twins: Mapping[nn.Module, nn.Module]) -> Any:
    try:
        value = cell.cell_contents
    except ValueError:  # nothing is assigned to the name yet
        return cell
    twin = twins.get(value) if isinstance(value, nn.Module) else None
    return cell if twin is None else types.CellType(twin)


def _on_meta(model: nn.Module) -> Iterator[tuple[Tensor, Tensor]]:
    for param in model.parameters():
        twin = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
        vars(twin).update(vars(param))
        yield param, twin
    storages: dict[int, Tensor] = {}
    for buffer in model.buffers():
        # Buffers that share memory go on sharing it, for capture to see.
        storage = buffer.untyped_storage()
        length = max(storage.nbytes() // buffer.itemsize, 1)
        whole = storages.setdefault(
            storage._cdata, torch.empty(length, dtype=buffer.dtype, device="meta")
        )
        if whole.dtype == buffer.dtype:
            yield buffer, whole.as_strided(buffer.shape, buffer.stride(), buffer.storage_offset())
        else:
            yield buffer, torch.empty_like(buffer, device="meta")


def _plain_data(model: nn.Module) -> Iterator[Any]:
    """The attributes of the user's own modules, and the objects whose methods are hooks, that hold
    no tensor, no module, nothing opaque.
    """
    plain: dict[int, bool] = {}
    for module in model.modules():
        if not in_library(type(module).__module__):
            for name, value in vars(module).items():
                if name not in _OF_ANY_MODULE and _is_plain(value, plain):
                    yield value
        for hook in torch_compat.module_hooks(module):
            owner = getattr(hook, "__self__", hook)
            if _is_plain(owner, plain):
                yield owner
            elif not isinstance(owner, nn.Module):
                yield from (each for each in _attributes(owner) if _is_plain(each, plain))


def _attributes(value: Any) -> Iterable[Any]:
    return getattr(value, "__dict__", {}).values()


def _is_plain(value: Any, known: dict[int, bool]) -> bool:
    if value is None or isinstance(value, _PLAIN):
        return True
    if id(value) not in known:
        known[id(value)] = True  # as long as it is looked into: it may hold itself
        known[id(value)] = _holds_plain(value, known)
    return known[id(value)]


def _holds_plain(value: Any, known: dict[int, bool]) -> bool:
    if isinstance(value, CONTAINERS):
        return all(_is_plain(item, known) for item in items_of(value))
    kind = type(value)
    is_users = kind in _NAMESPACES or not in_library(kind.__module__)
    if not is_users or isinstance(value, (Tensor, nn.Module)) or hasattr(kind, "__slots__"):
        return False
    return all(_is_plain(item, known) for item in getattr(value, "__dict__", {"": kind}).values())


def _copied_by_attribute(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    twins = {module: module.__class__.__new__(module.__class__) for module in model.modules()}
    memo.update((id(module), twin) for module, twin in twins.items())
    for module, twin in twins.items():
        for name, value in vars(module).items():
            vars(twin)[name] = value
            with contextlib.suppress(Exception):  # shared, then
                vars(twin)[name] = copy.deepcopy(value, memo)
    return twins[model]


@contextlib.contextmanager
def set_flags(
    model: nn.Module, training: Sequence[bool], requires_grad: Mapping[str, bool]
) -> Iterator[None]:
    """Set `training` (in module order) and `requires_grad` (by name) of `model` for a while."""
    modules = list(model.modules())
    params = dict(model.named_parameters())
    before = [module.training for module in modules], [p.requires_grad for p in params.values()]
    try:
        for module, flag in zip(modules, training, strict=True):
            module.training = flag
        for name, param in params.items():
            param.requires_grad_(requires_grad[name])
        yield
    finally:
        for module, flag in zip(modules, before[0], strict=True):
            module.training = flag
        for param, flag in zip(params.values(), before[1], strict=True):
            param.requires_grad_(flag)


# -- initial values from meta ----------------------------------------------------------------------


Modules = Mapping[str, nn.Module]


Initializer = Callable[[], Any]


def initialize(model: nn.Module, bindings: Bindings, on_meta: Collection[str], seed: int) -> None:
    """Fill the parameters and buffers named in `on_meta` by the modules' own code.

    For each unit its parameters and buffers are put, full size and without values, into `model`.
    Then the modules that hold them, and the modules around those, initialise themselves, inner ones
    first as `nn.Module.apply` does: `reset_parameters()`, then the `_init_weights(module)` of the
    nearest module above that has it. Other units are on meta meanwhile, where writes do nothing.
    Torch's random numbers, which `seed` seeds, are as before afterwards.
    """
    device = bindings.group.device
    modules = dict(model.named_modules(remove_duplicate=False))
    initializers = _initializers(modules)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.no_grad():
        torch.manual_seed(seed)
        for unit in bindings.plan.units:
            layouts = unit.layouts if unit.fqn else (*unit.layouts, *bindings.plan.ignored)
            names = [n for layout in layouts for n in layout.names if n in on_meta]
            names += [
                name
                for name in bindings.buffers
                if name in on_meta and bindings.plan.unit_of_module(_module_of(name)) == unit.fqn
            ]
            places = [_Place.of(modules, name) for name in names]
            full = {id(place.meta): _without_values(place.meta, device) for place in places}
            try:
                for place in places:
                    place.put(full[id(place.meta)])
                for fqn in _inner_first(modules, {_module_of(name) for name in names}):
                    _run(fqn, modules[fqn], initializers[modules[fqn]])
                for place in places:
                    _take(place, full[id(place.meta)], bindings)
            finally:
                for place in places:
                    place.put(place.meta)


@dataclass(frozen=True)
class _Place:
    """The place where a module holds a parameter or buffer, and the meta tensor there."""

    name: str
    holder: dict[str, Any]
    module_class: str
    meta: Tensor

    @staticmethod
    def of(modules: Modules, name: str) -> _Place:
        module, leaf = modules[_module_of(name)], name.rpartition(".")[2]
        holder: dict[str, Any] = (
            module._parameters if leaf in module._parameters else module._buffers
        )
        return _Place(name, holder, type(module).__name__, holder[leaf])

    def put(self, tensor: Tensor) -> None:
        self.holder[self.name.rpartition(".")[2]] = tensor


def _initializers(modules: Modules) -> dict[nn.Module, list[Initializer]]:
    """The functions that initialize each module, in order."""
    by_module: dict[nn.Module, list[Initializer]] = {}
    from_above: dict[str, Any] = {"": None}
    for fqn, module in modules.items():  # a parent comes before its children
        reset = getattr(module, "reset_parameters", None) or getattr(
            module, "_reset_parameters", None
        )
        calls = [reset] if callable(reset) and _arguments(reset) == 0 else []
        for_all = getattr(module, "_init_weights", None)
        count = _arguments(for_all) if callable(for_all) else -1
        if count == 0:
            calls.append(for_all)
        from_above[fqn] = for_all if count == 1 else from_above[_module_of(fqn)]
        if from_above[fqn] is not None:
            calls.append(partial(from_above[fqn], module))
        by_module.setdefault(module, calls)
    return by_module


def _arguments(function: Callable[..., Any]) -> int:
    parameters = inspect.signature(function).parameters.values()
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.default is p.empty and p.kind in positional for p in parameters)


def _inner_first(modules: Modules, fqns: Collection[str]) -> Iterator[str]:
    """`fqns` and all modules around them, children before parents, else in module order."""
    selected = {""}
    for fqn in fqns:
        while fqn:
            selected.add(fqn)
            fqn = _module_of(fqn)
    pending: list[str] = []
    for fqn in (fqn for fqn in modules if fqn in selected):
        while pending and not (fqn + ".").startswith(pending[-1] + "." if pending[-1] else ""):
            yield pending.pop()
        pending.append(fqn)
    yield from reversed(pending)


def _run(fqn: str, module: nn.Module, calls: list[Initializer]) -> None:
    for call in calls:
        try:
            call()
        except Exception as error:
            raise RuntimeStateError(
                f"initialising module {fqn or '(root)'} ({type(module).__name__}) failed: "
                f"{type(error).__name__}: {error}; its parameters are real, those of other units "
                "are on meta"
            ) from error


def _without_values(meta: Tensor, device: torch.device) -> Tensor:
    tensor = torch.full_like(meta, poison_of(meta.dtype), device=device)
    return nn.Parameter(tensor, meta.requires_grad) if isinstance(meta, nn.Parameter) else tensor


def _take(place: _Place, full: Tensor, bindings: Bindings) -> None:
    """Keep this rank's part of a parameter, or a whole buffer."""
    exact = full.dtype.is_floating_point or full.dtype.is_complex
    left = full.isnan().any() if exact else (full == poison_of(full.dtype)).all()
    if full.numel() and bool(left) and (exact or full._version == 0):
        raise RuntimeStateError(
            f"{place.name!r} was left without values: give {place.module_class} a "
            "reset_parameters() that fills its parameters and its buffers (on the meta device what "
            "a constructor computes is lost), or build the model with real weights, on rank 0 "
            "alone with sync_module_states=True in the policy"
        )
    if place.name in bindings.shards:
        bindings.shards[place.name].set_full(full)
    else:
        bindings.buffer(place.name).copy_(full)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]

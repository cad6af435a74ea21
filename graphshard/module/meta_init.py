"""Initializing a model that was built on the meta device, one unit at a time.

Every rank computes the same full values from the same seed, keeps its shard and drops the rest, so
nothing is sent and no rank ever holds more than one unit's full parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.errors import RuntimeStateError
from graphshard.runtime.lowered import Bindings

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
            calls.append(_applied(from_above[fqn], module))
        by_module.setdefault(module, calls)
    return by_module


def _applied(function: Callable[[nn.Module], Any], module: nn.Module) -> Initializer:
    return lambda: function(module)


def _arguments(function: Callable[..., Any]) -> int:
    """The number of arguments that `function` needs."""
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
    tensor = torch.full_like(meta, _missing(meta.dtype), device=device)
    return nn.Parameter(tensor, meta.requires_grad) if isinstance(meta, nn.Parameter) else tensor


def _missing(dtype: torch.dtype) -> float | int | bool:
    """The number that stands for "no value yet"."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return True if dtype is torch.bool else torch.iinfo(dtype).max


def _take(place: _Place, full: Tensor, bindings: Bindings) -> None:
    """Keep this rank's part of a parameter, or a whole buffer."""
    exact = full.dtype.is_floating_point or full.dtype.is_complex
    left = full.isnan().any() if exact else (full == _missing(full.dtype)).all()
    if full.numel() and bool(left) and (exact or full._version == 0):
        raise RuntimeStateError(
            f"{place.name!r} was left without values: give {place.module_class} a "
            "reset_parameters() that fills its parameters and its buffers (on the meta device what "
            "a constructor computes is lost), or build the model with real weights"
        )
    if place.name in bindings.shards:
        bindings.shards[place.name].set_full(full)
    else:
        bindings.buffer(place.name).copy_(full)


def _module_of(name: str) -> str:
    return name.rpartition(".")[0]

"""Optimizer state by parameter names back into an optimizer; its form is that of `state.optim`.

All of it is checked on all ranks first. Then it is built for this rank and handed to the
optimizer's own `load_state_dict`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import CheckpointError
from graphshard.format import some_of
from graphshard.runtime.group import Group
from graphshard.runtime.lowered import Bindings
from graphshard.state.optim import KINDS, slots_of_optimizer
from graphshard.state.slots import Slot, everyones, first_problem, kind, pieces, put
from graphshard.torch_private import compat as torch_compat

STEP = "step"


Described = dict[str, Any]
"""Settings of each group; of each parameter, its key in the checkpoint and its entries."""


def prepare(
    module: nn.Module,
    bindings: Bindings,
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None,
    *,
    form: str | None,
) -> Callable[[], None]:
    """Check `state_dict` on all ranks; what is returned then puts it into `optim`.

    Args:
        module: the sharded module.
        bindings: its shards.
        optim: of its parameters.
        state_dict: as `optimizer_state_dict` or torch's `get_optimizer_state_dict` gives it; whole
            ones also on rank 0 only.
        form: "local" for what is local; otherwise a tensor of its parameter's shape is whole.

    Raises:
        CheckpointError: on every rank, if one's does not fit; nothing was changed.
    """
    group = bindings.group
    problem: str | None = None
    described: Described = {}
    slots: dict[int, Slot] = {}
    if form is not None and form not in KINDS:
        problem = f"kind must be one of {', '.join(KINDS)}; got {form!r}"
    else:
        slots, problem = slots_of_optimizer(module, bindings, optim)
    checker = _Checker(optim, slots, local=form == "local")
    if problem is None and state_dict:
        try:
            described = checker.check(state_dict)
        except CheckpointError as error:
            problem = str(error)
    reports = everyones(group, (not state_dict, problem, described))
    without = [rank for rank, (nothing, _, _) in enumerate(reports) if nothing]
    from_first = group.size > 1 and len(without) == group.size - 1 and 0 not in without
    problems = [reported for _, reported, _ in reports]
    if without and not from_first and not any(problems):
        problems[without[0]] = (
            "the optimizer's state dict is empty; pass it on every rank, or on rank 0 with None "
            "on all others"
        )
    worst = first_problem(group, problems[:1] if from_first else problems)
    if worst is not None:
        raise CheckpointError(worst)
    taker = _Taker(group, reports[0][2] if from_first else described, state_dict or {}, from_first)
    return lambda: optim.load_state_dict(taker.by_index(optim, slots, local=form == "local"))


class _Checker:
    """Says what is wrong with an optimizer's state dict."""

    def __init__(
        self, optim: torch.optim.Optimizer, slots: Mapping[int, Slot], *, local: bool
    ) -> None:
        self.optim = optim
        self.slots = slots
        self.local = local

    def check(self, state_dict: Mapping[str, Any]) -> Described:
        """What rank 0 tells the others of it.

        Raises:
            CheckpointError: it does not fit.
        """
        state, groups = self._parts(state_dict)
        group_of = {name: i for i, group in enumerate(groups) for name in group["params"]}
        held = [
            [self.slots[id(param)] for param in group["params"]]
            for group in self.optim.param_groups
        ]
        self._require_known((*group_of, *state), [slot for group in held for slot in group])
        settings = []
        for position, mine in enumerate(held):
            theirs = self._group_for(position, mine, group_of)
            settings.append({} if theirs is None else _without_params(groups[theirs]))
        entries = {}
        for slot in (slot for group in held for slot in group):
            key = next((name for name in slot.names if name in state), None)
            if key is not None:
                entries[slot.name] = (key, dict(self._entries(slot, state[key])))
        return {"settings": settings, "entries": entries}

    def _require_known(self, names: Sequence[object], held: Sequence[Slot]) -> None:
        every = {name for slot in self.slots.values() for name in slot.names}
        trained = {name for slot in held for name in slot.names}
        for name in names:
            if not isinstance(name, str):
                raise CheckpointError(
                    f"parameters are numbers ({name!r}) in the optimizer's state dict; they must "
                    "be names, as torch.distributed.checkpoint.state_dict gives them"
                )
            if name not in trained:
                lacks = "this optimizer does not train" if name in every else "the model has not"
                raise CheckpointError(f"the optimizer's state dict has {name!r}, which {lacks}")

    def _group_for(
        self, position: int, mine: Sequence[Slot], group_of: Mapping[str, int]
    ) -> int | None:
        """The checkpoint's group that has the parameters of the optimizer's group `position`."""
        found: int | None = None
        for slot in mine:
            theirs = next((group_of[name] for name in slot.names if name in group_of), None)
            if theirs is None:
                raise CheckpointError(
                    f"the optimizer's state dict has no {slot.name!r} in any parameter group"
                )
            if found not in (None, theirs):
                raise CheckpointError(
                    f"{slot.name!r} is in group {theirs} of the checkpoint, and others of the "
                    f"optimizer's group {position} are in its group {found}; group the parameters "
                    "as they were saved"
                )
            found = theirs
        return found

    def _parts(self, state_dict: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Any]]:
        state, groups = state_dict.get("state", {}), state_dict.get("param_groups")
        fine = isinstance(state, Mapping) and isinstance(groups, list)
        if not fine or not all(isinstance(g, Mapping) and "params" in g for g in groups or ()):
            raise CheckpointError(
                'an optimizer\'s state dict has "state" (by names) and "param_groups" (a list); '
                f"this one has {some_of([repr(key) for key in state_dict])}"
            )
        return state, groups or []

    def _entries(self, slot: Slot, state: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
        for key, value in state.items():
            label = f"{slot.name!r}.{key}"
            if not isinstance(value, Tensor):
                yield key, value
                continue
            shape = tuple(value.shape)
            whole = key != STEP and shape == slot.shape and not self.local
            part = key != STEP and self.local and value.shape == slot.local.shape
            if isinstance(value, DTensor) and not whole:
                raise CheckpointError(
                    f"{label} is a DTensor of shape {list(shape)}, its parameter's is "
                    f"{list(slot.shape)}"
                )
            if not (whole or part) and not _extends(shape, slot.shape):
                raise CheckpointError(
                    f"{label} has shape {list(shape)} in the optimizer's state dict, its "
                    f"parameter has {list(slot.local.shape if self.local else slot.shape)}"
                )
            if (whole or part) and kind(value.dtype) != kind(slot.dtype):
                raise CheckpointError(
                    f"{label} is {value.dtype} in the optimizer's state dict, its parameter is "
                    f"{slot.dtype}"
                )
            if isinstance(value, DTensor) and not _laid_out_alike(value, slot.tensor):
                raise CheckpointError(
                    f"{label} is placed {value.placements} on {value.device_mesh}, its parameter "
                    "is not; pass the full state"
                )
            yield key, _Tensor(shape, value.dtype, like_param=whole or part)


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _laid_out_alike(value: DTensor, held: Tensor) -> bool:
    return (
        isinstance(held, DTensor)
        and value.device_mesh == held.device_mesh
        and value.placements == held.placements
    )


def _extends(shape: tuple[int, ...], whole: tuple[int, ...]) -> bool:
    """Whether a tensor of `shape` extends to `whole`: a number, or of size 1 along some dims."""
    if len(shape) > len(whole):
        return shape == (1,)
    pairs = zip(reversed(shape), reversed(whole), strict=False)
    return all(size in (1, full) for size, full in pairs)


class _Tensor:
    """A tensor of a checkpoint as other ranks hear of it."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, *, like_param: bool) -> None:
        self.shape = shape
        self.dtype = dtype
        self.like_param = like_param


class _Taker:
    """Builds the state of this rank from what was checked."""

    def __init__(
        self, group: Group, described: Described, state_dict: Mapping[str, Any], from_first: bool
    ) -> None:
        self.group = group
        self.described = described
        self.state = state_dict.get("state", {})
        self.from_first = from_first

    def by_index(
        self, optim: torch.optim.Optimizer, slots: Mapping[int, Slot], *, local: bool
    ) -> dict[str, Any]:
        """The state as `optim.load_state_dict` takes it, by the number of each parameter."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        count = 0
        for mine, settings in zip(optim.param_groups, self.described["settings"], strict=True):
            numbers = range(count, count + len(mine["params"]))
            count = numbers.stop
            for number, param in zip(numbers, mine["params"], strict=True):
                slot = slots[id(param)]
                if slot.name in self.described["entries"]:
                    key, entries = self.described["entries"][slot.name]
                    state[number] = {
                        name: self._value(slot, key, name, what, local=local)
                        if isinstance(what, _Tensor)
                        else what
                        for name, what in entries.items()
                    }
            groups.append({**_without_params(mine), **settings, "params": list(numbers)})
        return {"state": state, "param_groups": groups}

    def _value(self, slot: Slot, key: str, name: str, what: _Tensor, *, local: bool) -> Tensor:
        value = None if self.from_first and self.group.rank else self.state[key][name]
        if not what.like_param:
            return self._same(value, what)
        if isinstance(value, DTensor):
            return value
        held = slot.local
        dtype = slot.dtype if slot.dtype.is_floating_point else what.dtype
        if local:
            assert value is not None
            part = value.detach().to(held.device, dtype, copy=True)
        else:
            part = self._part(slot, value, dtype)
        if not isinstance(slot.tensor, DTensor):
            return part
        return torch_compat.dtensor_like(slot.tensor, part)

    def _same(self, value: Tensor | None, what: _Tensor) -> Tensor:
        if self.from_first:
            return self.group.from_first(value, what.shape, what.dtype).cpu().clone()
        assert value is not None
        return value.detach().clone()

    def _part(self, slot: Slot, value: Tensor | None, dtype: torch.dtype) -> Tensor:
        """This rank's part of a whole tensor."""
        if not self.from_first:
            assert value is not None
            part = value.detach()[slot.region]
            return part.to(slot.local.device, dtype, copy=True).contiguous()
        own = torch.empty_like(slot.local, dtype=dtype)
        for where in pieces(tuple(slice(0, size) for size in slot.shape), dtype.itemsize):
            sizes = [part.stop - part.start for part in where]
            sent = value[where] if value is not None else None
            put(own, slot.region, self.group.from_first(sent, sizes, dtype), where)
        return own

"""Load optimizer state by parameter names; its form is described in `graphshard.state.optim`.

It is checked on all ranks first, then built for this rank and passed to the optimizer's own
`load_state_dict`.
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
from graphshard.state.optim import KINDS, state_tensors_of_optimizer
from graphshard.state.state_tensors import (
    StateTensor,
    copy_overlap,
    dtype_kind,
    only_rank_zero,
    split_region,
)
from graphshard.torch_private import compat as torch_compat

STEP = "step"


StateInfo = dict[str, Any]
"""Settings of each parameter group, and each parameter's key in the checkpoint and its entries."""


def prepare_load(
    module: nn.Module,
    bindings: Bindings,
    optim: torch.optim.Optimizer,
    state_dict: Mapping[str, Any] | None,
    *,
    form: str | None,
) -> Callable[[], None]:
    """Check `state_dict` on all ranks and return a function that loads it into `optim`.

    See `ShardedModule.load_optimizer_state_dict`, whose `kind` is `form` here.
    """
    group, agreement = bindings.group, bindings.agreement
    local = form == "local"
    info: StateInfo = {}
    with agreement.part() as part:
        if form is not None and form not in KINDS:
            raise CheckpointError(f"kind must be one of {', '.join(KINDS)}; got {form!r}")
        state_tensors = state_tensors_of_optimizer(module, bindings, optim)
        if state_dict:
            info = _Checker(optim, state_tensors, local=local).check(state_dict)
        part.flag = not state_dict
    from_first = only_rank_zero(
        agreement,
        part.flags,
        if_empty="the optimizer's state dict is empty; pass it on every rank, or on rank 0 with "
        "None on all others",
    )
    if from_first:
        info = group.all_gather_object(info)[0]
    builder = _StateBuilder(group, info, state_dict or {}, from_first)

    def load() -> None:
        def build() -> dict[str, Any]:
            return builder.by_index(optim, state_tensors, local=local)

        received = build() if from_first else None
        before = optim.state, optim.param_groups
        try:
            with agreement.part():
                optim.load_state_dict(build() if received is None else received)
        except BaseException:
            optim.state, optim.param_groups = before
            raise

    return load


class _Checker:
    """Checks that a state dict fits an optimizer."""

    def __init__(
        self, optim: torch.optim.Optimizer, state_tensors: Mapping[int, StateTensor], *, local: bool
    ) -> None:
        self.optim = optim
        self.state_tensors = state_tensors
        self.local = local

    def check(self, state_dict: Mapping[str, Any]) -> StateInfo:
        """Return the settings and entries of `state_dict`, without its tensors."""
        state, groups = self._parts(state_dict)
        group_of = {name: i for i, group in enumerate(groups) for name in group["params"]}
        by_group = [
            [self.state_tensors[id(param)] for param in group["params"]]
            for group in self.optim.param_groups
        ]
        self._require_known(
            (*group_of, *state), [state_tensor for group in by_group for state_tensor in group]
        )
        settings = []
        for position, group_tensors in enumerate(by_group):
            saved_group = self._group_for(position, group_tensors, group_of)
            settings.append({} if saved_group is None else _without_params(groups[saved_group]))
        entries = {}
        for state_tensor in (state_tensor for group in by_group for state_tensor in group):
            key = next((name for name in state_tensor.names if name in state), None)
            if key is not None:
                entries[state_tensor.name] = (key, dict(self._entries(state_tensor, state[key])))
        return {"settings": settings, "entries": entries}

    def _require_known(
        self, names: Sequence[object], trained_tensors: Sequence[StateTensor]
    ) -> None:
        module_names = {
            name for state_tensor in self.state_tensors.values() for name in state_tensor.names
        }
        trained_names = {name for state_tensor in trained_tensors for name in state_tensor.names}
        for name in names:
            if not isinstance(name, str):
                raise CheckpointError(
                    f"parameters are numbers ({name!r}) in the optimizer's state dict; they must "
                    "be names, as torch.distributed.checkpoint.state_dict gives them"
                )
            if name not in trained_names:
                lacks = (
                    "this optimizer does not train"
                    if name in module_names
                    else "the model does not have"
                )
                raise CheckpointError(f"the optimizer's state dict has {name!r}, which {lacks}")

    def _group_for(
        self, position: int, group_tensors: Sequence[StateTensor], group_of: Mapping[str, int]
    ) -> int | None:
        """Return the index of the saved group that matches the optimizer's group `position`.

        None if that group is empty.
        """
        saved_group: int | None = None
        for state_tensor in group_tensors:
            group = next((group_of[name] for name in state_tensor.names if name in group_of), None)
            if group is None:
                raise CheckpointError(
                    f"the optimizer's state dict has no {state_tensor.name!r} in any parameter "
                    "group"
                )
            if saved_group not in (None, group):
                raise CheckpointError(
                    f"{state_tensor.name!r} is in group {group} of the checkpoint, and others of "
                    f"the optimizer's group {position} are in its group {saved_group}; group the "
                    "parameters as they were saved"
                )
            saved_group = group
        return saved_group

    def _parts(self, state_dict: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[Any]]:
        state, groups = state_dict.get("state", {}), state_dict.get("param_groups")
        fine = isinstance(state, Mapping) and isinstance(groups, list)
        fine = fine and all(isinstance(entries, Mapping) for entries in state.values())
        if not fine or not all(
            isinstance(group, Mapping)
            and isinstance(group.get("params"), list | tuple)
            and all(isinstance(name, str | int) for name in group["params"])
            for group in groups or ()
        ):
            raise CheckpointError(
                'an optimizer\'s state dict has "state" (by names) and "param_groups" (a list); '
                f"this one has {some_of([repr(key) for key in state_dict])}"
            )
        return state, groups or []

    def _entries(
        self, state_tensor: StateTensor, state: Mapping[str, Any]
    ) -> Iterator[tuple[str, Any]]:
        for key, value in state.items():
            label = f"{state_tensor.name!r}.{key}"
            if not isinstance(value, Tensor):
                yield key, value
                continue
            shape = tuple(value.shape)
            is_full = key != STEP and shape == state_tensor.shape and not self.local
            is_local = key != STEP and self.local and value.shape == state_tensor.local.shape
            if isinstance(value, DTensor) and not is_full:
                raise CheckpointError(
                    f"{label} is a DTensor of shape {list(shape)}, its parameter's is "
                    f"{list(state_tensor.shape)}"
                )
            if not (is_full or is_local) and not _extends(shape, state_tensor.shape):
                expected = state_tensor.local.shape if self.local else state_tensor.shape
                raise CheckpointError(
                    f"{label} has shape {list(shape)} in the optimizer's state dict, its "
                    f"parameter has {list(expected)}"
                )
            if (is_full or is_local) and dtype_kind(value.dtype) != dtype_kind(state_tensor.dtype):
                raise CheckpointError(
                    f"{label} is {value.dtype} in the optimizer's state dict, its parameter is "
                    f"{state_tensor.dtype}"
                )
            if isinstance(value, DTensor) and not _laid_out_alike(value, state_tensor.tensor):
                raise CheckpointError(
                    f"{label} is placed {value.placements} on {value.device_mesh}, its parameter "
                    "is not; pass the full state"
                )
            yield key, _TensorInfo(shape, value.dtype, like_param=is_full or is_local)


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _laid_out_alike(value: DTensor, module_tensor: Tensor) -> bool:
    return (
        isinstance(module_tensor, DTensor)
        and value.device_mesh == module_tensor.device_mesh
        and value.placements == module_tensor.placements
    )


def _extends(shape: tuple[int, ...], full_shape: tuple[int, ...]) -> bool:
    """Whether `shape` can be expanded to `full_shape`: a number, or size 1 along some dims."""
    if len(shape) > len(full_shape):
        return shape == (1,)
    pairs = zip(reversed(shape), reversed(full_shape), strict=False)
    return all(size in (1, full) for size, full in pairs)


class _TensorInfo:
    """Shape and dtype of a saved tensor; `like_param` if it is laid out as its parameter."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, *, like_param: bool) -> None:
        self.shape = shape
        self.dtype = dtype
        self.like_param = like_param


class _StateBuilder:
    """Builds the optimizer state of this rank from a checked state dict."""

    def __init__(
        self, group: Group, info: StateInfo, state_dict: Mapping[str, Any], from_first: bool
    ) -> None:
        self.group = group
        self.info = info
        self.state = state_dict.get("state", {})
        self.from_first = from_first

    def by_index(
        self, optim: torch.optim.Optimizer, state_tensors: Mapping[int, StateTensor], *, local: bool
    ) -> dict[str, Any]:
        """Return the state for `optim.load_state_dict`, by the index of each parameter."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        count = 0
        for param_group, settings in zip(optim.param_groups, self.info["settings"], strict=True):
            numbers = range(count, count + len(param_group["params"]))
            count = numbers.stop
            for number, param in zip(numbers, param_group["params"], strict=True):
                state_tensor = state_tensors[id(param)]
                if state_tensor.name in self.info["entries"]:
                    key, entries = self.info["entries"][state_tensor.name]
                    state[number] = {
                        name: self._value(state_tensor, key, name, info, local=local)
                        if isinstance(info, _TensorInfo)
                        else info
                        for name, info in entries.items()
                    }
            groups.append({**_without_params(param_group), **settings, "params": list(numbers)})
        return {"state": state, "param_groups": groups}

    def _value(
        self, state_tensor: StateTensor, key: str, name: str, info: _TensorInfo, *, local: bool
    ) -> Tensor:
        value = None if self.from_first and self.group.rank else self.state[key][name]
        if not info.like_param:
            return self._same(value, info)
        if isinstance(value, DTensor):
            return value
        local_param = state_tensor.local
        dtype = state_tensor.dtype if state_tensor.dtype.is_floating_point else info.dtype
        if local:
            assert value is not None
            local_value = value.detach().to(local_param.device, dtype, copy=True)
        else:
            local_value = self._part(state_tensor, value, dtype)
        if not isinstance(state_tensor.tensor, DTensor):
            return local_value
        return torch_compat.dtensor_like(state_tensor.tensor, local_value)

    def _same(self, value: Tensor | None, info: _TensorInfo) -> Tensor:
        if self.from_first:
            return self.group.broadcast(value, info.shape, info.dtype).cpu().clone()
        assert value is not None
        return value.detach().clone()

    def _part(self, state_tensor: StateTensor, value: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return this rank's part of a full tensor."""
        if not self.from_first:
            assert value is not None
            values = value.detach()[state_tensor.region]
            return values.to(state_tensor.local.device, dtype, copy=True).contiguous()
        local = torch.empty_like(state_tensor.local, dtype=dtype)
        for piece in split_region(
            tuple(slice(0, size) for size in state_tensor.shape), dtype.itemsize
        ):
            sizes = [rows.stop - rows.start for rows in piece]
            piece_values = value[piece] if value is not None else None
            copy_overlap(
                local, state_tensor.region, self.group.broadcast(piece_values, sizes, dtype), piece
            )
        return local

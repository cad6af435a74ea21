"""Optimizer state by parameter names: sharded, full or local.

The form is that of torch.distributed.checkpoint.state_dict:
`{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [names], ...}]}`.
A tensor with its parameter's shape is laid out as the parameter; other values ("step", the row and
column statistics of a factored optimizer) must be the same on every rank, which is compared.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from graphshard.errors import CheckpointError
from graphshard.format import some_of
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.group import Group
from graphshard.runtime.lower import Bindings
from graphshard.state.replicas import checksum
from graphshard.state.state_tensors import (
    Keeper,
    StateTensor,
    dtype_kind,
    gather_full,
    gathered_line,
    local_of,
    only_rank_zero,
    state_tensors_of,
)
from graphshard.torch_private import compat as torch_compat

KINDS = ("sharded", "full", "local")


def optimizer_state_dict(
    module: nn.Module,
    bindings: Bindings,
    optim: torch.optim.Optimizer,
    *,
    form: str,
    rank0_only: bool,
    cpu: bool,
) -> dict[str, Any]:
    """See `ShardedModule.optimizer_state_dict`, whose `kind` is `form` here."""
    group, agreement = bindings.group, bindings.agreement
    keep = form != "full" or group.rank == 0 or not rank0_only
    with agreement.part() as part:
        if form not in KINDS:
            raise CheckpointError(f"kind must be one of {', '.join(KINDS)}; got {form!r}")
        entries = entries_of(module, bindings, optim)
        copies: dict[str, str] = {}
        if form == "full":
            part.same += gathered_lines(entries)
            copies = copies_of_state(group, entries)
    if form != "full":
        return _state_dict(optim, entries, local_part if form == "local" else lambda value: value)
    require_same_copies(group, agreement, copies)
    keeper = Keeper()

    def whole(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        full = gather_full(value, group)
        return keeper.keep(full.cpu if cpu else full.detach) if keep else None

    state = _state_dict(optim, entries, whole)
    keeper.end(agreement)
    return state if keep else {}


def sharded_state_dict(
    module: nn.Module, bindings: Bindings, optim: torch.optim.Optimizer
) -> tuple[dict[str, Any], list[str], dict[str, str]]:
    """As `optimizer_state_dict` of form "sharded"; and what of it must be alike on all ranks.

    That is the tensors that ranks gather, and copies to give to `require_same_copies`.
    """
    entries = entries_of(module, bindings, optim)
    copies = copies_of_state(bindings.group, entries)
    return _state_dict(optim, entries, lambda value: value), gathered_lines(entries), copies


Entries = dict[int, tuple[Tensor, str, Mapping[str, Any] | None]]
"""By the `id` of a parameter, in the order of the optimizer's groups: it, its name and state."""


def entries_of(module: nn.Module, bindings: Bindings, optim: torch.optim.Optimizer) -> Entries:
    """The name and state of every parameter of `optim`; None if it has no state yet."""
    state_tensors = state_tensors_of_optimizer(module, bindings, optim)
    return {
        id(param): (
            param,
            state_tensors[id(param)].name,
            optim.state.get(param),
        )
        for param_group in optim.param_groups
        for param in param_group["params"]
    }


def gathered_lines(entries: Entries) -> list[str]:
    """The tensors that ranks gather, in their order."""
    return [
        gathered_line(f"{key} of {name}", value)
        for _, name, state in entries.values()
        for key, value in (state or {}).items()
        if isinstance(value, DTensor)
    ]


def _state_dict(
    optim: torch.optim.Optimizer, entries: Entries, in_form: Callable[[Any], Any]
) -> dict[str, Any]:
    state = {
        name: {key: in_form(value) for key, value in param_state.items()}
        for _, name, param_state in entries.values()
        if param_state is not None
    }
    groups = [
        {**group, "params": [entries[id(param)][1] for param in group["params"]]}
        for group in optim.param_groups
    ]
    return {"state": state, "param_groups": groups}


def local_part(value: Any) -> Any:
    """This rank's part of a tensor; other values as they are."""
    return local_of(value) if isinstance(value, Tensor) else value


def state_tensors_of_optimizer(
    module: nn.Module, bindings: Bindings, optim: torch.optim.Optimizer
) -> dict[int, StateTensor]:
    """Return the module's tensors by `id`."""
    if not hasattr(optim, "param_groups"):
        raise CheckpointError(
            f"optim must be an optimizer made from sharded.parameters(); got {_named(optim)}; "
            "extra= takes other things that are to be saved, by name"
        )
    state_tensors = {
        id(state_tensor.tensor): state_tensor for state_tensor in state_tensors_of(module, bindings)
    }
    for index, param_group in enumerate(optim.param_groups):
        for position, param in enumerate(param_group["params"]):
            if id(param) not in state_tensors:
                raise CheckpointError(
                    f"parameter {position} of the optimizer's group {index}, of shape "
                    f"{list(param.shape)}, is not the sharded module's; make the optimizer from "
                    "sharded.parameters()"
                )
    return state_tensors


def _named(value: Any) -> str:
    kind = type(value).__name__
    return f"{'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}"


# -- what is the same on every rank ---------------------------------------------------------------


def copies_of_state(group: Group, entries: Entries) -> dict[str, str]:
    """What of an optimizer's state must be the same on every rank: its text, or a checksum.

    A checkpoint has one of what is not laid out as its parameter. An optimizer that steps on a
    rank's part of a tensor may keep numbers of that part, such as the scales of an 8-bit state: of
    these a load would give rank 0's to every rank, and no error would tell. Parameters that are
    plain tensors (ignored ones) are each rank's own.
    """
    copies: dict[str, str] = {}
    if group.size == 1 or group.backend == "fake":
        return copies
    sums: dict[torch.device, dict[str, Tensor]] = {}
    for param, name, state in entries.values():
        if not isinstance(param, DTensor):
            continue
        for key, value in (state or {}).items():
            for place, leaf in enumerate(pytree.tree_leaves(value)):
                label = f"{key!r} of {name!r}" + (f" ({place})" if place else "")
                if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                    sums.setdefault(leaf.device, {})[label] = checksum(leaf)
                elif isinstance(leaf, int | float | complex | str):
                    copies[label] = repr(leaf)
    for by_label in sums.values():
        values = torch.stack(list(by_label.values())).tolist()
        copies |= {label: f"#{value}" for label, value in zip(by_label, values, strict=True)}
    return copies


def require_same_copies(group: Group, agreement: Agreement, copies: Mapping[str, str]) -> None:
    """Check that no rank has other `copies_of_state`; one exchange of 8 bytes, if none has."""
    if group.size == 1 or group.backend == "fake":
        return
    digest = hashlib.sha256(repr(sorted(copies.items())).encode()).digest()
    sent = torch.tensor([int.from_bytes(digest[:7], "big")], device=group.device)
    if len(set(group.gather_tensor(sent).flatten().tolist())) == 1:
        return
    found: dict[str, dict[str, list[int]]] = {}  # by label and value, the ranks
    for rank, theirs in enumerate(group.all_gather_object(dict(copies))):
        for label, value in theirs.items():
            found.setdefault(label, {}).setdefault(value, []).append(rank)
    differing = sorted(label for label, by_value in found.items() if len(by_value) > 1)
    with agreement.part():
        if differing:
            ranks = list(found[differing[0]].values())
            raise CheckpointError(
                f"the optimizer's state {some_of(differing)} is not laid out as the parameter and "
                f"differs between ranks (rank {ranks[0][0]} and rank {ranks[1][0]}): a checkpoint "
                "has one of it, which a load would give to every rank; keep it in tensors of the "
                'parameter\'s shape, or save optimizer_state_dict(optim, kind="local") on each '
                "rank, which fits as many ranks"
            )


# -- loading --------------------------------------------------------------------------------------


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

    It builds this rank's state and passes that to the optimizer's own `load_state_dict`. See
    `ShardedModule.load_optimizer_state_dict`, whose `kind` is `form` here.
    """
    group, agreement = bindings.group, bindings.agreement
    local = form == "local"
    info: StateInfo = {}
    with agreement.part() as part:
        if form is not None and form not in KINDS:
            raise CheckpointError(f"kind must be one of {', '.join(KINDS)}; got {form!r}")
        state_tensors = state_tensors_of_optimizer(module, bindings, optim)
        if state_dict:
            info = _Checker(optim, state_tensors, local).check(state_dict)
        part.flag = not state_dict
    from_first = only_rank_zero(
        agreement,
        part.flags,
        if_empty="the optimizer's state dict is empty; pass it on every rank, or on rank 0 with "
        "None on all others",
    )
    if from_first:
        info = group.all_gather_object(info)[0]
    builder = _StateBuilder(group, info, (state_dict or {}).get("state", {}), from_first)

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


@dataclass(frozen=True)
class _Checker:
    optim: torch.optim.Optimizer
    state_tensors: Mapping[int, StateTensor]
    local: bool

    def check(self, state_dict: Mapping[str, Any]) -> StateInfo:
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
            if isinstance(value, DTensor) and not (
                isinstance(state_tensor.tensor, DTensor)
                and value.device_mesh == state_tensor.tensor.device_mesh
                and value.placements == state_tensor.tensor.placements
            ):
                raise CheckpointError(
                    f"{label} is placed {value.placements} on {value.device_mesh}, its parameter "
                    "is not; pass the full state"
                )
            yield key, _TensorInfo(shape, value.dtype, like_param=is_full or is_local)


def _without_params(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _extends(shape: tuple[int, ...], full_shape: tuple[int, ...]) -> bool:
    """Whether `shape` can be expanded to `full_shape`: a number, or size 1 along some dims."""
    if len(shape) > len(full_shape):
        return shape == (1,)
    pairs = zip(reversed(shape), reversed(full_shape), strict=False)
    return all(size in (1, full) for size, full in pairs)


@dataclass(frozen=True)
class _TensorInfo:
    """Shape and dtype of a saved tensor; `like_param` if it is laid out as its parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    like_param: bool


@dataclass(frozen=True)
class _StateBuilder:
    """Builds the optimizer state of this rank from a checked state dict."""

    group: Group
    info: StateInfo
    state: Mapping[str, Any]
    from_first: bool

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
            if self.from_first:
                return self.group.broadcast(value, info.shape, info.dtype).cpu().clone()
            assert value is not None
            return value.detach().clone()
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

    def _part(self, state_tensor: StateTensor, value: Tensor | None, dtype: torch.dtype) -> Tensor:
        if not self.from_first:
            assert value is not None
            values = value.detach()[state_tensor.region]
            return values.to(state_tensor.local.device, dtype, copy=True).contiguous()
        local = torch.empty_like(state_tensor.local, dtype=dtype)
        state_tensor.receive(
            local, self.group, dtype, lambda piece: None if value is None else value[piece]
        )
        return local

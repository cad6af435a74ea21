"""Load full tensors into shards: check on all ranks first, then write piece by piece."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import CheckpointError, FingerprintError
from graphshard.runtime.lower import Bindings
from graphshard.state.files import Region, Shapes, open_files
from graphshard.state.replicas import require_one_source
from graphshard.state.state_tensors import (
    StateTensor,
    copy_overlap,
    dtype_kind,
    local_of,
    only_rank_zero,
    region_of,
    split_region,
    state_tensors_of,
)
from graphshard.torch_private import compat as torch_compat


@dataclass
class Match:
    """The checkpoint's key of each tensor of the module; missing and unexpected names."""

    keys: dict[str, str] = field(default_factory=dict)  # by the tensor's first name
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class KeyRules:
    """The relation of a transformers model's names to the keys of checkpoints.

    prefix: the name of the base model in a model with a head ("model", "transformer"), so that
        checkpoints of either can be loaded into the other.
    ignored: patterns of unused keys in old checkpoints.
    """

    prefix: str = ""
    ignored: tuple[str, ...] = ()

    @staticmethod
    def of(model: nn.Module) -> KeyRules:
        """Return the rules of `model`; empty ones if it is no transformers model."""
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        prefix = getattr(model, "base_model_prefix", "")
        return KeyRules(prefix if isinstance(prefix, str) else "", tuple(ignored))

    def renamed(self, keys: Iterable[str], names: Iterable[str]) -> dict[str, str]:
        """Map each key to its name in the model: as it is, or with the prefix added or removed."""
        keys, name_set = list(keys), set(names)
        renamings = [{key: key for key in keys}]
        if self.prefix:
            dot = f"{self.prefix}."
            renamings.append({key: dot + key for key in keys})
            renamings.append({key: key.removeprefix(dot) for key in keys})
        # max takes the first of equals, so keys are renamed only if more of them fit.
        return max(renamings, key=lambda way: sum(name in name_set for name in way.values()))


def match(
    state_tensors: Sequence[StateTensor],
    infos: Shapes,
    *,
    strict: bool = True,
    rules: KeyRules | None = None,
) -> Match:
    """Find the checkpoint's key of every tensor of a module, before anything is written.

    `strict` refuses missing and unexpected keys, which are only listed otherwise.
    """
    rules = rules or KeyRules()
    names = {name for state_tensor in state_tensors for name in state_tensor.names}
    name_of = rules.renamed(infos, names)
    key_of: dict[str, str] = {}
    for key, name in name_of.items():
        if name in key_of:
            raise CheckpointError(
                f"the checkpoint has both {key_of[name]!r} and {key!r}, which are one parameter "
                "of the model; remove one"
            )
        key_of[name] = key
    matched = Match()
    persistent = [state_tensor for state_tensor in state_tensors if state_tensor.persistent]
    for state_tensor in persistent:
        named = [key_of[name] for name in state_tensor.names if name in key_of]
        if named:
            matched.keys[state_tensor.name] = named[0]
        else:
            matched.missing.append(state_tensor.name)
    matched.unexpected = [
        key
        for key, name in name_of.items()
        if name not in names and not any(re.search(pattern, key) for pattern in rules.ignored)
    ]
    if strict:
        _require_complete(matched, persistent, infos)
    for state_tensor in persistent:
        for name in state_tensor.names:  # check all names of a tied tensor, though one is read
            if name in key_of:
                _require_fit(state_tensor, key_of[name], *infos[key_of[name]])
    return matched


def _require_complete(matched: Match, persistent: Sequence[StateTensor], infos: Shapes) -> None:
    if matched.missing:
        count, hint = len(matched.missing), ""
        if count == len(persistent) and infos:
            hint = f"; its first key is {next(iter(infos))!r}: is it another model's?"
        raise CheckpointError(
            f"the checkpoint has no {matched.missing[0]!r}; it must have every parameter and "
            f"buffer of the model and lacks {count} of {len(persistent)}"
            f"{hint}"
        )
    if matched.unexpected:
        raise CheckpointError(
            f"the checkpoint has {matched.unexpected[0]!r}, which the model does not have "
            f"({len(matched.unexpected)} such keys); remove or rename it, or pass strict=False"
        )


def _require_fit(
    state_tensor: StateTensor, key: str, shape: Sequence[int], dtype: torch.dtype
) -> None:
    if tuple(shape) != state_tensor.shape:
        raise CheckpointError(
            f"{key!r} has shape {list(shape)} in the checkpoint and {list(state_tensor.shape)} in "
            "the model; build it with the sizes of the checkpoint's, or load another one"
        )
    if dtype_kind(dtype) != dtype_kind(state_tensor.dtype):
        raise CheckpointError(
            f"{key!r} is {dtype} in the checkpoint and {state_tensor.dtype} in the model; values "
            "are cast only among floating point dtypes, or among integer ones"
        )


def infos_of(state_dict: Mapping[str, Any]) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Return the shapes and dtypes of a state dict of tensors."""
    infos: dict[str, tuple[Sequence[int], torch.dtype]] = {}
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name!r} is a {type(value).__name__} in the checkpoint; it must be a tensor"
            )
        infos[name] = (tuple(value.shape), value.dtype)
    return infos


@dataclass(frozen=True)
class TensorSource:
    """Full tensors to load: their shapes and dtypes by key, and a function that reads a region.

    Also all of them, by key, if they are in memory.
    """

    infos: Shapes
    read: Callable[[str, Region], Tensor]
    whole: Mapping[str, Tensor] | None = None


def state_dict_source(state_dict: Mapping[str, Any]) -> TensorSource:
    """Return the source of a state dict of full plain tensors."""
    for name, value in state_dict.items():
        if isinstance(value, DTensor):
            raise CheckpointError(
                f"{name!r} is a DTensor; load_full_state_dict takes full plain tensors, "
                "load_state_dict takes DTensors"
            )

    def read(key: str, region: Region) -> Tensor:
        return state_dict[key].detach()[region]

    return TensorSource(infos_of(state_dict), read, state_dict)


def files_source(path: str | os.PathLike[str]) -> TensorSource:
    """Return the source of a safetensors checkpoint; see `open_files` for `path` and errors."""
    entries = open_files(path)
    infos = {name: (entry.shape, entry.dtype) for name, entry in entries.items()}
    return TensorSource(infos, lambda key, region: entries[key].read(region))


def load(
    module: nn.Module,
    bindings: Bindings,
    source: Callable[[], TensorSource | None],
    *,
    strict: bool = True,
    rules: KeyRules | None = None,
) -> Match:
    """Load `module` from every rank's source, or from rank 0's if no other rank has one.

    `source` opens this rank's, or returns None; `rules` say how a transformers model names its
    parameters in checkpoints. Where one does not fit, all ranks fail and nothing was changed.
    """
    group, agreement = bindings.group, bindings.agreement
    opened, matched = None, Match()
    with agreement.part() as part:
        state_tensors = state_tensors_of(module, bindings)
        try:
            opened = source()
        except OSError as error:
            raise CheckpointError(f"the checkpoint cannot be read: {error}") from error
        if opened is not None:
            matched = match(state_tensors, opened.infos, strict=strict, rules=rules)
        part.flag = opened is None
    from_first = only_rank_zero(
        agreement,
        part.flags,
        if_empty="the state dict is empty; pass the whole model's on every rank, or on rank 0 with "
        "None on all others",
    )
    if from_first:
        matched = group.all_gather_object(matched)[0]
    elif opened is not None and opened.whole is not None:
        whole = opened.whole
        require_one_source(bindings, {name: whole[key] for name, key in matched.keys.items()})
    fill(state_tensors, matched.keys, opened, bindings, from_first=from_first)
    return matched


def fill(
    state_tensors: Iterable[StateTensor],
    keys: Mapping[str, str],
    source: TensorSource | None,
    bindings: Bindings,
    *,
    from_first: bool,
    in_place: bool = False,
) -> None:
    """Write values that were checked to fit.

    A parameter without values is read in place. Any other tensor is read into memory of its own on
    the CPU (of the size of this rank's part) and written once all ranks have read all; `in_place`
    says that no tensor has values that count. `keys` has the source's key of each tensor to fill,
    by its first name. If `from_first`, rank 0 reads and sends to all, whose `keys` are the same.
    """
    to_fill = [each for each in state_tensors if each.name in keys]
    read: list[tuple[StateTensor, Tensor]] = []

    def place_of(state_tensor: StateTensor) -> Tensor:
        place = state_tensor.local if in_place else state_tensor.place()
        read.append((state_tensor, place))
        return place

    try:
        if from_first:
            for each in to_fill:
                _receive_from_first(each, place_of(each), keys[each.name], source, bindings)
        with bindings.agreement.part():
            if not from_first:
                assert source is not None
                for each in to_fill:
                    place = place_of(each)
                    for piece in split_region(each.region, each.dtype.itemsize):
                        values = _read(source, keys[each.name], piece, each)
                        copy_overlap(place, each.region, values, piece)
    except BaseException:
        for each, place in read:
            each.leave(place)
        raise
    for each, place in read:
        each.take(place)


def _read(source: TensorSource, key: str, piece: Region, state_tensor: StateTensor) -> Tensor:
    try:
        return source.read(key, piece)
    except (OSError, CheckpointError) as error:
        raise CheckpointError(
            f"reading {state_tensor.name!r} failed: {error}; tensors that had values have the same "
            "ones, and others have none"
        ) from error


def _receive_from_first(
    state_tensor: StateTensor,
    place: Tensor,
    key: str,
    source: TensorSource | None,
    bindings: Bindings,
) -> None:
    def read(piece: Region) -> Tensor | None:
        with bindings.agreement.part():
            if bindings.group.rank == 0:
                assert source is not None
                return _read(source, key, piece, state_tensor)
        return None

    state_tensor.receive(place, bindings.group, state_tensor.dtype, read)


def load_state_dict(
    module: nn.Module, bindings: Bindings, state_dict: Mapping[str, Any], *, strict: bool
) -> dict[str, Any]:
    """Return `state_dict` in a form that `nn.Module.load_state_dict` accepts.

    Full tensors of sharded parameters become this rank's DTensors; a tied parameter gets all names.
    """
    tensors = dict(state_dict)
    with bindings.agreement.part():
        state_tensors = state_tensors_of(module, bindings)
        matched = match(state_tensors, infos_of(state_dict), strict=strict)
        values = {name: state_dict[key] for name, key in matched.keys.items()}
        for state_tensor in state_tensors:
            if state_tensor.name in matched.keys:
                for name in state_tensor.names:
                    tensors.setdefault(name, state_dict[matched.keys[state_tensor.name]])
                    tensors[name] = _as_in_module(state_tensor, name, tensors[name])
    require_one_source(bindings, values)
    return tensors


def _as_in_module(state_tensor: StateTensor, name: str, value: Tensor) -> Tensor:
    module_tensor = state_tensor.tensor
    if isinstance(value, DTensor):
        if not isinstance(module_tensor, DTensor):
            raise CheckpointError(
                f"{name!r} is a DTensor in the checkpoint and a plain tensor in the model; pass "
                "its full_tensor()"
            )
        if value.device_mesh == module_tensor.device_mesh:
            return value
        if region_of(value) != state_tensor.region:
            raise CheckpointError(
                f"{name!r} lies on {value.device_mesh} in the checkpoint and on "
                f"{module_tensor.device_mesh} in the model; pass its full_tensor()"
            )
        value = local_of(value)  # another mesh that is split the same way
        return torch_compat.dtensor_like(
            module_tensor, value.to(state_tensor.local.device, state_tensor.dtype)
        )
    if not isinstance(module_tensor, DTensor):
        return value
    local = value.detach()[state_tensor.region].to(state_tensor.local.device, state_tensor.dtype)
    return torch_compat.dtensor_like(module_tensor, local.contiguous())


def take_model_values(
    module: nn.Module, model: nn.Module, bindings: Bindings, *, from_first: bool
) -> frozenset[str]:
    """Load the values of `model`, from which `module` was made; tensors on meta have none.

    If `from_first`, every rank takes rank 0's. Returns every name of the parameters and buffers
    left without values.
    """
    group = bindings.group
    tensors: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    real = {name for name, tensor in tensors.items() if tensor.device.type != "meta"}
    infos = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if from_first:
        reports = group.all_gather_object((real, infos))
        real = reports[0][0]
        _require_equal_shapes([rank_infos for _, rank_infos in reports])
    state_tensors = state_tensors_of(module, bindings)
    names = real - {layout.fqn for layout in bindings.plan.ignored}
    keys = {each.name: each.name for each in state_tensors if each.name in names}
    source = TensorSource(infos, lambda key, region: tensors[key].detach()[region])
    if from_first:
        fill(state_tensors, keys, source, bindings, from_first=group.size > 1, in_place=True)
    else:
        for state_tensor in state_tensors:  # no rank waits for another
            if state_tensor.name in keys:
                state_tensor.write(tensors[state_tensor.name].detach(), state_tensor.whole)
    return frozenset(tensors) - real


def _require_equal_shapes(by_rank: Sequence[Mapping[str, Any]]) -> None:
    def info_text(infos: Mapping[str, Any], name: str) -> str:
        shape, dtype = infos.get(name, (None, None))
        return "missing" if shape is None else f"{dtype} {list(shape)}"

    first = by_rank[0]
    for rank, infos in enumerate(by_rank):
        for name in {**first, **infos}:
            if first.get(name) != infos.get(name):
                raise FingerprintError(
                    f"rank {rank}'s model is not rank 0's: {name!r} is "
                    f"{info_text(infos, name)} there and {info_text(first, name)} on rank 0; build "
                    "the same model on every rank"
                )

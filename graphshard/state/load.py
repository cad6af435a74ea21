"""Whole values into shards: checked on all ranks first, then written piece by piece.

A source of values says what it has (shapes and dtypes by key) and gives any part of it. Each rank
takes the part it owns; or rank 0 alone has the source, and sends it in pieces, so that no rank
needs memory for more than its shards and one piece.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import CheckpointError, FingerprintError
from graphshard.runtime.group import Group
from graphshard.runtime.lowered import Bindings
from graphshard.state.files import open_files
from graphshard.state.matching import Described, KeyRules, Match, describe, match
from graphshard.state.raw import Region
from graphshard.state.slots import (
    Slot,
    agree,
    everyones,
    first_problem,
    local_of,
    pieces,
    region_of,
    slots_of,
)
from graphshard.torch_private import compat as torch_compat


@dataclass(frozen=True)
class Source:
    """Where values come from: what there is, and how to get a part of one."""

    described: Described
    read: Callable[[str, Region], Tensor]


def of_mapping(state_dict: Mapping[str, Any]) -> Source:
    """A state dict of whole plain tensors.

    Raises:
        CheckpointError: an entry is something else.
    """
    for name, value in state_dict.items():
        if isinstance(value, DTensor):
            raise CheckpointError(
                f"{name!r} is a DTensor; load_full_state_dict takes full plain tensors, "
                "load_state_dict takes DTensors"
            )
    return Source(describe(state_dict), lambda key, region: state_dict[key].detach()[region])


def of_files(path: str | os.PathLike[str]) -> Source:
    """A safetensors checkpoint; see `open_files` for `path` and errors."""
    entries = open_files(path)
    described = {name: (entry.shape, entry.dtype) for name, entry in entries.items()}
    return Source(described, lambda key, region: entries[key].read(region))


def load(
    module: nn.Module,
    bindings: Bindings,
    source: Callable[[], Source | None],
    *,
    strict: bool = True,
    rules: KeyRules | None = None,
) -> Match:
    """Fill `module` from every rank's source, or from rank 0's where no other has any.

    Args:
        module: the sharded module.
        bindings: its shards.
        source: opens it; None on a rank that has none.
        strict: refuse missing and unexpected keys.
        rules: of transformers, about names.

    Raises:
        CheckpointError: on every rank, if one's source cannot be opened or does not fit; nothing
            was changed. Or reading failed half-way (a failing disk), which the message says.

    Returns:
        What went where; missing and unexpected names.
    """
    group = bindings.group
    slots = slots_of(module, bindings)
    opened, found, problem = None, Match(), None
    try:
        opened = source()
        if opened is not None:
            found = match(slots, opened.described, strict=strict, rules=rules)
    except CheckpointError as error:
        problem = str(error)
    except OSError as error:
        problem = f"the checkpoint cannot be read: {error}"
    reports = everyones(group, (opened is None and problem is None, problem, found))
    without = [rank for rank, (nothing, _, _) in enumerate(reports) if nothing]
    from_first = group.size > 1 and len(without) == group.size - 1 and 0 not in without
    problems = [problem for _, problem, _ in reports]
    if without and not from_first and not any(problems):
        problems[without[0]] = (
            "the state dict is empty; pass the whole model's on every rank, or on rank 0 with "
            "None on all others"
        )
    worst = first_problem(group, problems[:1] if from_first else problems)
    if worst is not None:
        raise CheckpointError(worst)
    if from_first:
        found = reports[0][2]
    fill(slots, found.keys, opened, group, from_first=from_first)
    return found


def fill(
    slots: Iterable[Slot],
    keys: Mapping[str, str],
    source: Source | None,
    group: Group,
    *,
    from_first: bool,
) -> None:
    """Write values that are known to fit.

    Args:
        slots: what to write.
        keys: the source's key for each slot to fill, by the slot's first name; alike on every rank
            if `from_first`.
        source: None on ranks that take rank 0's.
        group: the ranks.
        from_first: rank 0 reads, and sends to all.

    Raises:
        CheckpointError: on every rank, if reading failed on one.
    """
    problem = None
    slot = None
    try:
        for slot in slots:
            key = keys.get(slot.name)
            if key is None:
                continue
            if from_first:
                _take_from_first(slot, key, source, group)
            else:
                assert source is not None
                for part in pieces(slot.region, slot.dtype.itemsize):
                    slot.put(source.read(key, part), part)
            slot.filled()
    except (OSError, CheckpointError) as error:
        problem = (
            f"reading {slot.name if slot else ''!r} failed: {error}; what comes before it in the "
            "model has new values, what comes after it has not: load again"
        )
    agree(group, problem)


def _take_from_first(slot: Slot, key: str, source: Source | None, group: Group) -> None:
    whole = tuple(slice(0, size) for size in slot.shape)
    for part in pieces(whole, slot.dtype.itemsize):
        value, error = None, None
        if group.rank == 0:
            assert source is not None
            try:
                value = source.read(key, part).to(slot.dtype)
            except (OSError, CheckpointError) as failure:
                error = failure
        fine = group.from_first(torch.tensor([error is None]), (1,), torch.bool)
        if not fine.item():
            raise error or CheckpointError("rank 0 could not read it")
        sizes = [p.stop - p.start for p in part]
        slot.put(group.from_first(value, sizes, slot.dtype), part)


def load_state_dict(
    module: nn.Module, bindings: Bindings, state_dict: Mapping[str, Any], *, strict: bool
) -> dict[str, Any]:
    """`state_dict` as `nn.Module.load_state_dict` can take it without any error.

    Full tensors of sharded parameters become this rank's part; a tied parameter gets every name.

    Raises:
        CheckpointError: on every rank, if one's does not fit.
    """
    problem = None
    own = dict(state_dict)
    try:
        slots = slots_of(module, bindings)
        found = match(slots, describe(state_dict), strict=strict)
        for slot in slots:
            if slot.name in found.keys:
                for name in slot.names:
                    own.setdefault(name, state_dict[found.keys[slot.name]])
                    own[name] = _as_held(slot, name, own[name])
    except CheckpointError as error:
        problem = str(error)
    agree(bindings.group, problem)
    return own


def _as_held(slot: Slot, name: str, value: Tensor) -> Tensor:
    held = slot.tensor
    if isinstance(value, DTensor):
        if not isinstance(held, DTensor):
            raise CheckpointError(
                f"{name!r} is a DTensor in the checkpoint and a plain tensor in the model; pass "
                "its full_tensor()"
            )
        if value.device_mesh == held.device_mesh:
            return value
        if region_of(value) != slot.region:
            raise CheckpointError(
                f"{name!r} lies on {value.device_mesh} in the checkpoint and on "
                f"{held.device_mesh} in the model; pass its full_tensor()"
            )
        value = local_of(value)  # a mesh of another name, cut the same way
        return torch_compat.dtensor_like(held, value.to(slot.local.device, slot.dtype))
    if not isinstance(held, DTensor):
        return value
    part = value.detach()[slot.region].to(slot.local.device, slot.dtype)
    return torch_compat.dtensor_like(held, part.contiguous())


def take_over(
    module: nn.Module, model: nn.Module, bindings: Bindings, *, from_first: bool
) -> frozenset[str]:
    """Fill `module` from `model`, of which it was made; what is on meta is left without values.

    Args:
        module: the sharded module.
        model: every rank's own, with real weights or on meta.
        bindings: of `module`.
        from_first: every rank takes rank 0's values (the others may be on meta).

    Raises:
        FingerprintError: on every rank, if one's model is not like rank 0's.

    Returns:
        Every name of the parameters and buffers left without values.
    """
    group = bindings.group
    tensors: dict[str, Tensor] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    real = {name for name, tensor in tensors.items() if tensor.device.type != "meta"}
    described = {name: (tuple(t.shape), t.dtype) for name, t in tensors.items()}
    if from_first:
        given = everyones(group, (real, described))
        real = given[0][0]
        _require_equal_shapes([theirs for _, theirs in given])
    slots = slots_of(module, bindings)
    own = {layout.fqn for layout in bindings.plan.ignored}
    keys = {slot.name: slot.name for slot in slots if slot.name in real - own}
    source = Source(described, lambda key, region: tensors[key].detach()[region])
    if from_first:
        fill(slots, keys, source, group, from_first=group.size > 1)
    else:
        for slot in slots:  # no rank waits for another
            if slot.name in keys:
                slot.put(tensors[slot.name].detach(), tuple(slice(0, s) for s in slot.shape))
                slot.filled()
    return frozenset(tensors) - real


def _require_equal_shapes(by_rank: Sequence[Mapping[str, Any]]) -> None:
    def said(described: Mapping[str, Any], name: str) -> str:
        shape, dtype = described.get(name, (None, None))
        return "missing" if shape is None else f"{dtype} {list(shape)}"

    first = by_rank[0]
    for rank, theirs in enumerate(by_rank):
        for name in {**first, **theirs}:
            if first.get(name) != theirs.get(name):
                raise FingerprintError(
                    f"rank {rank}'s model is not rank 0's: {name!r} is {said(theirs, name)} there "
                    f"and {said(first, name)} on rank 0; build the same model on every rank"
                )

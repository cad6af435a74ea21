"""Values out of shards: state dicts of whole or local tensors, and safetensors files."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.errors import CheckpointError
from graphshard.runtime.lowered import Bindings
from graphshard.state.files import Target, write_files
from graphshard.state.slots import Slot, agree, by_name, gathered, slots_of


def full_state_dict(
    module: nn.Module, bindings: Bindings, *, rank0_only: bool, cpu: bool
) -> dict[str, Tensor]:
    """The whole of everything in `module.state_dict()`, gathered tensor by tensor."""
    group = bindings.group
    keep = group.rank == 0 or not rank0_only
    slots = by_name(slots_of(module, bindings))
    whole: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name in module.state_dict(keep_vars=True):
        slot = slots[name]
        if slot.name not in whole:
            full = gathered(slot.tensor, group)
            # A tied parameter is one tensor under all its names.
            whole[slot.name] = full.cpu() if keep and cpu else full if keep else full.new_empty(0)
        state[name] = whole[slot.name]
    return state if keep else {}


def local_state_dict(module: nn.Module, bindings: Bindings) -> dict[str, Tensor]:
    """What this rank stores of everything in `module.state_dict()`; shares its memory."""
    slots = by_name(slots_of(module, bindings))
    return {name: slots[name].local.detach() for name in module.state_dict(keep_vars=True)}


def load_local_state_dict(
    module: nn.Module, bindings: Bindings, state_dict: dict[str, Tensor]
) -> None:
    """Take back what `local_state_dict` gave on a group of the same size.

    Raises:
        CheckpointError: on every rank, if one's does not fit; nothing was changed.
    """
    slots = [slot for slot in slots_of(module, bindings) if slot.persistent]
    problem = None
    for slot in slots:
        value = state_dict.get(slot.name)
        if not isinstance(value, Tensor):
            problem = problem or f"the local state dict has no tensor {slot.name!r}"
        elif value.shape != slot.local.shape or value.dtype != slot.dtype:
            problem = problem or (
                f"{slot.name!r} is {value.dtype} {list(value.shape)} in the local state dict and "
                f"{slot.dtype} {list(slot.local.shape)} on this rank; local state goes back to as "
                "many ranks as it came from, state_dict() to any number"
            )
    unexpected = next((name for name in state_dict if name not in by_name(slots)), None)
    if unexpected is not None:
        problem = problem or f"the local state dict has {unexpected!r}, which the model has not"
    agree(bindings.group, problem)
    with torch.no_grad():
        for slot in slots:
            slot.local.copy_(state_dict[slot.name])
            slot.filled()


def save_safetensors(
    module: nn.Module,
    bindings: Bindings,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Write the whole model by rank 0, gathered tensor by tensor; a tied parameter once.

    Raises:
        CheckpointError: on every rank, if rank 0 cannot write.
    """
    group = bindings.group
    slots = {slot.name: slot for slot in slots_of(module, bindings) if slot.persistent}
    order = [name for name in module.state_dict(keep_vars=True) if name in slots]
    tensors = {name: (slots[name].shape, _saved_dtype(slots[name], dtype)) for name in order}
    target = Target(Path(path), max_shard_bytes)
    written: list[Path] = []
    problem = None
    pending = iter(order)

    def value(name: str) -> Iterator[Tensor]:
        next(pending)
        yield gathered(slots[name].tensor, group).to(tensors[name][1])

    if group.rank == 0:
        try:
            written = write_files(target, tensors, value)
        except (OSError, CheckpointError) as error:
            problem = f"writing {path} failed: {error}"
    for name in pending:  # on rank 0 what is left after a failure, for the others' sake
        gathered(slots[name].tensor, group)
    agree(group, problem)
    return written


def _saved_dtype(slot: Slot, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and slot.dtype.is_floating_point else slot.dtype


def save_pretrained(
    module: nn.Module,
    bindings: Bindings,
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int | None,
    dtype: torch.dtype | None,
) -> list[Path]:
    """Configuration and weights of a transformers `model`, as `from_pretrained` reads them.

    Raises:
        CheckpointError: on every rank, if the model has no configuration or rank 0 cannot write.
    """
    group = bindings.group
    problem = None
    if not callable(getattr(getattr(model, "config", None), "save_pretrained", None)):
        problem = (
            f"save_pretrained is for models of transformers, which have a config; "
            f"{type(model).__name__} has none; use save_safetensors"
        )
    agree(group, problem)
    if group.rank == 0:
        problem = _save_config(model, Path(path), dtype)
    agree(group, problem)
    return save_safetensors(module, bindings, path, max_shard_bytes=max_shard_bytes, dtype=dtype)


def _save_config(model: Any, folder: Path, dtype: torch.dtype | None) -> str | None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        config = copy.deepcopy(model.config)
        config.architectures = [type(model).__name__]
        config.dtype = str(dtype or getattr(model, "dtype", torch.float32)).removeprefix("torch.")
        config.save_pretrained(folder)
        generation = getattr(model, "generation_config", None)
        if generation is not None and model.can_generate():
            generation.save_pretrained(folder)
    except OSError as error:
        return f"writing {folder} failed: {error}"
    return None

"""Save a sharded module: state dicts of full or local tensors, and safetensors files."""

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
from graphshard.state.state_tensors import (
    StateTensor,
    by_name,
    gather_full,
    raise_together,
    state_tensors_of,
)


def full_state_dict(
    module: nn.Module, bindings: Bindings, *, rank0_only: bool, cpu: bool
) -> dict[str, Tensor]:
    """Return `module.state_dict()` with full tensors, gathered one by one.

    Args:
        module: the sharded module.
        bindings: its shards.
        rank0_only: return {} on all other ranks.
        cpu: move each full tensor to the CPU.
    """
    group = bindings.group
    keep = group.rank == 0 or not rank0_only
    state_tensors = by_name(state_tensors_of(module, bindings))
    full_tensors: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    for name in module.state_dict(keep_vars=True):
        state_tensor = state_tensors[name]
        if state_tensor.name not in full_tensors:
            full = gather_full(state_tensor.tensor, group)
            # A tied parameter is one tensor under all its names.
            full_tensors[state_tensor.name] = (
                full.cpu() if keep and cpu else full if keep else full.new_empty(0)
            )
        state[name] = full_tensors[state_tensor.name]
    return state if keep else {}


def local_state_dict(module: nn.Module, bindings: Bindings) -> dict[str, Tensor]:
    """Return this rank's part of every tensor in `module.state_dict()`; memory is shared."""
    state_tensors = by_name(state_tensors_of(module, bindings))
    return {name: state_tensors[name].local.detach() for name in module.state_dict(keep_vars=True)}


def load_local_state_dict(
    module: nn.Module, bindings: Bindings, state_dict: dict[str, Tensor]
) -> None:
    """Load a state dict from `local_state_dict` on a group of the same size.

    Raises:
        CheckpointError: on every rank, if a rank's does not fit; nothing was changed.
    """
    state_tensors = [
        state_tensor
        for state_tensor in state_tensors_of(module, bindings)
        if state_tensor.persistent
    ]
    problem = None
    for state_tensor in state_tensors:
        value = state_dict.get(state_tensor.name)
        if not isinstance(value, Tensor):
            problem = problem or f"the local state dict has no tensor {state_tensor.name!r}"
        elif value.shape != state_tensor.local.shape or value.dtype != state_tensor.dtype:
            problem = problem or (
                f"{state_tensor.name!r} is {value.dtype} {list(value.shape)} in the local state "
                f"dict and {state_tensor.dtype} {list(state_tensor.local.shape)} on this rank; "
                "load local state on as many ranks as saved it, or use state_dict() for any number"
            )
    unexpected = next((name for name in state_dict if name not in by_name(state_tensors)), None)
    if unexpected is not None:
        problem = problem or f"the local state dict has {unexpected!r}, which the model has not"
    raise_together(bindings.group, problem)
    with torch.no_grad():
        for state_tensor in state_tensors:
            state_tensor.local.copy_(state_dict[state_tensor.name])
            state_tensor.mark_filled()


def save_safetensors(
    module: nn.Module,
    bindings: Bindings,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
) -> list[Path]:
    """Write the full model from rank 0, gathered tensor by tensor; a tied parameter once.

    Args:
        module: the sharded module.
        bindings: its shards.
        path: a .safetensors file or a directory.
        max_shard_bytes: the most bytes of one file, unless a single tensor takes more. None: one
            file.
        dtype: the dtype of written floating point tensors. None: unchanged.

    Returns:
        The written files on rank 0; [] elsewhere.

    Raises:
        CheckpointError: on every rank, if rank 0 cannot write.
    """
    group = bindings.group
    state_tensors = {
        state_tensor.name: state_tensor
        for state_tensor in state_tensors_of(module, bindings)
        if state_tensor.persistent
    }
    order = [name for name in module.state_dict(keep_vars=True) if name in state_tensors]
    tensors = {
        name: (state_tensors[name].shape, _saved_dtype(state_tensors[name], dtype))
        for name in order
    }
    target = Target(Path(path), max_shard_bytes)
    written: list[Path] = []
    problem = None
    pending = iter(order)

    def value(name: str) -> Iterator[Tensor]:
        next(pending)
        yield gather_full(state_tensors[name].tensor, group).to(tensors[name][1])

    if group.rank == 0:
        try:
            written = write_files(target, tensors, value)
        except (OSError, CheckpointError) as error:
            problem = f"writing {path} failed: {error}"
    for name in pending:  # other ranks take part in every gather; rank 0 too after a failure
        gather_full(state_tensors[name].tensor, group)
    raise_together(group, problem)
    return written


def _saved_dtype(state_tensor: StateTensor, dtype: torch.dtype | None) -> torch.dtype:
    return (
        dtype if dtype is not None and state_tensor.dtype.is_floating_point else state_tensor.dtype
    )


def save_pretrained(
    module: nn.Module,
    bindings: Bindings,
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int | None,
    dtype: torch.dtype | None,
) -> list[Path]:
    """Write the configuration and weights of a transformers `model` for `from_pretrained`.

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
    raise_together(group, problem)
    if group.rank == 0:
        problem = _save_config(model, Path(path), dtype)
    raise_together(group, problem)
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

"""Save a sharded module: state dicts of full or local tensors, and safetensors files."""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.errors import CheckpointError
from graphshard.runtime.lowered import Bindings
from graphshard.state.files import Shapes, Target, TargetFiles
from graphshard.state.pretrained import without_copies
from graphshard.state.state_tensors import (
    Keeper,
    StateTensor,
    by_name,
    gather_full,
    gathered_line,
    state_tensors_of,
)


def full_state_dict(
    module: nn.Module, bindings: Bindings, *, rank0_only: bool, cpu: bool
) -> dict[str, Tensor]:
    """See `ShardedModule.full_state_dict`."""
    group, agreement = bindings.group, bindings.agreement
    keep = group.rank == 0 or not rank0_only
    with agreement.part() as part:
        state_tensors = by_name(state_tensors_of(module, bindings))
        by_key = {name: state_tensors[name] for name in module.state_dict(keep_vars=True)}
        part.same += [gathered_line(name, each.tensor) for name, each in by_key.items()]
    full_tensors: dict[str, Any] = {}
    state: dict[str, Tensor] = {}
    keeper = Keeper()
    for name, state_tensor in by_key.items():
        if state_tensor.name not in full_tensors:
            full = gather_full(state_tensor.tensor, group)
            # A tied parameter is one tensor under all its names.
            make = full.cpu if cpu else full.detach
            full_tensors[state_tensor.name] = keeper.keep(make) if keep else None
        state[name] = full_tensors[state_tensor.name]
    keeper.end(agreement)
    return state if keep else {}


def local_state_dict(module: nn.Module, bindings: Bindings) -> dict[str, Tensor]:
    """See `ShardedModule.local_state_dict`."""
    state_tensors = by_name(state_tensors_of(module, bindings))
    return {name: state_tensors[name].local.detach() for name in module.state_dict(keep_vars=True)}


def load_local_state_dict(
    module: nn.Module, bindings: Bindings, state_dict: dict[str, Tensor]
) -> None:
    """See `ShardedModule.load_local_state_dict`."""
    with bindings.agreement.part():
        state_tensors = [
            state_tensor
            for state_tensor in state_tensors_of(module, bindings)
            if state_tensor.persistent
        ]
        for state_tensor in state_tensors:
            value = state_dict.get(state_tensor.name)
            if not isinstance(value, Tensor):
                raise CheckpointError(f"the local state dict has no tensor {state_tensor.name!r}")
            if value.shape != state_tensor.local.shape or value.dtype != state_tensor.dtype:
                raise CheckpointError(
                    f"{state_tensor.name!r} is {value.dtype} {list(value.shape)} in the local "
                    f"state dict and {state_tensor.dtype} {list(state_tensor.local.shape)} on this "
                    "rank; load local state on as many ranks as saved it, or use state_dict() for "
                    "any number"
                )
        names = by_name(state_tensors)
        unexpected = next((name for name in state_dict if name not in names), None)
        if unexpected is not None:
            raise CheckpointError(
                f"the local state dict has {unexpected!r}, which the model does not have"
            )
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
    before_commit: Callable[[], None] | None = None,
) -> list[Path]:
    """See `ShardedModule.save_safetensors`.

    `before_commit` is what rank 0 does once all tensors are written, before files get their names.
    """
    group = bindings.group
    with bindings.agreement.part() as part:
        state_tensors = {
            state_tensor.name: state_tensor
            for state_tensor in state_tensors_of(module, bindings)
            if state_tensor.persistent
        }
        order = [name for name in module.state_dict(keep_vars=True) if name in state_tensors]
        tensors = {
            name: (state_tensors[name].shape, saved_dtype(state_tensors[name], dtype))
            for name in order
        }
        part.same += [gathered_line(name, state_tensors[name].tensor) for name in order]
    values = (
        (name, _cast(gather_full(state_tensors[name].tensor, group), tensors[name][1]))
        for name in order
    )
    return write_values(
        bindings,
        path,
        tensors,
        values,
        max_shard_bytes=max_shard_bytes,
        before_commit=before_commit,
    )


def write_values(
    bindings: Bindings,
    path: str | os.PathLike[str],
    tensors: Shapes,
    values: Iterable[tuple[str, Callable[[], Tensor]]],
    *,
    max_shard_bytes: int | None,
    before_commit: Callable[[], None] | None,
) -> list[Path]:
    """Write safetensors files from rank 0, tensor by tensor; all ranks call this.

    Args:
        bindings: of the module.
        path: a .safetensors file or a directory.
        tensors: shape and dtype of each tensor by name, in the order to write.
        values: each name with a function that makes its tensor, called on rank 0. Iterating may
            move data between ranks; it must not fail.
        max_shard_bytes: as of `save_safetensors`.
        before_commit: as of `save_safetensors`.
    """
    group, agreement = bindings.group, bindings.agreement
    files = TargetFiles(Target(Path(path), max_shard_bytes), tensors)
    keeper = Keeper()
    if group.rank == 0:
        keeper.keep(writing(path, files.open))
    for name, make in values:  # rank 0 takes part in every gather, too, after a failure
        if group.rank == 0:
            keeper.keep(writing(path, partial(_write, files, name, make)))
        del make
    if before_commit is not None and group.rank == 0:
        keeper.keep(writing(path, before_commit))
    written: list[Path] = []
    try:
        keeper.end(agreement)
        with agreement.part():
            if group.rank == 0:
                written = writing(path, files.commit)()
    except BaseException:
        files.abandon()
        raise
    return written


def _cast(full: Tensor, dtype: torch.dtype) -> Callable[[], Tensor]:
    return lambda: full.to(dtype)


def _write(files: TargetFiles, name: str, make: Callable[[], Tensor]) -> None:
    files.write(name, make())


def writing(path: str | os.PathLike[str], write: Callable[[], Any]) -> Callable[[], Any]:
    """`write`, with a `CheckpointError` in place of an `OSError`."""

    def call() -> Any:
        try:
            return write()
        except OSError as error:
            raise CheckpointError(f"writing {path} failed: {error}") from error

    return call


def saved_dtype(state_tensor: StateTensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor in a file that is to have floating point values of `dtype`."""
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
    merge: bool,
    given: Mapping[str, Tensor] | None = None,
) -> list[Path]:
    """See `ShardedModule.save_pretrained`; `model` is the model of transformers on meta.

    With `given`, the tensors in it on rank 0 are written in place of the module's.
    """
    with bindings.agreement.part():
        if merge or getattr(model, "_hf_peft_config_loaded", False):
            raise CheckpointError(
                "save_pretrained: adapters are saved, and merge=True merges them, where the model "
                f"is a PeftModel; {type(model).__name__} is not: wrap it by peft.get_peft_model or "
                "PeftModel.from_pretrained before compiling it"
            )
        if not callable(getattr(getattr(model, "config", None), "save_pretrained", None)):
            raise CheckpointError(
                f"save_pretrained is for models of transformers, which have a config; "
                f"{type(model).__name__} has none; use save_safetensors"
            )

    def configure() -> None:
        save_config(model, Path(path), dtype)

    if given is not None:
        tensors = without_copies(given)
        return write_values(
            bindings,
            path,
            {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()},
            ((name, partial(tensor.to, "cpu")) for name, tensor in tensors.items()),
            max_shard_bytes=max_shard_bytes,
            before_commit=configure,
        )
    return save_safetensors(
        module,
        bindings,
        path,
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
        before_commit=configure,
    )


def save_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the configurations of a transformers `model`, whose weights are saved in `dtype`."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype or getattr(model, "dtype", torch.float32)).removeprefix("torch.")
    generation = getattr(model, "generation_config", None)
    with renamed_at_the_end(folder) as unfinished:
        config.save_pretrained(unfinished)
        if generation is not None and model.can_generate():
            generation.save_pretrained(unfinished)


@contextmanager
def renamed_at_the_end(folder: Path) -> Iterator[Path]:
    """A folder whose files, also those in folders below, move into `folder` if nothing failed."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        unfinished = Path(name)
        yield unfinished
        for file in sorted(each for each in unfinished.rglob("*") if each.is_file()):
            target = folder / file.relative_to(unfinished)
            target.parent.mkdir(exist_ok=True)
            file.replace(target)

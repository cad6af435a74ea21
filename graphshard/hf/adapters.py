"""peft: adapters of a sharded `PeftModel`, saved and loaded by themselves, or merged and saved.

peft decides what belongs to an adapter, under which name, and how a layer is merged. It looks at
the copy of the model on meta, so only what it asks for is gathered, and on rank 0 only one layer at
a time is whole.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.errors import CheckpointError
from graphshard.module.sharded_module import ShardedModule
from graphshard.state import load, save
from graphshard.state.files import open_files
from graphshard.state.state_tensors import (
    Keeper,
    StateTensor,
    by_name,
    gather_full,
    gathered_line,
    state_tensors_of,
)

try:
    from peft import PeftModel, get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer
except ImportError as error:
    raise ImportError("the adapters of graphshard.hf need peft; install peft") from error

WEIGHTS = "adapter_model.safetensors"


def has_adapters(sharded: ShardedModule) -> bool:
    """Whether it was compiled from a `PeftModel`."""
    return isinstance(sharded._graphshard.programs.meta_model, PeftModel)


def save_adapters(
    sharded: ShardedModule,
    path: str | os.PathLike[str],
    *,
    dtype: torch.dtype | None = None,
    given: Mapping[str, Tensor] | None = None,
) -> list[Path]:
    """Write the adapters as `PeftModel.save_pretrained` does; all ranks call this.

    Args:
        sharded: compiled from a `PeftModel`.
        path: the folder; every adapter but "default" has a folder of its own name in it.
        dtype: of floating point values. None: the model's own.
        given: on rank 0 the whole model's tensors, to take the adapters from in place of the
            module's; {} elsewhere. None: the module's.

    Returns:
        The files, on rank 0.

    Raises:
        CheckpointError: on every rank, if peft asks for what no parameter is, or rank 0 cannot
            write.
    """
    model = _peft_model(sharded)
    bindings = sharded._graphshard.bindings
    group, agreement = bindings.group, bindings.agreement
    written: list[Path] = []
    if given is not None:  # on rank 0 the whole tensors
        with agreement.part():
            if group.rank == 0:
                write = partial(_write, model, Path(path), written, state_dict=dict(given))
                save.writing(path, write)()
        return written
    asked: set[str] = set()
    with agreement.part() as told:
        # Those of prompts are saved as values that peft computes.
        computed = any(config.is_prompt_learning for config in model.peft_config.values())
        if group.rank == 0 and not computed:
            asked = {
                name for adapter in model.peft_config for name in _names(model, adapter).values()
            }
        told.flag = group.rank == 0 and not asked
    if any(told.flags):
        return _save_computed(sharded, Path(path), dtype)
    asked = group.all_gather_object(asked)[0]
    with agreement.part() as part:
        tensors = by_name(state_tensors_of(sharded, bindings))
        part.same += [gathered_line(name, tensors[name].tensor) for name in sorted(asked)]
    state = model.state_dict()
    keeper = Keeper()
    for name in sorted(asked):
        full = gather_full(tensors[name].tensor, group)
        if group.rank == 0:
            saved = save.saved_dtype(tensors[name], dtype)
            state[name] = keeper.keep(partial(full.to, "cpu", saved))
    if group.rank == 0:
        write = partial(_write, model, Path(path), written, state_dict=state)
        keeper.keep(save.writing(path, write))
    keeper.end(agreement)
    return written


def _save_computed(sharded: ShardedModule, path: Path, dtype: torch.dtype | None) -> list[Path]:
    """Write adapters from the whole model, gathered on every rank."""
    bindings = sharded._graphshard.bindings
    with bindings.agreement.part():
        if dtype is not None:
            raise CheckpointError(
                "save_pretrained: these adapters are computed as they are saved; leave dtype out"
            )
    written: list[Path] = []
    with sharded.gathered() as model:
        if bindings.group.rank == 0:
            save.writing(path, partial(_write, model, path, written))()
    return written


def _write(model: Any, path: Path, written: list[Path], **options: Any) -> None:
    with save.renamed_at_the_end(path) as unfinished, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what peft decides by itself, such as to save embeddings
        model.save_pretrained(str(unfinished), **options)
        files = [each.relative_to(unfinished) for each in unfinished.rglob("*.*")]
    written.extend(path / file for file in sorted(files))


def load_adapters(sharded: ShardedModule, path: str | os.PathLike[str]) -> None:
    """Take the adapters that `save_adapters`, or peft, wrote; all ranks call this.

    Args:
        sharded: compiled from a `PeftModel` with these adapters.
        path: the folder.

    Raises:
        CheckpointError: on every rank, if a file is missing or damaged, or lacks a tensor; nothing
            was changed.
    """
    model = _peft_model(sharded)

    def source() -> load.TensorSource:
        infos: dict[str, Any] = {}
        places = {}
        for adapter in model.peft_config:
            folder = Path(path) if adapter == "default" else Path(path, adapter)
            entries = open_files(folder / WEIGHTS)
            for key, name in _names(model, adapter).items():
                if key not in entries:
                    raise CheckpointError(f"{folder / WEIGHTS} has no {key!r}, which is {name!r}")
                places[name] = entries[key]
                infos[name] = entries[key].shape, entries[key].dtype
        return load.TensorSource(infos, lambda name, region: places[name].read(region))

    bindings = sharded._graphshard.bindings
    with bindings.agreement.call(f"load_adapters({os.fspath(path)!r})"):
        load.load(sharded, bindings, source, strict=False)


def save_merged(
    sharded: ShardedModule,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int | None,
    dtype: torch.dtype | None,
) -> list[Path]:
    """Write the base model with the active adapters merged into it, for `from_pretrained`.

    Layers are merged one by one on rank 0, as `merge_and_unload` would; the sharded module stays as
    it is. All ranks call this.

    Raises:
        CheckpointError: on every rank, if peft cannot merge this kind of adapter, or rank 0 cannot
            write.
    """
    bindings = sharded._graphshard.bindings
    with bindings.agreement.part() as part:
        merged = _Merged.of(_peft_model(sharded))
        tensors = by_name(state_tensors_of(sharded, bindings))
        shapes = {
            name: (tuple(tensor.shape), save.saved_dtype(tensors[merged.sources[name]], dtype))
            for name, tensor in merged.state.items()
        }
        part.same += [f"{name} of {merged.sources[name]}" for name in shapes]
    return save.write_values(
        bindings,
        path,
        shapes,
        _merged_values(sharded, merged, tensors, shapes),
        max_shard_bytes=max_shard_bytes,
        before_commit=lambda: save.save_config(merged.model, Path(path), dtype),
    )


def _merged_values(
    sharded: ShardedModule,
    merged: _Merged,
    tensors: dict[str, StateTensor],
    shapes: dict[str, Any],
) -> Iterator[tuple[str, Callable[[], Tensor]]]:
    group = sharded._graphshard.bindings.group
    for name, (_, dtype) in shapes.items():
        source = merged.sources[name]
        layer = merged.layer_of.get(source)
        if layer is None:
            yield name, partial(gather_full(tensors[source].tensor, group).to, dtype)
            continue
        inside = [each for each in tensors if each.startswith(f"{layer}.")]
        values = {each: gather_full(tensors[each].tensor, group) for each in inside}
        yield name, partial(_merged_tensor, sharded, layer, values, source, dtype)
        del values


def _merged_tensor(
    sharded: ShardedModule,
    fqn: str,
    values: dict[str, Tensor],
    wanted: str,
    dtype: torch.dtype,
) -> Tensor:
    """The tensor `wanted` of the tuner layer `fqn` after a merge into its base layer."""
    layer = copy.deepcopy(_peft_model(sharded).get_submodule(fqn))
    for name, value in values.items():
        path, _, leaf = name.removeprefix(f"{fqn}.").rpartition(".")
        module = layer.get_submodule(path)
        if leaf in module._parameters:
            module._parameters[leaf] = nn.Parameter(value, requires_grad=False)
        else:
            module._buffers[leaf] = value
    with torch.no_grad():
        layer.merge()
    return layer.state_dict()[wanted.removeprefix(f"{fqn}.")].to(dtype)


@dataclass(frozen=True)
class _Merged:
    """The model that merging gives, on meta, and where its values come from.

    model: without tuner layers.
    state: each tensor of its state dict that a file needs; a tied one once.
    sources: by its name there, its name in the `PeftModel`.
    layer_of: by the latter, the tuner layer that is merged into it; none for others.
    """

    model: Any
    state: dict[str, Tensor]
    sources: dict[str, str]
    layer_of: dict[str, str]

    @staticmethod
    def of(model: Any) -> _Merged:
        """Merge a copy of `model`, which is on meta."""
        twin = copy.deepcopy(model)
        layers: dict[int, list[str]] = {}
        for fqn, module in twin.named_modules():
            if isinstance(module, BaseTunerLayer):
                layers.setdefault(id(module.get_base_layer()), []).append(fqn)
        homes = {id(module): fqn for fqn, module in twin.named_modules()}
        kept = list(twin.modules())  # so that no identity is used again
        try:
            merged = twin.merge_and_unload()
        except Exception as error:  # whatever peft and its tuners raise
            raise CheckpointError(
                f"save_pretrained: peft cannot merge the adapters ({error}); leave merge=True out "
                "to save them by themselves"
            ) from error
        sources: dict[str, str] = {}
        layer_of: dict[str, str] = {}
        for fqn, module in merged.named_modules():
            home, inside = homes.get(id(module)), layers.get(id(module), [])
            if home is None or len(inside) > 1:
                raise CheckpointError(
                    f"save_pretrained: merging makes {fqn!r} of more than one layer, which cannot "
                    "be done layer by layer; leave merge=True out, and merge what "
                    "PeftModel.from_pretrained loads"
                )
            for leaf in (*module._parameters, *module._buffers):
                source = _joined(home, leaf)
                sources[_joined(fqn, leaf)] = source
                if inside:
                    layer_of[source] = inside[0]
        del kept
        state: dict[int, tuple[str, Tensor]] = {}
        for name, tensor in merged.state_dict(keep_vars=True).items():
            state.setdefault(id(tensor), (name, tensor))
        return _Merged(merged, dict(state.values()), sources, layer_of)


def _joined(fqn: str, leaf: str) -> str:
    return f"{fqn}.{leaf}" if fqn else leaf


def _names(model: Any, adapter: str) -> dict[str, str]:
    """By the name of each tensor in the file of `adapter`, its name in the model."""
    state = model.state_dict(keep_vars=True)
    names = {id(tensor): name for name, tensor in reversed(state.items())}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        saved = get_peft_model_state_dict(model, state_dict=dict(state), adapter_name=adapter)
    computed = [key for key, tensor in saved.items() if id(tensor) not in names]
    if computed:
        kind = model.peft_config[adapter].peft_type
        raise CheckpointError(
            f"adapter {adapter!r} ({getattr(kind, 'value', kind)}) is saved as {computed[0]!r}, "
            "which is no parameter of the model but computed from them; inside of "
            "sharded.gathered() the model's own methods of peft save and load it"
        )
    return {key: names[id(tensor)] for key, tensor in saved.items()}


def _peft_model(sharded: ShardedModule) -> Any:
    model = sharded._graphshard.programs.meta_model
    if not isinstance(model, PeftModel):
        raise CheckpointError(
            f"adapters are those of a PeftModel; this module was compiled from "
            f"{type(model).__name__}"
        )
    return model

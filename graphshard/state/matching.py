"""Match a checkpoint's keys to a module before anything is written; report the first misfit."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphshard.errors import CheckpointError
from graphshard.state.state_tensors import StateTensor, dtype_kind

TensorInfos = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Shape and dtype of each tensor of a checkpoint, by its key."""


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
    infos: TensorInfos,
    *,
    strict: bool = True,
    rules: KeyRules | None = None,
) -> Match:
    """Find the checkpoint's key of every tensor of a module.

    Args:
        state_tensors: the tensors of the module.
        infos: shapes and dtypes of the checkpoint's tensors.
        strict: refuse missing and unexpected keys; otherwise only list them.
        rules: how a transformers model names its parameters in checkpoints.
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
    optional = {
        name
        for state_tensor in state_tensors
        if not state_tensor.persistent
        for name in state_tensor.names
    }
    for state_tensor in persistent:
        named = [key_of[name] for name in state_tensor.names if name in key_of]
        if named:
            matched.keys[state_tensor.name] = named[0]
        else:
            matched.missing.append(state_tensor.name)
    persistent_names = {name for state_tensor in persistent for name in state_tensor.names}
    matched.unexpected = [
        key
        for key, name in name_of.items()
        if name not in persistent_names
        and name not in optional
        and not any(re.search(pattern, key) for pattern in rules.ignored)
    ]
    if strict:
        _require_complete(matched, persistent, infos)
    for state_tensor in persistent:
        for name in state_tensor.names:  # check all names of a tied tensor, though one is read
            if name in key_of:
                _require_fit(state_tensor, key_of[name], *infos[key_of[name]])
    return matched


def _require_complete(
    matched: Match, persistent: Sequence[StateTensor], infos: TensorInfos
) -> None:
    if matched.missing:
        count = len(matched.missing)
        raise CheckpointError(
            f"the checkpoint has no {matched.missing[0]!r}; it must have every parameter and "
            f"buffer of the model and lacks {count} of {len(persistent)}"
            f"{_hint(count, persistent, infos)}"
        )
    if matched.unexpected:
        raise CheckpointError(
            f"the checkpoint has {matched.unexpected[0]!r}, which the model does not have "
            f"({len(matched.unexpected)} such keys); remove or rename it, or pass strict=False"
        )


def _hint(missing: int, persistent: Sequence[StateTensor], infos: TensorInfos) -> str:
    if missing < len(persistent) or not infos:
        return ""
    return f"; its first key is {next(iter(infos))!r}: is it another model's?"


def _require_fit(
    state_tensor: StateTensor, key: str, shape: Sequence[int], dtype: torch.dtype
) -> None:
    if tuple(shape) != state_tensor.shape:
        raise CheckpointError(
            f"{key!r} has shape {list(shape)} in the checkpoint and {list(state_tensor.shape)} in "
            "the model"
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

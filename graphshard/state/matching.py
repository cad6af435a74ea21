"""Whether a checkpoint fits a module: said before anything is written, with the first wrong key."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from graphshard.errors import CheckpointError
from graphshard.state.slots import Slot, kind

Described = Mapping[str, tuple[Sequence[int], torch.dtype]]
"""Shape and dtype of each tensor of a checkpoint, by its key there."""


@dataclass
class Match:
    """Which key of a checkpoint goes to which slot; missing and unexpected names."""

    keys: dict[str, str] = field(default_factory=dict)  # by the slot's first name
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class KeyRules:
    """How a transformers model relates its names to those in checkpoints.

    prefix: of the base model within one with a head ("model", "transformer", ...); a checkpoint of
        the one is read into the other.
    ignored: patterns of keys that old checkpoints have for nothing.
    """

    prefix: str = ""
    ignored: tuple[str, ...] = ()

    @staticmethod
    def of(model: nn.Module) -> KeyRules:
        """The rules of `model`; none if it is not of transformers."""
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        prefix = getattr(model, "base_model_prefix", "")
        return KeyRules(prefix if isinstance(prefix, str) else "", tuple(ignored))

    def renamed(self, keys: Iterable[str], names: Iterable[str]) -> dict[str, str]:
        """Each key under the name it has in the model, after adding or cutting the prefix."""
        keys, wanted = list(keys), set(names)
        ways = [{key: key for key in keys}]
        if self.prefix:
            dot = f"{self.prefix}."
            ways.append({key: dot + key for key in keys})
            ways.append({key: key.removeprefix(dot) for key in keys})
        # The first of the best: names are changed only if more fit then.
        return max(ways, key=lambda way: sum(name in wanted for name in way.values()))


def match(
    slots: Sequence[Slot],
    described: Described,
    *,
    strict: bool = True,
    rules: KeyRules | None = None,
) -> Match:
    """Find the key of every slot.

    Args:
        slots: what is to be filled.
        described: what the checkpoint has.
        strict: refuse missing and unexpected keys; else they are only listed.
        rules: of transformers.

    Raises:
        CheckpointError: names the first key that is missing, unexpected, of another shape or of
            another kind of dtype.
    """
    rules = rules or KeyRules()
    every = {name for slot in slots for name in slot.names}
    name_of = rules.renamed(described, every)
    key_of: dict[str, str] = {}
    for key, name in name_of.items():
        if name in key_of:
            raise CheckpointError(
                f"the checkpoint has both {key_of[name]!r} and {key!r}, which are one parameter "
                "of the model; remove one"
            )
        key_of[name] = key
    found = Match()
    wanted = [slot for slot in slots if slot.persistent]
    optional = {name for slot in slots if not slot.persistent for name in slot.names}
    for slot in wanted:
        named = [key_of[name] for name in slot.names if name in key_of]
        if named:
            found.keys[slot.name] = named[0]
        else:
            found.missing.append(slot.name)
    known = {name for slot in wanted for name in slot.names}
    found.unexpected = [
        key
        for key, name in name_of.items()
        if name not in known
        and name not in optional
        and not any(re.search(pattern, key) for pattern in rules.ignored)
    ]
    if strict:
        _require_complete(found, wanted, described)
    for slot in wanted:
        for name in slot.names:  # a tied one's are all checked, though one is read
            if name in key_of:
                _require_fit(slot, key_of[name], *described[key_of[name]])
    return found


def _require_complete(found: Match, wanted: Sequence[Slot], described: Described) -> None:
    if found.missing:
        count = len(found.missing)
        raise CheckpointError(
            f"the checkpoint has no {found.missing[0]!r}; it must have every parameter and buffer "
            f"of the model and lacks {count} of {len(wanted)}{_hint(count, wanted, described)}"
        )
    if found.unexpected:
        raise CheckpointError(
            f"the checkpoint has {found.unexpected[0]!r}, which the model has not "
            f"({len(found.unexpected)} such keys); remove or rename it, or pass strict=False"
        )


def _hint(missing: int, wanted: Sequence[Slot], described: Described) -> str:
    if missing < len(wanted) or not described:
        return ""
    return f"; its first key is {next(iter(described))!r}: is it another model's?"


def _require_fit(slot: Slot, key: str, shape: Sequence[int], dtype: torch.dtype) -> None:
    if tuple(shape) != slot.shape:
        raise CheckpointError(
            f"{key!r} has shape {list(shape)} in the checkpoint and {list(slot.shape)} in the model"
        )
    if kind(dtype) != kind(slot.dtype):
        raise CheckpointError(
            f"{key!r} is {dtype} in the checkpoint and {slot.dtype} in the model; values are cast "
            "only among floating point dtypes, or among integer ones"
        )


def describe(state_dict: Mapping[str, Any]) -> dict[str, tuple[Sequence[int], torch.dtype]]:
    """Shapes and dtypes in a state dict of tensors.

    Raises:
        CheckpointError: an entry is no tensor.
    """
    described: dict[str, tuple[Sequence[int], torch.dtype]] = {}
    for name, value in state_dict.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointError(
                f"{name!r} is a {type(value).__name__} in the checkpoint; it must be a tensor"
            )
        described[name] = (tuple(value.shape), value.dtype)
    return described

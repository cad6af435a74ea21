"""The rest of a training state in a checkpoint: scheduler, scaler, "extra" values, random states.

An object with `state_dict` and `load_state_dict` (torch's `Stateful`) is saved as its state and
restored in place; other values are plain data and tensors. They are entries of the checkpoint by
the paths of nested dicts, as torch.distributed.checkpoint has them, so its `load` reads them, too.
"""

from __future__ import annotations

import copy
import hashlib
import io
import random
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from graphshard.errors import CheckpointError
from graphshard.format import some_of
from graphshard.plain_data import shown
from graphshard.runtime.group import Group
from graphshard.state.archive import load_part
from graphshard.state.dcp import StoredCheckpoint, empty_like
from graphshard.state.state_tensors import local_of, memory_like
from graphshard.torch_private import compat as torch_compat

SCHEDULER, SCALER, EXTRA = PARTS = ("scheduler", "scaler", "extra")
"""The top-level entries of a checkpoint that hold them."""


Path = tuple[str | int, ...]


def flatten(value: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yield the entries of a nested value with their paths.

    Dicts with names as keys and lists with tensors or dicts in them are taken apart, as torch does.
    All else stays in one piece, which torch would change: empty dicts, and dicts with other keys.
    """
    if _is_named(value):
        for name, item in value.items():
            yield from flatten(item, (*path, name))
    elif isinstance(value, list) and any(map(_is_taken_apart, value)):
        for index, item in enumerate(value):
            yield from flatten(item, (*path, index))
    else:
        yield path, value


def _is_named(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and not isinstance(value, Counter)
        and len(value) > 0
        and all(isinstance(name, str) for name in value)
    )


def _is_taken_apart(value: Any) -> bool:
    """Whether a list with `value` in it is."""
    if isinstance(value, list):
        return any(map(_is_taken_apart, value))
    return isinstance(value, Tensor | Mapping)


def unflatten(values: Mapping[Path, Any]) -> Any:
    """Put the entries of `flatten(value, ())` together again."""
    if () in values:
        return values[()]
    parts: dict[str | int, dict[Path, Any]] = {}
    for path, value in values.items():
        parts.setdefault(path[0], {})[path[1:]] = value
    built = {first: unflatten(part) for first, part in parts.items()}
    if all(isinstance(first, int) for first in built):
        return [built[index] for index in sorted(built, key=int)]
    return built


def key_of(path: Path) -> str:
    """The key of the entry at `path`: that of torch.distributed.checkpoint."""
    return ".".join(map(str, path))


# -- saving ---------------------------------------------------------------------------------------


def parts_to_save(scheduler: Any, scaler: Any, extra: Mapping[str, Any] | None) -> dict[str, Any]:
    """The entries to save, nested."""
    parts: dict[str, Any] = {}
    seen: dict[str, Path] = {}
    for path, value in _targets(scheduler, scaler, extra):
        state = _state_of(path, value) if isinstance(value, Stateful) else value
        _require_saveable(path, state, seen)
        if len(path) == 1:
            parts[path[0]] = state
        else:
            parts.setdefault(EXTRA, {})[path[1]] = state
    return parts


def _targets(
    scheduler: Any, scaler: Any, extra: Mapping[Any, Any] | None
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield what the caller passed, with the path of its entries."""
    for name, value in ((SCHEDULER, scheduler), (SCALER, scaler)):
        if value is None:
            continue
        if not isinstance(value, Stateful):
            raise CheckpointError(
                f"{name} must have state_dict and load_state_dict; a {type(value).__name__} has not"
            )
        yield (name,), value
    if extra is not None and not isinstance(extra, Mapping):
        raise CheckpointError(
            f"extra must be a dict of values by name; got a {type(extra).__name__}"
        )
    for name, value in (extra or {}).items():
        if not isinstance(name, str) or not name:
            raise CheckpointError(f"keys of extra must be names; got {name!r}")
        if isinstance(value, Optimizer):
            raise CheckpointError(
                f"extra[{name!r}] is an optimizer, whose state goes by parameter numbers; pass it "
                "as optim, or pass sharded.optimizer_state_dict(optimizer) and give that to "
                "sharded.load_optimizer_state_dict after the load"
            )
        yield (EXTRA, name), value


def _label(path: Path) -> str:
    return str(path[0]) if len(path) == 1 else f"extra[{path[1]!r}]"


def _state_of(path: Path, value: Stateful) -> Any:
    try:
        return value.state_dict()
    except Exception as error:
        raise CheckpointError(
            f"{_label(path)}.state_dict() raised {type(error).__name__}: {error}"
        ) from error


def _require_saveable(path: Path, state: Any, seen: dict[str, Path]) -> None:
    """Check that a load gives `state` back without running code.

    `seen` has, by the key of each entry so far, the path of what it belongs to, and is added to.
    """
    for entry, value in flatten(state, path):
        key = key_of(entry)
        if key in seen:
            whose = f"{_label(path)} has two entries"
            if seen[key] != path:
                whose = f"{_label(seen[key])} and {_label(path)} both have an entry"
            raise CheckpointError(
                f"{whose} {key!r}, since names in nested dicts are joined by dots; rename one of "
                "them"
            )
        seen[key] = path
        if isinstance(value, Tensor):
            continue
        if any(isinstance(leaf, DTensor) for leaf in pytree.tree_leaves(value)):
            raise CheckpointError(
                f"{key!r} is a {type(value).__name__} with a DTensor in it, whose shards cannot be "
                "saved from there; keep DTensors in dicts with names as keys, or in lists"
            )
        try:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            load_part(buffer, 0, buffer.tell())
        except Exception as error:
            raise CheckpointError(
                f"{key!r} is or holds something that a load could restore only by running code "
                f"({error}): a {type(value).__name__}, {shown(value)}; save numbers, strings, "
                "tensors, and lists, tuples and dicts of them (number.item() and array.tolist() "
                "give them), or an object with state_dict and load_state_dict"
            ) from error


# -- loading --------------------------------------------------------------------------------------


class PartsToLoad:
    """What a load restores beside model, optimizer and random states.

    An empty `extra` is to be filled with all there are. `strict` refuses the state of another kind
    of scheduler or scaler.
    """

    def __init__(
        self,
        stored: StoredCheckpoint,
        scheduler: Any,
        scaler: Any,
        extra: MutableMapping[str, Any] | None,
        *,
        strict: bool,
    ) -> None:
        self.extra = extra
        self.staging: dict[str, Any] = {}
        paths = stored.paths.values()
        names = list(dict.fromkeys(path[1] for path in paths if path[0] == EXTRA and len(path) > 1))
        self._names = frozenset(names)
        if extra is not None and not extra:
            targets: dict[tuple[str, ...], Any] = dict(_targets(scheduler, scaler, None))
            targets |= {(EXTRA, name): None for name in names}
        else:
            targets = dict(_targets(scheduler, scaler, extra))
        self._targets = targets
        self._keys = {path: _keys_below(stored, path) for path in targets}
        self._live: dict[str, Tensor] = {}
        for path, value in targets.items():
            if not self._keys[path]:
                raise CheckpointError(_lacks(stored, path, names))
            live = _state_of(path, value) if isinstance(value, Stateful) else value
            if strict and len(path) == 1:
                _require_same_kind(stored, path[0], live, self._keys[path])
            tensors = {key_of(p): v for p, v in flatten(live, path) if isinstance(v, Tensor)}
            for key in self._keys[path]:
                entry = stored.tensor(key)
                if entry is None:
                    self.staging[key] = None
                    continue
                of_object = isinstance(value, Stateful)
                target = tensors.get(key)
                if target is not None and (isinstance(target, DTensor) or not of_object):
                    _require_same_form(stored, key, entry, target)
                    self._live[key] = target
                if isinstance(target, DTensor):
                    self.staging[key] = memory_like(target)
                else:
                    self.staging[key] = empty_like(entry)

    def unasked(self) -> frozenset[str]:
        """Names in the checkpoint that this rank's `extra` lacks; none if that is None."""
        if self.extra is None:
            return frozenset()
        return self._names - {path[1] for path in self._targets if path[0] == EXTRA}

    def load_objects(self, entries: Mapping[str, Any]) -> Callable[[], None]:
        """Restore the objects from the entries of `staging`; return what undoes that."""
        former: list[tuple[Stateful, Any]] = []

        def undo() -> None:
            for value, state in reversed(former):
                value.load_state_dict(state)

        for path, value in self._targets.items():
            if not isinstance(value, Stateful):
                continue
            state = self._value(path, entries, in_place=False)
            try:
                former.append((value, copy.deepcopy(value.state_dict())))
                value.load_state_dict(state)
            except Exception as error:
                undo()
                raise CheckpointError(
                    f"{_label(path)}.load_state_dict() refuses the state in the checkpoint "
                    f"({type(error).__name__}: {error})"
                ) from error
        return undo

    def fill_extra(self, entries: Mapping[str, Any]) -> None:
        """Put the other values into `extra`."""
        for path, value in self._targets.items():
            if path[0] == EXTRA and not isinstance(value, Stateful):
                assert self.extra is not None
                self.extra[path[1]] = self._value(path, entries, in_place=True)

    def _value(self, path: tuple[str, ...], entries: Mapping[str, Any], *, in_place: bool) -> Any:
        """The value at `path`; tensors in place of those that the caller passed, if so asked."""
        values: dict[Path, Any] = {}
        for key, below in self._keys[path].items():
            value = entries[key]
            live = self._live.get(key)
            if live is not None and isinstance(value, Tensor):
                if in_place:
                    with torch.no_grad():
                        local_of(live).copy_(local_of(value))
                    value = live
                elif isinstance(live, DTensor):
                    on_device = local_of(value).to(local_of(live).device)
                    value = torch_compat.dtensor_like(live, on_device)
            values[below] = value
        return unflatten(values)


def _keys_below(stored: StoredCheckpoint, path: tuple[str, ...]) -> dict[str, Path]:
    """Keys of the entries at and below `path`, with their paths from there."""
    planner_data = stored.metadata.planner_data
    raw = planner_data if isinstance(planner_data, Mapping) else {}
    return {
        key: tuple(raw.get(key, (key,)))[len(path) :]
        for key, its_path in stored.paths.items()
        if its_path[: len(path)] == path
    }


def _lacks(stored: StoredCheckpoint, path: tuple[str, ...], names: list[str]) -> str:
    """The message that the checkpoint has no entries at `path`."""
    if path[0] != EXTRA:
        return (
            f"{stored.folder} has no state of a {path[0]}; load it without, or save it by "
            f"save_checkpoint(path, optimizer, {path[0]}={path[0]})"
        )
    there = some_of([repr(name) for name in names]) if names else "none"
    return f"{stored.folder} has no extra {path[1]!r}; it has {there}"


def _require_same_kind(
    stored: StoredCheckpoint, name: str, live: Any, keys: Mapping[str, Path]
) -> None:
    """Refuse a state that lacks what the live object's state has."""
    saved = {below[0] for below in keys.values() if below}
    lacking = [key for key in live if key not in saved] if isinstance(live, Mapping) else []
    if lacking:
        raise CheckpointError(
            f"the {name} in {stored.folder} has no {lacking[0]!r}: it was of another class or "
            "disabled; make one as it was, or load with strict=False"
        )


def _require_same_form(
    stored: StoredCheckpoint, key: str, entry: TensorStorageMetadata, live: Tensor
) -> None:
    shape, dtype = tuple(entry.size), entry.properties.dtype
    if shape != tuple(live.shape) or dtype != live.dtype:
        raise CheckpointError(
            f"{key!r} has shape {list(shape)} and dtype {dtype} in {stored.folder}, and the tensor "
            f"to load it into {list(live.shape)} and {live.dtype}"
        )


# -- random states --------------------------------------------------------------------------------


RNG = "rng"
"""The top-level entry of a checkpoint that holds them: {rank: {library: state}}."""


def random_states(group: Group) -> dict[str, Any]:
    """The states of this rank, by library, as tensors and plain data."""
    states: dict[str, Any] = {"cpu": torch.get_rng_state(), "python": random.getstate()}
    if group.device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(group.device)
    numpy = sys.modules.get("numpy")  # nobody drew from it if it was not imported
    if numpy is not None:
        state = numpy.random.get_state(legacy=False)
        if state["bit_generator"] == "MT19937":  # unless the user put another one in its place
            inner = {"key": state["state"]["key"].tolist(), "pos": state["state"]["pos"]}
            # A tuple, which torch.distributed.checkpoint keeps in one piece.
            states["numpy"] = (inner, state["has_gauss"], state["gauss"])
    return states


def random_staging(stored: StoredCheckpoint, group: Group) -> dict[str, Any]:
    """Memory for the states that this rank takes: its own, or those of rank 0."""
    saved = _saved(stored)
    entries = {k: stored.tensor(k) for k in saved.get(group.rank, saved.get(0, {})).values()}
    return {key: None if entry is None else empty_like(entry) for key, entry in entries.items()}


def checked_states(
    stored: StoredCheckpoint, entries: Mapping[str, Any], group: Group
) -> dict[str, Any]:
    """The states for this rank from the entries of `random_staging`, by library, once read."""
    saved = _saved(stored)
    own = saved.get(group.rank, saved.get(0, {}))
    states = {name: entries[key] for name, key in own.items()}
    try:
        if states:
            torch.Generator("cpu").set_state(states["cpu"])
        if "python" in states:
            random.Random().setstate(states["python"])
        if "numpy" in states:
            _set_numpy(states["numpy"], lambda numpy: numpy.random.RandomState())
    except Exception as error:  # whatever the libraries raise
        raise CheckpointError(
            f"{stored.folder} is damaged: a random state for rank {group.rank} is no state of its "
            f"library ({type(error).__name__})"
        ) from error
    return states


def load_states(states: Mapping[str, Any], stored: StoredCheckpoint, group: Group) -> None:
    """Set the states of this rank, or seed it from them if they are rank 0's.

    A rank beyond those that saved thus draws other numbers than any other rank, and the same ones
    whenever this checkpoint is loaded on as many ranks.
    """
    saved = _saved(stored)
    if not saved:
        return
    if group.rank == 0 and len(saved) != group.size:
        warnings.warn(_changed(len(saved), group.size, stored), stacklevel=4)
    if group.rank in saved:
        set_states(states, group)
    elif states:
        _seed(states, group.rank)


def set_states(states: Mapping[str, Any], group: Group) -> None:
    """Set the states of this rank to those of `random_states`."""
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and group.device.type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], group.device)
    if "python" in states:
        random.setstate(states["python"])
    if "numpy" in states:
        _set_numpy(states["numpy"], lambda numpy: numpy.random)


def _saved(stored: StoredCheckpoint) -> dict[int, dict[str, str]]:
    """The keys of the entries of each rank that saved, by library."""
    saved: dict[int, dict[str, str]] = {}
    for key, path in stored.paths.items():
        number = path[1] if path[0] == RNG and len(path) == 3 else ""
        if number.isdecimal() and len(number) < 10:
            saved.setdefault(int(path[1]), {})[path[2]] = key
    return saved


def _changed(before: int, now: int, stored: StoredCheckpoint) -> str:
    """The warning that another number of ranks loads."""
    wrote = f"{stored.folder} was written by {before} {'rank' if before == 1 else 'ranks'}"
    if now > before:
        return (
            f"{wrote}: random states of {_ranks(before, now - 1)} are seeded from those of rank "
            "0 and the rank's number"
        )
    return f"{wrote}: random states of {_ranks(now, before - 1)} are dropped"


def _ranks(first: int, last: int) -> str:
    return f"rank {first}" if first == last else f"ranks {first} to {last}"


def _seed(states: Mapping[str, Any], rank: int) -> None:
    text = bytes(states["cpu"].tolist()) + f" {rank}".encode()
    seed = int.from_bytes(hashlib.sha256(text).digest()[:8]) >> 1
    torch.manual_seed(seed)  # CUDA's too
    random.seed(seed)
    if "numpy" in states:
        try:
            import numpy
        except ImportError:
            return
        numpy.random.seed(seed % 2**32)


def _set_numpy(state: tuple[Any, ...], target: Callable[[Any], Any]) -> None:
    """Set the state of the generator that `target` picks from the module numpy."""
    try:
        import numpy
    except ImportError:  # nobody can draw from it
        return
    inner, has_gauss, gauss = state
    key = numpy.array(inner["key"], dtype=numpy.uint32)
    target(numpy).set_state(("MT19937", key, inner["pos"], has_gauss, gauss))

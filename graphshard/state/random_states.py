"""The random states of ranks in a checkpoint: of torch, Python's `random`, and numpy.

A rank takes the states that the rank of its number saved. A rank beyond those that saved is seeded
from the states of rank 0 and its own number, so that it draws other numbers than any other rank,
and the same ones whenever this checkpoint is loaded on as many ranks.
"""

from __future__ import annotations

import hashlib
import random
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graphshard.errors import CheckpointError
from graphshard.runtime.group import Group
from graphshard.state.dcp import StoredCheckpoint, empty_like

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
    keys = saved.get(group.rank, saved.get(0, {})).values()
    staging: dict[str, Any] = {}
    for key in keys:
        entry = stored.tensor(key)
        staging[key] = None if entry is None else empty_like(entry)
    return staging


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
    """Set the states of this rank, or seed it from them if they are rank 0's."""
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
            f"{wrote}: random states of ranks {before} to {now - 1} are seeded from those of rank "
            "0 and the rank's number"
        )
    return f"{wrote}: random states of ranks {now} to {before - 1} have no rank to go to"


def _seed(states: Mapping[str, Any], rank: int) -> None:
    """Seed every library from the `states` of rank 0 and this `rank`."""
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

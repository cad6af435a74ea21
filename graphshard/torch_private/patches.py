"""Replacing attributes of torch and of other libraries: one helper that lists, checks, restores.

`patched` replaces one for a while, `patched_for_good` for the life of its owner. `active_patches()`
lists what is replaced at the moment. No other file of graphshard replaces what it does not own.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import weakref
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from graphshard.errors import RuntimeStateError, UnsupportedTorchError
from graphshard.torch_private.compat import SUPPORTED, private

_MISSING: Any = object()


class _Patch:
    """One attribute, entry of a dict or member of a set, with the value that stands there now."""

    def __init__(self, owner: Any, name: Any, new: Any, where: str | None) -> None:
        try:
            self._owner: Any = weakref.ref(owner)
        except TypeError:  # a dict, for example, takes no weak references
            self._owner = lambda: owner
        self.name = name
        self.new = new
        self.where = where or _place(owner, name)
        self.original = self.value()
        self.inherited = self.original is _MISSING
        if self.inherited and not isinstance(owner, dict | set):
            self.original = getattr(owner, name, _MISSING)

    @property
    def owner(self) -> Any:
        """The patched object; None once it is gone."""
        return self._owner()

    def value(self) -> Any:
        """The value that the owner itself holds now; a class holds descriptors."""
        owner = self.owner
        if isinstance(owner, set):
            return self.name if self.name in owner else _MISSING
        if self.name == "__class__":
            return type(owner)
        return (owner if isinstance(owner, dict) else vars(owner)).get(self.name, _MISSING)

    def put(self, value: Any) -> None:
        """Make the owner hold `value`; `_MISSING`: hold nothing itself, as before."""
        owner = self.owner
        if isinstance(owner, set):
            (owner.discard if value is _MISSING else owner.add)(self.name)
        elif isinstance(owner, dict):
            owner[self.name] = value
        elif value is _MISSING:
            delattr(owner, self.name)
        else:
            setattr(owner, self.name, value)

    def is_at(self, other: _Patch) -> bool:
        """Whether both are of the same attribute."""
        return self.owner is other.owner and self.name == other.name


_active: list[_Patch] = []  # in the order in which they were put in place
_lock = threading.RLock()


def active_patches() -> tuple[str, ...]:
    """The attributes that are replaced now, as "module.attribute", in the order of replacement."""
    with _lock:
        return tuple(patch.where for patch in _alive())


@contextlib.contextmanager
def patched(
    owner: Any,
    name: Any,
    new: Any,
    *,
    where: str | None = None,
) -> Iterator[Any]:
    """Replace attribute `name` of `owner` inside the context, which gives the original.

    Contexts may nest, also on one attribute, and those of several threads may overlap.

    owner: an object; the path of a module; a dict, whose entry is replaced; or a set, which has the
        member `name` meanwhile, given as `new` too.
    where: what `active_patches` and errors call it; None: its path.
    """
    patch = _put_in_place(owner, name, new, where)
    try:
        yield patch.original
    except BaseException:
        _take_back(patch)
        raise
    if not _take_back(patch):
        raise RuntimeStateError(
            f"{patch.where} was replaced by other code while graphshard had replaced it, and that "
            "replacement is gone now; apply it before graphshard runs, or undo it inside"
        )


def patched_for_good(
    owner: Any,
    name: Any,
    new: Any,
    *,
    where: str | None = None,
) -> None:
    """Replace attribute `name` of `owner` for as long as that lives; see `patched`."""
    _put_in_place(owner, name, new, where)


def dtensor_handlers() -> dict[Any, Any]:
    """The functions that torch calls for operators on DTensors, in place of its own rules."""
    dtensor = private("torch.distributed.tensor._api", "DTensor")
    handlers = getattr(getattr(dtensor, "_op_dispatcher", None), "_custom_op_handlers", None)
    if not isinstance(handlers, dict):
        raise _unsupported("DTensor._op_dispatcher._custom_op_handlers")
    return handlers


def replace_dtensor_handler(op: Any, handler: Any) -> None:
    """Let `handler(op, args, kwargs)` run `op` on DTensors, for good."""
    handlers = dtensor_handlers()
    handlers.setdefault(op, None)
    patched_for_good(handlers, op, handler, where=f"the handler of DTensors for {op}")


def _put_in_place(owner: Any, name: Any, new: Any, where: str | None) -> _Patch:
    if isinstance(owner, str):
        try:
            owner = importlib.import_module(owner)
        except ImportError as error:
            raise _unsupported(f"module {owner}") from error
    with _lock:
        patch = _Patch(owner, name, new, where)
        if patch.original is _MISSING and not isinstance(owner, set):
            raise _unsupported(patch.where)
        patch.put(new)
        _active[:] = [*_alive(), patch]
    return patch


def _alive() -> list[_Patch]:
    return [patch for patch in _active if patch.owner is not None]


def _take_back(patch: _Patch) -> bool:
    """Restore what `patch` replaced; False if somebody else had replaced it meanwhile."""
    with _lock:
        index = next(index for index, other in enumerate(_active) if other is patch)
        del _active[index]
        for later in _active[index:]:
            if later.is_at(patch):  # of another thread: it restores what was there before this one
                later.original, later.inherited = patch.original, patch.inherited
                return True
        is_ours = patch.value() is patch.new
        patch.put(_MISSING if patch.inherited else patch.original)
        return is_ours


def _place(owner: Any, name: Any) -> str:
    """The path of an attribute, for people."""
    if isinstance(owner, ModuleType):
        return f"{owner.__name__}.{name}"
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}.{name}"


def _unsupported(what: str) -> UnsupportedTorchError:
    return UnsupportedTorchError(
        f"torch {torch.__version__} comes with no {what}, which graphshard replaces; "
        f"use {SUPPORTED}"
    )

"""Releasing CUDA graphs before the communicators that they recorded come to an end.

NCCL destroys or aborts a communicator only when no graph refers to it any more, and waits for that
without a limit. So all graphs that are alive are known here, and those of a process group are
released in front of its `shutdown` and `abort`, and all of them when Python exits.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any, Protocol

from graphshard.runtime.group import Group
from graphshard.torch_private.communicators import ends_of_backends, ends_of_groups
from graphshard.torch_private.patches import patched_for_good


class Releasable(Protocol):
    """Captured graphs, or memory that is registered with a communicator."""

    @property
    def group(self) -> Group:
        """The ranks, over which collectives were recorded."""

    def release(self) -> None:
        """Drop the graphs, or deregister the memory."""


_alive: weakref.WeakSet[Any] = weakref.WeakSet()


def keep_track_of(graphs: Releasable) -> None:
    """Have `graphs` released before a communicator of its ends, and before Python does."""
    _alive.add(graphs)
    _watch_communicators()
    # Again each time: what is registered last is called first, in front of torch's own hooks.
    atexit.unregister(release_all)
    atexit.register(release_all)


def release_all() -> None:
    """Release all graphs of this process; their modules capture again when they are called."""
    for graphs in list(_alive):
        graphs.release()


def release_of(process_group: Any) -> None:
    """Release the graphs that recorded collectives of `process_group`."""
    for graphs in list(_alive):
        if any(each is process_group for each in _process_groups(graphs.group)):
            graphs.release()


def _process_groups(group: Group) -> Iterator[Any]:
    yield group.process_group
    for subgroup in group.subgroups.values():
        yield from _process_groups(subgroup)


@cache
def _watch_communicators() -> None:
    """Release graphs in front of the methods that end a communicator, from now on."""
    for owner, name in ends_of_groups():
        patched_for_good(owner, name, _after(release_of, getattr(owner, name)))
    for owner, name in ends_of_backends():
        # A backend does not tell its group.
        patched_for_good(owner, name, _after(lambda _: release_all(), getattr(owner, name)))


def _after(release: Callable[[Any], None], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def end(self: Any, *args: Any, **kwargs: Any) -> Any:
        release(self)
        return method(self, *args, **kwargs)

    return end

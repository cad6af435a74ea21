"""What must happen before a communicator ends: graphs are released, and saves waited for.

NCCL destroys or aborts a communicator only when no graph refers to it any more, and waits for that
without a limit. So all graphs that are alive are known here, and those of a process group are
released in front of its `shutdown` and `abort`, and all of them when Python exits. A save in the
background is waited for in front of `shutdown`, which `destroy_process_group` calls, but not of
`abort`, which is for ranks that have lost each other.
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
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


_running: dict[Future[Any], tuple[Any, ...]] = {}
"""Work on threads of their own, with the process groups that it needs."""


def wait_before_the_end(work: Future[Any], *process_groups: Any) -> None:
    """Have the end of any of `process_groups` wait until `work` is done."""
    _watch_communicators()
    _running[work] = process_groups
    work.add_done_callback(lambda done: _running.pop(done, None))


def _wait_for_work_of(process_group: Any) -> None:
    for work, process_groups in list(_running.items()):
        if any(each is process_group for each in process_groups):
            wait([work])


def _process_groups(group: Group) -> Iterator[Any]:
    yield group.process_group
    for subgroup in group.subgroups.values():
        yield from _process_groups(subgroup)


@cache
def _watch_communicators() -> None:
    """Wait, and release graphs, in front of the methods that end a communicator, from now on."""
    for owner, name in ends_of_groups():
        if name != "abort":
            patched_for_good(owner, name, _after(_wait_for_work_of, getattr(owner, name)))
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

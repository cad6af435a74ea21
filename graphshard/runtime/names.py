"""Forward or backward with a named range around each event, for a profiler that is on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from graphshard.program.program import copy_node
from graphshard.runtime.lower import EVENTS, module_of
from graphshard.torch_private.profiling import named_range

HALF = "graphshard"
"""The first word of the range around a whole forward or backward: "graphshard forward"."""


class NamedRun:
    """Runs a lowered graph; its events are ranges, in a range of the whole forward or backward.

    Its code is that of the graph, with a call in front of each event that ends one range and begins
    the next. So the code that runs without a profiler has nothing of it.

    Args:
        module: a lowered graph.
        phase: "forward" or "backward".
        runner: makes the function that runs a module on a list of arguments.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        phase: str,
        runner: Callable[[fx.GraphModule], Callable[[list[Any]], Any]],
    ) -> None:
        self._name = f"{HALF} {phase}"
        self._ranges = _Ranges()
        self._run = runner(module_of(_marked(module.graph, self._ranges)))

    def __call__(self, args: list[Any]) -> Any:
        """The results for `args`, which is emptied."""
        with named_range(self._name):
            try:
                return self._run(args)
            finally:
                self._ranges.close()


class _Ranges:
    """The ranges of one half of a step, of which one is open at a time."""

    def __init__(self) -> None:
        self._open: Any = None
        self.__name__ = self.__qualname__ = "begin"
        self.__module__ = "graphshard"  # fx prints a call by these

    def __call__(self, name: str) -> None:
        """End the range that is open, and begin another."""
        self.close()
        self._open = named_range(name)
        self._open.__enter__()

    def close(self) -> None:
        """End the range that is open."""
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def _marked(graph: fx.Graph, ranges: _Ranges) -> fx.Graph:
    """A copy of the lowered `graph` that begins a range in front of each event."""
    marked = fx.Graph()
    new: dict[fx.Node, Any] = {}
    last = None
    for node in graph.nodes:
        for event in node.meta.get(EVENTS, ()):
            if event is not None and event != last:
                marked.call_function(ranges, (event[1],))
                last = event
        new[node] = copy_node(marked, node, new)
    return marked

"""Tracing a step as it is, as long as nothing in it is written in place.

Functionalization takes writes out of a trace, and is a third of its time; what writes nowhere gives
the same graph without it. So a trace without it ends with the first forward that writes, and is
made once more with it. Such a forward is run to its end: it may have changed what is nobody's but
its own, a counter say, and be about to change it back.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

_aten = torch.ops.aten

# BatchNorm's operators whose schemas do not say that they write running statistics.
_UNSAID = frozenset(
    {
        _aten.native_batch_norm.default,
        _aten.cudnn_batch_norm.default,
        _aten.miopen_batch_norm.default,
    }
)


class WriteError(Exception):
    """A trace that must not write does. Nobody sees this: the step is traced in another way."""


class NoWrites:
    """Ends a trace where it was `watching`, if an operator wrote meanwhile."""

    def __init__(self) -> None:
        self._watches = False
        self._met = False

    @contextlib.contextmanager
    def watching(self, watches: bool = True) -> Iterator[None]:
        """Watch, or look away: the operators that a fake kernel is made of may write.

        Raises:
            WriteError: once what was watched is done, if something in it wrote.
        """
        before, self._watches = self._watches, watches
        try:
            yield
        finally:
            self._watches = before
        if watches and self._met:
            raise WriteError

    def meet(self, operator: Any) -> None:
        """Called with each operator, before it runs."""
        if self._watches and _writes(operator):
            self._met = True

    def require(self, graph: fx.Graph) -> None:
        """See that nothing in a finished trace wrote: autograd's own operators come by when nobody
        watches.

        Raises:
            WriteError: something did.
        """
        if self._met or any(_writes(node.target) for node in graph.nodes):
            raise WriteError


def _writes(operator: Any) -> bool:
    schema = getattr(operator, "_schema", None)
    return schema is not None and (bool(schema.is_mutable) or operator in _UNSAID)

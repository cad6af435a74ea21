"""Gradients that micro-batches keep on a rank until one of them reduces the sum.

What a call does with its gradients is settled at its forward and is part of its program; this holds
the tensors in between, and knows which calls have yet to add to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

from torch import Tensor, fx

from graphshard.errors import RuntimeStateError
from graphshard.passes.accumulate import GRADIENT, SHARD, Accumulate
from graphshard.passes.zero_missing_grads import ZeroMissingGrads
from graphshard.program import ops
from graphshard.program.collective import OneTensor
from graphshard.program.pass_protocol import PassLike

Mode = tuple[str | None, tuple[str, ...], tuple[str, ...]]
"""What is kept, and the parameters whose kept gradients and kept shards are taken in."""


REDUCED: Mode = (None, (), ())


class KeepingCall(Protocol):
    """A call whose backward keeps gradients."""

    keeps: frozenset[tuple[str, str]]  # (what of it, FQN)


class AccumulatedGrads:
    """This rank's kept gradients of one module."""

    def __init__(self) -> None:
        self.keeping: str | None = None
        self.tensors: dict[tuple[str, str], Tensor] = {}  # by (what of it, FQN)
        self._to_come: list[weakref.ref[Any]] = []
        self._paused = False

    @contextmanager
    def no_sync(self, what: str) -> Iterator[None]:
        """Forwards inside are of programs that keep."""
        before, self.keeping = self.keeping, what
        try:
            yield
        finally:
            self.keeping = before

    def mode(self) -> Mode:
        """What the program of a call that begins now must do."""
        if self.keeping is None and not self.tensors and not self._to_come:
            return REDUCED
        names: dict[str, set[str]] = {GRADIENT: set(), SHARD: set()}
        for of, fqn in (*self.tensors, *(one for call in self.to_come() for one in call.keeps)):
            names[of].add(fqn)
        gradients = () if self.keeping == GRADIENT else tuple(sorted(names[GRADIENT]))
        return (
            self.keeping,
            gradients,
            tuple(sorted(names[SHARD])) if self.keeping is None else (),
        )

    def to_come(self) -> list[KeepingCall]:
        """Calls alive that have yet to keep what their backward computes, in order."""
        alive = [(ref, ref()) for ref in self._to_come]
        self._to_come = [ref for ref, call in alive if call is not None]
        return [call for _, call in alive if call is not None]

    def expect(self, call: KeepingCall) -> None:
        """Remember that the backward of `call` is to come."""
        self._to_come.append(weakref.ref(call))

    def arrived(self, call: KeepingCall) -> None:
        """The backward of `call` begins."""
        self._to_come = [ref for ref in self._to_come if ref() is not call]

    def require_arrived(self, calls: Iterable[weakref.ref[Any]]) -> None:
        """Check that no earlier call has yet to keep what this backward is to reduce.

        Raises:
            RuntimeStateError: one has.
        """
        pending = self.to_come()
        if any(ref() in pending for ref in calls if ref() is not None):
            raise RuntimeStateError(
                "a forward inside no_sync() came before this one and its backward has not run, so "
                "its gradient would miss the reduce; run its backward first, make both calls "
                "inside no_sync() or both outside, or drop its output if it needs no backward"
            )

    def drop(self) -> None:
        """Forget what was kept."""
        self.tensors.clear()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is kept or taken: a backward that is not to touch the parameters' gradients."""
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def bind(self, node: fx.Node) -> None:
        """Make `node`, a `keep` or `add_kept` of a lowered graph, a call on these tensors."""
        arguments = OneTensor.of(node)
        key = (str(arguments.kept_as), str(arguments.param))
        bound = self._keep(key) if node.target is ops.keep else self._add(key)
        bound.__name__ = bound.__qualname__ = str(ops.op_name(node))
        bound.__module__ = key[1].replace(".", "_")  # fx prints a call by these
        node.target, node.kwargs = bound, {}

    def _keep(self, key: tuple[str, str]) -> Callable[[Tensor], Tensor]:
        def keep(grad: Tensor) -> Tensor:
            if self._paused:
                return grad
            if key in self.tensors:
                return self.tensors[key].add_(grad)
            # A copy, as others may read what backward computed.
            self.tensors[key] = grad.clone().contiguous()
            return self.tensors[key]

        return keep

    def _add(self, key: tuple[str, str]) -> Callable[[Tensor], Tensor]:
        def add_kept(grad: Tensor) -> Tensor:
            kept = None if self._paused else self.tensors.pop(key, None)
            return grad if kept is None else kept.add_(grad)

        return add_kept


def passes_for(passes: Iterable[PassLike], mode: Mode) -> tuple[PassLike, ...]:
    """`passes` for a program that keeps and takes what `mode` says."""
    keep, add, add_shards = mode
    both = frozenset(add) | frozenset(add_shards)
    made: list[PassLike] = []
    for step in passes:
        if isinstance(step, Accumulate):
            made.append(Accumulate(keep, frozenset(add), frozenset(add_shards)))
        elif isinstance(step, ZeroMissingGrads):
            made.append(ZeroMissingGrads(frozenset() if keep == GRADIENT else both))
        else:
            made.append(step)
    return tuple(made)

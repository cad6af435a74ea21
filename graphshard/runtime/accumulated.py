"""Gradients that micro-batches accumulate on a rank before one of them reduces the sum.

Whether a call accumulates or reduces its gradients is decided when its forward begins and is part
of its program. `AccumulatedGrads` holds the tensors between the calls, and knows which calls have
yet to run the backward that adds to them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.errors import RuntimeStateError
from graphshard.program import ops
from graphshard.program.collective import GRADIENT, REDUCED, SHARD, Mode, OneTensor

GradKey = tuple[str, str]
"""An accumulated tensor: its kind (GRADIENT, a full gradient, or SHARD, a reduced one) and FQN."""


class AccumulatedGrads:
    """The accumulated gradients of one module on this rank.

    kind: GRADIENT or SHARD inside `no_sync`, None outside of it.
    tensors: full gradients `(d0, ...)` or reduced shards `(ceil(d0/W), ...)`, in the dtype of
        their reduce.
    incomplete: a backward failed that had changed some of them.
    """

    def __init__(self) -> None:
        self.kind: str | None = None
        self.tensors: dict[GradKey, Tensor] = {}
        self._pending: list[weakref.ref[Any]] = []
        self._paused = False
        self._changes = 0
        self.incomplete = False

    @contextmanager
    def no_sync(self, kind: str) -> Iterator[None]:
        """Forwards that begin inside run programs that accumulate gradients of `kind`."""
        before, self.kind = self.kind, kind
        try:
            yield
        finally:
            self.kind = before

    def mode(self) -> Mode:
        """The mode of the program that a call beginning now must run."""
        if self.incomplete:
            raise RuntimeStateError(
                "gradients accumulated by no_sync() are incomplete, since a backward failed; drop "
                "them by zero_grad() of the sharded module (an optimizer's does not), and begin "
                "with the first batch of the step again, or with the next step"
            )
        if self.kind is None and not self.tensors and not self._pending:
            return REDUCED
        names: dict[str, set[str]] = {GRADIENT: set(), SHARD: set()}
        pending = (key for call in self.pending_calls() for key in call.grad_keys)
        for kind, fqn in (*self.tensors, *pending):
            names[kind].add(fqn)
        gradients = () if self.kind == GRADIENT else tuple(sorted(names[GRADIENT]))
        shards = tuple(sorted(names[SHARD])) if self.kind is None else ()
        return self.kind, gradients, shards

    def pending_calls(self) -> list[Any]:
        """Living calls whose backward has not begun, in the order of their forwards.

        Their `grad_keys` say which gradients it accumulates.
        """
        alive = [(ref, ref()) for ref in self._pending]
        self._pending = [ref for ref, call in alive if call is not None]
        return [call for _, call in alive if call is not None]

    def add_pending(self, call: Any) -> None:
        """Remember that the backward of `call` has yet to run."""
        self._pending.append(weakref.ref(call))

    def remove_pending(self, call: Any) -> None:
        """Note that the backward of `call` has run; a call that is not pending is ignored."""
        self._pending = [ref for ref in self._pending if ref() is not call]

    def require_not_pending(self, calls: Iterable[weakref.ref[Any]]) -> None:
        """Check that none of the earlier `calls` is pending when a backward is about to reduce."""
        pending = self.pending_calls()
        if any(ref() in pending for ref in calls if ref() is not None):
            raise RuntimeStateError(
                "a forward inside no_sync() came before this one and its backward has not run, so "
                "its gradient would miss the reduce; run its backward first, make both calls "
                "inside no_sync() or both outside, or drop its output if it needs no backward"
            )

    def clear(self) -> None:
        """Drop all accumulated gradients."""
        self.tensors.clear()
        self.incomplete = False

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Note it if the body fails after it changed some of the gradients."""
        before = self._changes
        try:
            yield
        except BaseException:
            self.incomplete |= self._changes != before
            raise

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Neither add to the accumulated gradients nor use them inside.

        For a backward that must not change the parameters' gradients (`torch.autograd.grad`).
        """
        self._paused = True
        try:
            yield
        finally:
            self._paused = False

    def bind(self, node: fx.Node) -> None:
        """Make `node`, an `accumulate_grad` or `add_accumulated`, a call on these tensors."""
        arguments = OneTensor.of(node)
        key = (str(arguments.accumulated_as), str(arguments.param))
        keeps = node.target is ops.accumulate_grad
        bound = (self._accumulate if keeps else self._add_accumulated)(key, node.meta["val"].dtype)
        bound.__name__ = bound.__qualname__ = str(ops.op_name(node))
        bound.__module__ = key[1].replace(".", "_")  # fx prints a call by these
        node.target, node.kwargs = bound, {}

    def _accumulate(self, key: GradKey, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The function that adds a gradient to the accumulated one, in `dtype`, and returns it."""

        def accumulate(grad: Tensor) -> Tensor:
            if self._paused:
                return grad.to(dtype)
            self._changes += 1
            if key in self.tensors:
                return self.tensors[key].add_(grad)
            # A copy, since other nodes of backward may read the gradient as well.
            self.tensors[key] = grad.to(dtype, copy=True).contiguous()
            return self.tensors[key]

        return accumulate

    def _add_accumulated(self, key: GradKey, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
        """The function that takes the accumulated gradient out and returns its sum with another."""

        def add_accumulated(grad: Tensor) -> Tensor:
            accumulated = None if self._paused else self.tensors.pop(key, None)
            if accumulated is None:
                return grad.to(dtype)
            self._changes += 1
            return accumulated.add_(grad)

        return add_accumulated

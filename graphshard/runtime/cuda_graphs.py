"""A step as two CUDA graphs: one for the kernels of its forward, one for those of its backward.

The first two calls run without graphs, the third is captured, and later ones replay it. Inputs are
copied to fixed addresses, and results are cloned out of the graphs' memory pool. See README.md.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from graphshard.errors import RuntimeStateError
from graphshard.program.program import Program
from graphshard.runtime.group import Group
from graphshard.torch_private import compat as torch_compat

logger = logging.getLogger("graphshard")


WARM_UP = 2
"""Calls of a program that run without graphs before the first capture."""


Run = Callable[[list[Any]], Any]


class Recorder:
    """Captures the work that functions queue on a CUDA device.

    pool: the memory pool of all its graphs.
    """

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Run, args: list[Any]) -> tuple[Callable[[], None], Any]:
        """(a function that queues the captured work again, the result of `run(args)`).

        Nothing is executed yet. Only this thread is captured, since NCCL's threads query events
        meanwhile.
        """
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                result = run(args)
        except Exception:
            self._restore(before)
            raise
        return graph.replay, result

    def _restore(self, before: Any) -> None:
        """Restore torch's state after CUDA gave up a capture.

        torch leaves the capture's stream current and the allocator in capture mode, and its
        generator of random numbers refuses to draw until another capture has ended.
        """
        if torch.cuda.current_stream() == before:
            return
        torch.cuda.set_stream(before)
        torch_compat.end_allocation(self.pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device=before.device)


class _CapturedGraph:
    """A captured forward or backward.

    static: tensors at fixed addresses into which the copied arguments are copied.
    missing: which of the copied arguments were None at the capture.
    addresses: of the arguments that are read where they lie.
    replay: queues the captured work.
    results: the results of the capture, which each replay overwrites.

    Args:
        recorder: captures.
        run: the forward or backward.
        in_place: its first arguments, which are read where they lie; the list is emptied.
        copied: its other arguments.
    """

    def __init__(self, recorder: Any, run: Run, in_place: list[Any], copied: Sequence[Any]) -> None:
        self.static = [_static_copy(value) for value in copied]
        self.missing = [value is None for value in copied]
        self.addresses = _addresses(in_place)
        args = [*in_place, *self.static]
        in_place.clear()  # so that `run` holds the last references and frees as it goes
        self.replay, self.results = recorder.capture(run, args)

    def replay_with(self, copied: Sequence[Any]) -> Any:
        """Replay with new values of the copied arguments and return the results."""
        for static, value in zip(self.static, copied, strict=True):
            if isinstance(static, Tensor):
                static.copy_(value)
        self.replay()
        return self.results


class Graphs:
    """The two graphs of one step; decides which calls replay them.

    failed: a capture failed, and no later call is replayed.

    Args:
        program: the step's program, which notes why its capture failed.
        recorder: the class of the recorder; another one in tests.
    """

    def __init__(self, program: Program, recorder: Callable[[], Any] = Recorder) -> None:
        self.program = program
        self.failed = False
        self._make_recorder = recorder
        self._recorder: Any = None
        self._warm = 0
        self._forward: _CapturedGraph | None = None
        self._backward: _CapturedGraph | None = None
        self._saved: list[Any] | None = None  # by the capture, until backward is captured
        self._last: weakref.ref[Any] | None = None  # the last replayed call

    def replays(self, args: Sequence[Any], inputs: int) -> bool:
        """Whether a call whose forward begins with `args` is replayed (or captured).

        Args:
            args: the arguments of forward.
            inputs: how many of them, the last ones, are inputs of the model.
        """
        if self.failed:
            return False
        if self._warm < WARM_UP:
            self._warm += 1
            return False
        last = None if self._last is None else self._last()
        if last is not None and last.saved_others is not None:  # its backward has not begun
            return False
        in_place = args[: len(args) - inputs]
        if self._forward is not None and self._forward.addresses != _addresses(in_place):
            self._forward = self._backward = self._saved = self._recorder = None
        return True

    def forward(self, call: Any, run: Run, args: list[Any], inputs: int) -> tuple[Any, Any]:
        """(outputs, values of mutations) of `call`, by a replay.

        Raises:
            GraphsFailed: forward cannot be captured; run it without a graph.
        """
        split = len(args) - inputs
        in_place, copied = args[:split], args[split:]
        if self._forward is None:
            if self._recorder is None:
                self._recorder = self._make_recorder()
            try:
                self._forward = _CapturedGraph(self._recorder, run, in_place, copied)
            except Exception as error:
                self._give_up(error)
                raise GraphsFailed from error
            outputs, mutations, tensors, others = self._forward.results
            self._forward.results = (outputs, mutations)
            if self._backward is None and self.program.grad:
                self._saved = [*tensors, *others]
        outputs, mutations = self._forward.replay_with(copied)
        self._last = weakref.ref(call)
        return [_cloned(value) for value in outputs], mutations

    def backward(self, run: Run, tangents: Sequence[Tensor | None]) -> tuple[Any, Any]:
        """(gradients of parameters, gradients of inputs) of the last replayed call.

        Raises:
            RuntimeStateError: other outputs have gradients than at the capture, or backward cannot
                be captured.
        """
        if self._backward is None:
            assert self._saved is not None
            saved, self._saved = self._saved, None
            try:
                self._backward = _CapturedGraph(self._recorder, run, saved, tangents)
            except Exception as error:
                self._give_up(error)
                raise RuntimeStateError(
                    "backward could not be captured as a CUDA graph, and the attempt freed the "
                    f"tensors that its forward saved ({_cause(error)}); later steps run without "
                    "graphs; to train this step too, leave out cuda_graph=True"
                ) from error
        if self._backward.missing != [t is None for t in tangents]:
            raise RuntimeStateError(
                "with cuda_graph=True every backward must reach the outputs that the first one "
                "reached, since its kernels are captured; make the losses of all steps alike, or "
                "leave cuda_graph=True out"
            )
        grads, input_grads = self._backward.replay_with(tangents)
        return [_cloned(g) for g in grads], [_cloned(g) for g in input_grads]

    def _give_up(self, error: Exception) -> None:
        self.failed = True
        self._forward = self._backward = self._saved = self._recorder = None
        cause = _cause(error)
        note_no_graphs(self.program, f"capture failed: {cause}")
        logger.warning("graphshard could not capture a step as CUDA graphs: %s", cause)


def _cause(error: BaseException) -> str:
    """The first line of the error that came first, which the end of the capture hides."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class GraphsFailed(Exception):  # noqa: N818  # no error of the user's
    """A forward could not be captured."""


def note_no_graphs(program: Program, why_not: str) -> None:
    """Note on `program` that its step runs without CUDA graphs because of `why_not`."""
    assert program.cuda_graphs is not None
    program.cuda_graphs = replace(program.cuda_graphs, why_not=why_not)


def graphs_of(program: Program, group: Group) -> Graphs | None:
    """The graphs of `program`; None if it has none.

    Where `group` cannot run them, the program notes why.
    """
    if program.cuda_graphs is None or program.cuda_graphs.why_not is not None:
        return None
    why_not = None
    if group.check:
        why_not = "check=True looks at each value"
    elif group.size > 1 and group.side_stream is None:
        why_not = f"the host waits for the collectives of {group.backend}"
    if why_not is None:
        return Graphs(program)
    note_no_graphs(program, why_not)
    return None


def _static_copy(value: Any) -> Any:
    """A copy of the tensor `value`, with its strides where each element has its own memory."""
    if not isinstance(value, Tensor):
        return value
    if any(
        stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)
    ):
        return value.detach().clone()
    copy = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return copy.copy_(value.detach())


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _addresses(values: Sequence[Any]) -> list[int]:
    """The data pointer of each tensor; 0 for other values."""
    return [value.data_ptr() if isinstance(value, Tensor) else 0 for value in values]

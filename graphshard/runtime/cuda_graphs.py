"""A step as two CUDA graphs: one for the kernels of its forward, one for those of its backward.

Calls 1 and 2 run without graphs, the third is captured, later ones replay it. Inputs are copied to
fixed addresses, results are cloned out of the graphs' pool. See README.md.
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


Run = Callable[[list[Any]], Any]


class Recorder:
    """Captures what a function queues on a CUDA device."""

    def __init__(self) -> None:
        self.pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Run, args: list[Any]) -> tuple[Callable[[], None], Any]:
        """(what queues again all that `run(args)` queues, what `run` returned).

        Nothing is executed yet. Only this thread is captured, since threads of NCCL ask for the
        state of events meanwhile.
        """
        graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self.pool, capture_error_mode="thread_local"):
                result = run(args)
        except Exception:
            self._leave(before)
            raise
        return graph.replay, result

    def _leave(self, before: Any) -> None:
        """Put right what torch leaves as it is when CUDA gives up a capture.

        Its stream stays the current one, the allocator goes on as in a capture, and the generator
        of random numbers refuses to draw any until another capture has come to an end.
        """
        if torch.cuda.current_stream() == before:
            return
        torch.cuda.set_stream(before)
        torch_compat.end_allocation(self.pool)
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
            torch.zeros(1, device=before.device)


class _Graph:
    """A captured half.

    lead: its leading arguments, read where they lie; static: the others, which are copied in.
    """

    def __init__(self, recorder: Any, run: Run, lead: list[Any], moved: Sequence[Any]) -> None:
        self.static = [_stays(value) for value in moved]
        self.missing = [value is None for value in moved]
        self.addresses = _addresses(lead)
        args = [*lead, *self.static]
        lead.clear()  # what is only in here goes as the half is done with it
        self.replay, self.results = recorder.capture(run, args)

    def again(self, moved: Sequence[Any]) -> Any:
        """Replay with other values of the arguments that are copied in."""
        for static, value in zip(self.static, moved, strict=True):
            if isinstance(static, Tensor):
                static.copy_(value)
        self.replay()
        return self.results


class Graphs:
    """The graphs of one step, and which calls they run.

    Args:
        program: gets a remark if they cannot be captured after all.
        recorder: makes what captures; another one in tests.
    """

    def __init__(self, program: Program, recorder: Callable[[], Any] = Recorder) -> None:
        self.program = program
        self.failed = False
        self._make_recorder = recorder
        self._recorder: Any = None
        self._warm = 0
        self._forward: _Graph | None = None
        self._backward: _Graph | None = None
        self._saved: list[Any] | None = None  # by the captured forward, until backward is captured
        self._last: weakref.ref[Any] | None = None  # the call whose backward is to come

    def takes(self, call: Any, args: Sequence[Any], inputs: int) -> bool:
        """Whether `call`, whose forward begins now with these arguments, is to be replayed.

        The last `inputs` of them are inputs.
        """
        if self.failed:
            return False
        if self._warm < WARM_UP:
            self._warm += 1
            return False
        last = None if self._last is None else self._last()
        if last is not None and last.others is not None:
            return False
        lead = args[: len(args) - inputs]
        if self._forward is not None and self._forward.addresses != _addresses(lead):
            self._forward = self._backward = self._saved = self._recorder = None
        return True

    def forward(self, call: Any, run: Run, args: list[Any], inputs: int) -> tuple[Any, Any]:
        """(outputs, values of mutations) of `call`.

        Raises:
            GraphsFailed: the half cannot be captured; run it as it is.
        """
        split = len(args) - inputs
        lead, moved = args[:split], args[split:]
        if self._forward is None:
            if self._recorder is None:
                self._recorder = self._make_recorder()
            try:
                self._forward = _Graph(self._recorder, run, lead, moved)
            except Exception as error:
                self._give_up(error)
                raise GraphsFailed from error
            outputs, mutations, tensors, others = self._forward.results
            self._forward.results = (outputs, mutations)
            if self._backward is None and self.program.grad:
                self._saved = [*tensors, *others]
        outputs, mutations = self._forward.again(moved)
        self._last = weakref.ref(call)
        return [_cloned(value) for value in outputs], mutations

    def backward(self, run: Run, tangents: Sequence[Tensor | None]) -> tuple[Any, Any]:
        """(gradients of parameters, gradients of inputs) of the call last replayed.

        Raises:
            RuntimeStateError: other outputs have gradients than when it was captured, or the half
                cannot be captured.
        """
        if self._backward is None:
            assert self._saved is not None
            lead, self._saved = self._saved, None
            try:
                self._backward = _Graph(self._recorder, run, lead, tangents)
            except Exception as error:
                self._give_up(error)
                raise RuntimeStateError(
                    "backward could not be captured as a CUDA graph, and what its forward saved is "
                    f"gone with the attempt ({_cause(error)}); later steps run without graphs; to "
                    "train this one, too, leave out cuda_graph=True"
                ) from error
        if self._backward.missing != [t is None for t in tangents]:
            raise RuntimeStateError(
                "with cuda_graph=True every backward must reach the outputs that the first one "
                "reached, since its kernels are captured; make the losses of all steps alike, or "
                "leave cuda_graph=True out"
            )
        grads, input_grads = self._backward.again(tangents)
        return [_cloned(g) for g in grads], [_cloned(g) for g in input_grads]

    def _give_up(self, error: Exception) -> None:
        self.failed = True
        self._forward = self._backward = self._saved = self._recorder = None
        first = _cause(error)
        give_up_graphs(self.program, f"capture failed: {first}")
        logger.warning("graphshard could not capture a step as CUDA graphs: %s", first)


def _cause(error: BaseException) -> str:
    """The first line of what went wrong first: that a capture is at an end hides what ended it."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class GraphsFailed(Exception):  # noqa: N818  # no error of the user's
    """A forward could not be captured."""


def give_up_graphs(program: Program, why_not: str) -> None:
    """Note on `program` that its step runs without CUDA graphs, and why."""
    assert program.cuda_graphs is not None
    program.cuda_graphs = replace(program.cuda_graphs, why_not=why_not)


def graphs_of(program: Program, group: Group) -> Graphs | None:
    """The graphs for a program that says it has them, unless its ranks cannot; then it says so."""
    if program.cuda_graphs is None or program.cuda_graphs.why_not is not None:
        return None
    why_not = None
    if group.check:
        why_not = "check=True looks at each value"
    elif group.size > 1 and group.side_stream is None:
        why_not = f"the host waits for the collectives of {group.backend}"
    if why_not is None:
        return Graphs(program)
    give_up_graphs(program, why_not)
    return None


def _stays(value: Any) -> Any:
    """A tensor of its own for the values of `value`, with its strides where they can be written."""
    if not isinstance(value, Tensor):
        return value
    if any(
        stride == 0 and size > 1 for size, stride in zip(value.shape, value.stride(), strict=True)
    ):
        return value.detach().clone()
    own = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=value.device)
    return own.copy_(value.detach())


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _addresses(values: Sequence[Any]) -> list[int]:
    return [value.data_ptr() if isinstance(value, Tensor) else 0 for value in values]

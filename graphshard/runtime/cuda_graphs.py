"""A step as two CUDA graphs: for the kernels of its forward, and of its backward; see README.md.

Graphs are released before a communicator of theirs ends, which NCCL else waits for without a limit.
"""

from __future__ import annotations

import atexit
import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor

from graphshard.errors import PolicyError, RuntimeStateError
from graphshard.program.program import Program
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.group import Group
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.compat import (
    allocator_settings,
    ends_of_backends,
    ends_of_groups,
)
from graphshard.torch_private.patches import patched_for_good

Run = Callable[[list[Any]], Any]

_EMPTY = "CUDA Graph is empty"  # in the warning that torch gives of one


class Recorder:
    """Captures the work that functions queue on a CUDA device, whichever one is current.

    pool: the memory pool of all its graphs.
    stream: the stream they are captured on; one for all, so that later graphs reuse the memory that
        earlier ones gave back.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(device)

    def capture(self, run: Run, args: list[Any]) -> tuple[Any, Any]:
        """(a CUDA graph of the work that `run(args)` queues, its result).

        Nothing is executed yet. Only this thread is captured, since NCCL's threads query events
        meanwhile.
        """
        with torch.cuda.device(self.device):
            graph, before = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
            try:
                with self._capturing(graph):
                    result = run(args)
            except Exception:
                self._restore(before)
                raise
        return graph, result

    @contextmanager
    def _capturing(self, graph: Any) -> Iterator[None]:
        """A context whose work on the device goes into `graph`."""
        capture = torch.cuda.graph(
            graph, pool=self.pool, stream=self.stream, capture_error_mode="thread_local"
        )
        capture.__enter__()
        try:
            yield
        except BaseException:
            capture.__exit__(None, None, None)
            raise
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            capture.__exit__(None, None, None)
        empty = [_EMPTY in str(warning.message) for warning in said]
        for warning, tells_empty in zip(said, empty, strict=True):
            if not tells_empty:
                warnings.warn_explicit(
                    warning.message, warning.category, warning.filename, warning.lineno
                )
        if any(empty):
            raise RuntimeStateError(
                f"nothing was queued on {self.device} while a CUDA graph was captured there, so "
                "its replay would do nothing; keep the model and its inputs on that device, or "
                "leave out cuda_graph=True"
            )

    def _restore(self, before: Any) -> None:
        """Restore torch's state after CUDA gave up a capture; see README.md."""
        if torch.cuda.current_stream() == before:
            return
        torch.cuda.set_stream(before)
        with suppress(RuntimeError):  # where the end of the capture came as far as that
            torch_compat.end_allocation(self.pool)
        other = torch.cuda.CUDAGraph()
        with torch.cuda.graph(other, stream=self.stream, capture_error_mode="thread_local"):
            torch.zeros(1, device=self.device)


logger = logging.getLogger("graphshard")


WARM_UP = 2
"""Calls of a program that run without graphs before the first capture."""

ATTEMPTS = 8
"""Calls at which another one waited for its backward on some rank, before a capture is given up."""


class GraphPool:
    """What the graphs of all programs of a module share: memory, and the call that is under way.

    A replay writes over what any other one left in the pool but its results, so there is one call
    between its forward and its backward at a time.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.captured: weakref.WeakSet[_CapturedGraph] = weakref.WeakSet()
        self._recorder: Any = None
        self._last: weakref.ref[Any] | None = None  # the last replayed call

    def recorder(self) -> Any:
        """The recorder; a new one if no graph of the last one is left, since its pool is gone."""
        if self._recorder is None or not self.captured:
            self._recorder = Recorder(self.device)
        return self._recorder

    def begin(self, call: Any) -> None:
        """The forward of `call` was replayed."""
        self._last = weakref.ref(call)

    def holds(self, call: Any) -> bool:
        """Whether the pool still has what backward of `call` reads."""
        return self._last is not None and self._last() is call

    def is_waiting(self) -> bool:
        """Whether a call was replayed whose backward has not begun, and may still come."""
        last = None if self._last is None else self._last()
        return last is not None and last.saved_others is not None

    def forget(self) -> None:
        """Give up the call under way, whose graphs are released."""
        self._last = None


class _CapturedGraph:
    """A captured forward or backward.

    static: tensors at fixed addresses into which the copied arguments are copied.
    missing: which of the copied arguments were None at the capture.
    addresses: of the arguments that are read where they lie.
    graph: the CUDA graph.
    results: the results of the capture, which each replay overwrites.

    The first arguments, `in_place`, are read where they lie; that list is emptied.
    """

    def __init__(self, recorder: Any, run: Run, in_place: list[Any], copied: Sequence[Any]) -> None:
        self.static = [_static_copy(value) for value in copied]
        self.missing = [value is None for value in copied]
        self.addresses = _addresses(in_place)
        args = [*in_place, *self.static]
        in_place.clear()  # so that `run` holds the last references and frees as it goes
        self.graph, self.results = recorder.capture(run, args)

    def replay_with(self, copied: Sequence[Any]) -> Any:
        for static, value in zip(self.static, copied, strict=True):
            if isinstance(static, Tensor):
                static.copy_(value)
        self.graph.replay()
        return self.results


class Graphs:
    """The two graphs of one step; decides which calls replay them, on all ranks alike.

    program: the step's, which notes why its capture failed.
    failed: a capture failed on some rank, and no later call is replayed.
    """

    def __init__(self, program: Program, agreement: Agreement, pool: GraphPool) -> None:
        self.program = program
        self.failed = False
        self._agreement = agreement
        self._pool = pool
        self._warm = 0
        self._attempts = 0
        self._forward: _CapturedGraph | None = None
        self._backward: _CapturedGraph | None = None
        self._saved: list[Any] | None = None  # by the capture, until backward is captured

    @property
    def group(self) -> Group:
        """The ranks, over which collectives were recorded."""
        return self._agreement.group

    def release(self) -> None:
        """Drop the graphs and their memory; a later call captures them again."""
        for captured in (self._forward, self._backward):
            if captured is not None:
                captured.graph.reset()
                self._pool.captured.discard(captured)
        if self._forward is not None:
            self._pool.forget()
        self._forward = self._backward = self._saved = None

    def replays(self, args: Sequence[Any], inputs: int) -> bool:
        """Whether a call whose forward begins with `args` is replayed (or captured).

        The last ones, so many as `inputs`, are inputs of the model.
        """
        if self.failed:
            return False
        in_place, copied = args[: len(args) - inputs], args[len(args) - inputs :]
        if self._forward is not None:
            if self._pool.is_waiting():
                return False
            if self._forward.addresses == _addresses(in_place):
                return True
            self.release()
        captures = self._warm == WARM_UP
        self._warm += not captures
        waiting = captures and self._pool.is_waiting()
        text = "the module, whose step is captured" if captures else "the module before its capture"
        with self._agreement.part(text=f"{text} as CUDA graphs") as part:
            part.same += self._input_lines(copied)
            part.flag = waiting
        if not any(part.flags):
            return captures
        self._attempts += 1
        if self._attempts == ATTEMPTS:
            self._give_up("at each of its calls another one waited for its backward")
        return False

    def _input_lines(self, copied: Sequence[Any]) -> list[str]:
        """A line for each input of the model, which must be the same on all ranks."""
        rule = "with cuda_graph=True the inputs of all ranks need equal shapes: pad or drop batches"
        return [
            f"{entry.path} {list(value.shape)} {str(value.dtype)[6:]} ({rule})"
            for entry, value in zip(self.program.inputs, copied, strict=True)
        ]

    def forward(self, call: Any, run: Run, args: list[Any], inputs: int) -> tuple[Any, Any]:
        """(outputs, values of mutations) of `call`, by a replay."""
        split = len(args) - inputs
        in_place, copied = args[:split], args[split:]
        if self._forward is None:
            self._forward = self._capture("forward", run, in_place, copied)
            outputs, mutations, tensors, others = self._forward.results
            self._forward.results = (outputs, mutations)
            if self._backward is None and self.program.grad:
                self._saved = [*tensors, *others]
        outputs, mutations = self._forward.replay_with(copied)
        self._pool.begin(call)
        return [_cloned(value) for value in outputs], mutations

    def backward(self, call: Any, run: Run, tangents: Sequence[Tensor | None]) -> tuple[Any, Any]:
        """(gradients of parameters, gradients of inputs) of `call`, the last replayed one."""
        if not self._pool.holds(call):
            raise RuntimeStateError(
                "CUDA graphs were released between a forward and its backward, and with them the "
                "tensors that it saved; call the module again before backward, and release_graphs()"
                " or destroy_process_group() between steps"
            )
        if self._backward is None:
            assert self._saved is not None
            saved, self._saved = self._saved, None
            with self._agreement.part(text="backward, which is captured as a CUDA graph"):
                pass
            try:
                self._backward = self._capture("backward", run, saved, tangents)
            except GraphsFailed as error:
                raise RuntimeStateError(
                    "backward could not be captured as a CUDA graph, and the attempt freed the "
                    f"tensors that its forward saved ({error}); later steps run without "
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

    def _capture(
        self, phase: str, run: Run, in_place: list[Any], copied: Sequence[Any]
    ) -> _CapturedGraph:
        captured: Any = None
        failure = ""
        with self._agreement.part(text=f"{phase}, captured as a CUDA graph") as part:
            try:
                captured = _CapturedGraph(self._pool.recorder(), run, in_place, copied)
            except Exception as error:
                failure, part.flag = _cause(error), True
        if not any(part.flags):
            self._pool.captured.add(captured)
            _alive.add(self)
            _watch_communicators()
            # Again each time: what is registered last comes first, in front of torch's own hooks.
            atexit.unregister(release_all)
            atexit.register(release_all)
            return captured
        if captured is not None:
            captured.graph.reset()
            failure = f"on rank {part.flags.index(True)}, whose log says why"
        self._give_up(f"capture failed: {failure}")
        raise GraphsFailed(failure)

    def _give_up(self, why: str) -> None:
        self.failed = True
        self.release()
        note_no_graphs(self.program, why)
        logger.warning("graphshard does not replay a step as CUDA graphs: %s", why)


def _cause(error: BaseException) -> str:
    """The first line of the error that came first, which the end of the capture hides."""
    while error.__context__ is not None:
        error = error.__context__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


class GraphsFailed(Exception):  # noqa: N818  # no error of the user's
    """A forward or backward could not be captured."""


def note_no_graphs(program: Program, why_not: str) -> None:
    """Note on `program` that its step runs without CUDA graphs because of `why_not`."""
    assert program.cuda_graphs is not None
    program.cuda_graphs = replace(program.cuda_graphs, why_not=why_not)


def graphs_of(program: Program, agreement: Agreement, pool: GraphPool) -> Graphs | None:
    """The graphs of `program`; None if it has none.

    Where its ranks cannot run them, the program notes why.
    """
    if program.cuda_graphs is None or program.cuda_graphs.why_not is not None:
        return None
    why_not = _why_not_here(agreement.group)
    if why_not is None:
        return Graphs(program, agreement, pool)
    note_no_graphs(program, why_not)
    return None


def _why_not_here(group: Group) -> str | None:
    """The reason why the ranks of `group` cannot replay graphs; None if they can."""
    if group.check:
        return "check=True looks at each value"
    if group.size > 1 and group.side_stream is None:
        return f"the host waits for the collectives of {group.backend}"
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


VARIABLE = "NCCL_GRAPH_REGISTER"


def registration(group: Group, *, cuda_graph: bool) -> str:
    """The value of NCCL's variable, "0" unless the user set another one; "" where it is of no use.

    To be called before the first communicator, if possible: NCCL looks at the variable once.
    """
    if not cuda_graph or group.size == 1 or "nccl" not in group.backend:
        return ""
    value = os.environ.setdefault(VARIABLE, "0")
    settings = allocator_settings().replace(" ", "").lower()
    if value != "0" and "expandable_segments:true" in settings:
        raise PolicyError(
            f"cuda_graph=True with {VARIABLE}={value} and the allocator's expandable_segments:True "
            f"ends in illegal memory accesses; leave {VARIABLE} unset, or use other segments"
        )
    return value


_alive: weakref.WeakSet[Graphs] = weakref.WeakSet()


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

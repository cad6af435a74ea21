"""Capture: an nn.Module and example inputs become a `Program`, with no parameter memory.

A step is traced as it is. Where that fails by code that decides by values, the step is traced
again in other ways, in the order told here, and the first that succeeds is the capture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.capture.borders import RepetitionError
from graphshard.capture.captured import Capture, Met
from graphshard.capture.dynamic import Names
from graphshard.capture.errors import require_arguments
from graphshard.capture.host_draws import Draw, DrawsError, Expected
from graphshard.capture.one_trace import Example, Values, Way, trace_once
from graphshard.capture.repetition import Repetition
from graphshard.capture.side_effects import WriteError
from graphshard.capture.sizes_by_values import admit_empty
from graphshard.capture.traced_module import MAIN_ENTRY, EntryPoint
from graphshard.errors import CaptureError, FixedSizeError
from graphshard.policy.precision import Precisions
from graphshard.progress import Progress, Stages
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.unbacked import asks_if_empty, undecided_error

_MOST_DRAWS = 16
"""How many draws of torch a model may decide by."""


def capture(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    device: str | torch.device = "cpu",
    grad: bool = True,
    names: Sequence[Names] | None = None,
    entry: EntryPoint = MAIN_ENTRY,
    precisions: Precisions | None = None,
    buffer: Callable[[str], Tensor] | None = None,
    progress: Stages | None = None,
    again: Met | None = None,
) -> Capture:
    """Trace one step of `model`, which is left as it was, into a `Program`.

    `args` and `kwargs` may be real, meta or fake; their values are read only if the model decides
    by them, and those of its buffers, which `buffer` gives by FQN (None: they are the model's). A
    CUDA program captured without CUDA is traced for the CPU, and `program.notes` says so. Without
    `grad` it has a forward only. `names` are for each tensor of the call (in the order of
    `take_apart`) its dynamic dimensions, of sizes of at least 2; see `graphshard.capture.dynamic`.
    `progress` shows each run of forward, of which a trace makes two or more. `again` is
    given for a call whose program guessed wrong.
    """
    module = model.get_submodule(entry.module)
    if not module._forward_pre_hooks:  # which may give other arguments
        name = f"{type(module).__name__}.{entry.method}"
        require_arguments(getattr(module, entry.method), name, args, kwargs or {})
    target = torch.device(device)
    buffer = buffer or dict(model.named_buffers(remove_duplicate=False)).__getitem__
    example = Example(
        model,
        args,
        kwargs or {},
        target,
        grad,
        names,
        entry,
        precisions,
        buffer,
        progress or Progress(visible=False),
        again,
    )
    # In inference mode composite operators reach the trace whole, and take apart behind autocast.
    with torch.inference_mode(False), torch.set_grad_enabled(grad):
        try:
            return _capture_in_turn(example)
        except DrawsError as error:
            return _capture_with_draws(example, error.draws)
        except CaptureError as error:
            if not _looks_at_values(error):
                raise
            return _capture_deciding(example, error, example)


def _capture_with_draws(example: Example, draws: tuple[Draw, ...]) -> Capture:
    """Trace a step that draws numbers on the host, which are inputs."""
    try:
        return _capture_sizes_by_values(replace(example, draws=Expected(draws)))
    except (CaptureError, DrawsError) as error:
        drawn = ", ".join(map(str, dict.fromkeys(draws)))
        refusal = CaptureError(
            f"the forward draws random numbers by {drawn}, which are no inputs of a program since "
            f"it decides by them or turns them into constants: {error}"
        )
        _forget(error)
    return _capture_deciding(example, refusal, replace(example, draws=Expected(draws)))


def _capture_in_turn(example: Example) -> Capture:
    """Trace a step as it is, or else as torch.compile sees it, or else by the values it needs."""
    if example.again is not None:
        return _capture_again(example, example.again)
    try:
        return _capture_as_is_or_functional(example)
    except CaptureError as error:
        if not _looks_at_values(error):
            raise
        _forget(error)
    # Many models look at no values where `torch.compiler.is_compiling()` is true.
    try:
        return _capture_as_compiling(example)
    except FixedSizeError:
        raise
    except CaptureError as error:
        _forget(error)
    return _capture_sizes_by_values(example)


def _capture_again(example: Example, met: Met) -> Capture:
    """Trace a call as `met` says, or else guessing."""
    trace = _capture_as_compiling if met.compiling else _capture_as_is_or_functional
    draws, values = met.draws, met.values
    while True:
        try:
            return trace(replace(example, draws=draws), values=values)
        except DrawsError as error:
            if len(error.draws) <= len(draws.known):
                raise
            draws = replace(draws, known=error.draws)
            _forget(error)
        except CaptureError as error:
            if values is Values.GUESSED:
                raise
            _forget(error)
        if values is not Values.GUESSED:  # it asks other questions
            trace, values = _capture_as_is_or_functional, Values.GUESSED
            example = replace(example, again=replace(met, answers=()))


def _capture_deciding(example: Example, error: CaptureError, given: Example) -> Capture:
    """Trace a step that decides by small draws of torch, made before each call, or by anything.

    `error` is that of other traces, and `given` the example with the draws of the host.
    """
    draws: tuple[Draw, ...] = ()
    while len(draws) < _MOST_DRAWS:
        expected = Expected(draws, of_torch=True)
        try:
            return _capture_as_is_or_functional(
                replace(example, draws=expected), values=Values.ANSWERED
            )
        except DrawsError as other:
            if len(other.draws) <= len(draws):
                break
            draws = other.draws
            _forget(other)
        except CaptureError as other:
            _forget(other)
            break
    try:
        return _capture_as_is_or_functional(given, values=Values.GUESSED)
    except CaptureError as other:
        if not given.draws.known:
            raise
        _forget(other)
    except DrawsError as other:
        _forget(other)
    raise error from error.__cause__


def _forget(*errors: Exception) -> None:
    """Drop the tracebacks of errors of traces that others made up for: they hold the example."""
    for error in errors:
        each: BaseException | None = error
        while each is not None:
            each.__traceback__ = None
            each = each.__cause__


def _capture_sizes_by_values(example: Example) -> Capture:
    """Trace a step that needs sizes and numbers that depend on values.

    If it can, it decides nothing by them, but for whether there is anything at all.
    """
    for trace in (_capture_as_is_or_functional, _capture_as_compiling):
        try:
            return trace(example, values=Values.AS_SIZES)
        except CaptureError as error:
            cause: Any = error.__cause__
            _forget(error)
        if isinstance(cause, undecided_error()) and asks_if_empty(cause.cond) is not None:  # type: ignore[attr-defined]
            try:
                captured = trace(example, values=Values.NOT_EMPTY)
            except CaptureError as error:
                _forget(error)
            else:
                return admit_empty(captured, partial(trace, example, values=Values.EMPTY))
    return _capture_answered(example)


def _capture_answered(example: Example) -> Capture:
    """Trace a step that decides by values.

    Raises:
        CaptureError, DrawsError: that of the first way.
    """
    errors: list[CaptureError | DrawsError] = []
    draws = example.draws.known
    answered = (_capture_as_is_or_functional, Values.ANSWERED)
    both_ways = (
        (_capture_as_is_or_functional, Values.BOTH_WAYS),
        (_capture_as_compiling, Values.BOTH_WAYS),
    )
    # Each call may draw other numbers, and a program for each answer may be many.
    for trace, values in (*both_ways, answered) if draws else (answered, *both_ways):
        try:
            return trace(example, values=values)
        except (CaptureError, DrawsError) as error:
            ends = isinstance(error, DrawsError) or (
                values is Values.ANSWERED and not _looks_at_values(error)
            )
            if ends and not draws:
                raise
            errors.append(error)
    _forget(*errors[1:])
    raise errors[0]


def _capture_as_compiling(example: Example, values: Values = Values.UNKNOWN) -> Capture:
    """Trace a step as `torch.compile` would see it, where `is_compiling()` is true."""
    with torch_trace.claim_compiling():
        captured = _capture_as_is_or_functional(example, values=values)
    captured.program.notes += (
        "captured with torch.compiler.is_compiling() true, as the model looks at values otherwise",
    )
    return captured


def _looks_at_values(error: Exception) -> bool:
    by_value, by_shape, _ = torch_trace.untraceable_errors()
    return isinstance(error.__cause__, (by_value, by_shape, undecided_error()))


def _capture_as_is_or_functional(example: Example, values: Values = Values.UNKNOWN) -> Capture:
    """Trace a step without functionalization, or with it if the first trace says that it must be.

    Only a step that writes nowhere can be traced as it is. Any other fault of the first trace, one
    of graphshard's own among them, is the fault of the capture.
    """
    way = Way(Repetition())
    while True:
        try:
            return trace_once(example, values, way)
        except (WriteError, RepetitionError, CaptureError) as error:
            other = way.after(error)
            if other is None:
                raise
            _forget(error)
        way = other

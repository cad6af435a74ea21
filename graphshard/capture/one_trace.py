"""One trace of a call of a module, which gives its program or ends by an error.

The joint graph comes from AOTAutograd over FakeTensors that claim the execution device (the meta
device itself would change the graph: attention decomposes, some gradients vanish). Parameters are
only asked for shape, stride and dtype, so a model on meta of any size works.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.capture import traced_module
from graphshard.capture.annotation import RunProgress, annotate_nodes, note_lines
from graphshard.capture.as_eager import (
    attention_of_cuda,
    eager_kernels,
    encoder_layers,
    recurrent_layers,
    transformers_as_in_eager,
)
from graphshard.capture.borders import RepetitionError
from graphshard.capture.both_ways import BothWays
from graphshard.capture.captured import Capture, Met
from graphshard.capture.casting import cast_at_units, place_casts, require_one_dtype
from graphshard.capture.checkpoints import tag_checkpoint_regions
from graphshard.capture.dynamic import Names, symbolic_shapes
from graphshard.capture.errors import explain_errors
from graphshard.capture.fake_mode import constant_folding_fake_mode
from graphshard.capture.host_draws import Expected, draw_ahead, restore_random_state
from graphshard.capture.input_checks import as_plain, first_places
from graphshard.capture.joint import program_of_joint
from graphshard.capture.packed_sequences import packed_sequences
from graphshard.capture.questions import Questions
from graphshard.capture.recipes import Leaf, Recipes
from graphshard.capture.repetition import Repetition
from graphshard.capture.side_effects import WriteError, warn_of_state
from graphshard.capture.sizes_by_values import (
    all_experts,
    dimensions_as_in_eager,
    max_and_min_of_sizes,
)
from graphshard.capture.structure import CALL, Structure, take_apart
from graphshard.capture.traced_module import EntryPoint, TracedModel
from graphshard.errors import CaptureError, warn_user
from graphshard.policy.precision import Precisions
from graphshard.program.program import Program
from graphshard.program.sizes import Sizes
from graphshard.progress import Stages
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.gc_pause import pause_collections

_logger = logging.getLogger("graphshard")


class Values(Enum):
    """The way a trace meets a size or number that depends on the values of tensors.

    UNKNOWN: the trace ends. AS_SIZES: it is a symbol, by which no code may decide. NOT_EMPTY: as
    before, but code may ask whether a size is 0, and it is not. EMPTY: likewise, and it is 0.
    ANSWERED: it is a symbol, and code may decide by those that inputs and buffers make. BOTH_WAYS:
    likewise, and where others only skip operators the program computes both ways. GUESSED: as
    ANSWERED, and the trace guesses what nothing tells.
    """

    UNKNOWN = auto()
    AS_SIZES = auto()
    NOT_EMPTY = auto()
    EMPTY = auto()
    ANSWERED = auto()
    BOTH_WAYS = auto()
    GUESSED = auto()


_IF_EMPTY = {Values.NOT_EMPTY: False, Values.EMPTY: True}

_NO_DRAWS = Expected()


@dataclass(frozen=True)
class Example:
    """A call to be traced; the fields are the arguments of `capture`, and the expected draws."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    target: torch.device
    grad: bool
    names: Sequence[Names] | None
    entry: EntryPoint
    precisions: Precisions | None
    buffer: Callable[[str], Tensor]
    progress: Stages
    again: Met | None = None
    draws: Expected = _NO_DRAWS

    def taken_apart(self) -> tuple[list[Tensor], Structure, range]:
        """The tensors of the call and of the draws, their structure, and which are of draws."""
        drawn = draw_ahead(self.draws.known)
        more = (drawn,) if drawn else ()
        tensors, inputs = take_apart((self.args, self.kwargs, *more), name=CALL)
        count = len(tensors)
        return as_plain(tensors, inputs, set()), inputs, range(count - len(drawn), count)


@dataclass(frozen=True)
class Way:
    """How a step is traced.

    repetition: which calls of alike blocks are left out.
    functional: with functionalization, which takes writes out of the graph.
    replaces_buffers: a buffer that forward assigns is not written, as in eager, since backward
        reads it.
    """

    repetition: Repetition
    functional: bool = False
    replaces_buffers: bool = False

    def after(self, error: Exception) -> Way | None:
        """Another way, if `error` says that this one was at fault.

        Writes in place need functionalization. Where a value was asked for, or an operator has no
        fake kernel, a write before may be the reason: what a tensor holds is no longer known, and
        an in-place operator may lack the kernel that its functional form has.
        """
        cause = error.__cause__
        writes = isinstance(error, WriteError) or isinstance(cause, WriteError)
        if (self.repetition.used or self.repetition.tells) and not writes:
            found = error if isinstance(error, RepetitionError) else cause
            _logger.info("blocks are traced one by one: %s", found or error)
            return replace(self, repetition=self.repetition.without(found))
        if not self.functional and (writes or isinstance(cause, torch_trace.untraceable_errors())):
            return Way(Repetition(), functional=True)
        in_place = "modified by an inplace operation" in str(cause)
        if self.functional and in_place and not self.replaces_buffers:
            return Way(Repetition(wanted=False), functional=True, replaces_buffers=True)
        return None


def trace_once(example: Example, values: Values, way: Way) -> Capture:
    """Trace a call, which meets numbers that depend on `values` so, in this `way`.

    Raises:
        CaptureError: no program can be made so; its cause tells whether another trace may.
        WriteError, RepetitionError: another way may.
        DrawsError: it draws numbers on the host that `example` does not expect.
    """
    model, names, precisions = example.model, example.names, example.precisions
    target = traced_on = example.target
    notes: list[str] = []
    if target.type == "cuda" and not torch_compat.has_cuda_build():
        traced_on = torch.device("cpu")
        notes.append(
            "captured on cpu for cuda: units, schedule and sizes hold, compute nodes may differ"
        )
    tensors, inputs, drawn = example.taken_apart()
    dynamic = names is not None and any(names)
    largest = max((size for tensor in tensors for size in tensor.shape), default=1)
    sizes = Sizes(largest) if dynamic or values is not Values.UNKNOWN else None
    answers = values in (Values.ANSWERED, Values.BOTH_WAYS, Values.GUESSED)
    recipes = Recipes() if answers else None
    both_ways = BothWays(wanted=values is Values.BOTH_WAYS)
    questions = None
    if sizes is not None:
        known = () if example.again is None else example.again.answers
        questions = Questions(sizes, tensors, inputs.paths, example.buffer, recipes, known)
        questions.guesses_all = values is Values.GUESSED
        questions.otherwise = both_ways.ask
        questions.draws = drawn if both_ways.wanted else range(0)
    mode = constant_folding_fake_mode(sizes, target.type, recipes)

    fake = partial(_fake, mode, traced_on)
    shapes: Sequence[Any] = [()] * len(tensors)
    if sizes is not None and names is not None and dynamic:
        names = [*names, *({} for _ in drawn)]
        shapes = symbolic_shapes(tensors, names, inputs.paths, sizes)
    fakes = _fakes(mode, traced_on, tensors, shapes, drawn)
    plain = contextlib.nullcontext if way.functional else mode.no_writes.watching
    repetition = way.repetition if values is Values.UNKNOWN else Repetition(wanted=False)
    traced = TracedModel(
        model,
        fake,
        inputs,
        example.entry,
        precisions,
        plain,
        way.replaces_buffers,
        repetition,
        example.draws,
    )
    traced.same_inputs = first_places(tensors) if traced.compares_identity else ()
    if questions is not None:
        traced.on_call = partial(_begin_run, questions)
    traced.both_ways = both_ways
    progress = RunProgress(model, example.progress)
    traced.around_run = progress.run
    with (
        explain_errors(model, None if sizes is None else sizes.environment),
        restore_random_state(),
        cast_at_units(model, precisions),
        _sizes_by_values(sizes, questions, values, mode.recipes),
        repetition.tracing(model, precisions, mode, way.functional),
    ):
        try:
            joint = _trace(
                traced,
                model,
                fakes,
                example.grad,
                way.functional,
                traced_on.type != target.type,
                mode,
                progress,
            )
        except AssertionError:
            # Torch runs the forward twice and compares what it returned: sizes, and numbers where
            # the first run fixed one.
            if sizes is not None:
                sizes.require_free(inputs.paths)
            raise
        if mode.unanswered is not None:
            raise mode.unanswered
    if not way.functional:
        mode.no_writes.require(joint.graph)
    needs_grad = [example.grad and t.requires_grad for t in fakes]
    with pause_collections():
        program = program_of_joint(
            joint, traced, inputs, needs_grad, training=model.training, sizes=sizes
        )
    place_casts(program, precisions)
    require_one_dtype(program, precisions)
    _check_gradients(program, traced)
    if questions is not None:
        notes += questions.close()
    notes += both_ways.notes
    draws = example.draws.known
    notes += [f"draws {each} before each call" for each in dict.fromkeys(draws)]
    notes += tell_what_is_baked_in(traced, example.entry, program)
    program.notes = tuple(notes)
    program.capture_device, program.device = traced_on.type, target.type
    assert traced.result is not None
    asked, guessed = ((), ()) if questions is None else (questions.asked, questions.guessed)
    return Capture(
        program,
        inputs,
        traced.result,
        traced.left,
        traced.guards(),
        traced.assigned,
        tuple(asked),
        draws,
        tuple(guessed),
        Met(values, example.draws, torch.compiler.is_compiling()),
    )


def _fake(
    mode: Any, device: torch.device, tensor: Tensor, shape: Any = None, stride: Any = None
) -> Tensor:
    shape, stride = shape or tensor.shape, stride or tensor.stride()
    with mode:
        return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=device)


def _fakes(
    mode: Any,
    device: torch.device,
    tensors: Sequence[Tensor],
    shapes: Sequence[Any],
    drawn: Container[int],
) -> list[Tensor]:
    """Fake tensors on `device` for those of a call; drawn ones stay where they are."""
    fakes = []
    for place, (tensor, shape) in enumerate(zip(tensors, shapes, strict=True)):
        where = tensor.device if place in drawn else device
        fakes.append(_fake(mode, where, tensor, *shape).requires_grad_(tensor.requires_grad))
    return fakes


def _begin_run(
    questions: Questions, tensors: Sequence[Tensor], buffers: Mapping[str, Tensor]
) -> None:
    questions.begin_run()
    if questions.recipes is not None:
        named: tuple[tuple[Any, Tensor], ...] = (*enumerate(tensors), *buffers.items())
        fakes = ((torch_trace.without_functional(tensor), key) for key, tensor in named)
        questions.recipes.start_from((fake, Leaf.of(fake, key)) for fake, key in fakes)


def _trace(
    traced: TracedModel,
    model: nn.Module,
    fakes: list[Tensor],
    grad: bool,
    functional: bool,
    off_target: bool,
    mode: Any,
    progress: RunProgress,
) -> Any:
    export = torch_trace.joint_graph_exporter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(torch_trace.preserve_node_meta()())
        stack.enter_context(encoder_layers(model))  # before hooks of our own
        stack.enter_context(annotate_nodes(model, progress.left))
        stack.enter_context(note_lines(traced_module.__file__, __file__))
        stack.enter_context(tag_checkpoint_regions(off_target=off_target))
        stack.enter_context(recurrent_layers())
        stack.enter_context(packed_sequences())
        stack.enter_context(eager_kernels())
        stack.enter_context(transformers_as_in_eager())
        if off_target:
            stack.enter_context(attention_of_cuda())
        stack.enter_context(torch_trace.keep_matrix_checks())
        stack.enter_context(_quiet())
        stack.enter_context(torch_trace.quiet_errors())
        stack.enter_context(pause_collections())
        stack.enter_context(torch_trace.leave_out_descriptions())
        traced.both_ways.find(partial(traced, *fakes), mode)
        joint = export(
            stack,
            traced,
            tuple(fakes),
            disable_functionalization=not functional,
            _disable_torch_fn_metadata_mode=True,
        )
        return joint.graph_module


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", category=UserWarning, module=r"torch\._(functorch|dynamo)"
        )
        # Models make tensors of what is an array in eager.
        warnings.filterwarnings("ignore", message="To copy construct", category=UserWarning)
        # The error that follows says the same, or another trace mends it.
        warnings.filterwarnings("ignore", message="Error detected in", category=UserWarning)
        yield


@contextlib.contextmanager
def _sizes_by_values(
    sizes: Sizes | None, questions: Questions | None, values: Values, recipes: Recipes
) -> Iterator[None]:
    if sizes is None or questions is None:
        yield
        return
    with (
        max_and_min_of_sizes(),
        all_experts(recipes),
        dimensions_as_in_eager(questions.is_one),
        sizes.traced(questions.decide, empty=_IF_EMPTY.get(values)),
    ):
        yield


def _check_gradients(program: Program, traced: TracedModel) -> None:
    """Refuse a graph that lacks a gradient which autograd would compute."""
    grads = program.results().grads
    for index, (param, gradient) in enumerate(zip(program.params, grads, strict=True)):
        if gradient is None and index in traced.reachable and param.requires_grad and program.grad:
            raise CaptureError(
                f"the gradient of parameter {param.fqn!r} was lost in capture although an output "
                "depends on it; please keep its use differentiable, or freeze it with "
                "requires_grad_(False)"
            )


# -- what a program keeps as its trace saw it ----------------------------------------------------


def tell_what_is_baked_in(traced: TracedModel, entry: EntryPoint, program: Program) -> list[str]:
    """Warn of each kind once; returns notes for the program."""
    side_effects = traced.reads.clocks, traced.state_changes, traced.left, traced.hooked
    traced.repetition.require_none((traced.reads.draws, traced.seeded, *side_effects))
    notes = []
    if traced.reads.draws:
        raise CaptureError(
            f"the forward draws random numbers from {' and '.join(traced.reads.draws)} in a way "
            "that no call can repeat; draw them with torch, by a function of `random` or "
            "`numpy.random` that gives a number, an array or a list, or outside of the model"
        )
    for module in traced.seeded:
        notes.append(f"forward seeds {module}; what it draws from there is the same in each call")
    if traced.reads.clocks:
        clocks = " and ".join(f"{name}() (at {line})" for name, line in traced.reads.clocks.items())
        notes.append(f"the time that forward reads is baked in: {clocks}")
        warn_user(
            f"the forward reads {clocks}; a captured program keeps the time it saw. Pass it as an "
            "argument"
        )
    assigned = (*traced.state_changes, *(each.place.path for each in traced.assigned))
    if assigned and not program.outputs and entry.method != "forward":
        raise CaptureError(
            f"{entry} returns no tensor and assigns {', '.join(assigned[:5])}, which a captured "
            "program does not; pass it numbers instead of tensors, or set the attributes of the "
            "sharded module, which its programs read"
        )
    if traced.state_changes:
        at = traced.reads.at_line(*traced.state_changes)
        notes.append(warn_of_state(traced.state_changes, at))
    if traced.made_to_require_grad:
        inputs = ", ".join(sorted(traced.made_to_require_grad))
        warn_user(
            f"the forward calls requires_grad_() on {inputs}, which in a captured program concerns "
            "values of its own: the tensor that is passed gets no .grad. Call it before, if you "
            "want one"
        )
    if program.sizes is not None and program.sizes.unread:
        lines = "\n  ".join(program.sizes.unread)
        notes.append(f"numbers that nothing uses are not read: {'; '.join(program.sizes.unread)}")
        warn_user(
            "the forward reads numbers off tensors that nothing in the program uses, as a print "
            "or a log line does. It printed symbols while being captured, and a program does not "
            f"repeat it; return the tensor and print it outside of the model:\n  {lines}"
        )
    return notes

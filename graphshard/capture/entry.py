"""Capture: an nn.Module and example inputs become a `Program`, with no parameter memory.

The joint graph comes from AOTAutograd over FakeTensors that claim the execution device (the meta
device itself would change the graph: attention decomposes, some gradients vanish). Parameters of
the module are only asked for shape, stride and dtype, so a model on meta of any size works.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.capture.annotation import annotate_nodes
from graphshard.capture.as_eager import (
    eager_kernels,
    stacked_layer_dropout,
    transformers_as_in_eager,
)
from graphshard.capture.casting import cast_at_units, place_casts
from graphshard.capture.checkpoints import tag_checkpoint_regions
from graphshard.capture.dynamic import Names, strides_of, symbolic_shapes
from graphshard.capture.errors import explain_errors
from graphshard.capture.fake_mode import constant_folding_fake_mode
from graphshard.capture.joint import program_of_joint
from graphshard.capture.side_effects import WriteError, restore_random_state
from graphshard.capture.structure import CALL, Structure, take_apart
from graphshard.capture.traced_module import MAIN_ENTRY, EntryPoint, TracedModel
from graphshard.errors import CaptureError
from graphshard.policy.precision import Precisions
from graphshard.program.program import Program
from graphshard.program.sizes import Sizes
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.gc_pause import pause_collections

_NO_NAMES: Names = {}


@dataclass(frozen=True)
class Capture:
    """A captured program, and the structures of its inputs and of its result."""

    program: Program
    inputs: Structure
    result: Structure

    def flatten_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Tensor]:
        """The tensors of a call, aligned with `program.inputs`."""
        return take_apart((args, kwargs), name=CALL)[0]

    def unflatten_outputs(self, tensors: Sequence[Any]) -> Any:
        """The model's own return value around `tensors`, aligned with `program.outputs`."""
        return self.result.build(tensors)


def signature_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """The properties of a call's arguments that a captured program depends on, hashable.

    A tensor counts by shape, dtype, device type, requires_grad, and strides if it is not
    contiguous. Functions, classes and modules count by identity, everything else by value.

    Raises:
        CaptureError: an argument cannot be taken apart.
    """
    return signature_of_parts(*take_apart((args, kwargs), name=CALL))


def signature_of_parts(
    tensors: Sequence[Tensor], structure: Structure, names: Sequence[Names] | None = None
) -> tuple[Any, ...]:
    """`signature_of` a call that `take_apart` has flattened already.

    A dimension in `names` counts by its name instead of its size.
    """
    if names is None:
        return tuple(map(_tensor_key, tensors)), structure
    return tuple(map(_tensor_key, tensors, names)), structure


def _tensor_key(tensor: Tensor, names: Names = _NO_NAMES) -> tuple[Any, ...]:
    rest = tensor.dtype, tensor.device.type, tensor.requires_grad
    if names:
        shape = tuple([names.get(dim, size) for dim, size in enumerate(tensor.shape)])
        return (shape, *rest, strides_of(tensor))
    strides = None if tensor.is_contiguous() else tensor.stride()
    return (tuple(tensor.shape), *rest, strides)


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
) -> Capture:
    """Trace one step of `model` into a `Program`.

    Args:
        model: on any device, meta included; left as it was.
        args: example positional inputs, real, meta or fake; only their metadata is read.
        kwargs: example keyword inputs, likewise.
        device: where the program will run. A CUDA program captured without CUDA is traced for the
            CPU, and `program.notes` says so.
        grad: forward and backward (of what requires gradients), or a forward-only program.
        names: for each tensor of the call (in the order of `take_apart`) its dynamic dimensions,
            of sizes of at least 2; see `graphshard.capture.dynamic`.
        entry: the module or method of the model that is called.
        precisions: the tensors to compute in another dtype. None: none.

    Raises:
        CaptureError: the step cannot be one graph; names the user's source line and what to do.
            `FixedSizeError` if the model fixes a dynamic dimension.
    """
    example = model, args, kwargs or {}, torch.device(device), grad, names, entry, precisions
    try:
        return _capture_as_is_or_functional(*example)
    except CaptureError as error:
        if not _looks_at_values(error):
            raise
        first = error
    # Many models look at no values where `torch.compiler.is_compiling()` is true.
    with torch_trace.claim_compiling():
        try:
            captured = _capture_as_is_or_functional(*example)
        except CaptureError as error:
            if _looks_at_values(error):
                raise error from None
            first.add_note(f"With torch.compiler.is_compiling() true it fails otherwise: {error}")
            raise first from first.__cause__
    captured.program.notes += (
        "captured with torch.compiler.is_compiling() true, as the model looks at values otherwise",
    )
    return captured


def _looks_at_values(error: CaptureError) -> bool:
    by_value, by_shape, _ = torch_trace.untraceable_errors()
    return isinstance(error.__cause__, (by_value, by_shape))


def _capture_as_is_or_functional(*example: Any) -> Capture:
    """Trace a step without functionalization, or with it if the first trace says that it must be.

    Only a step that writes nowhere can be traced as it is. Any other fault of the first trace, one
    of graphshard's own among them, is the fault of the capture.
    """
    try:
        return _trace_and_rebuild(*example, functional=False)
    except (WriteError, CaptureError) as error:
        if not _needs_functionalization(error):
            raise
    return _trace_and_rebuild(*example, functional=True)


def _needs_functionalization(error: WriteError | CaptureError) -> bool:
    """Whether a trace without functionalization ended by one of the refusals meant for that.

    `WriteError`: an operator wrote in place, or autograd's own did in backward.
    `untraceable_errors()`: a value was asked for, or an operator has no fake kernel. After a write
    in place that may be due to the write: what a tensor holds is no longer known, and an in-place
    operator may lack the kernel that its functional form has.
    """
    refusals: tuple[type[Exception], ...] = (WriteError, *torch_trace.untraceable_errors())
    return isinstance(error, WriteError) or isinstance(error.__cause__, refusals)


def _trace_and_rebuild(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    target: torch.device,
    grad: bool,
    names: Sequence[Names] | None,
    entry: EntryPoint,
    precisions: Precisions | None,
    *,
    functional: bool,
) -> Capture:
    traced_on = target
    notes: list[str] = []
    if target.type == "cuda" and not torch_compat.has_cuda_build():
        traced_on = torch.device("cpu")
        notes.append(
            "captured on cpu for cuda: units, schedule and sizes hold, compute nodes may differ"
        )
    tensors, inputs = take_apart((args, kwargs), name=CALL)
    sizes = Sizes() if names is not None and any(names) else None
    mode = constant_folding_fake_mode(sizes)

    def fake(tensor: Tensor, shape: Any = None, stride: Any = None) -> Tensor:
        shape, stride = shape or tensor.shape, stride or tensor.stride()
        with mode:
            return torch.empty_strided(shape, stride, dtype=tensor.dtype, device=traced_on)

    if sizes is None or names is None:
        fakes = list(map(fake, tensors))
    else:
        shapes = symbolic_shapes(tensors, names, inputs.paths, sizes)
        fakes = [fake(tensor, *shape) for tensor, shape in zip(tensors, shapes, strict=True)]
    fakes = [
        f.requires_grad_(grad and t.requires_grad) for f, t in zip(fakes, tensors, strict=True)
    ]
    plain = contextlib.nullcontext if functional else mode.no_writes.watching
    traced = TracedModel(model, fake, inputs, grad, entry, precisions, plain)
    with (
        explain_errors(model),
        restore_random_state() as generators,
        cast_at_units(model, precisions),
    ):
        joint = _trace(traced, model, fakes, grad, functional)
    if not functional:
        mode.no_writes.require(joint.graph)
    needs_grad = [t.requires_grad for t in fakes]
    program = program_of_joint(
        joint, traced, inputs, needs_grad, training=model.training, sizes=sizes
    )
    place_casts(program, precisions)
    _check_gradients(program, traced)
    if sizes is not None:
        sizes.close_guards(inputs.paths)
    if generators:
        drawn = " and ".join(generators)
        notes.append(f"random numbers drawn from {drawn} in forward are baked in")
        warnings.warn(
            f"the forward draws random numbers from {drawn}; a captured program keeps those it "
            "saw. Draw them with torch, or pass them as arguments",
            stacklevel=4,
        )
    if traced.state_changes:
        changed = ", ".join(traced.state_changes[:5])
        notes.append(f"python state assigned in forward is baked in: {changed}")
        warnings.warn(
            f"the forward assigns {changed}; a captured program keeps the value it saw and does "
            "not repeat the assignment. Use a buffer for state that changes from step to step",
            stacklevel=4,
        )
    program.notes = tuple(notes)
    program.capture_device, program.device = traced_on.type, target.type
    assert traced.result is not None
    return Capture(program, inputs, traced.result)


def _trace(
    traced: TracedModel, model: nn.Module, fakes: list[Tensor], grad: bool, functional: bool
) -> Any:
    export = torch_trace.joint_graph_exporter()
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(torch_trace.preserve_node_meta()())
        stack.enter_context(annotate_nodes(model))
        stack.enter_context(tag_checkpoint_regions())
        stack.enter_context(stacked_layer_dropout())
        stack.enter_context(eager_kernels())
        stack.enter_context(transformers_as_in_eager())
        stack.enter_context(torch_trace.keep_matrix_checks())
        stack.enter_context(_quiet())
        stack.enter_context(pause_collections())
        stack.enter_context(torch_trace.leave_out_descriptions())
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

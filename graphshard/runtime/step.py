"""One captured program on one rank: its forward, its backward, and the values between them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from graphshard.capture.captured import Capture
from graphshard.capture.host_draws import random_states_kept
from graphshard.errors import RuntimeStateError
from graphshard.passes.drop_unused_tangents import DropUnusedTangents
from graphshard.passes.form_regions import FormRegions
from graphshard.program import ops
from graphshard.program.aliases import gathered_in_forward, read_in_backward, shared_outputs
from graphshard.program.collective import OneTensor
from graphshard.program.cut import cut, cut_backward, in_calling_order
from graphshard.program.program import BACKWARD, FORWARD, BufferEntry, Program
from graphshard.program.sizes import Sizes, WrongGuessError
from graphshard.progress import Progress, Stages
from graphshard.runtime.agreement import ANSWERED
from graphshard.runtime.calls import Fingerprint
from graphshard.runtime.cuda_graphs import GraphsFailed, graphs_of
from graphshard.runtime.lower import Bindings, put_back_on_error
from graphshard.runtime.lowered import LoweredGraph
from graphshard.runtime.origin import Replay, overwritten_by, tell
from graphshard.runtime.reduce import require_reducible
from graphshard.runtime.region import compile_forms
from graphshard.runtime.resident import ResidentShard
from graphshard.runtime.shards import refuse_parameters
from graphshard.runtime.streams import wait_for_copies
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.compat import SYMBOLIC
from graphshard.torch_private.random_ops import may_draw
from graphshard.torch_private.unbacked import is_unbacked
from graphshard.verify.rules import verify

# An operator of the graph reads no more of what it overwrites than the shape.
_OVERWRITE = (torch.ops.aten.copy.default, torch.ops.aten.copy_.default)


class Step:
    """A finished program, ready to run.

    saved: the forward values that backward uses.
    shards: aligned with the parameters of the program.
    inputs_to_grad, differentiable: the inputs that get a gradient and the outputs that may have
        one, as indices.
    grad_keys: the gradients that its backward accumulates instead of reducing them.
    cuda_graphs: None if it runs without them.
    on_non_finite: the policy's `check_finite`.
    draws, overwrites: whether it draws random numbers, and which arguments of forward it changes.
    replays: the types of the devices whose generators backward sets, to draw again.
    capture, program: what takes calls apart, and its program after all passes.
    """

    def __init__(self, capture: Capture, bindings: Bindings) -> None:
        self.capture = capture
        self.program = program = capture.program
        self.bindings = bindings
        require_reducible(program.graph, bindings.group)
        graphs = cut(program)
        self.saved = graphs.crossings
        self.forward_graph = LoweredGraph(graphs.forward, bindings, program.regions)
        self.fingerprint = self.forward_graph.fingerprint
        self.differentiable = [i for i, e in enumerate(program.outputs) if e.tangent is not None]
        # By the indices of outputs without a gradient. Of several outputs a call may use one, so
        # which backward they need is known when it runs.
        self._backwards: dict[tuple[int, ...], tuple[LoweredGraph, Program]] = {}
        if capture.guesses and self.fingerprint.lines and bindings.group.backend != "gloo":
            self.fingerprint += Fingerprint(("forward asks all ranks whether it guessed right",))
        if graphs.backward is not None:
            self.fingerprint += Fingerprint.of(graphs.backward, bindings.plan)
            if len(self.differentiable) == 1:
                lowered = LoweredGraph(graphs.backward, bindings, program.regions)
                self._backwards[()] = lowered, program
        self.shards = [bindings.shards[p.fqn] for p in program.params]
        self.inputs_to_grad = [i for i, e in enumerate(program.inputs) if e.requires_grad]
        self._tangent_strides = [
            _strides_of(program.outputs[i].tangent.meta["val"], program.sizes)  # type: ignore[union-attr]
            for i in self.differentiable
        ]
        read = read_in_backward(program, {value.name for value in self.saved})
        self._read_in_backward = [shard for shard in self.shards if shard.layout.fqn in read]
        gathered = gathered_in_forward(program)
        self._gathered = [
            shard
            for shard in self.shards
            if isinstance(shard, ResidentShard) and shard.layout.fqn in gathered
        ]
        self._input_index = {entry.path: index for index, entry in enumerate(program.inputs)}
        self.grad_keys = frozenset(
            (str(OneTensor.of(node).accumulated_as), str(OneTensor.of(node).param))
            for node in program.nodes()
            if node.target is ops.accumulate_grad
        )
        self.cuda_graphs = graphs_of(program, bindings.agreement, bindings.graph_pool)
        self.on_non_finite = bindings.plan.policy.check_finite
        self._on_host = bindings.plan.policy.offloads("params")
        self.draws = any(map(may_draw, program.nodes()))
        self.replays = frozenset(
            str(node.kwargs["device"])
            for node in program.nodes()
            if node.target is ops.set_random_state
        )
        self.overwrites = overwritten_by(program)
        self._changes_inputs = any(m.kind == "input" for m in program.mutations)
        self._shared_outputs = shared_outputs(program)
        self._read_buffers = {
            entry.fqn
            for entry in program.buffers
            if any(user.target not in _OVERWRITE for user in entry.node.users)
        }
        # On the device, so that autograd orders the gradients we set before the work that follows.
        self._anchor = torch.empty(0, device=bindings.group.device, requires_grad=True)
        refuse_parameters(_Call)

    def run(self, inputs: Sequence[Tensor], arguments: Any = ((), {})) -> Any:
        """The model's return value for a call.

        inputs: aligned with `program.inputs`, on the device of the group.
        arguments: those of the call, `(args, kwargs)`, to which forward may add tensors.
        """
        if self._changes_inputs:
            _require_no_shared_memory(inputs, self.program)
        call = _Call(self, inputs)
        if not self.differentiable:
            with torch.no_grad():
                call.forward()
            self.wait_for_copies()
            return self._returned(call.outputs, arguments)
        inputs_to_grad = [call.inputs[i] for i in self.inputs_to_grad]
        tracked = _StepFunction.apply(call, self._anchor, *inputs_to_grad)
        outputs, call.outputs = call.outputs, []
        for index, tensor in zip(self.differentiable, tracked, strict=True):
            outputs[index] = tensor
        return self._returned(outputs, arguments)

    def _returned(self, outputs: Sequence[Any], arguments: Any) -> Any:
        if self.capture.left:
            self.capture.leave(outputs, arguments, self.bindings.set_buffer)
        return self.capture.result.build(outputs)

    def compile(self, progress: Stages | None = None) -> None:
        """Compile the regions of forward, and of backward if there is one differentiable output."""
        forms = dict.fromkeys(form for graph in self.lowered_graphs for form in graph.forms())
        if not forms:
            return
        compile_forms([*forms], self.bindings.group, progress or Progress())

    # -- forward ------------------------------------------------------------------------------

    def param_inputs(self) -> list[Any]:
        """The arguments of the forward graph that are parameters."""
        stale = self.program.stale
        return [shard.program_input(stale) for shard in self.shards]

    def forward_args(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The arguments of the forward graph: shards, buffers and `inputs`."""
        args = self.param_inputs()
        for entry in self.program.buffers:
            args.append(entry.value if entry.constant else self._buffer(entry))
        args.extend(inputs)
        return args

    def _buffer(self, entry: BufferEntry) -> Tensor:
        buffer = self.bindings.buffer(entry.fqn)
        if entry.fqn not in self._read_buffers:
            return buffer
        if buffer.dtype != entry.node.meta["val"].dtype:
            raise RuntimeStateError(
                f"the forward reads buffer {entry.fqn!r}, which holds {buffer.dtype}; its program "
                f"is for {entry.node.meta['val'].dtype}. Assign the buffer values of that dtype"
            )
        if buffer.requires_grad and self.program.grad:
            raise RuntimeStateError(
                f"the forward reads buffer {entry.fqn!r}, which holds a value that carries a "
                "gradient, of an earlier call if forward assigned it; a program gives buffers no "
                "gradient. Assign a detached value to the buffer before the call"
            )
        return buffer

    def write_mutations(self, values: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Write the values that forward computed for buffers and inputs into these."""
        for entry, value in zip(self.program.mutations, values, strict=True):
            if entry.kind == "buffer":
                buffer = self.bindings.buffer(entry.name)
                if buffer.requires_grad or buffer.is_inference():  # as an earlier call left it
                    with torch.inference_mode(False):  # or no later call could write it
                        self.bindings.set_buffer(entry.name, value.detach().clone())
                else:
                    buffer.copy_(value)
            else:
                inputs[self._input_index[entry.name]].copy_(value)

    def detach_shared(self, outputs: list[Any]) -> list[Any]:
        """`outputs`, with an alias of each differentiable one that is an argument or another one.

        So autograd can set the `grad_fn` of each.
        """
        for index in self._shared_outputs:
            outputs[index] = outputs[index].detach()
        return outputs

    def note_gathered(self) -> None:
        """Note that all rows of the resident parameters that forward gathered are current."""
        for shard in self._gathered:
            shard.note_gathered()

    def versions_kept(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which gathers into resident parameters do not change their version counters.

        An earlier call may have saved the same buffers for its backward. A gather writes the rows
        that they have, unless a parameter was changed, which `require_unchanged` tells.
        """
        buffers = tuple([shard.full for shard in self._gathered])
        return torch_compat.versions_kept(buffers) if buffers else contextlib.nullcontext()

    def versions(self) -> list[tuple[int, int]]:
        """Counts of changes to each parameter that backward reads as it is then."""
        return [shard.changes() for shard in self._read_in_backward]

    def require_unchanged(self, versions: Sequence[tuple[int, int]]) -> None:
        """Check that the parameters that backward reads did not change since forward."""
        for shard, version in zip(self._read_in_backward, versions, strict=True):
            if shard.changes() != version:
                raise RuntimeStateError(
                    f"parameter {shard.layout.fqn!r} was changed between a forward and its "
                    "backward, which would compute a wrong gradient; run backward before the "
                    "optimizer's step"
                )

    # -- backward -----------------------------------------------------------------------------

    def backward_for(self, tangents: Sequence[Tensor | None]) -> tuple[LoweredGraph, Program]:
        """The backward for the outputs whose tangent is not None, lowered when first needed.

        And the program that it is of.
        """
        missing = tuple(i for i, t in zip(self.differentiable, tangents, strict=True) if t is None)
        if missing not in self._backwards:
            program = self._without_tangents(missing) if missing else self.program
            backward = LoweredGraph(
                cut_backward(program, self.saved), self.bindings, program.regions
            )
            compile_forms([*backward.forms()], self.bindings.group, Progress())
            self._backwards[missing] = backward, program
        return self._backwards[missing]

    def _without_tangents(self, missing: Collection[int]) -> Program:
        program = self.program.copy()
        drop = DropUnusedTangents(frozenset(missing))
        drop.apply(program, self.bindings.plan)
        if program.regions is not None:  # which have nodes that were dropped
            fell_back = program.regions.fell_back
            FormRegions().apply(program, self.bindings.plan)
            program.regions = replace(program.regions, fell_back=fell_back)
        if program.sizes is not None:
            program.sizes.require_closed(drop.name)
        verify(program, self.bindings.plan, after=drop.name)
        return program

    def with_traced_strides(
        self, tangents: Sequence[Tensor | None], sizes: tuple[int, ...]
    ) -> list[Tensor | None]:
        """`tangents`, copied where their strides differ from the traced ones for these `sizes`."""
        strides = [
            None if t is None else of(sizes, t)
            for t, of in zip(tangents, self._tangent_strides, strict=True)
        ]
        return [
            t
            if t is None or stride is None or t.stride() == stride
            else torch.empty_strided(t.shape, stride, dtype=t.dtype, device=t.device).copy_(t)
            for t, stride in zip(tangents, strides, strict=True)
        ]

    def add_to_grads(self, grads: Sequence[Tensor | None]) -> None:
        """Add reduced gradients, one per parameter, to the `.grad`s and run their hooks."""
        self.wait_for_copies()
        with torch.no_grad():
            for shard, grad in zip(self.shards, grads, strict=True):
                if grad is not None:
                    shard.add_to_grad(grad)

    def has_hooks(self) -> bool:
        """Whether `add_to_grads` may run hooks, in which this rank may fail by itself."""
        return any(
            torch_compat.tensor_hooks(shard.param)
            or torch_compat.post_accumulate_hooks(shard.param)
            for shard in self.shards
        )

    def wait_for_copies(self) -> None:
        """With parameters offloaded, return once the CPU may use them and their gradients."""
        if self._on_host:
            wait_for_copies(self.bindings.group.device)

    @property
    def lowered_graphs(self) -> tuple[LoweredGraph, ...]:
        """Forward, and every backward lowered so far."""
        return (self.forward_graph, *(backward for backward, _ in self._backwards.values()))


class _Call:
    """One call of a step, from forward to backward.

    saved_others: values saved for backward besides the tensors that autograd saves; None before
        forward and after backward.
    versions: counts of changes to the parameters that backward reads, after forward.
    grad_keys: the gradients that its backward accumulates instead of reducing them.
    replayed: its forward was a replay of a CUDA graph.
    replay: what it takes to run it again, if the step checks for NaN.
    """

    def __init__(self, step: Step, inputs: Sequence[Tensor]) -> None:
        self.step = step
        self.inputs = list(inputs)
        self.sizes = () if step.program.sizes is None else step.program.sizes.values(inputs)
        self.outputs: list[Any] = []
        self.saved_others: list[Any] | None = None
        self.versions: list[tuple[int, int]] = []
        self.grad_keys = step.grad_keys
        self.replayed = False
        self.replay: Replay | None = None
        accumulated = step.bindings.accumulated
        self._earlier = [weakref.ref(call) for call in accumulated.pending_calls()]
        if self.grad_keys:
            accumulated.add_pending(self)

    def forward(self) -> list[Tensor]:
        """Run forward and return the tensors saved for backward.

        Raises:
            WrongGuessError: of the answers to the model's questions that the program guessed, some
                are wrong on a rank. Only the numbers of this call are known to be otherwise, and
                all ranks raise it, so that all run again.
        """
        step, wrong, is_right = self.step, None, True
        bindings, grad = step.bindings, step.program.grad
        # Compared with the backward that follows, since ranks may differ in that alone.
        begins = step.fingerprint if step.forward_graph.fingerprint.lines else Fingerprint(())
        reports = step.on_non_finite is not None and not grad
        with (
            _no_autocast(bindings.group.device),
            bindings.agreement.half(
                FORWARD,
                begins,
                self._finish_forward,
                flag=bool(step.capture.guesses),
                ends=reports,
                alone=not (grad or reports),
            ) as part,
            step.versions_kept(),
        ):
            asks, put_back = any(part.flags), None
            if asks:
                bindings.group.here.begun = 0
                put_back = random_states_kept() if step.draws else None
            args = step.forward_args(self.inputs)
            if step.on_non_finite is not None:
                self.replay = Replay.of(step, self.inputs, args)
            try:
                run = step.forward_graph.run if step.cuda_graphs is None else self._run_graphs
                outputs, mutations, tensors, self.saved_others = run(args)
            except WrongGuessError as error:  # which refers to what this run made
                wrong, is_right = error.number, False
                self._finish_forward()
        if asks and not self._is_right_everywhere(is_right, meets=bool(begins.lines)):
            if put_back is not None:
                put_back()
            bindings.accumulated.remove_pending(self)  # its backward never comes
            raise WrongGuessError(wrong)
        if not grad:
            self._tell_found(step.program)
        step.note_gathered()
        step.write_mutations(mutations, self.inputs)
        self.outputs = list(outputs)
        self.versions = step.versions()
        self.inputs = []
        return tensors

    def _run_graphs(self, args: list[Any]) -> Any:
        """As `LoweredGraph.run`, as a CUDA graph where that is possible."""
        step, graphs, count = self.step, self.step.cuda_graphs, len(self.inputs)
        run = step.forward_graph.run
        if graphs is not None and graphs.replays(args, count):
            try:
                with step.bindings.group.here.capturing():
                    outputs, mutations = graphs.forward(self, run, args, count)
            except GraphsFailed:
                args = step.forward_args(self.inputs)
            else:  # the values saved stay in the memory pool of the graphs
                self.replayed = True
                return outputs, mutations, [], []
        return run(args)

    def _is_right_everywhere(self, is_right: bool, *, meets: bool) -> bool:
        """Whether no rank guessed wrong, if ranks meet in this forward; else, this one."""
        agreement = self.step.bindings.agreement
        return not agreement.any_rank(not is_right, ANSWERED) if meets else is_right

    def _finish_forward(self) -> None:
        with self.step.versions_kept():
            self.step.forward_graph.finish(self.step.param_inputs())
        self.step.note_gathered()

    def backward(
        self, ctx: Any, tangents: Sequence[Tensor | None], sets_grads: bool
    ) -> list[Tensor | None]:
        """Run backward and return the gradients of the inputs.

        ctx: holds the tensors that autograd saved, and gives them away.
        tangents: the gradients of the differentiable outputs, None where there is none.
        sets_grads: add the gradients of parameters to their `.grad`.
        """
        try:
            return self._backward(ctx, tangents, sets_grads)
        except Exception as error:
            if self.step.fingerprint.lines:  # else ranks never meet
                try:
                    self.step.bindings.agreement.give_up(error)
                finally:
                    del error
            raise

    def _backward(
        self, ctx: Any, tangents: Sequence[Tensor | None], sets_grads: bool
    ) -> list[Tensor | None]:
        step = self.step
        if self.saved_others is None:
            raise RuntimeStateError(
                "backward ran a second time through one forward of a sharded module, whose "
                "gathered parameters are freed by then; call the module again before it"
            )
        step.require_unchanged(self.versions)
        saved = list(ctx.saved_tensors)
        torch_compat.release_saved_tensors(ctx)
        accumulated = step.bindings.accumulated
        if not self.grad_keys:
            accumulated.require_not_pending(self._earlier)
        backward, program = step.backward_for(tangents)
        agreement, device = step.bindings.agreement, step.bindings.group.device
        accumulation = accumulated.whole() if sets_grads else accumulated.paused()
        finish = partial(self._finish_backward, backward)
        with (
            _no_autocast(device),
            accumulation,
            agreement.half(BACKWARD, backward.fingerprint, finish, ends=True) as part,
            put_back_on_error(step.replays, device) if step.replays else contextlib.nullcontext(),
        ):
            accumulated.remove_pending(self)  # it cannot run again, whatever comes
            saved += self.saved_others
            self.saved_others = None  # no name here may keep what backward frees
            tangents = step.with_traced_strides(tangents, self.sizes)
            if self.replay is not None:
                self.replay.tangents = list(tangents)
            part.flag = sets_grads and step.has_hooks()
            if self.replayed and step.cuda_graphs is not None:
                with step.bindings.group.here.capturing():
                    grads, input_grads = step.cuda_graphs.backward(self, backward.run, tangents)
            else:
                saved += tangents
                grads, input_grads = backward.run(saved)
        self._tell_found(program)
        if sets_grads and any(part.flags):
            with agreement.part(text="the hooks of gradients", keeps=True):
                step.add_to_grads(grads)
        elif sets_grads:
            step.add_to_grads(grads)
        return [input_grads[i] for i in step.inputs_to_grad]

    def _finish_backward(self, backward: LoweredGraph) -> None:
        step = self.step
        params = dict(
            zip([p.node.name for p in step.program.params], step.param_inputs(), strict=True)
        )
        backward.finish([params.get(value.name) for value in in_calling_order(step.saved)])

    def _tell_found(self, program: Program) -> None:
        """Raise or warn, as the policy says, if the report of `program` found something."""
        step, replay, self.replay = self.step, self.replay, None
        if replay is not None and (found := step.bindings.reports.take()) is not None:
            with _no_autocast(step.bindings.group.device):
                tell(step, program, replay, found, raises=step.on_non_finite == "error")


class _StepFunction(torch.autograd.Function):
    """A whole forward as one function of autograd.

    Its inputs are the model's inputs that need gradients, and an anchor, so that outputs require
    grad even if no input does. Parameters are not among them: `Shard.add_to_grad` sets their
    gradients.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *inputs: Tensor) -> Any:
        step = call.step
        ctx.set_materialize_grads(False)
        tensors = call.forward()
        ctx.call = call
        ctx.save_for_backward(*tensors)
        outputs = step.detach_shared(call.outputs)
        tracked = tuple(outputs[i] for i in step.differentiable)
        for index in step.differentiable:
            outputs[index] = None  # or the call would keep its own autograd graph alive
        return tracked

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeStateError(
                "a sharded module has no second derivatives: call backward (or autograd.grad) "
                "without create_graph=True"
            )
        call: _Call = ctx.call
        # autograd.grad does not accumulate into the anchor, which stands for the parameters.
        sets_grads = torch_compat.engine_accumulates(ctx.next_functions[0][0])
        return None, None, *call.backward(ctx, tangents, sets_grads)


def _require_no_shared_memory(inputs: Sequence[Tensor], program: Program) -> None:
    """Check that no input shares memory with one that the forward changes in place.

    In eager the change would show in the other input as well, and a program does not have that.
    """
    changed = {m.name for m in program.mutations if m.kind == "input"}
    seen: dict[int, str] = {}
    for entry, tensor in zip(program.inputs, inputs, strict=True):
        other = seen.setdefault(tensor.untyped_storage().data_ptr(), entry.path)
        if other != entry.path and changed & {other, entry.path}:
            raise RuntimeStateError(
                f"inputs {other} and {entry.path} share memory, and the forward changes one of "
                "them in place; pass a clone of one"
            )


def _no_autocast(device: torch.device) -> Any:
    """A context without autocast, whose casts are in the program already."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()


Strides = Callable[[tuple[int, ...], Tensor], tuple[int, ...]]
"""From the symbolic sizes of a call, and a tangent, off which sizes are read that depend on values,
to the strides that the tangent was traced with, on which backward relies."""


def _strides_of(val: Tensor, sizes: Sizes | None) -> Strides:
    traced = val.stride()
    if sizes is None or not any(isinstance(stride, SYMBOLIC) for stride in traced):
        return lambda _, __: traced
    # A size such as 4*u0 + 1 tells the number u0.
    read: dict[Any, tuple[int, int, int]] = {}
    for dim, size in enumerate(val.shape):
        expression = torch_compat.number_or_expression(size)
        for symbol in filter(is_unbacked, expression.free_symbols):
            factor = expression.coeff(symbol)
            rest = expression - factor * symbol
            if factor.is_Integer and rest.is_Integer:
                read[symbol] = dim, int(factor), int(rest)
    evaluate = sizes.evaluator(traced, read)

    def strides(values: tuple[int, ...], tangent: Tensor) -> tuple[int, ...]:
        numbers = [(tangent.size(dim) - rest) // factor for dim, factor, rest in read.values()]
        return evaluate(*values, *numbers)

    return strides

"""One captured program on one rank: its forward, its backward, and what goes between them."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from graphshard.capture.entry import Capture
from graphshard.errors import RuntimeStateError
from graphshard.passes.drop_unused_tangents import DropUnusedTangents
from graphshard.passes.form_regions import FormRegions
from graphshard.program import ops
from graphshard.program.aliases import gather_waits
from graphshard.program.collective import Collective, OneTensor, params_of
from graphshard.program.cut import cut, cut_backward
from graphshard.program.program import Program
from graphshard.progress import Progress, Stages
from graphshard.runtime.cuda_graphs import GraphsFailed, graphs_of
from graphshard.runtime.host_copies import settle
from graphshard.runtime.lowered import Bindings, LoweredGraph
from graphshard.runtime.region import compile_forms
from graphshard.runtime.resident import ResidentShard
from graphshard.runtime.shards import Shard
from graphshard.torch_private import compat as torch_compat
from graphshard.verify.rules import verify


def tangent_strides(program: Program) -> Callable[[tuple[int, ...]], list[tuple[int, ...]]]:
    """From a call's symbolic sizes to the strides of the tangents, as traced."""
    strides = [o.tangent.meta["val"].stride() for o in program.outputs if o.tangent is not None]
    if program.sizes is None:
        return lambda sizes: strides
    flat = program.sizes.evaluator([size for stride in strides for size in stride])

    def at(sizes: tuple[int, ...]) -> list[tuple[int, ...]]:
        numbers = iter(flat(*sizes))
        return [tuple(islice(numbers, len(stride))) for stride in strides]

    return at


def with_stride(tensor: Tensor, stride: tuple[int, ...]) -> Tensor:
    """A copy of `tensor` that lies as `stride` says."""
    result = torch.empty_strided(tensor.shape, stride, dtype=tensor.dtype, device=tensor.device)
    return result.copy_(tensor)


class Step:
    """A finished program, ready to run.

    Args:
        capture: the way in and out of it.
        program: `capture.program` after all passes.
        bindings: what it runs on.
    """

    def __init__(self, capture: Capture, program: Program, bindings: Bindings) -> None:
        self.capture = capture
        self.program = program
        self.bindings = bindings
        halves = cut(program)
        self.crossings = halves.crossings
        self.forward_half = LoweredGraph(halves.forward, bindings, program.regions)
        self.fingerprint = self.forward_half.fingerprint
        self._backward_halves: dict[tuple[int, ...], LoweredGraph] = {}
        if halves.backward is not None:
            full = LoweredGraph(halves.backward, bindings, program.regions)
            self._backward_halves[()] = full
            self.fingerprint = self.fingerprint + full.fingerprint
        self.shards = [bindings.shards[p.fqn] for p in program.params]
        self.inputs_to_grad = [i for i, e in enumerate(program.inputs) if e.requires_grad]
        self.differentiable = [i for i, e in enumerate(program.outputs) if e.tangent is not None]
        self._tangent_strides = tangent_strides(program)
        self._reread = _reread(self.shards, program, {c.name for c in self.crossings})
        resident = [shard for shard in self.shards if isinstance(shard, ResidentShard)]
        self._gathered = [shard for shard in resident if shard.layout.fqn in program.stale]
        self._input_index = {entry.path: index for index, entry in enumerate(program.inputs)}
        self.keeps = frozenset(
            (str(OneTensor.of(node).kept_as), str(OneTensor.of(node).param))
            for node in program.nodes()
            if node.target is ops.keep
        )
        self.graphs = graphs_of(program, bindings.group)
        self._changes_inputs = any(m.kind == "input" for m in program.mutations)
        self._shared_outputs = _shared_outputs(program)
        # On the device, so that autograd orders the gradients we set before what follows backward.
        self._anchor = torch.empty(0, device=bindings.group.device, requires_grad=True)

    def run(self, inputs: Sequence[Tensor]) -> Any:
        """The model's return value for a call.

        Args:
            inputs: aligned with `program.inputs`, on the device of the group.

        Raises:
            CollectiveError: the ranks disagree, or one of them failed.
        """
        if self._changes_inputs:
            _require_apart(inputs, self.program)
        call = _Call(self, inputs)
        if not self.differentiable:
            with torch.no_grad():
                call.forward()
            self.settle()
            return self.capture.unflatten_outputs(call.outputs)
        wanted = [call.inputs[i] for i in self.inputs_to_grad]
        tracked = _StepFunction.apply(call, self._anchor, *wanted)
        outputs, call.outputs = call.outputs, []
        for index, tensor in zip(self.differentiable, tracked, strict=True):
            outputs[index] = tensor
        return self.capture.unflatten_outputs(outputs)

    def compile(self, progress: Stages | None = None) -> None:
        """Compile the regions of forward and, if it surely is the one to run, of backward.

        Where the model has several differentiable outputs, those of backward are compiled once it
        is known which of them get gradients.
        """
        halves = [self.forward_half]
        if len(self.differentiable) == 1:
            halves += self._backward_halves.values()
        forms = dict.fromkeys(form for half in halves for form in half.forms())
        if not forms:
            return
        compile_forms([*forms], self.bindings.group, progress or Progress())

    # -- forward ------------------------------------------------------------------------------

    def forward_args(self, inputs: Sequence[Tensor]) -> list[Any]:
        """Shards, buffers and `inputs`, as the forward half takes them."""
        stale = self.program.stale
        args: list[Any] = [shard.entering(stale) for shard in self.shards]
        for entry in self.program.buffers:
            args.append(entry.value if entry.constant else self.bindings.buffer(entry.fqn))
        args.extend(inputs)
        return args

    def write_mutations(self, values: Sequence[Tensor], inputs: Sequence[Tensor]) -> None:
        """Give buffers and inputs the values that forward computed for them."""
        for entry, value in zip(self.program.mutations, values, strict=True):
            if entry.kind == "buffer":
                self.bindings.buffer(entry.name).copy_(value)
            else:
                inputs[self._input_index[entry.name]].copy_(value)

    def shared_outputs(self, outputs: list[Any]) -> list[Any]:
        """`outputs` in which autograd may mark every differentiable tensor as its own."""
        for index in self._shared_outputs:
            outputs[index] = outputs[index].detach()
        return outputs

    def note_gathered(self) -> None:
        """Tell the resident parameters that forward gathered that they are current."""
        for shard in self._gathered:
            shard.gathered()

    def versions(self) -> list[tuple[int, int]]:
        """Counts of changes to the parameters that backward reads again."""
        return [shard.changes() for shard in self._reread]

    def require_unchanged(self, versions: Sequence[tuple[int, int]]) -> None:
        """Check that the parameters are as they were in forward.

        Raises:
            RuntimeStateError: one was changed in place.
        """
        for shard, version in zip(self._reread, versions, strict=True):
            if shard.changes() != version:
                raise RuntimeStateError(
                    f"parameter {shard.layout.fqn!r} was changed between a forward and its "
                    "backward, which would compute a wrong gradient; run backward before the "
                    "optimizer's step"
                )

    # -- backward -----------------------------------------------------------------------------

    def backward_half(self, tangents: Sequence[Tensor | None]) -> LoweredGraph:
        """The backward for the outputs that got a gradient, derived when met and kept."""
        missing = tuple(
            index for index, t in zip(self.differentiable, tangents, strict=True) if t is None
        )
        half = self._backward_halves.get(missing)
        if half is None:
            program = self.program.copy()
            drop = DropUnusedTangents(frozenset(missing))
            drop.apply(program, self.bindings.plan)
            if program.regions is not None:  # there are other nodes now
                fell_back = program.regions.fell_back
                FormRegions().apply(program, self.bindings.plan)
                program.regions = replace(program.regions, fell_back=fell_back)
            if program.sizes is not None:
                program.sizes.require_closed(drop.name)
            verify(program, self.bindings.plan, after=drop.name)
            half = LoweredGraph(
                cut_backward(program, self.crossings), self.bindings, program.regions
            )
            compile_forms([*half.forms()], self.bindings.group, Progress())
            self._backward_halves[missing] = half
        return half

    def sizes_of(self, inputs: Sequence[Tensor]) -> tuple[int, ...]:
        """What the program's symbolic sizes are in a call; () if it has none."""
        return () if self.program.sizes is None else self.program.sizes.values(inputs)

    def as_traced(
        self, tangents: Sequence[Tensor | None], sizes: tuple[int, ...]
    ) -> list[Tensor | None]:
        """`tangents` with the strides the program was traced for, at these `sizes`."""
        return [
            t if t is None or t.stride() == stride else with_stride(t, stride)
            for t, stride in zip(tangents, self._tangent_strides(sizes), strict=True)
        ]

    def accumulate(self, grads: Sequence[Tensor | None]) -> None:
        """Add reduced gradients to the parameters' `.grad` and run their hooks."""
        self.settle()
        with torch.no_grad():
            for shard, grad in zip(self.shards, grads, strict=True):
                if grad is not None:
                    shard.accumulate(grad)

    def settle(self) -> None:
        """With parameters offloaded, return once the CPU may touch them and their gradients."""
        if self.bindings.plan.policy.offloads("params"):
            settle(self.bindings.group.device)

    @property
    def halves(self) -> tuple[LoweredGraph, ...]:
        """The forward half and every backward half lowered so far."""
        return (self.forward_half, *self._backward_halves.values())


class _Call:
    """One call of a step, from forward to backward."""

    def __init__(self, step: Step, inputs: Sequence[Tensor]) -> None:
        self.step = step
        self.inputs = list(inputs)
        self.sizes = step.sizes_of(inputs)
        self.outputs: list[Any] = []
        self.others: list[Any] | None = None
        self.versions: list[tuple[int, int]] = []
        self.keeps = step.keeps
        self.replayed = False  # its forward, as a CUDA graph
        kept = step.bindings.kept
        self._before = [weakref.ref(call) for call in kept.to_come()]  # which are to keep first
        if self.keeps:
            kept.expect(self)

    def forward(self) -> list[Tensor]:
        """Run forward; returns the tensors to save for backward."""
        step = self.step
        bindings = step.bindings
        if step.forward_half.fingerprint.lines:
            # The backward to come is compared as well, since it shows what forward cannot.
            bindings.agreement.require(step.fingerprint)
        with _no_autocast(bindings.group.device):
            outputs, mutations, tensors, self.others = self._computed()
        step.note_gathered()
        step.write_mutations(mutations, self.inputs)
        self.outputs = list(outputs)
        self.versions = step.versions()
        self.inputs = []
        return tensors

    def _computed(self) -> tuple[Any, Any, Any, Any]:
        """What the forward half gives; of what it saves nothing if that stays in a graph's pool."""
        step = self.step
        args = step.forward_args(self.inputs)
        graphs, inputs = step.graphs, len(self.inputs)
        if graphs is not None and graphs.takes(self, args, inputs):
            try:
                outputs, mutations = graphs.forward(self, step.forward_half.run, args, inputs)
            except GraphsFailed:
                args = step.forward_args(self.inputs)
            else:
                self.replayed = True
                return outputs, mutations, [], []
        return step.forward_half.run(args)

    def backward(
        self, saved: list[Any], tangents: Sequence[Tensor | None], accumulates: bool
    ) -> list[Tensor | None]:
        """Run backward on the tensors saved; returns the gradients of the inputs.

        `accumulates`: add those of the parameters to their `.grad`, too.
        """
        step = self.step
        if self.others is None:
            raise RuntimeStateError(
                "backward ran a second time through one forward of a sharded module, whose "
                "gathered parameters are freed by then; call the module again before it"
            )
        step.require_unchanged(self.versions)
        kept = step.bindings.kept
        if not self.keeps:
            kept.require_arrived(self._before)
        half = step.backward_half(tangents)
        step.bindings.agreement.require(half.fingerprint)
        saved += self.others
        traced = step.as_traced(tangents, self.sizes)
        self.others = None
        accumulating = contextlib.nullcontext() if accumulates else kept.paused()
        with _no_autocast(step.bindings.group.device), accumulating:
            if self.replayed and step.graphs is not None:
                grads, input_grads = step.graphs.backward(half.run, traced)
            else:
                saved += traced
                grads, input_grads = half.run(saved)
        kept.arrived(self)
        if accumulates:
            step.accumulate(grads)
        return [input_grads[i] for i in step.inputs_to_grad]


class _StepFunction(torch.autograd.Function):
    """Stands in autograd's graph for a whole forward.

    Its inputs are an anchor, so that outputs require grad whatever the inputs are, and the inputs
    that need gradients. The parameters are not among them: their gradients are set on the shards.
    """

    @staticmethod
    def forward(ctx: Any, call: _Call, anchor: Tensor, *inputs: Tensor) -> Any:
        step = call.step
        ctx.set_materialize_grads(False)
        tensors = call.forward()
        ctx.call = call
        ctx.save_for_backward(*tensors)
        outputs = step.shared_outputs(call.outputs)
        tracked = tuple(outputs[i] for i in step.differentiable)
        for index in step.differentiable:
            outputs[index] = None  # else the call would hold its own graph alive
        return tracked

    @staticmethod
    def backward(ctx: Any, *tangents: Tensor | None) -> Any:
        if torch.is_grad_enabled():
            raise RuntimeStateError(
                "a sharded module has no second derivatives: call backward (or autograd.grad) "
                "without create_graph=True"
            )
        call: _Call = ctx.call
        saved = list(ctx.saved_tensors) if call.others is not None else []
        torch_compat.release_saved_tensors(ctx)
        # The anchor stands for the parameters: autograd.grad asks for neither.
        accumulates = torch_compat.engine_accumulates(ctx.next_functions[0][0])
        return None, None, *call.backward(saved, tangents, accumulates)


def _reread(shards: Sequence[Shard], program: Program, crossing: Collection[str]) -> list[Shard]:
    """The parameters that backward reads as they are then: those it gets as they entered (shards
    to gather again, copies that all ranks keep), and those gathered into such copies.
    """
    names = {p.fqn for p in program.params if p.node.name in crossing}
    for wait in gather_waits(program):
        gather = ops.collective_of(wait)
        if wait.name in crossing and Collective.of(gather).in_place:
            names.update(params_of(gather))
    return [shard for shard in shards if shard.layout.fqn in names]


def _require_apart(inputs: Sequence[Tensor], program: Program) -> None:
    """Check that no input shares memory with one that the forward changes in place.

    Raises:
        RuntimeStateError: one does; in eager, code would see the change through it.
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


def _shared_outputs(program: Program) -> list[int]:
    """Differentiable outputs that are ends of the program, or other outputs as well."""
    seen: set[Any] = {p.node for p in program.params} | {b.node for b in program.buffers}
    seen |= {i.node for i in program.inputs}
    shared = []
    for index, value in enumerate(program.results().outputs):
        if value in seen and program.outputs[index].tangent is not None:
            shared.append(index)
        seen.add(value)
    return shared


def _no_autocast(device: torch.device) -> Any:
    """The casts autocast made are in the program; it must not make them again."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return contextlib.nullcontext()

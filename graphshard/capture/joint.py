"""From AOT's joint graph, whose ends are told by descriptors, to a `Program` with its tables."""

from __future__ import annotations

import re
from collections import ChainMap
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, fx

from graphshard.capture.annotation import CALLS, FQN, KEEP, LINE, REGION
from graphshard.capture.as_eager import keep_lstm_workspaces
from graphshard.capture.borders import RepetitionError
from graphshard.capture.both_ways import GATE
from graphshard.capture.structure import Structure
from graphshard.capture.templates import Copies, is_backward, notes_of
from graphshard.capture.traced_module import IDENTITY, TracedModel
from graphshard.errors import CaptureError
from graphshard.program.program import (
    BACKWARD,
    FORWARD,
    BufferEntry,
    InputEntry,
    MutationEntry,
    OutputEntry,
    ParamEntry,
    Program,
    Results,
)
from graphshard.program.size_nodes import SizeNodes
from graphshard.program.sizes import Sizes, hint, is_size
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.compat import SYMBOLIC, same_sizes
from graphshard.torch_private.unbacked import depends_on_values, drop_unread_items

_aten = torch.ops.aten


# A constant of the model's code, which a step must not lend out for others to write into.
_ALWAYS_A_COPY: dict[Any, Any] = {_aten.lift_fresh.default: _aten.lift_fresh_copy.default}


def program_of_joint(
    joint: fx.GraphModule,
    traced: TracedModel,
    inputs: Structure,
    input_needs_grad: Sequence[bool],
    *,
    training: bool,
    sizes: Sizes | None = None,
) -> Program:
    """Rebuild the joint graph with readable names, in table order, and fill the tables.

    With symbolic `sizes`, each size is computed by one node, in forward where it can be.
    """
    return _Builder(joint, traced, inputs, input_needs_grad, sizes).build(training)


class _Builder:
    def __init__(
        self,
        joint: fx.GraphModule,
        traced: TracedModel,
        inputs: Structure,
        input_needs_grad: Sequence[bool],
        sizes: Sizes | None,
    ) -> None:
        self.input_needs_grad = input_needs_grad
        self.sizes = sizes
        self.joint = joint
        self.traced = traced
        self.inputs = inputs
        self.graph = fx.Graph()
        self.new: dict[fx.Node, Any] = {}
        self.copies = Copies(joint, traced.repetition)
        self.read_for_sizes: list[fx.Node] = []
        self.fqn = ""  # of the module that the node before belongs to
        self.desc = torch_trace.descriptors()
        self.ends = {
            _end_key(node.meta["desc"], self.desc): node
            for node in joint.graph.nodes
            if node.op == "placeholder"
        }

    def build(self, training: bool) -> Program:
        params = self._params()
        buffers = self._buffers() + self._constants()
        inputs = self._inputs()
        tangents = self._tangents()
        if self.sizes is None:
            self._copy_nodes()
        else:
            guessed = {s for each in self.sizes.guesses for s in each.condition.free_symbols}
            self.sizes.unread = drop_unread_items(
                self.joint.graph, self.sizes.environment, self.sizes.asked, guessed
            )
            self._equate_tangents(tangents)
            self._copy_nodes(SizeNodes(self.graph, self.sizes, [entry.node for entry in inputs]))
        results, mutations, outputs = self._results(tangents)
        keep_lstm_workspaces(self.graph)
        output = self.graph.output(results.as_args()[0])
        self.copies.erase_unused(self.read_for_sizes)
        grad = any(entry.tangent is not None for entry in outputs)
        output.meta = {"phase": BACKWARD if grad else FORWARD, FQN: ""}
        return Program(
            graph=self.graph,
            params=params,
            buffers=buffers,
            inputs=inputs,
            outputs=outputs,
            mutations=mutations,
            training=training,
            grad=grad,
            sizes=self.sizes,
        )

    # -- placeholders -----------------------------------------------------------------------

    def _placeholder(
        self, key: tuple[str, Any], name: str, fqn: str, phase: str = FORWARD
    ) -> fx.Node:
        old = self.ends[key]
        node = _placeholder_named(self.graph, name)
        node.meta = {"val": old.meta["val"], "phase": phase, FQN: fqn}
        self.new[old] = node
        return node

    def _params(self) -> tuple[ParamEntry, ...]:
        entries = []
        for index, owner in enumerate(self.traced.model_params):
            node = self._placeholder(("param", index), f"p_{owner.fqn}", _module(owner.fqn))
            tensor = owner.tensor
            entries.append(
                ParamEntry(
                    fqn=owner.fqn,
                    names=owner.names,
                    shape=tuple(tensor.shape),
                    stride=tuple(node.meta["val"].stride()),
                    dtype=tensor.dtype,
                    requires_grad=tensor.requires_grad,
                    node=node,
                )
            )
        return tuple(entries)

    def _buffers(self) -> tuple[BufferEntry, ...]:
        return tuple(
            BufferEntry(
                owner.fqn,
                owner.names,
                self._placeholder(("buffer", index), f"b_{owner.fqn}", _module(owner.fqn)),
            )
            for index, owner in enumerate(self.traced.model_buffers)
        )

    def _constants(self) -> tuple[BufferEntry, ...]:
        entries: list[BufferEntry] = []
        for old in self.joint.graph.nodes:
            if old.op != "get_attr":
                continue
            value = getattr(self.joint, old.target)
            if not isinstance(value, Tensor):
                raise CaptureError(
                    f"the step holds a nested graph ({old.target}), which a program cannot; "
                    "replace torch.cond, flex_attention and the like by plain operators"
                    if isinstance(value, fx.GraphModule)
                    else f"the step holds a {type(value).__name__}, and a program holds tensors "
                    "and numbers; leave out the operator that takes it"
                )
            self._refuse_weights(value)
            if value.device.type == "meta":
                raise CaptureError(
                    f"the model closes over a plain tensor of shape {tuple(value.shape)} on the "
                    "meta device, which has no values; register it as a buffer"
                )
            name = f"constant_{len(entries)}"
            node = _placeholder_named(self.graph, name)
            node.meta = {"val": old.meta["val"], "phase": FORWARD, FQN: ""}
            self.new[old] = node
            entries.append(BufferEntry(name, (name,), node, constant=True, value=value))
        return tuple(entries)

    def _refuse_weights(self, value: Tensor) -> None:
        past = (
            "past the module that owns it (through a closure, a list, a view kept as an attribute "
            "or another object), where its shard cannot be put in its place; reach it through the "
            "module's attribute, or hold it in an nn.ParameterList"
        )
        for name, tensor in self.traced.weights():
            if value is tensor or _same_memory(value, tensor):
                raise CaptureError(f"the forward reaches {name!r} {past}")
        if value.requires_grad:
            raise CaptureError(
                f"the forward uses a tensor of shape {tuple(value.shape)} that requires gradients "
                "but is neither a parameter nor an input, so it would never be trained; make it an "
                f"nn.Parameter of a module, or detach it. If it is one, it is reached {past}"
            )

    def _inputs(self) -> tuple[InputEntry, ...]:
        entries = []
        for index, path in enumerate(self.inputs.paths):
            node = self._placeholder(("input", index), f"in_{path}", "")
            entries.append(InputEntry(path, node, self.input_needs_grad[index]))
        return tuple(entries)

    def _tangents(self) -> dict[int, fx.Node]:
        for kind, index in self.ends:
            if kind == "mutation_tangent":
                self._refuse_differentiable_mutation(index)
        indices = sorted(index for kind, index in self.ends if kind == "tangent")
        return {
            index: self._placeholder(("tangent", index), f"tangent_{index}", "", BACKWARD)
            for index in indices
        }

    def _equate_tangents(self, tangents: dict[int, fx.Node]) -> None:
        """Give the gradients of outputs the outputs' own sizes, where these depend on values.

        A trace makes the gradients in its first run of the model, with the symbols of that run.
        """
        assert self.sizes is not None
        vals = [node.meta["val"] for node in tangents.values()]
        if not any(depends_on_values(size) for val in vals for size in val.shape):
            return
        self.sizes.equate_runs()
        output = self.joint.graph.output_node()
        values = cast("list[Any]", output.args[0])
        for old, desc in zip(values, output.meta["desc"], strict=True):
            if isinstance(desc, self.desc.PlainAOTOutput) and desc.idx in tangents:
                tangent, val = tangents[desc.idx].meta["val"], old.meta["val"]
                if not same_sizes(tangent.shape, val.shape):
                    raise CaptureError(
                        "two runs of the forward gave sizes that depend on values in different "
                        "orders; return no tensor of such a size, or only a detached one"
                    )

    # -- nodes ------------------------------------------------------------------------------

    def _copy_nodes(self, size_nodes: SizeNodes | None = None) -> None:
        add = self._copy_node if size_nodes is None else partial(self._copy_sized, size_nodes)
        for old in self.joint.graph.nodes:
            if old.op != "call_function":
                continue
            stands_for = self.copies.of(old, self.new, add)
            if stands_for is not None:
                self.new[old] = stands_for
            elif old.target in (IDENTITY, GATE):
                self.new[old] = self.new[old.args[0]]
            elif size_nodes is None:
                self.new[old] = self._copy_node(old, self.new, notes_of(old))
            else:
                fqn = notes_of(old).get(FQN, self.fqn)
                size = size_nodes.before(old, self.new, fqn, _phase(old))
                copied = self._copy_node(old, self.new, notes_of(old)) if size is None else size
                self.new[old] = copied
                if size is not None:
                    self.read_for_sizes += (self.new[each] for each in old.all_input_nodes)
                size_nodes.after(copied)
        if size_nodes is not None:
            size_nodes.finish()

    def _copy_sized(
        self,
        size_nodes: SizeNodes,
        old: fx.Node,
        new: Mapping[fx.Node, Any],
        notes: Mapping[str, Any],
    ) -> fx.Node:
        sizes = {node: size_nodes.of(node) for node in old.all_input_nodes if is_size(node)}
        if None in sizes.values():
            raise RepetitionError(f"{old} in a block reads a size that no node computed before")
        copied = self._copy_node(old, ChainMap(sizes, new), notes)  # type: ignore[arg-type]
        size_nodes.after(copied)
        return copied

    def _copy_node(
        self, old: fx.Node, new: Mapping[fx.Node, Any], notes: Mapping[str, Any]
    ) -> fx.Node:
        # Nodes that accumulate gradients carry no name; they belong to what ran before.
        self.fqn = notes.get(FQN, self.fqn)
        target: Any = _ALWAYS_A_COPY.get(old.target, old.target)
        name = getattr(target, "overloadpacket", target).__name__
        node = self.graph.create_node("call_function", target, name=name)
        # Given to `create_node`, every argument would be looked through for what is no argument.
        node.args = fx.map_arg(old.args, new.__getitem__)
        if kwargs := _explicit_kwargs(old):
            node.kwargs = fx.map_arg(kwargs, new.__getitem__)
        node.meta = {"val": old.meta.get("val"), "phase": _phase(old), FQN: self.fqn}
        node.meta |= {key: notes[key] for key in (CALLS, LINE, REGION, KEEP) if key in notes}
        return node

    # -- results ----------------------------------------------------------------------------

    def _results(
        self, tangents: dict[int, fx.Node]
    ) -> tuple[Results, tuple[MutationEntry, ...], tuple[OutputEntry, ...]]:
        paths = self.traced.output_paths
        results = Results(
            outputs=[None] * len(paths),
            mutations=[],
            grads=[None] * len(self.traced.model_params),
            input_grads=[None] * len(self.inputs.paths),
        )
        mutations: list[MutationEntry] = []
        output = self.joint.graph.output_node()
        values = cast("list[Any]", output.args[0])
        for old, desc in zip(values, output.meta["desc"], strict=True):
            value = self.new[old] if isinstance(old, fx.Node) else old
            if desc is None:  # stands for the gradient of what cannot have one
                continue
            if isinstance(desc, self.desc.GradAOTOutput):
                kind, index = _end_key(desc.grad_of, self.desc)
                if kind == "param":
                    if isinstance(value, fx.Node):
                        _give_shape(value, self.traced.model_params[index].tensor)
                    results.grads[index] = value
                elif kind == "input":
                    results.input_grads[index] = value
            elif isinstance(desc, self.desc.InputMutationAOTOutput):
                mutations.append(self._mutation(desc.mutated_input))
                results.mutations.append(value)
            elif isinstance(desc, self.desc.PlainAOTOutput):
                results.outputs[desc.idx] = value
            else:
                raise CaptureError(
                    f"the step has an output of a kind a program cannot hold ({desc.expr()})"
                )
        outputs = tuple(OutputEntry(path, tangents.get(i)) for i, path in enumerate(paths))
        return results, tuple(mutations), outputs

    def _mutation(self, desc: Any) -> MutationEntry:
        kind, index = _end_key(desc, self.desc)
        target = self.new[self.ends[kind, index]]
        if kind == "buffer":
            self._refuse_shared_memory(index)
            return MutationEntry(kind, self.traced.model_buffers[index].fqn, target)
        if kind == "param":
            self._refuse_differentiable_mutation(desc)
        return MutationEntry(kind, self.inputs.paths[index], target)

    def _refuse_shared_memory(self, index: int) -> None:
        owners = self.traced.model_buffers
        changed = owners[index]
        for other in owners:
            if other is not changed and _storage(other.tensor) == _storage(changed.tensor):
                raise CaptureError(
                    f"the forward changes buffer {changed.fqn!r}, which shares its memory with "
                    f"buffer {other.fqn!r}; register one of them and compute the other in forward"
                )

    def _refuse_differentiable_mutation(self, desc: Any) -> None:
        kind, index = _end_key(desc, self.desc)
        if kind == "param":
            raise CaptureError(
                f"the forward changes parameter {self.traced.model_params[index].fqn!r} in place; "
                "a sharded parameter is only lent to the forward, so keep such state in a buffer"
            )
        if kind == "buffer":
            raise CaptureError(
                f"the forward writes a value that carries a gradient into buffer "
                f"{self.traced.model_buffers[index].fqn!r}; detach it first"
            )
        raise CaptureError(
            f"the forward changes input {self.inputs.paths[index]} in place while its gradient is "
            "wanted; clone it first"
        )


def _give_shape(gradient: fx.Node, param: Tensor) -> None:
    """Give a gradient the shape of its parameter, in numbers.

    Autograd promises that shape. A guard such as (height // 8)**2 == 16 may imply it, which torch
    does not solve; where parts of sizes that depend on values make it up, each call checks it.
    """
    val = gradient.meta["val"]
    if any(isinstance(size, SYMBOLIC) for size in val.shape):
        by_values = any(map(depends_on_values, val.shape))
        strides = param.stride() if by_values else list(map(hint, val.stride()))
        with val.fake_mode:
            gradient.meta["val"] = val.new_empty_strided(param.shape, strides)


def _explicit_kwargs(node: fx.Node) -> dict[str, Any]:
    """The keyword arguments of a node, without a None that is the default anyway."""
    if all(value is not None for value in node.kwargs.values()):
        return dict(node.kwargs)
    schema = getattr(node.target, "_schema", None)
    arguments = () if schema is None else schema.arguments
    unsaid = {a.name for a in arguments if a.has_default_value() and a.default_value is None}
    return {
        name: value
        for name, value in node.kwargs.items()
        if value is not None or name not in unsaid
    }


def _phase(node: fx.Node) -> str:
    return BACKWARD if is_backward(node) else FORWARD


def _end_key(desc: Any, classes: Any) -> tuple[str, Any]:
    if isinstance(desc, classes.ParamAOTInput):
        return "param", int(desc.target[1:])
    if isinstance(desc, classes.BufferAOTInput):
        return "buffer", int(desc.target[1:])
    if isinstance(desc, classes.PlainAOTInput):
        return "input", desc.idx
    if isinstance(desc, classes.TangentAOTInput) and isinstance(
        desc.output, classes.PlainAOTOutput
    ):
        return "tangent", desc.output.idx
    if isinstance(desc, classes.TangentAOTInput) and isinstance(
        desc.output, classes.InputMutationAOTOutput
    ):
        return "mutation_tangent", desc.output.mutated_input
    raise CaptureError(f"the step has an input of a kind a program cannot hold ({desc.expr()})")


def _same_memory(a: Tensor, b: Tensor) -> bool:
    if a.device != b.device or a.device.type == "meta" or not a.numel() or not b.numel():
        return False
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _module(parameter_fqn: str) -> str:
    return parameter_fqn.rpartition(".")[0]


def _placeholder_named(graph: fx.Graph, name: str) -> fx.Node:
    node = graph.placeholder(_identifier(name))
    # The generated code names its arguments by target, which fx does not make unique: "a.b" and
    # "a_b" would share one.
    node.target = node.name
    return node


def _identifier(text: str) -> str:
    return re.sub(r"\W+", "_", text).strip("_")

"""Tracing a module on fake weights, and restoring its state afterwards.

A `TracedModel` stands in for the user's module during capture. Its parameters are FakeTensors, one
per distinct parameter of the module (a tied one once, so that autograd itself sums its gradients,
in eager's order); its forward puts them into the module, calls it, and takes them out again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from graphshard.capture.borders import edges_of
from graphshard.capture.both_ways import BothWays
from graphshard.capture.casting import dtype_of_buffer
from graphshard.capture.checkpoints import ended_by_errors
from graphshard.capture.code_walk import CodeWalk
from graphshard.capture.errors import refuse_seeding
from graphshard.capture.guards import Guards
from graphshard.capture.host_draws import Expected, HostDraws
from graphshard.capture.places import (
    Assignment,
    Buffer,
    Contents,
    LeftAt,
    Place,
    added,
    arguments_in,
    refill,
)
from graphshard.capture.reads import Reads
from graphshard.capture.repetition import Repetition
from graphshard.capture.side_effects import (
    PLANNED,
    ModuleTables,
    PastTheTrace,
    no_conversions_to_the_same,
    restore_module_state,
)
from graphshard.capture.spec_augment import masks_of_speech
from graphshard.capture.structure import CALL, Structure, take_apart
from graphshard.errors import CaptureError, ModelChangeError
from graphshard.format import some_of
from graphshard.policy.precision import Precisions
from graphshard.torch_private import trace as torch_trace

ORIGINALS = "_graphshard_originals"
"""Attribute of a copied model: (name, weak reference) of the weights of the model it was made of,
which code of the model may still reach."""


_NO_REPETITION = Repetition(wanted=False)
_NO_DRAWS = Expected()


@dataclass(frozen=True)
class NamedTensor:
    """One distinct parameter or buffer with all its names, in module order."""

    names: tuple[str, ...]
    tensor: Tensor

    @property
    def fqn(self) -> str:
        """Its first name in module order."""
        return self.names[0]


def named_tensors(named: Iterable[tuple[str, Tensor]]) -> list[NamedTensor]:
    """Group (name, tensor) pairs by tensor, in order of first appearance."""
    names: dict[int, list[str]] = {}
    tensors: dict[int, Tensor] = {}
    for name, tensor in named:
        names.setdefault(id(tensor), []).append(name)
        tensors[id(tensor)] = tensor
    return [NamedTensor(tuple(names[key]), tensors[key]) for key in names]


@dataclass(frozen=True)
class EntryPoint:
    """The method that a program captures: of the module of this FQN, forward or another one."""

    module: str = ""
    method: str = "forward"

    @staticmethod
    def of_method(path: str) -> EntryPoint:
        """The method at `path`, e.g. "encode" or "encoder.encode"."""
        module, _, method = path.rpartition(".")
        return EntryPoint(module, method)

    def call(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Call `model` at this entry point."""
        module = model.get_submodule(self.module)
        with torch_trace.compiled_functions_as_they_are(), refuse_seeding():
            if self.method == "forward":
                return module(*args, **kwargs)
            with torch_trace.annotate()({"fqn": self.module, "calls": ((self.module, 0),)}):
                return getattr(module, self.method)(*args, **kwargs)

    @property
    def path(self) -> str:
        """The method with the FQN of its module before it."""
        return f"{self.module}.{self.method}" if self.module else self.method

    def __str__(self) -> str:
        return self.path.removesuffix(".forward")


MAIN_ENTRY = EntryPoint()
"""The model's own forward."""


class TracedModel(nn.Module):
    """The module AOT traces: flat tensors in, flat tensors out.

    After a trace, `result` is the structure of the module's return value, `left` where it left
    tensors else and their structures, `assigned` the plain values that its forward assigned,
    `state_changes` names what else it changed, and
    `reachable` the parameters autograd connects to an output.
    `on_call` is called before each run of the module with its inputs and, by FQN, its buffers: a
    trace runs it more than once, in the context that `around_run` makes. A call whose tensors are
    not functionalized runs in the context that `plain` makes, too. A buffer that forward assigns is
    replaced by a value that carries a gradient, or by any if `replaces_buffers`. `repetition` may
    leave calls of blocks out, and `both_ways` answer questions about values. The draws that `draws`
    expects are inputs behind those of the call.
    """

    def __init__(
        self,
        model: nn.Module,
        make_fake: Callable[[Tensor], Tensor],
        inputs: Structure,
        entry: EntryPoint = MAIN_ENTRY,
        precisions: Precisions | None = None,
        plain: Callable[[], AbstractContextManager[Any]] = nullcontext,
        replaces_buffers: bool = False,
        repetition: Repetition = _NO_REPETITION,
        draws: Expected = _NO_DRAWS,
    ) -> None:
        super().__init__()
        self.model_params = named_tensors(model.named_parameters(remove_duplicate=False))
        self.model_buffers = named_tensors(model.named_buffers(remove_duplicate=False))
        for index, named in enumerate(self.model_params):
            needs_grad = named.tensor.requires_grad
            fake = nn.Parameter(make_fake(_as_gathered(named.tensor)), requires_grad=needs_grad)
            self.register_parameter(f"p{index}", fake)
        for index, named in enumerate(self.model_buffers):
            self.register_buffer(f"b{index}", make_fake(named.tensor))
        self.same_inputs: tuple[int, ...] = ()  # for each input the first that is the same tensor
        self._inputs = inputs
        self._entry = entry
        self._precisions = precisions
        self._plain = plain
        self._replaces_buffers = replaces_buffers
        self._draws = draws
        self.repetition = repetition
        self.result: Structure | None = None
        self.left: tuple[tuple[LeftAt, Structure], ...] = ()
        self.state_changes: tuple[str, ...] = ()
        self.assigned: tuple[Assignment, ...] = ()
        self.hooked = False  # whether a parameter got a hook
        self.made_to_require_grad: frozenset[str] = frozenset()  # paths of inputs
        self.seeded: tuple[str, ...] = ()  # modules whose random numbers it seeds itself
        self.reads = Reads(model, ())
        walk = CodeWalk.of(model, entry.method)
        self.compares_identity = walk.compares_identity
        self._globals = walk.places
        self._code = walk.modules
        self.reachable: frozenset[int] = frozenset()
        self.on_call: Callable[[Sequence[Tensor], Mapping[str, Tensor]], None] | None = None
        self.around_run: Callable[[], AbstractContextManager[Any]] = nullcontext
        self.both_ways = BothWays()
        self._model = [model]  # in a list, so that it is no submodule of this one

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The module's parameters and buffers, and those of the model it is a copy of."""
        for named in (*self.model_params, *self.model_buffers):
            yield named.fqn, named.tensor
        for name, reference in vars(self._model[0]).get(ORIGINALS, ()):
            tensor = reference()
            if tensor is not None:
                yield name, tensor

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        """The module's tensor outputs, and then those that it leaves in Python state and buffers.

        Each is a tensor of its own instead of an alias.
        """
        model = self._model[0]
        if self.same_inputs:
            tensors = tuple(tensors[place] for place in self.same_inputs)
        args, kwargs, *drawn = self._inputs.build(tensors)
        params = [getattr(self, f"p{i}") for i in range(len(self.model_params))]
        buffers = [getattr(self, f"b{i}") for i in range(len(self.model_buffers))]
        if self.on_call is not None:
            fqns = [named.fqn for named in self.model_buffers]
            self.on_call(tensors, dict(zip(fqns, buffers, strict=True)))
        given = [*arguments_in((args, kwargs))]
        names = {
            id(p): f"parameter {o.fqn!r}" for o, p in zip(self.model_params, params, strict=True)
        }
        names |= {
            id(b): f"buffer {o.fqn!r}" for o, b in zip(self.model_buffers, buffers, strict=True)
        }
        self.reads = reads = Reads(model, self._globals)
        host_draws = HostDraws(self._draws, *drawn)
        reads.drawn = host_draws.made
        past = PastTheTrace(names, reads.note_values, reads.used.append, reads.note_look)
        is_plain = not any(map(torch_trace.is_functional, (*params, *buffers, *tensors)))
        with (
            self.around_run(),
            self.both_ways.run(),
            restore_module_state(model) as effects,
            self._plain() if is_plain else nullcontext(),
        ):
            cast_params = self._cast_params(params)
            cast_buffers = self._cast_buffers(model, buffers)
            for named, param in zip(self.model_params, cast_params, strict=True):
                vars(param).update({**vars(named.tensor), **vars(param)})  # what users hang on it
            _install(model, self.model_params, cast_params)
            _install(model, self.model_buffers, cast_buffers)
            before = [tensor.requires_grad for tensor in tensors]
            with (
                past,
                no_conversions_to_the_same(),
                reads.noting(),
                ended_by_errors(),
                self._refuse_changes(model, past),
                self.repetition.run(reads),
                host_draws.watching(self._code),
                masks_of_speech(self._code),
            ):
                output = self._entry.call(model, args, kwargs)
                # A list or dict of the model's own may be among it, and is about to be undone.
                results, self.result = take_apart(output, name="out")
            reads.draws += host_draws.others
            self.seeded = tuple(sorted(host_draws.seeded))
            past.require()
            self._refuse_changed_params(params, cast_params)
            left: list[tuple[LeftAt, Any]] = []
            left += self._write_back_buffers(model, buffers, cast_buffers)
            for container, place, before_call in given:
                if new := added(container, before_call):
                    left.append((place, new))
                    refill(container, before_call)
        self.state_changes = (*effects.changes, *reads.effects.changes)
        self.assigned = tuple(
            each._replace(at=reads.at_line(each.place.path))
            for each in (*effects.assigned, *reads.effects.assigned)
        )
        if self.state_changes:  # a flag may stand for what calls do not repeat, such as a hook
            self.state_changes += tuple(each.place.path for each in self.assigned)
            self.assigned = ()
        self.hooked = any(map(torch_trace.has_hooks, cast_params))
        now = zip(self._inputs.paths, tensors, before, strict=True)
        self.made_to_require_grad |= {path for path, t, was in now if t.requires_grad and not was}
        self._refuse_changed_inputs((args, kwargs, *drawn))
        self._refuse_lent_results(self.result.references)
        self.left = ()
        for place, value in (*left, *effects.left, *reads.effects.left):
            results += self._take_left(place, value)
        assigned = [(each.place.identity, each.value) for each in self.assigned]
        self.both_ways.end(results, [*self._structures, *self.state_changes, *assigned])
        self.reachable = _reachable(results, params)
        return list(map(_own_tensor, results))

    def _take_left(self, place: LeftAt, value: Any) -> list[Tensor]:
        try:
            tensors, structure = take_apart(value, name=place.path)
            self._refuse_lent_results(structure.references)
        except CaptureError as error:
            at = self.reads.at_line(place.path)
            raise CaptureError(f"the forward leaves tensors in {place.path}{at}: {error}") from None
        self.left += ((place, structure),)
        return tensors

    @property
    def output_paths(self) -> tuple[str, ...]:
        """Where each of the tensors is that `forward` returns."""
        return tuple(path for structure in self._structures for path in structure.paths)

    @property
    def _structures(self) -> tuple[Structure, ...]:
        assert self.result is not None
        return (self.result, *(structure for _, structure in self.left))

    def guards(self) -> Guards:
        """The Python state that the forward read, after the trace."""
        written = [place for place, _ in self.left if isinstance(place, Contents)]
        guards = Guards.of(self.reads.places, self.reads.used, written)
        for place, _ in self.left:
            if isinstance(place, (Place, Contents)) and guards.carries(place.read()):
                at = self.reads.at_line(place.path)
                raise CaptureError(
                    f"the forward computes with a tensor that an earlier call left in {place.path}"
                    f"{at}, and leaves another there, so a program would keep the values of the "
                    "first; register it as a buffer, which calls read and write, or pass it as an "
                    "argument"
                )
        return guards

    def _cast_params(self, params: list[Tensor]) -> list[Tensor]:
        """Each parameter in the dtype it is computed in.

        Cast once, so that autograd sums the gradients of all its uses before it casts the sum.
        """
        if self._precisions is None:
            return params
        dtypes = [self._precisions.params.get(named.fqn) for named in self.model_params]
        return [p if d is None else p.to(d) for p, d in zip(params, dtypes, strict=True)]

    def _cast_buffers(self, model: nn.Module, buffers: list[Tensor]) -> list[Tensor]:
        cast_buffers = []
        for named, buffer in zip(self.model_buffers, buffers, strict=True):
            home = named.fqn.rpartition(".")[0]
            module = model.get_submodule(home)
            cast_buffers.append(buffer.to(dtype_of_buffer(module, home, buffer, self._precisions)))
        return cast_buffers

    @contextmanager
    def _refuse_changes(self, model: nn.Module, past: PastTheTrace) -> Iterator[None]:
        """Refuse a method, other than forward, that changes the model's parameters or modules.

        One that fails after it has made parameters, or is about to write some, is taken for one
        that was on its way to do so.
        """
        if self._entry.method == "forward":
            yield
            return
        tables = ModuleTables(model, PLANNED, PLANNED)
        params = [(name, p, p._version) for name, p in model.named_parameters()]
        made: list[str] = []

        def changes() -> str:
            if changed := tables.changed():
                return f"it adds, removes or replaces {some_of(changed)}"
            written = (name for name, param, version in params if param._version != version)
            return "".join(f"it changes parameter {name!r} in place" for name in [*written][:1])

        hook = register_module_parameter_registration_hook(lambda _, name, __: made.append(name))
        try:
            yield
        except Exception as error:
            what = changes() or (made and "it makes parameters")
            if not what and past.assigned:
                what = f"it assigns .data of {past.assigned}"
            if what:
                raise ModelChangeError.by(str(self._entry), what) from error
            raise
        finally:
            hook.remove()
        if what := changes():
            raise ModelChangeError.by(str(self._entry), what)

    def _refuse_changed_params(self, params: list[Tensor], cast_params: list[Tensor]) -> None:
        for named, param, cast in zip(self.model_params, params, cast_params, strict=True):
            if cast is not param and cast._version:
                raise CaptureError(
                    f"the forward changes parameter {named.fqn!r} in place; a parameter in mixed "
                    "precision is only lent to the forward as a copy, so keep such state in a "
                    "buffer"
                )

    def _refuse_new_params(self, model: nn.Module) -> None:
        known = {name for named in self.model_params for name in named.names}
        now = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        if new := [name for name in now if name not in known]:
            raise CaptureError(
                f"the forward makes parameters ({some_of(new)}), which would never be trained; "
                "make them in __init__, or call the model once before compiling it"
            )

    def _write_back_buffers(
        self, model: nn.Module, buffers: list[Tensor], cast_buffers: list[Tensor]
    ) -> Iterator[tuple[Buffer, Tensor]]:
        """Write new values into `buffers`; yields those instead that are to replace a buffer."""
        self._refuse_new_params(model)
        # `self.running = new` replaces the buffer object; the new value must outlive the step. So
        # must one written in place into what was shown in another dtype.
        for named, buffer, cast in zip(self.model_buffers, buffers, cast_buffers, strict=True):
            current = _member(model, named.fqn)
            if current is cast and (cast is buffer or not cast._version):
                continue
            if not isinstance(current, Tensor) or current.shape != buffer.shape:
                raise CaptureError(
                    f"the forward assigned buffer {named.fqn!r} something of another shape; "
                    "a buffer must keep its shape to be carried from step to step"
                )
            if current is not cast and (current.requires_grad or self._replaces_buffers):
                yield Buffer(named.fqn), current
                continue
            with torch.no_grad():
                buffer.copy_(current)

    def _refuse_changed_inputs(self, call: Any) -> None:
        _, after = take_apart(call, name=CALL)
        if after != self._inputs:
            raise CaptureError(
                "the forward changed an argument object in place (added, removed or replaced what "
                "it holds); return the new values instead, or pass an object it does not change"
            )

    def _refuse_lent_results(self, references: tuple[Any, ...]) -> None:
        """Refuse to return what is only lent to a trace: the model's modules, captured tensors."""
        modules = set(self._model[0].modules())
        for reference in references:
            owner = getattr(reference, "__self__", reference)
            cells = getattr(reference, "__closure__", None) or ()
            if owner in modules if isinstance(owner, nn.Module) else _any_tensor(cells):
                name = getattr(reference, "__qualname__", type(reference).__name__)
                raise CaptureError(
                    f"the forward returns {name}, which holds the model's weights or values of "
                    "this call; return tensors, and what is computed from them later as a method "
                    "(see call_method and submodule_forward)"
                )


def _any_tensor(cells: Iterable[Any]) -> bool:
    return any(isinstance(cell.cell_contents, Tensor) for cell in cells)


def _as_gathered(param: Tensor) -> Tensor:
    """What a trace asks of a parameter: shape, dtype, and the strides that gathers give it.

    A dimension of size 1 may have any stride in a contiguous tensor, by which kernels choose the
    memory format of their result.
    """
    if not param.is_contiguous():
        return param
    return torch.empty_like(param, device="meta", memory_format=torch.contiguous_format)


def _own_tensor(value: Any) -> Any:
    # A size of the model's dynamic inputs may be among what it returns.
    return torch.ops.graphshard.output(value) if isinstance(value, Tensor) else value


def _install(model: nn.Module, targets: list[NamedTensor], values: list[Tensor]) -> None:
    for target, value in zip(targets, values, strict=True):
        for name in target.names:
            module_fqn, _, attribute = name.rpartition(".")
            module = model.get_submodule(module_fqn)
            table: dict[str, Any] = (
                module._parameters if attribute in module._parameters else module._buffers
            )
            table[attribute] = value


def _member(model: nn.Module, name: str) -> Any:
    module_fqn, _, attribute = name.rpartition(".")
    return getattr(model.get_submodule(module_fqn), attribute, None)


def _reachable(results: list[Any], params: list[Tensor]) -> frozenset[int]:
    """Numbers of the parameters that autograd's own (not a user's Function) nodes lead back to."""
    index = {id(param): i for i, param in enumerate(params)}
    outputs = [t for t in results if isinstance(t, Tensor)]
    reached = {index[id(t)] for t in outputs if id(t) in index and t.requires_grad}
    stack = [(t.grad_fn, t.output_nr) for t in outputs if t.grad_fn is not None]
    seen = set(stack)
    while stack:
        node, output = stack.pop()
        variable = getattr(node, "variable", None)
        if variable is not None and id(variable) in index:
            reached.add(index[id(variable)])
        for edge in edges_of(node, output):
            if edge[0] is not None and edge not in seen:
                seen.add(edge)
                stack.append(edge)
    return frozenset(reached)


# -- outputs --------------------------------------------------------------------------------------

_library = torch.library.Library("graphshard", "FRAGMENT")


_library.define("output(Tensor x) -> Tensor")

IDENTITY = torch.ops.graphshard.output.default


@torch.library.impl(_library, "output", "CompositeExplicitAutograd")
def _output(x: Tensor) -> Tensor:
    return x.clone()


@torch.library.register_fake("graphshard::output", lib=_library)
def _output_fake(x: Tensor) -> Tensor:
    return x.new_empty_strided(x.shape, x.stride())


# An output that is a view of another tensor has no tangent of its own in an AOT joint graph, and
# its gradient can vanish. Through this identity every output is a tensor of its own with a tangent;
# capture removes the identity from the finished graph.
torch.library.register_autograd(
    "graphshard::output",
    lambda ctx, grad: grad,
    setup_context=lambda ctx, inputs, output: None,
    lib=_library,
)

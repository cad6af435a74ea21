"""Repeated blocks: of each kind two calls are traced, and those between stand for themselves.

Deep models are made of alike blocks, and each takes the same time to trace. Here the first and the
last call of a kind are traced between border nodes, which copy nothing. A call between them is one
node in forward and one in backward; `templates.py` puts copies of the first call's nodes there.

Two calls are of one kind if the blocks have the same classes, parameters, buffers and hooks, hold
the same Python values wherever the first call read one, and get arguments of one structure whose
tensors have the same shapes, strides and dtypes. A call that has side effects, or reads values of
tensors, repeats nothing. Whatever does not fit ends the trace, and another one repeats nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from functools import cache, partial
from types import MemberDescriptorType
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.capture.code_walk import CodeWalk
from graphshard.capture.guards import CONTAINERS, frozen
from graphshard.capture.places import MISSING, Place, Version
from graphshard.capture.reads import Reads
from graphshard.capture.side_effects import Effects, ModuleState
from graphshard.capture.structure import Same, Structure, take_apart
from graphshard.errors import CaptureError
from graphshard.policy.precision import Precisions
from graphshard.torch_private.trace import is_real, mode_count

FEWEST = 4
"""The calls of a kind from which on some are left out: two are traced in any case."""

ENTER, EXIT, EXIT_BACKWARD, ENTER_BACKWARD = range(4)
"""The borders of a call: forward goes in and out at the first two, backward at the last two."""

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

_OF_ANY_MODULE = frozenset(vars(nn.Module()))

_OF_TRACED = ("elem", "_is_param")
"""Attributes of functional tensors and of parameters."""

_WEIGHTS = ("_parameters", "_buffers")


class RepetitionError(Exception):
    """A call that was taken for a repetition may be none; users never see this error.

    kind: that of the call; None: it may be any.
    """

    def __init__(self, reason: str, kind: Kind | None = None) -> None:
        super().__init__(reason)
        self.kind = kind


@dataclass(frozen=True)
class _Form:
    """A tensor but for its values."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> _Form:
        device, grad = tensor.device, tensor.requires_grad
        return _Form(tensor.shape, tensor.stride(), tensor.dtype, device, grad)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class Block:
    """A module with siblings of its `likeness`; `modules` are it and those inside, by path."""

    fqn: str
    module: nn.Module
    likeness: Hashable
    modules: dict[str, nn.Module]

    def weights(self) -> list[tuple[dict[str, Any], str]]:
        """The tables of its modules and the names there that hold a parameter or buffer."""
        return [
            (vars(module)[table], name)
            for module in self.modules.values()
            for table in _WEIGHTS
            for name, tensor in vars(module)[table].items()
            if tensor is not None
        ]

    def hooks(self) -> tuple[Any, ...]:
        """How many hooks the modules inside have, and whether a forward was put over theirs."""
        inside = [vars(module) for path, module in self.modules.items() if path]
        return tuple((*(len(each[name]) for name in _HOOKS), "forward" in each) for each in inside)


@dataclass(eq=False)
class Kind:
    """Calls that are alike.

    key: the block and the arguments, in the form to compare.
    reads: the attributes that the first call read, each with the path of its module in the block,
        and the value there.
    by_all: whether all attributes have to be alike, since code that runs in backward may read any,
        or code that takes them by other means than their names.
    around: the state besides the block's own that the run had read by the end of that call.
    writes: how often the run had assigned attributes by then.
    result: the structure of what a call returns.
    sources: where each tensor of the result is from: (True, number of an input), or (False, number
        of an own result).
    forms: those of the own results.
    expected: how many calls there are, by the run before this one.
    ends: the numbers of the first and the last call, once they were traced between borders.
    given: the numbers of the own results whose gradients the last call's backward got.
    gradients: the forms of the gradients that it gave, by input; None where it gave none.
    """

    key: Hashable
    block: Block
    reads: list[tuple[str, str, Any]] = field(default_factory=list)
    by_all: bool = False
    around: list[tuple[Place | Version, Any]] = field(default_factory=list)
    writes: int = 0
    result: Structure | None = None
    sources: tuple[tuple[bool, int], ...] = ()
    forms: tuple[_Form, ...] = ()
    expected: int = 0
    met: int = 0
    ends: list[int] = field(default_factory=list)
    given: tuple[int, ...] = ()
    gradients: tuple[_Form | None, ...] = ()

    @property
    def repeats(self) -> bool:
        """Whether calls of this kind are left out of the graph."""
        return self.expected >= FEWEST

    def note_given(self, call: int, places: tuple[int, ...]) -> None:
        """Note which own results of a call have gradients."""
        if call == self.ends[-1]:
            self.given = places
        self.require_given(places)

    def require_given(self, places: tuple[int, ...]) -> None:
        """Raise if other own results have gradients than in the last call."""
        if places != self.given:
            raise RepetitionError("backward meets a call otherwise than the last one", self)

    def note_gradients(self, call: int, forms: tuple[_Form | None, ...]) -> None:
        """Note the gradients that a call gives."""
        if call == self.ends[-1]:
            self.gradients = forms
        if forms != self.gradients:
            raise RepetitionError("the first call gives other gradients than the last one", self)


class _Call:
    """A call of a block: its inputs, each tensor among arguments and weights once."""

    def __init__(self, block: Block, args: Any, kwargs: Any) -> None:
        self.block, self.args, self.kwargs = block, args, kwargs
        self.tensors, self.structure = take_apart((args, kwargs), name="")
        self.weights = block.weights()
        installed = [table[name] for table, name in self.weights]
        self.inputs = [*{id(tensor): tensor for tensor in (*self.tensors, *installed)}.values()]
        places = {id(tensor): place for place, tensor in enumerate(self.inputs)}
        self.arguments = tuple(places[id(tensor)] for tensor in self.tensors)
        self.installed = tuple(places[id(tensor)] for tensor in installed)

    def fits(self, attributes: Set[str]) -> bool:
        """Whether the inputs say all about it that the block can see.

        `attributes` are those that tensors have of themselves.
        """
        return (
            self.structure.is_plain
            and bool(self.inputs)
            and not {*self.arguments} & {*self.installed}
            and not any(map(is_real, self.inputs))
            and all(vars(tensor).keys() <= attributes for tensor in self.tensors)
        )

    def key(self, modes: int) -> Hashable:
        """What two calls share that may be alike; `modes` is their number around the model."""
        forms = tuple(map(_Form.of, self.inputs))
        call = self.structure, self.arguments, self.installed, forms
        devices = ("cpu", "cuda")
        ambient = (
            mode_count() - modes,
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            *(torch.is_autocast_enabled(kind) for kind in devices),
            *(torch.get_autocast_dtype(kind) for kind in devices),
        )
        return self.block.likeness, call, ambient

    def run(self, forward: Callable[..., Any], inputs: Sequence[Tensor]) -> tuple[Any, bool]:
        """Call `forward` with `inputs`; returns what it does, and whether it changed none."""
        own = inputs is self.inputs
        args, kwargs = self.args, self.kwargs
        if not own:
            args, kwargs = self.structure.build([inputs[place] for place in self.arguments])
        before = [*map(_state_of, inputs)]
        self._install(inputs)
        try:
            output = forward(*args, **kwargs)
        finally:
            self._install(self.inputs)
        unchanged = take_apart((args, kwargs), name="")[1] == self.structure
        return output, unchanged and [*map(_state_of, inputs)] == before

    def _install(self, inputs: Sequence[Tensor]) -> None:
        for (table, name), place in zip(self.weights, self.installed, strict=True):
            table[name] = inputs[place]


class Repetition:
    """Which calls of a model's blocks repeat others, in the two runs of a trace.

    used: whether any call was left out; never if it is not `wanted`.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self.used = False
        self._wanted = wanted
        self._blocks: list[Block] = []
        self.kinds: list[Kind] = []
        self._unfit: set[Hashable] = set()
        self._runs = 0
        self._calls = 0
        self._inside = False

    @contextlib.contextmanager
    def tracing(
        self, model: nn.Module, precisions: Precisions | None, mode: Any, functional: bool
    ) -> Iterator[None]:
        """The context of a trace of `model` in a fake `mode`, backward included.

        `functional`: it may write.
        """
        self._mode, self._functional = mode, functional
        with mode:
            self._attributes = {*vars(torch.empty(0)), *_OF_TRACED}
        if self._wanted:
            self._blocks = [*_alike_blocks(model, precisions)]
        _active.append(self)
        try:
            yield
        finally:
            _active.pop()
        if any(kind.repeats and kind.met != kind.expected for kind in self.kinds):
            raise RepetitionError("two runs of the forward call different blocks")

    @contextlib.contextmanager
    def run(self, reads: Reads) -> Iterator[None]:
        """Watch one run of the model."""
        self._reads = reads
        self._runs += 1
        self._called: set[str] = set()
        self._used: dict[int, tuple[Block, Tensor]] = {}
        self._modes = mode_count()
        for kind in self.kinds:
            kind.expected, kind.met, kind.ends = kind.met, 0, []
        self._hooks = {block.fqn: block.hooks() for block in self._blocks}
        for block in self._blocks:
            vars(block.module)["forward"] = partial(self._call, block, block.module.forward)
        try:
            yield
        finally:
            for block in self._blocks:
                vars(block.module).pop("forward", None)

    def without(self, error: BaseException | None) -> Repetition:
        """One for another trace, which repeats no calls of the kind that ended this one."""
        kind = error.kind if isinstance(error, RepetitionError) else None
        other = Repetition(wanted=kind is not None)
        if kind is not None:
            other._unfit = {*self._unfit, kind.block.likeness}
        return other

    def require_none(self, effects: Iterable[Any]) -> None:
        """End the trace if calls were left out and there are `effects` of a run on Python state."""
        if self.used and any(effects):
            raise RepetitionError("the forward has side effects")

    def _call(self, block: Block, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._inside or block.likeness in self._unfit:
            return forward(*args, **kwargs)
        self._inside = True
        try:
            return self._call_of_block(block, forward, args, kwargs)
        finally:
            self._inside = False

    def _call_of_block(
        self, block: Block, forward: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        try:
            call = _Call(block, args, kwargs)
        except CaptureError:  # an argument cannot be taken apart
            call = None
        again = block.fqn in self._called  # gradients of several uses are not one sum
        self._called.add(block.fqn)
        if (
            call is None
            or again
            or not call.fits(self._attributes)
            or block.hooks() != self._hooks[block.fqn]
        ):
            self._give_up(block)
            return forward(*args, **kwargs)
        if self._runs == 1 and not self._uses_alone(call):
            return forward(*args, **kwargs)
        key = call.key(self._modes)
        kind = next((k for k in self.kinds if k.key == key and self._reads_alike(k, block)), None)
        if kind is None:
            return self._trace_first(Kind(key, block), call, forward)
        kind.met += 1
        if self._runs > 1 and not kind.repeats:
            return forward(*args, **kwargs)
        if self._runs > 1 and kind.met in (1, kind.expected):
            return self._trace_between_borders(kind, call, forward)
        return self._leave_out(kind, call)

    def _uses_alone(self, call: _Call) -> bool:
        """Whether no call before has an argument of `call` that needs a gradient.

        Autograd adds the gradients of all uses of a value in turn: those of a call are no sum of
        their own.
        """
        alone = True
        for tensor in call.tensors:
            if tensor.requires_grad:
                block, _ = self._used.setdefault(id(tensor), (call.block, tensor))
                if block is not call.block:
                    alone = False
                    self._give_up(block)
                    self._give_up(call.block)
        return alone

    def _reads_alike(self, kind: Kind, block: Block) -> bool:
        return (
            kind.writes == self._reads.writes
            and all(
                _exact(vars(block.modules[path]).get(name, MISSING)) == value
                for path, name, value in kind.reads
            )
            and (not kind.by_all or _attributes(block) == _attributes(kind.block))
            and all(_exact(place.read()) == value for place, value in kind.around)
        )

    def _trace_first(self, kind: Kind, call: _Call, forward: Callable[..., Any]) -> Any:
        """Trace a call as it is, and note its kind if others may repeat it."""
        before = [ModuleState(path, module) for path, module in kind.block.modules.items()]
        asked, hooks = self._mode.asked, self._reads.hooks_of_tensors
        output, pure = call.run(forward, call.inputs)
        effects = Effects()
        for each in before:
            each.tell_changes(effects)
        own, kind.result, kind.sources = _taken_apart(output, call.inputs)
        kind.forms = tuple(map(_Form.of, own))
        modules = kind.block.modules
        kind.reads = [
            (path, name, _exact(vars(modules[path]).get(name, MISSING)))
            for path, name in self._reads.attributes_of({id(modules[p]): p for p in modules})
        ]
        tables = {id(vars(module)) for module in modules.values()}
        kind.around = [
            (place, _exact(place.read()))
            for place in self._reads.places
            if id(place.owner) not in tables
        ]
        kind.writes = self._reads.writes
        kind.by_all = (
            hooks != self._reads.hooks_of_tensors
            or _runs_python_backward(own, call.inputs)
            or CodeWalk.of(kind.block.module).reads_tables
        )
        pure = pure and not effects.changes and not effects.left and self._mode.asked == asked
        pure = pure and kind.result.is_plain and self._are_plain(own)
        # A view may be written later on, and what it is a view of is then written as well.
        views = self._functional and any(each._is_view() for each in own)
        if own and pure and not views:
            kind.met = 1
            self.kinds.append(kind)
        else:
            self._give_up(kind.block)
        return output

    def _are_plain(self, tensors: Iterable[Tensor]) -> bool:
        """Whether copies of them are the same to all code."""
        return all(not is_real(each) and vars(each).keys() <= self._attributes for each in tensors)

    def _give_up(self, block: Block) -> None:
        self._unfit.add(block.likeness)
        for kind in self.kinds:
            if kind.block.likeness == block.likeness:
                kind.met = 0

    def _trace_between_borders(self, kind: Kind, call: _Call, forward: Callable[..., Any]) -> Any:
        number = self._number()
        kind.ends.append(number)
        inputs = _Border.apply(self, kind, number, ENTER, *call.inputs)
        for entered, tensor in zip(inputs, call.inputs, strict=True):
            vars(entered).update({**vars(tensor), **vars(entered)})
        output, pure = call.run(forward, inputs)
        own, result, sources = _taken_apart(output, inputs)
        forms = tuple(map(_Form.of, own))
        pure = pure and self._are_plain(own)
        if not pure or (result, sources, forms) != (kind.result, kind.sources, kind.forms):
            raise RepetitionError("two calls return differently", kind)
        return _result(kind, call.inputs, _Border.apply(self, kind, number, EXIT, *own))

    def _leave_out(self, kind: Kind, call: _Call) -> Any:
        for path, name, _ in kind.reads:
            self._reads.note(call.block.modules[path], name)
        self.used = True
        return _result(kind, call.inputs, _LeftOut.apply(self, kind, self._number(), *call.inputs))

    def _number(self) -> int:
        self._calls += 1
        return self._calls


_active: list[Repetition] = []


def _exact(value: Any) -> Any:
    """`value` in a form to compare: by all that it holds, or else by identity."""
    kind = type(value)
    if kind is partial:
        return kind, _exact((value.func, value.args, value.keywords))
    if kind in (list, tuple, set, dict):
        items = (*value, *value.values()) if kind is dict else value
        return kind, len(value), (frozenset if kind is set else tuple)(map(_exact, items))
    return Same(value) if isinstance(value, CONTAINERS) else frozen(value)


def _attributes(block: Block) -> Any:
    return [
        (path, name, _exact(value))
        for path, module in block.modules.items()
        for name, value in vars(module).items()
        if name not in _OF_ANY_MODULE and name != "forward"
    ]


def _runs_python_backward(results: Iterable[Tensor], inputs: Iterable[Tensor]) -> bool:
    """Whether a Function of the user's is in the graph of autograd between the two."""
    reached = [tensor.grad_fn for tensor in results]
    seen = {None, *(tensor.grad_fn for tensor in inputs)}
    for node in reached:
        if node not in seen:
            seen.add(node)
            reached += [before for before, _ in node.next_functions]
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return True
    return False


def _state_of(tensor: Tensor) -> tuple[int, bool, list[str]]:
    """What a block may change of a tensor that it is given."""
    return tensor._version, tensor.requires_grad, [*vars(tensor)]


def _taken_apart(
    output: Any, inputs: Sequence[Tensor]
) -> tuple[list[Tensor], Structure, tuple[tuple[bool, int], ...]]:
    """The tensors that are no inputs, each once, the structure, and the `Kind.sources`."""
    places = {id(tensor): place for place, tensor in enumerate(inputs)}
    tensors, structure = take_apart(output, name="out")
    own = {id(tensor): tensor for tensor in tensors if id(tensor) not in places}
    numbers = {key: number for number, key in enumerate(own)}
    sources = tuple(
        (True, places[id(t)]) if id(t) in places else (False, numbers[id(t)]) for t in tensors
    )
    return [*own.values()], structure, sources


def _result(kind: Kind, inputs: Sequence[Tensor], own: Sequence[Tensor]) -> Any:
    assert kind.result is not None
    tensors = [(inputs if is_input else own)[number] for is_input, number in kind.sources]
    return kind.result.build(tensors)


def _alike_blocks(model: nn.Module, precisions: Precisions | None) -> Iterator[Block]:
    """The outermost modules with enough siblings of their likeness."""
    reached = [("", model)]
    for fqn, module in reached:
        children = [
            (f"{fqn}.{name}" if fqn else name, each) for name, each in module.named_children()
        ]
        by_likeness: dict[Hashable, list[tuple[str, nn.Module]]] = {}
        for path, child in children:
            likeness = _likeness(path, child, precisions) if len(children) >= FEWEST else None
            by_likeness.setdefault(likeness, []).append((path, child))
        for likeness, alike in by_likeness.items():
            if likeness is None or len(alike) < FEWEST:
                reached += alike
            else:
                for path, child in alike:
                    yield Block(path, child, likeness, dict(child.named_modules()))


def _likeness(fqn: str, module: nn.Module, precisions: Precisions | None) -> Hashable:
    """What two modules share whose calls may be alike; None if no other's may."""
    modules = dict(module.named_modules(remove_duplicate=False))
    inside = [vars(each) for path, each in modules.items() if path]
    if "forward" in vars(module) or any(
        "forward" in attributes or any(attributes[name] for name in _HOOKS) for attributes in inside
    ):
        return None
    if len(modules) == 1 or not any(True for _ in module.parameters()):
        return None
    if any(_has_slots(type(each).__mro__) for each in modules.values()):
        return None
    return tuple(
        (
            path,
            type(each),
            each.training,
            _of_weights(each._parameters),
            _of_weights(each._buffers),
            precisions and _precision(f"{fqn}.{path}" if path else fqn, precisions),
        )
        for path, each in modules.items()
    )


@cache
def _has_slots(bases: tuple[type, ...]) -> bool:
    """Whether modules of a class of these bases have attributes besides those in `vars`."""
    members = (value for base in bases for value in vars(base).values())
    return any(isinstance(value, MemberDescriptorType) for value in members)


def _precision(fqn: str, precisions: Precisions) -> Hashable:
    return repr((precisions.units.get(fqn), precisions.around(fqn)))


def _of_weights(table: dict[str, Any]) -> Hashable:
    return tuple(
        (name, None if tensor is None else (_Form.of(tensor), frozen(dict(vars(tensor)))))
        for name, tensor in table.items()
    )


# -- the nodes in the graph -----------------------------------------------------------------------

_library = torch.library.Library("graphshard", "FRAGMENT")

_library.define("border(Tensor[] x, int call, int side) -> Tensor[]")
_library.define("left_out(Tensor[] x, int call, int kind, bool backward) -> Tensor[]")

BORDER = torch.ops.graphshard.border.default
LEFT_OUT = torch.ops.graphshard.left_out.default


@torch.library.impl(_library, "border", "CompositeExplicitAutograd")
def _border(x: list[Tensor], call: int, side: int) -> list[Tensor]:
    return [each.clone() for each in x]


@torch.library.register_fake("graphshard::border", lib=_library)
def _border_fake(x: list[Tensor], call: int, side: int) -> list[Tensor]:
    return [each.new_empty_strided(each.shape, each.stride()) for each in x]


@torch.library.register_fake("graphshard::left_out", lib=_library)
def _left_out_fake(x: list[Tensor], call: int, kind: int, backward: bool) -> list[Tensor]:
    repeated = _active[-1].kinds[kind]
    forms = repeated.gradients if backward else repeated.forms
    return [form.empty() for form in forms if form is not None]


class _Border(torch.autograd.Function):
    """A border of a call, as an identity with a node in forward and one in backward."""

    @staticmethod
    def forward(
        ctx: Any, repetition: Repetition, kind: Kind, call: int, side: int, *x: Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        ctx.kind, ctx.call, ctx.side = kind, call, side
        out = torch.ops.graphshard.border([*x], call, side)
        ctx.mark_non_differentiable(
            *(
                each
                for each, needed in zip(out, ctx.needs_input_grad[4:], strict=True)
                if not needed
            )
        )
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        kind = ctx.kind
        places = tuple(place for place, grad in enumerate(grads) if grad is not None)
        side = EXIT_BACKWARD if ctx.side == EXIT else ENTER_BACKWARD
        given = torch.ops.graphshard.border([grads[p] for p in places], ctx.call, side)
        back: list[Tensor | None] = [None] * len(grads)
        for place, grad in zip(places, given, strict=True):
            back[place] = grad
        if ctx.side == EXIT:
            kind.note_given(ctx.call, places)
        else:
            kind.note_gradients(ctx.call, tuple(g if g is None else _Form.of(g) for g in back))
        return None, None, None, None, *back


def is_border(node: Any) -> bool:
    """Whether a node of autograd is a border, or the arguments alone lead on from it."""
    return isinstance(node, _Border)


class _LeftOut(torch.autograd.Function):
    """A call that is left out: a node in forward and one in backward."""

    @staticmethod
    def forward(ctx: Any, repetition: Repetition, kind: Kind, call: int, *x: Tensor) -> Any:
        ctx.set_materialize_grads(False)
        ctx.repetition, ctx.kind, ctx.call = repetition, kind, call
        number = repetition.kinds.index(kind)
        out = torch.ops.graphshard.left_out([*x], call, number, False)
        ctx.mark_non_differentiable(
            *(each for each, form in zip(out, kind.forms, strict=True) if not form.requires_grad)
        )
        return tuple(out)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        kind = ctx.kind
        places = tuple(place for place, grad in enumerate(grads) if grad is not None)
        kind.require_given(places)
        number = ctx.repetition.kinds.index(kind)
        given = [grads[place] for place in places]
        back = iter(torch.ops.graphshard.left_out(given, ctx.call, number, True))
        return None, None, None, *(f and next(back) for f in kind.gradients)

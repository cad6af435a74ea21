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
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence, Set
from functools import partial
from inspect import getattr_static
from typing import Any

import torch
from torch import Tensor, nn

from graphshard.capture.alike import Block, Form, alike_blocks, exact
from graphshard.capture.annotation import FQN, REGION
from graphshard.capture.borders import (
    ENTER,
    EXIT,
    Border,
    Kind,
    LeftOut,
    RepetitionError,
    naming,
)
from graphshard.capture.checkpoints import compared_mode, policies_with_state
from graphshard.capture.code_walk import CodeWalk
from graphshard.capture.kv_cache import NUMBER, Filled, KVCache
from graphshard.capture.places import MISSING
from graphshard.capture.reads import Reads
from graphshard.capture.side_effects import Effects, ModuleState
from graphshard.capture.structure import Structure, take_apart
from graphshard.errors import CaptureError
from graphshard.policy.precision import Precisions
from graphshard.torch_private.trace import (
    annotated,
    has_global_hooks,
    has_hooks,
    is_real,
    modes,
    storage_key,
    write_count,
)

_logger = logging.getLogger("graphshard")

_DEVICES = ("cpu", "cuda")

_OF_TRACED = ("elem", "_is_param")
"""Attributes of functional tensors and of parameters."""


class _Call:
    """A call of a block: its inputs, each tensor among arguments and weights once."""

    def __init__(self, block: Block, args: Any, kwargs: Any) -> None:
        self.block, self.args, self.kwargs = block, args, kwargs
        self.cache = KVCache.among((*args, *kwargs.values()))
        self.tensors, self.structure = self._taken_apart(args, kwargs)
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
        devices = [kind for kind in _DEVICES if torch.is_autocast_enabled(kind)]
        return (
            annotated().get(FQN) == self.block.fqn
            and not has_global_hooks()
            and self.structure.is_plain
            and bool(self.inputs)
            and all(isinstance(each, Tensor) for each in self.inputs)  # no symbolic sizes
            and not {*self.arguments} & {*self.installed}
            and not any(
                is_real(x) or x.is_conj() or x.is_neg() or has_hooks(x) for x in self.inputs
            )
            and all(vars(tensor).keys() <= attributes for tensor in self.tensors)
            and not (devices and torch.is_autocast_cache_enabled())  # which looks at weights
        )

    def key(self, around: int, known: Set[str]) -> Hashable:
        """What two calls share that may be alike; the model itself runs in `around` modes.

        `known` are the attributes that tensors have of themselves.
        """
        forms = tuple(map(Form.of, self.inputs))
        call = self.structure, self.arguments, self.installed, forms
        weights = self.inputs[len({*self.arguments}) :]
        ambient = (
            len(annotated().get(REGION, ())),
            *map(compared_mode, modes()[around:]),
            torch.is_grad_enabled(),
            torch.get_default_dtype(),
            torch.backends.cuda.flash_sdp_enabled(),
            torch.backends.cuda.mem_efficient_sdp_enabled(),
            torch.backends.cuda.math_sdp_enabled(),
            torch.backends.cuda.cudnn_sdp_enabled(),
            *(torch.is_autocast_enabled(kind) for kind in _DEVICES),
            *(torch.get_autocast_dtype(kind) for kind in _DEVICES),
        )
        attributes = tuple(
            (name, exact(value))
            for weight in weights
            for name, value in vars(weight).items()
            if name not in known
        )
        return self.block.likeness, call, attributes, ambient

    @property
    def filled(self) -> Filled | None:
        """What it put into a cache; None if there is none, or it did something else with it."""
        return None if self.cache is None else self.cache.filled

    def _taken_apart(self, args: Any, kwargs: Any) -> tuple[list[Tensor], Structure]:
        if self.cache is not None:
            args, kwargs = self.cache.taken_out(args, kwargs)
        return take_apart((args, kwargs), name="")

    def run(
        self,
        forward: Callable[..., Any],
        inputs: Sequence[Tensor],
        *,
        tells: bool = False,
        known: Filled | None = None,
    ) -> tuple[Any, bool]:
        """Call `forward` with `inputs`; returns what it does, and whether it changed none.

        With the tensors that it put into a cache, which is watched if the cache `tells`, or if it
        is `known` what calls of its kind put there.
        """
        args, kwargs = self.args, self.kwargs
        if inputs is not self.inputs:
            args, kwargs = self.structure.build([inputs[place] for place in self.arguments])
            if self.cache is not None:
                args, kwargs = self.cache.put_in(args, kwargs)
        before = [*map(_state_of, inputs)]
        self._install(inputs)
        cached: list[Tensor] = []
        if self.cache is None or not (tells or known):
            output = forward(*args, **kwargs)
        else:
            with self.cache.watched(self.block.modules, known):
                output = forward(*args, **kwargs)
            cached = self.cache.tensors(self.block.modules)
        tensors, structure = self._taken_apart(args, kwargs)
        unchanged = (
            (self.cache is None or self.filled is not None)
            and structure == self.structure
            and [*map(id, tensors)] == [id(inputs[place]) for place in self.arguments]
            and self.block.weights() == self.weights
            and all(
                table[name] is inputs[place]
                for (table, name), place in zip(self.weights, self.installed, strict=True)
            )
            and [*map(_state_of, inputs)] == before
            and not any(map(has_hooks, inputs))
        )
        if inputs is not self.inputs:
            self._install(self.inputs)
        return (output, cached), unchanged

    def _install(self, inputs: Sequence[Tensor]) -> None:
        for (table, name), place in zip(self.weights, self.installed, strict=True):
            table[name] = inputs[place]


class Repetition:
    """Which calls of a model's blocks repeat others, in the two runs of a trace.

    used: whether any call was left out; never if it is not `wanted`.
    tells: whether a call is under way in which cache and number of the layer tell what is done.
    """

    def __init__(self, *, wanted: bool = True) -> None:
        self.used = self.tells = False
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
            self._attributes = {*vars(torch.empty(0, device="cpu")), *_OF_TRACED}
        if self._wanted:
            self._blocks = [*alike_blocks(model, precisions)]
        with naming(self.kinds):
            yield
        if any(kind.repeats and kind.met != kind.expected for kind in self.kinds):
            raise RepetitionError("two runs of the forward call different blocks")

    @contextlib.contextmanager
    def run(self, reads: Reads) -> Iterator[None]:
        """Watch one run of the model."""
        self._reads = reads
        self._runs += 1
        self._called: set[str] = set()
        self._used: dict[int, tuple[Block, Tensor]] = {}
        self._modes = len(modes())
        for kind in self.kinds:
            kind.expected, kind.met, kind.ends = kind.met, 0, []
        self._hooks = {block.fqn: block.hooks() for block in self._blocks}
        for block in self._blocks:
            vars(block.module)["forward"] = partial(self._call, block)
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

    def _call(self, block: Block, *args: Any, **kwargs: Any) -> Any:
        # Looked up now, as the model may give a module another class.
        kind = type(block.module)
        forward = getattr_static(kind, "forward").__get__(block.module, kind)
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
            self._give_up(block, "it is called twice, has hooks, or gets other than plain data")
            return forward(*args, **kwargs)
        if self._runs == 1 and not self._uses_alone(call):
            return forward(*args, **kwargs)
        key = call.key(self._modes, self._attributes)
        kind = next((k for k in self.kinds if k.key == key and self._is_alike(k, call)), None)
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
                    for each in (block, call.block):
                        self._give_up(each, "others get the same argument, which needs a gradient")
        return alone

    def _is_alike(self, kind: Kind, call: _Call) -> bool:
        """Whether the Python state that the first call read is alike here."""
        block, cache, filled = call.block, call.cache, kind.filled
        return (
            kind.writes == self._reads.writes
            and (cache is None or not filled or cache.is_empty_at(block.modules, filled))
            and all(
                exact(vars(block.modules[path]).get(name, MISSING)) == value
                for path, name, value in kind.reads
            )
            and (not kind.by_all or block.attributes() == kind.block.attributes())
            and all(exact(place.read()) == value for place, value in kind.around)
        )

    def _trace_first(self, kind: Kind, call: _Call, forward: Callable[..., Any]) -> Any:
        """Trace a call as it is, and note its kind if others may repeat it."""
        before = [ModuleState(path, module) for path, module in kind.block.modules.items()]
        asked = self._questions()
        self.tells = call.cache is not None and self._runs == 1
        output, pure = call.run(forward, call.inputs, tells=self.tells)
        self.tells = False
        pure = pure and self._questions() == asked
        kind.filled = call.filled
        effects = Effects()
        for each in before:
            each.tell_changes(effects)
        own, kind.result, kind.sources = _taken_apart(output, call.inputs)
        kind.forms = tuple(map(Form.of, own))
        modules = kind.block.modules
        kind.reads = [
            (path, name, exact(vars(modules[path]).get(name, MISSING)))
            for path, name in self._reads.attributes_of({id(modules[p]): p for p in modules})
            # The number by which it fills its layer, and does nothing else, may be another.
            if not (kind.filled and (path, name) == (kind.filled.path, NUMBER))
        ]
        tables = {id(vars(module)) for module in modules.values()}
        kind.around = [
            (place, exact(place.read()))
            for place in self._reads.places
            if id(place.owner) not in tables
        ]
        kind.writes = self._reads.writes
        reads_tables = CodeWalk.of(kind.block.module).reads_tables
        kind.by_all = reads_tables or _runs_python_backward(own, call.inputs)
        pure = pure and not any(_is_by_module(place.read()) for place, _ in kind.around)
        pure = pure and not effects.changes and not effects.left
        pure = pure and kind.result.is_plain and self._are_plain(own)
        # A write later on into what shares memory with another tensor is one into that, too.
        memory = [*map(storage_key, (*own, *call.inputs))]
        views = self._functional and len({*memory}) < len(memory)
        if own and pure and not views:
            kind.met = 1
            self.kinds.append(kind)
        else:
            self._give_up(
                kind.block, "it asks for values, or does more than to return or fill a cache"
            )
        return output[0]

    def _questions(self) -> tuple[int, ...]:
        """How often there were questions that alike calls may answer otherwise."""
        reads = self._reads
        return self._mode.asked, reads.looks, len(reads.drawn), policies_with_state()

    def _are_plain(self, tensors: Iterable[Tensor]) -> bool:
        """Whether copies of them are the same to all code."""
        return all(not is_real(each) and vars(each).keys() <= self._attributes for each in tensors)

    def _give_up(self, block: Block, why: str) -> None:
        if block.likeness not in self._unfit:
            _logger.info("blocks like %s are traced one by one: %s", block.fqn, why)
        self._unfit.add(block.likeness)
        for kind in self.kinds:
            if kind.block.likeness == block.likeness:
                kind.met = 0

    def _trace_between_borders(self, kind: Kind, call: _Call, forward: Callable[..., Any]) -> Any:
        number = self._number()
        kind.ends.append(number)
        inputs = Border.apply(kind, number, ENTER, *call.inputs)
        for entered, tensor in zip(inputs, call.inputs, strict=True):
            vars(entered).update({**vars(tensor), **vars(entered)})
            if not torch.is_grad_enabled():
                entered.requires_grad_(tensor.requires_grad)
        output, pure = call.run(forward, inputs, known=kind.filled)
        own, result, sources = _taken_apart(output, inputs)
        forms = tuple(map(Form.of, own))
        pure = pure and self._are_plain(own)
        alike = (result, sources, forms) == (kind.result, kind.sources, kind.forms)
        if not pure or not alike or call.filled != kind.filled:
            raise RepetitionError("two calls return differently", kind)
        return _result(kind, call, Border.apply(kind, number, EXIT, *own))

    def _leave_out(self, kind: Kind, call: _Call) -> Any:
        for path, name, _ in kind.reads:
            self._reads.note(call.block.modules[path], name)
        if kind.filled is not None:
            self._reads.note(call.block.modules[kind.filled.path], NUMBER)
        self.used = True
        own = LeftOut.apply(kind, self._number(), len({*call.arguments}), *call.inputs)
        return _result(kind, call, own)

    def _number(self) -> int:
        self._calls += 1
        return self._calls


def _is_by_module(value: Any) -> bool:
    """Whether it holds something for each module."""
    return isinstance(value, Mapping) and any(isinstance(key, nn.Module) for key in value)


def _runs_python_backward(results: Iterable[Tensor], inputs: Iterable[Tensor]) -> bool:
    """Whether a Function of the user's is in the graph of autograd between the two."""
    reached = [tensor.grad_fn for tensor in results]
    seen = {tensor.grad_fn for tensor in inputs}
    for node in reached:
        if node is not None and node not in seen:
            seen.add(node)
            reached += [before for before, _ in node.next_functions]
            if isinstance(node, torch.autograd.function.BackwardCFunction):
                return True
    return False


def _state_of(tensor: Tensor) -> tuple[tuple[int, ...], bool, list[str]]:
    """What a block may change of a tensor that it is given."""
    return write_count(tensor), tensor.requires_grad, [*vars(tensor)]


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


def _result(kind: Kind, call: _Call, own: Sequence[Tensor]) -> Any:
    """What a call returns whose own results are `own`; those of a cache are put there."""
    assert kind.result is not None
    tensors = [(call.inputs if is_input else own)[number] for is_input, number in kind.sources]
    output, cached = kind.result.build(tensors)
    if call.cache is not None and kind.filled is not None:
        call.cache.fill(call.block.modules, kind.filled, cached)
    return output

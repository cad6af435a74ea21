"""Side effects of a forward on Python state during a trace: they are reported and undone.

A captured program keeps the values it saw and repeats no assignment, so the user must be told.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from graphshard.capture.places import MISSING, Assignment, Contents, Place, contents, refill
from graphshard.capture.structure import Same, holds_tensors
from graphshard.errors import CaptureError, warn_user
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.patches import patched
from graphshard.torch_private.trace import is_real

TABLES = ("_parameters", "_buffers", "_modules")


PLANNED = ("_parameters", "_modules")
"""The tables that a method of the model must leave as they are."""


# nn.LSTM and its kind list their own weights anew in every forward.
_NO_STATE = frozenset({*TABLES, "_flat_weights", "_flat_weight_refs"})


_CONTAINERS = (dict, list, set, OrderedDict)  # the last holds hooks


_PLAIN = (int, float, str, bool, bytes, complex)


_ASSIGNED = frozenset({type(None), *_PLAIN})
"""Types of the values that a call may assign again."""


class Effects:
    """What a forward did to Python state, and a trace undoes.

    changes: names of what calls of the program do not repeat.
    assigned: attributes and variables that hold other plain values now, which each call repeats.
    left: places where it left tensors of this call, with the value there, which each call repeats.
    """

    def __init__(self) -> None:
        self.changes: list[str] = []
        self.assigned: list[Assignment] = []
        self.left: list[tuple[Place | Contents, Any]] = []

    def add(self, place: Place | Contents, value: Any) -> None:
        """Note that `place` holds `value` now."""
        value = pytree.tree_map(lambda each: Same(each) if is_real(each) else each, value)
        if holds_tensors(value):
            self.left.append((place, value))
        elif isinstance(place, Place) and type(value) in _ASSIGNED and place.key != "training":
            self.assigned.append(Assignment(place, value))
        else:
            self.changes.append(place.path)

    def add_contents(self, path: str, container: Any, before: Any) -> None:
        """Note that a container's items are other ones than `before`, by `contents`."""
        was = set(map(id, before.values() if isinstance(before, dict) else before))
        now = contents(container)
        if isinstance(now, dict):
            items: Any = {key: Same(v) if id(v) in was else v for key, v in now.items()}
        else:
            items = [Same(each) if id(each) in was else each for each in now]
        self.add(Contents(path, container), items)


class ModuleTables:
    """Which parameters, buffers and modules a model has, by the names in `tables`.

    In those of `objects` not only names count, but the objects under them.
    """

    def __init__(
        self,
        model: nn.Module,
        tables: Sequence[str] = TABLES,
        objects: Sequence[str] = ("_modules",),
    ) -> None:
        self._tables = [
            (f"{fqn}." if fqn else "", vars(module)[name], name in objects)
            for fqn, module in model.named_modules()
            for name in tables
        ]
        self._content = [dict(table) for _, table, _ in self._tables]

    def changed(self) -> list[str]:
        """The names that were added, removed or, if objects count, given another one."""
        return [
            prefix + name
            for (prefix, now, by_object), before in zip(self._tables, self._content, strict=True)
            for name in sorted({*now, *before})
            if (name in now) != (name in before) or (by_object and now[name] is not before[name])
        ]

    def restore(self) -> None:
        """Put back what there was."""
        for (_, table, _), content in zip(self._tables, self._content, strict=True):
            table.clear()
            table.update(content)


class ModuleState:
    """A copy of a module's attributes, and of the contents of plain containers among them."""

    def __init__(self, fqn: str, module: nn.Module) -> None:
        self.prefix = f"{fqn}." if fqn else ""
        self.module = module
        self.attributes = dict(vars(module))
        self.contents = {
            name: contents(value)
            for name, value in self.attributes.items()
            if name in TABLES or type(value) in _CONTAINERS
        }

    def tell_changes(self, effects: Effects) -> None:
        """Tell `effects` of the attributes that now differ."""
        attributes = vars(self.module)
        for name, value in attributes.items():
            path = self.prefix + name
            if name in _NO_STATE:
                continue
            if differs(self.attributes.get(name, MISSING), value):
                effects.add(Place(path, attributes, name, of_module=True), value)
            elif name in self.contents and content_differs(self.contents[name], value):
                effects.add_contents(path, value, self.contents[name])

    def made(self) -> list[str]:
        """Names of modules and parameters that are others now, and of new buffers with a remark."""
        modules, now = self.contents["_modules"], self.module._modules
        names = [name for name in {**modules, **now} if modules.get(name) is not now.get(name)]
        names += self.module._parameters.keys() - self.contents["_parameters"].keys()
        buffers = self.contents["_buffers"]
        names += [
            f"{name} (a buffer it makes itself; register it with values before)"
            for name, value in self.module._buffers.items()
            if value is not None and buffers.get(name) is None
        ]
        return [self.prefix + name for name in names]

    def restore(self) -> None:
        """Put attributes and contents back."""
        vars(self.module).clear()
        vars(self.module).update(self.attributes)
        for name, content in self.contents.items():
            refill(self.attributes[name], content)


@contextlib.contextmanager
def restore_module_state(model: nn.Module) -> Iterator[Effects]:
    """Restore every module's attributes on leaving; the effects are then known."""
    before = [ModuleState(fqn, module) for fqn, module in model.named_modules()]
    effects = Effects()
    try:
        yield effects
    finally:
        for each in before:
            each.tell_changes(effects)
            effects.changes += each.made()
        for each in before:
            each.restore()


def warn_of_state(paths: Sequence[str], at: str) -> str:
    """Warn of Python state at `paths`, which forward changes and calls do not; returns a note."""
    changed = ", ".join(paths[:5])
    warn_user(
        f"the forward assigns {changed}{at}; a captured program keeps the value it saw and does "
        "not repeat the assignment. Use a buffer for state that changes from step to step"
    )
    return f"python state assigned in forward is baked in: {changed}"


def differs(before: Any, after: Any) -> bool:
    """Whether `after` is another object, or another number or text."""
    if before is after:
        return False
    return not (isinstance(before, _PLAIN) and type(before) is type(after) and before == after)


def content_differs(before: Any, container: Any) -> bool:
    """Whether a container's contents are no longer what `contents` gave."""
    after = contents(container)
    if len(before) != len(after):
        return True
    if isinstance(before, set):
        return bool(before != after)
    if isinstance(before, dict):
        before, after = _flat(before), _flat(after)
    return any(differs(old, new) for old, new in zip(before, after, strict=True))


def _flat(items: dict[Any, Any]) -> list[Any]:
    return [key_or_value for item in items.items() for key_or_value in item]


_ASSIGN: Any = torch.Tensor.data.__set__  # type: ignore[attr-defined]


_tensor: Any = vars(torch.Tensor.__base__)

NO_COMPUTE: frozenset[Any] = frozenset({
    torch.Tensor.requires_grad_, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.size,
    torch.Tensor.dim, torch.Tensor.element_size, torch.Tensor.is_floating_point,
    torch.Tensor.is_complex,
    *(_tensor[name].__get__ for name in (
        "requires_grad", "is_leaf", "grad_fn", "shape", "dtype", "device", "ndim", "is_cuda",
        "is_meta",
    )),
    _tensor["requires_grad"].__set__,
})  # fmt: skip
"""Functions of tensors that look at no values."""

_GRAD: Any = _tensor["grad"].__get__

_OF_ONE_TENSOR: frozenset[Any] = frozenset({
    torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook,
    torch.Tensor._is_view, torch.Tensor.storage_offset, torch.Tensor.untyped_storage,
    torch.Tensor.data_ptr,
    *(_tensor[name].__get__ for name in ("grad_fn", "is_leaf", "_base")),
})  # fmt: skip
"""Functions that tell tensors of one form apart: where they are from, what hangs on them."""

_AS_NUMBERS: frozenset[Any] = frozenset(
    getattr(torch.Tensor, name)
    for name in ("numpy", "__array__", "tolist", "item", "__bool__", "__float__", "__int__")
)


class PastTheTrace(TorchFunctionMode):
    """Inside this mode what goes past a trace is refused: `.data` assigned, `.grad` read.

    The numbers of a real tensor are read from it, instead of from the fake one it would become;
    `note_values` is told of it, `note_use` of each that is computed with, and `note_look` of a look
    at where a tensor is from, or a hook on one. `names` are those of parameters and buffers, by
    identity.
    """

    def __init__(
        self,
        names: Mapping[int, str],
        note_values: Callable[[Tensor], None],
        note_use: Callable[[Tensor], None],
        note_look: Callable[[], None],
    ) -> None:
        super().__init__()
        self._names = names
        self._note_values = note_values
        self._note_use = note_use
        self._note_look = note_look
        self.assigned = ""  # what had .data assigned
        self._error: Exception | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, unless it is refused."""
        if func == _ASSIGN:
            self.assigned = self._name(args[0])
            self._refuse(
                f"assigns .data of {self.assigned}, which goes past any trace, so a captured "
                "program would not do it; write into a buffer with copy_, or return the new value"
            )
        if func == _GRAD and self._may_have_gradient(args[0]):
            self._refuse(
                f"reads .grad of {self._name(args[0])}, which a trace does not know, and which is "
                "a shard between steps; pass what depends on it as an argument"
            )
        if func in _OF_ONE_TENSOR:
            self._note_look()
        if func not in NO_COMPUTE:
            for each in pytree.tree_leaves((args, kwargs)):
                if is_real(each):
                    self._note_use(each)
        if func in _AS_NUMBERS and is_real(args[0]):
            self._note_values(args[0])
            with torch_trace.without_modes():
                return func(*args, **(kwargs or {}))
        try:
            return func(*args, **(kwargs or {}))
        except torch_trace.untraceable_errors()[0] as error:  # which a model may catch
            self._error = self._error or error
            raise

    def _may_have_gradient(self, tensor: Tensor) -> bool:
        # A buffer has none, and a frozen parameter may have kept an old one.
        is_model_tensor = id(tensor) in self._names
        return is_model_tensor and (tensor.requires_grad or isinstance(tensor, nn.Parameter))

    def _name(self, tensor: Tensor) -> str:
        return self._names.get(id(tensor), "a tensor")

    def _refuse(self, reason: str) -> NoReturn:
        self._error = CaptureError(f"the forward {reason}")
        raise self._error

    def require(self) -> None:
        """Raise the refusal again, if the model caught it."""
        if self._error is not None:
            raise self._error


@contextlib.contextmanager
def no_conversions_to_the_same() -> Iterator[None]:
    """Inside, `module.to(...)` that changes no tensor does nothing.

    nn.Module's own reads `.grad` and assigns `.data` of each parameter in any case. Routers of
    mixtures of experts convert themselves in each call.
    """
    convert = nn.Module._apply

    def _apply(
        module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> nn.Module:
        tensors = itertools.chain(module.parameters(), module.buffers())
        with torch.no_grad():
            if all(fn(tensor) is tensor for tensor in tensors):
                return module
        return convert(module, fn, recurse)

    with patched(nn.Module, "_apply", _apply):
        yield


_aten = torch.ops.aten


# BatchNorm's operators whose schemas do not say that they write running statistics.
_UNSAID = frozenset(
    {
        _aten.native_batch_norm.default,
        _aten.cudnn_batch_norm.default,
        _aten.miopen_batch_norm.default,
    }
)


class WriteError(Exception):
    """An operator writes in place in a trace without functionalization, which is then repeated with
    it; users never see this error.
    """


class NoWrites:
    """Ends a trace, where it was `watching`, if an operator wrote in place."""

    def __init__(self) -> None:
        self._watches = False
        self._met = False

    @contextlib.contextmanager
    def watching(self, watches: bool = True) -> Iterator[None]:
        """Watch, or look away: the operators inside a fake kernel may write.

        A forward that writes is run to its end before it is refused, since it may have changed
        Python state which it will restore.
        """
        before, self._watches = self._watches, watches
        try:
            yield
        finally:
            self._watches = before
        if watches and self._met:
            raise WriteError

    def meet(self, operator: Any) -> None:
        """Note an operator that is about to run."""
        if self._watches and _writes(operator):
            self._met = True

    def require(self, graph: fx.Graph) -> None:
        """Check a finished trace for writes: autograd's own operators run outside of `watching`."""
        if self._met or any(_writes(node.target) for node in graph.nodes):
            raise WriteError


def _writes(operator: Any) -> bool:
    schema = getattr(operator, "_schema", None)
    return schema is not None and (bool(schema.is_mutable) or operator in _UNSAID)

"""The Python attributes of a sharded module: they are those of the model that captures trace."""

from __future__ import annotations

import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor, nn

from graphshard.capture.code_walk import in_library
from graphshard.errors import ModelChangeError, RuntimeStateError
from graphshard.format import some_of
from graphshard.module.switches import SETTERS, answer, is_foreign

_OF_ANY_MODULE = frozenset(vars(nn.Module()))

_LOST = (
    "parameters", "named_parameters", "buffers", "named_buffers", "children", "named_children",
    "modules", "named_modules", "zero_grad", "requires_grad_", "apply", "state_dict",
    "load_state_dict",
)  # fmt: skip


_ABOUT_INPUTS = ("enable_input_require_grads", "disable_input_require_grads")
"""Methods of transformers that hook embeddings, so that checkpoints give frozen layers' inputs
gradients. A program gives every trainable parameter its gradient without them."""


class Changes:
    """Counts changes below a root, so that a step need not look at every module.

    version: of any `training` flag.
    attributes: of any other attribute that a captured program read.
    reads: those, as the identity of the attributes they are among, and their name.
    acting: a method of the model runs on the sharded module.
    root: the sharded module.
    """

    def __init__(self) -> None:
        self.root: weakref.ref[Any] | None = None
        self.version = 0
        self.attributes = 0
        self.reads: set[tuple[int, Any]] = set()
        self.acting = False
        self._partials: list[functools.partial[Any]] = []

    def known(self, value: Any, before: Any) -> Any:
        """The `functools.partial` equal to `value` that an attribute held before, if it is one.

        transformers makes a new one each time that it enables gradient checkpointing; a program is
        found again by the identity of what it read.
        """
        for each in (before, value):
            if type(each) is functools.partial and self._like(each) is None:
                self._partials.append(each)
        like = self._like(value) if type(value) is functools.partial else None
        return value if like is None else like

    def _like(self, value: functools.partial[Any]) -> functools.partial[Any] | None:
        return next((one for one in self._partials if _alike(one, value)), None)

    def note(self, twin: nn.Module, name: str) -> None:
        """Count a change of this attribute if a program read it."""
        self.attributes += (id(vars(twin)), name) in self.reads


class ModelAttributes(nn.Module):
    """Reads, sets and deletes attributes of the module that this one stands for.

    The next call sees a change of an attribute that forward reads: its program is captured anew, or
    looked up where the attribute had this value before. Parameters, buffers, submodules and what
    this class defines itself are its own.
    """

    @property
    def _twin(self) -> nn.Module | None:
        return self.__dict__.get("_graphshard_twin")

    @property
    def _fqn(self) -> str:
        return self.__dict__.get("_graphshard_fqn", "")

    @property
    def _is_whole(self) -> bool:
        """Whether this is the sharded module itself, not a part of it, and is ready."""
        root = self.__dict__["_graphshard_changes"].root
        return root is not None and root() is self

    @property
    def __class__(self) -> type:
        """The model's class, so that `isinstance` takes this for one and inspection sees its code.

        Code which looks for the dropouts among `modules()` meets them; a trainer which looks at the
        class of the model sees what it was written for. `type` still gives graphshard's own class.
        """
        twin = self._twin
        return type(self) if twin is None else type(twin)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise RuntimeStateError(
            f"{self._fqn or 'the sharded module'} cannot become {kind.__name__}; change the "
            "model before graphshard.compile (parametrizations are captured if they are there)"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            twin = self._twin
            if twin is None:
                raise
            missing: Any = self
            value = _attribute(twin, self, name, missing)
            if value is not missing:
                return value
            forwarding = type(twin).__getattr__  # as PEFT's, to the module inside
            if forwarding is not nn.Module.__getattr__:
                try:
                    return self._as_model(forwarding)(name)
                except AttributeError:
                    if not is_foreign(name):
                        raise
            elif not is_foreign(name):
                raise
        return answer(self, name, whole=self._is_whole)

    def __setattr__(self, name: str, value: Any) -> None:
        twin = self._twin
        if twin is None or name in self.__dict__ or name.startswith("_graphshard"):
            super().__setattr__(name, value)
        elif hasattr(type(self), name):
            self._refuse_own(twin, name)
            super().__setattr__(name, value)
        elif name in self._modules or isinstance(value, nn.Module):
            if self._modules.get(name) is not value:
                self._refuse_module(name)
        elif name in self._parameters or name in self._buffers or isinstance(value, nn.Parameter):
            super().__setattr__(name, value)
        else:
            descriptor = getattr(type(twin), name, None)
            if isinstance(descriptor, property) and descriptor.fset is not None:
                descriptor.fset(self, value)
            elif name in SETTERS and self._is_whole and not hasattr(twin, name):
                SETTERS[name](self, value)
            else:
                changes = self.__dict__["_graphshard_changes"]
                setattr(twin, name, changes.known(value, vars(twin).get(name)))
                changes.note(twin, name)

    def __delattr__(self, name: str) -> None:
        twin = self._twin
        if twin is not None and name in self._modules:
            self._refuse_module(name)
        if twin is None or name in vars(self) or name not in vars(twin):
            super().__delattr__(name)
        else:
            delattr(twin, name)
            self.__dict__["_graphshard_changes"].note(twin, name)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refuse a further module.

        Raises:
            RuntimeStateError: always.
        """
        self._refuse_module(name)

    register_module = add_module

    def train(self, mode: bool = True) -> Any:
        """As `nn.Module.train`, or as the model's class or module overrides it."""
        own = self._override("train")
        return super().train(mode) if own is None else own(mode)

    def eval(self) -> Any:
        """As `nn.Module.eval`, or as the model's class or module overrides it."""
        own = self._override("eval")
        return super().eval() if own is None else own()

    def _override(self, name: str) -> Callable[..., Any] | None:
        """The model's own method of this name, acting on this module; None if it is torch's."""
        twin = self._twin
        method = vars(twin).get(name) or getattr(type(twin), name, None) if twin else None
        if method is None or method is getattr(nn.Module, name):
            return None
        if isinstance(method, types.MethodType) and method.__self__ is twin:
            method = method.__func__
        elif name in vars(twin):
            return method
        return self._as_model(method)

    def _as_model(self, method: Callable[..., Any]) -> Callable[..., Any]:
        """`method` of the model's class with this module as `self`, which `super()` accepts."""
        name = getattr(method, "__name__", "a method")

        def call(*args: Any, **kwargs: Any) -> Any:
            changes = self.__dict__["_graphshard_changes"]
            before, changes.acting = changes.acting, True
            try:
                return method(self, *args, **kwargs)
            except ModelChangeError as error:
                if before:
                    raise
                raise ModelChangeError.by(name, error) from error
            finally:
                changes.acting = before

        call.__name__ = name
        return call

    def _refuse_own(self, twin: nn.Module, name: str) -> None:
        if name == "forward" and self._fqn:
            raise RuntimeStateError(
                f"the forward of {self._fqn!r} is captured with the model's and never called by "
                "itself; set it on the model before compiling it"
            )
        if name in vars(twin) and name not in _OF_ANY_MODULE:
            raise RuntimeStateError(
                f"{name!r} of a sharded module is graphshard's own, so the model's attribute of "
                "this name cannot be set through it; set it on the model before compiling it"
            )

    def _refuse_module(self, name: str) -> NoReturn:
        path = f"{self._fqn}.{name}" if self._fqn else name
        raise ModelChangeError(
            f"{path!r} cannot be added, replaced or removed as a module: the plan has the model's "
            "modules as they were; change the model and compile it again (state_dict() and "
            "load_state_dict() carry the weights over)"
        )


def _attribute(twin: nn.Module, part: ModelAttributes, name: str, missing: Any) -> Any:
    """The attribute of `twin`; `missing` if it has none that can be shown."""
    if name in vars(twin):
        value = vars(twin)[name]
        return missing if _holds_the_copys_own(value) else value
    owner = next((base for base in type(twin).__mro__ if name in vars(base)), None)
    if owner is None:
        return missing
    value = vars(owner)[name]
    if isinstance(value, property) and value.fget is not None:
        return part._as_model(value.fget)()
    if isinstance(value, (staticmethod, classmethod)):
        return getattr(type(twin), name)
    if isinstance(value, types.FunctionType):
        if name in _ABOUT_INPUTS and value.__module__.partition(".")[0] == "transformers":
            return _do_nothing
        changes = part.__dict__["_graphshard_changes"]
        if changes.acting:
            return part._as_model(value)
        if not name.startswith("_"):
            return _method(changes, f"{part._fqn}.{name}" if part._fqn else name, value)
    return missing if hasattr(type(value), "__get__") else value


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Stands for methods that a sharded module does not need."""


def _alike(first: functools.partial[Any], second: functools.partial[Any]) -> bool:
    """Whether both call one function with the same arguments, if these are plain values."""
    forms = [[*each.args, *sorted(each.keywords.items())] for each in (first, second)]
    values = [*second.args, *second.keywords.values()]
    plain = all(isinstance(value, (type(None), bool, int, str)) for value in values)
    return plain and first.func is second.func and repr(forms[0]) == repr(forms[1])


def _method(changes: Changes, path: str, method: types.FunctionType) -> Callable[..., Any]:
    """The method of the model at `path`, run by `call_method` of the root."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        root = None if changes.root is None else changes.root()
        if root is None:
            raise RuntimeStateError(
                f"{path} is a method of a sharded module that is gone; keep the sharded module"
            )
        return root.call_method(path, *args, **kwargs)

    signature = inspect.signature(method)
    call.__signature__ = signature.replace(  # type: ignore[attr-defined]
        parameters=[*signature.parameters.values()][1:]
    )
    return call


class ModelSignature:
    """A `forward` whose signature, read from a sharded module, is that of the model's forward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, module: ModelAttributes | None, owner: type) -> Callable[..., Any]:
        return self.function if module is None else _BoundForward(self.function, module)


class _BoundForward(functools.partial[Any]):
    @property
    def __signature__(self) -> inspect.Signature:
        twin = self.args[0]._twin
        return inspect.signature(self.func if twin is None else twin.forward)


def _holds_the_copys_own(value: Any) -> bool:
    """Whether it is or holds a module or weight of the copy that captures trace."""
    items = value.values() if isinstance(value, dict) else value
    inside = items if isinstance(value, (list, tuple, dict, set)) else (value,)
    return any(
        isinstance(each, nn.Module) or (isinstance(each, Tensor) and each.device.type == "meta")
        for each in inside
    )


def link(root: ModelAttributes, meta_model: nn.Module) -> None:
    """Give `root` and the modules below it the modules of `meta_model` to take attributes from."""
    for part, twin in zip(root.modules(), meta_model.modules(), strict=True):
        part.__dict__["_graphshard_twin"] = twin


def warn_of_lost_methods(model: nn.Module) -> None:
    """Warn of methods of the model that override what a sharded module does by itself."""
    lost: dict[str, None] = {}
    for kind in {type(module): None for module in model.modules()}:
        for name in _LOST:
            owner = next(base for base in kind.__mro__ if name in vars(base))
            if owner is not nn.Module and not in_library(owner.__module__):
                lost[f"{owner.__name__}.{name}"] = None
    if lost:
        warnings.warn(
            f"a sharded module does not call {some_of([*lost])}, but nn.Module's own; do what it "
            "does on the sharded module, for example pass the parameters to train to the optimizer",
            stacklevel=4,
        )

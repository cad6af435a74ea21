"""The module tree that holds the shards: the model's structure and names without its code.

Python attributes of its modules are those of the model that captures trace.
"""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.capture.code_walk import in_library
from graphshard.errors import ModelChangeError, RuntimeStateError, warn_user
from graphshard.format import some_of
from graphshard.module.switches import SETTERS, answer, is_foreign
from graphshard.runtime.shards import Shard
from graphshard.torch_private import compat as torch_compat

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
        self._partials: dict[Any, functools.partial[Any]] = {}

    def known(self, value: Any, before: Any) -> Any:
        """The `functools.partial` equal to `value` that an attribute held before, if it is one.

        transformers makes a new one each time that it enables gradient checkpointing; a program is
        found again by the identity of what it read.
        """
        for each in (before, value):
            form = _form(each)
            if form is not None:
                self._partials.setdefault(form, each)
        return self._partials.get(_form(value), value)

    def note(self, twin: nn.Module, name: str) -> None:
        """Count a change of this attribute if a program read it."""
        self.attributes += (id(vars(twin)), name) in self.reads


class _NothingOnTop(OrderedDict[str, Any]):
    """The register of what was applied to a module, in which `fully_shard` looks for its name.

    Other functions of torch look for other names there, such as those that take state dicts.
    """

    def __contains__(self, name: object) -> bool:
        if name == "fully_shard":
            raise RuntimeStateError(
                "fully_shard cannot be applied to a sharded module or to a part of one, whose "
                "parameters are sharded already; leave it out, or apply it to the plain model "
                "instead of graphshard.compile"
            )
        return super().__contains__(name)


_NOTHING_ON_TOP = _NothingOnTop()


class TreeModule(nn.Module):
    """Stands for a module of the model: its children, parameters, buffers and `training` flag.

    Its other attributes are read, set and deleted on the model's module that programs are captured
    from. The next call sees a change of one that forward reads: its program is captured anew, or
    looked up where the attribute had this value before.
    """

    _graphshard_changes: Changes
    _graphshard_kind: type  # of the model's module
    _graphshard_repr: str
    _graphshard_training: bool
    _graphshard_fqn = ""
    _graphshard_twin: nn.Module | None = None

    def __init__(self, original: nn.Module, changes: Changes) -> None:
        vars(self)["_graphshard_changes"] = changes
        super().__init__()
        vars(self)[torch_compat.composable_registry_key()] = _NOTHING_ON_TOP
        vars(self)["_graphshard_kind"] = type(original)
        vars(self)["_graphshard_repr"] = original.extra_repr()
        self.training = original.training

    @property
    def training(self) -> bool:
        """Whether this module is in training mode; programs are captured for each combination."""
        return self._graphshard_training

    @training.setter
    def training(self, mode: bool) -> None:
        vars(self)["_graphshard_training"] = mode
        self._graphshard_changes.version += 1

    def extra_repr(self) -> str:
        """The description that the model's own module gives."""
        return self._graphshard_repr

    def _get_name(self) -> str:
        return self._graphshard_kind.__name__

    @property
    def _is_whole(self) -> bool:
        """Whether this is the sharded module itself, not a part of it, and is ready."""
        root = self._graphshard_changes.root
        return root is not None and root() is self

    @property
    def __class__(self) -> type:
        """The model's class, so that `isinstance` takes this for one and inspection sees its code.

        Code which looks for the dropouts among `modules()` meets them; a trainer which looks at the
        class of the model sees what it was written for. `type` still gives graphshard's own class.
        """
        twin = self._graphshard_twin
        return type(self) if twin is None else type(twin)

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise RuntimeStateError(
            f"{self._graphshard_fqn or 'the sharded module'} cannot become {kind.__name__}; change "
            "the model before graphshard.compile (parametrizations are captured if they are there)"
        )

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            twin = self._graphshard_twin
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
        twin = self._graphshard_twin
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
                changes = self._graphshard_changes
                setattr(twin, name, changes.known(value, vars(twin).get(name)))
                changes.note(twin, name)

    def __delattr__(self, name: str) -> None:
        for kind, table in (("parameter", self._parameters), ("buffer", self._buffers)):
            if name in table:
                self._refuse_change(kind, name)
        twin = self._graphshard_twin
        if twin is not None and name in self._modules:
            self._refuse_module(name)
        if twin is None or name in vars(self) or name not in vars(twin):
            super().__delattr__(name)
        else:
            delattr(twin, name)
            self._graphshard_changes.note(twin, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Replace a parameter by another one of its shape.

        Raises:
            RuntimeStateError: the model has no such parameter, or it would be removed.
        """
        if name not in self._parameters or param is None:
            self._refuse_change("parameter", name)
        super().register_parameter(name, param)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Replace a buffer.

        Raises:
            RuntimeStateError: the model has no such buffer, or it would be removed.
        """
        if name not in self._buffers or tensor is None:
            self._refuse_change("buffer", name)
        super().register_buffer(name, tensor, persistent)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Refuse a further module."""
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
        twin = self._graphshard_twin
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
            changes = self._graphshard_changes
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
        if name == "forward" and self._graphshard_fqn:
            raise RuntimeStateError(
                f"the forward of {self._graphshard_fqn!r} is captured with the model's and never "
                "called by itself; set it on the model before compiling it"
            )
        if name in vars(twin) and name not in _OF_ANY_MODULE:
            raise RuntimeStateError(
                f"{name!r} of a sharded module is graphshard's own, so the model's attribute of "
                "this name cannot be set through it; set it on the model before compiling it"
            )

    def _refuse_module(self, name: str) -> NoReturn:
        raise ModelChangeError(
            f"{_path(self, name)!r} cannot be added, replaced or removed as a module: the plan has "
            "the model's modules as they were; change the model and compile it again (state_dict() "
            "and load_state_dict() carry the weights over)"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Do nothing, which is all that a `to`, `float` or `cuda` of what is so already does."""
        named = [*self.named_parameters(recurse=recurse), *self.named_buffers(recurse=recurse)]
        kinds: dict[Any, str] = {}
        for name, tensor in named:
            local = torch_compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            kinds.setdefault((local.dtype, local.device), name)
        for (dtype, device), name in kinds.items():
            with torch_compat.past_torch_function_modes():
                new = fn(torch.empty(0, dtype=dtype, device=device))
            if (new.dtype, new.device) != (dtype, device):
                raise ModelChangeError(
                    f"a sharded module cannot be cast or moved: {_path(self, name)!r} is {dtype} "
                    f"on {device} in its plan and programs, and would be {new.dtype} on "
                    f"{new.device}; cast or move the model before graphshard.compile (device= "
                    "chooses the ranks' device), or compute in another dtype by the policy's "
                    "mixed_precision or torch.autocast"
                )
        return self

    def _refuse_change(self, kind: str, name: str) -> NoReturn:
        raise ModelChangeError(
            f"{kind} {_path(self, name)!r} cannot be added or removed, since the plan has the "
            "model's as they were; weight_norm, spectral_norm, prune and parametrizations are "
            "captured if they are applied before graphshard.compile"
        )


def _path(part: TreeModule, name: str) -> str:
    """The name of an attribute of `part` from the root."""
    return f"{part._graphshard_fqn}.{name}" if part._graphshard_fqn else name


def _attribute(twin: nn.Module, part: TreeModule, name: str, missing: Any) -> Any:
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
            return lambda *_, **__: None  # a sharded module does not need it
        changes = part._graphshard_changes
        if changes.acting:
            return part._as_model(value)
        if not name.startswith("_"):
            return _method(changes, _path(part, name), value)
    return missing if hasattr(type(value), "__get__") else value


def _form(value: Any) -> tuple[int, str] | None:
    """The same for two `functools.partial` of one function and arguments, if these are plain."""
    if type(value) is not functools.partial:
        return None
    arguments = [*value.args, *value.keywords.values()]
    if not all(isinstance(each, (type(None), bool, int, str)) for each in arguments):
        return None
    return id(value.func), repr([*value.args, *sorted(value.keywords.items())])


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


def _holds_the_copys_own(value: Any) -> bool:
    """Whether it is or holds a module or weight of the copy that captures trace."""
    items = value.values() if isinstance(value, dict) else value
    inside = items if isinstance(value, (list, tuple, dict, set)) else (value,)
    return any(
        isinstance(each, nn.Module) or (isinstance(each, Tensor) and each.device.type == "meta")
        for each in inside
    )


def link(root: TreeModule, meta_model: nn.Module) -> None:
    """Give `root` and the modules below it the modules of `meta_model` to take attributes from."""
    for part, twin in zip(root.modules(), meta_model.modules(), strict=True):
        vars(part)["_graphshard_twin"] = twin


def warn_of_lost_methods(model: nn.Module) -> None:
    """Warn of methods of the model that override what a sharded module does by itself."""
    lost: dict[str, None] = {}
    for kind in {type(module): None for module in model.modules()}:
        for name in _LOST:
            owner = next(base for base in kind.__mro__ if name in vars(base))
            if owner is not nn.Module and not in_library(owner.__module__):
                lost[f"{owner.__name__}.{name}"] = None
    if lost:
        warn_user(
            f"a sharded module does not call {some_of([*lost])}, but nn.Module's own; do what it "
            "does on the sharded module, for example pass the parameters to train to the optimizer",
        )


class TreePart(TreeModule):
    """A module below the root: it holds values, and is never called by itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse the call."""
        raise RuntimeStateError(
            f"{self._get_name()} is a part of a sharded module and cannot be called by itself; "
            f"call the whole module, or sharded.submodule_forward({self._graphshard_fqn!r}, ...), "
            "which captures a program for it"
        )

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeStateError(
            f"{self._graphshard_fqn} ({self._get_name()}) is a part of a sharded module, whose "
            "parts are not called one by one, so its hooks would never run; register hooks on the "
            "model before compiling it (what they compute is captured), or on the whole sharded "
            "module"
        )

    register_forward_pre_hook = _refuse_hook
    register_forward_hook = _refuse_hook
    register_full_backward_pre_hook = _refuse_hook
    register_full_backward_hook = _refuse_hook
    register_backward_hook = _refuse_hook


class TreeContainer(TreePart):
    """A list, sequence or dict of modules, indexed and iterated as the model's own is."""

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[Any]:
        is_dict = issubclass(self._graphshard_kind, nn.ModuleDict)
        return iter(self._modules if is_dict else self._parts())

    def __getitem__(self, key: int | slice | str) -> Any:
        return self._modules[key] if isinstance(key, str) else self._parts()[key]

    def _parts(self) -> list[Any]:
        return list(self._modules.values())

    def __setitem__(self, key: int | str, module: nn.Module) -> None:
        self._refuse_module(str(key))

    def __delitem__(self, key: int | slice | str) -> None:
        self._refuse_module(str(key))

    def __iadd__(self, modules: Any) -> Any:
        self._refuse_module(str(len(self)))


def build_sharded_tree(
    root: TreeModule,
    model: nn.Module,
    shards: Mapping[str, Shard],
    device: torch.device,
    changes: Changes,
) -> None:
    """Give `root` the children, parameters and buffers of `model`, under the same names.

    Shared modules, parameters and buffers stay shared. Parameters and buffers have no values yet.
    """
    modules: dict[nn.Module, TreeModule] = {model: root}
    buffers: dict[Tensor, Tensor] = {}
    for fqn, original in model.named_modules():
        mine = modules[original]
        vars(mine)["_graphshard_fqn"] = fqn
        for name, child in original._modules.items():
            if child is not None and child not in modules:
                is_container = isinstance(child, (nn.ModuleList, nn.ModuleDict, nn.Sequential))
                modules[child] = (TreeContainer if is_container else TreePart)(child, changes)
            # Not add_module: the root has attributes of its own, which a child's name may equal.
            mine._modules[name] = None if child is None else modules[child]
        for name, param in original._parameters.items():
            if param is None:
                mine._parameters[name] = None
                continue
            shard = shards[f"{fqn}.{name}" if fqn else name]
            mine._parameters[name] = shard.param
            shard.holders.append((mine._parameters, name))
        for name, buffer in original._buffers.items():
            if buffer is not None and buffer not in buffers:
                buffers[buffer] = torch.empty_like(buffer, device=device)
            mine._buffers[name] = None if buffer is None else buffers[buffer]
        mine._non_persistent_buffers_set |= torch_compat.non_persistent_buffers(original)


def training_flags(root: nn.Module) -> tuple[bool, ...]:
    """`training` of every module below `root`, in order."""
    return tuple(module.training for module in root.modules())

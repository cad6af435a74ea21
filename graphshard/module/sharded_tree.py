"""The module tree that holds the shards: the model's structure and names without its code."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import ModelChangeError, RuntimeStateError
from graphshard.module.model_attributes import Changes, ModelAttributes
from graphshard.runtime.shards import Shard
from graphshard.torch_private import compat as torch_compat


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


class TreeModule(ModelAttributes):
    """Stands for a module of the model: its children, parameters, buffers and `training` flag.

    Its other attributes are those of the model's module that programs are captured from.
    """

    def __init__(self, original: nn.Module, changes: Changes) -> None:
        self.__dict__["_graphshard_changes"] = changes
        super().__init__()
        self.__dict__[torch_compat.composable_registry_key()] = _NOTHING_ON_TOP
        self.__dict__["_graphshard_name"] = type(original).__name__
        self.__dict__["_graphshard_repr"] = original.extra_repr()
        self.training = original.training

    @property
    def training(self) -> bool:
        """Whether this module is in training mode; programs are captured for each combination."""
        return self.__dict__["_graphshard_training"]

    @training.setter
    def training(self, mode: bool) -> None:
        self.__dict__["_graphshard_training"] = mode
        self.__dict__["_graphshard_changes"].version += 1

    def extra_repr(self) -> str:
        """The description that the model's own module gives."""
        return self.__dict__["_graphshard_repr"]

    def _get_name(self) -> str:
        return self.__dict__["_graphshard_name"]

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

    def __delattr__(self, name: str) -> None:
        for kind, table in (("parameter", self._parameters), ("buffer", self._buffers)):
            if name in table:
                self._refuse_change(kind, name)
        super().__delattr__(name)

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
                path = ".".join(filter(None, (self._fqn, name)))
                raise ModelChangeError(
                    f"a sharded module cannot be cast or moved: {path!r} is {dtype} on {device} in "
                    f"its plan and programs, and would be {new.dtype} on {new.device}; cast or "
                    "move the model before graphshard.compile (device= chooses the ranks' device), "
                    "or compute in another dtype by the policy's mixed_precision or torch.autocast"
                )
        return self

    def _refuse_change(self, kind: str, name: str) -> NoReturn:
        path = ".".join(filter(None, (self.__dict__["_graphshard_fqn"], name)))
        raise ModelChangeError(
            f"{kind} {path!r} cannot be added or removed, since the plan has the model's as they "
            "were; weight_norm, spectral_norm, prune and parametrizations are captured if they are "
            "applied before graphshard.compile"
        )


class TreePart(TreeModule):
    """A module below the root: it holds values, and is never called by itself."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse the call."""
        raise RuntimeStateError(
            f"{self._get_name()} is a part of a sharded module and cannot be called by itself; "
            f"call the whole module, or sharded.submodule_forward({self._fqn!r}, ...), which "
            "captures a program for it"
        )

    def _refuse_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeStateError(
            f"{self._fqn} ({self._get_name()}) is a part of a sharded module, whose parts are not "
            "called one by one, so its hooks would never run; register hooks on the model "
            "before compiling it (what they compute is captured), or on the whole sharded module"
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
        return iter(self._modules if issubclass(self._kind, nn.ModuleDict) else self._parts())

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

    @property
    def _kind(self) -> type:
        return self.__dict__["_graphshard_kind"]


def _tree_module_for(original: nn.Module, changes: Changes) -> TreePart:
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    if not isinstance(original, containers):
        return TreePart(original, changes)
    container = TreeContainer(original, changes)
    container.__dict__["_graphshard_kind"] = type(original)
    return container


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
        mine.__dict__["_graphshard_fqn"] = fqn
        for name, child in original._modules.items():
            if child is not None and child not in modules:
                modules[child] = _tree_module_for(child, changes)
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

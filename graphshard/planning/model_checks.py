"""Check that a model can be sharded: refuse it, or warn of state that would get lost."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from graphshard.errors import PlanError, warn_user
from graphshard.format import some_of
from graphshard.policy.tree import ModuleTree
from graphshard.torch_private import compat as torch_compat

ORIGINAL = "_orig_mod"
"""The name by which a module made by `torch.compile` holds what it was made from."""


def require_module(model: object) -> None:
    """Check that `model` is an nn.Module."""
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise PlanError(
            f"the model must be an nn.Module; got the class {model.__name__}; make an instance of "
            "it first (on the meta device, if it is large)"
        )
    if not isinstance(model, nn.Module):
        raise PlanError(f"the model must be an nn.Module; got {type(model).__name__}")


def without_compiler(model: nn.Module) -> nn.Module:
    """`model`, or what it was made from by `torch.compile`; warns where that is met in it.

    A program holds the operators of the forward as Python runs them.
    """
    if not isinstance(model, nn.Module):
        return model
    kinds = torch_compat.compiled_modules()
    original: nn.Module = getattr(model, ORIGINAL) if isinstance(model, kinds) else model
    wrapped, called = [], []
    for fqn, module in original.named_modules():
        if isinstance(module, kinds):
            wrapped.append(fqn)
        elif torch_compat.is_called_compiled(module):
            called.append(fqn or "the model")
    if original is not model or wrapped or called:
        names = "" if original is not model else f" of {some_of([*called, *wrapped])}"
        rest = f"; names of parameters keep {ORIGINAL!r} in them" if wrapped else ""
        warn_user(
            f"torch.compile{names} has no effect in a sharded module, which runs the operators of "
            f'the forward by itself{rest}; leave it out, and pass backend="inductor" to '
            "graphshard.compile for compiled compute",
        )
    return original


def check_model(tree: ModuleTree, world_size: int) -> None:
    """Refuse a model that cannot be sharded; warn of state and hooks that sharding loses."""
    for fqn, module in tree.modules.items():
        if isinstance(module, torch.jit.ScriptModule):
            raise PlanError(
                f"every module must be plain Python, since capture puts hooks on it; "
                f"{_described(fqn, module)} is a torch.jit.ScriptModule; pass the module it was "
                "scripted or traced from"
            )
        _refuse_communication(fqn, module, world_size)
        _refuse_unfit(fqn, module)
        _refuse_other_names(fqn, module)
    _refuse_shared_memory(tree.modules[""])
    _warn_of_classes(tree)
    _warn_of_lost_state(tree)
    _warn_of_hooks(tree)


def _refuse_communication(fqn: str, module: nn.Module, world_size: int) -> None:
    wrappers = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    if isinstance(module, wrappers):
        raise PlanError(
            f"{_described(fqn, module)} reduces gradients by itself, as a sharded module does; "
            "pass its .module"
        )
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and isinstance(module, fsdp.FullyShardedDataParallel):
        raise PlanError(
            f"{_described(fqn, module)} shards its parameters by itself; pass the module that it "
            "was made from, before FullyShardedDataParallel took its parameters"
        )
    if fsdp is not None and isinstance(module, fsdp.FSDPModule):
        raise PlanError(
            f"{_described(fqn, module)} is sharded by fully_shard already; pass the model before "
            "fully_shard, or a new one, and give the classes that fully_shard was called on to "
            "BlockPolicy"
        )
    if isinstance(module, nn.SyncBatchNorm) and module.training and world_size > 1:
        raise PlanError(
            f"{_described(fqn, module)} issues collectives in its forward, which a program does "
            "not hold; use BatchNorm, with the statistics of each rank, a norm without any "
            "(GroupNorm), or eval() on this module"
        )


def _tensors(fqn: str, module: nn.Module) -> Iterator[tuple[str, Any]]:
    """The parameters and buffers that `module` itself holds, each with its kind and name."""
    for kind, table in (("parameter", module._parameters), ("buffer", module._buffers)):
        for name, tensor in table.items():
            if tensor is not None:
                yield f"{kind} {f'{fqn}.{name}' if fqn else name!r}", tensor


def _refuse_unfit(fqn: str, module: nn.Module) -> None:
    for name, tensor in _tensors(fqn, module):
        if is_lazy(tensor):
            raise PlanError(
                f"{name} has no shape yet (its module is lazy); run the model once on a sample "
                "input before planning it"
            )
        if problem := unfit(tensor):
            raise PlanError(
                f"{name} {problem.reason}; compile the model with plain dense tensors (before it "
                "is sharded, converted or quantized; here "
                f"{problem.instead}), and leave modules that need others out of it"
            )


def _warn_of_classes(tree: ModuleTree) -> None:
    special = [
        f"{name} ({class_name(tensor)})"
        for fqn, module in tree.modules.items()
        for name, tensor in _tensors(fqn, module)
        if not is_plain(tensor)
    ]
    if special:
        warn_user(
            "a captured forward sees plain parameters and tensors, so it takes no path that asks "
            f"for another class, and returns none; {some_of(special)}",
        )


def _refuse_other_names(fqn: str, module: nn.Module) -> None:
    if type(module).named_parameters is nn.Module.named_parameters:
        return
    in_tree = [name for name, _ in nn.Module.named_parameters(module)]
    reported = [name for name, _ in module.named_parameters()]
    strange = [name for name in reported if name not in set(in_tree)]
    # Only the root's named_parameters() is used, so only there a missing name matters.
    hidden = [] if fqn else [name for name in in_tree if name not in set(reported)]
    if strange or hidden:
        raise PlanError(
            "parameters must have the names of the module tree, by which checkpoints and plans "
            f"know them; named_parameters() of {_described(fqn, module)} gives "
            f"{some_of(strange) or 'nothing'} where the tree has {some_of(hidden or in_tree)}; "
            "pass the modules without their renaming wrappers. Instead of checkpoint_wrapper call "
            'torch.utils.checkpoint in the forward, or use a policy with recompute="units"'
        )


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuse two parameters, or a parameter and a buffer, that overlap without being one object."""
    by_storage: dict[int, list[tuple[Any, Any, bool, str]]] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.numel():
            steps = zip(tensor.shape, tensor.stride(), strict=True)
            extent = 1 + sum((size - 1) * stride for size, stride in steps)
            start = tensor.storage_offset() * tensor.itemsize
            place = start, start + extent * tensor.itemsize, isinstance(tensor, nn.Parameter), name
            by_storage.setdefault(tensor.untyped_storage()._cdata, []).append(place)
    for places in by_storage.values():
        ends = {True: (0, ""), False: (0, "")}  # the farthest yet, of parameters and of buffers
        for start, end, is_param, name in sorted(places):
            reach, other = max(ends.values()) if is_param else ends[True]
            if start < reach:
                raise PlanError(
                    f"{other!r} and {name!r} share memory but are two tensors, and sharding would "
                    "part them; make them one nn.Parameter under both names (then it is tied), or "
                    "give one of them a clone"
                )
            ends[is_param] = max(ends[is_param], (end, name))


def _warn_of_lost_state(tree: ModuleTree) -> None:
    hooked, extra = [], []
    for fqn, module in tree.modules.items():
        if torch_compat.has_state_dict_hooks(module):
            hooked.append(_described(fqn, module))
        if type(module).get_extra_state is not nn.Module.get_extra_state:
            extra.append(_described(fqn, module))
    for kind, modules in (("state-dict hooks", hooked), ("extra state", extra)):
        if modules:
            warn_user(
                "the sharded state_dict() holds parameters and buffers under their own names, and "
                f"nothing of the {kind} of {some_of(modules)}; save and load what they add "
                "yourself",
            )


_HOOKS_OF_TENSORS_ALONE = ("transformers", "peft")
"""Libraries whose own hooks have no effects but on tensors, such as to make them require grad."""


def _warn_of_hooks(tree: ModuleTree) -> None:
    hooks = [
        f"{_described(fqn, module)}: {getattr(hook, '__qualname__', type(hook).__name__)}"
        for fqn, module in tree.modules.items()
        for hook in torch_compat.module_hooks(module)
        if str(getattr(hook, "__module__", "")).partition(".")[0] not in _HOOKS_OF_TENSORS_ALONE
    ]
    if hooks:
        warn_user(
            "hooks on modules are captured with the forward and the backward: their tensor "
            "operations are in the program, and each call puts the tensors that they keep where "
            "they put them, but other effects in Python (print, count) happen only while "
            f"capturing; {some_of(hooks)}",
        )


def _described(fqn: str, module: nn.Module) -> str:
    return f"{fqn or 'the model'} ({type(module).__name__})"


# -- tensors that are more than dense values ------------------------------------------------------


_NO_BEHAVIOUR = frozenset(
    {
        "__annotations__",
        "__copy__",
        "__deepcopy__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__getstate__",
        "__init__",
        "__init_subclass__",
        "__module__",
        "__new__",
        "__orig_bases__",
        "__reduce__",
        "__reduce_ex__",
        "__repr__",
        "__setstate__",
        "__slots__",
        "__static_attributes__",
        "__weakref__",
    }
)


_HOOKS = "fsdp_"  # fsdp_pre_all_gather and the like, by which FSDP2 gathers such a parameter


def is_plain(tensor: Tensor) -> bool:
    """Whether the class of `tensor` is torch's own, with nothing to lose."""
    kind = type(tensor)
    return kind is Tensor or kind is nn.Parameter or kind is torch_compat.fake_tensor()


@dataclass(frozen=True)
class Unfit:
    """Why a program cannot hold a tensor (the end of a sentence about it), and what it can hold."""

    reason: str
    instead: str


def unfit(tensor: Tensor) -> Unfit | None:
    """Why a program cannot hold `tensor`; None if it can."""
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        names: Sequence[Any] = mesh.mesh_dim_names or range(mesh.ndim)
        placed = ", ".join(
            f"{placement!r} over mesh dim {name!r} of size {size}"
            for placement, name, size in zip(tensor.placements, names, mesh.shape, strict=True)
        )
        return Unfit(
            f"is a DTensor: {placed}; another system (tensor parallel, fully_shard) shards it",
            "to_local() or full_tensor()",
        )
    own = () if is_plain(tensor) else own_behaviour(type(tensor))
    if own:
        reason = f"is a {class_name(tensor)}, and a program would not run its own {some_of(own)}"
        if own[0].startswith(_HOOKS):
            return Unfit(
                f"{reason}, but gather the values as they are",
                "plain parameters, as torchao's enable_fsdp_float8_all_gather=False leaves them",
            )
        return Unfit(reason, "a torch.Tensor of its values")
    if tensor.is_nested:
        return Unfit("is a nested tensor, whose rows differ in size", "to_padded_tensor(0.0)")
    if tensor.layout is not torch.strided:
        return Unfit(f"has the layout {tensor.layout}, not torch.strided", "to_dense()")
    if tensor.is_quantized:
        return Unfit(f"is quantized ({tensor.dtype}); a program has no scales", "dequantize()")
    return None


@cache
def own_behaviour(kind: type) -> tuple[str, ...]:
    """The differences of a class of tensors from torch's: hooks of FSDP2, overridden attributes.

    The hooks come first, then torch's protocols.
    """
    names: set[str] = set()
    for base in kind.__mro__:
        if base is nn.Parameter or base is Tensor:
            break
        overridden = {name for name in vars(base) if hasattr(nn.Parameter, name)} - _NO_BEHAVIOUR
        names |= overridden | {name for name in vars(base) if name.startswith(_HOOKS)}
    return tuple(sorted(names, key=lambda n: (not n.startswith(_HOOKS), n[:8] != "__torch_", n)))


def class_name(tensor: Tensor) -> str:
    """The class of `tensor` after the package that it is from, e.g. "torchao.Int8Tensor"."""
    kind = type(tensor)
    package = kind.__module__.partition(".")[0]
    return kind.__qualname__ if package == "__main__" else f"{package}.{kind.__qualname__}"

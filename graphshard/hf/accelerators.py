"""Accelerate: what an `Accelerator` does with a sharded module, and compiling models for it.

`let_accelerators_prepare` replaces six methods of the class once. `prepare` compiles the models of
an accelerator that `shard_models_of` was called for, and gives their optimizers the new parameters.
`prepare_model` hands a sharded module back, under the accelerator's autocast, where Accelerate
would wrap it in DDP. `save_state` and `load_state` write and read it, and the states of its
optimizers, as `save_checkpoint` does. `get_state_dict` and `save_model` give and write whole
tensors on the main process.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, wraps
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from graphshard.api import compile as compile_module
from graphshard.errors import CheckpointError, PolicyError
from graphshard.module.sharded_module import ShardedModule
from graphshard.planning.planner import require_policy
from graphshard.planning.searched import PolicySearch
from graphshard.policy.accelerate import from_accelerate
from graphshard.policy.base import Policy
from graphshard.runtime.calls import call_text
from graphshard.state import save
from graphshard.state.save import checked_size
from graphshard.torch_private.patches import patched_for_good

try:
    from accelerate import Accelerator, PartialState
    from accelerate.utils import DistributedType, DynamoBackend, FullyShardedDataParallelPlugin
except ImportError as error:
    raise ImportError("graphshard.hf needs Accelerate; install graphshard[hf]") from error


_POLICIES: weakref.WeakKeyDictionary[Any, tuple[Policy, Mapping[str, Any]]] = (
    weakref.WeakKeyDictionary()
)
"""By accelerator, what `shard_models_of` was given."""


def shard_models_of(
    accelerator: Accelerator, policy: Policy | None = None, **options: Any
) -> Accelerator:
    """Make `accelerator.prepare` compile the models that it is given.

    The accelerator then works as one without FSDP: `accumulate`, `no_sync`, `backward`,
    `clip_grad_norm_`, `save_state` and `load_state` act on the sharded module. Every rank takes
    rank 0's weights and buffers, as with DDP.

    Args:
        accelerator: without models yet.
        policy: None: what the FSDP settings of the accelerator ask for, from `accelerate config`,
            the environment or a plugin; see `policy_of_accelerator`.
        options: of `graphshard.compile`, such as `mesh` or `backend`.

    Returns:
        The accelerator.

    Raises:
        PolicyError: there is no policy, or something else in its place, models were prepared
            before, a setting contradicts it, or the accelerator counts other processes than the
            process group has ranks.
    """
    let_accelerators_prepare()
    _require_all_ranks(accelerator)
    if accelerator._models:
        raise PolicyError(
            "shard_models_of: the accelerator has prepared a model already; call this right after "
            "making the accelerator"
        )
    if policy is None:
        policy = policy_of_accelerator(accelerator)
    if not isinstance(policy, PolicySearch):
        require_policy(policy)
    _POLICIES[accelerator] = (policy, options)
    state = accelerator.state
    if state.distributed_type == DistributedType.FSDP:  # its branches would treat models as FSDP's
        several = accelerator.num_processes > 1
        state.distributed_type = DistributedType.MULTI_GPU if several else DistributedType.NO
        PartialState._shared_state["distributed_type"] = state.distributed_type
        state.fsdp_plugin = None
    return accelerator


def policy_of_accelerator(accelerator: Accelerator) -> Policy:
    """The policy that the FSDP settings of an accelerator ask for.

    Raises:
        PolicyError: it has none, or a setting has no counterpart; names the key.
    """
    plugin = getattr(accelerator.state, "fsdp_plugin", None)
    if plugin is None and asks_for_fsdp():
        plugin = FullyShardedDataParallelPlugin()  # which an accelerator on CPUs does not keep
    if plugin is None:
        raise PolicyError(
            "the accelerator has no FSDP settings to take a policy from; pass policy=, or start "
            "the script with an Accelerate configuration whose distributed_type is FSDP"
        )
    config = {"fsdp_config": _settings(plugin), "mixed_precision": accelerator.mixed_precision}
    return from_accelerate(config)


def asks_for_fsdp() -> bool:
    """Whether the script was started with an Accelerate configuration of FSDP."""
    return os.environ.get("ACCELERATE_USE_FSDP", "").lower() == "true"


def _settings(plugin: Any) -> dict[str, Any]:
    """The settings of a plugin under the names of a configuration file."""
    two = plugin.fsdp_version == 2
    wrap = os.environ.get("FSDP_AUTO_WRAP_POLICY") or _wrap_of(plugin)
    settings: dict[str, Any] = {
        "fsdp_version": plugin.fsdp_version,
        "fsdp_auto_wrap_policy": wrap,
        "fsdp_transformer_layer_cls_to_wrap": ",".join(plugin.transformer_cls_names_to_wrap or ()),
        "fsdp_min_num_params": plugin.min_num_params,
        "fsdp_activation_checkpointing": bool(plugin.activation_checkpointing),
        "fsdp_offload_params": _offloads(plugin.cpu_offload),
        "fsdp_ignored_modules": plugin.ignored_modules,
        "fsdp_state_dict_type": getattr(plugin.state_dict_type, "name", plugin.state_dict_type),
        "fsdp_cpu_ram_efficient_loading": bool(plugin.cpu_ram_efficient_loading),
    }
    if two:
        settings["fsdp_reshard_after_forward"] = plugin.reshard_after_forward
    else:
        strategy = plugin.sharding_strategy
        settings["fsdp_sharding_strategy"] = getattr(strategy, "name", strategy)
        prefetch = plugin.backward_prefetch
        settings["fsdp_backward_prefetch"] = getattr(prefetch, "name", prefetch)
        settings["fsdp_forward_prefetch"] = bool(plugin.forward_prefetch)
        settings["fsdp_sync_module_states"] = bool(plugin.sync_module_states)
    return {name: value for name, value in settings.items() if value not in (None, "")}


def _wrap_of(plugin: Any) -> str:
    name = getattr(plugin.auto_wrap_policy, "__name__", None)
    if plugin.auto_wrap_policy is None:
        return "NO_WRAP"
    known = {
        "transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "size_based_auto_wrap_policy": "SIZE_BASED_WRAP",
    }
    if name not in known:
        raise PolicyError(
            f"the accelerator's FSDP plugin wraps by a function of its own ({name}), which a "
            "policy cannot be read from; pass policy= to graphshard.hf.shard_models_of"
        )
    return known[name]


def _offloads(setting: Any) -> bool:
    if setting is None or isinstance(setting, bool):
        return bool(setting)
    # CPUOffload of version 1 has a flag; version 2 says it by the class.
    return bool(getattr(setting, "offload_params", type(setting).__name__ == "CPUOffloadPolicy"))


# -- the methods of Accelerator that know sharded modules ------------------------------------------


@cache
def let_accelerators_prepare() -> None:
    """Replace the methods of `Accelerator` that know sharded modules, once in this process."""
    for name, method in (
        ("prepare", _prepare),
        ("prepare_model", _prepare_model),
        ("save_state", _save_state),
        ("load_state", _load_state),
        ("get_state_dict", _get_state_dict),
        ("save_model", _save_model),
    ):
        patched_for_good(Accelerator, name, _around(getattr(Accelerator, name), method))
    ShardedModule._known_to_accelerate = True


def _around(original: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def call(self: Accelerator, *args: Any, **kwargs: Any) -> Any:
        return method(original, self, *args, **kwargs)

    return call


def _prepare(
    original: Callable[..., Any], self: Accelerator, *args: Any, device_placement: Any = None
) -> Any:
    entry = _POLICIES.get(self)
    if entry is not None:
        args = _compiled(self, args, *entry)
    return original(self, *args, device_placement=device_placement)


def _compiled(
    accelerator: Accelerator, args: tuple[Any, ...], policy: Policy, options: Mapping[str, Any]
) -> tuple[Any, ...]:
    """`args` with models compiled, and their optimizers' parameters replaced."""
    new = list(args)
    params: dict[int, nn.Parameter] = {}
    for index, model in enumerate(args):
        if isinstance(model, nn.Module) and not isinstance(model, ShardedModule):
            named = dict(model.named_parameters(remove_duplicate=False))
            new[index] = compile_module(
                model, with_first_weights(policy), **{"device": accelerator.device, **options}
            )
            shards = dict(new[index].named_parameters(remove_duplicate=False))
            params |= {id(param): shards[name] for name, param in named.items()}
    for optimizer in args:
        if isinstance(optimizer, torch.optim.Optimizer):
            _replace_params(optimizer, params)
    return tuple(new)


def with_first_weights(policy: Policy) -> Policy:
    """`policy` with rank 0's weights on every rank, as DDP has them."""
    return replace(policy, sync_module_states=True)


def _replace_params(optimizer: torch.optim.Optimizer, params: Mapping[int, nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        here = [id(param) in params for param in group["params"]]
        if any(here) and optimizer.state:
            raise PolicyError(
                "an optimizer passed to Accelerator.prepare has a state for the parameters of the "
                "model before it was sharded; pass it before its first step, and load_state after"
            )
        group["params"] = [params.get(id(param), param) for param in group["params"]]


def _prepare_model(
    original: Callable[..., Any],
    self: Accelerator,
    model: nn.Module,
    device_placement: bool | None = None,
    evaluation_mode: bool = False,
) -> nn.Module:
    if not isinstance(model, ShardedModule):
        return original(self, model, device_placement, evaluation_mode)
    if any(model is prepared for prepared in self._models):
        return model
    _require_settings(self, model)
    # In evaluation mode Accelerate applies autocast and wraps nothing.
    return original(self, model, device_placement=False, evaluation_mode=True)


def _require_settings(accelerator: Accelerator, model: ShardedModule) -> None:
    """Refuse settings of the accelerator that would not act on a sharded module.

    A policy with mixed precision takes the place of the accelerator's autocast.
    """
    _require_all_ranks(accelerator)
    if accelerator.state.dynamo_plugin.backend != DynamoBackend.NO:
        raise PolicyError(
            "the accelerator is to use torch.compile, which cannot take a sharded module; leave "
            'dynamo_backend out and pass backend="inductor" to graphshard.compile'
        )
    if accelerator.distributed_type in (
        DistributedType.FSDP,
        DistributedType.DEEPSPEED,
        DistributedType.MEGATRON_LM,
    ):
        raise PolicyError(
            f"the accelerator is set up for {accelerator.distributed_type.value}, which would "
            "treat a sharded module as its own; call graphshard.hf.shard_models_of(accelerator) "
            "right after making it, or make it without that plugin"
        )
    if model.plan.policy.mixed_precision is not None and accelerator.native_amp:
        accelerator.native_amp = False


def _require_all_ranks(accelerator: Accelerator) -> None:
    """Refuse an accelerator that gives every rank the batches of a single one."""
    launched = os.environ.get("WORLD_SIZE", "")
    ranks = int(launched) if launched.isdecimal() else 1
    if dist.is_available() and dist.is_initialized():
        ranks = dist.get_world_size()
    if accelerator.num_processes != ranks:
        raise PolicyError(
            f"the accelerator takes part in {accelerator.num_processes} process(es), but there are "
            f"{ranks} ranks, which would all get the same batches and save the same files; on CPUs "
            "make it by Accelerator(cpu=True), which use_cpu in a configuration of FSDP does not do"
        )


_FOLDER = "graphshard_{}"
"""The folder of the sharded module with this number, among those of an accelerator's state."""


@contextlib.contextmanager
def _without_sharded(accelerator: Accelerator) -> Iterator[list[tuple[ShardedModule, Any]]]:
    """Hide sharded modules' optimizers from the accelerator; gives each module with its own."""
    optimizers = list(accelerator._optimizers)
    pairs = []
    for model in accelerator._models:
        if isinstance(model, ShardedModule):
            own = {id(param) for param in model.parameters()}
            mine = [each for each in optimizers if _params_of(each) & own]
            if len(mine) > 1 or any(_params_of(each) - own for each in mine):
                raise CheckpointError(
                    "a state is saved and loaded with one optimizer for each sharded module; make "
                    "one of the parameters of one module"
                )
            pairs.append((model, getattr(mine[0], "optimizer", mine[0]) if mine else None))
            optimizers = [each for each in optimizers if all(each is not one for one in mine)]
    before, accelerator._optimizers = accelerator._optimizers, optimizers
    try:
        yield pairs
    finally:
        accelerator._optimizers = before


def _params_of(optimizer: Any) -> set[int]:
    return {id(param) for group in optimizer.param_groups for param in group["params"]}


def _save_state(original: Callable[..., Any], self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    with _without_sharded(self) as pairs:
        if not pairs:
            return original(self, *args, **kwargs)

        def hook(models: list[Any], weights: list[Any], folder: str) -> None:
            sharded = [isinstance(model, ShardedModule) for model in models]
            weights[:] = [each for each, mine in zip(weights, sharded, strict=True) if not mine]
            for number, (model, optimizer) in enumerate(pairs):
                model.save_checkpoint(Path(folder) / _FOLDER.format(number), optimizer)

        with self.register_save_state_pre_hook(hook):
            return original(self, *args, **kwargs)


def _load_state(original: Callable[..., Any], self: Accelerator, *args: Any, **kwargs: Any) -> Any:
    with _without_sharded(self) as pairs:
        if not pairs:
            return original(self, *args, **kwargs)

        def hook(models: list[Any], folder: str) -> None:
            models[:] = [each for each in models if not isinstance(each, ShardedModule)]
            for number, (model, optimizer) in enumerate(pairs):
                model.load_checkpoint(Path(folder) / _FOLDER.format(number), optimizer)

        with self.register_load_state_pre_hook(hook):
            return original(self, *args, **kwargs)


def _get_state_dict(
    original: Callable[..., Any], self: Accelerator, model: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Whole tensors on the CPU of the main process, {} on all others, as for FSDP."""
    if isinstance(model, ShardedModule):
        return model.full_state_dict()
    return original(self, model, *args, **kwargs)


class _Weights(nn.Module):
    """Stands for a model whose state dict is there already."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self._weights = weights

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return self._weights


def _save_model(
    original: Callable[..., Any],
    self: Accelerator,
    model: nn.Module,
    save_directory: str | os.PathLike[str],
    max_shard_size: int | str = "10GB",
    safe_serialization: bool = True,
) -> None:
    options = {"max_shard_size": max_shard_size, "safe_serialization": safe_serialization}
    if not isinstance(model, ShardedModule):
        return original(self, model, save_directory, **options)
    agreement = model._graphshard.bindings.agreement
    text = call_text(original, "Accelerator.save_model", path=save_directory, **options)
    with agreement.call(text):
        with agreement.part():
            size = checked_size(max_shard_size)
            if os.path.isfile(save_directory):
                raise CheckpointError(f"save_model: {save_directory} is a file, not a folder")
        if safe_serialization:
            model.save_safetensors(save_directory, max_shard_bytes=size)
            return None
        weights = _Weights(model.full_state_dict())
        with agreement.part():
            save.writing(
                save_directory, lambda: original(self, weights, save_directory, **options)
            )()
    return None

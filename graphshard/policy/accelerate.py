"""A policy from a Hugging Face Accelerate configuration (`fsdp_config`, versions 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphshard.errors import PolicyError
from graphshard.policy.base import Policy
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.settings import (
    ConfigSource,
    Key,
    Section,
    choice,
    each,
    flag,
    notes_of,
    number,
    read,
)
from graphshard.policy.strategy import Strategy
from graphshard.policy.units import BlockPolicy, LambdaPolicy, SizePolicy

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


_PREFETCH = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NO_PREFETCH": None}


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


_DEFAULT_MIN_NUM_PARAMS = 100_000_000


_STATE_DICTS = {
    "FULL_STATE_DICT": "call sharded.full_state_dict()",
    "LOCAL_STATE_DICT": "call sharded.local_state_dict()",
    "SHARDED_STATE_DICT": "call sharded.state_dict()",
}


def _strategy_of_version_1(fsdp: Section, key: str, value: Any) -> str:
    if str(value).lower() in ("true", "false"):
        raise fsdp.wrong(key, value, "the name of a strategy in version 1 (the default)")
    return choice(*_STRATEGIES)(fsdp, key, value)


def _flag_of_version_2(fsdp: Section, key: str, value: Any) -> bool:
    if str(value).upper() in _STRATEGIES:
        raise fsdp.wrong(key, value, "true or false in version 2")
    return flag(fsdp, key, value)


def _names(fsdp: Section, key: str, value: Any) -> list[str]:
    """A text or a list of texts."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise fsdp.wrong(key, value, "a text, or a list of them")
    return list(names)


def _ignored(fsdp: Section, key: str, value: Any) -> Any:
    """A regular expression, or several; modules, too, in a mapping."""
    if isinstance(value, bool | int | float | Mapping):
        raise fsdp.wrong(key, value, "a text, or a list of them")
    return value or None


_FSDP = {
    "fsdp_activation_checkpointing": Key(flag),
    "fsdp_auto_wrap_policy": Key(choice("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")),
    "fsdp_backward_prefetch": Key(choice(*_PREFETCH)),
    "fsdp_backward_prefetch_policy": Key(choice(*_PREFETCH)),
    "fsdp_cpu_ram_efficient_loading": Key(
        flag,
        note={
            True: "build the model on meta on every rank but the first, or load_safetensors(...) "
            "on all"
        },
    ),
    "fsdp_ignored_modules": Key(_ignored),
    "fsdp_limit_all_gathers": Key(flag, note="the program says how many are under way"),
    "fsdp_min_num_params": Key(number),
    "fsdp_offload_params": Key(flag),
    "fsdp_sync_module_states": Key(flag),
    "fsdp_transformer_layer_cls_to_wrap": Key(_names),
    "fsdp_use_orig_params": Key(flag, note={False: "parameters always keep names and shapes"}),
    "fsdp_version": Key(number),
}


_FSDP_1 = {
    **_FSDP,
    "fsdp_forward_prefetch": Key(flag),
    "fsdp_reshard_after_forward": Key(_strategy_of_version_1),
    "fsdp_sharding_strategy": Key(choice(*_STRATEGIES)),
    "fsdp_state_dict_type": Key(choice(*_STATE_DICTS), note=_STATE_DICTS),
}


_FSDP_2 = {
    **_FSDP,
    "fsdp_forward_prefetch": Key(flag, refuse="{key} does not exist in version 2"),
    "fsdp_reshard_after_forward": Key(_flag_of_version_2),
    "fsdp_sharding_strategy": Key(note="version 2 has fsdp_reshard_after_forward"),
    "fsdp_state_dict_type": Key(choice("SHARDED_STATE_DICT", "FULL_STATE_DICT"), note=_STATE_DICTS),
}


_LAUNCH = "for the launcher; start ranks with torchrun"


_TOP = {
    **each(
        "command_file commands compute_environment debug downcast_bf16 enable_cpu_affinity gpu_ids "
        "machine_rank main_process_ip main_process_port main_training_function mpirun_config "
        "rdzv_backend same_network tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_vm tpu_zone "
        "use_cpu",
        Key(note=_LAUNCH),
    ),
    **each(
        "dynamo_backend dynamo_config",
        Key(note='graphshard compiles itself; see compile(..., backend="...")'),
    ),
    **each(
        "deepspeed_config fp8_config megatron_lm_config",
        Key(refuse="{key} is given although distributed_type is FSDP"),
    ),
    "parallelism_config": Key(note="only data parallel ranks are sharded over"),
    **each("num_machines num_processes", Key(number)),
    **each("distributed_type fsdp_config mixed_precision", Key()),
    "fp16": Key(flag),
}


def from_accelerate(source: ConfigSource) -> Policy:
    """The policy an Accelerate configuration asks for.

    Settings without a counterpart in a policy (the state dict type, settings of the launcher) are
    listed in `policy.notes`, which the plan prints.

    Args:
        source: the path of a YAML or JSON file as `accelerate config` writes it, or its content as
            a mapping, or its `fsdp_config` section alone.

    Raises:
        PolicyError: a key is unknown, has an invalid value, or contradicts another; names the key.
    """
    config = read(source, "Accelerate")
    if any(str(key).startswith("fsdp_") and key != "fsdp_config" for key in config):
        config = {"fsdp_config": config}
    elif "fsdp_config" not in config and any(f"fsdp_{key}" in _FSDP_1 for key in config):
        raise PolicyError(
            f"an fsdp_config has keys that start with fsdp_; got {sorted(map(str, config))}; write "
            "fsdp_ before each"
        )
    top = Section(config, "the Accelerate configuration", _TOP)
    distributed_type = top["distributed_type"] or "FSDP"
    if str(distributed_type).upper() != "FSDP":
        raise top.error(f"distributed_type is {distributed_type!r}, only FSDP has a policy")
    section = top["fsdp_config"]
    if not isinstance(section, Mapping) or not section:
        raise top.error("fsdp_config is missing or empty; it says how to shard")
    asked = {"fsdp_version": section.get("fsdp_version")}
    version = Section(asked, "fsdp_config", _FSDP)["fsdp_version"] or 1
    fsdp = Section(section, "fsdp_config", _FSDP_2 if version == 2 else _FSDP_1)
    if version not in (1, 2):
        raise fsdp.wrong("fsdp_version", version, "1 or 2")
    strategy = _strategy(fsdp, version)
    policy_class, unit_fields = _units(fsdp, version)
    _note_ranks(top, strategy)
    return policy_class(
        **unit_fields,
        **_prefetching(fsdp, version),
        strategy=strategy,
        sync_module_states=_sync(fsdp, version),
        mixed_precision=_precision(top, version),
        offload="params" if fsdp["fsdp_offload_params"] else None,
        recompute="units" if fsdp["fsdp_activation_checkpointing"] else None,
        ignored=fsdp["fsdp_ignored_modules"],
        notes=notes_of(fsdp, top),
    )


def _strategy(fsdp: Section, version: int) -> Strategy:
    new, old = fsdp["fsdp_reshard_after_forward"], fsdp["fsdp_sharding_strategy"]
    if version == 2:
        return Strategy.SHARD_GRAD_OP if new is False else Strategy.FULL_SHARD
    if new and old and new != old:
        raise fsdp.error(
            f"fsdp_sharding_strategy is {old} and fsdp_reshard_after_forward is {new}; "
            "leave one of them out"
        )
    return Strategy(new or old or "FULL_SHARD")


def _prefetching(fsdp: Section, version: int) -> dict[str, Any]:
    new, old = fsdp["fsdp_backward_prefetch"], fsdp["fsdp_backward_prefetch_policy"]
    if old and new and old != new:
        raise fsdp.error(
            f"fsdp_backward_prefetch is {new} and fsdp_backward_prefetch_policy, its old name, is "
            f"{old}; leave one of them out"
        )
    chosen = new or old
    if version == 2:
        if chosen:
            fsdp.note("fsdp_backward_prefetch", chosen, "version 2 always issues the next gather")
        return {"backward_prefetch": "pre"}
    return {
        "backward_prefetch": _PREFETCH[chosen or "NO_PREFETCH"],
        "forward_prefetch": 1 if fsdp["fsdp_forward_prefetch"] else None,
    }


def _sync(fsdp: Section, version: int) -> bool:
    sync, efficient = fsdp["fsdp_sync_module_states"], fsdp["fsdp_cpu_ram_efficient_loading"]
    if efficient and sync is False and version == 1:
        raise fsdp.error(
            "fsdp_cpu_ram_efficient_loading leaves all ranks but the first without weights, and "
            "fsdp_sync_module_states=false keeps them so; set it to true"
        )
    return bool(sync or efficient)


def _precision(top: Section, version: int) -> MixedPrecision | None:
    name = top["mixed_precision"]
    name = str(("fp16" if top["fp16"] else "no") if name is None else name).lower()
    if name in ("no", "false", "fp32"):
        return None
    dtype = _DTYPES.get(name)
    if dtype is None:
        raise top.wrong("mixed_precision", name, "no, fp16 or bf16 (fp8 is not supported)")
    if name == "fp16":
        top.note("mixed_precision", name, "scale the loss with torch.amp.GradScaler")
    if version == 1:
        return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, buffer_dtype=dtype)
    return MixedPrecision(param_dtype=dtype, reduce_dtype=dtype, output_dtype=dtype)


def _units(fsdp: Section, version: int) -> tuple[type[Policy], dict[str, Any]]:
    wrap = fsdp["fsdp_auto_wrap_policy"] or "NO_WRAP"
    names = fsdp["fsdp_transformer_layer_cls_to_wrap"] or []
    min_num_params = fsdp["fsdp_min_num_params"]
    if wrap != "TRANSFORMER_BASED_WRAP" and names:
        fsdp.note("fsdp_transformer_layer_cls_to_wrap", names, f"not used with {wrap}")
    if wrap != "SIZE_BASED_WRAP" and min_num_params is not None:
        fsdp.note("fsdp_min_num_params", min_num_params, f"not used with {wrap}")
    if wrap == "TRANSFORMER_BASED_WRAP":
        class_names = [part.strip() for name in names for part in name.split(",")]
        return BlockPolicy, {"classes": class_names or None}
    if wrap == "NO_WRAP":
        return LambdaPolicy, {"fn": no_units}
    if min_num_params == 0:
        raise fsdp.error(
            "fsdp_min_num_params=0 with SIZE_BASED_WRAP makes Accelerate wrap nothing; give the "
            "number of elements a unit must have, such as 100000000"
        )
    if version == 2:
        fsdp.note(
            "fsdp_auto_wrap_policy",
            wrap,
            "by the rule of version 1 (that of version 2 chooses containers, which never run)",
        )
    return SizePolicy, {"min_num_params": min_num_params or _DEFAULT_MIN_NUM_PARAMS}


def no_units(module: nn.Module) -> bool:
    """Choose no module: everything belongs to the root."""
    return False


def _note_ranks(top: Section, strategy: Strategy) -> None:
    machines, processes = top["num_machines"], top["num_processes"]
    why = _LAUNCH
    if strategy.hybrid and machines and processes and processes % machines == 0:
        why = f"pass a mesh of {machines} x {processes // machines}"
    for key in ("num_machines", "num_processes"):
        if top[key] is not None:
            top.note(key, top[key], why)

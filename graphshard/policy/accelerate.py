"""A policy from a Hugging Face Accelerate configuration (`fsdp_config`, versions 1 and 2)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from graphshard.errors import PolicyError
from graphshard.policy.base import Policy
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.settings import ConfigSource, Settings, read
from graphshard.policy.strategy import Strategy
from graphshard.policy.units import BlockPolicy, LambdaPolicy, SizePolicy

_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")


_WRAPS = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")


_PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")


_STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")


_STATE_DICTS_2 = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")


_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


_DEFAULT_MIN_NUM_PARAMS = 100_000_000


_STATE_DICT_CALLS = {
    "FULL_STATE_DICT": "full_state_dict()",
    "LOCAL_STATE_DICT": "local_state_dict()",
    "SHARDED_STATE_DICT": "state_dict()",
}


_FSDP_KEYS = frozenset(
    f"fsdp_{name}"
    for name in (
        "activation_checkpointing",
        "auto_wrap_policy",
        "backward_prefetch",
        "backward_prefetch_policy",
        "cpu_ram_efficient_loading",
        "forward_prefetch",
        "ignored_modules",
        "limit_all_gathers",
        "min_num_params",
        "offload_params",
        "reshard_after_forward",
        "sharding_strategy",
        "state_dict_type",
        "sync_module_states",
        "transformer_layer_cls_to_wrap",
        "use_orig_params",
        "version",
    )
)


_LAUNCH = "for the launcher; start ranks with torchrun"


_OTHER = "of another system than FSDP"


_TOP = {
    **dict.fromkeys(
        (
            "command_file",
            "commands",
            "compute_environment",
            "debug",
            "downcast_bf16",
            "enable_cpu_affinity",
            "gpu_ids",
            "machine_rank",
            "main_process_ip",
            "main_process_port",
            "main_training_function",
            "mpirun_config",
            "num_machines",
            "num_processes",
            "rdzv_backend",
            "same_network",
            "tpu_env",
            "tpu_name",
            "tpu_use_cluster",
            "tpu_use_sudo",
            "tpu_vm",
            "tpu_zone",
            "use_cpu",
        ),
        _LAUNCH,
    ),
    "dynamo_backend": 'graphshard compiles itself; see compile(..., backend="...")',
    "dynamo_config": 'graphshard compiles itself; see compile(..., backend="...")',
    **dict.fromkeys(("deepspeed_config", "fp8_config", "megatron_lm_config"), _OTHER),
    "parallelism_config": "only data parallel ranks are sharded over",
    "distributed_type": _OTHER,
    "mixed_precision": "",
    "fsdp_config": "",
    "fp16": "",
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
    elif "fsdp_config" not in config and any(f"fsdp_{key}" in _FSDP_KEYS for key in config):
        raise PolicyError(
            f"an fsdp_config has keys that start with fsdp_; got {sorted(map(str, config))}; write "
            "fsdp_ before each"
        )
    top = Settings(config, "the Accelerate configuration", _TOP)
    distributed_type = top.take("distributed_type", "FSDP")
    if str(distributed_type).upper() != "FSDP":
        raise top.contradiction(f"distributed_type is {distributed_type!r}, only FSDP has a policy")
    section = top.take("fsdp_config")
    if not isinstance(section, Mapping) or not section:
        raise top.contradiction("fsdp_config is missing or empty; it says how to shard")
    fsdp = Settings(section, "fsdp_config", _FSDP_KEYS)
    version = fsdp.number("fsdp_version") or 1
    if version not in (1, 2):
        raise fsdp.wrong("fsdp_version", version, "1 or 2")
    shared = {
        **_sharding(fsdp, version),
        **_prefetching(fsdp, version),
        **_loading(fsdp, version),
        "mixed_precision": _precision(top, version),
        "offload": "params" if fsdp.flag("fsdp_offload_params") else None,
        "recompute": "units" if fsdp.flag("fsdp_activation_checkpointing") else None,
        "ignored": _ignored(fsdp),
    }
    policy_class, unit_fields = _units(fsdp, version)
    _note_state_dict(fsdp, version)
    _note_top(top, Strategy(shared["strategy"]))
    notes = (*fsdp.notes, *top.notes)
    return policy_class(**unit_fields, **shared, notes=notes)


def _sharding(fsdp: Settings, version: int) -> dict[str, Any]:
    if version == 2:
        strategy = fsdp.take("fsdp_sharding_strategy")
        if strategy is not None:
            fsdp.note(
                "fsdp_sharding_strategy", strategy, "version 2 has fsdp_reshard_after_forward"
            )
        value = fsdp.take("fsdp_reshard_after_forward", True)
        if str(value).upper() in _STRATEGIES:
            raise fsdp.wrong("fsdp_reshard_after_forward", value, "true or false in version 2")
        fsdp = Settings({"fsdp_reshard_after_forward": value}, fsdp.where, _FSDP_KEYS)
        keeps_unsharded = fsdp.flag("fsdp_reshard_after_forward") is False
        return {"strategy": Strategy.SHARD_GRAD_OP if keeps_unsharded else Strategy.FULL_SHARD}
    new = fsdp.take("fsdp_reshard_after_forward")
    if isinstance(new, bool) or str(new).lower() in ("true", "false"):
        raise fsdp.wrong(
            "fsdp_reshard_after_forward", new, "the name of a strategy in version 1 (the default)"
        )
    names = {"fsdp_reshard_after_forward": new}
    by_new = Settings(names, fsdp.where, _FSDP_KEYS).choice(
        "fsdp_reshard_after_forward", _STRATEGIES
    )
    by_old = fsdp.choice("fsdp_sharding_strategy", _STRATEGIES)
    if by_new and by_old and by_new != by_old:
        raise fsdp.contradiction(
            f"fsdp_sharding_strategy is {by_old} and fsdp_reshard_after_forward is {by_new}; "
            "leave one of them out"
        )
    return {"strategy": Strategy(by_new or by_old or "FULL_SHARD")}


def _prefetching(fsdp: Settings, version: int) -> dict[str, Any]:
    old = fsdp.choice("fsdp_backward_prefetch_policy", _PREFETCHES)
    new = fsdp.choice("fsdp_backward_prefetch", _PREFETCHES)
    if old and new and old != new:
        raise fsdp.contradiction(
            f"fsdp_backward_prefetch is {new} and fsdp_backward_prefetch_policy, its old name, is "
            f"{old}; leave one of them out"
        )
    forward = fsdp.flag("fsdp_forward_prefetch")
    if version == 2:
        if forward:
            raise fsdp.contradiction("fsdp_forward_prefetch does not exist in version 2")
        if old or new:
            fsdp.note(
                "fsdp_backward_prefetch", new or old, "version 2 always issues the next gather"
            )
        return {"backward_prefetch": "pre"}
    prefetch_of = {"BACKWARD_PRE": "pre", "BACKWARD_POST": "post", "NO_PREFETCH": None}
    return {
        "backward_prefetch": prefetch_of[new or old or "NO_PREFETCH"],
        "forward_prefetch": 1 if forward else None,
    }


def _loading(fsdp: Settings, version: int) -> dict[str, Any]:
    sync = fsdp.flag("fsdp_sync_module_states")
    efficient = fsdp.flag("fsdp_cpu_ram_efficient_loading", False)
    if efficient and sync is False and version == 1:
        raise fsdp.contradiction(
            "fsdp_cpu_ram_efficient_loading leaves all ranks but the first without weights, and "
            "fsdp_sync_module_states=false keeps them so; set it to true"
        )
    if efficient:
        fsdp.note(
            "fsdp_cpu_ram_efficient_loading",
            True,
            "build the model on meta on every rank but the first, or load_safetensors(...) on all",
        )
    limit = fsdp.flag("fsdp_limit_all_gathers")
    if limit is not None:
        fsdp.note("fsdp_limit_all_gathers", limit, "the program says how many are under way")
    original = fsdp.flag("fsdp_use_orig_params")
    if original is False:
        fsdp.note("fsdp_use_orig_params", original, "parameters always keep names and shapes")
    return {"sync_module_states": bool(sync or efficient)}


def _precision(top: Settings, version: int) -> MixedPrecision | None:
    name = str(top.take("mixed_precision", "fp16" if top.flag("fp16") else "no")).lower()
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


def _units(fsdp: Settings, version: int) -> tuple[type[Policy], dict[str, Any]]:
    wrap = fsdp.choice("fsdp_auto_wrap_policy", _WRAPS) or "NO_WRAP"
    names = _names(fsdp, "fsdp_transformer_layer_cls_to_wrap")
    min_num_params = fsdp.number("fsdp_min_num_params")
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
        raise fsdp.contradiction(
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


def _names(fsdp: Settings, key: str) -> list[str]:
    """The value of `key`: a text or a list of texts; [] if it is missing."""
    value = fsdp.take(key, [])
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise fsdp.wrong(key, value, "a text, or a list of them")
    return list(names)


def _ignored(fsdp: Settings) -> Any:
    """The ignored modules: a regular expression, or several; modules, too, in a mapping."""
    value = fsdp.take("fsdp_ignored_modules")
    if isinstance(value, bool | int | float | Mapping):
        raise fsdp.wrong("fsdp_ignored_modules", value, "a text, or a list of them")
    return value or None


def no_units(module: nn.Module) -> bool:
    """Choose no module: everything belongs to the root."""
    return False


def _note_state_dict(fsdp: Settings, version: int) -> None:
    names = _STATE_DICTS if version == 1 else _STATE_DICTS_2
    chosen = fsdp.choice("fsdp_state_dict_type", names)
    if chosen == "LOCAL_STATE_DICT" and version == 2:
        raise PolicyError("fsdp_config: fsdp_state_dict_type LOCAL_STATE_DICT needs version 1")
    if chosen:
        fsdp.note("fsdp_state_dict_type", chosen, f"call sharded.{_STATE_DICT_CALLS[chosen]}")


def _note_top(top: Settings, strategy: Strategy) -> None:
    launcher = []
    machines = top.number("num_machines")
    processes = top.number("num_processes")
    if strategy.hybrid and machines and processes and processes % machines == 0:
        top.note(
            "num_machines, num_processes",
            f"{machines}, {processes}",
            f"pass a mesh of {machines} x {processes // machines}",
        )
    else:
        sizes = {"num_machines": machines, "num_processes": processes}
        launcher += [key for key, size in sizes.items() if size is not None]
    for key, value in top.rest():
        if value in ({}, [], "", False, "no"):
            launcher.append(key)
        elif key in ("deepspeed_config", "megatron_lm_config", "fp8_config"):
            raise top.contradiction(f"{key} is given although distributed_type is FSDP")
        elif _TOP[key] == _LAUNCH:
            launcher.append(key)
        else:
            top.note(key, value, _TOP[key])
    if launcher:
        top.notes.append(f"{', '.join(launcher)}: {_LAUNCH}")

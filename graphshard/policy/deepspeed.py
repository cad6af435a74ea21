"""A policy from a DeepSpeed configuration: its ZeRO section, stages 0 to 3, and its dtypes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from graphshard.errors import PolicyError
from graphshard.policy.base import Policy
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.settings import ConfigSource, Settings, read
from graphshard.policy.strategy import Strategy
from graphshard.policy.units import BlockPolicy, SizePolicy

_STAGES = {
    0: Strategy.NO_SHARD,
    1: Strategy.SHARD_OPTIMIZER,
    2: Strategy.SHARD_GRAD_OP,
    3: Strategy.FULL_SHARD,
}


_DTYPES = {
    "fp16": torch.float16,
    "bfp16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "fp32": torch.float32,
}


_PREFETCH_ELEMENTS = 50_000_000  # DeepSpeed's default for stage3_prefetch_bucket_size


_BY_UNITS = "units and the prefetch options decide what moves together, and when"


_BY_LOOP = "the training loop's own"


_ZERO = {
    **dict.fromkeys(
        (
            "allgather_bucket_size",
            "allgather_partitions",
            "contiguous_gradients",
            "max_live_parameters",
            "max_reuse_distance",
            "model_persistence_threshold",
            "module_granularity_threshold",
            "overlap_comm",
            "param_persistence_threshold",
            "reduce_bucket_size",
            "reduce_scatter",
            "round_robin_gradients",
            "stage3_allgather_sequential",
            "stage3_max_live_parameters",
            "stage3_max_reuse_distance",
            "stage3_model_persistence_threshold",
            "stage3_module_granularity_threshold",
            "stage3_param_persistence_threshold",
            "stage3_use_all_reduce_for_fetch_params",
            "sub_group_size",
            "use_multi_rank_bucket_allreduce",
        ),
        _BY_UNITS,
    ),
    **dict.fromkeys(
        (
            "elastic_checkpoint",
            "gather_16bit_weights_on_model_save",
            "load_from_fp32_weights",
            "pipeline_loading_checkpoint",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
        ),
        "checkpoints load on any number of ranks; see sharded.full_state_dict()",
    ),
    **dict.fromkeys(
        (
            "enable_sanity_checks",
            "ignore_unused_parameters",
            "leaf_module",
            "legacy_stage1",
            "log_trace_cache_warnings",
            "memory_efficient_linear",
            "override_module_apply",
            "save_muon_momentum_buffer_in_memory",
        ),
        "nothing like it is needed",
    ),
    **dict.fromkeys(
        (
            "cpu_offload",
            "cpu_offload_param",
            "cpu_offload_use_pin_memory",
            "mics_hierarchical_params_gather",
            "mics_shard_size",
            "offload_optimizer",
            "offload_param",
            "prefetch_bucket_size",
            "stage",
            "stage3_prefetch_bucket_size",
            "zenflow",
            "zero_hpz_partition_size",
            "zero_quantized_gradients",
            "zero_quantized_nontrainable_weights",
            "zero_quantized_weights",
            "zeropp_loco_param",
        ),
        "",
    ),
}


_UNSUPPORTED = (
    "zenflow",
    "zero_quantized_gradients",
    "zero_quantized_nontrainable_weights",
    "zero_quantized_weights",
    "zeropp_loco_param",
)


_TOP = {
    **dict.fromkeys(
        (
            "aio",
            "autotuning",
            "checkpoint",
            "comms_logger",
            "csv_monitor",
            "curriculum_learning",
            "data_efficiency",
            "dataloader_drop_last",
            "dump_state",
            "elasticity",
            "flops_profiler",
            "gradient_accumulation_steps",
            "hybrid_engine",
            "memory_breakdown",
            "optimizer",
            "prescale_gradients",
            "gradient_predivide_factor",
            "scheduler",
            "steps_per_print",
            "tensorboard",
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "wall_clock_breakdown",
            "wandb",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
        ),
        _BY_LOOP,
    ),
    "gradient_clipping": "call sharded.clip_grad_norm_(...) before the optimizer's step",
    "activation_checkpointing": 'set recompute="units" in the policy to have it',
    "compile": 'graphshard compiles itself; see compile(..., backend="...")',
    "torch_autocast": "enter torch.autocast around the call",
    "data_types": "",
    "communication_data_type": "",
    "zero_optimization": "",
    "bf16": "",
    "bfloat16": "",
    "fp16": "",
    "amp": "use torch.autocast and torch.amp.GradScaler",
    "sparse_gradients": "",
    "sparse_attention": "",
    "compression_training": "",
    "fp32_allreduce": "",
}


_BF16 = ("enabled", "immediate_grad_update", "check_grad_overflow", "check_overflow")


_FP16 = (
    "enabled",
    "auto_cast",
    "loss_scale",
    "initial_scale_power",
    "loss_scale_window",
    "hysteresis",
    "consecutive_hysteresis",
    "min_loss_scale",
    "fp16_master_weights_and_grads",
)


_OFFLOAD = (
    "device",
    "nvme_path",
    "buffer_count",
    "buffer_size",
    "max_in_cpu",
    "pin_memory",
    "pipeline_read",
    "pipeline_write",
    "fast_init",
    "ratio",
    "super_offload",
    "cpuadam_cores_perc",
)


def from_deepspeed(
    source: ConfigSource, classes: Iterable[type | str] | type | str | None = None
) -> Policy:
    """The policy a DeepSpeed configuration asks for.

    Stage 0 is NO_SHARD, 1 SHARD_OPTIMIZER, 2 SHARD_GRAD_OP, 3 FULL_SHARD; stage 3 with
    `zero_hpz_partition_size` or `mics_shard_size` of k is HYBRID_SHARD over groups of k ranks.
    Settings without a counterpart in a policy, and every "auto", are listed in `policy.notes`,
    which the plan prints.

    Args:
        source: the path of a JSON (or YAML) file, its content as a mapping, or its
            `zero_optimization` section alone.
        classes: module classes or class names that become units, as for `BlockPolicy`. None: units
            of at least `stage3_prefetch_bucket_size` elements, since DeepSpeed has no units.

    Raises:
        PolicyError: a key is unknown, has an invalid value, contradicts another, or asks for an
            unsupported feature (NVMe, quantized communication); names the key.
    """
    config = read(source, "DeepSpeed")
    if "zero_optimization" not in config and "stage" in config:
        config = {"zero_optimization": config}
    top = Settings(config, "the DeepSpeed configuration", _TOP)
    section = top.take("zero_optimization", {})
    if not isinstance(section, Mapping):
        raise top.wrong("zero_optimization", section, "a section of keys")
    zero = Settings(_without_auto(top, section, "zero_optimization"), "zero_optimization", _ZERO)
    stage = zero.number("stage") or 0
    if stage not in _STAGES:
        raise zero.wrong("stage", stage, "0, 1, 2 or 3")
    for key in _UNSUPPORTED:
        if zero.take(key) not in (None, False):
            raise zero.contradiction(f"{key} is not supported; leave it out")
    buckets = [zero.number(f"{p}prefetch_bucket_size") for p in ("stage3_", "")]
    shared: dict[str, Any] = {
        "strategy": _strategy(zero, stage),
        "offload": _offload(zero, stage),
        "mixed_precision": _precision(top),
    }
    zero.note_rest(_ZERO)
    if top.take("sparse_gradients") not in (None, False):
        raise top.contradiction("sparse_gradients: only dense gradients are averaged")
    for key in ("sparse_attention", "compression_training"):
        if top.take(key):
            raise top.contradiction(f"{key} is not supported; leave it out")
    top.note_rest(_TOP)
    notes = (*zero.notes, *top.notes)
    if classes is not None:
        return BlockPolicy(classes, **shared, notes=notes)
    min_num_params = next((b for b in buckets if b), _PREFETCH_ELEMENTS)
    notes = (
        *notes,
        f"units: of {min_num_params:,} elements or more, the size of the prefetch bucket",
    )
    return SizePolicy(min_num_params, **shared, notes=notes)


def _without_auto(top: Settings, section: Mapping[str, Any], where: str) -> dict[str, Any]:
    for key, value in section.items():
        if value == "auto":
            top.note(f"{where}.{key}", value, "left at its default; nothing here fills it in")
    return {key: value if value != "auto" else None for key, value in section.items()}


def _strategy(zero: Settings, stage: int) -> Strategy:
    hpz = zero.number("zero_hpz_partition_size") or 1
    mics = zero.number("mics_shard_size", least=-1) or -1
    zero.take("mics_hierarchical_params_gather")
    for key, size in (("zero_hpz_partition_size", hpz), ("mics_shard_size", mics)):
        if size > 1 and stage != 3:
            raise zero.contradiction(f"{key}={size} needs stage 3; stage is {stage}")
    if hpz > 1 and mics > 1 and hpz != mics:
        raise zero.contradiction(
            f"zero_hpz_partition_size={hpz} and mics_shard_size={mics} name different groups; "
            "leave one of them out"
        )
    size = max(hpz, mics)
    if size <= 1:
        return _STAGES[stage]
    zero.note(
        "zero_hpz_partition_size" if hpz > 1 else "mics_shard_size",
        size,
        f"pass a mesh of (ranks / {size}) x {size}; reshard_after_forward={size} with FULL_SHARD "
        "instead keeps optimizer states sharded over all ranks",
    )
    return Strategy.HYBRID_SHARD


def _offload(zero: Settings, stage: int) -> str | None:
    offloaded = False
    for key, old in (("offload_param", "cpu_offload_param"), ("offload_optimizer", "cpu_offload")):
        section = zero.take(key, {})
        if not isinstance(section, Mapping):
            raise zero.wrong(key, section, "a section with a device")
        device_settings = Settings(section, key, _OFFLOAD)
        device = str(device_settings.take("device", "none")).lower()
        if device not in ("none", "cpu"):
            raise device_settings.wrong(
                "device", device, "none or cpu (there is no offload to NVMe)"
            )
        if zero.flag(old):
            device = "cpu"
        if device == "none":
            continue
        if key == "offload_param" and stage != 3:
            raise zero.contradiction(f"{key} needs stage 3; stage is {stage}")
        if stage == 0:
            raise zero.contradiction(f"{key} needs stage 1, 2 or 3; stage is 0")
        if key == "offload_optimizer" and not offloaded:
            zero.note(key, device, "shards, gradients and the optimizer's step are offloaded alike")
        offloaded = True
        unused_keys = [
            f"{key}.{name}" for name, value in device_settings.rest() if value not in (None, False)
        ]
        if unused_keys:
            zero.notes.append(
                f"{', '.join(unused_keys)}: host memory is pinned on CUDA, not buffered"
            )
    zero.take("cpu_offload_use_pin_memory")
    return "params" if offloaded else None


def _precision(top: Settings) -> MixedPrecision | None:
    compute_dtype = _compute_dtype(top)
    communication = top.take("communication_data_type")
    if top.take("fp32_allreduce"):
        communication = communication or "fp32"
    types = top.take("data_types")
    if types:
        top.note("data_types", types, "gradients accumulate in the dtype of the shard")
    reduce_dtype = None
    if communication is not None and communication != "auto":
        reduce_dtype = _DTYPES.get(str(communication).lower())
        if reduce_dtype is None:
            raise top.wrong("communication_data_type", communication, ", ".join(_DTYPES))
    if compute_dtype is None and reduce_dtype is None:
        return None
    return MixedPrecision(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, buffer_dtype=compute_dtype
    )


def _compute_dtype(top: Settings) -> torch.dtype | None:
    enabled: set[torch.dtype] = set()
    for key, known_keys, dtype in (
        ("bf16", _BF16, torch.bfloat16),
        ("bfloat16", _BF16, torch.bfloat16),
        ("fp16", _FP16, torch.float16),
    ):
        section = top.take(key, {})
        if not isinstance(section, Mapping):
            raise top.wrong(key, section, 'a section, such as {"enabled": true}')
        dtype_settings = Settings(_without_auto(top, section, key), key, known_keys)
        if not dtype_settings.flag("enabled"):
            continue
        enabled.add(dtype)
        unused_keys = ", ".join(f"{key}.{name}" for name, _ in dtype_settings.rest())
        if key == "fp16":
            top.notes.append(
                f"{unused_keys or key}: scale the loss with torch.amp.GradScaler, which has "
                "settings of its own"
            )
        elif unused_keys:
            top.notes.append(f"{unused_keys}: gradients are applied by the optimizer")
    if len(enabled) > 1:
        raise PolicyError(
            "the DeepSpeed configuration enables bf16 and fp16; a step computes in one of them"
        )
    return next(iter(enabled), None)

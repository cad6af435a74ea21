"""A policy from a DeepSpeed configuration: its ZeRO section, stages 0 to 3, and its dtypes."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from graphshard.errors import PolicyError
from graphshard.policy.base import Policy
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.settings import (
    ConfigSource,
    Key,
    Section,
    each,
    flag,
    notes_of,
    number,
    part,
    read,
)
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


_AUTO = "auto"
"""What Hugging Face's Trainer fills in."""


_UNSUPPORTED = Key(refuse="{key} is not supported; leave it out")


_OFFLOADED = Key(part("a section with a device"))


_ZERO = {
    **each(
        "allgather_bucket_size allgather_partitions contiguous_gradients max_live_parameters "
        "max_reuse_distance model_persistence_threshold module_granularity_threshold overlap_comm "
        "param_persistence_threshold reduce_bucket_size reduce_scatter round_robin_gradients "
        "stage3_allgather_sequential stage3_max_live_parameters stage3_max_reuse_distance "
        "stage3_model_persistence_threshold stage3_module_granularity_threshold "
        "stage3_param_persistence_threshold stage3_use_all_reduce_for_fetch_params sub_group_size "
        "use_multi_rank_bucket_allreduce",
        Key(note="units and the prefetch options decide what moves together, and when"),
    ),
    **each(
        "elastic_checkpoint gather_16bit_weights_on_model_save load_from_fp32_weights "
        "pipeline_loading_checkpoint stage3_gather_16bit_weights_on_model_save "
        "stage3_gather_fp16_weights_on_model_save",
        Key(note="checkpoints load on any number of ranks; see sharded.full_state_dict()"),
    ),
    **each(
        "enable_sanity_checks ignore_unused_parameters leaf_module legacy_stage1 "
        "log_trace_cache_warnings memory_efficient_linear override_module_apply "
        "save_muon_momentum_buffer_in_memory",
        Key(note="nothing like it is needed"),
    ),
    **each(
        "zenflow zero_quantized_gradients zero_quantized_nontrainable_weights "
        "zero_quantized_weights zeropp_loco_param",
        _UNSUPPORTED,
    ),
    **each("offload_optimizer offload_param", _OFFLOADED),
    **each("cpu_offload cpu_offload_param", Key(flag)),
    **each("cpu_offload_use_pin_memory mics_hierarchical_params_gather", Key()),
    **each(
        "prefetch_bucket_size stage stage3_prefetch_bucket_size zero_hpz_partition_size",
        Key(number),
    ),
    "mics_shard_size": Key(partial(number, least=-1)),
}


_TOP = {
    **each(
        "aio autotuning checkpoint comms_logger csv_monitor curriculum_learning data_efficiency "
        "dataloader_drop_last dump_state elasticity flops_profiler gradient_accumulation_steps "
        "hybrid_engine memory_breakdown optimizer prescale_gradients gradient_predivide_factor "
        "scheduler steps_per_print tensorboard train_batch_size train_micro_batch_size_per_gpu "
        "wall_clock_breakdown wandb zero_allow_untested_optimizer zero_force_ds_cpu_optimizer",
        Key(note="the training loop's own"),
    ),
    "gradient_clipping": Key(note="call sharded.clip_grad_norm_(...) before the optimizer's step"),
    "activation_checkpointing": Key(note='set recompute="units" in the policy to have it'),
    "compile": Key(note='graphshard compiles itself; see compile(..., backend="...")'),
    "torch_autocast": Key(note="enter torch.autocast around the call"),
    "amp": Key(note="use torch.autocast and torch.amp.GradScaler"),
    "data_types": Key(note="gradients accumulate in the dtype of the shard"),
    "zero_optimization": Key(part("a section of keys")),
    **each("bf16 bfloat16 fp16", Key(part('a section, such as {"enabled": true}'))),
    **each("communication_data_type fp32_allreduce", Key()),
    "sparse_gradients": Key(refuse="{key}: only dense gradients are averaged"),
    **each("sparse_attention compression_training", _UNSUPPORTED),
}


_BF16 = {
    "enabled": Key(flag),
    **each(
        "immediate_grad_update check_grad_overflow check_overflow",
        Key(note="gradients are applied by the optimizer"),
    ),
}


_SCALE = "scale the loss with torch.amp.GradScaler, which has settings of its own"


_FP16 = {
    "enabled": Key(flag, note={True: _SCALE}),
    **each(
        "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis "
        "consecutive_hysteresis min_loss_scale fp16_master_weights_and_grads",
        Key(note=_SCALE),
    ),
}


def _device(section: Section, key: str, value: Any) -> str:
    device = str(value).lower()
    if device not in ("none", "cpu"):
        raise section.wrong(key, device, "none or cpu (there is no offload to NVMe)")
    return device


_OFFLOAD = {
    "device": Key(_device),
    **each(
        "nvme_path buffer_count buffer_size max_in_cpu pin_memory pipeline_read pipeline_write "
        "fast_init ratio super_offload cpuadam_cores_perc",
        Key(note="host memory is pinned on CUDA, not buffered"),
    ),
}


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
    top = Section(config, "the DeepSpeed configuration", _TOP, default=_AUTO)
    zero = _inside(top, "zero_optimization", _ZERO)
    stage = zero["stage"] or 0
    if stage not in _STAGES:
        raise zero.wrong("stage", stage, "0, 1, 2 or 3")
    strategy = _strategy(top, zero, stage)
    offloads = {key: _inside(zero, key, _OFFLOAD) for key in ("offload_param", "offload_optimizer")}
    offload = _offload(zero, offloads, stage)
    dtypes = {
        key: _inside(top, key, _FP16 if key == "fp16" else _BF16)
        for key in ("bf16", "bfloat16", "fp16")
    }
    precision = _precision(top, dtypes)
    notes = notes_of(zero, *offloads.values(), top, *dtypes.values())
    if classes is not None:
        return BlockPolicy(
            classes, strategy=strategy, offload=offload, mixed_precision=precision, notes=notes
        )
    bucket = zero["stage3_prefetch_bucket_size"] or zero["prefetch_bucket_size"]
    min_num_params = bucket or _PREFETCH_ELEMENTS
    of_size = f"units: of {min_num_params:,} elements or more, the size of the prefetch bucket"
    return SizePolicy(
        min_num_params,
        strategy=strategy,
        offload=offload,
        mixed_precision=precision,
        notes=(*notes, of_size),
    )


def _inside(section: Section, key: str, table: dict[str, Key]) -> Section:
    return Section(section[key] or {}, key, table, prefix=f"{key}.", default=_AUTO)


def _strategy(top: Section, zero: Section, stage: int) -> Strategy:
    hpz, mics = zero["zero_hpz_partition_size"] or 1, zero["mics_shard_size"] or -1
    for key, size in (("zero_hpz_partition_size", hpz), ("mics_shard_size", mics)):
        if size > 1 and stage != 3:
            raise zero.error(f"{key}={size} needs stage 3; stage is {stage}")
    if hpz > 1 and mics > 1 and hpz != mics:
        raise zero.error(
            f"zero_hpz_partition_size={hpz} and mics_shard_size={mics} name different groups; "
            "leave one of them out"
        )
    size = max(hpz, mics)
    if size <= 1:
        return _STAGES[stage]
    top.note(
        "zero_hpz_partition_size" if hpz > 1 else "mics_shard_size",
        size,
        f"pass a mesh of (ranks / {size}) x {size}; reshard_after_forward={size} with FULL_SHARD "
        "instead keeps optimizer states sharded over all ranks",
    )
    return Strategy.HYBRID_SHARD


def _offload(zero: Section, sections: dict[str, Section], stage: int) -> str | None:
    offloaded = []
    for key, old in (("offload_param", "cpu_offload_param"), ("offload_optimizer", "cpu_offload")):
        if not zero[old] and sections[key]["device"] in (None, "none"):
            sections[key].switch_off()
            continue
        if key == "offload_param" and stage != 3:
            raise zero.error(f"{key} needs stage 3; stage is {stage}")
        if stage == 0:
            raise zero.error(f"{key} needs stage 1, 2 or 3; stage is 0")
        offloaded.append(key)
    if offloaded == ["offload_optimizer"]:
        why = "shards, gradients and the optimizer's step are offloaded alike"
        zero.note("offload_optimizer", "cpu", why)
    return "params" if offloaded else None


def _precision(top: Section, sections: dict[str, Section]) -> MixedPrecision | None:
    communication = top["communication_data_type"]
    if top["fp32_allreduce"]:
        communication = communication or "fp32"
    reduce_dtype = None
    if communication is not None:
        reduce_dtype = _DTYPES.get(str(communication).lower())
        if reduce_dtype is None:
            raise top.wrong("communication_data_type", communication, ", ".join(_DTYPES))
    enabled = set()
    for key, section in sections.items():
        if section["enabled"]:
            enabled.add(torch.float16 if key == "fp16" else torch.bfloat16)
        else:
            section.switch_off()
    if len(enabled) > 1:
        raise PolicyError(
            "the DeepSpeed configuration enables bf16 and fp16; a step computes in one of them"
        )
    compute_dtype = next(iter(enabled), None)
    if compute_dtype is None and reduce_dtype is None:
        return None
    return MixedPrecision(
        param_dtype=compute_dtype, reduce_dtype=reduce_dtype, buffer_dtype=compute_dtype
    )

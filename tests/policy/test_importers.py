"""Policies from Accelerate's and DeepSpeed's configuration files."""

from __future__ import annotations

import json

import pytest
import torch
from meta_models import Block, Example

from graphshard import BlockPolicy, MixedPrecision, SizePolicy, Strategy, from_accelerate
from graphshard import from_deepspeed as deepspeed
from graphshard.errors import PolicyError
from graphshard.planning.planner import make_plan

# The example of Accelerate's first FSDP guide, and that of a later one.
FIRST_GUIDE = """\
compute_environment: LOCAL_MACHINE
deepspeed_config: {}
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_offload_params: false
  fsdp_sharding_strategy: 1
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_transformer_layer_cls_to_wrap: GPT2Block
machine_rank: 0
main_process_ip: null
main_process_port: null
main_training_function: main
mixed_precision: 'no'
num_machines: 1
num_processes: 2
use_cpu: false
"""
LATER_GUIDE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
  fsdp_use_orig_params: true
machine_rank: 0
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 2
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""


def section(**fields):
    return {"fsdp_config": {f"fsdp_{name}": value for name, value in fields.items()}}


def test_the_first_guides_file(tmp_path):
    path = tmp_path / "default_config.yaml"
    path.write_text(FIRST_GUIDE)
    policy = from_accelerate(path)
    assert isinstance(policy, BlockPolicy)
    assert policy.classes == frozenset({"GPT2Block"})
    assert (policy.strategy, policy.backward_prefetch) == (Strategy.FULL_SHARD, "pre")
    assert (policy.offload, policy.mixed_precision, policy.sync_module_states) == (
        None,
        None,
        False,
    )
    said = "\n".join(policy.notes)
    assert "fsdp_state_dict_type=FULL_STATE_DICT: call sharded.full_state_dict()" in said
    for key in ("compute_environment", "main_training_function", "num_processes", "num_machines"):
        assert key in said


def test_the_later_guides_file(tmp_path):
    path = tmp_path / "default_config.yaml"
    path.write_text(LATER_GUIDE)
    policy = from_accelerate(str(path))
    assert policy.classes == frozenset({"BertLayer"})
    assert policy.sync_module_states
    bf16 = torch.bfloat16
    assert policy.mixed_precision == MixedPrecision(
        param_dtype=bf16, reduce_dtype=bf16, buffer_dtype=bf16
    )
    assert any(note.startswith("fsdp_cpu_ram_efficient_loading=True") for note in policy.notes)
    assert any("call sharded.state_dict()" in note for note in policy.notes)


@pytest.mark.parametrize("number", range(1, 6))
def test_strategies_by_number_and_by_name(number):
    names = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"]
    for value in (number, str(number), names[number - 1], names[number - 1].lower()):
        assert from_accelerate(section(sharding_strategy=value)).strategy == names[number - 1]
        assert from_accelerate(section(reshard_after_forward=value)).strategy == names[number - 1]


def test_prefetch_by_number_and_by_name():
    for number, (name, ours) in enumerate(
        [("BACKWARD_PRE", "pre"), ("BACKWARD_POST", "post"), ("NO_PREFETCH", None)], 1
    ):
        for value in (number, name):
            policy = from_accelerate(section(backward_prefetch=value, forward_prefetch="true"))
            assert (policy.backward_prefetch, policy.forward_prefetch) == (ours, 1)
    assert from_accelerate(section(sharding_strategy=1)).backward_prefetch is None


def test_units_by_class_size_or_not_at_all():
    named = section(
        auto_wrap_policy="transformer_based_wrap",
        transformer_layer_cls_to_wrap="BertLayer, BertEmbeddings",
    )
    assert from_accelerate(named).classes == frozenset({"BertLayer", "BertEmbeddings"})
    assert from_accelerate(section(auto_wrap_policy=1)).classes is None
    sized = from_accelerate(section(auto_wrap_policy=2, min_num_params="2e7"))
    assert isinstance(sized, SizePolicy)
    assert sized.min_num_params == 20_000_000
    assert from_accelerate(section(auto_wrap_policy=2)).min_num_params == 10**8
    none = make_plan(Example(), from_accelerate(section(auto_wrap_policy=3)), world_size=2)
    assert [unit.fqn for unit in none.units] == [""]


def test_the_other_keys():
    policy = from_accelerate(
        section(
            offload_params=True,
            activation_checkpointing=True,
            ignored_modules=r".*\.norm",
            use_orig_params=False,
            limit_all_gathers=True,
            min_num_params=5,
        )
    )
    assert policy.offloads("params")
    assert policy.recompute == "units"
    assert policy.ignored == (r".*\.norm",)
    assert "fsdp_use_orig_params=False" in "\n".join(policy.notes)
    assert any(note.startswith("fsdp_limit_all_gathers=True") for note in policy.notes)
    assert "fsdp_min_num_params=5: not used with NO_WRAP" in policy.notes


def test_version_2():
    kept = from_accelerate(
        {"mixed_precision": "bf16", **section(version=2, reshard_after_forward=False)}
    )
    assert (kept.strategy, kept.backward_prefetch) == (Strategy.SHARD_GRAD_OP, "pre")
    assert kept.mixed_precision.output_dtype is torch.bfloat16
    assert kept.mixed_precision.buffer_dtype is None
    freed = from_accelerate(section(version="2", state_dict_type=1))
    assert freed.strategy is Strategy.FULL_SHARD
    assert any("call sharded.state_dict()" in note for note in freed.notes)
    noted = from_accelerate(section(version=2, sharding_strategy=3, backward_prefetch=2))
    assert len(noted.notes) == 2


def test_hybrid_says_its_mesh():
    config = {"num_machines": 2, "num_processes": 16, **section(sharding_strategy=4)}
    assert any("a mesh of 2 x 8" in note for note in from_accelerate(config).notes)


def test_the_section_alone_and_json(tmp_path):
    alone = section(sharding_strategy=2)["fsdp_config"]
    assert from_accelerate(alone).strategy is Strategy.SHARD_GRAD_OP
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"fp16": True, "fsdp_config": alone}))
    assert from_accelerate(path).mixed_precision.param_dtype is torch.float16


def test_the_plan_prints_what_did_not_apply():
    policy = from_accelerate(section(state_dict_type=1, auto_wrap_policy=3))
    text = make_plan(Example(), policy, world_size=2).text()
    assert "note: fsdp_state_dict_type=FULL_STATE_DICT: call sharded.full_state_dict()" in text


@pytest.mark.parametrize(
    ("config", "said"),
    [
        (section(sharding_stratgy=1), "'fsdp_sharding_stratgy'; did you mean 'fsdp_sharding_st"),
        ({"sharding_strategy": 1}, "write fsdp_ before each"),
        (section(sharding_strategy=6), "FULL_SHARD or 1, .* HYBRID_SHARD_ZERO2 or 5; got 6"),
        (section(sharding_strategy=True), "fsdp_sharding_strategy must be one of"),
        (
            section(sharding_strategy=1, reshard_after_forward="NO_SHARD"),
            "leave one of them out",
        ),
        (section(reshard_after_forward=True), "fsdp_reshard_after_forward must be the name"),
        (section(version=2, reshard_after_forward="FULL_SHARD"), "true or false in version 2"),
        (section(version=3), "fsdp_version must be 1 or 2"),
        (section(version=2, forward_prefetch=True), "fsdp_forward_prefetch does not exist"),
        (section(version=2, state_dict_type="LOCAL_STATE_DICT"), "fsdp_state_dict_type"),
        (
            section(backward_prefetch=1, backward_prefetch_policy=2),
            "fsdp_backward_prefetch_policy, its old name",
        ),
        (
            section(cpu_ram_efficient_loading=True, sync_module_states=False),
            "fsdp_sync_module_states=false",
        ),
        (section(auto_wrap_policy=2, min_num_params=0), "makes Accelerate wrap nothing"),
        (section(auto_wrap_policy=2, min_num_params="many"), "fsdp_min_num_params must be a whole"),
        (section(offload_params="perhaps"), "fsdp_offload_params must be true or false"),
        ({"distributed_type": "DEEPSPEED", **section(version=1)}, "distributed_type"),
        ({"distributed_type": "FSDP"}, "fsdp_config is missing or empty"),
        ({"mixed_precision": "fp8", **section(version=1)}, "fp8 is not supported"),
        ({"mixed_precison": "no", **section(version=1)}, "did you mean 'mixed_precision'"),
        (
            {"deepspeed_config": {"zero_stage": 3}, **section(version=1)},
            "deepspeed_config is given although",
        ),
        (section(sharding_strategy="²"), "fsdp_sharding_strategy"),
        (section(sharding_strategy=[1]), "fsdp_sharding_strategy"),
        (section(version="1e400"), "fsdp_version"),
        (section(min_num_params=-1), "fsdp_min_num_params"),
        (section(transformer_layer_cls_to_wrap=3), "fsdp_transformer_layer_cls_to_wrap"),
        (section(transformer_layer_cls_to_wrap=[3]), "fsdp_transformer_layer_cls_to_wrap"),
        (section(ignored_modules=3), "fsdp_ignored_modules"),
        (section(ignored_modules={"a": "b"}), "fsdp_ignored_modules"),
        (section(ignored_modules=[3]), "ignored"),
        (section(offload_params=[True]), "fsdp_offload_params"),
        (section(state_dict_type={}), "fsdp_state_dict_type"),
        (3, "a path or a mapping"),
        ("/nowhere/config.yaml", "cannot be read"),
    ],
)
def test_accelerate_errors_name_the_key(config, said):
    with pytest.raises(PolicyError, match=said):
        from_accelerate(config)


def test_files_that_hold_no_mapping(tmp_path):
    for name, text, said in (
        ("a.yaml", "- 1", "holds a list"),
        ("b.yaml", "a: [", "cannot be parsed"),
        ("c.json", "{", "cannot be parsed"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(PolicyError, match=said):
            from_accelerate(tmp_path / name)


# -- DeepSpeed -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stage", "strategy"),
    list(enumerate(["NO_SHARD", "SHARD_OPTIMIZER", "SHARD_GRAD_OP", "FULL_SHARD"])),
)
def test_stages(stage, strategy):
    assert deepspeed({"zero_optimization": {"stage": stage}}).strategy == strategy
    assert deepspeed({"stage": stage}, classes={Block}).strategy == strategy


def test_a_whole_file(tmp_path):
    path = tmp_path / "ds_config.json"
    config = {
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu", "pin_memory": True},
            "offload_param": {"device": "cpu", "pin_memory": True},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "sub_group_size": 1000000000,
            "reduce_bucket_size": "auto",
            "stage3_prefetch_bucket_size": 20000000,
            "stage3_gather_16bit_weights_on_model_save": True,
        },
        "bf16": {"enabled": True},
        "fp16": {"enabled": "auto", "loss_scale": 0},
        "communication_data_type": "fp32",
        "gradient_clipping": 1.0,
        "train_batch_size": "auto",
        "hybrid_engine": {"enabled": False},  # as in every file of DeepSpeed-Chat
        "elasticity": {"enabled": False},
        "autotuning": {"enabled": False},
    }
    path.write_text(json.dumps(config))
    policy = deepspeed(path)
    assert isinstance(policy, SizePolicy)
    assert policy.min_num_params == 20_000_000
    assert policy.offloads("params")
    bf16 = torch.bfloat16
    assert policy.mixed_precision == MixedPrecision(
        param_dtype=bf16, reduce_dtype=torch.float32, buffer_dtype=bf16
    )
    said = "\n".join(policy.notes)
    for key in (
        "overlap_comm",
        "sub_group_size",
        "zero_optimization.reduce_bucket_size=auto",
        "gradient_clipping=1.0: call sharded.clip_grad_norm_",
        "train_batch_size",
        "hybrid_engine",
        "elasticity",
        "autotuning",
        "fp16.enabled=auto",
    ):
        assert key in said


def test_partition_sizes_are_hybrid():
    for key in ("zero_hpz_partition_size", "mics_shard_size"):
        policy = deepspeed({"stage": 3, key: 8})
        assert policy.strategy is Strategy.HYBRID_SHARD
        assert any(
            note.startswith(f"{key}=8: pass a mesh of (ranks / 8) x 8") for note in policy.notes
        )
    assert deepspeed({"stage": 3, "zero_hpz_partition_size": 1}).strategy is Strategy.FULL_SHARD


def test_units_without_classes_follow_the_prefetch_bucket():
    assert deepspeed({"stage": 3}).min_num_params == 50_000_000
    assert deepspeed({"stage": 3}, classes="Block").classes == frozenset({"Block"})


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"stage": 4}}, "stage must be 0, 1, 2 or 3"),
        ({"zero_optimization": {"stag": 3}}, "'stag'; did you mean 'stage'"),
        ({"zero_optimisation": {"stage": 3}}, "did you mean 'zero_optimization'"),
        ({"stage": 2, "offload_param": {"device": "cpu"}}, "offload_param needs stage 3"),
        ({"stage": 0, "offload_optimizer": {"device": "cpu"}}, "stage is 0"),
        ({"stage": 3, "offload_param": {"device": "nvme"}}, "no offload to NVMe"),
        ({"stage": 3, "offload_param": {"devise": "cpu"}}, "did you mean 'device'"),
        ({"stage": 2, "zero_hpz_partition_size": 8}, "zero_hpz_partition_size=8 needs stage 3"),
        (
            {"stage": 3, "zero_hpz_partition_size": 8, "mics_shard_size": 4},
            "leave one of them out",
        ),
        ({"stage": 3, "zero_quantized_weights": True}, "zero_quantized_weights is not supported"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, "bf16 and fp16"),
        ({"bf16": True}, "bf16 must be a section"),
        ({"communication_data_type": "int8"}, "communication_data_type"),
        ({"sparse_gradients": True}, "sparse_gradients"),
        ({"sparse_attention": {"mode": "fixed"}}, "sparse_attention is not supported"),
        ({"zero_optimization": {"stage": float("nan")}}, "stage"),
        ({"zero_optimization": {"stage": 1e300}}, "stage"),
        ({"zero_optimization": {"stage": "1" * 5000}}, "stage"),
        ({"zero_optimization": {"stage": [3]}}, "stage"),
        ({"zero_optimization": [["stage", 3]]}, "zero_optimization"),
        ({"stage": 3, "zero_hpz_partition_size": -2}, "zero_hpz_partition_size"),
        ({"stage": 3, "stage3_prefetch_bucket_size": -5}, "stage3_prefetch_bucket_size"),
        ({"stage": 3, "offload_param": ["cpu"]}, "offload_param"),
        ({"stage": 3, "offload_param": {"device": ["cpu"]}}, "device"),
        ({"stage": 3, "cpu_offload": {"a": 1}}, "cpu_offload"),
        ({"bf16": {"enabled": [True]}}, "enabled"),
        ({"communication_data_type": {"a": 1}}, "communication_data_type"),
        ({"x" * 100_000: 1}, "x" * 40),
    ],
)
def test_deepspeed_errors_name_the_key(config, said, tmp_path):
    (tmp_path / "ds.json").write_text(json.dumps(config))
    for source in (config, tmp_path / "ds.json"):
        with pytest.raises(PolicyError, match=said) as caught:
            deepspeed(source)
        assert len(str(caught.value)) < 1000

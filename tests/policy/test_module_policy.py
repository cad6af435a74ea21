"""`ModulePolicy`: which modules become units, what is other for them, and what is refused."""

from __future__ import annotations

import json

import pytest
import torch
from meta_models import Block, Example, Weight, tree_of
from torch import nn

from graphshard.errors import PolicyError
from graphshard.planning.layout import UnitOptions
from graphshard.planning.planner import make_plan
from graphshard.policy.by_module import ModulePolicy
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.strategy import Strategy
from graphshard.policy.units import BlockPolicy, SizePolicy

BF16 = MixedPrecision(param_dtype=torch.bfloat16)


def plan_of(modules, base=None, model=None, world_size=4, **fields):
    policy = ModulePolicy(modules, base, **fields)
    return make_plan(model or Example(), policy, world_size=world_size)


def options(plan):
    return {unit.fqn: unit.options for unit in plan.units}


# -- which modules -----------------------------------------------------------------------------


def test_units_are_what_matches_and_what_the_base_selects():
    plan = plan_of({"emb": {}, "blocks.*.up": {}}, BlockPolicy({Block}))
    assert [u.fqn for u in plan.units] == [
        *("", "emb", "blocks.0", "blocks.0.up", "blocks.1", "blocks.1.up"),
    ]
    assert plan.unit("blocks.0").numel == 520
    assert [u.fqn for u in plan_of({Block: {}}).units] == ["", "blocks.0", "blocks.1"]
    assert [u.fqn for u in plan_of({}).units] == [""]


def test_classes_match_subclasses_and_the_root():
    class Child(Block):
        pass

    model = tree_of(a=Block(), b=Child())
    assert [u.fqn for u in plan_of({Block: {}}, model=model).units] == ["", "a", "b"]
    root = plan_of({Example: {"strategy": "NO_SHARD"}}).unit("")
    assert root.options.strategy is Strategy.NO_SHARD


def test_patterns_must_match_the_whole_name_case_sensitively():
    assert [u.fqn for u in plan_of({"blocks.[01]": {}}).units] == ["", "blocks.0", "blocks.1"]
    for pattern in ("block", "Blocks.0", "0"):
        with pytest.raises(PolicyError, match="no module of the model matches"):
            plan_of({pattern: {}})


def test_a_base_may_be_a_module_policy():
    inner = ModulePolicy({"head": {"strategy": "NO_SHARD"}, "emb": {"strategy": "SHARD_GRAD_OP"}})
    made = options(plan_of({"emb": {"strategy": "FULL_SHARD"}}, inner))
    assert made["head"].strategy is Strategy.NO_SHARD
    assert made["emb"].strategy is Strategy.FULL_SHARD


# -- options -----------------------------------------------------------------------------------


def test_each_override_changes_the_options_of_its_units_only():
    base = BlockPolicy({Block})
    usual = UnitOptions(may_stay=True)
    for given, expected in (
        ({"reshard_after_forward": False}, UnitOptions(reshard=False)),
        ({"strategy": "NO_SHARD"}, UnitOptions(Strategy.NO_SHARD, reshard=False)),
        ({"strategy": "ZeRO-2"}, UnitOptions(Strategy.SHARD_GRAD_OP, reshard=False)),
        ({"mixed_precision": BF16}, UnitOptions(precision=BF16, may_stay=True)),
        ({"reshard_after_forward": True}, UnitOptions()),
    ):
        made = options(plan_of({"blocks.1": given}, base))
        assert made["blocks.1"] == expected
        assert made["blocks.0"] == usual
        assert not made[""].reshard


def test_the_root_is_overridden_by_its_empty_name():
    made = options(plan_of({"": {"reshard_after_forward": True}}, BlockPolicy({Block})))
    assert made[""].reshard is True


def test_later_entries_override_earlier_ones_field_by_field():
    made = options(
        plan_of(
            {
                Block: {"reshard_after_forward": False, "mixed_precision": BF16},
                "blocks.1": {"reshard_after_forward": True},
            }
        )
    )
    assert made["blocks.0"] == UnitOptions(reshard=False, precision=BF16)
    assert made["blocks.1"] == UnitOptions(reshard=True, precision=BF16)
    # Another strategy brings its own way of resharding.
    made = options(
        plan_of({Block: {"reshard_after_forward": True}, "blocks.1": {"strategy": "NO_SHARD"}})
    )
    assert made["blocks.1"] == UnitOptions(Strategy.NO_SHARD, reshard=False)


def test_none_takes_precision_away_from_a_unit():
    made = options(plan_of({"emb": {"mixed_precision": None}}, mixed_precision=BF16))
    assert made["emb"].precision is None
    assert made[""].precision == BF16


# -- placement ---------------------------------------------------------------------------------


def stacked():
    """experts.w [8, 6, 4], experts.b [8, 6], gate.weight [5, 8], in a block; twice."""

    def block():
        experts = nn.Module()
        experts.w = nn.Parameter(torch.empty(8, 6, 4))
        experts.b = nn.Parameter(torch.empty(8, 6))
        return tree_of(experts=experts, gate=nn.Linear(8, 5, bias=False))

    with torch.device("meta"):
        return nn.Sequential(block(), block())


def dims(plan):
    return {n: x.dim if x.sharded else None for n, x in plan.layouts.items() if n[0] == "0"}


def test_a_dim_is_taken_by_the_parameters_that_have_it():
    plan = plan_of({"?": {"placement": 2}}, model=stacked())
    assert dims(plan) == {"0.experts.w": 2, "0.experts.b": 0, "0.gate.weight": 0}
    layout = plan.layouts["0.experts.w"]
    assert (layout.shard_shape, layout.gathered_shape) == ((8, 6, 1), (32, 6, 1))
    assert (layout.part(2), layout.padding_bytes) == (((2, 2, 3),), 0)


def test_names_within_the_module_and_parts_of_units_may_be_placed():
    plan = plan_of(
        {
            "?": {"placement": {"experts.?": 1, "gate.*": "replicate"}},
            "0.experts": {"unit": False, "placement": {"w": 0}},
        },
        model=stacked(),
        world_size=2,
    )
    assert dims(plan) == {"0.experts.w": 0, "0.experts.b": 1, "0.gate.weight": None}
    assert plan.layouts["1.experts.w"].dim == 1
    assert [u.fqn for u in plan.units] == ["", "0", "1"]
    assert "replicated: 0.gate.weight [5, 8], 1.gate.weight [5, 8]" in str(plan)
    assert "dim 1: 0.experts.b [8, 6], 1.experts.w [8, 6, 4], 1.experts.b [8, 6]" in str(plan)


def test_placements_do_not_reach_into_units_inside():
    plan = plan_of({"?.experts": {}, "0": {"placement": 1}}, model=stacked(), world_size=2)
    assert dims(plan) == {"0.experts.w": 0, "0.experts.b": 0, "0.gate.weight": 1}


def test_replicated_in_full_and_no_shard_sets_placements_aside():
    plan = plan_of({"0": {"placement": "replicate"}}, model=stacked())
    assert not any(layout.sharded for layout in plan.unit("0").layouts)
    plan = plan_of({"?": {"placement": 1}, "0": {"strategy": "NO_SHARD"}}, model=stacked())
    assert not any(layout.sharded for layout in plan.unit("0").layouts)


# -- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ("emb", "modules must be a mapping"),
        ({3: {}}, "a key must be a module class or a pattern"),
        ({"emb": "NO_SHARD"}, "key 'emb': its value must be a mapping"),
        ({"emb": {"shard": 1}}, "key 'emb': unknown override 'shard'"),
        ({Block: {"strategy": "ALL"}}, "key Block: strategy must be one of"),
        ({Block: {"strategy": "DDP", "reshard_after_forward": True}}, "key Block: .* keeps"),
        ({"emb": {"reshard_after_forward": "no"}}, "key 'emb': reshard_after_forward must be"),
        ({"emb": {"mixed_precision": "bf16"}}, "key 'emb': mixed_precision must be"),
        ({"emb": {"unit": 0}}, "key 'emb': unit must be True or False"),
        ({"emb": {"unit": False}}, "key 'emb': a module that is no unit can override placement"),
        ({"emb": {"placement": -1}}, "key 'emb': placement must be a dim"),
        ({"emb": {"placement": True}}, "key 'emb': placement must be a dim"),
        ({"emb": {"placement": {0: 0}}}, "key 'emb': placement maps patterns"),
    ],
)
def test_entries_that_say_nothing_sensible_are_refused(modules, said):
    with pytest.raises(PolicyError, match=said):
        ModulePolicy(modules)


@pytest.mark.parametrize(
    ("modules", "fields", "said"),
    [
        ({"nothing": {}}, {}, "key 'nothing': no module of the model matches"),
        ({"Block": {}}, {}, "Block is the name of a class; use the class itself"),
        ({nn.Conv2d: {}}, {}, "key Conv2d: no module"),
        ({"blocks*": {}}, {}, "key 'blocks\\*' makes a unit of blocks, a ModuleList"),
        (
            {"emb": {"reshard_after_forward": True}},
            {"strategy": "SHARD_GRAD_OP"},
            "key 'emb': strategy SHARD_GRAD_OP keeps",
        ),
        ({"emb": {"placement": {"bias": 0}}}, {}, "key 'emb': no parameter .* like 'bias'"),
        ({"emb": {"placement": {"weight": 1}}}, {}, "'emb.weight' of shape .500. cannot be split"),
        ({Block: {"placement": 1}}, {}, "key Block, placement of '\\*': none of the parameters"),
        ({"emb": {"strategy": "NO_SHARD", "placement": 0}}, {}, "'emb.weight' .* NO_SHARD"),
        ({"emb": {"strategy": "HYBRID_SHARD"}}, {}, "unit emb needs a mesh of two dim"),
    ],
)
def test_entries_that_do_not_fit_the_model_are_refused(modules, fields, said):
    with pytest.raises(PolicyError, match=said):
        plan_of(modules, **fields)


def test_what_a_base_must_not_say_is_refused():
    with pytest.raises(PolicyError, match="it sets strategy, forward_prefetch; give that to"):
        ModulePolicy({}, BlockPolicy({Block}, strategy="NO_SHARD", forward_prefetch=1))
    with pytest.raises(PolicyError, match="base must be an instance of a Policy"):
        ModulePolicy({}, BlockPolicy)


# -- shown -------------------------------------------------------------------------------------


def test_the_plan_says_what_differs():
    modules = {
        "blocks.1": {"reshard_after_forward": False, "mixed_precision": BF16},
        "emb": {"strategy": "NO_SHARD"},
    }
    plan = plan_of(modules, SizePolicy(min_num_params=900))
    lines = {line.split()[0]: line for line in str(plan).splitlines() if line}
    assert lines["unit"].endswith("  own options")
    assert lines["blocks.1"].endswith("  reshard=False, precision=(param_dtype=bfloat16)")
    assert lines["emb"].endswith("  strategy=NO_SHARD, reshard=False")
    assert lines["blocks.0"].split()[-1] == "B"
    assert "ModulePolicy(modules={'blocks.1': {'reshard_after_forward'" in lines["policy"]
    assert "base=SizePolicy(min_num_params=900" in lines["policy"]
    assert "own options" not in str(plan_of({}, SizePolicy(min_num_params=900)))


def test_the_data_says_all_of_it():
    policy = ModulePolicy({Weight: {"strategy": "NO_SHARD"}}, BlockPolicy({Block}))
    data = json.loads(json.dumps(make_plan(Example(), policy, world_size=2).to_dict()))
    assert data["policy"]["modules"] == {"Weight": {"strategy": "NO_SHARD"}}
    assert data["policy"]["base"] == {"kind": "BlockPolicy", "classes": ["Block"]}
    emb = next(unit for unit in data["units"] if unit["fqn"] == "emb")
    assert emb["options"] == {
        "strategy": "NO_SHARD",
        "reshard": False,
        "precision": None,
        "may_stay": False,
    }
    assert emb["params"][0]["dim"] is None

"""A plan as text, table and data."""

from __future__ import annotations

import dataclasses
import io
import json
from typing import Any

import pytest
import torch
from meta_models import LLAMA_7B, LLAMA_70B, Block, Example, Weight, llama, tree_of
from rich.console import Console
from torch import nn

import graphshard
from graphshard.format import Folded, fold, human_bytes, human_count, some_of
from graphshard.planning.planner import make_plan
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.units import BlockPolicy, LambdaPolicy, SizePolicy


@pytest.mark.parametrize(
    ("name", "config"), [("plan_llama_7b.txt", LLAMA_7B), ("plan_llama_70b.txt", LLAMA_70B)]
)
def test_plan_of_llama(golden, name, config):
    golden(name, f"{make_plan(llama(**config), SizePolicy(), world_size=8)}\n")


def odd_model():
    """Padding, a tie, a scalar, two dtypes, an empty unit and nested repetition at once."""
    with torch.device("meta"):
        stages = nn.ModuleList(
            nn.ModuleList([Block(), Block(), nn.Linear(5, 7, dtype=torch.bfloat16)])
            for _ in range(2)
        )
        model = tree_of(emb=nn.Linear(30, 10, bias=False), stages=stages, relu=nn.ReLU())
        model.head = nn.Linear(30, 10, bias=False)
        model.scale = nn.Parameter(torch.ones(()))
    model.head.weight = model.emb.weight
    return model


def test_plan_of_an_odd_model(golden):
    policy = BlockPolicy({Block, nn.Linear, "ReLU"}, forward_prefetch=1, memory_budget=2**20)
    golden("plan_odd.txt", f"{make_plan(odd_model(), policy, world_size=4)}\n")


def test_unfolding_gives_every_unit_a_line():
    plan = make_plan(llama(**LLAMA_7B), SizePolicy(), world_size=8)
    lines = plan.text(unfold=True).splitlines()
    shown = [line.split()[0] for line in lines[8 : 8 + len(plan.units)]]
    assert shown == ["(root)", *(unit.fqn for unit in plan.units[1:])]
    assert str(plan) == plan.text() == plan.text(unfold=False)


def kept(module: nn.Module) -> bool:
    return isinstance(module, Block)


def other(module: nn.Module) -> bool:
    return isinstance(module, Block)


CHANGED = {
    "strategy": "SHARD_GRAD_OP",
    "backward_prefetch": None,
    "forward_prefetch": 2,
    "merge_below": 65_536,
    "reshard_root": True,
    "gather_unused": True,
    "reshard_after_forward": False,
    "mixed_precision": MixedPrecision(param_dtype=torch.bfloat16),
    "offload": "activations",
    "ignored": r".*\.norm",
    "recompute": "units",
    "memory_budget": 10**9,
    "schedule": "overlap",
    "hardware": "a100-80gb",
    "cuda_graph": True,
    "check_finite": "warn",
    "sync_module_states": True,
    "notes": ("a remark",),
    "min_num_params": 500,
    "force_leaf": (),
    "exclude": {nn.Sequential},
    "classes": {"Block", "Weight"},
    "fn": other,
}


@pytest.mark.parametrize(
    ("policy", "field"),
    [
        (policy, field.name)
        for policy in (SizePolicy(400), BlockPolicy({"Block"}), LambdaPolicy(kept))
        for field in dataclasses.fields(policy)
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_every_policy_field_shows_in_the_header_and_in_the_data(policy, field):
    if field == "hardware":  # of what is scheduled by cost
        policy = dataclasses.replace(policy, schedule="overlap")
    changed = dataclasses.replace(policy, **{field: CHANGED[field]})
    plans = [make_plan(Example(), p, world_size=2) for p in (policy, changed)]
    before, after = (plan.text().splitlines() for plan in plans)
    assert before != after
    assert plans[0].to_dict()["policy"] != plans[1].to_dict()["policy"]


def test_data_is_plain_and_complete():
    plan = make_plan(odd_model(), BlockPolicy({Block, nn.Linear}), world_size=4)
    data = json.loads(json.dumps(plan.to_dict()))
    assert [unit["fqn"] for unit in data["units"]] == [unit.fqn for unit in plan.units]
    for shown, unit in zip(data["units"], plan.units, strict=True):
        assert (shown["numel"], shown["sharded"]) == (unit.numel, unit.sharded_bytes)
        assert [param["fqn"] for param in shown["params"]] == list(unit.params)
    root = data["units"][0]["params"]
    assert [param["placement"] for param in root] == ["replicate", "shard"]
    assert root[1]["names"] == ["emb.weight", "head.weight"]
    assert root[1] | {"shape": [10, 30], "shard_shape": [3, 30], "dtype": "float32"} == root[1]
    assert data["total"]["numel"] == sum(unit.numel for unit in plan.units)
    assert data["policy"]["classes"] == ["Block", "Linear"]
    assert (data["world_size"], data["mesh_shape"], data["model"]) == (4, [4], "Module")
    assert data["warnings"] == list(plan.warnings)
    assert "units" not in plan.to_dict(units=False)


@pytest.mark.parametrize("width", [80, 160])
def test_table_says_the_same_in_colour(width):
    plan = make_plan(odd_model(), BlockPolicy({Block, "ReLU"}), world_size=4)

    def printed(**options):
        console = Console(file=io.StringIO(), width=width, **options)
        console.print(plan)
        console.print(plan.table(unfold=True))
        return console.file.getvalue()

    plain = printed(color_system=None)
    assert "\x1b[" in printed(force_terminal=True, color_system="standard")
    assert "\x1b[" not in plain
    squeezed = "".join(plain.split())
    for part in ("stages.0-1.0-1", "stages.1.0", "tied:", "replicated:scale", "warning:unitrelu"):
        assert part in squeezed
    assert all(len(line) <= width for line in plain.splitlines())


# -- folding -----------------------------------------------------------------------------------


def folded(*names, facts=None):
    rows = [(name, (facts or {}).get(name, 0)) for name in names]
    return [(line.name, line.count) for line in fold(rows)]


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        ("", [("", 1)]),
        ("h.0 h.1 h.2", [("h.0-2", 3)]),
        ("0 1", [("0-1", 2)]),
        ("h.0.a h.0.b h.1.a h.1.b", [("h.0-1.a", 2), ("h.0-1.b", 2)]),
        ("h.0 h.0.a h.1 h.1.a", [("h.0-1", 2), ("h.0-1.a", 2)]),
        ("h.0 h.2 h.3", [("h.0", 1), ("h.2-3", 2)]),
        ("h.0.a h.1.b h.2.b", [("h.0.a", 1), ("h.1-2.b", 2)]),
        ("h.0 g.1", [("h.0", 1), ("g.1", 1)]),
        ("h.0.e.0 h.0.e.1 h.1.e.0 h.1.e.1", [("h.0-1.e.0-1", 4)]),
        ("s.0.b.0 s.0.b.1 s.1.b.0", [("s.0.b.0-1", 2), ("s.1.b.0", 1)]),
        ("h.00 h.01", [("h.00", 1), ("h.01", 1)]),
        ("a h.1 h.0", [("a", 1), ("h.1", 1), ("h.0", 1)]),
    ],
)
def test_fold(names, expected):
    assert folded(*names.split(" ")) == expected


def test_only_equal_facts_fold():
    names = ("h.0", "h.1", "h.2", "h.3")
    assert folded(*names, facts={"h.2": 1}) == [("h.0-1", 2), ("h.2", 1), ("h.3", 1)]
    assert fold([("h.0", "x"), ("h.1", "x")]) == [Folded("h.0-1", "x", 2)]


def test_layers_that_differ_in_class_or_bytes_do_not_fold():
    class Special(Weight):
        pass

    layers = [Weight(8), Weight(8), Special(8), Weight(8), Weight(8).half(), Weight(9)]
    plan = make_plan(nn.Sequential(*layers), BlockPolicy(Weight), world_size=2)
    shown = [line.split()[0] for line in str(plan).splitlines()[9:14]]
    assert shown == ["0-1", "2", "3", "4", "5"]


# -- numbers -----------------------------------------------------------------------------------


def test_numbers_for_people():
    assert [human_bytes(n) for n in (0, 1023, 1024, 1536, -2048)] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 KiB",
        "-2.00 KiB",
    ]
    assert human_bytes(2**20 - 1) == "1.00 MiB"
    assert [human_bytes(2.0**p) for p in (30, 40, 50, 60)] == [
        "1.00 GiB",
        "1.00 TiB",
        "1.00 PiB",
        "1024.00 PiB",
    ]
    counts = (0, 999, 1000, 999_999, 6_738_415_616, 1.008e12, 5e15)
    expected = ["0", "999", "1.00K", "1.00M", "6.74B", "1.01T", "5000.00T"]
    assert [human_count(n) for n in counts] == expected
    assert (some_of("ab"), some_of("abcd", "-", 2)) == ("a, b", "a-b and 2 more")


def test_pinned_memory_is_rounded_up() -> None:
    """200 x 200 floats on 2 ranks are 80,000 bytes, for which torch pins 131,072."""
    policy = graphshard.BlockPolicy({nn.Linear}, offload="params")
    given = nn.Linear(200, 200, bias=False), policy
    call: Any = {"world_size": 2, "example_inputs": (torch.zeros(1, 200),)}
    text = str(graphshard.plan(*given, **call, device="cuda"))
    assert (
        "pinned: 128.00 KiB of memory for these parameters, in 1 blocks, which torch rounds" in text
    )
    assert "pinned" not in str(graphshard.plan(*given, **call, device="cpu"))

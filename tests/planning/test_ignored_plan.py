"""Ignored parameters in plans and programs, made without ranks."""

from __future__ import annotations

from loops import gpt
from models import Block, tokens_of

import graphshard
from graphshard.program.storages import live_unsharded
from graphshard.program.text import full_text


def test_ignored_parameters_change_sizes_and_units() -> None:
    model = gpt(2)
    everything = graphshard.plan(model, graphshard.SizePolicy(min_num_params=1000), world_size=2)
    ignored = graphshard.plan(
        model, graphshard.SizePolicy(min_num_params=1000, ignored=r"blocks\.0\.up"), world_size=2
    )
    assert [unit.fqn for unit in everything.units] == ["", "blocks.0", "blocks.1"]
    assert [unit.fqn for unit in ignored.units] == ["", "blocks.1"]
    assert sum(unit.numel for unit in ignored.units) == sum(
        unit.numel for unit in everything.units
    ) - sum(p.numel() for p in model.blocks[0].up.parameters())
    assert [layout["fqn"] for layout in ignored.to_dict()["ignored"]] == [
        "blocks.0.up.weight",
        "blocks.0.up.bias",
    ]


def test_the_program_shows_ignored_parameters_without_collectives() -> None:
    plan = graphshard.plan(
        gpt(1),
        graphshard.BlockPolicy({Block}, ignored="blocks.0.up.weight"),
        world_size=2,
        example_inputs=tokens_of(0, 0),
    )
    assert plan.program is not None
    assert "parameter blocks.0.up.weight [33, 16], ignored" in full_text(plan.program)
    named = {n for node in plan.program.nodes() for n in node.kwargs.get("params", ())}
    assert "blocks.0.up.weight" not in named
    assert "blocks.0.up.bias" in named
    assert max(live for _, live in live_unsharded(plan.program)) < sum(
        p.numel() * 4 for p in gpt(1).parameters()
    )

"""`AutoPolicy`, what it returns, and where it may stand for a policy."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from paths import ROOT, SUPPORT
from ranks import run_ranks
from tuning import OPEN, SLOW, gpt

import graphshard
from examples.gpt import GPT, Block, GPTConfig
from graphshard import AutoPolicy, BlockPolicy, MixedPrecision
from graphshard.cli.main import main
from graphshard.errors import CostError, PlanError, PolicyError
from graphshard.format import human_bytes


def tune(budget: int | str | None = None, **fields) -> graphshard.Tuning:
    model, inputs = gpt()
    few = {"units": BlockPolicy({"Block"}), "backward_prefetch": "pre", "strategy": "FULL_SHARD"}
    auto = replace(OPEN, memory_budget=budget, **{**few, **fields})
    return auto.tune(model, example_inputs=inputs, world_size=4)


@pytest.mark.slow
def test_what_is_found_is_an_ordinary_policy():
    tuning = tune(mixed_precision=MixedPrecision(torch.bfloat16))
    policy = eval(tuning.code, {"graphshard": graphshard, "torch": torch})
    assert policy == tuning.policy
    model, inputs = gpt()
    again = graphshard.plan(model, policy, world_size=4, example_inputs=inputs, device="cuda")
    assert str(again.program) == str(tuning.plan.program)
    estimate = graphshard.simulate(again, hardware=SLOW)
    assert estimate.step_seconds == tuning.estimate.step_seconds
    assert estimate.peak_bytes == tuning.estimate.peak_bytes == tuning.frontier[0].bytes
    assert estimate.step_seconds == tuning.frontier[0].seconds == tuning.tried[0].seconds
    text = str(tuning)
    for said in (tuning.code, "chosen", "why not:", "kinds of policies", "1.00 GiB"):
        assert said in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 120
    assert str(tune(mixed_precision=MixedPrecision(torch.bfloat16))) == text
    assert json.loads(json.dumps(tuning.to_dict()))["code"] == tuning.code


@pytest.mark.slow
def test_on_gpus_the_budget_bounds_what_torch_reserves():
    tuning = tune("30MiB", allocator="")
    estimate = tuning.estimate
    assert estimate.reserved is not None
    assert estimate.peak_bytes < estimate.reserved_bytes <= 30 << 20
    assert tuning.frontier[0].bytes == estimate.reserved_bytes
    assert f"memory     {human_bytes(estimate.reserved_bytes)} reserved, of 30.00 MiB" in str(
        tuning
    )
    with pytest.raises(PolicyError, match=r"nothing fits in 1\.00 MiB"):
        tune("1MiB", allocator="")
    least = tune(None, allocator="", schedule="fsdp").memory_budget
    assert least == SLOW.memory_bytes


@pytest.mark.slow
def test_what_is_fixed_stays():
    fixed = {
        "strategy": "SHARD_GRAD_OP",
        "forward_prefetch": 2,
        "recompute": {"Block"},
        "offload": "params",
        "mixed_precision": MixedPrecision(torch.bfloat16),
        "cuda_graph": True,
        "check_finite": "error",
        "notes": ("mine",),
    }
    for entry in tune(**fixed).tried:
        assert isinstance(entry.policy, BlockPolicy)
        for name, value in fixed.items():
            got = getattr(entry.policy, name)
            assert got == getattr(BlockPolicy(**{name: value}), name)
    for name, value in (("backward_prefetch", None), ("reshard_root", True)):
        assert {getattr(t.policy, name) for t in tune(**{name: value}).tried} == {value}
    kept = tune(reshard_after_forward=False, recompute=None)
    assert {t.policy.reshard_after_forward for t in kept.tried} == {False}


def test_a_fixed_bound_of_small_units_stays():
    shared = {"strategy": "auto", "recompute": None, "offload": None, "schedule": "fsdp"}
    tuning = tune(merge_below=4096, forward_prefetch=0, **shared)
    assert {t.policy.merge_below for t in tuning.tried} == {4096}


@pytest.mark.slow
def test_where_nothing_fits_it_says_what_would():
    least = min(entry.bytes for entry in tune(recompute={"Block"}).tried)
    with pytest.raises(PolicyError) as raised:
        tune(least // 2)
    text = str(raised.value)
    assert text.startswith(f"nothing fits in {human_bytes(least // 2)}")
    assert "at its peak it holds" in text
    with pytest.raises(PolicyError, match=r"it would with recompute left open: .*'Block'"):
        tune(int(least * 1.1), recompute=None)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"memory_budget": "70Gb"}, "memory_budget: '70Gb' is not a size"),
        ({"memory_budget": 0}, "memory_budget must be a positive"),
        ({"gpus_per_node": 0}, "gpus_per_node"),
        ({"optimizer": "lion"}, "optimizer must be one of"),
        ({"units": "Block"}, "units must be a policy"),
        ({"units": BlockPolicy(strategy="DDP")}, "units chooses units and nothing else"),
        ({"recompute": ("budget", Block)}, "leave recompute"),
        ({"strategy": "ZERO9"}, "strategy must be one of"),
        ({"forward_prefetch": -1}, "forward_prefetch"),
    ],
)
def test_wrong_fields_are_refused(fields, said):
    with pytest.raises(PolicyError, match=said):
        AutoPolicy(**fields)


def test_what_it_needs_is_asked_for():
    with pytest.raises(CostError, match="no hardware preset"):
        AutoPolicy(hardware="abacus")
    model, inputs = gpt()
    for call in (graphshard.plan, graphshard.compile):
        with pytest.raises(PolicyError, match="give example_inputs or example_kwargs"):
            call(model, AutoPolicy())
    with pytest.raises(PolicyError, match="needs a number of ranks"):
        AutoPolicy().tune(model, example_inputs=inputs)
    with pytest.raises(PlanError, match=r"call model\.train"):
        graphshard.plan(model.eval(), AutoPolicy(), world_size=2, example_inputs=inputs)
    assert AutoPolicy("70GiB").memory_budget == AutoPolicy(70 << 30).memory_budget


@pytest.mark.slow
def test_the_command(capsys, monkeypatch):
    monkeypatch.syspath_prepend("examples")
    arguments = ["tune", "factories:small", "--policy", "block:Block", "--world-size", "8"]
    arguments += ["--strategy", "FULL_SHARD", "--backward-prefetch", "pre", "--recompute", "Block"]
    arguments += ["--schedule", "fsdp", "--offload", "params", "--optimizer", "sgd"]
    assert main([*arguments, "--memory-budget", "1GiB"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("graphshard.")
    assert "of 1.00 GiB" in shown
    more = ["--forward-prefetch", "1", "--param-dtype", "bf16", "--merge-below", "1MiB"]
    assert main([*arguments, *more, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["policy"]["forward_prefetch"] == 1
    assert data["policy"]["merge_below"] == 1 << 20
    assert "bfloat16" in data["code"]
    assert main([*arguments, "--memory-budget", "1KiB"]) == 2
    assert "nothing fits in 1.00 KiB" in capsys.readouterr().err


def test_a_search_ends_in_its_time_and_says_what_it_left_out(capsys, monkeypatch, tmp_path):
    """Its progress is lines where stderr is a file, and in a file that is named."""
    monkeypatch.syspath_prepend("examples")
    arguments = ["tune", "factories:small", "--world-size", "8", "--memory-budget", "1GiB"]
    file = tmp_path / "progress"
    assert main([*arguments, "--seconds", "1", "--json", "--progress", str(file)]) == 0
    shown = capsys.readouterr()
    assert file.read_text() == shown.err
    data = json.loads(shown.out)
    assert data["stopped_after"] == 1
    assert data["groups"]["not tried"] == len(data["untried"]) > 0
    assert data["tried"]
    lines = shown.err.splitlines()
    assert all(re.match(r" *\d+\.\d s  ", line) for line in lines), lines
    assert any("simulate likely candidates" in line for line in lines)
    assert any("best so far: " in line for line in lines)


def test_a_search_that_found_nothing_in_its_time_says_so():
    model, inputs = gpt()
    auto = AutoPolicy(1 << 10, hardware=SLOW, seconds=1e-3)
    with pytest.raises(PolicyError, match=r"no policy that fits .* in 0\.001 s.*give more time"):
        auto.tune(model, example_inputs=inputs, world_size=4)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    idx, targets = torch.randint(64, (2, 2, 16), generator=torch.Generator().manual_seed(1))
    return idx, targets


def losses_of(policy: graphshard.Policy | AutoPolicy):
    """The losses of two steps, and the plan."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=64, layers=2, heads=2, width=32))
    sharded = graphshard.compile(model, policy, example_inputs=batch())
    optimizer = torch.optim.AdamW(sharded.parameters())
    losses = []
    for _ in range(2):
        loss = sharded(*batch())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, sharded.plan


def trained(rank, seconds=None):
    auto = AutoPolicy(
        seconds=seconds and seconds * (1 + rank),
        units=BlockPolicy({"Block"}),
        schedule="fsdp",
        offload=None,
        recompute=None,
        reshard_root=False,
        forward_prefetch=1,
    )
    losses, plan = losses_of(auto)
    assert "tuned for" in str(plan)
    assert "cpu-gloo" in str(plan)
    return losses, repr(plan.policy)


def test_ranks_find_the_same_and_train():
    (one, policy), (other, same) = run_ranks(trained, 2, timeout=300)
    assert policy == same
    assert one == other == pytest.approx(losses_of(BlockPolicy({"Block"}))[0], rel=1e-5)


@pytest.mark.slow
def test_ranks_take_rank_0_s_policy_where_time_is_limited():
    (one, policy), (other, same) = run_ranks(trained, 2, 1e-3, timeout=300)
    assert policy == same
    assert one == other


@pytest.mark.slow
def test_every_process_finds_the_same():
    code = "import test_tune_policy; print(test_tune_policy.tune(recompute='auto', units='auto'))"
    folders = f"{ROOT}:{SUPPORT}:{Path(__file__).parent}"
    said = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={
                **os.environ,
                "PYTHONHASHSEED": seed,
                "PYTHONPATH": folders,
            },
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1

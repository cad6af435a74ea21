"""Runs of one global batch: ranks, batches and micro-batches, and what a million tokens cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from tuning import OPEN, SLOW, gpt

import graphshard
from graphshard import AutoPolicy, BlockPolicy, RunRequest
from graphshard.cli.main import main
from graphshard.cli.tune import parse_count, parse_counts
from graphshard.cost.memory import SHARD_GRADIENTS
from graphshard.errors import PolicyError

FIXED = {
    "units": BlockPolicy({"Block"}),
    "strategy": "FULL_SHARD",
    "reshard_root": False,
    "reshard_after_forward": None,
    "backward_prefetch": "pre",
    "forward_prefetch": 1,
    "recompute": None,
}


@pytest.fixture(scope="module")
def runs() -> graphshard.Runs:
    """Runs of a GPT whose example inputs are 4 samples of 32 tokens, for 16 samples a step."""
    model, inputs = gpt()
    request = RunRequest((2, 4, 3), global_tokens=512, batches=(2, 4), price=1.5)
    return replace(OPEN, **FIXED).tune_runs(model, request, example_inputs=inputs)


def test_a_run_costs_what_its_step_takes(runs):
    assert [run.ranks for run in runs.runs] == [2, 4]
    for run in runs.runs:
        assert (run.samples, run.tokens) == (16, 512)
        tokens = torch.zeros(run.batch, 32, dtype=torch.int64, device="meta")
        plan = graphshard.plan(
            gpt()[0], run.tuning.policy, world_size=run.ranks, example_inputs=(tokens, tokens)
        )
        one = graphshard.simulate(plan, hardware=SLOW, allocator="none")
        seconds = run.micro_batches * one.timeline.seconds + one.optimizer_seconds
        assert run.step_seconds == pytest.approx(seconds + one.hardware.step_overhead)
        held = sum(s.size for s in one.memory.storages if s.kind == SHARD_GRADIENTS)
        assert held > 0
        kept = held if run.micro_batches > 1 else 0
        assert run.tuning.bytes == one.peak_bytes + kept
        assert run.rate == 512 / run.step_seconds
        hours = run.ranks * run.step_seconds / 3600
        assert run.price_of_million == pytest.approx(1.5 * hours / 512 * 1e6)


def test_the_best_of_each_number_of_ranks_is_shown(runs):
    assert set(runs.tried) == {(2, 4), (2, 2), (4, 4), (4, 2)}
    assert list(runs.without) == [3]
    assert "no batch makes a step of 16 samples" in runs.without[3]
    assert runs.cheapest.ranks / runs.cheapest.rate == min(r.ranks / r.rate for r in runs.runs)
    rates = [run.rate for run in runs.frontier]
    assert rates == sorted(rates)
    text = str(runs)
    assert text.count("cheapest") == 2
    assert "price/1M tokens" in text
    assert runs.cheapest.tuning.code in text
    data = json.loads(json.dumps(runs.to_dict()))
    assert data["cheapest"] == runs.cheapest.ranks
    assert data["runs"][0]["tokens"] == 512


def test_micro_batches_of_a_step_count_in_the_search():
    model, inputs = gpt()
    auto = replace(OPEN, **FIXED, micro_batches=3)
    tuning = auto.tune(model, example_inputs=inputs, world_size=4)
    one = tuning.estimate
    assert tuning.step_seconds == one.step_seconds + 2 * one.timeline.seconds
    assert tuning.frontier[0].seconds == tuning.step_seconds
    assert tuning.frontier[0].bytes == tuning.bytes > one.peak_bytes
    assert "for 3 micro-batches; of one" in str(tuning)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "give either global_batch, in samples, or global_tokens"),
        ({"global_batch": 8, "global_tokens": 8}, "give either"),
        ({"global_batch": 0}, "global_batch must be 1 or more; got 0"),
        ({"global_batch": 8, "ranks": ()}, "ranks must be 1 or more"),
        ({"global_batch": 8, "batches": (0,)}, "batches must be 1 or more"),
        ({"global_batch": 8, "price": -1.0}, "price must be a positive number"),
        ({"global_batch": 8, "price": 10**400}, "price must be a positive number"),
    ],
)
def test_wrong_requests_are_refused(fields, said):
    with pytest.raises(PolicyError, match=said):
        RunRequest(**{"ranks": (2,), **fields})


def test_what_cannot_be_compared_is_an_error():
    model, inputs = gpt()
    with pytest.raises(PolicyError, match=r"no run was found; 3 ranks: no batch makes a step of 4"):
        AutoPolicy().tune_runs(model, RunRequest((3,), global_batch=4), example_inputs=inputs)
    with pytest.raises(PolicyError, match="give global_batch, in samples"):
        AutoPolicy().tune_runs(
            torch.nn.Linear(2, 2),
            RunRequest((2,), global_tokens=4),
            example_inputs=(torch.zeros(2, 2),),
        )
    with pytest.raises(PolicyError, match="micro_batches must be 1 or more"):
        AutoPolicy(micro_batches=0)


def test_counts_of_the_command_line():
    assert [parse_count(text) for text in ("7", "2M", "2Mi", "1.5k")] == [7, 2000000, 2097152, 1500]
    assert parse_counts("8-64") == (8, 16, 32, 64)
    assert parse_counts("8-63") == (8, 16, 32)
    assert parse_counts("8,24") == (8, 24)


FACTORY = """
from tuning import gpt

def small():
    return gpt(layers=1)
"""


@pytest.mark.slow
def test_the_command_compares_runs(tmp_path, monkeypatch, capsys):
    (tmp_path / "runs_factory.py").write_text(FACTORY)
    monkeypatch.chdir(tmp_path)
    arguments = ["tune", "runs_factory:small", "--policy", "block:Block", "--ranks", "2-4"]
    arguments += ["--strategy", "FULL_SHARD", "--backward-prefetch", "pre", "--recompute", "Block"]
    arguments += ["--forward-prefetch", "1", "--schedule", "fsdp", "--global-tokens", "512"]
    assert main([*arguments, "--batches", "1,4", "--price", "1.5", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert sorted(map(tuple, found["tried"])) == [(2, 1), (2, 4), (4, 1), (4, 4)]
    for run in found["runs"]:
        assert run["tokens"] == 512
        hours = run["ranks"] * run["step_seconds"] / 3600
        assert run["price_of_million"] == pytest.approx(1.5 * hours / 512 * 1e6)
    assert main([*arguments, "--batches", "4"]) == 0
    text = capsys.readouterr().out
    assert "the cheapest, on" in text
    assert "price" not in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--world-size", "8", "--price", "2"], "--price is for comparing runs"),
        (["--ranks", "8-64"], "--ranks is for comparing runs"),
        (["--mesh", "2x4", "--global-batch", "8"], "instead of --mesh"),
    ],
)
def test_options_without_effect_are_refused(arguments, said, capsys):
    assert main(["tune", "factories:small", *arguments]) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("text", ["0", "x", "8-4", "2.5", "1T", "8,"])
def test_wrong_counts_are_refused(text, capsys):
    with pytest.raises(SystemExit):
        main(["tune", "factories:small", "--ranks", text, "--global-batch", "8"])
    assert "--ranks" in capsys.readouterr().err

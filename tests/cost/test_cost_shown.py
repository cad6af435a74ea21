"""How estimates are shown: as text, a trace, a picture, and two of them side by side."""

from __future__ import annotations

import json
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch
from paths import EXAMPLES
from simulations import simulate

import graphshard
from examples.gpt import GPT, Block, GPTConfig
from graphshard import BlockPolicy
from graphshard.cli.main import main
from graphshard.cost.text import room
from graphshard.errors import CostError
from graphshard.hardware.hardware import Hardware


def test_what_a_unit_holds_and_when():
    estimate = simulate()
    step = estimate.step_seconds
    for unit in estimate.units:
        for held in unit.held:
            assert 0 <= held.start <= held.end <= step
            assert held.bytes > 0
        by_category = {}
        for held in unit.held:
            by_category.setdefault(held.category, []).append(held)
        for alike in by_category.values():
            assert all(one.end <= other.start for one, other in pairwise(alike))
    block = estimate.units[1]
    gathered = [held for held in block.held if held.category == "unsharded parameters"]
    assert len(gathered) == 2, "once in forward, once in backward"
    assert {held.bytes for held in gathered} == {estimate.plan.units[1].unsharded_bytes}
    gathers = [t for t in block.transfers if t.op == "all_gather"]
    assert [held.start for held in gathered] == [t.span.issued for t in gathers]
    assert block.seconds_held("unsharded parameters") == sum(h.end - h.start for h in gathered)
    assert block.most("saved for backward") > 0
    (grads,) = [held for held in block.held if held.category == "gradients"]
    assert grads.end == step, "the optimizer needs them"


def test_the_units_peaks_are_those_of_the_step():
    estimate = simulate()
    assert sum(size for unit in estimate.units for size in unit.at_peak.values()) == (
        estimate.peak_bytes - estimate.valley_bytes
    )


def test_equal_units_are_one_line():
    lines = [line for line in str(simulate()).splitlines() if line.startswith("layers.")]
    assert len(lines) <= 3
    assert lines[0].split()[0] in ("layers.0", "layers.0-1", "layers.0-2")


def test_a_trace_is_what_perfetto_reads(tmp_path):
    estimate = simulate()
    estimate.save_trace(tmp_path / "trace.json")
    trace = json.loads((tmp_path / "trace.json").read_text())
    assert set(trace) == {"displayTimeUnit", "traceEvents"}
    wanted = {
        "M": {"name", "ph", "pid", "tid", "args"},
        "X": {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"},
        "C": {"name", "ph", "pid", "ts", "args"},
    }
    threads = set()
    for event in trace["traceEvents"]:
        assert set(event) == wanted[event["ph"]]
        if event["name"] == "thread_name":
            threads.add(event["tid"])
        if event["ph"] != "M":
            assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] > 0
            assert event["tid"] in threads, "rows are named before they are used"
        if event["ph"] == "C":
            assert all(isinstance(size, int) for size in event["args"].values())
    by_row = {}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            by_row.setdefault(event["tid"], []).append((event["ts"], event["ts"] + event["dur"]))
    for spans in by_row.values():  # a row is drawn flat only if nothing in it overlaps
        assert all(one[1] <= other[0] + 1e-3 for one, other in pairwise(sorted(spans)))
    counters = [event for event in trace["traceEvents"] if event["ph"] == "C"]
    assert [event["ts"] for event in counters] == sorted(event["ts"] for event in counters)
    assert max(sum(event["args"].values()) for event in counters) == estimate.peak_bytes
    exposed = [e for e in trace["traceEvents"] if e["ph"] == "X" and e["args"].get("reason")]
    assert len(exposed) == sum(bool(t.exposed) for t in estimate.transfers)


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    estimate = simulate()
    estimate.plot(tmp_path / "step.png")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    estimate.plot(tmp_path / "step.svg")
    assert ElementTree.parse(tmp_path / "step.svg").getroot().tag.endswith("svg")


def test_a_comparison_says_what_differs_and_why():
    late, early = simulate(slow=0.5), simulate(slow=0.5, forward_prefetch=1)
    both = graphshard.compare(late, early, names=("late", "early"))
    assert both.faster_by > 0
    assert both.policy_differences == {"forward_prefetch": ("0", "1")}
    text = str(both)
    assert "forward_prefetch  0 against 1" in text
    assert "early is " in text
    assert "% faster than late" in text
    assert "less waiting: all_gathers in forward" in text
    assert "since it is issued where its result is needed (forward_prefetch=0)" in text
    back = str(graphshard.compare(early, late, names=("early", "late")))
    assert "late is " in back
    assert "% slower than early" in back
    assert "more waiting: all_gathers in forward" in back
    data = json.loads(json.dumps(both.to_dict()))
    assert data["policies"] == {"forward_prefetch": ["0", "1"]}


def test_a_comparison_says_where_memory_goes():
    plain, again = simulate(), simulate(recompute="units")
    both = graphshard.compare(plain, again)
    assert both.smaller_by == plain.peak_bytes - again.peak_bytes
    text = str(both)
    assert "more compute" in text
    assert "of its FLOPs are recomputation, against 0%" in text
    assert "A does not fit in the 1000 B of unit" in text
    assert ("B's peak is" in text) == (abs(both.smaller_by) > 0.002 * plain.peak_bytes)
    same = str(graphshard.compare(plain, plain))
    assert "B is as fast as A." in same


def test_what_is_no_pair_of_estimates_is_refused():
    estimate = simulate()
    with pytest.raises(CostError, match="compare takes two estimates"):
        graphshard.compare(estimate, estimate.plan)
    with pytest.raises(CostError, match="under two names"):
        graphshard.compare(estimate, estimate, names=("x", "x"))


def test_the_command_compares_two_policies(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    common = ["compare", "factories:small", "--world-size", "8", "--hardware", "h100-sxm"]
    policies = ["--policy", "block:Block", "--policy", "size:1e5 --recompute units"]
    assert main([*common, *policies]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("A: block:Block\nB: size:1e5 --recompute units\n")
    assert "recompute       None against 'units'" in printed
    assert main([*common, *policies, "--recompute", "units", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert "recompute" not in data["policies"], "given for both"
    assert main([*common, *policies[:2]]) == 2
    assert "two policies are compared" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([*common, *policies[:3], "block --speed 9"])
    assert "unrecognized arguments: --speed 9" in capsys.readouterr().err


@pytest.mark.slow
def test_what_would_make_room_does_and_frees_no_more_than_is_said():
    def gpt(rows=8, world=4, **options):
        with torch.device("meta"):
            model = GPT(GPTConfig(vocab=512, layers=4, heads=4, width=256))
            tokens = torch.zeros(rows, 256, dtype=torch.int64)
        fields = {name: value for name, value in options.items() if name != "optimizer"}
        return graphshard.simulate(
            model,
            policy=BlockPolicy({Block}, **fields),
            hardware=Hardware.load("h100-sxm").with_(memory_bytes=1 << 20),
            world_size=world,
            example_inputs=(tokens, tokens),
            optimizer=options.get("optimizer", "adamw"),
        )

    def frees(change, estimate, other):
        said = room(estimate)[change]
        assert 0 < estimate.peak_bytes - other.peak_bytes <= said

    full = gpt()
    assert not full.fits
    frees("half the batch", full, gpt(rows=4))
    frees('recompute="units"', full, gpt(recompute="units"))
    frees('offload="activations"', full, gpt(offload="activations"))
    frees('offload="params"', full, gpt(offload="params"))
    frees("8 ranks", full, gpt(world=8))
    frees('strategy="FULL_SHARD"', gpt(strategy="SHARD_GRAD_OP"), full)
    small = {"recompute": "units", "rows": 1, "world": 1}
    assert "half the batch" not in room(gpt(**small))
    frees("a fused optimizer", gpt(**small), gpt(**small, optimizer="adamw-fused"))
    assert "room       frees at most" in str(full)
    assert "room" not in str(full.with_hardware("h100-sxm"))


def test_a_policy_with_groups_is_compared_with_one_without(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    policies = ("--policy", "block:Block", "--policy", "block:Block --strategy HYBRID_SHARD")
    where = ("--mesh", "2x8", "--hardware", "h100-sxm")
    assert main(["compare", "factories:small", *policies, *where]) == 0
    said = capsys.readouterr().out
    assert "strategy  FULL_SHARD against HYBRID_SHARD" in said
    assert "A on 16 ranks of h100-sxm\nB on 16 ranks of h100-sxm" in said

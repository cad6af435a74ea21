"""Every option of a simulation changes the estimate."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest
import toy_programs as toys
from paths import EXAMPLES

import graphshard
from graphshard.cli.main import main
from graphshard.cost.timeline import timeline_of
from graphshard.errors import CostError
from graphshard.hardware.hardware import Hardware
from graphshard.policy.units import Policy


def test_each_option_of_a_simulation_changes_it(capsys, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    common = ["simulate", "factories:small", "--policy", "block:Block", "--world-size", "16"]
    common += ["--hardware", "h100-sxm", "--json"]

    def estimate(*options):
        assert main([*common, *options]) == 0
        return json.loads(capsys.readouterr().out)

    plain = estimate()
    spread = estimate("--gpus-per-node", "2")
    assert spread["communication_seconds"] > plain["communication_seconds"]
    assert estimate("--optimizer", "sgd")["valley_bytes"] < plain["valley_bytes"]
    program, plan = toys.rewritten(toys.blocks, Policy())
    fast = Hardware.load("h100-sxm").with_(
        flops={"float32": 1.0, "tfloat32": 10.0}, launch_floor=1e-30
    )
    slow, quick = (timeline_of(program, plan, fast, tf32=tf32) for tf32 in (False, True))
    assert quick.seconds < slow.seconds


def test_a_plot_needs_matplotlib(monkeypatch, tmp_path):
    program, plan = toys.rewritten(toys.blocks, Policy())
    estimate = graphshard.simulate(replace(plan, program=program), hardware="h200")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CostError, match=r"install graphshard\[plot\]"):
        estimate.plot(tmp_path / "t.svg")

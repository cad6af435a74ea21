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
from graphshard.cost.estimate import estimate_of
from graphshard.cost.text import speed_text
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


def test_the_share_of_the_peak_is_of_the_peak_that_products_run_at():
    program, plan = toys.rewritten(toys.blocks, Policy())
    machine = Hardware.load("h100-sxm").with_(
        flops={"float32": 1.0, "tfloat32": 10.0}, launch_floor=1e-30
    )
    both = [
        estimate_of(replace(plan, program=program), machine, tf32=tf32) for tf32 in (False, True)
    ]
    assert [estimate.mfu for estimate in both] == pytest.approx(
        [
            1e12 * estimate.tflops_per_gpu / peak
            for estimate, peak in zip(both, (1, 10), strict=True)
        ]
    )
    assert max(estimate.mfu for estimate in both) < 1


@pytest.mark.parametrize(
    ("tflops", "said"),
    [(408.31, "408.3"), (1234.56, "1,234.6"), (23.456, "23.5"), (4.5678, "4.57"),
     (0.0123456, "0.0123"), (0.000012345, "0.0000123"), (0.0, "0")],
)  # fmt: skip
def test_a_speed_has_three_digits_on_any_machine(tflops, said):
    assert speed_text(tflops) == said


def test_a_plot_needs_matplotlib(monkeypatch, tmp_path):
    program, plan = toys.rewritten(toys.blocks, Policy())
    estimate = graphshard.simulate(replace(plan, program=program), hardware="h200")
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(CostError, match=r"install graphshard\[plot\]"):
        estimate.plot(tmp_path / "t.svg")

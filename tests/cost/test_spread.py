"""The range of a predicted time, and when two predictions cannot be told apart."""

import pytest
from simulations import simulate

import graphshard
from graphshard.cli.main import build_parser
from graphshard.cli.policy import set_machine
from graphshard.hardware.hardware import Hardware
from graphshard.report.page import verdict


def test_an_estimate_says_its_range():
    exact = simulate()
    assert "expected" not in str(exact)
    assert "expected" not in verdict(exact.to_dict(details=True))
    rough = exact.with_hardware(exact.hardware.with_(spread=(0.5, 2.0)))
    low, high = rough.step_range
    assert (low, high) == (0.5 * exact.step_seconds, 2 * exact.step_seconds)
    assert rough.to_dict()["step_range"] == [low, high]
    assert f"expected   {low:.3g} s to {high:.3g} s a step" in str(rough)
    assert f"({low:.3g} s to {high:.3g} s expected)" in verdict(rough.to_dict(details=True))


def test_a_comparison_says_when_two_policies_cannot_be_told_apart():
    a = simulate(slow=5.0)
    rough = a.hardware.with_(spread=(0.9, 1.1), pair_spread=0.5)
    a = a.with_hardware(rough)
    b = simulate(slow=5.0, backward_prefetch=None).with_hardware(rough)
    assert a.step_seconds != b.step_seconds
    both = graphshard.compare(a, b)
    assert not both.apart
    assert both.to_dict()["apart"] is False
    assert "cannot be told apart" in " ".join(str(both).split())
    assert "not apart" in str(both)
    fine = rough.with_(pair_spread=1e-6)
    clear = graphshard.compare(a.with_hardware(fine), b.with_hardware(fine))
    assert clear.apart
    assert "told apart" not in " ".join(str(clear).split())


def test_estimates_on_two_machines_are_apart_if_their_ranges_are():
    one = simulate()
    near, far = one.hardware.with_(name="near", spread=(0.5, 2.0)), one.hardware
    assert not graphshard.compare(one.with_hardware(near), one.with_hardware(far)).apart
    slower = far.with_(name="slow", launch_floor=10 * far.launch_floor, intra_latency=50.0)
    assert graphshard.compare(one, one.with_hardware(slower)).apart


COMMANDS = {
    "simulate": ["--policy", "block", "--world-size", "8"],
    "compare": ["--policy", "block", "--policy", "size:1", "--world-size", "8"],
    "tune": ["--world-size", "8"],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_changes_the_machine(command):
    start = [command, "factories:small", *COMMANDS[command], "--hardware", "h100-sxm"]
    options = build_parser().parse_args([*start, "--power-limit", "350", "--attention", "fa2"])
    set_machine(options)
    machine = Hardware.load("h100-sxm").with_(power_limit=350.0, attention_kernel="fa2")
    assert options.hardware == machine
    assert options.hardware.attention == "fa2"
    options = build_parser().parse_args(start)
    set_machine(options)
    assert options.hardware == "h100-sxm"

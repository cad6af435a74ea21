"""Why communication is exposed: with the obstacle named out of the way, compute goes on earlier.

Times are counts: a compute node takes a second, a collective `slow` seconds for each of 3 hops.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import toy_programs as toys
from simulations import COUNTS, again, simulate

import graphshard
from graphshard.cost import reasons as kinds
from graphshard.cost import streams as duration
from graphshard.cost.collective_cost import GroupShape, shape_of
from graphshard.cost.memory import held_by_place
from graphshard.format import human_bytes
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.annotations import Budget


def found(estimate, kind, op=None, phase=None, reasons=1):
    """Transfers with a reason of `kind`, and that reason."""
    pairs = [  # a second reason says what would be next
        (transfer, reason)
        for transfer in estimate.transfers
        for reason in estimate.reasons(transfer)[:reasons]
        if reason.kind == kind
        and (op is None or transfer.op == op)
        and (phase is None or transfer.span.phase == phase)
    ]
    assert pairs, f"nothing is exposed for the reason {kind!r}"
    return pairs


def passed(estimate, name):
    """When compute has waited for the collective of this name."""
    nodes = list(estimate.program.graph.nodes)
    transfer = next(t for t in estimate.transfers if nodes[t.span.place].name == name)
    return transfer.waited_at + transfer.exposed


def reached(estimate, name):
    """When compute has come to the node of this name."""
    return estimate.timeline.at[list(estimate.program.graph.nodes).index(node_of(estimate, name))]


def name_of(estimate, transfer):
    return list(estimate.program.graph.nodes)[transfer.span.place].name


def node_of(plan, name):
    return next(node for node in plan.program.graph.nodes if node.name == name)


def moved(estimate, name, before, slow=5.0):
    """The estimate with a node moved."""
    plan = replace(estimate.plan, program=estimate.program.copy())
    node_of(plan, before).prepend(node_of(plan, name))
    return again(plan, slow)


ALL = {
    "plain": {},
    "no prefetch": {"backward_prefetch": None},
    "post": {"backward_prefetch": "post"},
    "ahead": {"forward_prefetch": 2},
    "zero2": {"strategy": "SHARD_GRAD_OP"},
    "ddp": {"strategy": "NO_SHARD"},
    "recompute": {"recompute": "units"},
    "params": {"offload": "params"},
    "activations": {"offload": "activations"},
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("build", [toys.blocks, toys.back_and_forth, toys.nested])
def test_every_exposed_second_is_explained(name, build):
    for slow in (1.0, 5.0, 100.0):
        estimate = simulate(build, slow=slow, **ALL[name])
        for transfer in estimate.transfers:
            reasons = estimate.reasons(transfer)
            assert sum(r.seconds for r in reasons) == pytest.approx(transfer.exposed)
            assert all(r.seconds > 0 and r.text for r in reasons)
            assert bool(estimate.why(transfer)) == bool(transfer.exposed)
            names = {node.name for node in estimate.program.graph.nodes}
            assert all(r.obstacle in names | {""} for r in reasons)
        total, *parts = seconds_said(str(estimate))
        assert sum(parts) == pytest.approx(total, rel=0.01)


def seconds_said(text):
    """The seconds in the title of the causes, and in each line that names one."""
    _, _, causes = text.partition("\nwhy ")
    said = re.findall(r"^(?:  )?([\d,.]+) (s|ms|us)(?: of|:)", causes, re.M)
    scale = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
    return [float(number.replace(",", "")) * scale[unit] for number, unit in said] or [0.0]


def test_behind_another_collective_of_the_stream(monkeypatch):
    estimate = simulate()
    for transfer, reason in found(estimate, kinds.BEHIND):
        name = name_of(estimate, transfer)
        assert "its stream is busy with the" in reason.text
        with monkeypatch.context() as patch:
            # The obstacle takes no time: a group of one.
            patch.setattr(
                duration,
                "shape_of",
                lambda node, *rest, gone=reason.obstacle: (
                    GroupShape(1, 1) if node.name == gone else shape_of(node, *rest)
                ),
            )
            assert passed(again(estimate.plan), name) < transfer.span.end


def test_the_prefetch_asked_for():
    estimate = simulate(backward_prefetch=None, slow=2.0)
    for phase, field, less in (
        (
            "forward",
            "forward_prefetch=0",
            simulate(backward_prefetch=None, forward_prefetch=1, slow=2.0),
        ),
        ("backward", "backward_prefetch=None", simulate(slow=2.0)),
    ):
        for transfer, reason in found(estimate, kinds.POLICY, "all_gather", phase):
            assert f"issued where its result is needed ({field})" in reason.text
            assert passed(less, name_of(estimate, transfer)) < transfer.span.end
    ahead = simulate(toys.nested, forward_prefetch=1, slow=0.8)
    for transfer, reason in found(ahead, kinds.POLICY, "all_gather", "forward"):
        assert "forward_prefetch=1 issues it so many units ahead" in reason.text
        assert "before its use, and it takes 3.4 s" in reason.text
        further = simulate(toys.nested, forward_prefetch=2, slow=0.8)
        assert passed(further, name_of(ahead, transfer)) < transfer.span.end


def test_the_unit_s_previous_gather_is_held():
    estimate = simulate(toys.back_and_forth, forward_prefetch=2, slow=20.0)
    for transfer, reason in found(estimate, kinds.HELD):
        assert "it would be in memory twice" in reason.text
        free = node_of(estimate.plan, reason.obstacle)
        assert free.target is ops.free
        name = name_of(estimate, transfer)
        before = free.prev
        while not ops.is_compute(before) or before.meta["unit"] != transfer.span.unit:
            before = before.prev
        assert passed(moved(estimate, name, before.name), name) < transfer.span.end


def test_nothing_runs_before_the_step_and_backward_waits_for_the_loss():
    estimate = simulate()
    (start,) = found(estimate, kinds.START)
    nodes = list(estimate.program.graph.nodes)
    assert not any(map(ops.is_compute, nodes[: start[0].span.place]))
    transfer, reason = found(estimate, kinds.LOSS)[0]
    first = node_of(estimate.plan, reason.obstacle)
    assert first is estimate.program.first_backward()
    name = name_of(estimate, transfer)
    last = next(n for n in reversed(nodes) if ops.is_compute(n) and n.meta["phase"] == "forward")
    assert passed(moved(estimate, name, last.name), name) < transfer.span.end


def test_reduces_are_waited_for_before_the_next_one():
    slow = 2.0
    estimate = simulate(slow=slow, strategy="SHARD_GRAD_OP")
    for transfer, reason in found(estimate, kinds.IN_FLIGHT, "reduce_scatter"):
        assert "one unit's full gradients are under way at a time" in reason.text
        assert node_of(estimate.plan, reason.obstacle).target in ops.REDUCES
        name = name_of(estimate, transfer)
        plan = replace(estimate.plan, program=estimate.program.copy())
        node = node_of(plan, name)
        (wait,) = node.users
        end = plan.program.output_node
        for moved_node in (wait, *wait.users):
            end.prepend(moved_node)
        later = again(plan, slow)
        assert reached(later, reason.obstacle) < reached(estimate, reason.obstacle)


def test_the_step_ends_with_the_last_reduce():
    estimate = simulate(slow=0.2)
    for transfer, reason in found(estimate, kinds.END, reasons=2):
        assert "the step ends" in reason.text
        assert "its gradients are complete only with" in reason.text
        after = list(estimate.program.graph.nodes)[transfer.waited_place :]
        assert not any(map(ops.is_compute, after))


def test_a_reduce_that_stands_after_other_compute():
    estimate = simulate(toys.odd_params, slow=1.0)
    nodes = list(estimate.program.graph.nodes)
    for transfer, reason in found(estimate, kinds.PLACED, reasons=2):
        assert "it is issued 6 s of compute after its gradients are complete" in reason.text
        node = nodes[transfer.span.place]
        between = nodes[nodes.index(max(node.all_input_nodes)) + 1 : transfer.span.place]
        assert sum(map(ops.is_compute, between)) >= 6
        assert node_of(estimate.plan, reason.obstacle) in between


def test_shards_that_come_from_the_host():
    program, plan = toys.rewritten(toys.blocks, Policy(offload="params"))
    hardware = COUNTS.with_(host_bandwidth=1.0)
    estimate = graphshard.simulate(replace(plan, program=program), hardware=hardware)
    pairs = found(estimate, kinds.ARRIVES)
    faster = graphshard.simulate(
        replace(plan, program=program), hardware=hardware.with_(host_bandwidth=1e30)
    )
    for _transfer, reason in pairs:
        assert "arrive from the host first" in reason.text
    assert faster.step_seconds < estimate.step_seconds
    assert {"to_device", "to_host"} <= {transfer.op for transfer in estimate.transfers}


def test_the_byte_budget():
    estimate = simulate(slow=0.5)
    program, plan = estimate.program, estimate.plan
    gathers = [t for t in estimate.transfers if t.op == "all_gather"]
    transfer = next(t for t in gathers if t.span.unit == "layers.2")
    place, name = transfer.span.place, name_of(estimate, transfer)
    budget = Budget(1, estimate.hardware, of_policy=False)
    program.budget = replace(budget, bytes=max(held_by_place(program, budget)[:place]))
    (reason,) = replace(estimate).reasons(transfer)
    assert reason.kind == kinds.BUDGET
    assert f"above the budget of {human_bytes(program.budget.bytes)}" in reason.text
    earlier = replace(plan, program=program.copy())
    node_of(earlier, reason.obstacle).prepend(node_of(earlier, name))
    assert max(held_by_place(earlier.program, budget)[:place]) > program.budget.bytes
    assert passed(again(earlier, 0.5), name) < transfer.span.end, "it would have helped"
    program.budget = replace(budget, bytes=10**9)
    (reason,) = replace(estimate).reasons(transfer)
    assert reason.kind == kinds.POLICY
    assert reason.text.startswith("overlap issues it there, by times for unit")

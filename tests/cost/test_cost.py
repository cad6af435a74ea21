"""What programs cost: hardware descriptions, op and collective times, the walk in time."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import toy_programs as toys
from hypothesis import given
from hypothesis import strategies as st
from paths import EXAMPLES
from simulations import UNIT, node_of
from torch import fx, nn

import graphshard
from graphshard.cli.main import main
from graphshard.cost.allocations import requests_of
from graphshard.cost.collective_cost import (
    GroupShape,
    collective_seconds,
    group_shape,
    saturating_bytes,
)
from graphshard.cost.op_cost import op_cost
from graphshard.errors import CostError
from graphshard.hardware.hardware import KINDS, Hardware, preset_names
from graphshard.policy.units import Policy
from graphshard.program import ops

# -- hardware --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_complete_and_named_sources(name):
    hardware = Hardware.load(name)
    assert hardware.source
    assert hardware.about
    assert set(hardware.efficiency) >= set(KINDS)
    assert hardware.device == ("cpu" if name == "cpu-gloo" else "gpu")
    low, high = hardware.spread
    assert low < 1 < high
    assert hardware.pair_spread > 0
    assert hardware.matmul_flops(torch.bfloat16) >= hardware.flops["float32"] or "cpu" in name


WRONG: list[tuple[dict[str, object], str]] = [
    ({"memory_bytes": 0}, "memory_bytes must be a positive number; got 0"),
    ({"flops": {"bfloat16": 1.0}}, "flops has no 'float32'"),
    ({"flops": [1.0]}, "flops must be a table"),
    ({"efficiency": {}}, "efficiency has no 'matmul'"),
    ({"efficiency": UNIT.efficiency | {"matmul.int3": 1.0}}, "unknown kind 'matmul.int3'"),
    ({"gpu_per_node": 8}, "unknown figure 'gpu_per_node'"),
    ({"intra_latency": None}, "intra_latency must be a positive number"),
    ({"device": "tpu"}, 'device must be "cpu" or "gpu"'),
    ({"device": None}, "device must be a text"),
    ({"spread": [1.04, 1.2]}, "spread must be .* at most 1 and at least 1"),
    ({"spread": [0.8, 0.9]}, "spread must be .* at most 1 and at least 1"),
    ({"power_limit": 500}, "needs tdp_watts"),
    ({"tdp_watts": 400, "power_limit": 500}, "at most tdp_watts, 400 W; got 500"),
    ({"tdp_watts": -1}, "tdp_watts must be 0 watts or more"),
    ({"slowest": 0}, "slowest must be more than 0"),
    ({"slowest": 1.5}, "slowest must be a part between 0 and 1"),
    ({"multiprocessors": 10}, "tiles and multiprocessors are given together"),
    ({"tiles": [[1, 2]], "multiprocessors": 1}, "a tile is its rows"),
    ({"tiles": 3, "multiprocessors": 1}, "tiles must be a list"),
    ({"attention_kernel": "fa2"}, "has no rates"),
    ({"attention_rates": {"fa9.forward.64": [[1, 1]]}}, "unknown row 'fa9.forward.64'"),
    ({"attention_rates": {"fa2.forward.64": [[1, 2.0]]}}, "fraction of the peak"),
    ({"confidence": {"flops": 3}}, "confidence.flops must be a text"),
    ({"curves": {"add": []}}, "the curve 'add' must be pairs"),
    ({"curves": {"add": [[1, 2.0], [1, 3.0]]}}, "amounts ascending"),
    ({"curves": {"add": [[1, 2.0], [2, 1.0]]}}, "seconds never descending"),
    ({"curves": {"add": 3}}, "a curve is a list of pairs"),
    ({"curves": [1]}, "curves must be a table"),
    ({"lines": {"adamw": [1, 2]}}, "the line 'adamw' must be three times"),
    ({"lines": {"adamw": [1, 2, -3]}}, "0 seconds or more"),
    ({"contention": 1.5}, "contention must be a part between 0 and 1; got 1.5"),
    ({"step_overhead": -1}, "step_overhead must be 0 seconds or more; got -1"),
    ({"overhead": {"kernel": 1}}, "overhead has an unknown figure 'kernel'"),
    ({"overhead": {"context": -1}}, r"overhead\.context must be 0 bytes or more"),
]


@pytest.mark.parametrize(("change", "said"), WRONG)
def test_a_wrong_figure_is_named(tmp_path, change, said):
    path = tmp_path / "wrong.json"
    path.write_text(json.dumps(UNIT.to_dict() | change))
    with pytest.raises(CostError, match=said):
        Hardware.load(path)


def test_files_of_older_versions_lack_later_figures(tmp_path):
    path = tmp_path / "old.json"
    known = {"name", "flops", "memory_bytes", "memory_bandwidth", "launch_floor", "gpus_per_node"}
    known |= {f"{link}_{what}" for link in ("intra", "inter") for what in ("bandwidth", "latency")}
    known |= {"host_bandwidth", "efficiency", "about", "source"}
    path.write_text(json.dumps({n: v for n, v in UNIT.to_dict().items() if n in known}))
    assert Hardware.load(path) == UNIT


@pytest.mark.parametrize(
    ("name", "device", "host"),
    [("node7", "cpu", True), ("gloo-farm", "gpu", False), ("my-gloo", "", True), ("x", "", False)],
)
def test_a_file_says_what_ranks_compute_on(tmp_path, name, device, host):
    path = tmp_path / "mine.json"
    data = Hardware.load("cpu-gloo").to_dict() | {"name": name, "device": device}
    if not device:  # as before there was this figure
        del data["device"]
    path.write_text(json.dumps(data))
    program, plan = toys.rewritten(toys.blocks, Policy())
    program.device = "cpu" if host else "cuda"
    estimate = graphshard.simulate(replace(plan, program=program), hardware=path)
    assert (estimate.reserved is None) == (estimate.overheads is None) == host
    assert estimate.hardware.process_group_backend == ("gloo" if host else "nccl")


def test_what_is_no_hardware_is_refused(tmp_path):
    with pytest.raises(CostError, match="presets: a100-40gb, a100-80gb, a100-pcie, h100-sxm"):
        Hardware.load("h100")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(CostError, match=r"the hardware file .*broken.json cannot be parsed"):
        Hardware.load(tmp_path / "broken.json")
    (tmp_path / "short.json").write_text('{"flops": {"float32": 1}}')
    with pytest.raises(CostError, match=r"lacks a figure: .*memory_bytes"):
        Hardware.load(tmp_path / "short.json")


# -- operators -------------------------------------------------------------------------------------


def test_a_matrix_product_counts_flops_and_bytes():
    cost = op_cost(node_of(torch.ops.aten.mm.default, (3, 5), (5, 7)))
    assert (cost.kind, cost.flops, cost.moved) == ("matmul", 2 * 3 * 5 * 7, 4 * (15 + 35 + 21))
    assert cost.seconds(UNIT) == 210.0
    low = op_cost(node_of(torch.ops.aten.mm.default, (3, 5), (5, 7), dtype=torch.bfloat16))
    assert (low.moved, low.dtype) == (2 * (15 + 35 + 21), torch.bfloat16)


def test_a_view_costs_nothing_and_an_elementwise_op_its_bytes():
    assert op_cost(node_of(torch.ops.aten.t.default, (3, 5))).seconds(UNIT) == 0
    assert op_cost(node_of(torch.ops.aten.view.default, (4, 6), args=([24],))).kind == "free"
    added = op_cost(node_of(torch.ops.aten.add.Tensor, (4, 6), (4, 6)))
    assert (added.kind, added.flops, added.moved) == ("bandwidth", 0, 3 * 96)
    assert added.seconds(UNIT) == UNIT.launch_floor


def test_an_expanded_operand_is_read_once():
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(1, 8, device="meta").expand(100, 8)
    node = graph.call_function(torch.ops.aten.relu.default, (x,))
    node.meta["val"] = torch.empty(100, 8, device="meta")
    assert op_cost(node).moved == 4 * (8 + 800)


def test_an_embedding_reads_the_rows_it_picks():
    graph = fx.Graph()
    table, rows = graph.placeholder("table"), graph.placeholder("rows")
    table.meta["val"] = torch.empty(1000, 8, device="meta")
    rows.meta["val"] = torch.empty(5, dtype=torch.long, device="meta")
    node = graph.call_function(torch.ops.aten.embedding.default, (table, rows))
    node.meta["val"] = torch.empty(5, 8, device="meta")
    assert op_cost(node).moved == 2 * 5 * 8 * 4 + 5 * 8


@pytest.mark.parametrize(("causal", "share"), [(False, 1), (True, 2)])
def test_attention_traced_on_the_cpu_counts_as_the_fused_kernel(causal, share):
    target = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
    shapes = [(2, 4, 64, 16)] * 3
    cost = op_cost(node_of(target, *shapes, args=(0.0, causal)))
    assert (cost.kind, cost.flops) == ("attention", 2 * 2 * 2 * 4 * 64 * 64 * 16 // share)


# -- collectives -----------------------------------------------------------------------------------


def test_ring_hops_within_and_across_nodes():
    floor = UNIT.launch_floor
    assert collective_seconds("all_gather", 100, GroupShape(4, 1), UNIT) == floor + 3
    assert collective_seconds("all_gather", 100, GroupShape(8, 2), UNIT) == floor + 6 + 10
    assert collective_seconds("reduce_scatter", 100, GroupShape(1, 1), UNIT) == 0
    # A tree goes up and down: 3 hops in each node, one across.
    assert collective_seconds("all_reduce", 100, GroupShape(8, 2), UNIT) == floor + 2 * (3 + 10)


def test_bandwidth_is_that_of_the_slowest_link():
    fast = UNIT.with_(
        intra_bandwidth=100.0, inter_bandwidth=10.0, intra_latency=1e-9, inter_latency=1e-9
    )
    within = collective_seconds("all_gather", 4000, GroupShape(4, 1), fast) - 1
    assert within == pytest.approx(3 / 4 * 4000 / 100)
    across = collective_seconds("all_gather", 4000, GroupShape(8, 2), fast) - 1
    assert across == pytest.approx(7 / 8 * 4000 / 40), "four network cards share the node's border"
    lonely = collective_seconds("all_gather", 4000, GroupShape(2, 2), fast) - 1
    assert lonely == pytest.approx(1 / 2 * 4000 / 10)


def test_groups_lie_on_nodes_as_meshes_do():
    assert group_shape(ops.SHARD, (64,), 8) == GroupShape(64, 8)
    assert group_shape(ops.SHARD, (4, 8), 8) == GroupShape(8, 1)
    assert group_shape(ops.REPLICATE, (4, 8), 8) == GroupShape(4, 4)
    assert group_shape(ops.REPLICATE, (4, 2), 8) == GroupShape(4, 1)
    assert group_shape(ops.ALL, (4, 8), 8) == GroupShape(32, 4)
    assert group_shape("reshard", (64,), 8, reshard=8) == GroupShape(8, 1)
    with pytest.raises(CostError, match="no group of ranks is called 'other'"):
        group_shape("other", (64,), 8)


@given(
    st.sampled_from(["all_gather", "reduce_scatter", "all_reduce"]),
    st.integers(1, 2**34),
    st.integers(0, 7),
    st.sampled_from(preset_names()),
)
def test_more_bytes_never_take_less_time(op, moved, doublings, name):
    hardware, size = Hardware.load(name), 2**doublings
    shape = group_shape(ops.SHARD, (size,), hardware.gpus_per_node)
    less, more = (collective_seconds(op, m, shape, hardware) for m in (moved, 2 * moved))
    assert less <= more <= 2 * less + 1e-12


def test_the_knee_is_where_it_was_measured():
    """The FSDP paper (arXiv:2304.11277) gathers 2**30 elements in pieces of equal
    size on A100s: below 33 M elements a piece the whole takes markedly longer."""
    hardware = Hardware.load("a100-80gb")
    shape = group_shape(ops.SHARD, (16,), 8)  # two nodes, the least that uses the network
    assert 33e6 / 2 < saturating_bytes(shape, hardware) / 4 < 33e6 * 2

    def whole(elements):
        pieces = 2**30 / elements
        return pieces * collective_seconds("all_gather", 4 * elements, shape, hardware)

    assert whole(33_000_000) < 1.2 * whole(2**30)
    assert whole(2**21) > 2 * whole(33_000_000)


def test_hybrid_gathers_within_nodes_and_reduces_between_them():
    hardware = Hardware.load("a100-40gb")
    full, hybrid = (
        graphshard.simulate(replace(plan, program=program), hardware=hardware)
        for program, plan in (
            toys.rewritten(toys.blocks, Policy(strategy=strategy), mesh=mesh)
            for strategy, mesh in (("FULL_SHARD", (32,)), ("HYBRID_SHARD", (4, 8)))
        )
    )

    def seconds(estimate, op, group):
        return sum(t.span.seconds for t in estimate.transfers if (t.op, t.group) == (op, group))

    assert seconds(hybrid, "all_gather", "shard") < seconds(full, "all_gather", "shard") / 2
    assert seconds(hybrid, "all_reduce", "replicate") > 0
    streams = {span.stream for span in hybrid.timeline.spans}
    assert {"network (shard)", "network (replicate)"} <= streams, "each has a communicator"


# -- memory and the whole estimate -----------------------------------------------------------------


class Experts(nn.Module):
    """Stacked experts, split along another dim than 0 on more ranks than there are experts."""

    def __init__(self, experts, rows, columns):
        super().__init__()
        self.w = nn.Parameter(torch.empty(experts, rows, columns))

    def forward(self, x):
        return torch.einsum("bi,eij->bj", x, self.w).square().sum()


@pytest.mark.parametrize(("ranks", "dim"), [(8, 0), (16, 1), (64, 1)])
def test_an_optimizer_has_states_of_a_shard_along_any_dim(ranks, dim):
    with torch.device("meta"):
        model, x = Experts(8, 1024, 4096), torch.empty(2, 1024)
    plan = graphshard.plan(model, graphshard.SizePolicy(1), world_size=ranks, example_inputs=(x,))
    assert plan.layouts["w"].dim == dim
    estimate = graphshard.simulate(plan, hardware="h100-sxm", optimizer="adamw")
    held = estimate.memory.valley_by_category
    assert held["shards"] == 4 * 8 * 1024 * 4096 // ranks
    assert held["optimizer"] == 2 * held["shards"]
    requests = requests_of(estimate.program, plan, "adamw", ())
    assert sum(request.size for request in requests.states) == held["optimizer"]


def estimate_of(**options):
    program, plan = toys.rewritten(toys.blocks, Policy(**options))
    slow = UNIT.with_(intra_latency=100.0)
    return graphshard.simulate(replace(plan, program=program), hardware=slow)


def test_padding_is_named_where_a_step_does_not_fit():
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1100, 1100, bias=False) for _ in range(5)))
    plan = graphshard.plan(
        model, graphshard.SizePolicy(1), world_size=61, example_inputs=(torch.zeros(2, 1100),)
    )
    said = "padding    5.1% of what is gathered (1.24 MiB of 24.32 MiB), most in 0.weight"
    fitting = graphshard.simulate(plan, hardware="h100-sxm")
    assert said not in str(fitting)
    assert said in str(fitting.with_hardware(fitting.hardware.with_(memory_bytes=1000)))


def test_an_estimate_is_told():
    estimate = estimate_of(backward_prefetch=None)
    text = str(estimate)
    for said in ("DOES NOT FIT in 1000 B", "why ", "where its result is needed", "(root)"):
        assert said in text
    data = json.loads(json.dumps(estimate.to_dict()))
    assert data["peak_bytes"] == estimate.peak_bytes
    assert len(data["transfers"]) == len(estimate.transfers)


def test_an_unknown_optimizer_is_refused():
    program, plan = toys.rewritten(toys.blocks, Policy())
    plan = replace(plan, program=program)
    with pytest.raises(CostError, match="optimizer must be one of none, sgd"):
        graphshard.simulate(plan, hardware=UNIT, optimizer="lion")


def test_the_command_prints_and_writes(capsys, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    arguments = ["simulate", "factories:small", "--policy", "block:Block", "--world-size", "8"]
    trace = str(tmp_path / "t.json")
    assert main([*arguments, "--hardware", "h100-sxm", "--trace", trace]) == 0
    assert "estimate of GPT: one training step on 8 ranks" in capsys.readouterr().out
    assert (tmp_path / "t.json").exists()
    assert main([*arguments, "--hardware", "h100-sxm", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["fits"] is True
    assert main([*arguments, "--hardware", "abacus"]) == 2
    assert "there is no hardware preset or file" in capsys.readouterr().err

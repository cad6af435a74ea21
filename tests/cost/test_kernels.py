"""Matrix products by tiles and waves, attention by kernel, power, and what collectives slow."""

from dataclasses import replace
from math import isclose

import pytest
import torch
import toy_programs as toys
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import EXAMPLES
from simulations import UNIT, node_of
from torch import nn
from torch.nn import functional as F

import graphshard
from graphshard.cli.main import main
from graphshard.cost.collective_cost import GroupShape, collective_seconds
from graphshard.cost.kernel_rates import Product, filled
from graphshard.cost.op_cost import op_cost
from graphshard.cost.streams import Clocks
from graphshard.errors import CostError
from graphshard.hardware.curves import default_kernel
from graphshard.hardware.hardware import Hardware, merged

aten = torch.ops.aten

# Ten multiprocessors that multiply tiles of 4 by 4, and at half that speed tiles of 2 by 2.
TILED = UNIT.with_(
    name="tiled",
    flops={"float32": 1.0},
    launch_floor=1e-9,
    multiprocessors=10,
    tiles=((4, 4, 1.0), (2, 2, 0.5)),
)


# -- matrix products -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "part"),
    [
        ((1, 40, 4, 8), 1.0),  # ten tiles, one wave
        ((1, 44, 4, 8), 11 / 20),  # eleven tiles, two waves
        ((1, 80, 4, 8), 1.0),  # two whole waves
        ((1, 37, 4, 8), 37 / 40),  # the last tile reaches beyond the result
        ((2, 20, 4, 8), 1.0),  # a batch of products fills one wave together
        ((1, 4, 4, 8), 0.2),  # four small tiles at half the speed against one of ten large ones
        ((1, 4, 4, 1024), 0.4),  # its sums are split in two, each small tile on 8 of 10
        ((1, 4, 4, 5120), 1.0),  # and in ten: a large tile on each
    ],
)
def test_a_product_fills_whole_waves_of_tiles(shape, part):
    assert filled(Product(*shape), TILED) == pytest.approx(part)


def test_the_seconds_of_a_product_follow_its_waves():
    whole = op_cost(node_of(aten.mm.default, (40, 8), (8, 4)))
    assert whole.work == Product(1, 40, 4, 8)
    assert whole.seconds(TILED) == pytest.approx(2 * 40 * 8 * 4)
    more = op_cost(node_of(aten.mm.default, (44, 8), (8, 4)))
    assert more.seconds(TILED) == pytest.approx(2 * 80 * 8 * 4)  # as a product of two waves
    assert more.seconds(UNIT) == 2 * 44 * 8 * 4  # no tiles are known


def test_the_slowest_rank_is_waited_for_unless_there_is_one():
    cost = op_cost(node_of(aten.mm.default, (40, 8), (8, 4)))
    late = TILED.with_(slowest=0.5)
    assert cost.seconds(late) == pytest.approx(2 * cost.seconds(TILED))
    assert cost.seconds(late.for_ranks(1)) == pytest.approx(cost.seconds(TILED))
    assert late.for_ranks(2) is late


# -- power -----------------------------------------------------------------------------------------


def test_a_power_limit_slows_products_and_nothing_else():
    machine = TILED.with_(tdp_watts=800.0)
    low = machine.with_(power_limit=100.0)
    assert low.clocks == pytest.approx(1 / 4)  # (1/8) ** (2/3)
    product = op_cost(node_of(aten.mm.default, (40, 8), (8, 4)))
    assert product.seconds(low) == pytest.approx(4 * product.seconds(machine))
    for node in (sdpa((1, 1, 64, 8)), node_of(aten.add.Tensor, (4, 6), (4, 6))):
        assert op_cost(node).seconds(low) == op_cost(node).seconds(machine)


# -- attention -------------------------------------------------------------------------------------


RATES = UNIT.with_(
    flops={"float32": 1.0, "bfloat16": 1.0},
    attention_rates={
        "fa2.forward.64": ((256, 0.25), (1024, 0.5)),
        "fa2.forward.128": ((256, 0.5), (1024, 1.0)),
        "fa2.backward.128": ((256, 0.125),),
        "cudnn.forward.128": ((256, 1.0),),
    },
    attention_kernel="fa2",
)


FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default


def sdpa(shape, target=FLASH, causal=False, dtype=torch.bfloat16):
    return node_of(target, shape, shape, shape, args=(0.0, causal), dtype=dtype)


@pytest.mark.parametrize(
    ("length", "head", "rate"),
    [(256, 64, 0.25), (1024, 64, 0.5), (512, 64, 0.375), (64, 16, 0.25), (4096, 128, 1.0),
     (256, 80, 0.5), (256, 256, 0.5)],
)  # fmt: skip
def test_attention_runs_at_the_rate_of_its_kernel(length, head, rate):
    cost = op_cost(sdpa((1, 1, length, head)))
    assert cost.seconds(RATES) == pytest.approx(cost.flops / rate)


def test_the_traced_operator_names_its_kernel_unless_one_is_chosen():
    cost = op_cost(sdpa((1, 1, 256, 128)))
    assert cost.seconds(RATES.with_(attention_kernel="cudnn")) == cost.flops
    ours = RATES.with_(attention_kernel="")
    assert cost.seconds(ours) == cost.flops * (1 if ours.attention == "cudnn" else 2)
    for target, args, kernel, factor in (
        (aten._scaled_dot_product_flash_attention.default, (), "fa2", 2),
        (aten._scaled_dot_product_cudnn_attention.default, (None, True), "cudnn", 1),
    ):
        shapes = [(1, 1, 256, 128)] * 3
        traced = op_cost(node_of(target, *shapes, args=args, dtype=torch.bfloat16))
        assert traced.work.kernel == kernel
        assert traced.seconds(ours) == factor * traced.flops
        assert traced.seconds(RATES) == 2 * traced.flops


MASKED = RATES.with_(attention_rates={**RATES.attention_rates, "fa1.forward.128": ((256, 0.25),)})


def masked(dtype=torch.bfloat16):
    node = sdpa((1, 1, 256, 128), dtype=dtype)
    mask = node.graph.placeholder("mask")
    mask.meta["val"] = torch.empty(256, 256, dtype=dtype, device="meta")
    node.kwargs = {"attn_mask": mask}
    return op_cost(node)


def test_flash_attention_takes_no_mask_so_the_efficient_kernel_runs():
    cost = masked()
    assert cost.work.masked
    assert (cost.kernel(MASKED), cost.seconds(MASKED)) == ("fa1", cost.flops * 4)
    assert cost.kernel(MASKED.with_(attention_kernel="cudnn")) == "cudnn"  # which takes masks
    assert cost.kernel(RATES) == "fa2"  # the only rates that are known
    plain = op_cost(sdpa((1, 1, 256, 128)))
    assert (plain.kernel(MASKED), plain.work.masked) == ("fa2", False)
    efficient = aten._scaled_dot_product_efficient_attention.default
    bias = node_of(efficient, *[(1, 1, 256, 128)] * 3, args=(None, True), dtype=torch.bfloat16)
    assert not op_cost(bias).work.masked


class Attends(nn.Module):
    """Attention of two kinds, by `masks`: without a mask (False) and with one (True)."""

    def __init__(self, *masks):
        super().__init__()
        self.masks, self.inner = masks, nn.Linear(128, 128)

    def forward(self, x, mask):
        x = self.inner(x)
        for has_mask in self.masks:
            x = F.scaled_dot_product_attention(x, x, x, attn_mask=mask if has_mask else None)
        return x.sum()


@pytest.mark.parametrize(
    ("masks", "half", "options", "said"),
    [
        ((False,), True, {}, "attention by fa2"),
        ((True,), True, {}, "attention with a mask by fa1, as flash attention takes none"),
        ((False, True), True, {}, "attention by fa2, with a mask by fa1, as flash attention takes"
         " none"),
        ((False,), False, {}, ""),
        ((), True, {}, ""),
        ((), True, {"power_limit": 200}, "power limited to 200 of 400 W"),
    ],
)  # fmt: skip
def test_an_estimate_names_the_kernels_that_it_is_priced_by(masks, half, options, said):
    with torch.device("meta"):
        model = Attends(*masks)
        inputs = torch.empty(1, 1, 64, 128), torch.empty(64, 64)
    low = torch.bfloat16 if half else None
    policy = graphshard.SizePolicy(1, mixed_precision=graphshard.MixedPrecision(low))
    plan = graphshard.plan(model, policy, world_size=2, example_inputs=inputs)
    machine = Hardware.load("a100-80gb").with_(attention_kernel="fa2", **options)
    estimate = graphshard.simulate(plan, hardware=machine)
    lines = [line for line in str(estimate).splitlines() if line.startswith("kernels")]
    assert lines == ([f"kernels    {said}"] if said else [])
    kernels = set() if "attention" not in said else {k for k in ("fa1", "fa2") if k in said}
    assert set(estimate.attention_kernels) == kernels
    assert estimate.to_dict()["attention"] == ", ".join(sorted(kernels))


@pytest.mark.parametrize(
    ("command", "more"),
    [
        ("simulate", ()),
        ("compare", ("--policy", "size:1")),
        ("report", ("--out", "page.html")),
        ("compare-trace", ("--trace", "none.json")),
    ],
)
def test_a_kernel_that_prices_nothing_is_refused(command, more, capsys, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.chdir(tmp_path)
    start = [command, "factories:small", "--policy", "block:Block", "--world-size", "2", *more]
    start += ["--hardware", "h100-sxm", "--attention", "fa3"]
    assert main(start) == 2
    assert "--attention has no effect: " in capsys.readouterr().err
    assert main([*start, "--param-dtype", "bf16"]) == (2 if "--trace" in more else 0)
    assert "--attention" not in capsys.readouterr().err


def test_the_default_kernel_follows_gpu_and_torch():
    hopper, ampere = Hardware.load("h100-sxm"), Hardware.load("a100-80gb")
    assert default_kernel(hopper.attention_rates, "2.11.0+cu130") == "cudnn"
    assert default_kernel(hopper.attention_rates, "2.10.1") == "fa2"
    assert default_kernel(ampere.attention_rates, "2.13.0") == "fa2"
    assert default_kernel({}, "2.13.0") == ""


def test_a_preset_takes_the_figures_of_another():
    assert merged(
        {"a": 1, "b": 2, "flops": {"x": 1, "y": 2}, "curves": {"c": 1}},
        {"b": False, "c": 3, "flops": {"y": 3, "x": False}, "curves": False},
    ) == {"a": 1, "c": 3, "flops": {"y": 3}}
    wide, narrow = Hardware.load("h200"), Hardware.load("h100-sxm")
    assert wide.attention_rates == narrow.attention_rates
    assert wide.memory_bandwidth == 4.8e12
    assert "network.all_reduce" not in Hardware.load("h100-pcie").efficiency


# -- beside collectives ----------------------------------------------------------------------------


def test_a_kernel_loses_multiprocessors_while_a_collective_is_under_way():
    clocks = Clocks(UNIT.with_(contention=0.5))
    clocks.launch("network", 4.0)
    clocks.compute(1.0)
    assert clocks.now == 2.0
    clocks.compute(3.0)  # 1 second of it in the 2 that are left, the rest alone
    assert clocks.now == 6.0


def test_a_copy_between_device_and_host_takes_no_multiprocessors():
    clocks = Clocks(UNIT.with_(contention=0.5))
    clocks.launch("copies", 4.0, copy=True)
    clocks.compute(1.0)
    assert clocks.now == 1.0
    host = Clocks(UNIT.with_(name="gloo", contention=0.5))
    host.launch("copies", 4.0, copy=True)
    host.compute(1.0)
    assert host.now == 2.0


def test_a_kernel_that_only_moves_bytes_also_loses_the_bandwidth_that_collectives_take():
    clocks = Clocks(UNIT.with_(contention=0.25))
    clocks.launch("a", 4.0, load=0.25)
    clocks.launch("b", 8.0, load=0.125)
    clocks.compute(2.0, only_moves=True)  # 1 - 0.25 - 0.25 - 0.125 = 0.375 of the speed: 1.5 in 4
    # The 0.5 that are left run at 1 - 0.25 - 0.125 = 0.625.
    assert clocks.now == 4 + 0.5 / 0.625
    clocks.compute(0.75)  # one that computes loses multiprocessors alone
    assert clocks.now == 4.8 + 1.0
    clocks.wait(8.0)
    clocks.compute(1.0, only_moves=True)
    assert clocks.now == 9.0


# -- collectives -----------------------------------------------------------------------------------


def test_rings_between_nodes_have_an_efficiency_of_their_own():
    fast = UNIT.with_(
        intra_bandwidth=100.0,
        inter_bandwidth=10.0,
        efficiency=UNIT.efficiency | {"network": 0.5, "network.inter": 0.25},
    )
    within = collective_seconds("all_gather", 400, GroupShape(4, 1), fast)
    assert within == UNIT.launch_floor + 3 + 300 / 50
    across = collective_seconds("all_gather", 400, GroupShape(8, 2), fast)
    assert across == UNIT.launch_floor + 6 + 10 + 350 / (40 * 0.25)


def test_an_all_reduce_within_a_node_may_be_done_by_its_switch():
    ring = UNIT.with_(intra_bandwidth=100.0)
    switch = ring.with_(efficiency=UNIT.efficiency | {"network.all_reduce": 2.0})
    four, two, across = GroupShape(4, 1), GroupShape(2, 1), GroupShape(8, 2)
    assert collective_seconds("all_reduce", 400, four, switch) == UNIT.launch_floor + 2 + 3
    for shape in (two, across):
        same = [collective_seconds("all_reduce", 400, shape, each) for each in (ring, switch)]
        assert same[0] == same[1]
    for op in ("all_gather", "reduce_scatter"):
        assert collective_seconds(op, 400, four, switch) == collective_seconds(op, 400, four, ring)


# -- what can never be -----------------------------------------------------------------------------


H100 = Hardware.load("h100-sxm")
sizes = st.integers(1, 20_000)


@settings(deadline=None, max_examples=60)
@given(sizes, sizes, sizes, st.integers(1, 400), st.integers(1, 400))
def test_more_multiprocessors_are_never_slower(rows, columns, terms, fewer, more):
    fewer, more = sorted((fewer, more))
    cost = op_cost(node_of(aten.mm.default, (rows, terms), (terms, columns), dtype=torch.bfloat16))
    few, many = (
        cost.seconds(
            H100.with_(multiprocessors=n, flops={"float32": n * 1e12, "bfloat16": n * 7.5e12})
        )
        for n in (fewer, more)
    )
    assert many <= few * (1 + 1e-9)


@settings(deadline=None, max_examples=60)
@given(sizes, sizes, sizes, st.floats(50, 700), st.floats(50, 700))
def test_a_lower_power_limit_is_never_faster(rows, columns, terms, low, high):
    low, high = sorted((low, high))
    cost = op_cost(node_of(aten.mm.default, (rows, terms), (terms, columns), dtype=torch.bfloat16))
    slow, fast = (cost.seconds(H100.with_(power_limit=watts)) for watts in (low, high))
    assert fast <= slow
    assert cost.seconds(H100) <= fast


@settings(deadline=None, max_examples=60)
@given(sizes, sizes, sizes, sizes)
def test_a_product_never_beats_the_peak(batch, rows, columns, terms):
    assert 0 < filled(Product(batch, rows, columns, terms), H100) <= 1


loads = st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 3), st.floats(0, 1)), max_size=4)


@given(loads, st.floats(0, 0.9), st.lists(st.tuples(st.floats(0, 4), st.booleans()), max_size=4))
@settings(deadline=None, max_examples=60)
def test_company_never_makes_compute_faster(company, contention, kernels):
    crowded = Clocks(UNIT.with_(contention=contention))
    lighter = Clocks(UNIT.with_(contention=contention))
    for stream, seconds, load in company:
        crowded.launch(stream, seconds, load=load)
        lighter.launch(stream, seconds, load=load / 2)
    alone = 0.0
    for seconds, moves in kernels:
        crowded.compute(seconds, only_moves=moves)
        lighter.compute(seconds, only_moves=moves)
        alone += seconds
        assert crowded.now >= lighter.now - 1e-9
        assert lighter.now >= alone - 1e-9
    busy = max([0.0, *(end for end in crowded.ends.values())])
    assert crowded.now <= alone + busy + 1e-9 or isclose(crowded.now, alone + busy)


# -- whole steps -----------------------------------------------------------------------------------


def test_torchs_runtime_copies_what_it_gathers():
    program, plan = toys.rewritten(toys.blocks, graphshard.SizePolicy(1))
    plan = replace(plan, program=program)
    machine = UNIT.with_(memory_bandwidth=1e30, intra_latency=1e-3, launch_floor=1.0)
    own, copied = (
        graphshard.simulate(plan, hardware=machine, runtime=runtime)
        for runtime in ("graphshard", "fsdp2")
    )
    gathers = sum(t.op == "all_gather" for t in own.transfers)
    assert copied.compute_seconds == pytest.approx(own.compute_seconds + gathers)
    assert copied.with_hardware(machine).compute_seconds == copied.compute_seconds
    with pytest.raises(CostError, match="runtime must be one of graphshard, fsdp2; got 'fsdp3'"):
        graphshard.simulate(plan, hardware=machine, runtime="fsdp3")
    with pytest.raises(CostError, match="leave_eager is a list of units and modules"):
        graphshard.simulate(plan, hardware=machine, leave_eager="blocks.0")

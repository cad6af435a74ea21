"""Which compute is compiled together, and which of it is alike. Nothing is compiled here."""

from __future__ import annotations

import re

import pytest
import torch
import toy_programs as toys
from models import CASES, Block, TiedGPT
from torch import fx
from toy_programs import named

import graphshard
from graphshard.cli.main import main
from graphshard.cost.op_cost import op_cost
from graphshard.cost.runner import fused_costs
from graphshard.errors import PolicyError, VerifyError
from graphshard.passes.form_regions import FormRegions
from graphshard.passes.release_early import ReleaseEarly
from graphshard.pipeline import backend_passes, default_passes, run_passes
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.program import Program
from graphshard.program.regions import REGION, form_of, regions_in
from graphshard.torch_private.inductor import draws_as_eager
from graphshard.verify.rules import verify

TOKENS = torch.randint(0, 19, (2, 3, 7))


def toy(build=toys.blocks, policy: Policy | None = None, **options) -> Program:
    policy = toys.one_by_one(policy or Policy())
    passes = (*default_passes(policy), *backend_passes("inductor"))
    return toys.rewritten(build, policy, passes=passes, **options)[0]


def planned(layers: int = 3, **fields) -> graphshard.ShardingPlan:
    return graphshard.plan(
        TiedGPT(layers),
        graphshard.BlockPolicy(Block, merge_below=0, **fields),
        world_size=4,
        example_inputs=tuple(TOKENS),
        backend="inductor",
    )


def test_regions_in_the_schedule(golden):
    golden("schedule_regions.txt", str(toy()))


def test_no_region_spans_communication_a_unit_or_a_phase():
    for build in toys.UNITS:
        program = toy(build)
        nodes = list(program.graph.nodes)
        regions = regions_in(program.graph)
        assert regions
        for region in regions:
            places = [nodes.index(node) for node in region.nodes]
            between = nodes[places[0] : places[-1] + 1]
            assert all(ops.op_name(node) in (None, "release") for node in between)
            assert len({(n.meta["unit"], n.meta["phase"]) for n in region.nodes}) == 1


def test_equal_regions_have_one_form_whatever_the_depth():
    few, many = (toy(n=3), toys.blocks(6))
    plan = toys.make_toy_plan(many, ["", *(f"layers.{i}" for i in range(6))])
    run_passes(many, plan, (*default_passes(plan.policy), FormRegions()))
    assert few.regions is not None
    assert many.regions is not None
    assert many.regions.distinct == few.regions.distinct <= 8
    assert len(many.regions.forms) == len(few.regions.forms) + 6  # a forward and a backward each


@pytest.mark.parametrize("name", ["gpt", "llama", "bert"])
def test_a_uniform_transformer_has_at_most_eight_forms(name: str):
    case = CASES[name]
    plan = graphshard.plan(
        case.model(),
        graphshard.BlockPolicy(case.blocks, merge_below=0),
        world_size=2,
        example_kwargs=case.inputs(0),
        backend="inductor",
    )
    assert plan.program is not None
    assert plan.program.regions is not None
    # A draw of dropout outside of regions cuts one in two.
    assert plan.program.regions.distinct <= (8 if draws_as_eager() else 9)


def test_without_communication_a_unit_ends_a_region():
    program = planned(strategy="NO_SHARD").program
    units = [region.nodes[0].meta["unit"] for region in regions_in(program.graph)]
    assert [unit for unit in dict.fromkeys(units) if unit] == ["blocks.0", "blocks.1", "blocks.2"]
    assert program.regions.distinct <= 8


def test_one_operator_alone_is_left_as_it_is():
    def build(g, a):
        return g.op(toys.aten.mm.default, a, g.op(toys.aten.t.default, a))

    program = _graph_of(build)[0]
    assert program.regions is not None
    assert program.regions.forms == ()
    assert program.regions.left == 1
    assert not any(REGION in node.meta for node in program.graph.nodes)


def test_random_operators_stay_outside_where_compiled_code_would_draw_otherwise(monkeypatch):
    def random_inside(program: Program) -> list[bool]:
        return [REGION in node.meta for node in program.nodes() if ops.is_random(node)]

    monkeypatch.setattr("graphshard.passes.form_regions.draws_as_eager", lambda: True)
    assert all(random_inside(planned(1).program))
    monkeypatch.setattr("graphshard.passes.form_regions.draws_as_eager", lambda: False)
    found = random_inside(planned(1).program)
    assert found
    assert not any(found)


def test_a_release_is_of_the_region_around_it_and_changes_no_form():
    plain, program = toy(), released()[0]
    assert program.regions == plain.regions
    text = [line for line in str(program).splitlines() if "releases" in line]
    assert text
    assert all(re.search(r"releases \d params?, region", line) for line in text)
    nodes = list(program.graph.nodes)
    inside = [node for region in regions_in(program.graph) for node in region.releases]
    assert {"layers_1_up_weight_full_1", "layers_2_down_weight_full_1"} <= {
        node.args[0].name for node in inside
    }
    for node in nodes:
        if node.target is ops.release and node not in inside:
            assert REGION not in node.meta


def released() -> tuple[Program, graphshard.ShardingPlan]:
    """A toy whose small parameters are released early, too."""
    early = ReleaseEarly(min_bytes=1)
    return toys.rewritten(
        toys.blocks, passes=(*default_passes(Policy())[:-1], early, FormRegions())
    )


def test_form_tells_constants_strides_and_what_is_read_outside():
    def scaled(by):
        def build(g, a):
            return g.op(toys.aten.mul.Tensor, g.op(toys.aten.relu.default, a), by)

        return form_of(regions_in(_graph_of(build)[0].graph)[0])

    assert scaled(2) == scaled(2)
    assert scaled(2) != scaled(2.0)
    assert scaled(1) != scaled(True)

    def both(g, a):
        first = g.op(toys.aten.relu.default, a)
        g.kept = [first]
        return g.op(toys.aten.mul.Tensor, first, 2)

    assert form_of(regions_in(_graph_of(both)[0].graph)[0]) != scaled(2)


def _graph_of(build) -> tuple[Program, fx.Node]:
    """A forward without communication: `build` of a square parameter that is no shard."""
    made = toys.Toy({"w": (toys.WIDTH, toys.WIDTH)})
    made.kept = []
    out = build(made, made.params["w"])
    program = made.finish(out, grad=False, extra=made.kept)
    plan = toys.make_toy_plan(program, [""], Policy(strategy="NO_SHARD"))
    run_passes(program, plan, (FormRegions(),))
    return program, out


# -- verify ---------------------------------------------------------------------------------------


def crossing(program: Program) -> None:
    regions = regions_in(program.graph)
    for node in regions[2].nodes:
        node.meta[REGION] = 1


def writing(program: Program) -> None:
    node = regions_in(program.graph)[0].nodes[0]
    with program.graph.inserting_after(node):
        added = program.graph.call_function(toys.aten.relu_.default, (node,))
    added.meta = dict(node.meta)


def unlisted(program: Program) -> None:
    for node in regions_in(program.graph)[-1].nodes:
        del node.meta[REGION]


def in_none(program: Program) -> None:
    program.regions = None


def released_behind(program: Program) -> fx.Node:
    release = next(node for region in regions_in(program.graph) for node in region.releases)
    next(user for user in release.args[0].args[0].users if user.target is ops.free).prepend(release)
    return release


def released_in_none(program: Program) -> None:
    released_behind(program).meta[REGION] = len(program.regions.forms)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (released_behind, "does not stand among region"),
        (released_in_none, "a region that there is not"),
        (crossing, "in the midst of region 1|region 1 is of"),
        (writing, "cannot be compiled in region 0"),
        (unlisted, "the table has other regions"),
        (in_none, "a region of a program that has none"),
    ],
)
def test_verify_refuses(broken, says: str):
    program, plan = released()
    broken(program)
    with pytest.raises(VerifyError, match=says):
        verify(program, plan, after="breaking it")


# -- shown ----------------------------------------------------------------------------------------


def test_plan_and_dump_show_the_backend(tmp_path, monkeypatch, capsys):
    plan = planned()
    regions = plan.program.regions
    text = f"{len(regions.forms)} of {sum(regions.counts)} operators, {regions.distinct} distinct"
    assert f"backend   inductor, regions: {text}" in str(plan)
    assert plan.to_dict()["backend"] == "inductor"
    assert plan.to_dict()["regions"]["distinct"] == regions.distinct
    assert f"regions: {text}" in str(plan.program)
    assert "region 2 like 0" in str(plan.program)
    regions.fell_back["region 0 (forward of (root), 3 operators)"] = "no compiler"
    assert "region 0 (forward of (root), 3 operators) fell back: no compiler" in str(plan)

    bare = graphshard.plan(
        TiedGPT(2), graphshard.BlockPolicy(Block), world_size=2, backend="inductor"
    )
    assert "backend   inductor\n" in str(bare)
    assert "backend  " not in str(graphshard.plan(TiedGPT(2), graphshard.BlockPolicy(Block)))


def test_command_line(tmp_path, monkeypatch, capsys):
    factory = """
import torch
from models import TiedGPT
def made():
    return TiedGPT(2), (torch.zeros(2, 5, dtype=torch.long), torch.zeros(2, 5, dtype=torch.long))
"""
    (tmp_path / "regions_factory.py").write_text(factory)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    common = ["regions_factory:made", "--world-size", "2"]
    out = ["--out", "out", "--backend", "inductor"]
    assert main(["dump", *common, "--policy", "block:Block", *out]) == 0
    assert ", region 2" in (tmp_path / "out" / "program.txt").read_text()
    capsys.readouterr()
    policies = ["--policy", "block:Block", "--policy", "block:Block --backend inductor"]
    hardware = ["--hardware", "h100-sxm", "--json"]
    assert main(["compare", *common, *policies, *hardware]) == 0
    shown = capsys.readouterr().out
    assert '"backend": "eager"' in shown
    assert '"backend": "inductor"' in shown


@pytest.mark.parametrize("backend", ["dynamo", None, 3])
def test_unknown_backends_are_refused(backend):
    with pytest.raises(PolicyError, match="backend must be one of eager, inductor; got"):
        graphshard.plan(TiedGPT(1), graphshard.BlockPolicy(Block), backend=backend)


# -- cost -----------------------------------------------------------------------------------------


def test_a_fused_kernel_reads_and_writes_once():
    def build(g, a):
        first = g.op(toys.aten.relu.default, a)
        second = g.op(toys.aten.mul.Tensor, first, a)
        product = g.op(toys.aten.mm.default, second, g.op(toys.aten.t.default, a))
        return g.op(toys.aten.add.Tensor, g.op(toys.aten.relu.default, product), first)

    program, _ = _graph_of(build)
    size = toys.WIDTH * toys.WIDTH * 4
    costs = {node.name: cost for node, cost in fused_costs(program).items()}
    assert {name for name, cost in costs.items() if cost.moved} == {
        "mul_tensor",
        "mm_default",
        "add_tensor",
    }
    assert costs["mul_tensor"].moved == 3 * size  # reads a, writes first and second
    assert costs["add_tensor"].moved == 3 * size  # reads the product and first
    assert costs["mm_default"] == op_cost(named(program, "mm_default"))


def test_simulation_counts_fused_operators_once_and_says_so():
    plans = [
        graphshard.plan(
            TiedGPT(2),
            graphshard.BlockPolicy(Block, merge_below=0, reshard_after_forward=True),
            world_size=4,
            example_inputs=tuple(TOKENS),
            backend=backend,
        )
        for backend in ("eager", "inductor")
    ]
    eager, fused = (graphshard.simulate(plan, hardware="h100-sxm") for plan in plans)
    assert fused.flops == eager.flops
    assert fused.compute_seconds < eager.compute_seconds
    assert fused.peak_bytes == eager.peak_bytes
    assert "compiled regions" in str(fused)
    assert "compiled regions" not in str(eager)
    blocks = graphshard.simulate(plans[1], hardware="h100-sxm", leave_eager=[""])
    assert fused.compute_seconds < blocks.compute_seconds < eager.compute_seconds
    assert "not compiled: (root)" in str(blocks)
    units = [unit.fqn for unit in plans[1].units]
    none = graphshard.simulate(plans[1], hardware="h100-sxm", leave_eager=units)
    assert none.compute_seconds == pytest.approx(eager.compute_seconds)

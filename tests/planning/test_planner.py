"""Plans: who owns which parameter, how it is laid out, and what a plan warns of."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meta_models import Block, Example, Weight, tree_of
from torch import fx, nn
from transformers import GPT2Config, GPT2LMHeadModel

from graphshard.errors import PlanError, PolicyError
from graphshard.pipeline import with_capture_warnings
from graphshard.planning.planner import make_plan
from graphshard.policy.tree import ModuleTree
from graphshard.policy.units import BlockPolicy, LambdaPolicy, SizePolicy
from graphshard.program.program import ParamEntry, Program, Results


def gpt2(**config):
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=64, n_head=2, **config))


def plan_of(model, *fqns, world_size=2, **fields):
    chosen = {id(model.get_submodule(fqn)) for fqn in fqns}
    policy = LambdaPolicy(lambda module: id(module) in chosen, **fields)
    return make_plan(model, policy, world_size=world_size)


# -- ownership ---------------------------------------------------------------------------------


def test_units_stand_in_module_order_with_the_root_first():
    plan = plan_of(Example(), "head", "blocks.1", "blocks.0.up")
    assert [unit.fqn for unit in plan.units] == ["", "blocks.0.up", "blocks.1", "head"]
    assert plan.unit("").params == (
        "emb.weight",
        "blocks.0.attn.weight",
        "blocks.0.down.weight",
        "blocks.0.norm.weight",
    )
    assert plan.unit("blocks.1").numel == 920
    assert plan.unit("blocks.1").module_class == "Block"
    assert sum(unit.numel for unit in plan.units) == 2840
    assert plan.program is None


def test_tied_embedding_of_gpt2_belongs_to_the_unit_above_both_users():
    model = gpt2()
    plan = plan_of(model, "transformer.wte", "lm_head", "transformer.h.0")
    assert plan.unit("transformer.wte").params == plan.unit("lm_head").params == ()
    assert plan.unit("").params[0] == "transformer.wte.weight"
    for name in ("transformer.wte.weight", "lm_head.weight"):
        assert plan.unit_of_param(name) == ""
        assert plan.layouts[name].names == ("transformer.wte.weight", "lm_head.weight")
    assert sum(unit.numel for unit in plan.units) == sum(p.numel() for p in model.parameters())


def test_module_under_two_names_is_one_unit():
    layer = Block()
    plan = make_plan(nn.ModuleList([layer, layer, layer]), BlockPolicy(Block), world_size=2)
    assert [unit.fqn for unit in plan.units] == ["", "0"]
    assert plan.unit("0").numel == 920
    assert plan.layouts["2.up.weight"].names == ("0.up.weight", "1.up.weight", "2.up.weight")


@st.composite
def shared_graphs(draw):
    """Modules and parameters reached by several paths: each node hangs below earlier ones."""
    nodes = [Weight(1) for _ in range(draw(st.integers(1, 7)))]
    for i, node in enumerate(nodes[1:], start=1):
        for holder in draw(st.sets(st.integers(0, i - 1), min_size=1, max_size=3)):
            nodes[holder].add_module(f"n{i}", node)
        if draw(st.booleans()):
            node.weight = nodes[draw(st.integers(0, i - 1))].weight
    return nodes[0]


@settings(max_examples=200, deadline=None)
@given(model=shared_graphs())
def test_home_is_the_lowest_module_on_every_path(model):
    first = {id(module): fqn for fqn, module in model.named_modules()}
    tree = ModuleTree(model)
    expected: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        parts = name.split(".")[:-1]
        path = [
            first[id(model.get_submodule(".".join(parts[:depth])))]
            for depth in range(len(parts) + 1)
        ]
        common = expected.setdefault(id(param), path)
        expected[id(param)] = [fqn for fqn in common if fqn in path]
    assert [entry.home for entry in tree.params] == [path[-1] for path in expected.values()]
    names = [name for name, _ in model.named_parameters()]
    assert [entry.names[0] for entry in tree.params] == names


# -- layouts -----------------------------------------------------------------------------------


def test_scalars_are_replicated_and_no_shard_replicates_all():
    model = tree_of(a=Weight(8))
    model.scale = nn.Parameter(torch.ones(()))
    sharded, whole = plan_of(model), plan_of(model, strategy="NO_SHARD")
    assert (sharded.layouts["scale"].sharded, sharded.layouts["a.weight"].sharded) == (False, True)
    assert not any(layout.sharded for layout in whole.layouts.values())
    assert (sharded.unit("").sharded_bytes, whole.unit("").sharded_bytes) == (20, 36)


@pytest.mark.parametrize(
    ("world_size", "mesh", "said"),
    [
        (0, None, "world_size"),
        (-2, None, "world_size"),
        (2.0, None, "world_size"),
        (True, None, "world_size"),
        (8, (4,), "has 4 ranks, but world_size is 8"),
        (8, (2, 2, 2), r"two: \(replicas, ranks to shard over\); got shape \(2, 2, 2\)"),
        (8, (-2, -4), r"whole numbers, 1 or more, .* got \(-2, -4\)"),
    ],
)
def test_impossible_meshes(world_size, mesh, said):
    with pytest.raises(PlanError, match=said):
        make_plan(Example(), SizePolicy(), world_size=world_size, mesh_shape=mesh)


def test_model_without_parameters_has_an_empty_root():
    plan = plan_of(nn.Sequential(nn.ReLU(), nn.Tanh()))
    assert [(unit.fqn, unit.numel) for unit in plan.units] == [("", 0)]
    assert plan.warnings == ()


def test_trillion_parameters_and_thousands_of_modules():
    with torch.device("meta"):
        blocks = [
            tree_of(
                attn=tree_of(qkv=nn.Linear(25600, 3 * 25600), out=nn.Linear(25600, 25600)),
                mlp=tree_of(up=nn.Linear(25600, 102400), down=nn.Linear(102400, 25600)),
                norms=nn.ModuleList(nn.LayerNorm(25600) for _ in range(2)),
            )
            for _ in range(128)
        ]
        model = tree_of(
            emb=nn.Embedding(50000, 25600),
            h=nn.ModuleList(blocks),
            head=nn.Linear(25600, 50000, bias=False),
        )
    plan = make_plan(model, SizePolicy(), world_size=512)
    assert len(plan.units) == 1 + 128 * 4 + 2
    assert sum(unit.numel for unit in plan.units) > 1e12


# -- warnings ----------------------------------------------------------------------------------


def big_embedding(*, head: bool):
    children = {"emb": Weight(30_000), "blocks": nn.ModuleList([Block(), Block()])}
    return tree_of(**children, **({"head": Weight(30_000)} if head else {}))


def test_root_that_holds_one_embedding_can_only_be_freed_between_the_phases():
    model, policy = big_embedding(head=False), BlockPolicy(Block)
    (warning,) = make_plan(model, policy, world_size=2).warnings
    assert warning.startswith("unit (root) is 33 times the median")
    assert "nearly all of it emb.weight; set reshard_root=True" in warning
    for fields in ({"reshard_root": True}, {"strategy": "SHARD_GRAD_OP"}):
        assert make_plan(model, BlockPolicy(Block, **fields), world_size=2).warnings == ()


@pytest.mark.parametrize(
    "fields", [{"strategy": "SHARD_GRAD_OP"}, {"reshard_after_forward": False}], ids=str
)
def test_reshard_root_is_refused_where_the_root_is_kept(fields):
    policy = BlockPolicy(Block, reshard_root=True, **fields)
    with pytest.raises(PolicyError, match="reshard_root=True frees the root"):
        make_plan(big_embedding(head=False), policy, world_size=2)


def test_root_that_holds_embedding_and_head_should_be_split():
    model, whole = big_embedding(head=True), BlockPolicy(Block, strategy="NO_SHARD")
    (warning,) = make_plan(model, BlockPolicy(Block), world_size=2).warnings
    assert make_plan(model, whole, world_size=2).warnings == ()
    assert "unit (root) is 65 times" in warning
    assert "make units of the modules in it" in warning


def test_unit_of_one_large_parameter_is_nobodys_fault():
    assert plan_of(big_embedding(head=True), "emb", "head", "blocks.0", "blocks.1").warnings == ()


def test_policy_that_made_no_unit_is_reported():
    (warning,) = make_plan(Example(), SizePolicy(), world_size=2).warnings
    assert "makes no unit besides the root" in warning
    assert "lower min_num_params" in warning
    (warning,) = make_plan(Example(), LambdaPolicy(lambda _: False), world_size=2).warnings
    assert "LambdaPolicy makes no unit besides the root: the whole model is one unit" in warning
    assert "let fn return True" in warning
    assert make_plan(Weight(10), SizePolicy(), world_size=2).warnings == ()


def test_units_without_parameters_are_reported_but_not_the_root():
    model = tree_of(a=Block(), b=Block(), relu=nn.ReLU())
    (warning,) = plan_of(model, "a", "b", "relu").warnings
    assert warning.startswith("unit relu is without parameters")
    assert plan_of(model, "a", "b").warnings == ()


def captured(model, used, with_gradient, *, grad=True):
    """A program that reads the parameters `used` and gives those `with_gradient` a gradient."""
    graph = fx.Graph()
    params = tuple(
        ParamEntry(
            name,
            (name,),
            tuple(p.shape),
            p.stride(),
            p.dtype,
            p.requires_grad,
            graph.placeholder("p"),
        )
        for name, p in model.named_parameters()
    )
    made = {p.fqn: graph.call_function(torch.neg, (p.node,)) for p in params if p.fqn in used}
    grads = [made[p.fqn] if p.fqn in with_gradient else None for p in params]
    graph.create_node("output", "output", args=Results([], [], grads, []).as_args())
    return Program(graph, params, (), (), (), (), training=True, grad=grad)


def test_unused_parameters_and_lost_gradients_are_reported():
    model = tree_of(good=Weight(1), lost=Weight(1), unused=Weight(1), frozen=Weight(1))
    model.frozen.weight.requires_grad_(False)
    plan = plan_of(model, "good")
    used = {"good.weight", "lost.weight", "frozen.weight"}
    checked = with_capture_warnings(plan, captured(model, used, {"good.weight"}))
    unused, lost = checked.warnings[len(plan.warnings) :]
    assert unused.startswith("parameter unused.weight is never used")
    assert lost.startswith("trainable parameter lost.weight is used but no gradient reaches it")
    assert checked.units == plan.units
    eval_only = with_capture_warnings(plan, captured(model, used, set(), grad=False))
    assert eval_only.warnings == (*plan.warnings, unused)


def test_long_lists_of_names_are_cut():
    model = tree_of(**{f"m{i}": Weight(1) for i in range(7)})
    plan = with_capture_warnings(plan_of(model, "m0"), captured(model, set(), set()))
    assert "m0.weight, m1.weight, m2.weight, m3.weight and 3 more are never" in plan.warnings[-1]


# -- looking things up -------------------------------------------------------------------------


def test_plan_finds_units_by_module_and_parameter():
    plan = plan_of(Example(), "blocks.0", "blocks.0.up", "blocks.1")
    assert plan.unit_of_module("blocks.0.up.anything") == "blocks.0.up"
    assert plan.unit_of_module("blocks.0.down") == "blocks.0"
    assert plan.unit_of_module("blocks") == plan.unit_of_module("") == ""
    assert plan.unit_of_param("blocks.1.norm.weight") == "blocks.1"
    assert plan.is_nested("blocks.0.up", "blocks.0")
    assert plan.is_nested("blocks.0", "")
    assert not plan.is_nested("blocks.01", "blocks.0")
    with pytest.raises(PlanError, match="no unit is named 'emb'"):
        plan.unit("emb")
    with pytest.raises(PlanError, match="no parameter named 'nothing'"):
        plan.unit_of_param("nothing")

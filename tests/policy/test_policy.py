"""Policies: which modules become units, torch's own size rule included, and what they refuse."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from meta_models import Block, Example, Weight, llama, tree_of
from paths import DATA
from torch import nn
from torch.distributed import fsdp
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import _recursive_wrap, size_based_auto_wrap_policy
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from graphshard.errors import PolicyError
from graphshard.planning.planner import make_plan
from graphshard.policy.by_module import ModulePolicy
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.tree import ModuleTree
from graphshard.policy.units import BlockPolicy, LambdaPolicy, Policy, SizePolicy, Strategy

ORACLES = json.loads((DATA / "size_policy_units.json").read_text())


def select(policy: Policy, model: nn.Module) -> list[str]:
    return policy.select(ModuleTree(model))


# -- size policy: torch's rule -----------------------------------------------------------------


def transformers_llama(vocab, hidden, ffn, layers, heads, kv_heads):
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=False,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


@pytest.mark.parametrize("build", [llama, transformers_llama], ids=["plain", "transformers"])
@pytest.mark.parametrize("name", ORACLES["models"])
def test_units_of_llama_equal_torch(name, build):
    oracle = ORACLES["models"][name]
    plan = make_plan(build(**oracle["config"]), SizePolicy(oracle["min_num_params"]), world_size=8)
    units = [{"fqn": u.fqn, "numel": u.numel, "params": len(u.params)} for u in plan.units]
    assert units == oracle["units"]
    assert sum(u.numel for u in plan.units) == oracle["total_numel"]


def test_tied_parameter_counts_once_where_it_would_be_stored():
    model = tree_of(a=tree_of(w=Weight(500), rest=Weight(400)), b=tree_of(w=Weight(500)))
    model.b.w.weight = model.a.w.weight
    # Torch finds 500 elements or more in a, in a.w and in b.w.
    assert select(SizePolicy(500), model) == []
    assert select(SizePolicy(400), model) == ["a.rest"]
    outer = tree_of(inner=model, other=Weight(900))
    assert select(SizePolicy(900), outer) == ["inner", "other"]


def test_module_used_twice_is_visited_once():
    shared = Weight(500)
    assert select(SizePolicy(500), tree_of(first=shared, second=shared)) == ["first"]
    assert select(SizePolicy(500), nn.ModuleList([shared] * 3)) == ["0"]


def test_module_shared_below_two_parents_counts_above_both():
    shared = Weight(500)
    model = tree_of(a=tree_of(s=shared, own=Weight(9)), b=tree_of(s=shared, own=Weight(9)))
    assert select(SizePolicy(10), model) == ["a.s"]
    assert select(SizePolicy(9), model) == ["a.s", "a.own", "b.own"]


class OtherLeaf(nn.MultiheadAttention):
    pass


@st.composite
def modules(draw, depth: int = 0) -> nn.Module:
    """A module without sharing: 0 to 3 parameters of its own, 0 to 4 children, mixed classes."""
    leaf = depth >= 4 or draw(st.integers(0, 3)) == 0
    children = [] if leaf else draw(st.lists(modules(depth=depth + 1), max_size=4))
    kind = draw(st.sampled_from(["plain", "plain", "list", "dict", "sequential", "attention"]))
    if kind == "attention":
        with torch.device("meta"):
            width = draw(st.integers(1, 6))
            return draw(st.sampled_from([nn.MultiheadAttention, OtherLeaf]))(width, 1)
    if kind == "list":
        return nn.ModuleList(children)
    if kind == "sequential":
        return nn.Sequential(*children)
    if kind == "dict":
        return nn.ModuleDict({f"k{i}": child for i, child in enumerate(children)})
    module = tree_of(**{f"c{i}": child for i, child in enumerate(children)})
    for i, numel in enumerate(draw(st.lists(st.integers(0, 100), max_size=3))):
        module.register_parameter(f"p{i}", nn.Parameter(torch.empty(numel, device="meta")))
    return module


CLASS_SETS = st.sets(
    st.sampled_from([nn.MultiheadAttention, nn.ModuleList, nn.ModuleDict, nn.Sequential])
)


@settings(max_examples=300, deadline=None)
@given(
    model=modules(),
    least=st.integers(0, 400),
    classes=st.none() | st.tuples(CLASS_SETS, CLASS_SETS),
)
def test_size_policy_equals_torch_on_random_trees(model, least, classes):
    kinds, torch_kinds = {}, {}
    if classes is not None:
        kinds = dict(zip(("force_leaf", "exclude"), classes, strict=True))
        torch_kinds = {"force_leaf_modules": classes[0], "exclude_wrap_modules": classes[1]}
    names = {id(module): fqn for fqn, module in model.named_modules()}
    chosen = set()

    def note(module):
        chosen.add(names[id(module)])
        return module

    _recursive_wrap(
        module=model,
        auto_wrap_policy=partial(size_based_auto_wrap_policy, min_num_params=least, **torch_kinds),
        wrapper_cls=note,
        ignored_modules=set(),
        ignored_params=set(),
        only_wrap_children=True,
    )
    expected = [fqn for fqn in names.values() if fqn in chosen]
    assert select(SizePolicy(least, **kinds), model) == expected


# -- block policy ------------------------------------------------------------------------------


class SmallBlock(Block):
    pass


def test_block_policy_takes_classes_with_subclasses_and_exact_names():
    model = tree_of(a=Block(), b=SmallBlock())
    for classes in ({Block}, [Block], Block, {Block, "SmallBlock"}):
        assert select(BlockPolicy(classes), model) == ["a", "b"]
    for classes in ({"Block"}, "Block"):
        assert select(BlockPolicy(classes), model) == ["a"]
    assert select(BlockPolicy({"SmallBlock"}), model) == ["b"]


def test_block_policy_nests_matches_and_never_lists_the_root():
    model = Example()
    assert select(BlockPolicy({Example, Block, "Weight"}), model)[:4] == [
        "emb",
        "blocks.0",
        "blocks.0.attn",
        "blocks.0.up",
    ]


@pytest.mark.parametrize("nothing", [None, (), frozenset()])
def test_block_policy_without_classes_takes_the_models_own(nothing):
    config = BertConfig(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8
    )
    with torch.device("meta"):
        model = BertModel(config)
    units = select(BlockPolicy(nothing), model)
    assert {"encoder.layer.0", "encoder.layer.1"} <= set(units)


def test_names_of_the_model_itself_need_not_all_match():
    model = Example()
    model._no_split_modules = ["Block", "AbsentBlock"]
    assert select(BlockPolicy(), model) == ["blocks.0", "blocks.1"]
    model._no_split_modules = ["AbsentBlock"]
    with pytest.raises(PolicyError, match="AbsentBlock"):
        select(BlockPolicy(), model)


def test_block_policy_without_classes_needs_the_models_own():
    with pytest.raises(PolicyError, match="_no_split_modules, and Example has none"):
        select(BlockPolicy(), Example())


@pytest.mark.parametrize("missing", ["block", nn.Conv2d])
def test_class_that_matches_nothing_lists_what_the_model_has(missing):
    name = missing if isinstance(missing, str) else missing.__name__
    with pytest.raises(PolicyError, match=f"{name}.*Block, Example, ModuleList, Weight"):
        select(BlockPolicy({Block, missing}), Example())


def test_containers_without_forward_cannot_be_units():
    class RunningList(nn.ModuleList):
        def forward(self, x):
            return x

    model = tree_of(layers=nn.ModuleList([Block()]), runs=RunningList([Block()]))
    with pytest.raises(PolicyError, match="unit of layers, a ModuleList"):
        select(BlockPolicy({nn.ModuleList}), model)
    with pytest.raises(PolicyError, match="LambdaPolicy makes a unit of layers"):
        select(LambdaPolicy(lambda module: isinstance(module, nn.ModuleList)), model)
    assert select(BlockPolicy({"RunningList"}), model) == ["runs"]


# -- lambda policy -----------------------------------------------------------------------------


def test_lambda_policy_asks_about_every_module_but_the_root():
    asked = []

    def heavy(module):
        asked.append(module)
        return isinstance(module, Block)

    model = Example()
    assert select(LambdaPolicy(heavy), model) == ["blocks.0", "blocks.1"]
    assert asked == list(model.modules())[1:]


def test_lambda_policy_wants_a_bool():
    with pytest.raises(PolicyError, match="returned None for emb"):
        select(LambdaPolicy(lambda module: None), Example())


@pytest.mark.parametrize("kind", [SizePolicy, BlockPolicy, LambdaPolicy, ModulePolicy])
def test_the_help_of_a_policy_has_all_options(kind: type[Policy]) -> None:
    text = inspect.getdoc(kind)
    arguments, _, raises = text.partition("\n\nRaises:")
    assert raises
    for field in dataclasses.fields(kind):
        assert re.search(rf"^    {field.name}: ", arguments, re.MULTILINE), field.name


def test_torch_s_enums_are_taken() -> None:
    for name, ours in (("BACKWARD_PRE", "pre"), ("BACKWARD_POST", "post")):
        assert SizePolicy(backward_prefetch=fsdp.BackwardPrefetch[name]).backward_prefetch == ours


# -- fields ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: SizePolicy(-1), "min_num_params"),
        (lambda: SizePolicy(0.5), "min_num_params"),
        (lambda: SizePolicy(True), "min_num_params"),
        (lambda: SizePolicy(float("inf")), "min_num_params"),
        (lambda: SizePolicy(force_leaf={"Linear"}), "force_leaf"),
        (lambda: SizePolicy(exclude=nn.Linear), "exclude"),
        (lambda: BlockPolicy({3}), "classes"),
        (lambda: BlockPolicy(3), "classes"),
        (lambda: LambdaPolicy("Block"), "fn"),
        (lambda: SizePolicy(strategy="ZERO4"), "FULL_SHARD, SHARD_GRAD_OP, SHARD_OPTIMIZER"),
        (lambda: SizePolicy(strategy=3), "one thing to Accelerate and another to DeepSpeed"),
        (lambda: SizePolicy(reshard_after_forward="yes"), "reshard_after_forward"),
        (lambda: SizePolicy(reshard_after_forward=0), "reshard_after_forward"),
        (
            lambda: SizePolicy(strategy="ZeRO-2", reshard_after_forward=True),
            "leave one of them out",
        ),
        (lambda: SizePolicy(mixed_precision=torch.bfloat16), r"MixedPrecision\(param_dtype="),
        (
            lambda: SizePolicy(mixed_precision=fsdp.MixedPrecisionPolicy()),
            r"must be a graphshard.MixedPrecision, .*; got torch's MixedPrecisionPolicy",
        ),
        (lambda: SizePolicy(mixed_precision=fsdp.MixedPrecision()), "torch's MixedPrecision"),
        (lambda: SizePolicy(offload=fsdp.CPUOffloadPolicy()), "got torch's CPU.* are 'params'"),
        (lambda: SizePolicy(offload="optimizer"), "params, activations"),
        (lambda: SizePolicy(ignored=[3]), "ignored"),
        (lambda: SizePolicy(backward_prefetch="before"), "backward_prefetch"),
        (lambda: SizePolicy(forward_prefetch=-1), "forward_prefetch"),
        (lambda: SizePolicy(forward_prefetch=True), "forward_prefetch"),
        (lambda: SizePolicy(memory_budget=0), "memory_budget"),
        (lambda: SizePolicy(memory_budget="1 GB each"), "memory_budget: .*is not a size"),
        (lambda: SizePolicy(offload=True), "params, activations"),
        (lambda: BlockPolicy(Block()), r"an instance of Block; pass its class, \{Block\}"),
        (lambda: LambdaPolicy(Block), r"got the class Block; write BlockPolicy\(\{Block\}\)"),
        (lambda: SizePolicy(reshard_root="no"), "reshard_root"),
        (
            lambda: SizePolicy(recompute=3),
            "recompute must be one of 'units', 'selective', 'budget'",
        ),
        (lambda: SizePolicy(recompute=[None]), "recompute"),
        (lambda: SizePolicy(recompute=["units", Block]), 'leave out "units"'),
        (lambda: SizePolicy(recompute=["selective", "budget"]), "give one"),
        (lambda: SizePolicy(recompute="budget"), "needs memory_budget"),
        (lambda: SizePolicy(sync_module_states=1), "sync_module_states"),
        (lambda: SizePolicy(schedule="early"), "schedule must be one of fsdp, overlap"),
        (
            lambda: SizePolicy(recompte="units"),
            "SizePolicy takes no .*'recompte'; did you mean rec",
        ),
        (lambda: BlockPolicy(clases={Block}), "did you mean classes"),
        (lambda: LambdaPolicy(print, speed=9), "no argument 'speed'; it takes fn, strategy, resh"),
        (lambda: ModulePolicy({}, bse=None), "did you mean base"),
        (lambda: MixedPrecision(param_dtyp="bf16"), "did you mean param_dtype"),
        (lambda: SizePolicy(schedule="overlap", hardware="h100"), "did you mean h100-sxm"),
        (lambda: SizePolicy(hardware="h100-sxm"), "with schedule='fsdp' it has no effect"),
        (lambda: SizePolicy(schedule="overlap", hardware="h900"), "presets: a100-40gb"),
        (lambda: SizePolicy(schedule="overlap", hardware=8), "hardware"),
        (
            lambda: SizePolicy(schedule="overlap", backward_prefetch=None, forward_prefetch=2),
            "backward_prefetch=None and forward_prefetch=2 would have no effect",
        ),
    ],
)
def test_wrong_values_are_refused_by_name(make, said):
    with pytest.raises(PolicyError, match=said):
        make()


def test_policies_are_values():
    assert repr(BlockPolicy(Block)) == "graphshard.BlockPolicy({'Block'})"
    assert SizePolicy(1e8) == SizePolicy() == SizePolicy(100_000_000, strategy="FULL_SHARD")
    assert hash(BlockPolicy([Block])) == hash(BlockPolicy(Block))
    assert SizePolicy(memory_budget="2GiB") == SizePolicy(memory_budget=2 << 30)
    assert SizePolicy(strategy="NO_SHARD").strategy is Strategy.NO_SHARD
    assert SizePolicy(strategy="ZeRO-3").strategy is Strategy.FULL_SHARD
    assert SizePolicy(strategy=ShardingStrategy.HYBRID_SHARD).strategy is Strategy.HYBRID_SHARD
    assert SizePolicy(offload="params") == SizePolicy(offload=["params"])
    with pytest.raises(dataclasses.FrozenInstanceError):
        SizePolicy().min_num_params = 3  # type: ignore[misc]


def test_the_base_selects_nothing_and_says_what_to_use():
    with pytest.raises(PolicyError, match="SizePolicy, BlockPolicy or LambdaPolicy"):
        select(Policy(), Example())


@pytest.mark.slow
def test_repr_is_the_same_in_every_process():
    code = (
        "from torch import nn\n"
        "from graphshard.policy import *\n"
        "print(BlockPolicy({nn.Linear, nn.Conv2d, 'B', 'A', 'C'}), SizePolicy(5))\n"
        "print(LambdaPolicy(lambda m: True))"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ".", "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1
    assert seen.pop().splitlines() == [
        "graphshard.BlockPolicy({'A', 'B', 'C', 'Conv2d', 'Linear'}) graphshard.SizePolicy(5)",
        "graphshard.LambdaPolicy(<lambda>)",
    ]

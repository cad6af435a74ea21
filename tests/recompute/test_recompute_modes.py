"""Every way to ask for recompute: what is saved and computed again, and that the numbers stay."""

from __future__ import annotations

import copy
import re
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from capture_models import run_captured
from loops import same_step
from models import CASES
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import graphshard
from graphshard.capture.entry import capture
from graphshard.errors import CaptureError, PolicyError
from graphshard.passes.recompute import Recompute
from graphshard.planning.planner import make_plan
from graphshard.program.ops import is_compute
from graphshard.program.program import BACKWARD, FORWARD, RECOMPUTED, Program
from graphshard.program.storages import SAVED, storages_of

aten = torch.ops.aten
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))


class Mix(nn.Module):
    def __init__(self, p: float = 0.0) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return x + self.drop(torch.tanh(self.b(torch.relu(self.a(x)))))


class Mixes(nn.Module):
    """Two `Mix`, each called through `around(block, x)` where that is given."""

    def __init__(self, around=None, p: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([Mix(p), Mix(p)])
        self.around = around or (lambda block, x: block(x))

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = self.around(block, x)
        return x.square().sum()


def program_of(model: nn.Module, **fields) -> Program:
    policy = graphshard.BlockPolicy({Mix}, **fields)
    made = graphshard.plan(model, policy, world_size=2, example_inputs=(X,), device="cpu")
    assert made.program is not None
    return made.program


def again(program: Program) -> Counter[str]:
    """Names of the operators computed again, views left out."""
    return Counter(
        str(node.target).split(".")[1]
        for node in program.nodes(BACKWARD)
        if RECOMPUTED in node.meta and node.target not in (aten.t.default, aten.detach.default)
    )


def saved(program: Program) -> list[fx.Node]:
    return [storage.node for storage in storages_of(program).all if storage.kind == SAVED]


# -- what is asked for ----------------------------------------------------------------------------


def test_each_word_and_class_recomputes_its_part():
    assert not again(program_of(Mixes()))
    # The block's last product and sum feed nothing in its backward.
    assert again(program_of(Mixes(), recompute="units")) == {"addmm": 4, "relu": 2, "tanh": 2}
    by_class = program_of(Mixes(), recompute=Mix)
    assert again(by_class) == again(program_of(Mixes(), recompute="Mix"))
    assert again(by_class) == again(program_of(Mixes(), recompute="units"))
    assert again(program_of(Mixes(), recompute="selective")) == {"relu": 2, "tanh": 2}
    both = program_of(Mixes(), recompute=("selective", Mix))
    assert again(both) == {"relu": 2, "tanh": 2}
    assert [n.target for n in saved(both)].count(aten.addmm.default) == 5  # one is the input's
    assert again(program_of(Mixes(), recompute={nn.Linear})) == {}  # saves its input and output


def test_a_class_that_matches_nothing_is_named():
    with pytest.raises(PolicyError, match="recompute names Conv2d, Nix, and the model has no such"):
        make_plan(
            Mixes(), graphshard.BlockPolicy({Mix}, recompute={nn.Conv2d, "Nix"}), world_size=2
        )
    with pytest.raises(PolicyError, match=r"recomputes blocks, but the step computes nothing"):
        program_of(Mixes(), recompute=nn.ModuleList)
    unused = Mixes(around=lambda block, x: (x, block(x))[0])
    with pytest.raises(PolicyError, match=r"recomputes blocks\.0, blocks\.1, but .* it needs"):
        program_of(unused, recompute=Mix)


def test_one_value_has_one_form():
    forms = ["units", ["units"], {"units"}, ("units",)]
    assert len({graphshard.BlockPolicy({Mix}, recompute=form) for form in forms}) == 1
    assert graphshard.BlockPolicy({Mix}, recompute=[]).recompute is None
    text = repr(graphshard.BlockPolicy({Mix}, recompute={"selective", Mix, "Alpha"}))
    assert "recompute={'Alpha', 'Mix', 'selective'}" in text


def test_the_plan_and_the_schedule_say_it():
    policy = graphshard.BlockPolicy({Mix}, recompute="units")
    plan = graphshard.plan(Mixes(), policy, world_size=2, example_inputs=(X,))
    text = str(plan.program)
    assert text.count(" recomputed") == 2
    assert text.count(", saves 160 bytes") == 3
    memory = plan.to_dict()["memory"]
    assert memory["saved_bytes"] == {"": 160, "blocks.0": 160, "blocks.1": 160}
    assert memory["recomputed_ops"] == sum(
        RECOMPUTED in node.meta for node in plan.program.nodes(BACKWARD)
    )
    assert "saved: 480 B of activations from forward to backward: (root) 160 B, blocks.0-1" in str(
        plan
    )
    assert "recomputed: " in str(plan)


def test_blocks_are_in_the_order_of_their_numbers_where_what_they_save_is_said():
    model = Mixes()
    model.blocks.extend(Mix() for _ in range(10))
    plan = graphshard.plan(model, graphshard.BlockPolicy({Mix}), world_size=2, example_inputs=(X,))
    (line,) = [line for line in str(plan).splitlines() if "saved: " in line]
    assert re.search(r"blocks\.0-11 \d+ B each", line)


# -- the same numbers -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "modes"),
    [
        ("gpt", ("units",)),
        pytest.param("gpt", ("kept", "selective", "budget"), marks=pytest.mark.slow),
        pytest.param("llama", ("units", "kept", "selective", "budget"), marks=pytest.mark.slow),
        pytest.param("t5", ("units", "budget"), marks=pytest.mark.slow),
    ],
)
def test_losses_and_gradients_are_bit_equal_in_every_mode(name, modes):
    case = CASES[name]
    model, inputs = case.model(), case.inputs(0)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.1
    eager = copy.deepcopy(model)
    for mode in modes:
        fields = {
            "units": {"recompute": "units"},
            "kept": {"recompute": "units", "strategy": "SHARD_GRAD_OP"},
            "selective": {"recompute": ("selective", *case.blocks)},
            "budget": {"recompute": "budget"},
        }[mode]
        if mode == "budget":
            plain = compiled(model, case, inputs, {})
            fields["memory_budget"] = int(max(storages_of(plain.program).live()) * 0.85)
        sharded = compiled(model, case, inputs, fields)
        same_step(eager, sharded, **inputs)
        assert any(RECOMPUTED in n.meta for n in sharded.program.nodes(BACKWARD)), fields


def compiled(model, case, inputs, fields):
    policy = graphshard.BlockPolicy(case.blocks, **fields)
    return graphshard.compile(model, policy, example_kwargs=inputs)


# -- gathers and places ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("strategy", "reshard_root"),
    [("FULL_SHARD", False), ("FULL_SHARD", True), ("SHARD_GRAD_OP", False), ("NO_SHARD", False)],
)
def test_a_recomputed_unit_is_gathered_as_often_as_before(strategy, reshard_root):
    again = True if strategy == "FULL_SHARD" else None
    fields = {"strategy": strategy, "reshard_root": reshard_root, "reshard_after_forward": again}
    schedules = [
        Counter(
            (event.op, event.unit, event.phase)
            for event in program_of(Mixes(p=0.1), recompute=what, **fields).schedule()
            if event.op in ("all_gather", "free", "reduce_scatter", "all_reduce")
        )
        for what in (None, "units", "selective")
    ]
    assert schedules[0] == schedules[1] == schedules[2]


def test_each_region_is_recomputed_right_before_its_own_backward():
    program = program_of(Mixes(), recompute="units")
    order = [
        (node.meta["unit"], RECOMPUTED in node.meta)
        for node in program.nodes(BACKWARD)
        if node.meta["unit"] and is_compute(node)
    ]
    first_again = {unit: order.index((unit, True)) for unit in ("blocks.0", "blocks.1")}
    last = max(place for place, (unit, _) in enumerate(order) if unit == "blocks.1")
    assert first_again["blocks.1"] < last < first_again["blocks.0"]


class Forked(nn.Module):
    """Two results; the backward of the second comes after the backward of what follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        return torch.tanh(self.a(x)).sin(), torch.tanh(self.b(x)).sin()


class Entered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fork, self.last = Forked(), nn.Linear(8, 8)

    def forward(self, x):
        first, second = self.fork(x)
        return (torch.relu(self.last(second)).cos() * first).sum()


def test_a_region_that_backward_enters_twice_is_recomputed_part_by_part():
    model = Entered()
    policy = graphshard.BlockPolicy({Forked}, recompute="units")
    program = graphshard.plan(model, policy, world_size=2, example_inputs=(X,)).program
    nodes = [n for n in program.nodes(BACKWARD) if n.meta["fqn"].startswith(("fork", "last"))]
    tanhs = [
        i for i, n in enumerate(nodes) if RECOMPUTED in n.meta and n.target is aten.tanh.default
    ]
    others = [i for i, n in enumerate(nodes) if n.meta["fqn"] == "last"]
    assert len(tanhs) == 2
    assert tanhs[0] < others[0] or tanhs[1] > others[0]
    same_step(copy.deepcopy(model), graphshard.compile(model, policy, example_inputs=(X,)), X)


# -- checkpoints of the model ---------------------------------------------------------------------


class Executed(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.ops[func.name().removeprefix("aten::")] += 1
        return func(*args, **(kwargs or {}))


def selective(block, x):
    context = partial(create_selective_checkpoint_contexts, [aten.addmm.default])
    return checkpoint(block, x, use_reentrant=False, context_fn=context)


def by_policy(block, x):
    def keep(ctx, op, *args, **kwargs):
        wanted = op is aten.addmm.default
        return CheckpointPolicy.PREFER_SAVE if wanted else CheckpointPolicy.MUST_RECOMPUTE

    context = partial(create_selective_checkpoint_contexts, keep)
    return checkpoint(block, x, use_reentrant=False, context_fn=context)


@pytest.mark.parametrize("around", [selective, by_policy])
def test_selective_checkpoints_of_the_model_are_honoured(around):
    model = Mixes(around)
    eager = copy.deepcopy(model)
    loss = eager(X)
    with Executed() as executed:
        loss.backward()
    program = program_of(model)
    assert again(program) == {"relu": 2, "tanh": 2}
    for name in ("relu", "tanh", "addmm"):
        in_backward = [n for n in program.nodes(BACKWARD) if f"aten.{name}." in str(n.target)]
        assert len(in_backward) == executed.ops[name], name
    # As the policy's own mode asks for it, the same.
    assert again(program_of(Mixes(), recompute="selective")) == again(program)


class Attends(nn.Module):
    """Attention in a checkpoint that keeps the results of `kept`."""

    def __init__(self, kept, mask) -> None:
        super().__init__()
        self.inp, self.mask = nn.Linear(16, 16), mask
        self.context = partial(create_selective_checkpoint_contexts, [kept])

    def forward(self, x):
        return checkpoint(self.attend, x, use_reentrant=False, context_fn=self.context).sum()

    def attend(self, x):
        y = torch.tanh(self.inp(x))
        return F.scaled_dot_product_attention(y, y, y, attn_mask=self.mask).sin()


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="nothing is traced off its target")
@pytest.mark.parametrize("name", ["flash", "efficient"])
def test_a_trace_on_the_cpu_for_cuda_asks_about_the_attention_of_cuda(name):
    kept = getattr(aten, f"_scaled_dot_product_{name}_attention").default
    model = Attends(kept, None if name == "flash" else torch.zeros(8, 8))
    x = torch.rand(2, 2, 8, 16)
    for device, times in (("cpu", 1), ("cuda", 0)):
        made = graphshard.plan(
            model, graphshard.SizePolicy(1), world_size=2, example_inputs=(x,), device=device
        )
        computed = [node.target for node in made.program.nodes(BACKWARD) if RECOMPUTED in node.meta]
        assert computed.count(aten.tanh.default) == 1
        attention = aten._scaled_dot_product_flash_attention_for_cpu.default
        assert computed.count(attention) == times, device


def test_what_a_checkpoint_cannot_carry_is_refused():
    def offload(block, x):
        context = partial(
            create_selective_checkpoint_contexts,
            lambda ctx, op, *args, **kwargs: CheckpointPolicy.MUST_CPU_OFFLOAD,
        )
        return checkpoint(block, x, use_reentrant=False, context_fn=context)

    def own(block, x):
        contexts = lambda: (torch.no_grad(), torch.no_grad())  # noqa: E731
        return checkpoint(block, x, use_reentrant=False, context_fn=contexts)

    if hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"):
        with pytest.raises(CaptureError, match=r'MUST_CPU_OFFLOAD of .*offload="activations"'):
            program_of(Mixes(offload))
    with pytest.raises(CaptureError, match="context_fn whose contexts cannot be carried"):
        program_of(Mixes(own))


def test_a_reentrant_checkpoint_is_a_region_unless_it_would_lose_gradients():
    around = partial(checkpoint, use_reentrant=True)
    assert again(program_of(Mixes(around))) == again(program_of(Mixes(), recompute="units"))
    model = nn.Sequential(Mix())
    model.forward = lambda x: checkpoint(model[0], x, use_reentrant=True).sum()
    with pytest.raises(CaptureError, match="use_reentrant=False"):
        capture(model, (X,))


def nested(block, x):
    def outer(x):
        return checkpoint(block, torch.sin(x), use_reentrant=False).cos()

    return checkpoint(outer, x, use_reentrant=False)


def test_nested_checkpoints_save_the_outer_inputs_alone():
    model = Mixes(nested, p=0.2)
    program = program_of(model)
    kept = storages_of(program).saved_by(lambda storage: storage.unit)
    assert kept["blocks.0"] == 40  # the mask
    assert kept["blocks.1"] in (40, 40 + 160)  # and what the model computes of it
    assert again(program)["sin"] == 2


def test_nothing_is_recomputed_twice_where_policy_and_model_agree():
    around = partial(checkpoint, use_reentrant=False)
    alone = again(program_of(Mixes(around)))
    for what in ("units", "selective", Mix):
        assert again(program_of(Mixes(around), recompute=what)) == alone


def test_random_states_need_not_be_preserved():
    around = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    policy = graphshard.BlockPolicy({Mix})
    sharded = graphshard.compile(Mixes(around, p=0.3), policy, example_inputs=(X,))
    same_step(Mixes(p=0.3), sharded, X)  # and so the same mask in backward


@pytest.mark.parametrize("p", [0.0, 0.2, 1.0])
def test_a_block_that_runs_twice_is_recomputed_with_the_same_numbers(p):
    model = Mixes(lambda block, x: block(block(x)), p=p)
    captured = capture(model, (X,))
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(run_captured(captured, model, (X,), {}))
        plan = make_plan(model, graphshard.BlockPolicy({Mix}), world_size=2)
        if len(results) == 1:
            before = len(crossing(captured.program))
            Recompute(units=True).apply(captured.program, plan)
    captured.program.graph.lint()
    assert len(crossing(captured.program)) < before
    assert torch.equal(results[0][0], results[1][0])
    for name, gradient in results[0][2].items():
        assert torch.equal(gradient, results[1][2][name]), name


def test_without_gradients_nothing_happens():
    with torch.no_grad():
        for fields in ({"recompute": "units"}, {"recompute": "budget", "memory_budget": 10**9}):
            assert not again(program_of(Mixes(), **fields))


def crossing(program) -> list[fx.Node]:
    """Forward results that backward reads: what is saved."""
    found = {
        source: None
        for node in program.nodes(BACKWARD)
        for source in node.all_input_nodes
        if source.op == "call_function" and source.meta["phase"] == FORWARD
    }
    return list(found)

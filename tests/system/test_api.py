"""`compile` and `plan`: which ranks, which device, and what they refuse."""

from __future__ import annotations

import inspect
import warnings

import pytest
import torch
from models import Block, TiedGPT, tokens_of
from ranks import on_ranks
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import graphshard
from graphshard.errors import PlanError, PolicyError

BLOCK = graphshard.BlockPolicy({Block})


def meta_gpt() -> nn.Module:
    with torch.device("meta"):
        return TiedGPT(2)


def test_a_plan_without_inputs_has_no_program() -> None:
    plan = graphshard.plan(meta_gpt(), BLOCK, world_size=4)
    assert [unit.fqn for unit in plan.units] == ["", "blocks.0", "blocks.1"]
    assert plan.world_size == 4
    assert plan.program is None


def test_a_plan_without_a_number_of_ranks_says_so() -> None:
    said = "warning: this plan is for 1 rank, which shards nothing, since graphshard.plan got no "
    assert said in str(graphshard.plan(meta_gpt(), BLOCK))
    for given in ({"world_size": 1}, {"mesh_shape": (1,)}):
        assert said not in str(graphshard.plan(meta_gpt(), BLOCK, **given))  # type: ignore[arg-type]


def test_a_misspelt_argument_is_told() -> None:
    model = meta_gpt()
    for call, given, meant in (
        (graphshard.plan, {"mesh": (2,)}, "mesh_shape"),
        (graphshard.plan, {"worldsize": 2}, "world_size"),
        (graphshard.compile, {"mesh_shape": (2,)}, "mesh"),
        (graphshard.simulate, {"policy": BLOCK, "hardwar": "h200"}, "hardware"),
    ):
        args = (model, BLOCK) if call is not graphshard.simulate else (model,)
        with pytest.raises(TypeError, match=f"takes no argument .* did you mean {meant}[?]") as e:
            call(*args, **given)  # type: ignore[operator]
        assert isinstance(e.value, PolicyError)
    assert "mesh_shape" in inspect.signature(graphshard.plan).parameters


def test_a_warning_is_of_the_user_s_line() -> None:
    model = meta_gpt()
    model.register_state_dict_post_hook(lambda *_: None)
    for call in (graphshard.plan, graphshard.compile):
        with pytest.warns(UserWarning, match="state-dict hooks") as said:
            call(model, BLOCK)
        assert [w.filename for w in said] == [__file__]


def test_a_plan_warns_of_what_the_program_shows() -> None:
    class LoweredGraph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(2, 2), nn.Linear(2, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.used(x)

    policy = graphshard.BlockPolicy({nn.Linear})
    examples = (torch.ones(1, 2),)
    plans = [
        graphshard.plan(LoweredGraph(), policy, example_inputs=examples),
        graphshard.compile(LoweredGraph(), policy, example_inputs=examples).plan,
    ]
    for plan in plans:
        assert any("unused.weight" in warning for warning in plan.warnings)


@pytest.mark.parametrize(
    ("backend", "ranks", "asked", "shown", "ahead"),
    [
        ("nccl", 4, None, "1 (by default on nccl)", True),
        ("gloo", 4, None, "0 (by default on gloo)", False),
        ("nccl", 1, None, "0 (by default on one rank)", False),
        ("nccl", 4, 0, "0", False),
        ("gloo", 4, 1, "1", True),
        ("gloo", 4, None, "1 (by default on gloo between 2 hosts)", True),
    ],
)
def test_forward_gathers_ahead_where_something_can_run_beside(
    backend: str, ranks: int, asked: int | None, shown: str, ahead: bool
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hosts = 2 if "2 hosts" in shown else 1
    plan = graphshard.plan(
        model,
        graphshard.BlockPolicy({nn.Linear}, forward_prefetch=asked, merge_below=0),
        world_size=ranks,
        process_group_backend=backend,
        hosts=hosts,
        example_inputs=(torch.ones(2, 4),),
    )
    assert f", forward_prefetch={shown}, merge_below=0\n" in str(plan)
    events = [(event.op, event.unit) for event in plan.program.schedule()]
    gathered, run = events.index(("all_gather", "1")), events.index(("compute", "0"))
    assert (gathered < run) == ahead
    estimate = graphshard.simulate(
        model,
        policy=plan.policy,
        world_size=ranks,
        hardware="h100-sxm" if backend == "nccl" else "cpu-gloo",
        gpus_per_node=8 if backend == "nccl" else ranks // hosts,
        example_inputs=(torch.ones(2, 4),),
    )
    simulated = [(event.op, event.unit) for event in estimate.program.schedule()]
    assert simulated == events


def test_a_plan_is_for_the_machine_it_is_asked_about() -> None:
    model, policy = nn.Linear(2, 2), graphshard.SizePolicy(1)
    cpu = graphshard.SizePolicy(1, schedule="overlap", hardware="cpu-gloo")

    def place(policy: graphshard.Policy, **asked: str) -> tuple[str, str]:
        made = graphshard.plan(
            model, policy, world_size=2, example_inputs=(torch.zeros(1, 2),), **asked
        )
        assert made.program is not None
        return made.program.device, made.process_group_backend

    assert place(policy) == ("cuda", "nccl")
    assert place(policy, device="cpu") == ("cpu", "gloo")
    assert place(policy, process_group_backend="gloo") == ("cpu", "gloo")
    assert place(policy, device="cuda", process_group_backend="gloo") == ("cuda", "gloo")
    assert place(cpu) == ("cpu", "gloo")
    with pytest.raises(PolicyError, match="connects CUDA devices, and the program is for the CPU"):
        place(policy, device="cpu", process_group_backend="nccl")


def test_meshes_and_dtypes_may_be_text() -> None:
    model = nn.Linear(2, 2)
    precision = graphshard.MixedPrecision("bf16", "float32")
    assert precision == graphshard.MixedPrecision(torch.bfloat16, torch.float32)
    policy = graphshard.SizePolicy(1, strategy="HYBRID_SHARD", mixed_precision=precision)
    for text in ("2x4", "2 x 4", "(2, 4)", "2,4"):
        assert graphshard.plan(model, policy, mesh_shape=text).mesh_shape == (2, 4)
    with pytest.raises(PlanError, match=r"whole numbers, 1 or more, as in .* or 2x4; got '2y4'"):
        graphshard.plan(model, policy, mesh_shape="2y4")


def test_an_unknown_process_group_backend_is_refused() -> None:
    with pytest.raises(PolicyError, match='must be "nccl" or "gloo"; got \'mpi\''):
        graphshard.plan(nn.Linear(2, 2), graphshard.SizePolicy(1), process_group_backend="mpi")
    with pytest.raises(PolicyError, match="got 2 for 1 ranks by 'nccl'; give 1 to 1"):
        graphshard.plan(nn.Linear(2, 2), graphshard.SizePolicy(1), hosts=2)


def test_further_passes_run_last() -> None:
    seen = []

    class Look:
        name = "look"

        def apply(self, program: graphshard.Program, plan: graphshard.ShardingPlan) -> None:
            seen.append([event.op for event in program.schedule()])

    examples = tokens_of(0, 0)
    graphshard.plan(meta_gpt(), BLOCK, example_inputs=examples, passes=(Look(),))
    graphshard.compile(meta_gpt(), BLOCK, example_inputs=examples, passes=(Look(),))
    assert seen[0] == seen[1]
    assert "free" in seen[0]


def one_rank_group(rank: int) -> None:
    torch.manual_seed(0)
    model = TiedGPT(1)
    sharded = graphshard.compile(model, BLOCK)
    torch.manual_seed(0)
    loss = sharded(*tokens_of(0, 0))
    loss.backward()
    torch.manual_seed(0)
    expected = model(*tokens_of(0, 0))
    expected.backward()
    assert torch.equal(loss, expected)
    grad = sharded.get_parameter("embed.weight").grad
    assert (grad.full_tensor() - model.embed.weight.grad).abs().max() < 1e-6


def fake_ranks(rank: int) -> None:
    """Torch's "fake" backend: one real rank of eight, to measure without the others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    sharded = graphshard.compile(TiedGPT(1), BLOCK)
    sharded(*tokens_of(0, 0)).backward()
    assert sharded.get_parameter("embed.weight").grad.to_local().shape == (3, 16)


test_on_one_rank = on_ranks([one_rank_group, fake_ranks], 1)  # the last one ends the group


# -- what is refused, and how it is said -------------------------------------------------------

LINEAR = graphshard.BlockPolicy({nn.Linear})


class Named:
    name = "named"

    def apply(self, program: graphshard.Program, plan: graphshard.ShardingPlan) -> None:
        pass


class Applied:
    apply = Named.apply


@pytest.mark.parametrize("entry", [graphshard.compile, graphshard.plan])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"example_inputs": torch.ones(1, 2)}, r"example_inputs .* got a Tensor; pass \(x,\)"),
        ({"example_inputs": {"x": 1}}, "got a dict.*example_kwargs"),
        ({"example_kwargs": [("x", 1)]}, r"example_kwargs must be a dict .* got a list; pass \{"),
        ({"passes": Named()}, r"passes must be a list .*Named object.*pass \[it\]"),
        ({"passes": [Named]}, r"got the class Named; pass Named\(\) instead"),
        ({"passes": [Named(), Applied()]}, "a pass has a name .*Applied object.* lacks one"),
        ({"passes": ["named"]}, "a pass has a name .*'named' lacks one"),
        ({"policy": graphshard.BlockPolicy}, r"got the class BlockPolicy; call it: BlockPolicy\("),
        ({"policy": None}, "instance of a Policy; got None; use SizePolicy"),
        ({"policy": "block"}, r"got 'block'; what the command line calls block is BlockPolicy\(\)"),
    ],
)
def test_arguments_of_another_kind_are_refused(entry, arguments, said) -> None:
    with pytest.raises(PolicyError, match=said):
        entry(**{"model": nn.Linear(2, 2), "policy": LINEAR, **arguments})


def scripted() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(nn.Linear(2, 2))


@pytest.mark.parametrize("entry", [graphshard.compile, graphshard.plan])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (dict, r"must be an nn\.Module; got dict"),
        (lambda: nn.Linear, "got the class Linear; make an instance"),
        (lambda: graphshard.compile(nn.Linear(2, 2), LINEAR), "the model is sharded already"),
        (
            lambda: nn.Sequential(graphshard.compile(nn.Linear(2, 2), LINEAR)),
            "; 0 is sharded already",
        ),
        (lambda: nn.Sequential(scripted()), r"0 \(RecursiveScriptModule\) is a torch\.jit"),
        (lambda: nn.Sequential(nn.LazyLinear(2)), r"parameter '0\.weight' has no shape yet"),
        (lambda: nn.LazyBatchNorm1d(affine=False), "buffer 'running_mean' has no shape yet"),
    ],
)
def test_models_that_cannot_be_sharded_are_refused(entry, make, said) -> None:
    for policy in (LINEAR, graphshard.SizePolicy(min_num_params=1)):
        with pytest.raises(PlanError, match=said):
            entry(make(), policy)


def test_compile_in_inference_mode_is_refused() -> None:
    with torch.inference_mode(), pytest.raises(PlanError, match=r"compile outside of it"):
        graphshard.compile(nn.Linear(2, 2), LINEAR)


class Renaming(nn.Linear):
    def named_parameters(self, *args, **kwargs):
        return ((f"my_{name}", p) for name, p in super().named_parameters(*args, **kwargs))


class Hiding(nn.Linear):
    def named_parameters(self, *args, **kwargs):
        return (pair for pair in super().named_parameters(*args, **kwargs) if pair[0] != "bias")


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (
            checkpoint_wrapper(nn.Linear(2, 2)),
            "the model .CheckpointWrapper. gives weight, bias where the tree has "
            r"_checkpoint_wrapped_module\.weight.*recompute=\"units\"",
        ),
        (nn.Sequential(checkpoint_wrapper(nn.Linear(2, 2))), "of 0 .CheckpointWrapper. gives"),
        (nn.Sequential(Renaming(2, 2)), "of 0 .Renaming. gives my_weight, my_bias where"),
        (Hiding(2, 2), "the model .Hiding. gives nothing where the tree has bias"),
    ],
)
def test_renamed_parameters_are_refused(model, said) -> None:
    for entry in (graphshard.compile, graphshard.plan):
        with pytest.raises(PlanError, match=said):
            entry(model, LINEAR)


def test_names_hidden_below_the_root_are_of_no_concern() -> None:
    plan = graphshard.plan(nn.Sequential(Hiding(2, 2)), LINEAR)
    assert list(plan.layouts) == ["0.weight", "0.bias"]


class Extra(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}


def with_hook(register: str) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2))
    getattr(model[0], register)(lambda *args: None)
    return model


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (Extra(2, 2), r"extra state of the model \(Extra\)"),
        (with_hook("register_state_dict_post_hook"), r"state-dict hooks of 0 \(Linear\)"),
        (with_hook("register_state_dict_pre_hook"), r"state-dict hooks of 0 \(Linear\)"),
    ],
)
def test_state_that_is_not_carried_is_warned_of(model, said) -> None:
    for entry in (graphshard.compile, graphshard.plan):
        with pytest.warns(UserWarning, match=said) as caught:
            entry(model, LINEAR)
        assert [warning.filename for warning in caught] == [__file__]

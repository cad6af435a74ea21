"""Values in and out of shards: state dicts, full state dicts, initial values."""

from __future__ import annotations

import copy

import pytest
import torch
from full_tensors import full
from loops import same_step
from models import CASES, Block, Normed, Odd, TiedGPT, features_of, tokens_of
from ranks import checks_of, on_ranks
from state_checks import assert_same, full_state, seeded
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.errors import PlanError, RuntimeStateError

BLOCK = graphshard.BlockPolicy({Block})
LINEAR = graphshard.BlockPolicy({nn.Linear})


def assert_same_in_order(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert list(first) == list(second)
    assert_same(first, second)


class Initialized(nn.Module):
    """Built on meta: its own initialiser, a buffer the constructor computes, a tied parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 12), nn.BatchNorm1d(12), nn.Linear(12, 8))
        self.attend = nn.MultiheadAttention(8, 2)
        self.gain = nn.Parameter(torch.ones(5))
        self.register_buffer("table", torch.arange(5.0), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.gain, 0.25)
        self.table.copy_(torch.arange(5.0))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return (self.attend(y, y, y)[0].sum() + (self.gain * self.table).sum()).pow(2)


# -- on ranks -------------------------------------------------------------------------------------


def shards_values(rank: int) -> None:
    model = seeded(Odd, 0)
    sharded = graphshard.compile(model, BLOCK)
    assert_same_in_order(full_state(sharded), full_state(model))
    local = sharded.get_parameter("first.up.weight").to_local()
    assert torch.equal(local, model.first.up.weight[17 * rank : 17 * (rank + 1)])
    assert sharded.get_parameter("row").to_local().shape == (1 - rank, 16)


def takes_state_dicts_of_fully_shard(rank: int) -> None:
    theirs = seeded(TiedGPT, 1)
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    sharded = graphshard.compile(seeded(TiedGPT, 0), BLOCK)
    for assign in (False, True):
        sharded.load_state_dict(theirs.state_dict(), assign=assign)
        assert_same_in_order(full_state(sharded), full_state(theirs))
        assert sharded.get_parameter("head.weight") is sharded.get_parameter("embed.weight")
        loss = sharded.eval()(*tokens_of(rank, 0))
        with torch.no_grad():
            expected = seeded(TiedGPT, 1).eval()(*tokens_of(rank, 0))
        assert torch.equal(loss.detach(), expected)
    theirs.load_state_dict(sharded.state_dict())


def takes_the_first_ranks_model(rank: int) -> None:
    policy = graphshard.BlockPolicy({nn.Linear}, sync_module_states=True)
    if rank == 0:
        model = seeded(Normed, 5)
        model.body[1].running_mean.fill_(3.0)
    else:
        with torch.device("meta"):
            model = Normed()
    sharded = graphshard.compile(model, policy)
    expected = full_state(seeded(Normed, 5))
    expected["body.1.running_mean"] = torch.full((12,), 3.0)
    assert_same_in_order(full_state(sharded), expected)
    sharded(*features_of(rank, 0, 8))


def initializes_alike(rank: int) -> None:
    with torch.device("meta"):
        model = Initialized()
    sharded = graphshard.compile(model, LINEAR)
    with pytest.raises(
        RuntimeStateError, match=r"parameter 'gain' has no values yet.*init_weights"
    ):
        sharded(*features_of(rank, 0, 8))
    params = dict(sharded.named_parameters())
    torch.manual_seed(rank)
    state = torch.get_rng_state()
    sharded.init_weights(seed=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(sharded.get_parameter(name) is param for name, param in params.items())
    first = full_state(sharded)
    every: list = [None, None]
    torch.distributed.all_gather_object(every, first)
    assert_same_in_order(every[0], every[1])
    assert 0.3 < first["body.0.weight"].std() < 0.7
    assert (first["gain"] == 0.25).all()
    assert (first["body.1.running_var"] == 1).all()
    assert torch.equal(sharded.get_buffer("table"), torch.arange(5.0))
    sharded.init_weights(seed=4)
    assert not torch.equal(full(sharded.get_parameter("body.0.weight")), first["body.0.weight"])
    sharded(*features_of(rank, 0, 8)).backward()


def notices_replaced_storage(rank: int) -> None:
    sharded = graphshard.compile(seeded(TiedGPT, 0), BLOCK)
    sharded.eval()
    before = sharded(*tokens_of(rank, 0)).detach()
    for param in sharded.parameters():
        torch.utils.swap_tensors(param, nn.Parameter(param.double().float()))
    assert torch.equal(sharded(*tokens_of(rank, 0)).detach(), before)
    with pytest.raises(RuntimeStateError, match=r"cannot be cast or moved: 'embed.weight'"):
        sharded.to(torch.float64)
    assert sharded.float() is sharded
    param = sharded.get_parameter("embed.weight")
    torch.utils.swap_tensors(param, nn.Parameter(param.double()))
    with pytest.raises(RuntimeStateError, match=r"'embed.weight' is now .*float64"):
        sharded(*tokens_of(rank, 0))


test_on_two_ranks = on_ranks(checks_of(globals()), 2)


# -- on one ---------------------------------------------------------------------------------------


def test_a_single_rank_needs_no_process_group() -> None:
    with torch.device("meta"):
        model = Initialized()
    sharded = graphshard.compile(model, LINEAR)
    sharded.init_weights()
    assert all(type(p) is nn.Parameter for p in sharded.parameters())
    expected = full_state(sharded)
    other = graphshard.compile(copy.deepcopy(model), LINEAR)
    other.load_full_state_dict(expected)
    assert_same_in_order(full_state(other), expected)
    # Not in the state dict: computed as init_weights would.
    assert torch.equal(other.get_buffer("table"), torch.arange(5.0))
    assert torch.equal(other(*features_of(0, 0, 8)), sharded(*features_of(0, 0, 8)))


def test_values_written_in_place_count_as_loaded() -> None:
    with torch.device("meta"):
        model = TiedGPT(1)
    sharded = graphshard.compile(model, BLOCK)
    with torch.no_grad():
        for param in sharded.parameters():
            param.fill_(0.1)
    sharded(*tokens_of(0, 0))


def test_init_weights_is_for_meta_models() -> None:
    with pytest.raises(RuntimeStateError, match="this one came with weights"):
        graphshard.compile(TiedGPT(1), BLOCK).init_weights()


def test_what_cannot_be_initialised_is_named() -> None:
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.register_buffer("mask", torch.ones(3))

    with torch.device("meta"):
        model = nn.Sequential(Computed())
    sharded = graphshard.compile(model, LINEAR)
    with pytest.raises(RuntimeStateError, match=r"'0.mask' was left.*Computed a reset_parameters"):
        sharded.init_weights()


def test_a_failing_initialiser_is_named() -> None:
    class Broken(nn.Linear):
        def reset_parameters(self) -> None:
            if self.weight.device.type != "meta":
                raise ValueError("no")

    with torch.device("meta"):
        model = nn.Sequential(Broken(2, 2))
    with pytest.raises(RuntimeStateError, match=r"module 0 \(Broken\) failed: ValueError: no"):
        graphshard.compile(model, LINEAR).init_weights()


def test_parameters_must_be_contiguous() -> None:
    model = nn.Sequential(nn.Linear(4, 3))
    model[0].weight = nn.Parameter(torch.randn(4, 3).t())
    values = model[0].weight.detach().clone()
    with pytest.raises(PlanError, match=r"'0\.weight' is not contiguous") as caught:
        graphshard.compile(model, LINEAR)
    exec(str(caught.value).split("`")[1])  # the line of code that it advises
    assert torch.equal(graphshard.compile(model, LINEAR).get_parameter("0.weight"), values)


def test_models_that_cannot_be_copied_work() -> None:
    class Holder(nn.Linear):
        def __deepcopy__(self, memo: object) -> None:
            raise TypeError("holds a lock")

    model = nn.Sequential(Holder(3, 2))
    sharded = graphshard.compile(model, LINEAR)
    x = torch.randn(4, 3)
    assert torch.equal(sharded(x), model(x))
    sharded.eval()
    sharded(x)
    assert model.training


@pytest.mark.parametrize("name", ["llama", "gpt2", pytest.param("t5", marks=pytest.mark.slow)])
def test_from_meta(name: str) -> None:
    case = CASES[name]
    with torch.device("meta"):
        model = case.build().train()
    sharded = graphshard.compile(model, graphshard.BlockPolicy(), check=True)
    sharded.init_weights(seed=1)
    torch.manual_seed(2)
    real = case.build().train()
    for (name, mine), (_, theirs) in zip(
        sharded.named_parameters(), real.named_parameters(), strict=True
    ):
        if mine.numel() > 1:  # two draws: the ratio of their deviations is 1 ± 1 / sqrt(numel)
            rtol = 5 / mine.numel() ** 0.5
            torch.testing.assert_close(mine.std(), theirs.std(), rtol=rtol, atol=1e-3, msg=name)
    real.load_state_dict(sharded.state_dict())
    for (name, mine), (_, theirs) in zip(
        sharded.named_buffers(), real.named_buffers(), strict=True
    ):
        assert torch.equal(mine, theirs), name  # rotary frequencies are in no state dict
    same_step(real, sharded, **case.inputs(0))

"""What happens when ranks disagree, die or stay away: an error on every rank, never a hang."""

from __future__ import annotations

import os
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from models import Block, ManyOutputs, TiedGPT, features_of, tokens_of
from ranks import Checks, RankError, error_of, on_ranks, run_ranks
from torch import Tensor, nn

import graphshard
from graphshard.errors import CollectiveError, FingerprintError, PlanError, RuntimeStateError
from graphshard.runtime.gather import AllGather

BLOCK = graphshard.BlockPolicy({Block})


class Branching(nn.Module):
    """Runs its second layer only if told to."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.second = nn.Linear(6, 6)

    def forward(self, x: Tensor, deep: bool) -> Tensor:
        x = self.first(x)
        return (self.second(x) if deep else x).pow(2).mean()


def branching() -> graphshard.ShardedModule:
    torch.manual_seed(0)
    return graphshard.compile(Branching(), graphshard.BlockPolicy({nn.Linear}))


def other_batch_sizes_run(rank: int) -> None:
    sharded = graphshard.compile(TiedGPT(1), BLOCK)
    tokens = torch.zeros(2 + rank, 5 + 2 * rank, dtype=torch.int64)
    sharded(tokens, tokens).backward()
    tokens = torch.zeros(3, 3 + rank, dtype=torch.int64)
    sharded(tokens, tokens).backward()


def other_models(rank: int) -> None:
    message = error_of(lambda: graphshard.compile(TiedGPT(1 + rank), BLOCK), FingerprintError)
    assert "every rank calls graphshard.compile(TiedGPT, BlockPolicy), but" in message
    assert "rank 0: unit (root): strategy=FULL_SHARD, reshard=False" in message
    assert "rank 1: blocks.1.norm.weight of blocks.1: [16] float32, shard by dim 0" in message


def other_policies(rank: int) -> None:
    strategy = ("FULL_SHARD", "SHARD_GRAD_OP")[rank]
    policy = graphshard.BlockPolicy({Block}, strategy=strategy)
    message = error_of(lambda: graphshard.compile(TiedGPT(1), policy), FingerprintError)
    assert "rank 0: policy strategy=FULL_SHARD" in message
    assert "rank 1: policy strategy=SHARD_GRAD_OP" in message


def a_branch_on_one_rank(rank: int) -> None:
    x = features_of(rank, 0, 6)[0]
    message = error_of(lambda: branching()(x, rank == 1), FingerprintError)
    assert "rank 1: forward all_gather of second" in message


def other_buffers_to_synchronise(rank: int) -> None:
    policy = graphshard.BlockPolicy({Block}, sync_module_states=True)
    model = TiedGPT(1)
    model.register_buffer("extra", torch.ones(2 + rank))
    message = error_of(lambda: graphshard.compile(model, policy), FingerprintError)
    assert "rank 1's model is not rank 0's: 'extra' is torch.float32 [3] there" in message


class OfDtype(nn.Module):
    """A layer and a parameter of `dtype`, which it reads as float32."""

    def __init__(self, dtype: torch.dtype, frozen: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        values = torch.arange(1.0, 4.0)
        self.odd = nn.Parameter(values.to(dtype), requires_grad=not frozen)

    def forward(self, x: Tensor) -> Tensor:
        odd = torch.view_as_real(self.odd)[:, 0] if self.odd.is_complex() else self.odd.float()
        return self.layer(x) * odd


def frozen_parameters_of_any_dtype_move(rank: int) -> None:
    policy = graphshard.SizePolicy(sync_module_states=True)
    for dtype in (torch.int16, torch.float8_e4m3fn, torch.complex64, torch.bool):
        torch.manual_seed(rank)
        sharded = graphshard.compile(OfDtype(dtype, frozen=True), policy, check=True)
        torch.manual_seed(0)
        x = torch.ones(2, 3)
        assert torch.equal(sharded(x), OfDtype(dtype, frozen=True)(x))
        sharded(x).sum().backward()


def gradients_that_cannot_be_averaged(rank: int) -> None:
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        policy = graphshard.SizePolicy(strategy=strategy)
        sharded = graphshard.compile(OfDtype(torch.complex64, frozen=False), policy)
        message = error_of(lambda s=sharded: s(torch.ones(2, 3)), PlanError)
        assert "parameter 'odd' is complex64, which the backend 'gloo' cannot average" in message


@torch.library.custom_op("graphshard_tests::doubled", mutates_args=())
def doubled(x: Tensor) -> Tensor:
    """Gives float64, and states the dtype of `x`."""
    return x.double() * 2


doubled.register_fake(torch.empty_like)


class DoubledBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx, grad: Tensor) -> Tensor:
        return doubled(grad)


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x: Tensor) -> Tensor:
        return (DoubledBackward.apply(self.weight) * x).sum()


def a_gradient_of_another_dtype_than_stated(rank: int) -> None:
    """It is refused before the reduce that is made for the other dtype, in every call."""
    sharded = graphshard.compile(Doubled(), graphshard.SizePolicy())
    for _ in range(2):
        message = error_of(lambda: sharded(torch.ones(6)).backward(), RuntimeStateError)
        assert "graphshard_tests.doubled.default in backward gave" in message
        assert "torch.float64, its program says (6,) torch.float32" in message
        assert re.search(r"the backward of .*: return x \* 2", message)
        assert "reduce_scatter of unit (root) in backward is made for" in message


def other_outputs_used(rank: int) -> None:
    """Backward differs where ranks use different outputs."""
    sharded = graphshard.compile(ManyOutputs(), graphshard.BlockPolicy({nn.Linear}))
    out = sharded(*features_of(rank, 0, 6))
    target = out["loss"] if rank == 0 else out["pair"][1].sum()
    message = error_of(target.backward, FingerprintError)
    assert "rank 0: backward all_gather of left" in message
    assert "rank 1: backward all_gather of right" in message


ON_TWO = [
    other_batch_sizes_run,
    other_models,
    other_policies,
    a_branch_on_one_rank,
    other_buffers_to_synchronise,
    other_outputs_used,
    a_gradient_of_another_dtype_than_stated,
    frozen_parameters_of_any_dtype_move,
    gradients_that_cannot_be_averaged,
]

test_on_two_ranks = on_ranks(ON_TWO, 2)


def one_dies(rank: int, when: str) -> str:
    sharded = graphshard.compile(TiedGPT(1), BLOCK, check=when == "in a collective")
    if when != "in a new program":
        sharded(*tokens_of(rank, 0)).backward()
    if rank == 1:
        if when == "in a collective":
            AllGather.__call__ = lambda *_: os._exit(1)
            sharded(*tokens_of(rank, 0))
        os._exit(1)
    begin = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        sharded(*tokens_of(rank, 0))
    assert time.monotonic() - begin < 12.0
    return str(caught.value)


BEGIN = r"rank 0 of 2 is about to begin 'forward all_gather of .* over 2 ranks', but rank 1 died"


@pytest.mark.parametrize(
    ("when", "message"),
    [
        ("in a new program", BEGIN),
        ("in a known program", BEGIN),
        # The text ends with the backend's own, also where fx runs the program.
        (
            "in a collective",
            r"^all_gather of unit .* in forward failed on rank 0 of 2: another rank died[^\n]*\)$",
        ),
    ],
)
def test_a_dead_rank_is_an_error_on_the_others(when: str, message: str) -> None:
    text, _ = run_ranks(one_dies, 2, when, group_timeout=5.0, dying=frozenset({1}))
    with pytest.raises(AssertionError, match=message):
        raise AssertionError(text)


def one_calls_less(rank: int) -> str:
    sharded = branching()
    x = features_of(rank, 0, 6)[0]
    sharded(x, True).backward()
    if rank == 1:
        time.sleep(5.0)
        return ""
    with pytest.raises(CollectiveError) as caught:
        sharded(x, True).backward()
    return str(caught.value)


def test_a_rank_that_stays_away_is_an_error() -> None:
    text, _ = run_ranks(one_calls_less, 2, group_timeout=3.0)
    assert "did not get here within 3 s" in text


class FailingInTheMiddle(nn.Module):
    """An operator between the layers raises an error once it is armed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.ops.graphshard_tests.check(layer(x))
        return x.sum()


def fails_in_the_middle_of_a_step(rank: int, folder: Path) -> list[str]:
    armed = False

    @torch.library.custom_op("graphshard_tests::check", mutates_args=())
    def check(x: Tensor) -> Tensor:
        if armed and rank == 1:
            raise ValueError("a bad sample")
        return x.clone()

    check.register_fake(torch.empty_like)
    check.register_autograd(lambda _, grad: grad)
    sharded = graphshard.compile(FailingInTheMiddle(), graphshard.BlockPolicy({nn.Linear}))
    sharded(torch.ones(2, 16)).backward()
    armed = True
    begin = time.monotonic()
    with pytest.raises(ValueError if rank == 1 else CollectiveError, match=r"bad sample|all_gath"):
        sharded(torch.ones(2, 16)).backward()
    messages = []
    for name in ("emergency", "again"):
        with pytest.raises(CollectiveError) as caught:
            sharded.save_checkpoint(folder / name)
        messages.append(str(caught.value))
    assert time.monotonic() - begin < 20.0
    return messages


def test_an_error_in_the_middle_of_a_step_is_one_in_the_next_calls(tmp_path: Path) -> None:
    """A rank that left a step meets the others in the next call, who are in a gather."""
    found = run_ranks(fails_in_the_middle_of_a_step, 2, tmp_path, group_timeout=4.0)
    for rank, messages in enumerate(found):
        assert all(f"rank {rank} of 2 calls save_checkpoint(" in text for text in messages)
    assert not list(tmp_path.iterdir())


# -- the harness itself ---------------------------------------------------------------------------


def raises_on_one(rank: int) -> int:
    if rank == 1:
        raise ValueError("on purpose")
    return rank


def test_the_harness_shows_a_ranks_traceback() -> None:
    with pytest.raises(RankError, match=r"rank 1 raised:(.|\n)*ValueError: on purpose"):
        run_ranks(raises_on_one, 2)


def exits(rank: int) -> None:
    os._exit(3)


def test_the_harness_notices_a_rank_without_result() -> None:
    with pytest.raises(RankError, match="rank 0 ended with code 3 and no result"):
        run_ranks(exits, 1)


def aborts(rank: int) -> None:
    os.write(2, b"what C++ says")
    os.abort()


def test_the_harness_tells_what_an_aborted_rank_said() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(aborts, 1)
    assert re.search(r"ended with code -6(.|\n)*what C\+\+ says(.|\n)*in aborts", str(caught.value))


def aborts_after_its_result(rank: int) -> None:
    if rank == 0:
        threading.Timer(0.3, os.abort).start()
    else:
        time.sleep(1.0)  # for which rank 0 waits


def test_the_harness_notices_an_abort_after_the_result() -> None:
    with pytest.raises(RankError, match=r"rank 0 ended with code -6 and a result"):
        run_ranks(aborts_after_its_result, 2)


def aborts_after_an_error(rank: int) -> None:
    if rank == 0:
        raise ValueError("on purpose")
    time.sleep(1)
    os.abort()


def test_the_harness_tells_the_first_error_first() -> None:
    with pytest.raises(RankError, match=r"^rank 0 raised:(.|\n)*rank 1 ended with code -6"):
        run_ranks(aborts_after_an_error, 2)


def sleeps(rank: int) -> None:
    time.sleep(60)


def test_the_harness_kills_what_hangs() -> None:
    with pytest.raises(RankError, match="rank 0 was still running after 2 s"):
        run_ranks(sleeps, 1, timeout=2.0)


def first_check(rank: int) -> None:
    assert rank == 0


def second_check(rank: int) -> None:
    pass


def test_the_harness_reports_failed_checks() -> None:
    checks = Checks([second_check, first_check], 2, group_timeout=5.0)
    checks.require(second_check)
    with pytest.raises(RankError, match="first_check on rank"):
        checks.require(first_check)

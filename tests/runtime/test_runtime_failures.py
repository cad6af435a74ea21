"""What happens when ranks disagree, die or stay away: an error on every rank, never a hang."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, TiedGPT, tokens_of
from ranks import Checks, RankError, checks_of, error_of, on_ranks, run_ranks
from torch import Tensor, nn

import graphshard
from graphshard.errors import (
    CaptureError,
    CollectiveError,
    FingerprintError,
    GraphshardError,
    PlanError,
    RuntimeStateError,
)
from graphshard.runtime import group as of_groups
from graphshard.runtime.collectives import wait
from graphshard.runtime.gather import AllGather
from graphshard.torch_private.dtensors import full_tensor

BLOCK = graphshard.BlockPolicy({Block})


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
        sharded = graphshard.compile(OfDtype(torch.complex32, frozen=False), policy)
        message = error_of(lambda s=sharded: s(torch.ones(2, 3)), PlanError)
        assert "parameter 'odd' is complex32, which the backend 'gloo' cannot average" in message


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


test_on_two_ranks = on_ranks(checks_of(globals()), 2)


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
        pytest.param("in a known program", BEGIN, marks=pytest.mark.slow),
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
    sharded = graphshard.compile(TiedGPT(1), BLOCK)
    sharded(*tokens_of(rank, 0)).backward()
    if rank == 1:
        time.sleep(5.0)
        return ""
    with pytest.raises(CollectiveError) as caught:
        sharded(*tokens_of(rank, 0)).backward()
    return str(caught.value)


@pytest.mark.slow
def test_a_rank_that_stays_away_is_an_error() -> None:
    text, _ = run_ranks(one_calls_less, 2, group_timeout=3.0)
    assert "did not get here within 3 s" in text


# -- a rank that leaves a step, and goes on ----------------------------------------------------


class Leaving(nn.Module):
    """Operators between the layers do on a rank what it is told, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = torch.ops.graphshard_tests.may_leave(layer(x), f"forward {number}")
        return x.pow(2).mean()


DOES: dict[str, Callable[[], None]] = {}
"""What this rank does at a place, once."""


@cache
def define_may_leave() -> None:
    @torch.library.custom_op("graphshard_tests::may_leave", mutates_args=())
    def may_leave(x: Tensor, place: str) -> Tensor:
        DOES.pop(place, lambda: None)()
        return x.clone()

    may_leave.register_fake(lambda x, place: torch.empty_like(x))
    may_leave.register_autograd(
        lambda ctx, grad: (may_leave(grad, f"backward {ctx.place[-1]}"), None),
        setup_context=lambda ctx, inputs, output: setattr(ctx, "place", inputs[1]),
    )


def leave_by(error: BaseException) -> Callable[..., None]:
    def leave(*_: Any) -> None:
        raise error

    return leave


def bad(*_: Any) -> None:
    raise ValueError("a bad sample")


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


StepOf = Callable[[graphshard.ShardedModule, Tensor], object]


def train(sharded: graphshard.ShardedModule, x: Tensor) -> Tensor:
    loss = sharded(x)
    loss.backward()
    return loss.detach()


def at(place: str, does: Callable[[], None]) -> StepOf:
    def step(sharded: graphshard.ShardedModule, x: Tensor) -> None:
        DOES[place] = does
        train(sharded, x)

    return step


def with_hook(register: str) -> StepOf:
    """A step in which a hook of the middle layer's weight raises."""

    def step(sharded: graphshard.ShardedModule, x: Tensor) -> None:
        handle = getattr(sharded.get_parameter("layers.1.weight"), register)(bad)
        try:
            train(sharded, x)
        finally:
            handle.remove()

    return step


def write_between(sharded: graphshard.ShardedModule, x: Tensor) -> None:
    loss = sharded(x)
    with torch.no_grad():
        sharded.get_parameter("layers.1.weight").mul_(1.0)
    loss.backward()


def hook_of_loss(sharded: graphshard.ShardedModule, x: Tensor) -> None:
    loss = sharded(x)
    loss.register_hook(bad)
    loss.backward()


def output_never_used(sharded: graphshard.ShardedModule, x: Tensor) -> None:
    sharded(x)
    raise ValueError("a bad sample")


TOLD: dict[str, tuple[StepOf, type[BaseException], str]] = {
    **{
        f"an error in {place}": (at(place, bad), ValueError, "failed: ValueError: a bad sample (on")
        for place in ("forward 0", "forward 2", "backward 2", "backward 0")
    },
    "Ctrl-C in backward": (
        at("backward 1", interrupt), KeyboardInterrupt, "backward failed: KeyboardInterrupt",
    ),
    "an exit in backward": (
        at("backward 1", leave_by(SystemExit(3))), SystemExit, "backward failed: SystemExit: 3",
    ),
    "a wrong input": (lambda sharded, _: sharded(torch.ones(2, 5)), CaptureError, "(on rank 1)"),
    "a parameter written between": (write_between, RuntimeStateError, "between a forward and its"),
    **{
        register: (with_hook(register), ValueError, "the hooks of gradients failed: ValueError")
        for register in ("register_hook", "register_post_accumulate_grad_hook")
    },
}  # fmt: skip
"""A step of rank 1, the error that ends it, and what the error of the same step says on rank 0."""

LATER: dict[str, tuple[StepOf, type[BaseException]]] = {
    "Ctrl-C in forward": (at("forward 1", interrupt), KeyboardInterrupt),
    "an exit in forward": (at("forward 1", leave_by(SystemExit(3))), SystemExit),
    "a hook of the loss": (hook_of_loss, ValueError),
    "an output never used": (output_never_used, ValueError),
}
"""A step that rank 1 leaves without a word. That of rank 0 fails once rank 1 begins its next.

Under NO_SHARD, where no rank waits for another in forward, the two run on as if rank 1 had skipped
the batch."""


class StepsOf:
    """A module whose steps, each time, must give the numbers of the first."""

    def __init__(self, rank: int, policy: graphshard.Policy) -> None:
        define_may_leave()
        torch.manual_seed(0)
        self.sharded = graphshard.compile(Leaving(), policy)
        self.x = torch.randn(2, 16, generator=torch.Generator().manual_seed(rank))
        self.first: list[Tensor] | None = None
        self.are_right()

    def are_right(self) -> None:
        """Two steps, of which the second may find parameters unchanged."""
        for _ in range(2):
            self.sharded.zero_grad()
            values = [train(self.sharded, self.x)]
            values += [full_tensor(p.grad).clone() for p in self.sharded.parameters()]
            self.first = self.first or values
            assert all(map(torch.equal, values, self.first))
        self.sharded.zero_grad()
        with torch.no_grad():  # so that rows are gathered under SHARD_OPTIMIZER, too
            for param in self.sharded.parameters():
                param.mul_(1.0)

    def fails(self, step: StepOf, error: type[BaseException]) -> str:
        """Its error, which comes soon; no gradient is set unless by the step's own hooks."""
        begin = time.monotonic()
        with pytest.raises(error) as caught:
            step(self.sharded, self.x)
        assert time.monotonic() - begin < 20.0  # not the group's timeout of 60
        return str(caught.value)


def leaves_steps(rank: int, policy: graphshard.Policy) -> None:
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a background job ignores
    steps, last = StepsOf(rank, policy), dist.get_world_size() - 1
    for name, (step, error, told) in TOLD.items():
        keeps = policy.strategy in ("SHARD_GRAD_OP", "HYBRID_SHARD_ZERO2")
        keeps |= policy.strategy == "FULL_SHARD" and policy.reshard_after_forward is not True
        if step is write_between and keeps:
            continue  # whose backward reads what forward gathered
        leaves = rank == last
        says = steps.fails(step if leaves else train, error if leaves else GraphshardError)
        assert leaves or told.replace("rank 1", f"rank {last}") in says, (name, says)
        assert "hook" in told or all(p.grad is None for p in steps.sharded.parameters())
        steps.are_right()
    for step, error in LATER.values() if policy.strategy != "NO_SHARD" else ():
        if rank == last:
            steps.fails(step, error)
        steps.fails(train, FingerprintError)
        steps.are_right()
    if policy.check_finite is None:  # or ranks meet at the end of forward
        leaves_alone(rank == last, steps)
    leaves_micro_batches(rank == last, steps)


def leaves_alone(leaves: bool, steps: StepsOf) -> None:
    """Without gradients, what the others gather is right, and they need not know."""
    assert steps.first is not None
    with torch.no_grad():
        for place in ("forward 0", "forward 2"):
            if leaves:
                steps.fails(at(place, bad), ValueError)
            else:
                assert torch.equal(steps.sharded(steps.x), steps.first[0])
    steps.are_right()


def leaves_micro_batches(leaves: bool, steps: StepsOf) -> None:
    """Accumulated gradients of which some miss a micro-batch are never used."""
    sharded, x = steps.sharded, steps.x
    with sharded.no_sync():
        train(sharded, x)
        meets = sharded.lowered[-1].graph.find_nodes(op="call_function", target=wait)
        if leaves:
            steps.fails(at("backward 1", bad), ValueError)
        elif meets:
            steps.fails(train, CollectiveError)
        else:
            train(sharded, x)
    if not (leaves or meets):  # rank 0 is told once it meets the others again
        first = steps.fails(train, GraphshardError)
        assert "ValueError: a bad sample" in first or "are incomplete" in first
        still = 1 if "are incomplete" in first else 2
    else:
        still = 2
    for _ in range(still):
        assert "are incomplete, since a backward" in steps.fails(train, RuntimeStateError)
    steps.are_right()


def of_strategy(strategy: str, **options: Any) -> graphshard.Policy:
    return graphshard.BlockPolicy({nn.Linear}, strategy=strategy, **options)


MIXED = graphshard.MixedPrecision(param_dtype=torch.bfloat16)
LEFT = {
    "FULL_SHARD": of_strategy("FULL_SHARD", reshard_after_forward=True),
    "SHARD_OPTIMIZER": of_strategy("SHARD_OPTIMIZER"),
    "SHARD_GRAD_OP": of_strategy("SHARD_GRAD_OP"),
    "NO_SHARD": of_strategy("NO_SHARD"),
    "offload": of_strategy("FULL_SHARD", mixed_precision=MIXED, offload="params"),
    "checks": of_strategy(
        "FULL_SHARD", check_finite="error", forward_prefetch=1, reshard_after_forward=True
    ),
}
LEFT_BY_FOUR = {
    "HYBRID_SHARD": of_strategy("HYBRID_SHARD", reshard_after_forward=True),
    "HYBRID_SHARD_ZERO2": of_strategy("HYBRID_SHARD_ZERO2"),
    "groups of 2": of_strategy("FULL_SHARD", reshard_after_forward=2),
}


def leaves_steps_of(rank: int, *policies: graphshard.Policy) -> None:
    for policy in policies:
        leaves_steps(rank, policy)


def leaves_steps_of_collectives(rank: int) -> None:
    """Gloo's own, as more than eight ranks use."""
    of_groups.MAX_RANKS = 1
    leaves_steps_of(rank, *LEFT.values())


def test_a_rank_leaves_a_step() -> None:
    run_ranks(leaves_steps_of, 2, LEFT["FULL_SHARD"], LEFT["SHARD_OPTIMIZER"], timeout=240)


@pytest.mark.slow
def test_a_rank_leaves_a_step_of_other_policies() -> None:
    run_ranks(leaves_steps_of, 2, *[*LEFT.values()][2:], timeout=300)


@pytest.mark.slow
def test_a_rank_leaves_a_step_of_collectives() -> None:
    run_ranks(leaves_steps_of_collectives, 2, timeout=300)


@pytest.mark.slow
def test_one_of_four_ranks_leaves_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    run_ranks(leaves_steps_of, 4, *LEFT_BY_FOUR.values(), timeout=300)


# -- the harness itself ---------------------------------------------------------------------------


def raises_on_one(rank: int) -> int:
    if rank == 1:
        raise ValueError("on purpose")
    return rank


def aborts(rank: int) -> None:
    os.write(2, b"what C++ says")
    os.abort()


def sleeps(rank: int) -> None:
    time.sleep(60)


@pytest.mark.parametrize(
    ("function", "ranks", "told"),
    [
        (raises_on_one, 2, r"rank 1 raised:(.|\n)*ValueError: on purpose"),
        (aborts, 1, r"ended with code -6(.|\n)*what C\+\+ says(.|\n)*in aborts"),
        pytest.param(sleeps, 1, "rank 0 was still running after 3 s", marks=pytest.mark.slow),
    ],
)
def test_the_harness_tells_how_ranks_failed(
    function: Callable[[int], object], ranks: int, told: str
) -> None:
    with pytest.raises(RankError, match=told):
        run_ranks(function, ranks, timeout=3.0 if function is sleeps else 8.0)


def first_check(rank: int) -> None:
    assert rank == 0


def second_check(rank: int) -> None:
    pass


def test_the_harness_reports_failed_checks() -> None:
    checks = Checks([second_check, first_check], 2, group_timeout=5.0)
    checks.require(second_check)
    with pytest.raises(RankError, match="first_check on rank"):
        checks.require(first_check)

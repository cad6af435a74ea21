"""Bytes: what is gathered, saved and freed, and when. Counted, not timed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import checks_of, on_ranks
from torch import Tensor, nn

import graphshard
from examples.benchmarks.live_bytes import LiveBytes
from graphshard.errors import RuntimeStateError
from graphshard.planning.plan import ShardingPlan
from graphshard.program.program import Program
from graphshard.runtime.collectives import BoundCollective, Pending

# -- a model whose bytes can be counted by hand ----------------------------------------------------


WIDTH = 256
LAYER = WIDTH * WIDTH * 4  # bytes of a layer's weight
BATCH = 64
ACTIVATION = BATCH * WIDTH * 4


class Stack(nn.Module):
    """Layers as large as each other, without biases: bytes can be counted on fingers."""

    def __init__(self, layers: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def stack(**policy: object) -> tuple[graphshard.ShardedModule, Tensor]:
    torch.manual_seed(0)
    sharded = graphshard.compile(
        Stack(), graphshard.BlockPolicy({nn.Linear}, merge_below=0, **policy)
    )
    x = torch.randn(BATCH, WIDTH)
    sharded(x).backward()  # captures, agrees and allocates what stays
    sharded.zero_grad()
    return sharded, x


def counted(sharded: graphshard.ShardedModule, x: Tensor) -> tuple[LiveBytes, int]:
    """A counter, and the bytes of what lives anyway: shards and input."""
    live = LiveBytes()
    live.add([*sharded.parameters(), x])
    return live, live.current


def settles(live: LiveBytes, expected: int) -> None:
    """What no `free` gave back goes when Gloo's threads let go of their views of it."""
    for _ in range(500):
        if live.current == expected:
            return
        time.sleep(0.01)
    assert live.current == expected


# -- tests -----------------------------------------------------------------------------------------


HOARD: list[Any] = []


def hoard(rank: int) -> None:
    """From now on collectives' arguments are referred to for ever; Gloo's threads do so a while."""
    start = BoundCollective.start

    def hoarding(
        self: BoundCollective, pending: Pending, launch: Callable[..., Any], *args: Any
    ) -> None:
        def kept(*given: Any) -> Any:
            HOARD.append(given)
            return launch(*given)

        start(self, pending, kept, *args)

    BoundCollective.start = hoarding  # type: ignore[method-assign]


def forward_holds_one_unit_at_a_time(rank: int) -> None:
    sharded, x = stack(reshard_after_forward=True)
    live, base = counted(sharded, x)
    with live:
        loss = sharded(x)
        assert live.current == base + 6 * ACTIVATION + 4
    assert live.peak - base <= LAYER + 6 * ACTIVATION
    del loss


def a_gather_is_kept_until_its_backward_is_done(rank: int) -> None:
    sharded, x = stack(strategy="SHARD_GRAD_OP")
    live, base = counted(sharded, x)
    with live:
        loss = sharded(x)
        # All but the first, which no backward reads since the input needs no gradient.
        assert live.current == base + 5 * LAYER + 6 * ACTIVATION + 4
        del loss  # nobody ran backward
        settles(live, base)
        loss = sharded(x)
        loss.backward()
        assert live.current == base + 6 * LAYER // 2 + 4
        grads = [p.grad.to_local() for p in sharded.parameters()]
        assert sum(g.untyped_storage().nbytes() for g in grads) == 6 * LAYER // 2


def the_last_unit_stays_for_backward(rank: int) -> None:
    sharded, x = stack()
    live, base = counted(sharded, x)
    with live:
        loss = sharded(x)
        assert live.current == base + LAYER + 6 * ACTIVATION + 4
        loss.backward()
        assert live.current == base + 6 * LAYER // 2 + 4
        loss = sharded(x)
        del loss  # nobody ran backward
        settles(live, base + 6 * LAYER // 2)


def backward_releases_activations_as_it_goes(rank: int) -> None:
    sharded, x = stack(reshard_after_forward=True)
    wide = x.repeat(64, 1)  # activations far larger than weights
    sharded(wide).backward()
    sharded.zero_grad()
    live, base = counted(sharded, wide)
    with live:
        loss = sharded(wide)
        assert live.current == base + 6 * 64 * ACTIVATION + 4
        live.peak = 0
        loss.backward()
        # One gradient of that size comes for each activation that goes.
        assert live.peak - base <= (6 + 2) * 64 * ACTIVATION + 4 * LAYER
        assert live.current == base + 6 * LAYER // 2 + 4


def kept_parts_go_with_the_gather_that_reads_them(rank: int) -> None:
    class Named(Stack):  # fx writes names of nodes in lower case
        def __init__(self) -> None:
            super().__init__()
            self.FirstLayers = self.layers
            del self.layers

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.FirstLayers:
                x = torch.tanh(layer(x))
            return x.sum()

    torch.manual_seed(0)
    # Groups of one rank keep whole parameters: their own copies.
    policy = graphshard.BlockPolicy({nn.Linear}, reshard_after_forward=1, merge_below=0)
    sharded = graphshard.compile(Named(), policy)
    x = torch.randn(BATCH, WIDTH)
    sharded(x).backward()
    for half in sharded.lowered:
        for node in half.graph.nodes:
            if node.op == "placeholder":
                assert node.target == node.name
                assert f"{node.name} = {node.name}" not in half.code
    assert "firstlayers" in sharded.lowered[-1].code.replace("_", "")


test_on_two_ranks = on_ranks(checks_of(globals()), 2)


class FreeTooEarly:
    """A wrong pass: moves each free to right behind its wait."""

    name = "free_too_early"

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        from graphshard.program import ops

        for node in list(program.nodes()):
            if ops.op_name(node) == "free":
                node.args[0].append(node)  # type: ignore[union-attr]


def test_checking_mode_shows_a_use_after_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphshard.pipeline.verify", lambda *args, **kwargs: None)
    torch.manual_seed(0)
    x = torch.randn(BATCH, WIDTH)
    losses = []
    for check in (False, True):
        policy = graphshard.BlockPolicy({nn.Linear}, merge_below=0)
        sharded = graphshard.compile(Stack(2), policy, passes=(FreeTooEarly(),), check=check)
        losses.append(sharded(x))
    assert losses[0].isfinite()  # luck: on a single rank nothing is freed
    assert losses[1].isnan()


def test_the_environment_turns_checking_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphshard.pipeline.verify", lambda *args, **kwargs: None)
    monkeypatch.setenv("GRAPHSHARD_CHECK", "1")
    policy = graphshard.BlockPolicy({nn.Linear}, merge_below=0)
    sharded = graphshard.compile(Stack(2), policy, passes=(FreeTooEarly(),))
    assert sharded(torch.randn(BATCH, WIDTH)).isnan()


class WrongShape:
    """A wrong pass: claims another shape than the value has."""

    name = "wrong_shape"

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        node = next(n for n in program.nodes() if n.target is torch.ops.aten.tanh.default)
        node.meta["val"] = node.meta["val"].new_empty((1, 2))


def test_checking_mode_holds_values_against_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graphshard.pipeline.verify", lambda *args, **kwargs: None)
    policy = graphshard.BlockPolicy({nn.Linear}, merge_below=0)
    sharded = graphshard.compile(Stack(2), policy, passes=(WrongShape(),), check=True)
    with pytest.raises(RuntimeStateError, match=r"node tanh in forward gave \(64, 256\)"):
        sharded(torch.randn(BATCH, WIDTH))

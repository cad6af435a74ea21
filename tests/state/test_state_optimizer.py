"""Optimizer state by names: sharded, whole and local, out and back in, and what does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, Odd, TiedGPT, features_of, tokens_of
from ranks import checks_of, error_of, on_two_or_four_ranks
from state_checks import assert_same, flat, full_state, on_meta, refuses, seeded, shared_folder
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import CheckpointError

BLOCK = graphshard.BlockPolicy({Block})


def small() -> nn.Module:
    return TiedGPT(1)


def groups_of(module: nn.Module) -> list[dict[str, Any]]:
    named = list(module.named_parameters())
    return [
        {"params": [p for n, p in named if n.endswith("bias")], "weight_decay": 0.0},
        {"params": [p for n, p in named if not n.endswith("bias")], "lr": 2e-3},
    ]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups_of(module), lr=1e-3)


def sgd(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)


def step(module: nn.Module, optim: torch.optim.Optimizer, number: int) -> None:
    batch = tokens_of if hasattr(module, "head") else lambda r, s: features_of(r, s, 16)
    module(*batch(dist.get_rank(), number)).backward()
    optim.step()
    optim.zero_grad()


def same_as_fully_shard(rank: int) -> None:
    theirs = seeded(small).eval()
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    sharded = graphshard.compile(seeded(small).eval(), BLOCK)
    ours, other = adamw(sharded), adamw(theirs)
    for number in range(2):
        step(sharded, ours, number)
        step(theirs, other, number)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    expected = get_optimizer_state_dict(theirs, other, options=options)
    whole = sharded.optimizer_state_dict(ours, kind="full")
    if rank == 0:
        found, wanted = flat(whole), flat(expected)
        assert sorted(found) == sorted(wanted)
        exact = dist.get_world_size() == 2  # of more, the order of the sum differs
        for name, value in found.items():
            tolerance = {"rtol": 0, "atol": 0} if exact else {"rtol": 1e-4, "atol": 1e-6}
            torch.testing.assert_close(value, wanted[name], **tolerance)
        assert [sorted(g["params"]) for g in whole["param_groups"]] == [
            sorted(g["params"]) for g in expected["param_groups"]
        ]
    # Theirs goes into ours, and ours into theirs.
    sharded.load_optimizer_state_dict(adamw(sharded), expected)
    set_optimizer_state_dict(
        theirs,
        other,
        whole if rank == 0 else {},
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True),
    )
    sharded.load_optimizer_state_dict(ours, get_optimizer_state_dict(theirs, other))


def training_goes_on_bit_equal(rank: int) -> None:
    for kind, make in ((small, adamw), (Odd, sgd)):
        sharded = graphshard.compile(seeded(kind), BLOCK)
        optim = make(sharded)
        step(sharded, optim, 0)
        step(sharded, optim, 1)
        state = {
            form: copy.deepcopy(sharded.optimizer_state_dict(optim, kind=form))
            for form in ("sharded", "local", "full")
        }
        assert (state["full"] == {}) == (rank > 0)
        everywhere = sharded.optimizer_state_dict(optim, kind="full", rank0_only=False, cpu=False)
        assert_same(flat(everywhere), flat(state["sharded"]))
        for form in ("sharded", "local"):
            kinds = {type(v) for e in state[form]["state"].values() for v in e.values()}
            assert (DTensor in kinds) == (form == "sharded")
        values = sharded.full_state_dict()
        random = torch.get_rng_state()
        step(sharded, optim, 2)
        expected = full_state(sharded)
        again = graphshard.compile(on_meta(kind), BLOCK)
        for form in ("sharded", "local", "full", "full", "everywhere"):
            again.load_full_state_dict(values)
            other = make(again)
            given = everywhere if form == "everywhere" else state[form]
            again.load_optimizer_state_dict(other, given, kind="local" if form == "local" else None)
            torch.set_rng_state(random)
            step(again, other, 2)
            assert_same(full_state(again), expected)


def groups_are_found_by_names(rank: int) -> None:
    sharded = graphshard.compile(seeded(small), BLOCK)
    optim = adamw(sharded)
    step(sharded, optim, 0)
    state = sharded.optimizer_state_dict(optim, kind="full", rank0_only=False)
    other = torch.optim.AdamW(
        [{**g, "params": g["params"][::-1], "lr": 5.0} for g in groups_of(sharded)[::-1]]
    )
    sharded.load_optimizer_state_dict(other, state)
    assert [g["lr"] for g in other.param_groups] == [2e-3, 1e-3]
    assert [g["weight_decay"] for g in other.param_groups] == [1e-2, 0.0]
    assert_same(flat(sharded.optimizer_state_dict(other)), flat(state))


def refuses_what_does_not_fit(rank: int) -> None:
    sharded = graphshard.compile(seeded(small), BLOCK)
    optim = adamw(sharded)
    step(sharded, optim, 0)
    good = sharded.optimizer_state_dict(optim, kind="full", rank0_only=False)
    name = "blocks.0.up.bias"

    def changed(change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
        state = copy.deepcopy(good)
        change(state)
        return state

    def put(key: str, value: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda state: state["state"][name].update({key: value})

    cases = [
        (changed(lambda s: s["param_groups"][0]["params"].remove(name)), f"no '{name}' in any"),
        (
            changed(lambda s: s["param_groups"][0]["params"].append("no")),
            "'no', which the model does not have",
        ),
        (changed(lambda s: s["state"].update(no={})), "'no', which the model does not have"),
        (changed(lambda s: s["param_groups"][0].update(params=[0, 1])), r"are numbers \(0\)"),
        (changed(lambda s: s.pop("param_groups")), 'has "state"'),
        (changed(put("exp_avg", torch.ones(7))), rf"'{name}'.exp_avg has shape \[7\]"),
        (changed(put("exp_avg", torch.arange(33))), f"'{name}'.exp_avg is torch.int64"),
        ({}, "state dict is empty"),
        (
            changed(
                lambda s: s["param_groups"][1]["params"].append(
                    s["param_groups"][0]["params"].pop()
                )
            ),
            "group the parameters",
        ),
    ]

    def state() -> dict[str, Tensor]:
        return {
            k: v.clone() for k, v in flat(sharded.optimizer_state_dict(optim, kind="local")).items()
        }

    for bad, message in cases:
        refuses(sharded, lambda b=bad: sharded.load_optimizer_state_dict(optim, b), message, state)
    first = [bad for bad, _ in cases]
    mine = first[5] if rank == 1 else good
    message = r"exp_avg has shape \[7\].*on rank 1"
    refuses(sharded, lambda: sharded.load_optimizer_state_dict(optim, mine), message, state)
    only = first[5] if rank == 0 else None
    message = r"exp_avg has shape \[7\]"
    refuses(sharded, lambda: sharded.load_optimizer_state_dict(optim, only), message, state)
    strange = sgd(seeded(small))
    for call in (
        lambda: sharded.optimizer_state_dict(strange),
        lambda: sharded.load_optimizer_state_dict(strange, good),
    ):
        with pytest.raises(CheckpointError, match="parameter 0 of the optimizer's group 0"):
            call()
    with pytest.raises(CheckpointError, match="kind must be one of"):
        sharded.optimizer_state_dict(optim, kind="flat")
    frozen = torch.optim.AdamW([sharded.get_parameter(name)])
    message = "which this optimizer does not train"
    refuses(sharded, lambda: sharded.load_optimizer_state_dict(frozen, good), message)


class WithScale(torch.optim.Optimizer):
    """Steps by the largest gradient that it has seen, which is that of a rank's own rows."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["step"] = state.get("step", 0) + 1
                largest = param.grad.abs().max() if param.numel() else torch.zeros(())
                state["scales"] = (largest.view(1).clone(),)
                state["largest"] = float(largest)
                param.sub_(param.grad, alpha=0.01)


def state_of_a_ranks_own_rows_is_refused(rank: int) -> None:
    sharded = graphshard.compile(seeded(lambda: nn.Linear(8, 8)), graphshard.SizePolicy(1))
    optim = sharded.optimizer(WithScale, elementwise=True)
    (sharded(torch.ones(4, 8)) * torch.arange(8.0)).square().sum().backward()
    optim.step()
    for call in (
        lambda: sharded.save_checkpoint(shared_folder() / "c", optim),
        lambda: sharded.save_checkpoint(shared_folder() / "c", optim, background=True),
        lambda: sharded.optimizer_state_dict(optim, kind="full"),
    ):
        message = error_of(call, CheckpointError)
        assert "'largest' of 'bias', 'largest' of 'weight', 'scales' of 'bias'" in message
        assert "differs between ranks (rank 0 and rank 1)" in message
        assert "step" not in message.partition("is not laid out")[0]
    for state in optim.state.values():
        state["largest"], state["scales"] = 1.0, (torch.ones(1),)
    folder = shared_folder()
    sharded.save_checkpoint(folder / "c", optim)
    sharded.load_checkpoint(folder / "c", optim)


test_on_ranks = on_two_or_four_ranks(checks_of(globals()), timeout=300)


def test_a_single_rank_without_a_group() -> None:
    model = seeded(Odd)
    sharded = graphshard.compile(model, BLOCK)
    optim = adamw(sharded)
    for form in ("sharded", "full", "local"):
        sharded(*features_of(0, 0, 16)).backward()
        optim.step()
        state = copy.deepcopy(sharded.optimizer_state_dict(optim, kind=form))
        other = adamw(sharded)
        sharded.load_optimizer_state_dict(other, state, kind=form)
        assert_same(flat(sharded.optimizer_state_dict(other)), flat(state))

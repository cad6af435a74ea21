"""Optimizers that step on local tensors: values, state and gradients as on DTensors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full
from loops import compiled
from models import Block, Odd, TiedGPT, features_of, tokens_of
from ranks import checks_of, on_ranks
from state_checks import assert_same, flat, seeded, shared_folder
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import PolicyError
from graphshard.module.optimizers import ELEMENTWISE

KINDS = {name: getattr(torch.optim, name) for name in ELEMENTWISE}
NO_DECAY = [(r"bias|norm", {"lr": 3e-3})]


def odd() -> nn.Module:
    return seeded(Odd)


def gpt() -> nn.Module:
    return seeded(lambda: TiedGPT(1))


def backward(sharded: graphshard.ShardedModule, step: int) -> None:
    rank = dist.get_rank()
    batch = tokens_of(rank, step) if hasattr(sharded, "head") else features_of(rank, step, 16)
    torch.manual_seed(10 * rank + step)
    sharded(*batch).backward()


def train(
    sharded: graphshard.ShardedModule, optim: torch.optim.Optimizer, steps: int = 2, start: int = 0
) -> None:
    for step in range(start, start + steps):
        backward(sharded, step)
        optim.step()
        optim.zero_grad()


def params_of(sharded: graphshard.ShardedModule) -> dict[str, Tensor]:
    return {name: full(param).clone() for name, param in sharded.named_parameters()}


def state_of(sharded: graphshard.ShardedModule, optim: torch.optim.Optimizer) -> dict[str, Tensor]:
    return flat(sharded.optimizer_state_dict(optim))


def on_dtensors(kind: Any) -> Any:
    """A class that does what `kind` does, of which nobody knows that it is elementwise."""
    return type(kind.__name__, (kind,), {})


class Two:
    """The same model sharded twice, to be trained on DTensors and on local tensors."""

    def __init__(self, model: nn.Module, mesh: Any = None, **fields: Any) -> None:
        policy = graphshard.BlockPolicy({Block}, **fields)
        # Copies, since ignored parameters stay the model's own.
        models = [model, copy.deepcopy(model)]
        self.both = [graphshard.compile(each, policy, mesh=mesh) for each in models]
        self.values = self.both[0].full_state_dict(rank0_only=False)

    def require_same(self, kind: Any, rule: Any = None, **options: Any) -> None:
        """Parameters and state are equal bit for bit after two steps from the start."""
        for sharded in self.both:
            sharded.load_full_state_dict(self.values)
        ordinary, local = self.both
        theirs = on_dtensors(kind)(ordinary.parameter_groups(rule), **options)
        ours = kind(local.parameter_groups(rule), **options)
        train(ordinary, theirs)
        train(local, ours)
        assert_same(params_of(local), params_of(ordinary))
        assert_same(state_of(local, ours), state_of(ordinary, theirs))


# -- values -------------------------------------------------------------------------------------


def every_optimizer_gives_the_same_values(rank: int) -> None:
    """Empty parts and parameters without dimensions among what they step on."""
    two = Two(odd())
    for name, kind in KINDS.items():
        if name != "Rprop":  # torch's takes no DTensors
            two.require_same(kind, lr=1e-2, foreach=name in ("Adam", "SGD"))
    two.both[1].optimizer(torch.optim.Rprop).step()
    for kind in (torch.optim.AdamW, torch.optim.Adam):
        two.require_same(kind, lr=1e-2, fused=True)
    momentum = {"lr": 0.1, "momentum": 0.9, "nesterov": True}
    two.require_same(torch.optim.SGD, [("bias|norm", {"lr": 3e-3})], **momentum)


def every_layout_gives_the_same_values(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2))
    half = graphshard.MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
    for fields in (
        {"strategy": "SHARD_OPTIMIZER"},
        {"offload": "params"},
        {"ignored": ("row", "first.norm")},
        {"strategy": "HYBRID_SHARD", "mesh": mesh},
        {"mixed_precision": half},
    ):
        # Adam takes no gradients of another dtype than the parameters'.
        kind = torch.optim.SGD if "mixed_precision" in fields else torch.optim.AdamW
        # And foreach ones no lists of both DTensors and plain ones, so each kind is a group.
        # torch 2.11's foreach SGD takes no gradients of another dtype either.
        foreach = "mixed_precision" not in fields
        Two(odd(), **fields).require_same(kind, lr=1e-2, foreach=foreach)


def gradients_are_the_dtensors_own(rank: int) -> None:
    """In `step` parameters and gradients are plain, in the memory of the DTensors' parts."""
    seen: list[tuple[Tensor, Tensor | None]] = []

    class Spy(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            seen.extend((p, p.grad) for group in self.param_groups for p in group["params"])
            return super().step(closure)

    sharded = compiled(gpt())
    with pytest.raises(PolicyError, match="say elementwise=True"):
        sharded.optimizer(Spy, lr=0.1)
    optim = sharded.optimizer(Spy, NO_DECAY, elementwise=True, lr=0.1, foreach=True)
    shown = [p for group in optim.param_groups for p in group["params"]]
    assert all(isinstance(param, DTensor) for param in shown)
    backward(sharded, 0)
    sharded.blocks[0].up.bias.grad = None
    with sharded.no_sync():
        backward(sharded, 1)
    optim.step()
    assert [type(p) for p, _ in seen] == [nn.Parameter] * len(shown)
    for (part, grad), param in zip(seen, shown, strict=True):
        assert part.data_ptr() == param.to_local().data_ptr()
        assert (grad is None) == (param is sharded.blocks[0].up.bias)
        if grad is not None:
            assert grad.data_ptr() == param.grad.to_local().data_ptr()
    assert all(a is b for a, b in zip(shown, _params(optim), strict=True))
    for to_none in (False, True):
        backward(sharded, 2)
        optim.zero_grad(set_to_none=to_none)
        assert all(p.grad is None if to_none else not full(p.grad).any() for p in shown)


def _params(optim: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optim.param_groups for param in group["params"]]


# -- what else training does --------------------------------------------------------------------


def loops_go_on_as_they_are(rank: int) -> None:
    """Clipping, accumulation, schedulers, closures, hooks, frozen parameters, added groups."""

    def run(local: bool) -> list[Any]:
        sharded = compiled(odd())
        named = dict(sharded.named_parameters())
        late = named["first.up.weight"]
        groups = [{"params": [p for p in named.values() if p is not late and p.requires_grad]}]
        kind = torch.optim.AdamW if local else on_dtensors(torch.optim.AdamW)
        optim = kind(groups, lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optim, 1, gamma=0.5)
        hooked: list[type] = []
        optim.register_step_pre_hook(lambda o, *_: hooked.append(type(_params(o)[0])))
        optim.register_step_post_hook(lambda o, *_: hooked.append(type(_params(o)[0])))
        optim.add_param_group({"params": [late], "lr": 1e-3})
        with sharded.no_sync():
            backward(sharded, 0)
        backward(sharded, 1)
        seen: list[Any] = [sharded.clip_grad_norm_(0.01)]
        optim.step()
        scheduler.step()
        sharded.first.down.requires_grad_(False)

        def closure() -> Tensor:
            optim.zero_grad()
            backward(sharded, 2)
            return torch.tensor(4.0)

        seen.append(optim.step(closure))
        assert hooked == [DTensor] * 4
        return [*seen, *params_of(sharded).values()]

    ours, theirs = run(True), run(False)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def a_step_that_fails_leaves_all_as_it_was(rank: int) -> None:
    class Failing(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ValueError("no")

    sharded = compiled(gpt())
    optim = sharded.optimizer(Failing, elementwise=True, lr=0.1)
    backward(sharded, 0)
    with pytest.raises(ValueError, match="no"):
        optim.step()
    assert all(isinstance(param, DTensor) for param in _params(optim))
    assert all(param.grad is not None for param in _params(optim))


def what_is_laid_out_otherwise_is_stepped_on_as_dtensors(rank: int) -> None:
    """A gradient, and a state, that are replicated beside a parameter that is not."""
    replicated = [torch.distributed.tensor.Replicate()]
    results = []
    for apart in (False, True):
        sharded = compiled(gpt())
        optim = torch.optim.AdamW(sharded.parameters(), lr=0.1)
        backward(sharded, 0)
        weight = sharded.embed.weight
        if apart:
            weight.grad = weight.grad.redistribute(placements=replicated)
        optim.step()
        if apart:
            state = optim.state[weight]
            state["exp_avg"] = state["exp_avg"].redistribute(placements=replicated)
        optim.zero_grad()
        backward(sharded, 1)
        optim.step()
        results.append(params_of(sharded))
    assert_same(*results)


def a_state_of_another_shape_is_stepped_with(rank: int) -> None:
    """Such as the scales of an 8-bit state; and groups may be read before the closure is called."""
    kinds: list[type] = []

    class Scaled(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            params = [p for group in self.param_groups for p in group["params"]]
            loss = closure()
            for param in params:
                kinds.append(type(param))
                scales = self.state[param].setdefault("scales", torch.zeros(3))
                scales += 1
                if param.grad is not None:
                    param.data.add_(param.grad, alpha=-0.1)
            return loss

    sharded, plain = compiled(odd()), compiled(odd())
    optim = sharded.optimizer(Scaled, elementwise=True, lr=0.1)
    ordinary = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):

        def closure(step: int = step) -> Tensor:
            optim.zero_grad()
            backward(sharded, step)
            return torch.tensor(1.0)

        optim.step(closure)
        ordinary.zero_grad()
        backward(plain, step)
        ordinary.step()
    assert set(kinds) == {nn.Parameter}
    assert optim.state[sharded.first.up.weight]["scales"].tolist() == [3.0] * 3
    assert_same(params_of(sharded), params_of(plain))


def what_hooks_and_steps_set_stays(rank: int) -> None:
    """A rate that a hook sets after the step, and what a step leaves in a group and a state."""

    class Counting(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
            self.state["all"] = self.state.get("all", 0) + 2
            self.steps = getattr(self, "steps", 0) + 1
            return super().step(closure)

    sharded = compiled(gpt())
    optim = sharded.optimizer(Counting, elementwise=True, lr=0.1)

    def later(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        optimizer.param_groups[0]["lr"] = 0.3

    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        sharded.embed.weight.grad = torch.zeros_like(sharded.embed.weight)

    optim.register_step_post_hook(later)
    optim.register_step_pre_hook(before)
    embedding = full(sharded.embed.weight).clone()
    train(sharded, optim)
    assert (optim.param_groups[0]["count"], optim.param_groups[0]["lr"]) == (2, 0.3)
    assert (optim.state["all"], optim.steps) == (4, 2)
    assert torch.equal(full(sharded.embed.weight), embedding)


def what_is_not_elementwise_is_refused(rank: int) -> None:
    sharded = compiled(gpt())
    for name, instead in {
        "Adafactor": r"make torch\.optim\.Adafactor\(sharded\.full_parameters\(\)\.values\(\)\)",
        "LBFGS": r"make torch\.optim\.LBFGS\(sharded\.parameters\(\)\)",
        "Muon": r"make torch\.optim\.Muon of those of sharded\.parameters\(\) with two",
        "SparseAdam": "take Adam",
    }.items():
        if hasattr(torch.optim, name):
            with pytest.raises(PolicyError, match=f"{name} looks at whole tensors.*{instead}"):
                sharded.optimizer(getattr(torch.optim, name), elementwise=True, lr=0.1)


# -- state --------------------------------------------------------------------------------------


def state_goes_from_one_kind_to_the_other(rank: int) -> None:
    """Through our dicts, torch's and the optimizer's own, and through files; training goes on."""

    def ordinary(sharded: graphshard.ShardedModule) -> torch.optim.Optimizer:
        return on_dtensors(torch.optim.AdamW)(sharded.parameter_groups(), lr=1e-2)

    def local(sharded: graphshard.ShardedModule) -> torch.optim.Optimizer:
        return sharded.optimizer(torch.optim.AdamW, lr=1e-2)

    sharded, again = compiled(gpt()), compiled(gpt())
    for make, other in ((ordinary, local), (local, ordinary), (local, local)):
        optim = make(sharded)
        train(sharded, optim)
        values, folder = sharded.full_state_dict(rank0_only=False), shared_folder()
        own, by_torch = optim.state_dict(), get_optimizer_state_dict(sharded, optim)
        assert type(by_torch["state"]["embed.weight"]["exp_avg"]) is DTensor
        assert type(optim.state[sharded.embed.weight]["exp_avg"]) is DTensor
        ways = {
            kind: copy.deepcopy(sharded.optimizer_state_dict(optim, kind=kind))
            for kind in ("sharded", "local", "full")
        }
        own, by_torch = copy.deepcopy(own), copy.deepcopy(by_torch)
        sharded.save_checkpoint(folder, optim)
        train(sharded, optim, start=2)
        expected = params_of(sharded)
        for way in (*ways, "own", "torch", "files"):
            again.load_full_state_dict(values)
            taker = other(again)
            if way == "own":
                taker.load_state_dict(own)
            elif way == "torch":
                set_optimizer_state_dict(again, taker, by_torch)
            elif way == "files":
                again.load_checkpoint(folder, taker)
            else:
                kind = "local" if way == "local" else None
                again.load_optimizer_state_dict(taker, ways[way], kind=kind)
            train(again, taker, start=2)
            assert_same(params_of(again), expected)


test_on_two_ranks = pytest.mark.slow(on_ranks(checks_of(globals()), 2, timeout=400))


def test_on_a_single_rank_the_optimizer_is_an_ordinary_one() -> None:
    sharded = compiled(gpt())
    optim = sharded.optimizer(torch.optim.AdamW, NO_DECAY, lr=1e-2)
    assert type(optim) is torch.optim.AdamW
    assert len(optim.param_groups) == 2
    sharded(*tokens_of(0, 0)).backward()
    optim.step()
    with pytest.raises(PolicyError, match="whole tensors"):
        sharded.optimizer(torch.optim.Adafactor)


def test_an_optimizer_that_is_made_already_is_refused() -> None:
    sharded = graphshard.compile(nn.Linear(4, 4), graphshard.SizePolicy(1))
    made = torch.optim.AdamW(sharded.parameters())
    with pytest.raises(PolicyError, match=r"optimizer\(AdamW, lr=.*steps as it is"):
        sharded.optimizer(made)  # type: ignore[arg-type]

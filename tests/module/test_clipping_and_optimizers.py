"""Between steps: clipping, parameter groups, and optimizers that need whole matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full
from loops import OneProcess, compiled, exact, gpt, same_grads, same_params
from models import Block, Odd, features_of, tokens_of
from ranks import checks_of, on_ranks
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import PolicyError, RuntimeStateError

# -- clipping ---------------------------------------------------------------------------------


def norms_are_one_process_s(rank: int) -> None:
    for strategy in ("FULL_SHARD", "SHARD_OPTIMIZER", "NO_SHARD"):
        for model, batch in ((gpt(), tokens_of), (Odd(), lambda r, s: features_of(r, s, 16))):
            sharded = compiled(model, strategy=strategy)
            reference = OneProcess(model, dist.get_world_size())
            reference.backward(lambda r, batch=batch: [batch(r, 0)])
            torch.manual_seed(rank)
            sharded(*batch(rank, 0)).backward()
            for p in (1.0, 2.0, 3.5, float("inf")):
                norm = sharded.clip_grad_norm_(1e6, p)
                theirs = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 1e6, p)
                assert type(norm) is torch.Tensor
                assert norm.shape == ()
                torch.testing.assert_close(norm, theirs, rtol=1e-6, atol=0)
                everyones = [torch.zeros(()) for _ in range(dist.get_world_size())]
                dist.all_gather(everyones, norm)
                assert all(torch.equal(norm, other) for other in everyones)


def clips_as_one_process(rank: int) -> None:
    model = gpt()
    for foreach in (None, True, False):
        sharded, reference = compiled(model), OneProcess(model, dist.get_world_size())
        reference.backward(lambda r: [tokens_of(r, 0)])
        torch.manual_seed(rank)
        sharded(*tokens_of(rank, 0)).backward()
        before = sharded.clip_grad_norm_(0.01, foreach=foreach)
        theirs = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 0.01)
        torch.testing.assert_close(before, theirs, rtol=1e-6, atol=0)
        same_grads(sharded, reference.model, exact=False)
        torchs = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1e6)
        torch.testing.assert_close(full(torchs), torch.tensor(0.01), rtol=1e-3, atol=0)


def one_collective(rank: int) -> None:
    """However many parameters there are; none where every rank has all."""
    calls: list[int] = []
    launch = dist.all_reduce

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return launch(*args, **kwargs)

    for strategy, expected in (("FULL_SHARD", 1), ("NO_SHARD", 0)):
        sharded = compiled(gpt(2), strategy=strategy)
        sharded(*tokens_of(rank, 0)).backward()
        calls.clear()
        dist.all_reduce = counted
        try:
            sharded.clip_grad_norm_(1.0)
        finally:
            dist.all_reduce = launch
        assert len(calls) == expected, strategy


def clips_as_fully_shard_in_bf16(rank: int) -> None:
    """Norms, losses and parameters are the same bits after every step, as AdamW amplifies one."""
    precision = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}
    ours = compiled(gpt(2).eval(), mixed_precision=graphshard.MixedPrecision(**precision))
    theirs = gpt(2).eval()
    for module in [*(m for m in theirs.modules() if type(m) is Block), theirs]:
        fully_shard(module, mp_policy=MixedPrecisionPolicy(**precision))
    clips = (
        lambda: ours.clip_grad_norm_(0.5),
        lambda: torch.nn.utils.clip_grad_norm_(theirs.parameters(), 0.5),
    )
    optims = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (ours, theirs)]
    for step in range(6):
        norms = []
        for model, clip, optim in zip((ours, theirs), clips, optims, strict=True):
            torch.manual_seed(rank)
            model(*tokens_of(rank, step)).backward()
            norms.append(full(clip()))
            assert norms[-1] > 0.5
            optim.step()
            optim.zero_grad()
        assert torch.equal(*norms), f"step {step}: {norms}"
        for name, param in ours.named_parameters():
            assert torch.equal(full(param), full(theirs.get_parameter(name))), f"{step}: {name}"


def bad_norms(rank: int) -> None:
    sharded = compiled(gpt())
    assert sharded.clip_grad_norm_(1.0) == 0  # no gradients yet
    sharded(*tokens_of(rank, 0)).backward()
    with pytest.raises(PolicyError, match="norm_type must be above 0"):
        sharded.clip_grad_norm_(1.0, 0)
    if rank == 0:
        sharded.embed.weight.grad.to_local().fill_(float("inf"))
    with pytest.raises(RuntimeStateError, match="2-norm of the gradients is inf"):
        sharded.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert sharded.clip_grad_norm_(1.0).isinf()


# -- optimizers -------------------------------------------------------------------------------


def no_decay(name: str, param: nn.Parameter) -> dict[str, float]:
    return {"weight_decay": 0.0 if "norm" in name or name.endswith("bias") else 0.1}


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=1e-2, fused=True),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True),
    "sgd momentum": lambda groups: torch.optim.SGD(groups, lr=1e-1, momentum=0.9),
}


def groups_by_name(rank: int) -> None:
    """Weight decay by name, as without sharding, for each way of stepping."""
    model = gpt()
    for name, make in OPTIMIZERS.items():
        sharded = compiled(model)

        def for_replica(replica: nn.Module, make: Any = make) -> torch.optim.Optimizer:
            decayed = [p for n, p in replica.named_parameters() if no_decay(n, p)["weight_decay"]]
            rest = [p for n, p in replica.named_parameters() if not no_decay(n, p)["weight_decay"]]
            return make(
                [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
            )

        reference = OneProcess(model, dist.get_world_size(), for_replica)
        groups = sharded.parameter_groups(no_decay)
        assert len(groups) == 2
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
        optim = make(groups)
        for step in range(3):
            reference.backward(lambda r, step=step: [tokens_of(r, step)])
            reference.step()
            torch.manual_seed(rank)
            sharded(*tokens_of(rank, step)).backward()
            optim.step()
            optim.zero_grad()
        # Fused kernels handle the ends of a tensor otherwise than its middle.
        same_params(sharded, reference.model, exact=exact() and name != "adamw fused")


def rules(rank: int) -> None:
    sharded = compiled(Odd())
    (everything,) = sharded.parameter_groups()
    assert set(everything) == {"params", "names"}
    assert not any(name.startswith("frozen") for name in everything["names"])
    by_pattern = sharded.parameter_groups([(r"bias|norm", {"weight_decay": 0.0})])
    assert [group.get("weight_decay") for group in by_pattern] == [0.0, None] or [
        group.get("weight_decay") for group in by_pattern
    ] == [None, 0.0]
    for rule, said in (
        ([("nothing_like_it", {})], "matches no trainable parameter"),
        ([("bias",)], "pairs of a regular expression"),
        (lambda name, param: 3, "it gave 3 for"),
        (lambda name, param: {"params": []}, "other than params"),
    ):
        with pytest.raises(PolicyError, match=said):
            sharded.parameter_groups(rule)


def whole_matrices(rank: int) -> None:
    """Adafactor, which fails on DTensors, and Muon step on full parameters; state is kept."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(16, 33, bias=False), nn.ReLU(), nn.Linear(33, 16, bias=False))
    model = nn.Sequential(mlp, Mean())
    makers: list[Callable[..., Any]] = [lambda p: torch.optim.Adafactor(p, lr=1e-2)]
    if hasattr(torch.optim, "Muon"):
        makers.append(lambda p: torch.optim.Muon(p, lr=1e-2))
    for make in makers:
        sharded = graphshard.compile(model, graphshard.SizePolicy(min_num_params=100))
        reference = OneProcess(
            model, dist.get_world_size(), lambda m, make=make: make(m.parameters())
        )
        optim = make(sharded.full_parameters().values())
        for step in range(3):
            reference.backward(lambda r, step=step: [features_of(r, step, 16)])
            reference.step()
            sharded(*features_of(rank, step, 16)).backward()
            with sharded.unsharded(with_grads=True):
                optim.step()
            sharded.zero_grad()
        same_params(sharded, reference.model, exact=exact())
        assert len(optim.state) == 2
        for param in sharded.parameters():
            assert isinstance(param, DTensor)
            assert param.grad is None


class Mean(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.pow(2).mean()


def full_inside(rank: int) -> None:
    model = gpt()
    sharded = compiled(model)
    expected = dict(model.named_parameters(remove_duplicate=False))
    sharded(*tokens_of(rank, 0)).backward()
    grads = {n: full(p.grad) for n, p in sharded.named_parameters()}
    twins = sharded.full_parameters()
    with sharded.unsharded(with_grads=True) as params:
        # A tied parameter is met once, and found by each of its names.
        assert list(params) == [name for name, _ in model.named_parameters()]
        assert len({id(param) for param in params.values()}) == len(params)
        assert all(name in params and params.get(name) is params[name] for name in expected)
        assert "missing" not in params
        assert params.get("missing") is None
        assert params["head.weight"] is params["embed.weight"] is sharded.embed.weight
        for name, param in params.items():
            assert type(param) is nn.Parameter
            assert torch.equal(param, expected[name])
            assert name not in grads or torch.equal(param.grad, grads[name])
        assert all(twins[name] is params[name] for name in twins)
        assert set(sharded.state_dict()) == set(model.state_dict())
        with pytest.raises(RuntimeStateError, match="is unsharded, so the module has no shards"):
            sharded(*tokens_of(rank, 0))
        with (
            pytest.raises(RuntimeStateError, match="is unsharded already"),
            sharded.unsharded("embed"),
        ):
            raise AssertionError
        with torch.no_grad():
            sharded.embed.weight.fill_(2.0)
            sharded.embed.weight.grad.fill_(3.0)
            sharded.blocks[0].up.weight.grad = None
    assert all(twin.untyped_storage().nbytes() == 0 for twin in twins.values())
    assert all(twin.grad is None for twin in twins.values())
    assert (full(sharded.embed.weight) == 2.0).all()
    assert (full(sharded.embed.weight.grad) == 3.0).all()
    assert sharded.blocks[0].up.weight.grad is None
    assert sharded(*tokens_of(rank, 0)).isfinite()


def options_of_unsharded(rank: int) -> None:
    model = gpt(2)
    sharded = compiled(model, reshard_after_forward=True)
    before = {name: full(p) for name, p in sharded.named_parameters()}
    with sharded.unsharded("blocks.0", writeback=False) as params:
        assert set(params) == {n for n, _ in model.named_parameters() if n.startswith("blocks.0.")}
        assert isinstance(sharded.blocks[1].up.weight, DTensor)
        params["blocks.0.up.weight"].data.fill_(7.0)
    with sharded.unsharded(["blocks.1"], writeback=False, rank0_only=True) as params:
        kind = type(params["blocks.1.up.weight"])
        assert kind is nn.Parameter if rank == 0 else issubclass(kind, DTensor)
    for name, p in sharded.named_parameters():
        assert torch.equal(full(p), before[name]), name
    with pytest.raises(PolicyError, match="rank0_only"), sharded.unsharded(rank0_only=True):
        raise AssertionError
    with pytest.raises(PolicyError, match="is 'blokcs'"), sharded.unsharded("blokcs"):
        raise AssertionError
    with pytest.raises(KeyError), sharded.unsharded():
        raise KeyError
    assert all(isinstance(p, DTensor) for p in sharded.parameters())
    loss = sharded(*tokens_of(rank, 0))
    with sharded.unsharded():
        sharded.embed.weight.data.zero_()
    with pytest.raises(RuntimeStateError, match="was changed between a forward and its backward"):
        loss.backward()


ON_FOUR = [
    norms_are_one_process_s,
    clips_as_one_process,
    groups_by_name,
    whole_matrices,
]

test_on_two_ranks = on_ranks(checks_of(globals()), 2, timeout=400)
test_on_four_ranks = pytest.mark.slow(on_ranks(ON_FOUR, 4, timeout=400))


def test_torch_s_own_clip_raises_where_a_shard_is_empty() -> None:
    """README.md says so; once this fails, its sentence on `clip_grad_norm_` and inf can go."""
    with pytest.raises(RuntimeError, match=r"infinity norm on an empty tensor"):
        torch.nn.utils.get_total_norm([torch.ones(2), torch.empty(0)], float("inf"))


def test_on_a_single_rank_parameters_are_full_already() -> None:
    model = gpt()
    sharded = compiled(model)
    sharded(*tokens_of(0, 0)).backward()
    assert sharded.clip_grad_norm_(1.0) > 0
    with sharded.unsharded(with_grads=True) as params:
        assert params["embed.weight"] is sharded.embed.weight
        assert params["embed.weight"].grad is not None
    assert sharded.full_parameters()["embed.weight"] is sharded.embed.weight

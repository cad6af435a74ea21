"""Mixed precision on ranks, against FSDP2, FSDP1 and torch's own GradScaler and autocast."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from full_tensors import full, full_grads
from models import CASES, Case, Normed, features_of, loss_of
from ranks import checks_of, on_ranks
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp import MixedPrecision as MixedPrecision1
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

import graphshard
from graphshard import MixedPrecision

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ADDS_ROUNDED = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
"""FSDP2 rounds each of several gradients of a parameter to `reduce_dtype` before adding them."""

Run = list[tuple[Tensor, dict[str, Tensor]]]


def train(
    model: nn.Module,
    case: Case,
    rank: int,
    scale: float = 1.0,
    amp: Any = None,
    number: int = 2,
) -> Run:
    """(loss, full gradients) of AdamW steps on this rank's batches."""
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history = []
    for step in range(number):
        inputs = case.inputs(100 + 10 * step + rank)
        with torch.autocast("cpu", amp, enabled=amp is not None):
            loss = loss_of(model(**inputs))
        (loss * scale).backward()
        history.append((loss.detach(), full_grads(model)))
        optim.step()
        optim.zero_grad()
    return history


def without_dropout(case: Case) -> nn.Module:
    """On the CPU eager's dropout rounds its scale to 16 bits and the fused one does not."""
    model = case.model()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def by_fsdp2(model: nn.Module, units: tuple[str, ...], **fields: Any) -> nn.Module:
    # Without a dtype of its own FSDP2 reduces in the parameters' from torch 2.15 on.
    policy = MixedPrecisionPolicy(**{"reduce_dtype": fields.get("param_dtype"), **fields})
    for module in model.modules():
        if type(module).__name__ in units:
            fully_shard(module, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    return model


def compiled(model: nn.Module, units: Any, **fields: Any) -> Any:
    mixed = MixedPrecision(**fields) if fields else None
    return graphshard.compile(model, graphshard.BlockPolicy(units, mixed_precision=mixed))


def assert_equal(mine: Run, theirs: Run) -> None:
    for (loss, grads), (their_loss, their_grads) in zip(mine, theirs, strict=True):
        assert loss.dtype == their_loss.dtype
        assert torch.equal(loss, their_loss)
        assert grads.keys() == their_grads.keys()
        for name, grad in grads.items():
            assert grad.dtype == their_grads[name].dtype
            assert torch.equal(grad, their_grads[name]), name


def same_as_fsdp2(rank: int, name: str, scale: float = 1.0, amp: Any = None, **fields: Any) -> None:
    case = CASES[name]
    theirs = by_fsdp2(without_dropout(case), case.blocks, **fields)
    expected = train(theirs, case, rank, scale, amp)
    sharded = compiled(without_dropout(case), case.blocks, **fields)
    assert_equal(train(sharded, case, rank, scale, amp), expected)


def gpt_bf16(rank: int) -> None:
    same_as_fsdp2(rank, "gpt", param_dtype=BF16, reduce_dtype=F32)


def llama_bf16(rank: int) -> None:
    same_as_fsdp2(rank, "llama", param_dtype=BF16, reduce_dtype=F32)
    same_as_fsdp2(rank, "llama", param_dtype=BF16)


def fp16(rank: int) -> None:
    """A reduce in float16 is bit-equal where FSDP2's halves do not underflow: with a loss scale."""
    same_as_fsdp2(rank, "llama", param_dtype=F16, reduce_dtype=F32)
    same_as_fsdp2(rank, "gpt", scale=1024.0, param_dtype=F16)


def reduced_low_computed_high(rank: int) -> None:
    if not ADDS_ROUNDED:
        same_as_fsdp2(rank, "gpt", reduce_dtype=BF16)
        return
    case = CASES["gpt"]
    theirs = train(by_fsdp2(without_dropout(case), case.blocks, reduce_dtype=BF16), case, rank)
    mine = train(compiled(without_dropout(case), case.blocks, reduce_dtype=BF16), case, rank)
    for (loss, grads), (their_loss, their_grads) in zip(mine, theirs, strict=True):
        torch.testing.assert_close(loss, their_loss, rtol=1e-5, atol=0)
        for name, grad in grads.items():
            assert_close_as_rounded(grad, their_grads[name])


def assert_close_as_rounded(mine: Tensor, theirs: Tensor) -> None:
    """Two roundings to bfloat16 apart, of values as large as the largest."""
    bound = 2 * torch.finfo(BF16).eps * theirs.abs().max().item()
    torch.testing.assert_close(mine, theirs, rtol=0, atol=bound)


def accumulated_low_computed_high(rank: int) -> None:
    """A gradient is added as it was computed, and the sum rounded."""
    case = CASES["gpt"]
    theirs = by_fsdp2(without_dropout(case), case.blocks, reduce_dtype=BF16)
    mine = compiled(without_dropout(case), case.blocks, reduce_dtype=BF16)
    found = []
    for model in (theirs, mine):
        for number in range(3):
            inputs = case.inputs(3 * rank + number)
            model.set_requires_gradient_sync(number == 2) if model is theirs else None
            context = mine.no_sync() if model is mine and number < 2 else nullcontext()
            with context:
                loss_of(model(**inputs)).backward()
        found.append(full_grads(model))
    for name, grad in found[1].items():
        if ADDS_ROUNDED:
            assert_close_as_rounded(grad, found[0][name])
        else:
            assert torch.equal(grad, found[0][name]), name


def autocast(rank: int) -> None:
    same_as_fsdp2(rank, "llama", amp=BF16)
    same_as_fsdp2(rank, "gpt", amp=BF16, param_dtype=BF16, reduce_dtype=F32)


class BlockWithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("shift", torch.linspace(0, 1.003, 8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        self.seen.add_(y.detach().mean(0))
        return torch.relu(self.norm(y)) + self.shift.to(y.dtype)


class WithBuffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.blocks = nn.ModuleList([BlockWithBuffers(), BlockWithBuffers()])
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x).float().pow(2).mean()


def steps(model: nn.Module, rank: int) -> Iterator[tuple[Tensor, set[torch.dtype]]]:
    """Loss, and dtypes of gradients, of three steps of SGD."""
    optim = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(3):
        loss = model(*features_of(rank, step, 8))
        loss.backward()
        yield loss.detach(), {p.grad.dtype for p in model.parameters() if p.grad is not None}
        optim.step()
        optim.zero_grad()


def same_as_fsdp1(rank: int, **fields: Any) -> None:
    torch.manual_seed(0)
    model = WithBuffers()
    theirs = FullyShardedDataParallel(
        copy.deepcopy(model),
        auto_wrap_policy=ModuleWrapPolicy({BlockWithBuffers}),
        mixed_precision=MixedPrecision1(cast_forward_inputs=True, **fields),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    sharded = compiled(model, {BlockWithBuffers}, **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that FSDP1 is deprecated
        expected = list(steps(theirs, rank))
        for (loss, kinds), (their_loss, their_kinds) in zip(
            steps(sharded, rank), expected, strict=True
        ):
            assert torch.equal(loss, their_loss)
            assert kinds == their_kinds
        mine = {n: full(t.detach()) for n, t in sharded.state_dict().items()}
        with FullyShardedDataParallel.summon_full_params(theirs):
            for name, value in (*theirs.named_parameters(), *theirs.named_buffers()):
                found = mine[name.replace("_fsdp_wrapped_module.", "")]
                # FSDP1 rounds buffers for good, ours only where forward sees them.
                assert torch.equal(found.to(value.dtype), value.detach()), name


def as_fsdp1(rank: int) -> None:
    same_as_fsdp1(rank, param_dtype=BF16)
    same_as_fsdp1(rank, param_dtype=BF16, reduce_dtype=F32, buffer_dtype=BF16)
    same_as_fsdp1(rank, param_dtype=BF16, keep_low_precision_grads=True)


class Scaled(nn.Module):
    """Rows that leave ranks empty, and a parameter without dimensions, replicated and first."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3), nn.Linear(3, 1))

    def forward(self, x: Tensor) -> Tensor:
        return (self.body(x) * self.scale).float().pow(2).mean()


def scaled(rank: int) -> None:
    """An infinity in one rank's shard makes all of them skip that step, and halve the scale."""
    ranks = torch.distributed.get_world_size()
    for bad, options in ((0, {"foreach": True}), (ranks - 1, {"fused": True})):
        torch.manual_seed(0)
        sharded = compiled(Scaled(), {nn.Linear}, param_dtype=F16)
        optim = torch.optim.AdamW(sharded.parameters(), lr=0.05, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        seen, before = [], None
        for step in range(4):
            scaler.scale(sharded(*features_of(rank, step, 8))).backward()
            if step == 1:
                before = full(sharded.body[0].weight.detach()).clone()
                if rank == bad:
                    sharded.body[0].weight.grad.to_local()[0] = float("inf")
            scaler.unscale_(optim)
            norm = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 1.0)
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            seen.append(scaler.get_scale())
            if step == 1:
                assert torch.equal(full(sharded.body[0].weight.detach()), before)
                assert not full(norm).isfinite()
        assert seen == [1024.0, 512.0, 512.0, 1024.0]
        assert not torch.equal(full(sharded.body[0].weight.detach()), before)


def scaled_as_fsdp2(rank: int) -> None:
    """Losses, scales and so the steps taken are FSDP2's, overflows among them."""

    def run(model: nn.Module) -> list[tuple[float, float]]:
        optim = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**19, growth_interval=3)
        seen = []
        for step in range(6):
            loss = model(*features_of(rank, step, 8))
            scaler.scale(loss).backward()
            scaler.step(optim)
            scaler.update()
            optim.zero_grad()
            seen.append((loss.item(), scaler.get_scale()))
        return seen

    torch.manual_seed(0)
    model = Normed()
    model.body[1] = nn.LayerNorm(12)
    units = ("Linear", "LayerNorm")
    theirs = by_fsdp2(copy.deepcopy(model), units, param_dtype=F16, output_dtype=F32)
    expected = run(theirs)
    assert min(scale for _, scale in expected) < 2.0**19  # some step overflowed
    assert run(compiled(model, units, param_dtype=F16, output_dtype=F32)) == expected


def averages_do_not_overflow(rank: int) -> None:
    for strategy in ("FULL_SHARD", "NO_SHARD"):
        model = nn.Linear(5, 3, bias=False)
        policy = graphshard.LambdaPolicy(
            lambda module: False, strategy=strategy, mixed_precision=MixedPrecision(F16)
        )
        sharded = graphshard.compile(model, policy)
        large = 80000.0 / torch.distributed.get_world_size()  # the sum is past the largest float16
        sharded(torch.full((1, 5), large)).sum().backward()
        assert torch.equal(full(sharded.weight.grad), torch.full((3, 5), large))


ON_TWO = [
    gpt_bf16,
    reduced_low_computed_high,
    accumulated_low_computed_high,
    scaled,
    averages_do_not_overflow,
]
test_on_two_ranks = on_ranks(ON_TWO, 2, timeout=400)
test_more_on_two_ranks = pytest.mark.slow(
    on_ranks(checks_of(globals(), but=ON_TWO), 2, timeout=400)
)


# -- four ranks -----------------------------------------------------------------------------------


def near_fsdp2(rank: int) -> None:
    """Gloo adds up FSDP2's gradients in their own dtype, ring by ring; here the mean is float32."""
    case = CASES["gpt"]
    for reduce_dtype, bound in ((F32, 1e-6), (BF16, 0.01)):
        fields = {"param_dtype": BF16, "reduce_dtype": reduce_dtype}
        expected = train(
            by_fsdp2(without_dropout(case), case.blocks, **fields), case, rank, number=1
        )
        mine = train(compiled(without_dropout(case), case.blocks, **fields), case, rank, number=1)
        assert torch.equal(mine[0][0], expected[0][0])
        for name, theirs in expected[0][1].items():
            error = (mine[0][1][name] - theirs).norm() / theirs.norm()
            assert error <= bound, f"{name}: {error:.1e}"


ON_FOUR = [near_fsdp2, scaled, averages_do_not_overflow]

test_on_four_ranks = pytest.mark.slow(on_ranks(ON_FOUR, 4, timeout=400))

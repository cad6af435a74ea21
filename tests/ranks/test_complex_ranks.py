"""Complex parameters: optimizers, clipping and infinities.

Every option takes them in `test_option_matrix_ranks.py`, whose model has some, and their state goes
out and back in `test_state_layouts.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from full_tensors import full, full_grads
from loops import OneProcess, exact, same_grads, same_params
from ranks import checks_of, on_ranks
from state_checks import full_state
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import graphshard
from examples.benchmarks.benchmark_models import WEIGHED, Model
from examples.benchmarks.memory_truth import Case, row, truth_of
from graphshard.cost.op_cost import op_cost
from graphshard.errors import NonFiniteError
from graphshard.module.optimizers import ELEMENTWISE

aten = torch.ops.aten
LENGTH = 16


class Spectrum(nn.Module):
    """Complex parameters alone: those of each frequency mix the channels."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.empty(modes, width, width, dtype=torch.cfloat))
        self.shift = nn.Parameter(torch.empty(3, dtype=torch.cfloat))
        self.wide = nn.Parameter(torch.empty(width, dtype=torch.cdouble))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for param in self.parameters():
            nn.init.normal_(param, std=0.7 / self.wide.numel() ** 0.5)

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.einsum("bfi,fio->bfo", x[:, : len(self.mix)], self.mix.conj())
        return modes * self.shift.sum() + self.wide.to(x.dtype).conj()


class Layer(nn.Module):
    """The layer of a Fourier neural operator in one dimension, with real and complex parameters."""

    def __init__(self, width: int, modes: int) -> None:
        super().__init__()
        self.spectrum = Spectrum(width, modes)
        self.gain = nn.Parameter(torch.empty(modes, 1, dtype=torch.cfloat))
        self.turn = nn.Parameter(torch.empty((), dtype=torch.cfloat))
        self.direct = nn.Linear(width, width)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for param in (self.gain, self.turn):
            nn.init.normal_(param)

    def forward(self, x: Tensor) -> Tensor:
        modes = self.spectrum(torch.fft.rfft(x, dim=1)) * self.gain * self.turn
        return torch.tanh(torch.fft.irfft(modes, n=LENGTH, dim=1) + self.direct(x))


class Operator(nn.Module):
    def __init__(self, width: int = 6, modes: int = 5) -> None:
        super().__init__()
        self.lift = nn.Linear(1, width)
        self.layers = nn.Sequential(*(Layer(width, modes) for _ in range(2)))
        self.drop = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.layers(self.lift(x))).square().mean()


def operator() -> nn.Module:
    """On more than two ranks without training what has no dims: its sum has another order."""
    torch.manual_seed(0)
    model = Operator()
    for param in model.parameters():
        param.requires_grad_(bool(param.ndim) or not dist.is_initialized() or exact())
    return model


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def batch(rank: int, step: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(2, LENGTH, 1, generator=generator)


def sharded_operator(*, meta: bool = False, backend: str = "eager", **fields: Any) -> Any:
    with torch.device("meta" if meta else "cpu"):
        model = operator()
    policy = graphshard.BlockPolicy(fields.pop("blocks", {Layer}), **fields)
    return graphshard.compile(model, policy, backend=backend, check=True)


Make = Callable[[Any], torch.optim.Optimizer]


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=0.01)


def trains_as_one_process(
    module: Any, rank: int, make: Make = adamw, reference: Make = adamw, close: bool = False
) -> None:
    one = OneProcess(operator(), world_size(), reference)
    optim = make(module)
    for step in range(3):
        losses = one.average(lambda r, model, s=step: _loss(model, r, s))
        loss = _loss(module, rank, step)
        if not close:
            assert torch.equal(loss, losses[rank]), step
        same_grads(module, one.model, exact=not close)
        one.step()
        optim.step()
        optim.zero_grad()
    same_params(module, one.model, exact=not close)


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    loss = model(batch(rank, step))
    loss.backward()
    return loss.detach()


# -- training -------------------------------------------------------------------------------------


BOTH = {"blocks": {Layer, Spectrum}}


def every_optimizer_updates_them(rank: int) -> None:
    module = sharded_operator()
    initial = module.full_state_dict(rank0_only=False)
    for name in ELEMENTWISE:
        for foreach in (False, True):
            kind = getattr(torch.optim, name)
            options = {"lr": 0.01, "foreach": foreach}
            makes = [lambda m, k=kind, o=options: k(m.parameters(), **o)]
            if name != "Rprop":  # which fails on DTensors
                makes.append(lambda m, k=kind, o=options: on_dtensors(k)(m.parameters(), **o))
            for make in makes:
                module.load_full_state_dict(initial)
                trains_as_one_process(module, rank, make, partial(_plain, kind, options))


def on_dtensors(kind: Any) -> Any:
    """A class that does what `kind` does, of which nobody knows that it is elementwise."""
    return type(kind.__name__, (kind,), {})


def _plain(kind: Any, options: dict[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    return kind(model.parameters(), **options)


def clipped_by_magnitudes(rank: int) -> None:
    """A norm is that of the absolute values, whatever its order."""
    module = sharded_operator()
    for p in (1.0, 2.0, 3.0, float("inf")):
        for foreach in (None, False):
            module.zero_grad()
            one = OneProcess(operator(), world_size())
            one.average(lambda r, model: _loss(model, r, 0))
            _loss(module, rank, 0)
            norm = module.clip_grad_norm_(0.01, p, foreach=foreach)
            expected = clip_grad_norm_(one.model.parameters(), 0.01, p)
            torch.testing.assert_close(norm, expected.to(norm.dtype))
            same_grads(module, one.model, exact=False)
            if p == float("inf"):  # which torch's function refuses where a shard is empty
                continue
            module.zero_grad()
            _loss(module, rank, 0)
            theirs = full(clip_grad_norm_(module.parameters(), 0.01, p))
            torch.testing.assert_close(theirs.to(norm.dtype), norm)


def compiled(rank: int) -> None:
    trains_as_one_process(sharded_operator(backend="inductor", **BOTH), rank, close=True)


def kept_in_mixed_precision(rank: int) -> None:
    """Complex parameters are neither cast nor reduced in another dtype."""
    precision = graphshard.MixedPrecision(reduce_dtype=torch.bfloat16)
    module = sharded_operator(mixed_precision=precision)
    one = OneProcess(operator(), world_size())
    one.average(lambda r, model: _loss(model, r, 0))
    _loss(module, rank, 0)
    for name, grad in full_grads(module).items():
        theirs = one.model.get_parameter(name).grad
        assert torch.equal(grad, theirs) is grad.is_complex(), name
    assert "precision: layers.0.gain, layers.0.turn, " in str(module.plan)


def infinities_skip_the_step(rank: int) -> None:
    module = sharded_operator()
    optim = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = full_state(module)
    for infinite in (True, False):
        optim.zero_grad()
        scaler.scale(module(batch(rank))).backward()
        scaled = full_grads(module)
        if infinite and rank == 0:
            module.layers[0].spectrum.mix.grad.to_local()[0, 0, 0] = complex(1.0, torch.inf)
        scaler.step(optim)
        scaler.update()
        assert torch.equal(full_state(module)["lift.weight"], before["lift.weight"]) is infinite
    assert scaler.get_scale() == 4.0
    for name, grad in full_grads(module).items():
        assert torch.equal(grad, scaled[name] / 4), name


def infinities_are_found(rank: int) -> None:
    module = sharded_operator(check_finite="error")
    _loss(module, rank, 0)
    with torch.no_grad():
        module.layers[1].gain.to_local()[0] = complex(1.0, torch.inf)
    with pytest.raises(NonFiniteError, match=r"in unit 'layers.1'|in the output of|layers.1"):
        _loss(module, rank, 0)


def predicted_bytes_live(rank: int) -> None:
    """A gradient that is a conjugate is copied before it is sent."""
    model = Model(
        "operator",
        partial(Operator, 160, modes=4),
        ("Layer",),
        lambda scale, generator: {"x": torch.randn(scale, LENGTH, 1, generator=generator)},
    )
    with mock.patch.dict(WEIGHED, {"operator": model}):
        for options in ({}, {"strategy": "NO_SHARD"}, {"offload": ["params"]}):
            told = row(truth_of(Case("operator", "sharded", options)))
            assert not told.endswith("WRONG"), told


# -- state ----------------------------------------------------------------------------------------


def gradients_may_be_conjugates(rank: int) -> None:
    """Those of ignored parameters stay as autograd made them, which clipping and steps take."""
    module = sharded_operator(ignored=r"layers\.0\.spectrum\.mix")
    _loss(module, rank, 0)
    one = OneProcess(operator(), 1)
    one.average(lambda _, model: _loss(model, rank, 0))
    name = "layers.0.spectrum.mix"
    assert torch.equal(module.get_parameter(name).grad, one.model.get_parameter(name).grad)
    module.clip_grad_norm_(0.01)
    adamw(module).step()


test_on_two_ranks = pytest.mark.slow(on_ranks(checks_of(globals()), 2, timeout=400))


def test_plans_count_bytes_and_flops_of_complex_numbers() -> None:
    policy = graphshard.BlockPolicy({Spectrum}, merge_below=0)
    with torch.device("meta"):
        model, x = Operator(), torch.empty(2, LENGTH, 1)
    plan = graphshard.plan(model, policy, world_size=4, example_inputs=(x,))
    unit = plan.unit("layers.0.spectrum")
    # 5, 3 and 6 rows padded to 8, 4 and 8, of which a rank has a quarter.
    assert unit.sharded_bytes == 2 * 6 * 6 * 8 + 8 + 2 * 16
    assert unit.unsharded_bytes == 4 * unit.sharded_bytes
    lines = [line for line in str(plan.program).splitlines() if unit.fqn in line]
    gathers = [line.partition(unit.fqn)[2].strip() for line in lines if " all_gather " in line]
    shapes = "3 params: c64[5, 6, 6], c64[3], c128[6]"
    assert gathers[0] == f"{unit.unsharded_bytes:,} bytes, {shapes}"
    products = [op_cost(node) for node in plan.program.nodes() if node.target is aten.bmm.default]
    assert {cost.flops for cost in products} == {8 * 2 * 5 * 6 * 6}
    assert {cost.dtype for cost in products} == {torch.float32}

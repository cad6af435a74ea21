"""Attention with dropout, traced on the CPU for a program that will run on CUDA."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import graphshard
from graphshard import AutoPolicy, BlockPolicy
from graphshard.capture.entry import capture
from graphshard.cost.op_cost import op_cost
from graphshard.hardware.hardware import Hardware
from graphshard.program.program import Program
from graphshard.torch_private import compat as torch_compat

pytestmark = pytest.mark.skipif(
    torch_compat.has_cuda_build(), reason="programs for CUDA are traced on CUDA here"
)

HEADS, LENGTH = 2, 32


class Attention(nn.Module):
    def __init__(self, head: int = 16, kv: int = HEADS, dropout: float = 0.1, mask: bool = False):
        super().__init__()
        self.head, self.kv, self.dropout = head, kv, dropout
        self.q = nn.Linear(head * HEADS, head * HEADS)
        self.k = nn.Linear(head * HEADS, head * kv)
        self.register_buffer("mask", torch.ones(LENGTH, LENGTH).tril().bool() if mask else None)

    def forward(self, x: Tensor) -> Tensor:
        q, k = (y.unflatten(-1, (-1, self.head)).transpose(1, 2) for y in (self.q(x), self.k(x)))
        p, causal = self.dropout if self.training else 0.0, self.mask is None
        gqa = self.kv != HEADS
        mixed = F.scaled_dot_product_attention(q, k, k, self.mask, p, causal, enable_gqa=gqa)
        return x + mixed.transpose(1, 2).flatten(2)


class Bert(nn.Module):
    """torch's own module, whose Python code calls the operator."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(32, HEADS, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.attend(x, x, x, need_weights=False)[0]
        return out


def attention_in(program: Program) -> set[str]:
    """The fused attention in a program, and "math" for matrices of the length squared."""
    found = {
        node.target.overloadpacket.__name__.removeprefix("_scaled_dot_product_")
        for node in program.nodes()
        if "_scaled_dot_product" in str(node.target)
    }
    values = [node.meta.get("val") for node in program.nodes()]
    square = any(isinstance(v, Tensor) and v.shape[-2:] == (LENGTH, LENGTH) for v in values[1:])
    return found | ({"math"} if square and not found else set())


def captured(model: nn.Module, dtype: torch.dtype, device: str = "cuda") -> Program:
    width = next(model.parameters()).shape[-1]
    x = torch.zeros(3, LENGTH, width, dtype=dtype, device="meta")
    return capture(model.to("meta", dtype), (x,), {}, device=device).program


HALF = torch.bfloat16


@pytest.mark.parametrize(
    ("model", "dtype", "expected"),
    [
        (Attention(), HALF, "flash_attention"),
        (Attention(kv=1), HALF, "flash_attention"),
        (Bert(), HALF, "flash_attention"),
        (Attention(), torch.float32, "efficient_attention"),
        (Attention(mask=True), HALF, "efficient_attention"),
        (Attention(head=272), HALF, "efficient_attention"),
        (Attention(dropout=0.0), HALF, "flash_attention_for_cpu"),
        (Attention().eval(), HALF, "flash_attention_for_cpu"),
        (Attention(head=12), HALF, "math"),
        (Attention(), torch.float64, "math"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_the_kernel_that_cuda_takes(model: nn.Module, dtype: torch.dtype, expected: str) -> None:
    found = attention_in(captured(model, dtype))
    assert expected in found
    assert found <= {expected, f"{expected}_backward"}


def test_a_program_for_the_cpu_has_what_the_cpu_runs() -> None:
    assert attention_in(captured(Attention(), HALF, "cpu")) == {"math"}


def test_recomputed_attention_draws_alike() -> None:
    model = nn.Sequential(Attention(), Attention()).to("meta", HALF)
    x = torch.zeros(3, LENGTH, 32, dtype=HALF, device="meta")
    policy = BlockPolicy({Attention}, recompute="units")
    plan = graphshard.plan(model, policy, world_size=2, example_inputs=(x,), device="cuda")
    assert plan.program is not None
    text = str(plan.program)
    assert text
    names = [str(node.target) for node in plan.program.nodes()]
    assert sum("flash_attention.default" in name for name in names) == 4, "twice, in forward again"
    assert any("set_random_state" in name for name in names)


def estimate(hardware: str, dropout: float) -> Any:
    model = Attention(dropout=dropout).to("meta", HALF)
    x = torch.zeros(3, LENGTH, 32, dtype=HALF, device="meta")
    policy = BlockPolicy({Attention})
    return graphshard.simulate(
        model, policy=policy, hardware=hardware, world_size=2, example_inputs=(x,)
    )


def test_a_simulation_is_of_the_programs_of_its_hardware() -> None:
    gpu, cpu = estimate("h100-sxm", 0.1), estimate("cpu-gloo", 0.1)
    assert (gpu.program.device, cpu.program.device) == ("cuda", "cpu")
    seed_and_offset = 24
    assert gpu.peak_bytes == estimate("h100-sxm", 0.0).peak_bytes + seed_and_offset
    assert cpu.peak_bytes > estimate("cpu-gloo", 0.0).peak_bytes


def test_a_search_is_of_the_programs_of_its_hardware() -> None:
    x = torch.zeros(3, LENGTH, 32, dtype=HALF, device="meta")
    for hardware, device in (("h100-sxm", "cuda"), ("cpu-gloo", "cpu")):
        auto = AutoPolicy(hardware=hardware, recompute=None, offload=None, schedule="fsdp")
        model = nn.Sequential(Attention(), Attention()).to("meta", HALF)
        tuning = auto.tune(model, example_inputs=(x,), world_size=2)
        assert tuning.estimate.program.device == device


def test_dropout_costs_nothing_in_the_kernel() -> None:
    """An operator traced on the CPU for a GPU says nothing of the kernel that the GPU prefers."""
    machine = Hardware.load("h100-sxm")
    seconds = []
    for dropout in (0.0, 0.1):
        program = captured(Attention(head=64, dropout=dropout), HALF)
        costs = [op_cost(n) for n in program.nodes() if "_scaled_dot_product" in str(n.target)]
        assert [cost.kind for cost in costs] == ["attention"] * 2
        seconds.append([cost.seconds(machine) for cost in costs])
    assert seconds[0] == pytest.approx(seconds[1], rel=1e-3)

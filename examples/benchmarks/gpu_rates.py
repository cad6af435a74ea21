"""The rates of the nearest preset against measured ones: matrix products, and attention by kernel.

A preset's rates come from other people's measurements. Here they meet this machine's: large and
partly filled products in bf16 on random data, under the power limit there is, and attention by
kernel, direction, length and head size; and the kernel that torch takes by itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from examples.benchmarks.gpu_table import Place, Row
from graphshard.calibrate.run import nearest
from graphshard.cost.kernel_rates import Attention, Product, attention_rate, product_rate
from graphshard.hardware.hardware import Hardware

WITHIN = 0.15
"""The error that a rate may have."""

# Rows, columns and terms: whole waves, a last wave of a few tiles, a gradient, and a thin product.
PRODUCTS = ((10240, 10240, 10240), (8192, 4096, 4096), (16384, 14336, 4096), (2048, 2304, 8192))

KERNELS = {"fa2": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}

SHAPES = ((16384, 64), (1024, 128), (8192, 128))  # length and head size
SMALL_SHAPES = ((64, 64),)

DEFAULTS = {1: "fa2", 3: "cudnn"}  # by torch's number of a backend


def rates(place: Place) -> Iterator[Row]:
    preset = Hardware.load(nearest(place.device)).for_ranks(1)
    yield Row("rates", "preset", preset.name)
    for rows, columns, terms in PRODUCTS if not place.small else ((64, 48, 32),):
        work = Product(1, rows, columns, terms)
        found = _product_rate(place, work, preset)
        expected = product_rate(work, torch.bfloat16, preset)
        yield _row(place, f"product {rows} x {columns} of {terms}", found, expected)
    if not place.cuda:
        yield Row("rates", "attention by kernel", "not on a CPU")
        return
    yield _default(place, preset)
    for name, backend in KERNELS.items():
        for length, head in SMALL_SHAPES if place.small else SHAPES:
            yield from _attention(place, preset, name, backend, length, head)


def _row(place: Place, check: str, found: float, expected: float) -> Row:
    said = f"{found:.3f} of the peak, {expected:.3f} expected"
    off = found / expected - 1
    good = abs(off) <= WITHIN if place.timed and not place.small else None
    return Row("rates", check, f"{said} ({off:+.0%})", f"{WITHIN:.0%}", good)


def _seconds(place: Place, work: Callable[[], object], runs: int = 20) -> float:
    """The median seconds of `work`, after some runs that bring the clocks to where they stay."""
    times = []
    for _ in range(6):
        place.synchronize()
        begin = time.perf_counter()
        for _ in range(runs):
            work()
        place.synchronize()
        times.append((time.perf_counter() - begin) / runs)
    return median(times[1:])


def _product_rate(place: Place, work: Product, preset: Hardware) -> float:
    a = torch.randn(work.rows, work.terms, device=place.device, dtype=torch.bfloat16)
    b = torch.randn(work.terms, work.columns, device=place.device, dtype=torch.bfloat16)
    out = torch.empty(work.rows, work.columns, device=place.device, dtype=torch.bfloat16)
    seconds = _seconds(place, lambda: torch.mm(a, b, out=out))
    flops = 2 * work.rows * work.columns * work.terms
    return flops / seconds / preset.matmul_flops(torch.bfloat16)


def _operands(place: Place, length: int, head: int) -> list[Tensor]:
    """Query, key and value as in the FlashAttention papers: 16,384 tokens, 2,048 wide."""
    tokens, width = (64, 128) if place.small else (16384, 2048)
    shape = (max(1, tokens // length), width // head, length, head)
    return [
        torch.randn(shape, device=place.device, dtype=torch.bfloat16, requires_grad=True)
        for _ in range(3)
    ]


def _default(place: Place, preset: Hardware) -> Row:
    """Whether torch takes the kernel that the model expects."""
    query = torch.randn(1, 4, 1024, 128, device="cuda", dtype=torch.bfloat16)
    chosen = int(torch._fused_sdp_choice(query, query, query, is_causal=True))
    name = DEFAULTS.get(chosen, f"backend {chosen}")
    said = f"{name}, {preset.attention or 'unknown'} expected"
    good = name == preset.attention if place.timed else None
    return Row("rates", "attention that torch takes", said, "equal", good)


def _attention(
    place: Place, preset: Hardware, name: str, backend: SDPBackend, length: int, head: int
) -> Iterator[Row]:
    check = f"{name}, length {length}, head {head}"
    operands = _operands(place, length, head)
    chosen = preset.with_(attention_kernel=name) if _has(preset, name) else preset
    scores = operands[0].shape[0] * operands[0].shape[1] * length * length / 2  # causal

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*operands, is_causal=True)

    with sdpa_kernel(backend):
        try:
            result = forward()
        except RuntimeError as error:
            yield Row("rates", check, f"not on this machine: {str(error).splitlines()[0][:60]}")
            return
        gradient = torch.randn_like(result)
        ahead = _seconds(place, forward, 10)
        back = _seconds(
            place, lambda: torch.autograd.grad(result, operands, gradient, retain_graph=True), 10
        )
    peak = preset.matmul_flops(torch.bfloat16)
    for seconds, flops, backward in ((ahead, 4, False), (back, 10, True)):
        found = flops * scores * head / seconds / peak
        work = Attention("", length, head, backward)
        expected = attention_rate(work, torch.bfloat16, chosen)
        direction = "backward" if backward else "forward"
        yield _row(place, f"{check}, {direction}", found, expected)


def _has(preset: Hardware, kernel: str) -> bool:
    return any(name.startswith(f"{kernel}.") for name in preset.attention_rates)

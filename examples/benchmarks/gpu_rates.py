"""The rates of the nearest preset against measured ones: matrix products, and attention by kernel.

A preset's rates come from other people's measurements. Here they meet this machine's: large and
partly filled products in bf16 on random data, under the power limit there is, and attention by
kernel, direction, length and head size; and the kernel that torch takes by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.benchmark import Timer

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

TOKENS, WIDTH = 16384, 2048
"""Of queries, keys and values, as in the FlashAttention papers."""

DEFAULTS = {1: "fa2", 3: "cudnn"}  # by torch's number of a backend


def rates(place: Place) -> Iterator[Row]:
    preset = Hardware.load(nearest(place.device)).for_ranks(1)
    yield Row("rates", "preset", preset.name)
    for rows, columns, terms in PRODUCTS if not place.small else ((64, 48, 32),):
        work = Product(1, rows, columns, terms)
        a, b = (_random(place, *shape) for shape in ((rows, terms), (terms, columns)))
        found = 2 * rows * columns * terms / _seconds(lambda a=a, b=b: a @ b)
        expected = product_rate(work, torch.bfloat16, preset)
        yield _row(place, preset, f"product {rows} x {columns} of {terms}", found, expected)
    if not place.cuda:
        yield Row("rates", "attention by kernel", "not on a CPU")
        return
    query = _random(place, 1, 4, 1024, 128)
    chosen = int(torch._fused_sdp_choice(query, query, query, is_causal=True))
    taken, wanted = DEFAULTS.get(chosen, f"backend {chosen}"), preset.attention
    said, good = f"{taken}, {wanted or 'unknown'} expected", taken == wanted
    yield Row("rates", "attention that torch takes", said, "equal", good if place.timed else None)
    for name in KERNELS:
        for length, head in SHAPES if not place.small else ((64, 64),):
            yield from _attention(place, preset, name, length, head)


def _random(place: Place, *shape: int) -> Tensor:
    return torch.randn(shape, device=place.device, dtype=torch.bfloat16)


def _seconds(work: Callable[[], object]) -> float:
    """The median seconds of `work`, after some that bring the clocks to where they stay."""
    timer = Timer("work()", globals={"work": work})
    timer.timeit(20)
    return timer.blocked_autorange(min_run_time=0.3).median


def _row(place: Place, preset: Hardware, check: str, flops: float, expected: float) -> Row:
    """The row of a rate: FLOP a second beside the expected part of the peak."""
    found = flops / preset.matmul_flops(torch.bfloat16)
    off = found / expected - 1
    said = f"{found:.3f} of the peak, {expected:.3f} expected ({off:+.0%})"
    good = abs(off) <= WITHIN if place.timed and not place.small else None
    return Row("rates", check, said, f"{WITHIN:.0%}", good)


def _attention(place: Place, preset: Hardware, name: str, length: int, head: int) -> Iterator[Row]:
    check = f"{name}, length {length}, head {head}"
    tokens, width = (64, 128) if place.small else (TOKENS, WIDTH)
    shape = (max(1, tokens // length), width // head, length, head)
    operands = [_random(place, *shape).requires_grad_() for _ in range(3)]
    scores = shape[0] * shape[1] * length * length / 2  # causal

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(*operands, is_causal=True)

    with sdpa_kernel(KERNELS[name]):
        try:
            result = forward()
        except RuntimeError as error:
            yield Row("rates", check, f"not on this machine: {str(error).splitlines()[0][:60]}")
            return
        gradient = torch.randn_like(result)

        def backward() -> object:
            return torch.autograd.grad(result, operands, gradient, retain_graph=True)

        known = any(rate.startswith(f"{name}.") for rate in preset.attention_rates)
        chosen = preset.with_(attention_kernel=name) if known else preset
        for work, products in ((forward, 4), (backward, 10)):
            found = products * scores * head / _seconds(work)
            what = Attention("", length, head, work is backward)
            expected = attention_rate(what, torch.bfloat16, chosen)
            yield _row(place, preset, f"{check}, {work.__name__}", found, expected)

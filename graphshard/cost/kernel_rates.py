"""Rates of matrix products, convolutions and attention kernels, as fractions of the peak.

A matrix product is split in tiles, which run in waves over the multiprocessors of a device. The
last wave is partly empty, and tiles reach beyond the edges of the result. A library picks the shape
of tiles that is fastest, and splits long sums when a result has few tiles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from math import ceil

import torch

from graphshard.hardware.hardware import Hardware

Tile = tuple[int, int, float]
"""Rows, columns, and the speed relative to the fastest shape."""


_LEAST_SUM = 512
"""Terms of a sum below which it is not split further."""


@dataclass(frozen=True)
class Product:
    """The shape of a matrix product: `batch` results of `rows` by `columns`, of sums of `terms`."""

    batch: int
    rows: int
    columns: int
    terms: int


@dataclass(frozen=True)
class Attention:
    """The shape of a call of fused attention.

    kernel: that of the operator, if it was traced for a GPU; else "", for the hardware's.
    length: tokens of the keys. head: the size of a head. backward: whether it is the backward.
    masked: whether it has a mask as a tensor, beyond the causal one.
    """

    kernel: str
    length: int
    head: int
    backward: bool
    masked: bool = False


_FUSED = (torch.bfloat16, torch.float16)
"""The dtypes that the kernels with rates multiply in."""


EFFICIENT = "fa1"
"""The kernel whose rates the memory-efficient one of xFormers has.

It is about as fast as FlashAttention 1 (arXiv:2307.08691, fig. 4).
"""


WITHOUT_MASKS = ("fa2", "fa3")
"""Kernels that take no mask as a tensor; torch runs the memory-efficient one instead."""


def attention_kernel(work: Attention, dtype: torch.dtype, hardware: Hardware) -> str:
    """The kernel whose rates count for `work` on `hardware`; "" if none do."""
    if dtype not in _FUSED:
        return ""
    kernel = hardware.attention_kernel or work.kernel or hardware.attention
    if work.masked and kernel in WITHOUT_MASKS:
        kernel = EFFICIENT
    direction = "backward" if work.backward else "forward"
    known = {name.rpartition(".")[0] for name in hardware.attention_rates}
    names = (kernel, hardware.attention)
    return next((name for name in names if f"{name}.{direction}" in known), "")


def attention_rate(work: Attention, dtype: torch.dtype, hardware: Hardware) -> float:
    """The fraction of the peak that the attention kernel of `hardware` reaches in `dtype`."""
    kernel = attention_kernel(work, dtype, hardware)
    if not kernel:
        return hardware.efficiency_of("attention", dtype)
    return hardware.attention_rate(kernel, work.length, work.head, backward=work.backward)


def product_rate(
    work: Product | None, dtype: torch.dtype, hardware: Hardware, *, tf32: bool = False
) -> float:
    """The fraction of the peak that a matrix product reaches.

    It has four factors: the efficiency of large products in `dtype`, the speed of the slowest
    rank's device, the clocks under the power limit, and the part of the multiprocessors' time that
    tiles fill.
    """
    rate = hardware.efficiency_of("matmul", dtype, tf32=tf32) * hardware.slowest * hardware.clocks
    if work is None or not hardware.multiprocessors:
        return rate
    return rate * filled(work, hardware)


def convolution_rate(dtype: torch.dtype, hardware: Hardware, *, tf32: bool = False) -> float:
    """The fraction of the peak that a convolution reaches.

    Its factors are those of a matrix product, but for tiles.
    """
    rate = hardware.efficiency_of("convolution", dtype, tf32=tf32)
    return rate * hardware.slowest * hardware.clocks


def filled(work: Product, hardware: Hardware) -> float:
    """The part of the multiprocessors' time that a product fills, with the best tiles.

    It is the speed relative to a product of whole tiles of the fastest shape in whole waves.
    """
    return max(_filled(work, tile, hardware.multiprocessors) for tile in hardware.tiles)


@lru_cache(1 << 16)
def _filled(work: Product, tile: Tile, multiprocessors: int) -> float:
    rows, columns, speed = tile
    tiles = work.batch * ceil(work.rows / rows) * ceil(work.columns / columns)
    inside = work.batch * work.rows * work.columns / (tiles * rows * columns)
    parts = min(max(1, multiprocessors // tiles), max(1, work.terms // _LEAST_SUM))
    waves = tiles * parts / multiprocessors
    return inside * speed * waves / ceil(waves)

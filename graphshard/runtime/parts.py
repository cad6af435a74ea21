"""The parts of a parameter that ranks store, and the parameter that they make up.

A rank's part is contiguous, at the beginning of memory for a full part: parts at the end of a dim
may be smaller. Behind one another the memories of all ranks are the buffer of a gather. Split along
dim 0 the parameter is a prefix of it; otherwise parts are copied between the two.
"""

from __future__ import annotations

from itertools import product
from math import prod

from torch import Tensor

from graphshard.planning.layout import ParamLayout
from graphshard.runtime.group import strides_of


def part_of(whole: Tensor, layout: ParamLayout, rank: int) -> Tensor:
    """The part of the parameter `whole` that `rank` owns, as a view."""
    for dim, start, stop in layout.part(rank):
        whole = whole.narrow(dim, start, stop - start)
    return whole


def without_padding(stored: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The part of `shape` in the contiguous `stored`, which has room for a full one, as a view."""
    return stored.as_strided(shape, strides_of(shape))


def put_together(by_rank: Tensor, whole: Tensor, layout: ParamLayout) -> Tensor:
    """Copy the memories of all ranks, `(ranks, elements)`, into the parameter `whole`."""
    for parts, place in _pairs(by_rank, whole, layout):
        place.copy_(parts)
    return whole


def take_apart(whole: Tensor, layout: ParamLayout) -> Tensor:
    """A copy of the parameter `whole` as the memories of all ranks, `(ranks, elements)`."""
    by_rank = whole.new_empty(layout.world_size, layout.shard_numel)
    grid = by_rank.view(*(ranks for _, ranks in layout.cuts), -1)
    for axis, (dim, ranks) in enumerate(layout.cuts):
        full = layout.shape[dim] // max(layout.shard_shape[dim], 1)
        grid.narrow(axis, full, ranks - full).zero_()  # padding is in these parts alone
    for parts, place in _pairs(by_rank, whole, layout):
        parts.copy_(place)
    return by_rank


def _pairs(by_rank: Tensor, whole: Tensor, layout: ParamLayout) -> list[tuple[Tensor, Tensor]]:
    """Views of both that hold the same elements: a pair for all ranks with parts of one shape."""
    cuts = layout.cuts
    grid = by_rank.view(*(ranks for _, ranks in cuts), -1)
    runs = [_runs(layout.shape[dim], layout.shard_shape[dim]) for dim, _ in cuts]
    pairs = []
    for run in product(*runs):
        parts, place, shape = grid, whole, list(layout.shape)
        for axis, ((dim, _), (first, count, size)) in enumerate(zip(cuts, run, strict=True)):
            parts = parts.narrow(axis, first, count)
            place = place.narrow(dim, first * layout.shard_shape[dim], count * size)
            shape[dim] = size
        for (dim, _), (_, count, size) in reversed(list(zip(cuts, run, strict=True))):
            place = place.unflatten(dim, (count, size))
        # The first cut is along the lower dim, so each before it has moved a dim on.
        axes = [dim + axis for axis, (dim, _) in enumerate(cuts)]
        place = place.movedim(axes, list(range(len(axes))))
        pairs.append((parts[..., : prod(shape)].unflatten(-1, shape), place))
    return pairs


def _runs(size: int, step: int) -> list[tuple[int, int, int]]:
    """(first part, number of parts, size of each) for the full parts of a dim, and the last."""
    if not size:
        return []
    full, rest = divmod(size, step)
    return [(0, full, step), *([(full, 1, rest)] if rest else [])]

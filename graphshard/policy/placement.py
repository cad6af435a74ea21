"""What a parameter is split along over the ranks: dim 0, another one, two dims, or none."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod
from typing import Any

from graphshard.errors import PolicyError

SHARDED = "shard"


REPLICATED = "replicate"


IGNORED = "ignore"


MAX_PADDING = 0.02
"""A parameter may be padded by this share of its bytes before another way to split it is tried."""


MIN_PADDING = 64 * 1024
"""Bytes of padding, over all ranks, that any parameter may have, however small it is."""


Along = int | tuple[tuple[int, int], ...]
"""What a parameter is split along: a dim, or two dims, each with the number of its parts."""


@dataclass(frozen=True)
class RequestedPlacement:
    """The placement that a policy requests for a parameter.

    where: a dim, or "replicate". by: the source of the request, for errors. strict: whether it is
    an error if the parameter cannot be placed so; if not, the request is then ignored.
    """

    where: int | str
    by: str
    strict: bool = False

    def fits(self, shape: Sequence[int]) -> bool:
        """Whether a parameter of `shape` can be placed so: whether it has the dim."""
        return isinstance(self.where, str) or self.where < len(shape)


def split_along(shape: Sequence[int], itemsize: int, ranks: int) -> Along | None:
    """Choose what to split a parameter of `shape` along over `ranks`; None replicates a scalar.

    Dim 0 is chosen if its padding is at most 2 % of the parameter or 64 KiB over all ranks, since
    parts along dim 0 lie one after the other in the parameter and need no copy. Otherwise the dim
    that pads least is chosen, the lowest of several. If that pads more than this too, the ranks
    form a grid and split two dims, whichever and however pads least, unless a single dim pads less.
    """
    if not shape:
        return None
    allowed = max(MAX_PADDING * prod(shape) * itemsize, MIN_PADDING)
    dims: list[Along] = list(range(len(shape)))
    for ways in (dims[:1], dims, [*dims, *_grids(len(shape), ranks)]):
        along = min(ways, key=lambda way: stored_numel(shape, way, ranks))
        if (stored_numel(shape, along, ranks) - prod(shape)) * itemsize <= allowed:
            break
    return along


def _grids(dims: int, ranks: int) -> Iterator[Along]:
    """Every way to split two of `dims` dims, that with most parts along the first dim first.

    Of equal ones it has the longest runs in memory.
    """
    for second in range(2, ranks):
        if ranks % second == 0:
            for pair in combinations(range(dims), 2):
                yield tuple(zip(pair, (ranks // second, second), strict=True))


def cuts_of(along: Along, ranks: int) -> tuple[tuple[int, int], ...]:
    """Each dim that is split, with the number of its parts."""
    return ((along, ranks),) if isinstance(along, int) else along


def along_text(along: Along) -> str:
    """For example "dim 1", or "dims 0 x 1 in 512 x 2" parts."""
    if isinstance(along, int):
        return f"dim {along}"
    dims, parts = zip(*along, strict=True)
    return f"dims {' x '.join(map(str, dims))} in {' x '.join(map(str, parts))}"


def stored_numel(shape: Sequence[int], along: Along, ranks: int) -> int:
    """Elements that all ranks store together of a parameter of `shape`, padding included."""
    padded = list(shape)
    for dim, parts in cuts_of(along, ranks):
        padded[dim] = -(-padded[dim] // parts) * parts
    return prod(padded)


def requested_placements(
    value: Any, names: Sequence[str], unit: str
) -> dict[str, RequestedPlacement]:
    """Return the placement that the override `placement` of `unit` requests for each of `names`.

    `value` is None, a dim or "replicate" for all parameters, or a mapping from FQNs to a
    `RequestedPlacement`.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping) and all(
        isinstance(request, RequestedPlacement) for request in value.values()
    ):
        return dict(value)
    by = f"the policy, for unit {unit or '(root)'}"
    return dict.fromkeys(names, RequestedPlacement(checked_where(value, by), by))


def checked_where(value: Any, by: str) -> int | str:
    """Return `value` if it is a dim or "replicate"."""
    dim = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not dim and value != REPLICATED:
        raise PolicyError(
            f'{by}: placement must be a dim, 0 or more, or "{REPLICATED}"; got {value!r}'
        )
    return value

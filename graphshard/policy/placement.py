"""Where a parameter is split over the ranks: along dim 0, along another one, or not at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from graphshard.errors import PolicyError

SHARDED = "shard"


REPLICATED = "replicate"


IGNORED = "ignore"


# Padding of dim 0 is accepted up to this share of the parameter ...
MAX_PADDING = 0.1


# ... and of a parameter of fewer bytes than this, where it is noise and dim 0 is what FSDP2 has.
MIN_BYTES = 64 * 1024


# What a rank keeps of a parameter it trains: itself, its gradient, the two moments of Adam. A
# frozen one counts alike, since freezing it must not move it.
COPIES = 4


@dataclass(frozen=True)
class RequestedPlacement:
    """A placement that a policy asks for.

    where: a dim, or "replicate". by: who asks, for errors. strict: whether a parameter that cannot
    be split so is an error; else it is placed as if nobody had asked.
    """

    where: int | str
    by: str
    strict: bool = False

    def fits(self, shape: Sequence[int], ranks: int) -> bool:
        """Whether a parameter of `shape` can be placed so; only dim 0 may be padded."""
        if self.where == REPLICATED:
            return True
        dim = self.where
        assert isinstance(dim, int)
        return dim < len(shape) and (dim == 0 or (shape[dim] > 0 and shape[dim] % ranks == 0))


def split_dim(
    shape: Sequence[int], itemsize: int, ranks: int, *, rows_only: bool = False
) -> int | None:
    """The dim to split a parameter of `shape` along over `ranks`; None: each holds all of it.

    Dim 0, unless padding it to a multiple of `ranks` would add more than 10 % to a parameter of
    64 KiB or more. Then the lowest other dim that `ranks` divides. If there is none, the parameter
    is replicated where that costs a rank no more memory: where four whole copies (the parameter,
    its gradient and two optimizer states) take no more bytes than four padded shards and the padded
    buffer they are gathered into. Else dim 0 is padded all the same, and the plan says so.
    `rows_only` leaves other dims out, as SHARD_OPTIMIZER must.
    """
    if not shape:
        return None
    if prod(shape) * itemsize < MIN_BYTES or padding_share(shape, ranks) <= MAX_PADDING:
        return 0
    for dim in range(1, 1 if rows_only else len(shape)):
        if shape[dim] % ranks == 0:
            return dim
    rows = -(-shape[0] // ranks)
    return None if COPIES * shape[0] <= COPIES * rows + ranks * rows else 0


def padding_share(shape: Sequence[int], ranks: int) -> float:
    """Elements that padding dim 0 to a multiple of `ranks` adds, as a share of the parameter's."""
    return (-shape[0] % ranks) / max(shape[0], 1)


def requested_placements(
    value: Any, names: Sequence[str], unit: str
) -> dict[str, RequestedPlacement]:
    """What the override `placement` of `unit` asks for each of its parameters `names`.

    Args:
        value: None, a dim or "replicate" for all of them, or a mapping from names to a
            `RequestedPlacement`.
        names: FQNs.
        unit: for errors.

    Raises:
        PolicyError: `value` is something else.
    """
    if value is None:
        return {}
    if isinstance(value, Mapping) and all(
        isinstance(wish, RequestedPlacement) for wish in value.values()
    ):
        return dict(value)
    by = f"the policy, for unit {unit or '(root)'}"
    return dict.fromkeys(names, RequestedPlacement(checked_where(value, by), by))


def checked_where(value: Any, by: str) -> int | str:
    """`value`, if it is a dim or "replicate".

    Raises:
        PolicyError: it is neither.
    """
    dim = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not dim and value != REPLICATED:
        raise PolicyError(
            f'{by}: placement must be a dim, 0 or more, or "{REPLICATED}"; got {value!r}'
        )
    return value

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


MAX_PADDING = 0.1
"""Dim 0 may be padded by this share of the parameter."""


MIN_BYTES = 64 * 1024
"""Smaller parameters are always split along dim 0, as FSDP2 does: their padding is negligible."""


COPIES = 4
"""Tensors a rank keeps per trained parameter: parameter, gradient, and the two moments of Adam.

A frozen parameter counts the same, so that freezing it does not change its placement.
"""


@dataclass(frozen=True)
class RequestedPlacement:
    """The placement that a policy requests for a parameter.

    where: a dim, or "replicate". by: the source of the request, for errors. strict: whether it is
    an error if the parameter cannot be placed so; if not, the request is then ignored.
    """

    where: int | str
    by: str
    strict: bool = False

    def fits(self, shape: Sequence[int], ranks: int) -> bool:
        """Whether a parameter of `shape` can be placed so on `ranks`; only dim 0 may be padded."""
        if self.where == REPLICATED:
            return True
        dim = self.where
        assert isinstance(dim, int)
        return dim < len(shape) and (dim == 0 or (shape[dim] > 0 and shape[dim] % ranks == 0))


def split_dim(
    shape: Sequence[int], itemsize: int, ranks: int, *, rows_only: bool = False
) -> int | None:
    """Choose the dim to split a parameter of `shape` along over `ranks`; None replicates it.

    Dim 0 is chosen unless padding it to a multiple of `ranks` adds more than 10 % to a parameter of
    64 KiB or more. Then the lowest other dim that `ranks` divides is chosen. If no dim does, the
    parameter is replicated where that takes a rank no more memory: where four whole copies (the
    parameter, its gradient and two optimizer states) need no more bytes than four padded shards and
    one padded gathered buffer. Otherwise dim 0 is padded after all, and the plan warns of it.

    Args:
        shape: of the parameter.
        itemsize: bytes of an element.
        ranks: number of ranks to split over.
        rows_only: consider dim 0 only, as SHARD_OPTIMIZER needs.
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
    """The share of elements that padding dim 0 to a multiple of `ranks` adds."""
    return (-shape[0] % ranks) / max(shape[0], 1)


def requested_placements(
    value: Any, names: Sequence[str], unit: str
) -> dict[str, RequestedPlacement]:
    """Return the placement that the override `placement` of `unit` requests for each parameter.

    Args:
        value: the override: None, a dim or "replicate" for all parameters, or a mapping from FQNs
            to a `RequestedPlacement`.
        names: FQNs of the unit's parameters.
        unit: the unit's FQN, for errors.

    Raises:
        PolicyError: `value` is none of these.
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
    """Return `value` if it is a dim or "replicate".

    Raises:
        PolicyError: it is neither; `by` starts the message.
    """
    dim = isinstance(value, int) and not isinstance(value, bool) and value >= 0
    if not dim and value != REPLICATED:
        raise PolicyError(
            f'{by}: placement must be a dim, 0 or more, or "{REPLICATED}"; got {value!r}'
        )
    return value

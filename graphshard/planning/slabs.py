"""Slabs of pinned memory: few blocks of a power of two that hold all shards on the host.

torch's allocator of pinned memory rounds each block up to a power of two. Shards with blocks of
their own would take up to twice their bytes; packed into slabs of such sizes they take few more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 512
"""Bytes that each tensor's place in a slab is a multiple of."""

_LARGEST = 1 << 32
"""Bytes of a slab, unless a tensor needs more."""


@dataclass(frozen=True)
class Slabs:
    """Where tensors lie in slabs of `sizes` bytes, powers of two.

    `places` has by tensor its slab and its first byte there.
    """

    sizes: tuple[int, ...]
    places: tuple[tuple[int, int], ...]

    @property
    def total_bytes(self) -> int:
        """Bytes of all slabs."""
        return sum(self.sizes)


def pack(sizes: Sequence[int]) -> Slabs:
    """The slabs that hold tensors of these bytes with least waste.

    They are those of first fit, the largest tensor first, for the best power of two that a slab may
    have; or each tensor has one of its own.
    """
    taken = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    least = _power_of_two(max(taken, default=0))
    most = max(least, min(_LARGEST, _power_of_two(sum(taken))))
    found = [_first_fit(taken, 0)]
    while least <= most:
        found.append(_first_fit(taken, least))
        least *= 2
    return min(found, key=lambda slabs: (slabs.total_bytes, len(slabs.sizes)))


def _first_fit(taken: Sequence[int], slab: int) -> Slabs:
    used: list[int] = []
    places = [(0, 0)] * len(taken)
    for index in sorted(range(len(taken)), key=lambda index: -taken[index]):
        size = taken[index]
        if not size:
            continue
        place = next((at for at, bytes_ in enumerate(used) if bytes_ + size <= slab), len(used))
        if place == len(used):
            used.append(0)
        places[index] = (place, used[place])
        used[place] += size
    return Slabs(tuple(_power_of_two(bytes_) for bytes_ in used), tuple(places))


def _power_of_two(size: int) -> int:
    return 1 << max(size - 1, 0).bit_length()

"""Checks for NaN and infinity as a rank runs them, and the report that ends a step.

A check is a few reductions on the device. The report waits for the numbers of all checks at once,
and the ranks tell each other which of them is the first that is not finite.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from graphshard.errors import CollectiveError
from graphshard.program.finite import values_of
from graphshard.runtime.group import Group, as_reals

_SMALL = 1 << 14
"""Elements below which tensors are joined, as each operator then costs more than its work."""


def probe(values: Sequence[Tensor]) -> Tensor:
    """A number `()` that is NaN or infinite if any element of `values` is.

    A sum reads memory as fast as a copy does, and needs no memory itself. So that it cannot exceed
    what its dtype holds, half-precision elements give their largest magnitude instead. The number
    is float64 if an element has 64 bits, or else float32.
    """
    small: dict[torch.dtype, list[Tensor]] = {}
    numbers = []
    for value in values:
        real = as_reals(value)
        if real.numel() < _SMALL:
            small.setdefault(real.dtype, []).append(real.reshape(-1))
        else:
            numbers.append(_number(real))
    for flat in small.values():
        numbers.append(_number(flat[0] if len(flat) == 1 else torch.cat(flat)))
    return _joined(numbers, values)


def probe_masked(values: Sequence[Tensor]) -> Tensor:
    """As `probe`, but elements that are -inf count as finite."""
    numbers = [
        value.amax().clamp_min(0) if value.numel() else value.new_zeros(()) for value in values
    ]
    return _joined(numbers, values)


def _number(value: Tensor) -> Tensor:
    if value.dtype is not torch.float16 or not value.numel():
        return value.sum()
    low, high = torch.aminmax(value)
    return high - low


def _joined(numbers: list[Tensor], values: Sequence[Tensor]) -> Tensor:
    wide = any(value.dtype in (torch.float64, torch.complex128) for value in values)
    dtype = torch.float64 if wide else torch.float32
    if len(numbers) == 1:
        return numbers[0].to(dtype)
    return torch.stack(_as(dtype, numbers)).sum()


def _as(dtype: torch.dtype, numbers: Sequence[Tensor]) -> list[Tensor]:
    return [number if number.dtype is dtype else number.to(dtype) for number in numbers]


for _function in (probe, probe_masked):
    _function.__module__ = "graphshard"  # fx prints a call by it


@dataclass(frozen=True)
class Found:
    """The name of the first check of a step that was not finite, and on which ranks."""

    check: str
    ranks: tuple[int, ...]


class FiniteReports:
    """What the reports of one module's programs found.

    found: by the last report, if it was not taken; None if all was finite.
    told: the names of the checks that users were told of.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.found: Found | None = None
        self.told: set[str] = set()

    def take(self) -> Found | None:
        """What the last report found, once."""
        found, self.found = self.found, None
        return found

    def bind(self, copied: fx.Node, node: fx.Node) -> None:
        """Make `copied`, the copy of the `report_finite` `node`, a call that sets `found`."""
        copied.target = self._report([check.name for check in values_of(node)])

    def _report(self, names: Sequence[str]) -> Callable[[Sequence[Tensor]], None]:
        places = torch.arange(len(names), device=self.group.device)

        def report(numbers: Sequence[Tensor]) -> None:
            self.found = None
            if not numbers:
                return
            joined = torch.stack(_as(numbers[0].dtype, numbers))
            first = torch.where(torch.isfinite(joined), len(names), places).amin()
            by_rank = self._of_all_ranks(first)
            place = min(by_rank)
            if place < len(names):
                ranks = tuple(rank for rank, other in enumerate(by_rank) if other == place)
                self.found = Found(names[place], ranks)

        report.__name__ = report.__qualname__ = "report_finite"
        report.take_part = lambda _: self._of_all_ranks(places.new_tensor(len(names)))  # type: ignore[attr-defined]
        report.__module__ = "graphshard"
        return report

    def _of_all_ranks(self, number: Tensor) -> list[int]:
        """An integer `()` of each rank, in rank order; the host waits for it."""
        group = self.group
        if group.size == 1 or group.backend == "fake" or group.here.has_done():
            return [int(number)]
        try:
            group.here.begun += 1
            return [row[0] for row in group.gather_tensor(number.view(1)).tolist()]
        except RuntimeError as error:
            group.here.lost = True
            raise CollectiveError(
                f"rank {group.rank} of {group.size} reports whether its step was finite, but "
                "another rank died, raised an error, or did not get here within "
                f"{group.timeout.total_seconds():g} s; look for the first error in the logs of "
                f"all ranks ({error})"
            ) from error

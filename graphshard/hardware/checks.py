"""Checks of the figures of a machine."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from graphshard.errors import CostError
from graphshard.hardware.curves import ATTENTION_KERNELS, DIRECTIONS
from graphshard.plain_data import is_number, shown

KINDS = ("matmul", "attention", "convolution", "bandwidth", "network", "host")
"""The kinds of efficiency that every machine has."""


DEVICES = ("", "cpu", "gpu")
"""What ranks compute on; "" says it by the name."""


DTYPES = ("float64", "float32", "tfloat32", "bfloat16", "float16", "float8")
"""The dtypes that may have an efficiency of their own."""


OVERHEADS = ("context", "communicator", "workspace", "driver")
"""What takes memory of a device beside tensors; see `graphshard.cost.reserved`."""


TABLES = ("flops", "efficiency", "attention_rates", "confidence", "curves", "lines", "overhead")
"""The figures that are tables."""


_MORE_KINDS = frozenset(
    {"network.inter", "network.all_reduce"}
    | {f"{kind}.{dtype}" for kind in ("matmul", "attention", "convolution") for dtype in DTYPES}
)


_POSITIVE = (
    "memory_bytes",
    "memory_bandwidth",
    "launch_floor",
    "gpus_per_node",
    "intra_bandwidth",
    "intra_latency",
    "inter_bandwidth",
    "inter_latency",
    "host_bandwidth",
    "power_exponent",
    "in_step",
)


_AT_LEAST_0 = ("contention_bytes", "step_overhead", "tdp_watts", "power_limit", "pair_spread")


_UNITS = {"step_overhead": "seconds ", "tdp_watts": "watts ", "power_limit": "watts "}


_WHOLE = ("memory_bytes", "gpus_per_node", "multiprocessors")


class Check:
    """A check of the fields of `Hardware`."""

    def __init__(self, figures: Mapping[str, Any]) -> None:
        self.figures = figures

    def stored(self) -> dict[str, Any]:
        """The fields that are stored in another form, all checked."""
        stored = {
            "curves": self._points("curves"),
            "attention_rates": self._points("attention_rates"),
            "lines": self._rows("lines"),
            "tiles": tuple(
                self._sequence("tiles", row)
                for row in self._sequence("tiles", self.figures["tiles"])
            ),
            "spread": self._sequence("spread", self.figures["spread"]),
        }
        stored |= {
            name: MappingProxyType(dict(self.figures[name]))
            for name in ("flops", "efficiency", "confidence", "overhead")
        }
        self._device()
        self._numbers()
        self._efficiency()
        self._measured(stored)
        self._kernels(stored)
        self._power()
        self._overhead()
        return stored

    def _wrong(self, said: str) -> CostError:
        return CostError(f"hardware {self.figures['name']!r}: {said}")

    # -- forms ------------------------------------------------------------------------------------

    def _sequence(self, name: str, value: Any) -> tuple[Any, ...]:
        if isinstance(value, (tuple, list)):
            return tuple(value)
        raise self._wrong(f"{name} must be a list of numbers; got {shown(value)}")

    def _points(self, name: str) -> Mapping[str, Any]:
        return self._rows(name, lambda points: tuple(map(tuple, points)))

    def _rows(self, name: str, form: Any = tuple) -> Mapping[str, Any]:
        try:
            return MappingProxyType({key: form(row) for key, row in self.figures[name].items()})
        except TypeError as error:
            raise self._wrong(
                f"a curve is a list of pairs, a line one of three times: {error}"
            ) from error

    def _device(self) -> None:
        device = self.figures["device"]
        if device not in DEVICES:
            raise self._wrong(
                f'device must be "cpu" or "gpu", what ranks compute on, or "" to '
                f"take it from the name; got {shown(device)}"
            )

    # -- numbers ----------------------------------------------------------------------------------

    def _numbers(self) -> None:
        figures = self.figures
        for kind in KINDS:
            if kind not in figures["efficiency"]:
                raise self._wrong(f"efficiency has no {kind!r}")
        if "float32" not in figures["flops"]:
            raise self._wrong("flops has no 'float32'")
        numbers = {name: figures[name] for name in _POSITIVE}
        numbers |= {f"flops.{k}": v for k, v in figures["flops"].items()}
        numbers |= {f"efficiency.{k}": v for k, v in figures["efficiency"].items()}
        for name, value in numbers.items():
            if not is_number(value) or value <= 0:
                raise self._wrong(f"{name} must be a positive number; got {shown(value)}")
        for name in _AT_LEAST_0:
            self._within(name, 0, None)
        self._within("contention", 0, 1)
        self._within("slowest", 0, 1)
        self._within("multiprocessors", 0, None)
        for name in _WHOLE:
            if not float(figures[name]).is_integer():
                raise self._wrong(f"{name} must be a whole number")
        if not figures["slowest"]:
            raise self._wrong("slowest must be more than 0")

    def _within(self, name: str, least: float, most: float | None) -> None:
        value = self.figures[name]
        if is_number(value) and least <= value and (most is None or value <= most):
            return
        unit = _UNITS.get(name, "")
        bounds = f"0 {unit}or more" if most is None else f"a part between {least} and {most}"
        raise self._wrong(f"{name} must be {bounds}; got {shown(value)}")

    def _efficiency(self) -> None:
        for name in self.figures["efficiency"]:
            if name not in KINDS and name not in _MORE_KINDS:
                raise self._wrong(
                    f"efficiency has an unknown kind {shown(name)}; kinds: "
                    f"{', '.join(KINDS)}, network.inter, network.all_reduce, or one with a dtype, "
                    'as in "matmul.float32"'
                )
        for name, text in self.figures["confidence"].items():
            if not isinstance(text, str):
                raise self._wrong(f"confidence.{name} must be a text; got {shown(text)}")

    def _measured(self, stored: Mapping[str, Any]) -> None:
        for name, points in stored["curves"].items():
            if not _is_curve(points) or not all(a[1] <= b[1] for a, b in pairwise(points)):
                raise self._wrong(
                    f"the curve {name!r} must be pairs of an amount and seconds, "
                    "both positive, amounts ascending, seconds never descending"
                )
        for name, line in stored["lines"].items():
            if len(line) != 3 or not all(is_number(part) and part >= 0 for part in line):
                raise self._wrong(
                    f"the line {name!r} must be three times of 0 seconds or more: "
                    f"per call, per tensor and per byte; got {shown(line)}"
                )
        spread = stored["spread"]
        ordered = len(spread) == 2 and all(map(is_number, spread)) and 0 < spread[0] <= spread[1]
        if not ordered or not spread[0] <= 1 <= spread[1]:
            raise self._wrong(
                "spread must be the least and the most part of the predicted time, "
                "at most 1 and at least 1, as the prediction itself is expected; such as "
                f"[0.95, 1.15]; got {shown(list(spread))}"
            )

    # -- kernels ----------------------------------------------------------------------------------

    def _kernels(self, stored: Mapping[str, Any]) -> None:
        for tile in stored["tiles"]:
            good = len(tile) == 3 and all(is_number(part) and part > 0 for part in tile)
            if not good or tile[2] > 1:
                raise self._wrong(
                    "a tile is its rows, its columns and its relative speed of at "
                    f"most 1; got {shown(list(tile))}"
                )
        if bool(stored["tiles"]) != bool(self.figures["multiprocessors"]):
            raise self._wrong("tiles and multiprocessors are given together, or neither")
        kernels = set()
        for name, points in stored["attention_rates"].items():
            kernel, _, rest = str(name).partition(".")
            direction, _, head = rest.partition(".")
            if kernel not in ATTENTION_KERNELS or direction not in DIRECTIONS or not head.isdigit():
                raise self._wrong(
                    f"attention_rates has an unknown row {shown(name)}; a row is "
                    'named by kernel, direction and head size, as in "fa2.forward.128"'
                )
            if not _is_curve(points) or any(fraction > 1 for _, fraction in points):
                raise self._wrong(
                    f"the attention rate {name!r} must be pairs of a length and a "
                    "fraction of the peak, lengths ascending"
                )
            kernels.add(kernel)
        chosen = self.figures["attention_kernel"]
        if chosen and chosen not in kernels:
            known = f"has rates of {', '.join(sorted(kernels))}" if kernels else "has no rates"
            raise self._wrong(
                f"attention_kernel {shown(chosen)} has no rates; this hardware "
                f"{known} of attention kernels"
            )

    def _power(self) -> None:
        limit, most = self.figures["power_limit"], self.figures["tdp_watts"]
        if not limit:
            return
        if not most:
            raise self._wrong(
                "a power_limit needs tdp_watts, the power that its figures are of; "
                "a calibrated file was measured under the limit of its day and takes none"
            )
        if limit > most:
            raise self._wrong(f"power_limit must be at most tdp_watts, {most:g} W; got {limit:g}")

    def _overhead(self) -> None:
        for name, value in self.figures["overhead"].items():
            if name not in OVERHEADS:
                raise self._wrong(
                    f"overhead has an unknown figure {shown(name)}; it may have "
                    f"{', '.join(OVERHEADS)}"
                )
            if not is_number(value) or value < 0:
                raise self._wrong(f"overhead.{name} must be 0 bytes or more; got {shown(value)}")


def _is_curve(points: Any) -> bool:
    pairs = points and all(len(p) == 2 and all(map(is_number, p)) for p in points)
    return bool(
        pairs and min(map(min, points)) > 0 and all(a[0] < b[0] for a, b in pairwise(points))
    )

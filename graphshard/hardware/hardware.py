"""Descriptions of machines as numbers: presets, files, and their checks."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from itertools import pairwise
from math import isfinite
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from graphshard.errors import CostError
from graphshard.hardware.curves import Points

_NOT_POSITIVE = frozenset(
    {"name", "flops", "efficiency", "about", "source", "contention", "step_overhead"}
    | {"curves", "lines"}
)


KINDS = ("matmul", "attention", "convolution", "bandwidth", "network", "host")


@dataclass(frozen=True)
class Hardware:
    """One kind of node, and the network between such nodes.

    Bandwidths are bytes per second in one direction and per device; latencies are seconds per hop
    of a collective.

    Args:
        name: of the preset or file.
        flops: peak FLOP/s of dense matrix products by dtype name ("float32", "bfloat16",
            "tfloat32" for float32 under `torch.set_float32_matmul_precision("high")`).
        memory_bytes: of one device.
        memory_bandwidth: of its memory.
        launch_floor: the least time a kernel takes, in seconds.
        gpus_per_node: devices that share `intra_bandwidth`.
        intra_bandwidth: between devices of a node.
        intra_latency: per hop within a node.
        inter_bandwidth: between nodes, one device's share.
        inter_latency: per hop between nodes.
        host_bandwidth: between a device and its host.
        efficiency: by kind ("matmul", "attention", "convolution", "bandwidth", "network", "host"),
            the fraction of the peak that large operations reach.
        about: a text that describes the machine.
        source: a text on the origin of the figures.
        contention: the fraction of compute's speed lost while a collective or host copy is under
            way.
        step_overhead: seconds of a step besides its nodes and its optimizer.
        curves: by operator ("matmul", "gelu_backward", "view"; "matmul.bfloat16" in a dtype other
            than float32): ascending pairs of (FLOPs, or bytes read and written; seconds). An
            operator with a curve takes the curve's time.
        lines: by collective ("all_gather", "reduce_scatter", "all_reduce"; "all_gather.inter"
            between nodes): seconds per hop of a ring, per tensor, and per byte that passes a rank;
            by optimizer ("adamw"): seconds per step, per tensor, and per byte of its shards.

    Raises:
        CostError: a figure is missing, or not a positive number.
    """

    name: str
    flops: Mapping[str, float]
    memory_bytes: int
    memory_bandwidth: float
    launch_floor: float
    gpus_per_node: int
    intra_bandwidth: float
    intra_latency: float
    inter_bandwidth: float
    inter_latency: float
    host_bandwidth: float
    efficiency: Mapping[str, float] = field(default_factory=lambda: dict.fromkeys(KINDS, 1.0))
    about: str = ""
    source: str = ""
    contention: float = 0.0
    step_overhead: float = 0.0
    curves: Mapping[str, Points] = field(default_factory=dict)
    lines: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def is_host(self) -> bool:
        """Whether ranks compute on the host, over Gloo, so that offloading is pointless."""
        return "gloo" in self.name

    def __post_init__(self) -> None:
        for name in ("flops", "efficiency"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        for kind in KINDS:
            if kind not in self.efficiency:
                raise CostError(f"hardware {self.name!r}: efficiency has no {kind!r}")
        if "float32" not in self.flops:
            raise CostError(f"hardware {self.name!r}: flops has no 'float32'")
        self._check_measured()
        numbers = {
            f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_POSITIVE
        }
        numbers |= {f"flops.{k}": v for k, v in self.flops.items()}
        numbers |= {f"efficiency.{k}": v for k, v in self.efficiency.items()}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise CostError(
                    f"hardware {self.name!r}: {name} must be a positive number; got {value!r}"
                )

    def _check_measured(self) -> None:
        try:
            curves = {name: tuple(map(tuple, points)) for name, points in self.curves.items()}
            lines = {name: tuple(line) for name, line in self.lines.items()}
        except TypeError as error:
            raise CostError(
                f"hardware {self.name!r}: a curve is a list of pairs, a line one of three times: "
                f"{error}"
            ) from error
        object.__setattr__(self, "curves", MappingProxyType(curves))
        object.__setattr__(self, "lines", MappingProxyType(lines))
        for name in ("contention", "step_overhead"):
            value = getattr(self, name)
            if not _is_number(value) or value < 0 or (name == "contention" and value > 1):
                least = "a part between 0 and 1" if name == "contention" else "0 seconds or more"
                raise CostError(f"hardware {self.name!r}: {name} must be {least}; got {value!r}")
        for name, points in curves.items():
            pairs = points and all(len(p) == 2 and all(map(_is_number, p)) for p in points)
            if not pairs or min(map(min, points)) <= 0 or not _ascends(points):
                raise CostError(
                    f"hardware {self.name!r}: the curve {name!r} must be pairs of an amount and "
                    "seconds, both positive, amounts ascending, seconds never descending"
                )
        for name, line in lines.items():
            if len(line) != 3 or not all(_is_number(part) and part >= 0 for part in line):
                raise CostError(
                    f"hardware {self.name!r}: the line {name!r} must be three times of 0 seconds "
                    f"or more: per call, per tensor and per byte; got {line!r}"
                )

    def matmul_flops(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Peak FLOP/s of matrix products in `dtype`, or in float32 if `dtype` is not listed."""
        return self.flops.get(dtype_name(dtype, tf32=tf32), self.flops["float32"])

    def with_(self, **changes: Any) -> Hardware:
        """Return a copy with some figures changed, such as `gpus_per_node=4`."""
        return replace(self, **changes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a JSON file for `load`."""
        data = self.to_dict()
        long = {name: data.pop(name) for name in ("curves", "lines")}
        lines = [f'  "{name}": {json.dumps(value)}' for name, value in data.items()]
        for name, table in long.items():  # one row per line, so that people can compare them
            rows = ",\n".join(f'    "{key}": {json.dumps(row)}' for key, row in table.items())
            lines.append(f'  "{name}": {{\n{rows}\n  }}' if rows else f'  "{name}": {{}}')
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        plain = ("flops", "efficiency", "curves", "lines")
        return data | {name: dict(getattr(self, name)) for name in plain}

    @classmethod
    def load(cls, what: str | os.PathLike[str] | Hardware) -> Hardware:
        """Return a preset by name, or read a file written by `save` or `graphshard calibrate`.

        Raises:
            CostError: there is no preset or file of that name, or the file describes no hardware.
        """
        if isinstance(what, Hardware):
            return what
        if isinstance(what, str) and what.lower() in preset_names():
            return _presets()[what.lower()]
        path = Path(what)
        if not path.is_file():
            raise CostError(
                f"there is no hardware preset or file {str(what)!r}; presets: "
                f"{', '.join(preset_names())}"
            )
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise CostError(f"{path} is no hardware file: {error}") from error
        return _from_table(path.stem, data)

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return f"{self.name}: {self.about}" if self.about else self.name


def dtype_name(dtype: torch.dtype, *, tf32: bool = False) -> str:
    """The name of `dtype` in `Hardware`: "tfloat32" for float32 under TF32, "float8" for any."""
    name = "tfloat32" if tf32 and dtype is torch.float32 else str(dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)


def _ascends(points: tuple[tuple[float, ...], ...]) -> bool:
    return all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(points))


def preset_names() -> tuple[str, ...]:
    """The names of the presets that `Hardware.load` accepts."""
    return tuple(_presets())


@cache
def _presets() -> dict[str, Hardware]:
    folder = resources.files("graphshard.hardware")
    tables = tomllib.loads(folder.joinpath("presets.toml").read_text(encoding="utf-8"))
    common = tables.pop("efficiency")
    presets = {
        name: _from_table(name, {"efficiency": common} | table) for name, table in tables.items()
    }
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name, dot, ending = entry.name.rpartition(".")
        if dot and ending == "json":  # as `graphshard calibrate --out` wrote it
            presets[name] = _from_table(name, json.loads(entry.read_text(encoding="utf-8")))
    return presets


def _from_table(name: str, table: Any) -> Hardware:
    if not isinstance(table, dict):
        raise CostError(f"hardware {name!r} must be a table of figures; got {table!r}")
    field_names = {f.name for f in fields(Hardware)}
    for key in table:
        if key not in field_names:
            raise CostError(f"hardware {name!r} has an unknown figure {key!r}")
    for key in ("flops", "efficiency", "curves", "lines"):
        if key in table and not isinstance(table[key], dict):
            raise CostError(f"hardware {name!r}: {key} must be a table; got {table[key]!r}")
    figures: dict[str, Any] = {"name": name, **table}
    try:
        return Hardware(**figures)
    except TypeError as error:
        raise CostError(f"hardware {name!r} lacks a figure: {error}") from error

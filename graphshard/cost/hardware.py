"""The machines a program is to run on, as numbers: presets, files, and what they must hold."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from importlib import resources
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from graphshard.errors import CostError

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
        about: what it is.
        source: where the figures come from.

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

    def __post_init__(self) -> None:
        for name in ("flops", "efficiency"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))
        for kind in KINDS:
            if kind not in self.efficiency:
                raise CostError(f"hardware {self.name!r}: efficiency has no {kind!r}")
        if "float32" not in self.flops:
            raise CostError(f"hardware {self.name!r}: flops has no 'float32'")
        numbers = {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if f.name not in ("name", "flops", "efficiency", "about", "source")
        }
        numbers |= {f"flops.{k}": v for k, v in self.flops.items()}
        numbers |= {f"efficiency.{k}": v for k, v in self.efficiency.items()}
        for name, value in numbers.items():
            if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
                raise CostError(
                    f"hardware {self.name!r}: {name} must be a positive number; got {value!r}"
                )

    def matmul_flops(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Peak FLOP/s of matrix products in `dtype`; that of float32 for a dtype not listed."""
        name = "tfloat32" if tf32 and dtype is torch.float32 else str(dtype).removeprefix("torch.")
        if name.startswith("float8"):
            name = "float8"
        return self.flops.get(name, self.flops["float32"])

    def with_(self, **changes: Any) -> Hardware:
        """A copy with some figures changed, such as `gpus_per_node=4`."""
        return replace(self, **changes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as JSON, to be read by `load`."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return data | {"flops": dict(self.flops), "efficiency": dict(self.efficiency)}

    @classmethod
    def load(cls, what: str | os.PathLike[str] | Hardware) -> Hardware:
        """A preset by name, or what `save` or `graphshard calibrate` wrote.

        Raises:
            CostError: there is neither a preset nor a file of that name, or the file is no
                description of hardware.
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


def preset_names() -> tuple[str, ...]:
    """The names `Hardware.load` knows."""
    return tuple(_presets())


@cache
def _presets() -> dict[str, Hardware]:
    text = resources.files("graphshard.cost").joinpath("presets.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    common = tables.pop("efficiency")
    return {name: _from_table(name, {"efficiency": common} | t) for name, t in tables.items()}


def _from_table(name: str, table: Any) -> Hardware:
    if not isinstance(table, dict):
        raise CostError(f"hardware {name!r} must be a table of figures; got {table!r}")
    known = {f.name for f in fields(Hardware)}
    for key in table:
        if key not in known:
            raise CostError(f"hardware {name!r} has an unknown figure {key!r}")
    for key in ("flops", "efficiency"):
        if key in table and not isinstance(table[key], dict):
            raise CostError(f"hardware {name!r}: {key} must be a table; got {table[key]!r}")
    figures: dict[str, Any] = {"name": name, **table}
    try:
        return Hardware(**figures)
    except TypeError as error:
        raise CostError(f"hardware {name!r} lacks a figure: {error}") from error

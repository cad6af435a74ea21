"""Descriptions of machines as numbers: their fields, files, presets and lookups."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import torch

from graphshard.errors import CostError
from graphshard.format import meant
from graphshard.hardware.checks import KINDS, OVERHEADS, TABLES, Check
from graphshard.hardware.curves import Points, default_kernel, rate_of
from graphshard.plain_data import read_json, shown

__all__ = ["KINDS", "OVERHEADS", "Hardware", "dtype_name", "preset_names"]


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
            the fraction of the peak that large operations reach. "matmul.float32" is that of one
            dtype, "network.inter" that between nodes, and "network.all_reduce" that of an
            all_reduce within a node whose switch adds (NVLink SHARP).
        about: a text that describes the machine.
        source: a text on the origin of the figures.
        contention: the fraction of compute's speed lost while a collective is under way, on hosts
            also while a host copy is.
        contention_bytes: bytes of device memory that a collective reads and writes for each byte it
            sends; they slow kernels that only move bytes.
        step_overhead: seconds of a step besides its nodes and its optimizer.
        in_step: the time of an operator within a step, as a multiple of its time by the other
            figures.
        slowest: the speed of the slowest of many devices, as a fraction of a usual one's. Ranks
            wait for it.
        multiprocessors: over which the tiles of a matrix product are spread; 0 if they are not
            known, and products then run at one fraction of the peak.
        tiles: shapes of the tiles of a product's result: rows, columns, and the speed relative to
            the fastest shape.
        attention_rates: by "KERNEL.DIRECTION.HEAD SIZE" ("fa2.forward.128"), ascending pairs of
            sequence length and fraction of the peak. Without any, `efficiency["attention"]` counts.
        attention_kernel: "fa1", "fa2", "fa3" or "cudnn"; "" for the one that the installed torch
            takes by default.
        tdp_watts: the power of the device that `efficiency` was measured at; 0 if unknown.
        power_limit: watts that the device is limited to; 0 if it is not.
        power_exponent: the speed of matrix products and convolutions is `(power_limit /
            tdp_watts) ** power_exponent`.
        spread: the least and most seconds of measured steps, as fractions of predicted ones.
        pair_spread: by how much the ratio of two predictions for one machine may be wrong.
        confidence: by name of a figure, a text on what it rests on, if that is not a measurement or
            a datasheet.
        curves: by operator ("matmul", "gelu_backward", "view"; "matmul.bfloat16" in a dtype other
            than float32): ascending pairs of (FLOPs, or bytes read and written; seconds). An
            operator with a curve takes the curve's time.
        lines: by collective ("all_gather", "reduce_scatter", "all_reduce"; "all_gather.inter"
            between nodes): seconds per hop of a ring, per tensor, and per byte that passes a rank;
            by optimizer ("adamw"): seconds per step, per tensor, and per byte of its shards.
        overhead: bytes that tensors cannot have: "context" (CUDA's), "communicator" (NCCL's buffers
            of one), "workspace" (cuBLAS's, of one thread), "driver"; others as in
            `graphshard.cost.reserved`.
        device: what ranks compute on: "cpu" or "gpu". "" takes it from the name: "cpu" if that has
            "gloo" in it, as in files written before there was this field.

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
    contention_bytes: float = 0.0
    step_overhead: float = 0.0
    in_step: float = 1.0
    slowest: float = 1.0
    multiprocessors: int = 0
    tiles: tuple[tuple[int, int, float], ...] = ()
    attention_rates: Mapping[str, Points] = field(default_factory=dict)
    attention_kernel: str = ""
    tdp_watts: float = 0.0
    power_limit: float = 0.0
    power_exponent: float = 2 / 3
    spread: tuple[float, float] = (1.0, 1.0)
    pair_spread: float = 0.0
    confidence: Mapping[str, str] = field(default_factory=dict)
    curves: Mapping[str, Points] = field(default_factory=dict)
    lines: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    overhead: Mapping[str, int] = field(default_factory=dict)
    device: str = ""

    @property
    def is_host(self) -> bool:
        """Whether ranks compute on the host, over Gloo, so that offloading is pointless."""
        return self.device == "cpu" if self.device else "gloo" in self.name

    @property
    def process_group_backend(self) -> str:
        """What connects ranks on this hardware: "gloo" or "nccl"."""
        return "gloo" if self.is_host else "nccl"

    @property
    def program_device(self) -> str:
        """The device that programs for this hardware run on: "cpu" or "cuda"."""
        return "cpu" if self.is_host else "cuda"

    def __post_init__(self) -> None:
        figures = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in Check(figures).stored().items():
            object.__setattr__(self, name, value)

    def matmul_flops(self, dtype: torch.dtype, *, tf32: bool = False) -> float:
        """Peak FLOP/s of matrix products in `dtype`, or in float32 if `dtype` is not listed."""
        return self.flops.get(dtype_name(dtype, tf32=tf32), self.flops["float32"])

    def efficiency_of(self, kind: str, dtype: torch.dtype | str, *, tf32: bool = False) -> float:
        """The fraction of the peak that large operations of `kind` reach in `dtype`."""
        name = dtype if isinstance(dtype, str) else dtype_name(dtype, tf32=tf32)
        of_dtype = self.efficiency.get(f"{kind}.{name}")
        return self.efficiency[kind] if of_dtype is None else of_dtype

    @cached_property
    def clocks(self) -> float:
        """The speed of products and convolutions under the power limit, relative to none."""
        if not self.power_limit:
            return 1.0
        return float((self.power_limit / self.tdp_watts) ** self.power_exponent)

    @cached_property
    def attention(self) -> str:
        """The attention kernel that runs: `attention_kernel`, or torch's default; "" if unknown."""
        return self.attention_kernel or default_kernel(self.attention_rates)

    def attention_rate(self, kernel: str, length: int, head: int, *, backward: bool) -> float:
        """The fraction of the peak that an attention kernel reaches on keys of `length` tokens.

        Without rates of `kernel`, those of `attention` count.
        """
        rates = self.attention_rates
        direction = "backward" if backward else "forward"
        for name in (kernel, self.attention):
            rate = rate_of(rates, name, direction, length, head)
            if rate is not None:
                return rate
        return self.efficiency["attention"]

    def for_ranks(self, ranks: int) -> Hardware:
        """The same machine for a number of ranks; a single one waits for no slower device."""
        return self.with_(slowest=1.0) if ranks == 1 and self.slowest != 1 else self

    def nodes(self, ranks: int) -> int:
        """The number of nodes on which `ranks` find a device each."""
        return -(-ranks // self.gpus_per_node)

    def with_(self, **changes: Any) -> Hardware:
        """Return a copy with some figures changed, such as `gpus_per_node=4`."""
        return replace(self, **changes)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it as a JSON file for `load`."""
        data = self.to_dict()
        long = {name: data.pop(name) for name in ("attention_rates", "curves", "lines")}
        lines = [f'  "{name}": {json.dumps(value)}' for name, value in data.items()]
        for name, table in long.items():  # one row per line, so that people can compare them
            rows = ",\n".join(f'    "{key}": {json.dumps(row)}' for key, row in table.items())
            lines.append(f'  "{name}": {{\n{rows}\n  }}' if rows else f'  "{name}": {{}}')
        Path(path).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

    def to_dict(self) -> dict[str, Any]:
        """Plain data, ready for JSON."""
        data = {f.name: getattr(self, f.name) for f in fields(self)}
        return data | {name: dict(getattr(self, name)) for name in TABLES}

    @classmethod
    def load(cls, what: str | os.PathLike[str] | Hardware) -> Hardware:
        """Return a preset by name, or read a file written by `save` or `graphshard calibrate`.

        Raises:
            CostError: there is no preset or file of that name, or the file describes no hardware.
        """
        if isinstance(what, Hardware):
            return what
        if isinstance(what, str) and what.lower() in preset_names():
            return _preset(what.lower())
        path = Path(what)
        try:
            found = path.is_file()
        except (OSError, ValueError):  # no name of a file
            found = False
        if not found:
            raise CostError(
                f"there is no hardware preset or file {shown(str(what))}"
                f"{meant(str(what).lower(), preset_names())}; presets: {', '.join(preset_names())}"
            )
        return _from_table(path.stem, read_json(path, "the hardware file", CostError), str(path))

    def __hash__(self) -> int:
        return hash(self.name)

    def __str__(self) -> str:
        return f"{self.name}: {self.about}" if self.about else self.name


def dtype_name(dtype: torch.dtype, *, tf32: bool = False) -> str:
    """The name of `dtype` in `Hardware`: "tfloat32" for float32 under TF32, "float8" for any."""
    name = "tfloat32" if tf32 and dtype is torch.float32 else str(dtype).removeprefix("torch.")
    return "float8" if name.startswith("float8") else name


@cache
def _preset(name: str) -> Hardware:
    return _from_table(name, _tables()[name])


def _from_table(name: str, table: Any, file: str | None = None) -> Hardware:
    where = f"hardware {name!r}" if file is None else f"the hardware file {file}"
    if not isinstance(table, dict):
        raise CostError(f"{where} must be a table of figures; got {shown(table)}")
    field_names = {f.name for f in fields(Hardware)}
    for key in table:
        if key not in field_names:
            raise CostError(f"{where} has an unknown figure {shown(key)}")
    for key in TABLES:
        if key in table and not isinstance(table[key], dict):
            raise CostError(f"{where}: {key} must be a table; got {shown(table[key])}")
    for key in ("name", "device", "about", "source", "attention_kernel"):
        if not isinstance(table.get(key, ""), str):
            raise CostError(f"{where}: {key} must be a text; got {shown(table[key])}")
    figures: dict[str, Any] = {"name": name, **table}
    lacking = [
        f.name
        for f in fields(Hardware)
        if f.name not in figures and f.default is MISSING and f.default_factory is MISSING
    ]
    if lacking:
        raise CostError(f"{where} lacks a figure: {lacking[0]!r}")
    try:
        return Hardware(**figures)
    except CostError as error:
        raise error if file is None else CostError(f"{file}: {error}") from error


# -- presets: those of GPUs in presets.toml, and calibrated files beside it ------------------------

COMMON = "common"
"""The table of presets.toml whose figures all presets in it share."""


LIKE = "like"
"""The figure of a preset that names another one, whose figures it takes where it has none."""


def preset_names() -> tuple[str, ...]:
    """The names of the presets that `Hardware.load` accepts."""
    return tuple(_tables())


@cache
def _tables() -> dict[str, dict[str, Any]]:
    """The figures of each preset, those that it shares with others included."""
    folder = resources.files("graphshard.hardware")
    tables = tomllib.loads(folder.joinpath("presets.toml").read_text(encoding="utf-8"))
    common = tables.pop(COMMON)
    presets: dict[str, dict[str, Any]] = {}
    for name, table in tables.items():
        like = table.pop(LIKE, None)
        presets[name] = merged(common if like is None else presets[like], table)
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        name, dot, ending = entry.name.rpartition(".")
        if dot and ending == "json":  # as `graphshard calibrate --out` wrote it
            presets[name] = json.loads(entry.read_text(encoding="utf-8"))
    return presets


def merged(base: dict[str, Any], table: dict[str, Any]) -> dict[str, Any]:
    """`base` with the figures of `table`, and its tables with their rows; `False` drops one."""
    both = base | table
    for name in TABLES:
        if isinstance(base.get(name), dict) and isinstance(table.get(name), dict):
            both[name] = merged(base[name], table[name])
    return {name: value for name, value in both.items() if value is not False}


def nearest(device: torch.device) -> str:
    """Return the name of the preset most like `device`."""
    if device.type != "cuda":
        return "cpu-gloo"
    return preset_of(torch.cuda.get_device_name(device))


def preset_of(device_name: str) -> str:
    """Return the name of the preset most like a GPU that the driver calls `device_name`."""
    words = device_name.lower()
    return next((preset for chip, preset in _CHIPS if re.search(chip, words)), "h100-sxm")


_CHIPS = (
    ("gb200", "gb200"),
    ("b200", "b200"),
    ("h200", "h200"),
    ("h20", "h20"),
    ("h100.*pcie", "h100-pcie"),
    ("h100", "h100-sxm"),
    ("a100.*pcie", "a100-pcie"),
    ("a100.*80gb", "a100-80gb"),
    ("a100", "a100-40gb"),
    ("l40s", "l40s"),
    ("mi300x", "mi300x"),
)

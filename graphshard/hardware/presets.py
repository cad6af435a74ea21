"""The tables of the presets: those of GPUs in presets.toml, and calibrated files beside it."""

from __future__ import annotations

import json
import re
import tomllib
from functools import cache
from importlib import resources
from typing import Any

import torch

from graphshard.hardware.checks import TABLES

COMMON = "common"
"""The table of presets.toml whose figures all presets in it share."""


LIKE = "like"
"""The figure of a preset that names another one, whose figures it takes where it has none."""


def preset_names() -> tuple[str, ...]:
    """The names of the presets that `Hardware.load` accepts."""
    return tuple(_tables())


def preset_table(name: str) -> dict[str, Any]:
    """The figures of the preset `name`, those that it shares with others included."""
    return _tables()[name]


@cache
def _tables() -> dict[str, dict[str, Any]]:
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

"""The house keeps its order: folders form a line, and imports go down it."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
from paths import ROOT

import graphshard

LINE = (
    "errors",
    "format",
    "plain_data",
    "progress",
    "torch_private",
    "hardware",
    "policy",
    "planning",
    "program",
    "ops",
    "capture",
    "cost",
    "inspect",
    "schedule",
    "recompute",
    "verify",
    "passes",
    "pipeline",
    "runtime",
    "tune",
    "report",
    "state",
    "module",
    "api",
    "simulation",
    "lightning",
    "hf",
    "calibrate",
    "__init__",
    "cli",
    "__main__",
)
"""From the ground up: a module-level import goes to the same folder or to one further up here."""

LATE: dict[tuple[str, str], str] = {
    ("api", "hf.accelerators"): "Accelerate has to know a sharded module from the first on",
    ("module.state", "hf.adapters"): "peft knows what its adapters are, and few models have any",
    ("planning.plan", "inspect.plan_text"): "a plan prints itself",
    ("planning.plan", "program.program"): "the type of ShardingPlan.program",
    ("program.program", "program.text"): "a program prints itself",
    ("cost.estimate", "cost.text"): "an estimate prints itself",
    ("cost.estimate", "cost.details"): "Estimate.to_dict and save_trace",
    ("cost.estimate", "cost.plot"): "Estimate.plot",
    ("cost.estimate", "report.page"): "Estimate.report",
    ("cost.estimate", "tune.tuning"): "the type of an argument of Estimate.report",
}
"""Imports inside functions or for type checkers that go up, or would close a circle of files."""


@dataclass(frozen=True)
class Import:
    """One imported module: by which file, at what line, and whether when that file is imported."""

    importer: str
    imported: str
    line: int
    at_import: bool


def files() -> dict[str, Path]:
    """Every source file by the name of its module, passes/ counted as graphshard.passes."""
    named = {}
    for top, folder in (
        ("graphshard", ROOT / "graphshard"),
        ("graphshard.passes", ROOT / "passes"),
    ):
        for path in sorted(folder.rglob("*.py")):
            parts = path.relative_to(folder).with_suffix("").parts
            if folder.name == "graphshard" and parts[0] == "passes":
                continue
            named[".".join([top, *parts])] = path
    return named


@cache
def trees() -> dict[str, ast.Module]:
    """The syntax of every file."""
    return {module: ast.parse(path.read_text()) for module, path in files().items()}


def imports(module: str, tree: ast.Module, modules: frozenset[str]) -> Iterator[Import]:
    """Every import of graphshard's own modules that a file has, wherever it stands."""
    at_import = {id(node) for node in tree.body}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.append(full if full in modules else node.module)
        for name in names:
            if name.split(".")[0] == "graphshard":
                known = name if name in modules else f"{name}.__init__"
                yield Import(module, known, node.lineno, id(node) in at_import)


@cache
def all_imports() -> list[Import]:
    modules = frozenset(trees())
    return [one for module, tree in trees().items() for one in imports(module, tree, modules)]


def ends(one: Import) -> tuple[str, str]:
    """Importer and imported module, below graphshard."""
    return one.importer.removeprefix("graphshard."), one.imported.removeprefix("graphshard.")


def folder_of(module: str) -> str:
    return module.split(".")[1]


def test_every_file_stands_in_the_line() -> None:
    assert {folder_of(module) for module in files()} == set(LINE)


def test_imports_go_down_the_line() -> None:
    place = {folder: index for index, folder in enumerate(LINE)}
    up = [
        f"{one.importer}:{one.line} imports {one.imported}"
        for one in all_imports()
        if one.at_import and place[folder_of(one.importer)] < place[folder_of(one.imported)]
    ]
    assert not up, "imports that go up:\n" + "\n".join(up)


def test_what_goes_up_has_a_reason() -> None:
    place = {folder: index for index, folder in enumerate(LINE)}
    up = {
        ends(one)
        for one in all_imports()
        if not one.at_import and place[folder_of(one.importer)] < place[folder_of(one.imported)]
    }
    assert not up - set(LATE), "imports that go up without a reason in LATE"
    assert not set(LATE) - {ends(one) for one in all_imports() if not one.at_import}, "no more"


def test_no_circle_of_files() -> None:
    """Imports inside functions and for type checkers counted, but for those with a reason."""
    graph: dict[str, set[str]] = defaultdict(set)
    for one in all_imports():
        if ends(one) not in LATE and one.importer != one.imported:
            graph[one.importer].add(one.imported)
    assert not circles(graph)


TYPED = ("graphshard.program.ops", "graphshard.program.collective", "graphshard.program.finite")
ARGUMENTS = {
    "unit",
    "params",
    "group",
    "ranks",
    "units",
    "dims",
    "in_place",
    "param",
    "of",
}


def test_nodes_arguments_are_read_through_their_typed_views_only() -> None:
    """`node.kwargs["unit"]` and the like stand in the typed views alone."""
    read = []
    for module, tree in trees().items():
        for node in ast.walk(tree):
            if module in TYPED:
                continue
            key: ast.AST | None = None
            if isinstance(node, ast.Subscript) and _is_kwargs(node.value):
                key = node.slice
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                key = node.args[0] if node.args and _is_kwargs(node.func.value) else None
            elif isinstance(node, ast.Compare) and _is_kwargs(node.comparators[0]):
                key = node.left
            if isinstance(key, ast.Constant) and key.value in ARGUMENTS:
                read.append(f"{module}:{node.lineno}")
    assert not read


def _is_kwargs(value: ast.AST) -> bool:
    return isinstance(value, ast.Attribute) and value.attr == "kwargs"


FACTORIES = {
    *("arange", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}


def test_tensors_of_the_package_name_their_device() -> None:
    """A user may have set another default device; passes run under the CPU as the default."""
    unnamed = []
    for module, tree in trees().items():
        if folder_of(module) in ("passes", "recompute", "schedule"):
            continue
        for node in ast.walk(tree):
            made = ast.unparse(node.func).split(".") if isinstance(node, ast.Call) else []
            if made[:1] != ["torch"] or not FACTORIES & {*made[1:]}:
                continue
            if not {"device", None} & {keyword.arg for keyword in node.keywords}:
                unnamed.append(f"{module}, line {node.lineno}")
    assert unnamed == []


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("capture", "capture"),
        ("cli", "main"),
        ("policy", "SizePolicy"),
        ("program", "Program"),
        ("verify", "verify"),
    ],
)
def test_a_package_has_what_the_module_of_its_name_had(package: str, name: str) -> None:
    assert callable(getattr(importlib.import_module(f"graphshard.{package}"), name))


def test_dumped_code_can_import_its_operators() -> None:
    ops = importlib.import_module("graphshard.ops")
    assert ops.all_gather.__module__ == "graphshard.ops"


def test_public_names_are_typed_as_they_are_found_and_loaded_when_used() -> None:
    tree = ast.parse((ROOT / "graphshard/__init__.py").read_text())
    typed = {
        alias.asname: node.module
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("graphshard.")
        for alias in node.names
    }
    assert sorted([*typed, "ops"]) == graphshard.__all__
    for name, module in typed.items():
        assert getattr(graphshard, name) is getattr(importlib.import_module(str(module)), name)
    code = "import sys, graphshard; print([name for name in sys.modules if 'graphshard.' in name])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_what_compile_and_plan_load() -> None:
    """Passes, rules and costs are loaded with a program, the rest by whoever asks for it."""
    code = "import sys, graphshard; graphshard.compile; graphshard.plan; print(*sys.modules)"
    found = subprocess.check_output([sys.executable, "-c", code], text=True).split()
    parts = [module.split(".") for module in found]
    files = [path for path in parts if path[0] == "graphshard" and len(path) > 2]
    assert {folder for _, folder, *_ in files} == {
        *("torch_private", "hardware", "policy", "planning", "program", "capture", "runtime"),
        "module",
    }
    assert len(files) < 110
    assert not {
        "networkx",
        "rich",
        "torch._dynamo.convert_frame",
        "torch.distributed.checkpoint",
    } & {*found}


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one file (Tarjan)."""
    import networkx

    directed = networkx.DiGraph([(a, b) for a, targets in graph.items() for b in targets])
    return [
        sorted(part) for part in networkx.strongly_connected_components(directed) if len(part) > 1
    ]

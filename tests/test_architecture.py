"""The house keeps its order: folders form a line, and imports go down it.

`python tests/test_architecture.py` prints the folders with their files, lines and floors.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent

LINE = (
    "errors",
    "format",
    "progress",
    "torch_private",
    "hardware",
    "policy",
    "planning",
    "program",
    "capture",
    "cost",
    "inspect",
    "schedule",
    "recompute",
    "verify",
    "passes",
    "pipeline",
    "runtime",
    "training",
    "tune",
    "state",
    "module",
    "api",
    "lightning",
    "calibrate",
    "moved",
    "__init__",
    "cli",
    "__main__",
)
"""From the ground up: a module-level import goes to the same folder or to one further up here."""

LATE: dict[tuple[str, str], str] = {
    ("planning.plan", "inspect.plan_text"): "a plan prints itself",
    ("planning.plan", "program.program"): "the type of ShardingPlan.program",
    ("policy.base", "policy.code"): "a policy prints itself",
    ("program.program", "program.text"): "a program prints itself",
    ("cost.estimate", "cost.text"): "an estimate prints itself",
    ("cost.estimate", "cost.trace"): "Estimate.save_trace",
    ("cost.estimate", "cost.plot"): "Estimate.plot",
    ("cost.compare", "cost.text"): "a comparison prints itself",
    ("tune.auto_policy", "tune.tuner"): "AutoPolicy.tune",
    ("tune.auto_policy", "tune.tuning"): "the type that AutoPolicy.tune returns",
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


def imports(module: str, path: Path, modules: frozenset[str]) -> Iterator[Import]:
    """Every import of graphshard's own modules that a file has, wherever it stands."""
    tree = ast.parse(path.read_text())
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


def all_imports() -> list[Import]:
    named = files()
    modules = frozenset(named)
    return [one for module, path in named.items() for one in imports(module, path, modules)]


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


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one file (Tarjan)."""
    import networkx

    directed = networkx.DiGraph([(a, b) for a, targets in graph.items() for b in targets])
    return [
        sorted(part) for part in networkx.strongly_connected_components(directed) if len(part) > 1
    ]


if __name__ == "__main__":
    place = {folder: index for index, folder in enumerate(LINE)}
    for one in all_imports():
        a, b = place.get(folder_of(one.importer), -1), place.get(folder_of(one.imported), -1)
        if a < b:
            print("UP " if one.at_import else "up ", f"{one.importer}:{one.line} -> {one.imported}")
    graph: dict[str, set[str]] = defaultdict(set)
    for one in all_imports():
        if ends(one) not in LATE and one.importer != one.imported:
            graph[one.importer].add(one.imported)
    for circle in circles(graph):
        print("CIRCLE", circle)

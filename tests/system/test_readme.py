"""READMEs and notebook tell the truth: their Python runs, their commands print what they show."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from paths import ROOT

import graphshard
from graphshard import BlockPolicy, LambdaPolicy, SizePolicy
from graphshard.cli.main import build_parser

MAIN = ROOT / "README.md"
NOTEBOOK = ROOT / "examples" / "plan_a_70b.ipynb"
MEASURED = ROOT / "examples" / "benchmarks" / "README.md"
FOLDERS = ("graphshard", "passes", "examples", "tests")
READMES = (
    MAIN,
    *sorted(
        path
        for folder in FOLDERS
        for path in (ROOT / folder).rglob("README.md")
        if path.resolve() == path  # graphshard/passes is a link to passes
    ),
)
PINNED = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
MOST_LINES, MOST_WORDS, MOST_COLUMNS = 250, 2500, 6


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, language: str) -> list[str]:
    text = path.read_text()
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def prose(path: Path) -> str:
    """The text outside of code blocks."""
    return re.sub(r"^```.*?^```$", "", path.read_text(), flags=re.MULTILINE | re.DOTALL)


def shell(command: str, folder: Path) -> str:
    """What the command prints in `folder`, `graphshard` being this one."""
    shim = folder.parent / "bin" / "graphshard"
    shim.parent.mkdir(exist_ok=True)
    shim.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m graphshard "$@"\n')
    shim.chmod(0o755)
    path = f"{shim.parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env={**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, f"{command}\n{result.stderr}"
    return result.stdout


@pytest.fixture
def examples(tmp_path: Path) -> Path:
    return Path(shutil.copytree(ROOT / "examples", tmp_path / "examples"))


def with_blocks(language: str) -> list[Path]:
    return [path for path in READMES if blocks(path, language)]


def main_at_once(paths: list[Path]) -> list[Any]:
    """The parameters of a test that is slow for all but the main one."""
    return [p if p == MAIN else pytest.param(p, marks=pytest.mark.slow) for p in paths]


def test_the_example_is_the_one_in_the_folder_and_runs(examples: Path) -> None:
    assert blocks(MAIN, "python")[0] == (examples / "quickstart.py").read_text()
    said = shell(
        f'"{sys.executable}" -W error -m torch.distributed.run --standalone --nproc-per-node 2 '
        "quickstart.py 2>&1",
        examples,
    )
    assert said.count("sharding plan of GPT") == said.count("\nloss 5.") == 1
    assert "Warning" not in said


@pytest.mark.parametrize("readme", main_at_once(with_blocks("python")), ids=name_of)
def test_python_is_in_the_examples_or_runs(readme: Path, examples: Path) -> None:
    """The blocks of one file run one after the other, but for extracts of an example."""
    files = [path.read_text() for path in examples.rglob("*.py")]
    script = [
        block
        for block in blocks(readme, "python")
        if block in files or not any(block.strip() in file for file in files)
    ]
    (examples / "blocks.py").write_text("\n".join(script))
    said = shell(f'"{sys.executable}" blocks.py', examples)
    if readme == MAIN:
        assert said.count("sharding plan of GPT") == said.count("\nloss 5.") == 1


def compare_or_write(path: Path, text: str, request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--update-golden"):
        path.write_text(text)
    else:
        assert text == path.read_text(), "if this is meant, run it with --update-golden"


needs_pinned_torch = pytest.mark.skipif(
    not torch.__version__.startswith(str(PINNED and PINNED[1])),
    reason="other versions of torch decompose other operators",
)


@needs_pinned_torch
@pytest.mark.parametrize("readme", main_at_once(with_blocks("console")), ids=name_of)
def test_commands_print_what_the_readme_shows(
    readme: Path, examples: Path, request: pytest.FixtureRequest
) -> None:
    text = readme.read_text()
    for block in blocks(readme, "console"):
        command = block.partition("\n")[0]
        assert command.startswith("$ ")
        text = text.replace(block, f"{command}\n{shell(command[2:], examples)}")
    compare_or_write(readme, text, request)


RUN_CELLS = """
import contextlib, io, json, sys
printed = []
for cell in json.load(sys.stdin):
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(cell)
    printed.append(out.getvalue())
print(json.dumps(printed))
"""


@needs_pinned_torch
@pytest.mark.slow
def test_cells_print_what_the_notebook_shows(
    examples: Path, request: pytest.FixtureRequest
) -> None:
    notebook = json.loads(NOTEBOOK.read_text())
    cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    (examples / "cells.json").write_text(json.dumps(["".join(cell["source"]) for cell in cells]))
    (examples / "run_cells.py").write_text(RUN_CELLS)
    printed = json.loads(shell(f'"{sys.executable}" run_cells.py <cells.json', examples))
    for number, (cell, text) in enumerate(zip(cells, printed, strict=True), 1):
        stream = {"name": "stdout", "output_type": "stream", "text": text.splitlines(keepends=True)}
        cell |= {"execution_count": number, "outputs": [stream]}
    text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
    compare_or_write(NOTEBOOK, text, request)


def slugs(path: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        anchors.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return anchors


def links(path: Path) -> Iterator[str]:
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if not target.startswith(("http://", "https://")):
            yield target


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_links_lead_somewhere(readme: Path) -> None:
    for target in links(readme):
        file, _, anchor = target.partition("#")
        page = (readme.parent / file).resolve() if file else readme
        assert page.exists(), target
        assert page.is_relative_to(ROOT), target
        assert not anchor or anchor in slugs(page), target


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_every_page_can_be_reached(readme: Path) -> None:
    reached, new = {MAIN}, [MAIN]
    while new:
        page = new.pop()
        for target in links(page):
            other = (page.parent / target.partition("#")[0]).resolve()
            if other in READMES and other not in reached:
                reached.add(other)
                new.append(other)
    assert readme in reached or readme.is_relative_to(ROOT / "tests")


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_files_that_are_named_exist(readme: Path) -> None:
    named = re.findall(r"`([\w/.-]+\.(?:py|toml|svg))`", prose(readme))
    places = (readme.parent, ROOT, ROOT / "graphshard", ROOT / "examples")
    for file in named:
        own = any((place / file).exists() for place in places)
        assert own or any((ROOT / "tests").rglob(file)) or file in WRITTEN, file


WRITTEN = {"forward.py", "backward.py"}
"""Files that a command writes."""


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_scripts_take_the_options_they_are_shown_with(readme: Path) -> None:
    text = re.sub(r"\s+", " ", readme.read_text())
    for script, options in re.findall(r"(examples/[\w/]+\.py)((?: [\w.-]+)*)", text):
        source = (ROOT / script).read_text()
        for option in re.findall(r"--[a-z][\w-]*", options):
            assert f'"{option}"' in source, f"{script} {option}"


OF_MODELS = {"alpha", "blocks", "encode", "generate", "head", "scale", "score"}
"""Attributes of users' models that a sharded module hands on."""


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_names_and_keywords_that_are_shown_exist(readme: Path) -> None:
    """Also where a block is no program to run."""
    text = readme.read_text()
    for name, arguments in re.findall(r"\bsharded\.(\w+)(?:\(([^()]*)\))?", text):
        assert name in OF_MODELS or hasattr(graphshard.ShardedModule, name), name
        method = getattr(graphshard.ShardedModule, name, None)
        if arguments and callable(method):
            taken = inspect.signature(method).parameters
            if all(each.kind != each.VAR_KEYWORD for each in taken.values()):
                assert set(re.findall(r"(\w+)=", arguments)) <= set(taken), name
    for path in re.findall(r"\bgraphshard((?:\.\w+)+)", text):
        pkgutil.resolve_name(f"graphshard{path}")


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_commands_take_the_options_they_are_shown_with(readme: Path) -> None:
    (choices,) = [a.choices for a in build_parser()._actions if isinstance(a.choices, dict)]
    text = readme.read_text().replace("\\\n", " ")
    shown = re.findall(r"`graphshard ([a-z][^`]*)`", text)
    shown += re.findall(r"^(?:\$ )?graphshard ([a-z][^|\n]*)", text, re.MULTILINE)
    for command in shown:
        name, *words = command.split()
        for option in (word.partition("=")[0] for word in words if word.startswith("--")):
            assert option in choices[name]._option_string_actions, command


def test_the_main_page_is_short() -> None:
    text = MAIN.read_text()
    assert len(text.splitlines()) <= MOST_LINES
    assert len(text.split()) <= MOST_WORDS


@pytest.mark.parametrize("readme", READMES, ids=name_of)
def test_tables_are_narrow(readme: Path) -> None:
    for line in prose(readme).splitlines():
        if line.startswith("|"):
            cells = line.replace("\\|", "").strip().strip("|").split("|")
            assert len(cells) <= MOST_COLUMNS, line


def test_the_picture_is_small() -> None:
    assert (ROOT / "examples" / "step.svg").stat().st_size < 200_000


def test_the_table_names_every_option() -> None:
    text = MAIN.read_text()
    for policy in (SizePolicy, BlockPolicy, LambdaPolicy):
        for field in fields(policy):
            assert re.search(rf"`[^`\n]*\b{field.name}\b[^`\n]*`", text), field.name


def test_the_table_names_every_pass() -> None:
    text = (ROOT / "passes" / "README.md").read_text()
    for path in (ROOT / "passes").glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                methods = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
                assert "apply" not in methods or f"`{node.name}`" in text, node.name


def capabilities() -> str:
    text = MEASURED.read_text()
    return text[text.index("## Capabilities") :]


def test_the_tests_named_in_the_table_exist() -> None:
    named = re.findall(r"`(\w+\.py)(?:::(\w+))?`", capabilities())
    assert len(named) > 30
    for file, function in named:
        (path,) = (ROOT / "tests").rglob(file)
        written = re.compile(rf"^(def {function}\(|{function} = )", re.MULTILINE)
        assert not function or written.search(path.read_text()), f"{file}::{function}"


def test_every_row_of_the_capability_table_has_a_test() -> None:
    text = capabilities()
    table = text[text.index("| capability |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) > 30
    assert all(re.search(r"`\w+\.py", row) for row in table)

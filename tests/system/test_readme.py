"""README.md tells the truth: its Python runs, and its commands print what it shows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from paths import ROOT, TESTS

from graphshard import BlockPolicy, LambdaPolicy, SizePolicy

README = (ROOT / "README.md").read_text()
PINNED = re.search(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


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


def test_the_example_is_the_one_in_the_folder_and_runs(examples: Path) -> None:
    (source,) = blocks("python")
    assert source == (examples / "quickstart.py").read_text()
    assert "sharding plan of GPT" in shell(f'"{sys.executable}" quickstart.py', examples)


@pytest.mark.skipif(
    not torch.__version__.startswith(str(PINNED and PINNED[1])),
    reason="other versions of torch decompose other operators",
)
def test_commands_print_what_the_readme_shows(
    examples: Path, request: pytest.FixtureRequest
) -> None:
    text = README
    for block in blocks("console"):
        command = block.partition("\n")[0]
        assert command.startswith("$ ")
        text = text.replace(block, f"{command}\n{shell(command[2:], examples)}")
    if request.config.getoption("--update-golden"):
        (ROOT / "README.md").write_text(text)
    else:
        assert text == README, (
            "if this is meant, run pytest --update-golden tests/system/test_readme.py"
        )


def test_the_table_names_every_option() -> None:
    for policy in (SizePolicy, BlockPolicy, LambdaPolicy):
        for field in fields(policy):
            assert re.search(rf"`[^`\n]*\b{field.name}\b[^`\n]*`", README), field.name


def test_the_tests_named_in_the_table_exist() -> None:
    named = re.findall(r"`(\w+\.py)(?:::(\w+))?`", README[README.index("## Capabilities") :])
    assert len(named) > 30
    for file, function in named:
        (path,) = TESTS.rglob(file)
        source = path.read_text()
        defined = rf"^(def {function}\(|{function} = )"
        exists = not function or re.search(defined, source, re.MULTILINE)
        assert exists, f"{file}::{function}"


def test_every_row_of_the_capability_table_has_a_test() -> None:
    table = README[README.index("| capability |") :].split("\n\n")[0].splitlines()[2:]
    assert len(table) > 30
    assert all(re.search(r"`\w+\.py", row) for row in table)

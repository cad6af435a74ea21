"""Options and fixtures every test may use."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable

# Ranks share few cores; several threads in each make them slower, and spawned ranks inherit this.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from paths import GOLDEN


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden",
        action="store_true",
        help="write tests/golden/* from what the tests produce instead of comparing",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:

    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("cuda"):
                item.add_marker(pytest.mark.skip(reason="torch finds no GPU here"))


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares `text` with tests/golden/<name>, or writes it there.

    A file <stem>.torch-2.15<suffix> stands in for it where torch is of that version.
    """

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        of_version = path.with_suffix(f".torch-{torch.__version__[:4]}{path.suffix}")
        path = of_version if of_version.exists() else path
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            return
        assert path.exists(), f"{path} is missing: run pytest --update-golden and review the file"
        expected = path.read_text()
        if text != expected:
            diff = difflib.unified_diff(
                expected.splitlines(), text.splitlines(), str(path), "produced", lineterm=""
            )
            pytest.fail(
                "\n".join([*diff, "", "If this is meant, run pytest --update-golden.", "", text]),
                pytrace=False,
            )

    return check

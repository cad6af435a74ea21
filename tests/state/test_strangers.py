"""Changed files of every kind are refused, or read as what they say."""

from __future__ import annotations

from pathlib import Path

import pytest
from strangers import KINDS, Player, run_apart


@pytest.mark.parametrize("name", [name for name in KINDS if name != "lightning"])
def test_changed_files(name: str, tmp_path: Path) -> None:
    player = Player(name, tmp_path)
    outcomes = {player.play(seed) for seed in range(12)}
    assert "refused" in outcomes


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", KINDS)
def test_five_hundred_changed_files(name: str) -> None:
    outcomes = run_apart(name, 1_000, 500)
    assert sum(outcomes.values()) == 500
    assert outcomes["refused"] > 100

"""The budget of a policy that just fits: found from a first one too small, too large or right."""

from __future__ import annotations

import pytest

from graphshard.tune.room import largest_room

MIB = 1 << 20
MEMORY = 1000 * MIB


@pytest.mark.parametrize("first", [1, 500 * MIB, 800 * MIB, 950 * MIB, 2 * MEMORY])
def test_the_largest_budget_is_found_from_both_sides(first):
    """Steps keep within 600 MiB at least, and reserve 100 MiB more than their budget."""
    tried = []

    def left(room: int) -> int | None:
        tried.append(room)
        return None if room < 600 * MIB else MEMORY - (room + 100 * MIB)

    assert largest_room(left, first, MEMORY, 12) == 900 * MIB
    assert len(tried) == len(set(tried)) <= 12


def test_a_plateau_is_not_the_end():
    """Budgets from 500 to 700 MiB choose the same, and the first that chooses more still fits."""

    def left(room: int) -> int | None:
        return MEMORY - (500 * MIB if room < 700 * MIB else room + 50 * MIB)

    found = largest_room(left, 500 * MIB, MEMORY, 12)
    assert found is not None
    assert 948 * MIB <= found <= 950 * MIB


def test_where_no_budget_fits_there_is_none():
    assert largest_room(lambda room: -room, 500, 1000, 12) is None
    assert largest_room(lambda room: None, 500, 1000, 12) is None


def test_it_ends_with_its_tries():
    tried: list[int] = []
    largest_room(lambda room: tried.append(room), MEMORY // 2, MEMORY, 2)
    assert len(tried) == 2

"""Arguments as keys: what is equal in structure, and what is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from graphshard.program.program import argument_key


def key(value: Any) -> Any:
    return argument_key(value, lambda leaf: ("leaf", str(leaf)))


@pytest.mark.parametrize(
    ("one", "other"),
    [(1, 1.0), (1, True), (0.0, -0.0), ("1", 1), ((1, 2), (2, 1)), (slice(1), slice(2)), (None, 0)],
)
def test_constants_that_differ(one: Any, other: Any) -> None:
    assert key(one) != key(other)
    assert key([one]) != key([other])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (float("nan"), float("nan")),
        ([1, (2, 3)], (1, [2, 3])),
        ({"a": 1, "b": 2.0}, {"b": 2.0, "a": 1}),
        (torch.float32, torch.float32),
        (slice(0, None, 2), slice(0, None, 2)),
    ],
)
def test_constants_that_are_equal(one: Any, other: Any) -> None:
    assert key(one) == key(other)
    assert hash(key(one)) == hash(key(other))


def test_nodes_and_tensors_are_the_callers() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    assert key((x, [y, 2])) == (("leaf", "x"), (("leaf", "y"), (int, 2)))
    assert key({"like": torch.zeros(2)}) == (("like", ("leaf", "tensor([0., 0.])")),)

"""What the command line makes of a policy's text: sizes, meshes, policies, overrides of units."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from graphshard.cli.policy import parse_bytes, parse_unit


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1500000", 1_500_000),
        ("2GiB", 2 * 1024**3),
        ("1.5 GB", 1_500_000_000),
        ("64KiB", 65536),
        ("3B", 3),
        ("1e6", 1_000_000),
        ("2TiB", 2 * 1024**4),
    ],
)
def test_parse_bytes(text: str, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "GiB", "2Gib", "two", "inf", "2 PiB", "1e6x"])
def test_parse_bytes_refuses(text: str) -> None:
    with pytest.raises(ArgumentTypeError, match="is not a size"):
        parse_bytes(text)


def test_parse_unit_refuses() -> None:
    with pytest.raises(ArgumentTypeError, match="is no override: write KEY=VALUE"):
        parse_unit("head:NO_SHARD")

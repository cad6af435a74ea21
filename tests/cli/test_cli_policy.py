"""What the command line makes of a policy's text: sizes, meshes, policies, overrides of units."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

import graphshard
from graphshard.cli.policy import parse_bytes, parse_mesh, parse_policy, parse_unit
from graphshard.errors import PolicyError


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


def test_parse_mesh() -> None:
    assert parse_mesh("8") == (8,)
    assert parse_mesh("2x4") == (2, 4)


def test_parse_policy() -> None:
    assert parse_policy("block") == graphshard.BlockPolicy()
    assert parse_policy("block: A, B") == graphshard.BlockPolicy(["A", "B"])
    assert parse_policy("size:1e8") == graphshard.SizePolicy(min_num_params=100_000_000)
    assert parse_policy("block:A", forward_prefetch=1).forward_prefetch == 1
    with pytest.raises(PolicyError, match="size:N"):
        parse_policy("size:inf")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("head", ("head", {})),
        (":reshard_after_forward=2", ("", {"reshard_after_forward": 2})),
        ("a.*:strategy=DDP,unit=True", ("a.*", {"strategy": "DDP", "unit": True})),
    ],
)
def test_parse_unit(text: str, expected: object) -> None:
    assert parse_unit(text) == expected


def test_parse_unit_refuses() -> None:
    with pytest.raises(ArgumentTypeError, match="is no override: write KEY=VALUE"):
        parse_unit("head:NO_SHARD")

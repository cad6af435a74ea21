"""JSON and YAML of strangers: plain, finite, bounded; errors name the file and the key."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

import graphshard
from graphshard.cli.main import main
from graphshard.errors import CostError, PolicyError
from graphshard.hardware.hardware import Hardware
from graphshard.plain_data import DataError, from_json, from_yaml

LAUGHS = b"a0: &a0 [x, x]\n" + b"".join(
    b"a%d: &a%d [*a%d, *a%d, *a%d, *a%d]\n" % (i, i, i - 1, i - 1, i - 1, i - 1)
    for i in range(1, 30)
)

MERGES = b"a0: &a0 {k: v}\n" + b"".join(
    b"a%d: &a%d {<<: [*a%d, *a%d]}\n" % (i, i, i - 1, i - 1) for i in range(1, 40)
)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (b'{"a": {"b": [1, NaN]}}', r"'a\.b\.1' is nan; a number must be finite"),
        (b'{"a": -1e999}', "'a' is -inf"),
        (b'{"a": 9223372036854775808}', "'a' is an integer beyond 64 bits"),
        (b'{"a": ' + b"9" * 5000 + b"}", "integer"),
        (b'{"a": 1, "b": 2, "a": 3}', "the key 'a' twice"),
        (b'{"a": "\\ud800"}', "'a' has a text with half a character"),
        (b"[" * 40 + b"]" * 40, "nests deeper than 32"),
        (b"[" * 100_000, "nests deeper than 32"),
        (b'{"a": "\xff"}', "invalid start byte"),
        (b"\xef\xbb\xbf{}", "BOM"),
        (b"", "Expecting value"),
        (b"{} {}", "Extra data"),
    ],
)
def test_json_is_plain_and_bounded(text: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said):
        from_json(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (LAUGHS, "over 100,000 values"),
        (MERGES, "over 100,000 values|nests deeper"),
        (b"&a [*a]", "nests deeper than 32"),
        (b"[" * 5000, "nests deeper than 32"),
        (b"a: 1\na: 2", "the key 'a' twice"),
        (b"a: .nan", "'a' is nan"),
        (b"a: 2001-01-01", "'a' is a date"),
        (b"a: 2001-99-99", "ValueError"),
        (b"a: !!int ''", "IndexError"),
        (b"a: !!binary eHh4", "'a' is a bytes"),
        (b"a: !!set {x}", "'a' is a set"),
        (b"a: !!python/object/apply:os.getcwd []", "ConstructorError"),
        (b"1: 2", "the key 1; a key is a text"),
        (b"on: 2", "the key True; a key is a text"),
        (b"[a]: 2", "unhashable"),
        (b"a: [", "ParserError"),
        (b"--- 1\n--- 2", "ComposerError"),
        (b"a: \xff", "UnicodeDecodeError"),
        (b"a: \x00", "ReaderError"),
    ],
)
def test_yaml_is_plain_and_bounded(text: bytes, said: str) -> None:
    before = time.monotonic()
    with pytest.raises(DataError, match=said):
        from_yaml(text)
    assert time.monotonic() - before < 5


def test_plain_texts_are_read_as_they_are() -> None:
    data = {"a": [1, -2.5, True, None, "ü"], "b": {}}
    assert from_json(json.dumps(data).encode()) == data
    assert from_yaml(json.dumps(data).encode()) == data
    assert from_yaml(b"a: &x {k: v}\nb: {<<: *x, l: w}") == {
        "a": {"k": "v"},
        "b": {"k": "v", "l": "w"},
    }
    assert from_yaml(b"") is None


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "long.yaml").write_bytes(b"a: b\n" * 100_000)
    (tmp_path / "folder.json").mkdir()
    for name in ("long.yaml", "folder.json", "gone.json", "a\0b.json", "n" * 5000):
        with pytest.raises(PolicyError, match=r"cannot be read"):
            graphshard.from_accelerate(tmp_path / name)
        with pytest.raises(CostError):
            Hardware.load(tmp_path / name)


def hardware(**changes: Any) -> dict[str, Any]:
    return {**Hardware.load("cpu-gloo").to_dict(), **changes}


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (hardware(memory_bandwidth=float("inf")), "'memory_bandwidth' is inf"),
        (hardware(memory_bytes=10**400), "'memory_bytes' is an integer beyond 64 bits"),
        (hardware(memory_bytes=1.5), "memory_bytes must be a whole number"),
        (hardware(gpus_per_node=-1), "gpus_per_node must be a positive number; got -1"),
        (hardware(launch_floor="1"), "launch_floor must be a positive number; got '1'"),
        (hardware(flops={"float32": None}), "flops.float32 must be a positive number"),
        (hardware(flops={}), "flops has no 'float32'"),
        (hardware(efficiency=[1]), "efficiency must be a table"),
        (hardware(name=3), "name must be a text"),
        (hardware(source={}), "source must be a text"),
        (hardware(curves={"matmul": [[1, 2], [1, 3]]}), "the curve 'matmul' must be pairs"),
        (hardware(curves={"matmul": 3}), "a curve is a list of pairs"),
        (hardware(curves={"matmul": "ab"}), "the curve 'matmul' must be pairs"),
        (hardware(lines={"all_gather": [1, 2]}), "the line 'all_gather' must be three"),
        (hardware(colour=3), "an unknown figure 'colour'"),
        ({"name": "x"}, "lacks a figure: 'flops'"),
        ([1], "must be a table of figures"),
    ],
)
def test_hardware_errors_name_the_file_and_the_figure(data: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text(json.dumps(data))
    with pytest.raises(CostError, match=said) as caught:
        Hardware.load(file)
    assert str(file) in str(caught.value)


def test_the_command_line_prints_these_errors_and_ends_with_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.json").write_text('{"flops": NaN}')
    (tmp_path / "ds.json").write_text('{"stage": [' * 5000)
    model = "torch.nn:Identity"
    shared = ["plan", model, "--world-size", "2", "--policy"]
    for arguments, said in (
        ([*shared, f"deepspeed:{tmp_path / 'ds.json'}"], "nests deeper than 32"),
        ([*shared, f"accelerate:{tmp_path}"], "cannot be read"),
        (["calibrate", "--like", str(tmp_path / "mine.json")], "'flops' is nan"),
        (["consolidate", str(tmp_path), str(tmp_path / "out")], "is no checkpoint"),
    ):
        assert main(arguments) == 2, arguments
        assert said in capsys.readouterr().err.replace("\n", " ")

"""JSON and YAML files of strangers as plain data: checked, bounded, and unable to name code."""

from __future__ import annotations

import json
import re
from math import isfinite
from pathlib import Path
from typing import Any

from graphshard.errors import GraphshardError

_DEPTH = 32
"""Containers inside each other."""


_YAML_BYTES = 1 << 18
"""PyYAML reads about 50 KB a second."""


_YAML_NODES = 100_000
"""Values of a YAML file, each counted as often as anchors repeat it."""


_GREATEST = 1 << 63


_SHOWN = 80


class DataError(ValueError):
    """A text holds something that plain data does not. Says what, and where if it can."""


def read_file(file: Path, what: str, error: type[GraphshardError], most_bytes: int) -> bytes:
    """Return the bytes of a regular file; `what` are the words for it in an `error`."""
    try:
        if not file.is_file():
            raise error(f"{what} {file} cannot be read: there is no such file")
        with file.open("rb") as stream:
            raw = stream.read(most_bytes + 1)
    except (OSError, ValueError) as problem:
        raise error(f"{what} {file} cannot be read: {problem}") from problem
    if len(raw) > most_bytes:
        raise error(f"{what} {file} cannot be read: it is longer than {most_bytes:,} bytes")
    return raw


def read_json(
    file: Path, what: str, error: type[GraphshardError], *, most_bytes: int = 100_000_000
) -> Any:
    """Return the data in a JSON file; see `from_json` and `read_file`."""
    raw = read_file(file, what, error, most_bytes)
    try:
        return from_json(raw)
    except DataError as problem:
        raise error(f"{what} {file} cannot be parsed: {problem}") from problem


def read_yaml(file: Path, what: str, error: type[GraphshardError]) -> Any:
    """Return the data in a YAML file of at most 256 KiB; see `from_yaml` and `read_file`."""
    raw = read_file(file, what, error, _YAML_BYTES)
    try:
        return from_yaml(raw)
    except DataError as problem:
        raise error(f"{what} {file} cannot be parsed: {problem}") from problem


def from_json(raw: bytes) -> Any:
    """Return the dicts, lists, texts, numbers, bools and None in a JSON text in UTF-8."""
    try:
        data = json.loads(raw.decode("utf-8"), object_pairs_hook=_without_repeats)
    except DataError:
        raise
    except RecursionError:
        raise DataError(f"it nests deeper than {_DEPTH}") from None
    except ValueError as problem:  # UnicodeDecodeError and JSONDecodeError are such
        raise DataError(shortened(str(problem))) from problem
    require_plain(data)
    return data


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise DataError(f"it has the key {shown(key)} twice")
            seen.add(key)
    return data


def from_yaml(raw: bytes) -> Any:
    """Return the plain data in a YAML text in UTF-8, as `from_json` does."""
    import yaml

    try:
        text = raw.decode("utf-8")
        _require_shallow(text)
        loader = yaml.SafeLoader(text)
        try:
            node = loader.get_single_node()
            if node is None:
                return None
            _require_bounded(node)
            data = loader.construct_document(node)
        finally:
            loader.dispose()
    except DataError:
        raise
    except RecursionError:
        raise DataError(f"it nests deeper than {_DEPTH}") from None
    except Exception as problem:  # PyYAML raises much besides YAMLError for odd scalars
        raise DataError(shortened(f"{type(problem).__name__}: {problem}")) from problem
    require_plain(data)
    return data


def _require_shallow(text: str) -> None:
    """Refuse brackets that PyYAML takes long for, since it looks ahead from each of them."""
    depth = 0
    for bracket in re.findall(r"[][{}]", text):
        depth = max(0, depth + (1 if bracket in "[{" else -1))
        if depth > 2 * _DEPTH:
            raise DataError(f"it nests deeper than {_DEPTH}")


def _require_bounded(root: Any) -> None:
    """Refuse repeated keys, and anchors that multiply; before PyYAML merges any mappings."""
    import yaml

    count = 0
    pending = [(root, 0)]
    while pending:
        node, depth = pending.pop()
        count += 1
        if count > _YAML_NODES:
            raise DataError(f"it has over {_YAML_NODES:,} values, repeated ones counted each time")
        if depth > _DEPTH:
            raise DataError(f"it nests deeper than {_DEPTH}")
        if isinstance(node, yaml.MappingNode):
            keys = set()
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in keys:
                    raise DataError(f"it has the key {shown(key.value)} twice")
                keys.add((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key))
                pending += [(key, depth + 1), (value, depth + 1)]
        elif isinstance(node, yaml.SequenceNode):
            pending += [(value, depth + 1) for value in node.value]


def require_plain(data: Any) -> None:
    """Check each value in `data`, which holds no cycles."""
    _require_plain(data, ())


_Where = tuple[Any, ...]
"""The way to a value: the keys from the outside in."""


def _require_plain(value: Any, where: _Where) -> None:
    if len(where) > _DEPTH:
        raise DataError(f"it nests deeper than {_DEPTH}")
    if isinstance(value, dict):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise DataError(f"{_at(where)} has the key {shown(key)}; a key is a text")
            _require_text(key, where)
            _require_plain(inner, (*where, key))
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            _require_plain(inner, (*where, index))
    else:
        _require_leaf(value, where)


def _require_leaf(value: Any, where: _Where) -> None:
    if isinstance(value, str):
        _require_text(value, where)
    elif value is not None and not isinstance(value, bool) and not is_number(value):
        wrong = f"a {type(value).__name__}, which has no meaning here"
        if isinstance(value, int):
            wrong = "an integer beyond 64 bits"
        elif isinstance(value, float):
            wrong = f"{value}; a number must be finite"
        raise DataError(f"{_at(where)} is {wrong}")


def is_number(value: object) -> bool:
    """Whether `value` is a finite float, or an integer of 64 bits; bools are no numbers."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isfinite(value) if isinstance(value, float) else abs(value) < _GREATEST


def _require_text(text: str, where: _Where) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{_at(where)} has a text with half a character (a surrogate)") from None


def _at(where: _Where) -> str:
    return shown(".".join(map(str, where))) if where else "the whole"


def shown(value: object) -> str:
    """Return `repr(value)`, cut to 80 characters."""
    return shortened(repr(value), _SHOWN)


def shortened(text: str, most: int = 300) -> str:
    """Return `text` on one line, cut to `most` characters."""
    line = " ".join(text.split())
    return line if len(line) <= most else f"{line[:most]} (cut)"

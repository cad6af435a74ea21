"""Reading another system's configuration: a mapping or a file of one, taken apart key by key.

Nothing is swallowed: a key that nobody asked for is an error, one that has no counterpart is noted.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from graphshard.errors import PolicyError

Source = str | os.PathLike[str] | Mapping[str, Any]


_TRUE = frozenset({"true", "yes", "on", "1"})


_FALSE = frozenset({"false", "no", "off", "0"})


def read(source: Source, system: str) -> dict[str, Any]:
    """The mapping in `source`: one already, or the path of a YAML or JSON file.

    Raises:
        PolicyError: there is no such file, it holds no mapping, or is YAML and PyYAML is missing.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | os.PathLike):
        raise PolicyError(
            f"a {system} configuration is a path or a mapping; got a {type(source).__name__}"
        )
    path = Path(source)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PolicyError(f"the {system} configuration {path} cannot be read: {error}") from error
    try:
        found = json.loads(text) if path.suffix == ".json" else _yaml(text, path)
    except ValueError as error:
        raise PolicyError(f"the {system} configuration {path} cannot be parsed: {error}") from error
    if not isinstance(found, dict):
        raise PolicyError(
            f"the {system} configuration {path} must hold a mapping of keys; it holds a "
            f"{type(found).__name__}"
        )
    return found


def _yaml(text: str, path: Path) -> Any:
    try:
        import yaml
    except ImportError:
        raise PolicyError(
            f"reading {path} needs PyYAML; install graphshard[yaml], or pass the configuration as "
            "a dict"
        ) from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


class Settings:
    """The keys of one section, each to be taken once.

    Args:
        values: the section.
        where: its name, for errors.
        known: every key the system knows there.

    Raises:
        PolicyError: a key is not known; names it and the one that looks like it.
    """

    def __init__(self, values: Mapping[str, Any], where: str, known: Collection[str]) -> None:
        self.where = where
        self._left = dict(values)
        self.notes: list[str] = []
        for key in values:
            if key not in known:
                close = difflib.get_close_matches(str(key), known, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise PolicyError(f"{where} has an unknown key {key!r}{hint}")

    def take(self, key: str, default: Any = None) -> Any:
        """The value of `key`, which then counts as read; None in the file is as if left out."""
        value = self._left.pop(key, None)
        return default if value is None else value

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """The value of `key` as a bool, as YAML and command lines spell it."""
        value = self.take(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        text = str(value).lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        raise self.wrong(key, value, "true or false")

    def number(self, key: str) -> int | None:
        """The value of `key` as a whole number."""
        value = self.take(key)
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError):
            number = 0.5
        if isinstance(value, bool) or not number.is_integer():
            raise self.wrong(key, value, "a whole number")
        return int(number)

    def choice(self, key: str, names: tuple[str, ...]) -> str | None:
        """The value of `key`, one of `names` in any case or the number of one, from 1."""
        value = self.take(key)
        if value is None:
            return None
        text = str(value).upper()
        if text.isdigit() and 1 <= int(text) <= len(names) and not isinstance(value, bool):
            return names[int(text) - 1]
        if text in names:
            return text
        options = ", ".join(f"{name} or {number}" for number, name in enumerate(names, 1))
        raise self.wrong(key, value, f"one of {options}")

    def note(self, key: str, value: Any, why: str) -> None:
        """Remember that `key` has no counterpart in a policy, and why."""
        self.notes.append(f"{key}={value}: {why}")

    def note_rest(self, reasons: Mapping[str, str]) -> None:
        """Note every key not taken so far, with the reason given for it."""
        for key, value in self.rest():
            self.note(key, value, reasons[key])

    def rest(self) -> Iterator[tuple[str, Any]]:
        """The keys not taken so far that have a value, which then count as read."""
        left, self._left = self._left, {}
        for key, value in left.items():
            if value is not None:
                yield key, value

    def wrong(self, key: str, value: object, wanted: str) -> PolicyError:
        """The error for a value that `key` cannot have."""
        return PolicyError(f"{self.where}: {key} must be {wanted}; got {value!r}")

    def contradiction(self, text: str) -> PolicyError:
        """The error for keys that cannot stand together."""
        return PolicyError(f"{self.where}: {text}")

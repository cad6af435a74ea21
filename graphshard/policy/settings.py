"""Read another system's configuration, a mapping or a file, key by key.

Nothing is dropped silently: an unknown key is an error, and a key without a counterpart is noted.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from graphshard.errors import PolicyError
from graphshard.plain_data import read_json, read_yaml, shortened, shown

ConfigSource = str | os.PathLike[str] | Mapping[str, Any]


_TRUE = frozenset({"true", "yes", "on", "1"})


_FALSE = frozenset({"false", "no", "off", "0"})


_JSON_BYTES = 1 << 22


_GREATEST = 1 << 63


def read(source: ConfigSource, system: str) -> dict[str, Any]:
    """Return the configuration in `source`: a mapping, or the path of a YAML or JSON file.

    Raises:
        PolicyError: the file does not exist, holds no mapping or more than plain data (see
            `graphshard.plain_data`), or PyYAML is missing.
    """
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, str | os.PathLike):
        raise PolicyError(
            f"a {system} configuration is a path or a mapping; got a {type(source).__name__}"
        )
    path, what = Path(source), f"the {system} configuration"
    if path.suffix == ".json":
        config = read_json(path, what, PolicyError, most_bytes=_JSON_BYTES)
    else:
        try:
            config = read_yaml(path, what, PolicyError)
        except ImportError:
            raise PolicyError(
                f"reading {path} needs PyYAML; install graphshard[yaml], or pass the configuration "
                "as a dict"
            ) from None
    if not isinstance(config, dict):
        raise PolicyError(
            f"{what} {path} must hold a mapping of keys; it holds a {type(config).__name__}"
        )
    return config


class Settings:
    """The keys of one section of a configuration; each is taken once.

    Args:
        values: the section.
        where: the section's name, for errors.
        known_keys: every key that the system allows in the section.

    Raises:
        PolicyError: a key is unknown; names it and the known key most like it.
    """

    def __init__(self, values: Mapping[str, Any], where: str, known_keys: Collection[str]) -> None:
        self.where = where
        self._unread = dict(values)
        self.notes: list[str] = []
        for key in values:
            if key not in known_keys:
                close = difflib.get_close_matches(str(key)[:80], known_keys, n=1)
                hint = f"; did you mean {close[0]!r}?" if close else ""
                raise PolicyError(f"{where} has an unknown key {shown(key)}{hint}")

    def take(self, key: str, default: Any = None) -> Any:
        """Return the value of `key` and mark it as read; a None in the file means `default`."""
        value = self._unread.pop(key, None)
        return default if value is None else value

    def flag(self, key: str, default: bool | None = None) -> bool | None:
        """Return the value of `key` as a bool: a bool, or a text such as "yes", "off" or "1"."""
        value = self.take(key)
        if value is None or isinstance(value, bool):
            return default if value is None else value
        text = str(value).lower()
        if text in _TRUE or text in _FALSE:
            return text in _TRUE
        raise self.wrong(key, value, "true or false")

    def number(self, key: str, least: int = 0) -> int | None:
        """Return the value of `key` as a whole number of `least` or more; None if it is missing."""
        value = self.take(key)
        if value is None:
            return None
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = 0.5
        if isinstance(value, bool) or not number.is_integer() or not least <= number < _GREATEST:
            raise self.wrong(key, value, f"a whole number of {least} or more")
        return int(number)

    def choice(self, key: str, names: tuple[str, ...]) -> str | None:
        """Return the value of `key`: one of `names`, in any case, or given by its number from 1."""
        value = self.take(key)
        if value is None:
            return None
        text = str(value).upper()
        if (
            text.isdecimal()
            and len(text) < 9
            and 1 <= int(text) <= len(names)
            and not isinstance(value, bool)
        ):
            return names[int(text) - 1]
        if text in names:
            return text
        options = ", ".join(f"{name} or {number}" for number, name in enumerate(names, 1))
        raise self.wrong(key, value, f"one of {options}")

    def note(self, key: str, value: Any, why: str) -> None:
        """Record that `key` has no counterpart in a policy, and why."""
        self.notes.append(f"{key}={shortened(str(value))}: {why}")

    def note_rest(self, reasons: Mapping[str, str]) -> None:
        """Note every unread key with its entry of `reasons`."""
        for key, value in self.rest():
            self.note(key, value, reasons[key])

    def rest(self) -> Iterator[tuple[str, Any]]:
        """Yield the unread keys that have a value, and mark all as read."""
        unread, self._unread = self._unread, {}
        for key, value in unread.items():
            if value is not None:
                yield key, value

    def wrong(self, key: str, value: object, expected: str) -> PolicyError:
        """The error for an invalid value of `key`."""
        return PolicyError(f"{self.where}: {key} must be {expected}; got {shown(value)}")

    def contradiction(self, text: str) -> PolicyError:
        """The error for keys that contradict each other."""
        return PolicyError(f"{self.where}: {text}")

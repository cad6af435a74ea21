"""Read another system's configuration, a mapping or a file, by a table of its keys.

Nothing is dropped silently: an unknown key is an error, and a key without a counterpart is noted.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from graphshard.errors import PolicyError
from graphshard.format import meant
from graphshard.plain_data import read_json, read_yaml, shortened, shown

ConfigSource = str | os.PathLike[str] | Mapping[str, Any]


_TRUE = frozenset({"true", "yes", "on", "1"})


_FALSE = frozenset({"false", "no", "off", "0"})


_JSON_BYTES = 1 << 22


_GREATEST = 1 << 63


_NOT_FILLED_IN = "left at its default; nothing here fills it in"


def read(source: ConfigSource, system: str) -> dict[str, Any]:
    """Return the configuration in `source`: a mapping, or the path of a YAML or JSON file."""
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


class Key(NamedTuple):
    """What becomes of one key of a configuration.

    convert: reads its value, and refuses a wrong one; see `flag`.
    note: why the value has no counterpart in a policy, or what to do for it; or that by value.
    refuse: the error for a value that asks for something, in which "{key}" is the key.
    """

    convert: Callable[[Section, str, Any], Any] | None = None
    note: str | Mapping[Any, str] = ""
    refuse: str = ""


def each(keys: str, key: Key) -> dict[str, Key]:
    """A table in which all the keys in a text are alike."""
    return dict.fromkeys(keys.split(), key)


class Section(dict[str, Any]):
    """The values of one section of a configuration, converted; None for a key it has not.

    A None in `values` means the default, as a missing key does; so does `default`, of which there
    is a note. `table` has every key that the system allows, `prefix` stands before keys in notes.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        where: str,
        table: Mapping[str, Key],
        *,
        prefix: str = "",
        default: str | None = None,
    ) -> None:
        super().__init__()
        self.where = where
        self.notes: dict[str, list[str]] = {}  # keys and values, by what is said of them
        self._prefix = prefix
        for key in values:
            if key not in table:
                hint = meant(repr(key), map(repr, table))
                raise PolicyError(f"{where} has an unknown key {shown(key)}{hint}")
        for key, value in values.items():
            if value is not None and value == default:
                self.note(key, value, _NOT_FILLED_IN)
            elif value is not None:
                self[key] = self._converted(key, value, table[key])

    def __missing__(self, key: str) -> None:
        return None

    def _converted(self, key: str, value: Any, how: Key) -> Any:
        if how.convert is not None:
            value = how.convert(self, key, value)
        if how.refuse and value:
            raise self.error(how.refuse.format(key=key))
        if why := how.note if isinstance(how.note, str) else how.note.get(value):
            self.note(key, value, why)
        return value

    def note(self, key: str, value: Any, why: str) -> None:
        """Record that `key` has no counterpart in a policy, and why."""
        text = f"{self._prefix}{key}={shortened(str(value))}"
        self.notes.setdefault(why, []).append(text)

    def switch_off(self) -> None:
        """Keep no notes but those of values left to others, since the section has no effect."""
        self.notes = {why: keys for why, keys in self.notes.items() if why == _NOT_FILLED_IN}

    def error(self, text: str) -> PolicyError:
        """The error of keys that contradict each other, or ask for what there is not."""
        return PolicyError(f"{self.where}: {text}")

    def wrong(self, key: str, value: object, expected: str) -> PolicyError:
        """The error for an invalid value of `key`."""
        return self.error(f"{key} must be {expected}; got {shown(value)}")


def notes_of(*sections: Section) -> tuple[str, ...]:
    """The notes of several sections, one for each thing that is said."""
    keys_by_reason: dict[str, list[str]] = {}
    for section in sections:
        for why, keys in section.notes.items():
            keys_by_reason.setdefault(why, []).extend(keys)
    return tuple(f"{', '.join(keys)}: {why}" for why, keys in keys_by_reason.items())


def flag(section: Section, key: str, value: Any) -> bool:
    """A bool, or a text such as "yes", "off" or "1"."""
    text = str(value).lower()
    if text not in _TRUE | _FALSE:
        raise section.wrong(key, value, "true or false")
    return text in _TRUE


def number(section: Section, key: str, value: Any, least: int = 0) -> int:
    """A whole number of `least` or more."""
    try:
        found = float(value)
    except (TypeError, ValueError, OverflowError):
        found = 0.5
    if isinstance(value, bool) or not found.is_integer() or not least <= found < _GREATEST:
        raise section.wrong(key, value, f"a whole number of {least} or more")
    return int(found)


def choice(*names: str) -> Callable[[Section, str, Any], str]:
    """One of `names`, in any case, or given by its number from 1."""

    def convert(section: Section, key: str, value: Any) -> str:
        text = str(value).upper()
        numbers = {str(number): name for number, name in enumerate(names, 1)}
        if text in names:
            return text
        if text in numbers:
            return numbers[text]
        options = ", ".join(f"{name} or {number}" for number, name in numbers.items())
        raise section.wrong(key, value, f"one of {options}")

    return convert


def part(expected: str) -> Callable[[Section, str, Any], Mapping[str, Any]]:
    """A section inside of this one, in words for the error `expected`."""

    def convert(section: Section, key: str, value: Any) -> Mapping[str, Any]:
        if not isinstance(value, Mapping):
            raise section.wrong(key, value, expected)
        return value

    return convert

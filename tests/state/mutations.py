"""Seeded changes of files: of any bytes, of texts, and of the headers inside of binary files."""

from __future__ import annotations

import pickletools
import random
import re
from collections.abc import Callable
from pathlib import Path

Change = Callable[[bytes, random.Random], bytes]

_EXTREMES = [
    *((1 << 64) - 1, 1 << 63, (1 << 63) - 1, 1 << 62, (1 << 40) + 1, 1 << 32, (1 << 31) - 1, 0, 1),
]

_SCALARS = [
    *(b"-1", b"0", b"1", b"2", b"0.5", b"1e999", b"-0.0", b"NaN", b"Infinity", b"9" * 25),
    *(
        b"9" * 5000,
        b"4611686018427387904",
        b"true",
        b"null",
        b'""',
        b'"x"',
        b'"\\ud800"',
        b'"../x"',
    ),
    *(b"[]", b"{}", b"[[" * 2000, b"[1, 2]", b"{}{}"),
]
"""In place of a number, a keyword or a text."""

_SCALAR = re.compile(rb'"[^"\n]*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null|[A-Za-z_]{3,}')


def _span(raw: bytes, chance: random.Random, most: int = 64) -> tuple[int, int]:
    start = chance.randrange(len(raw) + 1)
    return start, min(len(raw), start + chance.randint(1, most))


def truncate(raw: bytes, chance: random.Random) -> bytes:
    return raw[: chance.randrange(len(raw) + 1)]


def flip(raw: bytes, chance: random.Random) -> bytes:
    changed = bytearray(raw)
    for _ in range(chance.choice([1, 1, 1, 2, 8])):
        if changed:
            bit = chance.randrange(8 * len(changed))
            changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


def insert(raw: bytes, chance: random.Random) -> bytes:
    start, _ = _span(raw, chance)
    return raw[:start] + chance.randbytes(chance.randint(1, 16)) + raw[start:]


def delete(raw: bytes, chance: random.Random) -> bytes:
    start, stop = _span(raw, chance)
    return raw[:start] + raw[stop:]


def swap(raw: bytes, chance: random.Random) -> bytes:
    if len(raw) < 4:
        return raw
    size = chance.randint(1, min(16, len(raw) // 2))
    first, second = sorted(chance.sample(range(len(raw) - size + 1), 2))
    if second < first + size:
        return raw
    a, b = raw[first : first + size], raw[second : second + size]
    return raw[:first] + b + raw[first + size : second] + a + raw[second + size :]


def splice(raw: bytes, chance: random.Random) -> bytes:
    """A stretch of the file once more, over or between others."""
    (start, stop), (at, end) = _span(raw, chance), _span(raw, chance)
    return raw[:at] + raw[start:stop] + raw[at if chance.random() < 0.5 else end :]


def number(raw: bytes, chance: random.Random) -> bytes:
    """Some bytes become the least or greatest number of 1, 2, 4 or 8 bytes, or one more or less."""
    size = chance.choice([1, 2, 4, 8])
    if len(raw) < size:
        return raw
    at = chance.randrange(len(raw) - size + 1)
    old = int.from_bytes(raw[at : at + size], "little")
    new = chance.choice([*_EXTREMES, old + 1, old - 1, old * 2]) % (1 << 8 * size)
    return raw[:at] + new.to_bytes(size, "little") + raw[at + size :]


def scalar(raw: bytes, chance: random.Random) -> bytes:
    """A number, keyword or text becomes another."""
    found = list(_SCALAR.finditer(raw))
    if not found:
        return raw
    old = chance.choice(found)
    other = chance.choice(found)[0] if chance.random() < 0.3 else chance.choice(_SCALARS)
    return raw[: old.start()] + other + raw[old.end() :]


def line(raw: bytes, chance: random.Random) -> bytes:
    """A line or an entry is repeated, removed or moved."""
    joint = b"\n" if raw.count(b"\n") > 2 else b","
    parts = raw.split(joint)
    at = chance.randrange(len(parts))
    part = parts.pop(at)
    for _ in range(chance.choice([0, 1, 2])):
        parts.insert(chance.randrange(len(parts) + 1), part)
    return joint.join(parts)


def spaces(raw: bytes, chance: random.Random) -> bytes:
    """White space is added."""
    places = [match.end() for match in re.finditer(rb"[,{\[\n]", raw)] or [0]
    at = chance.choice(places)
    return raw[:at] + chance.choice([b" ", b"  ", b"\n", b"\t"]) + raw[at:]


BINARY: list[Change] = [truncate, flip, insert, delete, swap, splice, number]


TEXT: list[Change] = [*BINARY[:-1], *[scalar] * 6, line, line, spaces, spaces]


def opcode(raw: bytes, chance: random.Random) -> bytes:
    """An instruction of a pickle is removed, repeated, moved or replaced by another one."""
    starts = [at for _, _, at in pickletools.genops(raw)]
    ends = [*starts[1:], len(raw)]
    parts = [raw[start:end] for start, end in zip(starts, ends, strict=True)]
    at = chance.randrange(len(parts))
    other = chance.choice([*parts, *_INSTRUCTIONS])
    way = chance.randrange(3)
    parts[at : at + 1] = [[], [parts[at], other], [other]][way]
    return b"".join(parts)


_INSTRUCTIONS = [
    b"r\xff\xff\xff\xff",  # LONG_BINPUT: a memo of 64 GB
    b"\x8e\xff\xff\xff\xff\xff\x00\x00\x00",  # BINBYTES8: 1 PB
    b"\x8b\xff\xff\xff\x7f",  # LONG4
    b"\x8a\x09" + b"\xff" * 8 + b"\x00",  # LONG1: 2**64 - 1
    b"J\xff\xff\xff\xff",  # BININT: -1
    b"cos\nsystem\n",
    b"\x8c\x05posix\x8c\x06system\x93",
    b"(i",
    b"b",
    b"R",
    b"0",
    b".",
]


def header(raw: bytes, chance: random.Random) -> bytes:
    """The header of a safetensors file changes as a text, and its length with it."""
    length = int.from_bytes(raw[:8], "little")
    text = chance.choice(TEXT)(raw[8 : 8 + length], chance)
    return len(text).to_bytes(8, "little") + text + raw[8 + length :]


def mutate(file: Path, chance: random.Random) -> str:
    """Change a file as its name suggests; returns the name of the change."""
    raw = file.read_bytes()
    changes = BINARY
    if file.suffix == ".json":
        changes = TEXT
    elif file.suffix == ".safetensors" and chance.random() < 0.6:
        changes = [header]
    elif file.name == ".metadata" and chance.random() < 0.6:
        changes = [opcode]
    change = chance.choice(changes)
    file.write_bytes(change(raw, chance))
    return change.__name__

"""Pickles as data: no class or function that they name is looked up, so none can run.

An object comes back as the `Made` record of the name, arguments and state that its pickle gives.
The reader of a record decides what it may stand for. Time and memory are bounded by the length of
the pickle: numbers of memo entries allocate nothing, and no value is hashed that could nest.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any


class PickleError(ValueError):
    """The bytes are no pickle, or one with something that no checkpoint needs."""


class Name:
    """A class or function that a pickle names, which stays unopened."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


class Made:
    """An object as its pickle makes it: `name(*args)`, then `state`, then `pairs` as items."""

    __slots__ = ("args", "name", "pairs", "state")

    def __init__(self, name: Name, args: tuple[Any, ...]) -> None:
        self.name = name
        self.args = args
        self.state: Any = None
        self.pairs: list[tuple[Any, Any]] = []


class Reference:
    """A value that lies outside the pickle, by its id."""

    __slots__ = ("id",)

    def __init__(self, id_: Any) -> None:
        self.id = id_


def read_pickle(raw: bytes) -> Any:
    """Return the object of a pickle of protocol 2 to 5.

    Returns:
        None, bools, numbers, texts, bytes, tuples, lists, dicts and sets as they are; `Name`,
        `Made` and `Reference` for all else. Containers may be shared, and may hold themselves.
    """
    try:
        return _Machine(raw).run()
    except (IndexError, struct.error, UnicodeDecodeError, KeyError, TypeError) as error:
        raise PickleError(f"the pickle is damaged ({type(error).__name__})") from error


_STOP = 0x2E


_PLAIN_KEYS = (str, int, float, bool, type(None))


class _Machine:
    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.at = 0
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        raw, memo, steps, code = self.raw, self.memo, _STEPS, 0
        while code != _STOP:
            code = raw[self.at]
            self.at += 1
            if code == 0x94:  # MEMOIZE
                memo[len(memo)] = self.stack[-1]
            elif code == 0x68:  # BINGET
                self.stack.append(memo[raw[self.at]])
                self.at += 1
            elif code == 0x4B:  # BININT1
                self.stack.append(raw[self.at])
                self.at += 1
            elif code == 0x8C:  # SHORT_BINUNICODE
                start = self.at + 1
                self.at = start + raw[start - 1]
                self.stack.append(str(raw[start : self.at], "utf-8"))
            elif code == 0x28:  # MARK
                self.outer.append(self.stack)
                self.stack = []
            elif code in steps:
                steps[code](self)
            elif code != _STOP:
                raise PickleError(f"the pickle has the unknown opcode {code:#x}")
        if self.outer or len(self.stack) != 1:
            raise PickleError("the pickle ends too early")
        return self.stack[0]

    def take(self, count: int) -> bytes:
        start = self.at
        self.at += count
        if self.at > len(self.raw):
            raise PickleError("the pickle is cut off")
        return self.raw[start : self.at]

    def number(self, count: int) -> int:
        return int.from_bytes(self.take(count), "little")

    def line(self) -> str:
        stop = self.raw.find(b"\n", self.at)
        if stop < 0:
            raise PickleError("the pickle is cut off")
        text = str(self.raw[self.at : stop], "utf-8")
        self.at = stop + 1
        return text

    def items(self) -> list[Any]:
        items = self.stack
        self.stack = self.outer.pop()
        return items

    # -- values ----------------------------------------------------------------------------------

    def push_long(self) -> None:
        self.stack.append(int.from_bytes(self.take(self.number(1)), "little", signed=True))

    def push_text(self, width: int) -> None:
        self.stack.append(str(self.take(self.number(width)), "utf-8"))

    def push_bytes(self, width: int) -> None:
        self.stack.append(self.take(self.number(width)))

    def push_tuple(self, count: int) -> None:
        stack = self.stack
        if len(stack) < count:
            raise PickleError("the pickle is damaged (a tuple lacks values)")
        stack[len(stack) - count :] = [tuple(stack[len(stack) - count :])]

    def push_marked(self) -> None:
        values = self.items()
        self.stack.append(tuple(values))

    def push_list(self) -> None:
        self.stack.append([])

    def push_dict(self) -> None:
        self.stack.append({})

    def push_empty(self) -> None:
        self.stack.append(())

    # -- containers ------------------------------------------------------------------------------

    def append(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, list):
            raise PickleError("the pickle appends to what is no list")
        target += values

    def set_items(self, flat: list[Any]) -> None:
        target = self.stack[-1]
        if len(flat) % 2 or not isinstance(target, dict | Made):
            raise PickleError("the pickle sets items of what is no dict")
        keys, values = flat[::2], flat[1::2]
        if isinstance(target, Made):
            target.pairs += zip(keys, values, strict=True)
            return
        for key in keys:
            if type(key) is not str:
                _require_key(key)
        before = len(target)
        target.update(zip(keys, values, strict=True))
        if len(target) < before + len(keys):
            raise PickleError("the pickle sets a key twice")

    def add_items(self, values: list[Any]) -> None:
        target = self.stack[-1]
        if not isinstance(target, set):
            raise PickleError("the pickle adds to what is no set")
        for value in values:
            _require_key(value)
            target.add(value)

    # -- objects ---------------------------------------------------------------------------------

    def push_name(self, module: Any, name: Any) -> None:
        if not isinstance(module, str) or not isinstance(name, str):
            raise PickleError("the pickle names a class by what is no text")
        self.stack.append(Name(module, name))

    def make(self) -> None:
        args, name = self.stack.pop(), self.stack.pop()
        if not isinstance(name, Name) or not isinstance(args, tuple):
            raise PickleError("the pickle calls what is no class or function")
        self.stack.append(Made(name, args))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if not isinstance(target, Made) or target.state is not None:
            raise PickleError("the pickle gives a state to what is no new object")
        target.state = state

    def stack_global(self) -> None:
        name, module = self.stack.pop(), self.stack.pop()
        self.push_name(module, name)

    def put(self, width: int) -> None:
        self.memo[self.number(width)] = self.stack[-1]

    def set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self.set_items([key, value])


def _require_key(key: Any) -> None:
    if isinstance(key, tuple) and len(key) < 16 and all(isinstance(k, str | int) for k in key):
        return
    if not isinstance(key, (*_PLAIN_KEYS, Made)):
        raise PickleError(f"the pickle has a {type(key).__name__} as a key")


_STEPS: dict[int, Callable[[_Machine], object]] = {
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME
    0x4E: lambda m: m.stack.append(None),
    0x88: lambda m: m.stack.append(True),
    0x89: lambda m: m.stack.append(False),
    0x4A: lambda m: m.stack.append(struct.unpack("<i", m.take(4))[0]),  # BININT
    0x4D: lambda m: m.stack.append(m.number(2)),  # BININT2
    0x8A: _Machine.push_long,  # LONG1
    0x47: lambda m: m.stack.append(struct.unpack(">d", m.take(8))[0]),  # BINFLOAT
    0x58: lambda m: m.push_text(4),  # BINUNICODE
    0x8D: lambda m: m.push_text(8),  # BINUNICODE8
    0x43: lambda m: m.push_bytes(1),  # SHORT_BINBYTES
    0x42: lambda m: m.push_bytes(4),  # BINBYTES
    0x8E: lambda m: m.push_bytes(8),  # BINBYTES8
    0x5D: _Machine.push_list,  # EMPTY_LIST
    0x7D: _Machine.push_dict,  # EMPTY_DICT
    0x8F: lambda m: m.stack.append(set()),  # EMPTY_SET
    0x29: _Machine.push_empty,  # EMPTY_TUPLE
    0x85: lambda m: m.push_tuple(1),
    0x86: lambda m: m.push_tuple(2),
    0x87: lambda m: m.push_tuple(3),
    0x74: _Machine.push_marked,  # TUPLE
    0x61: lambda m: m.append([m.stack.pop()]),  # APPEND
    0x65: lambda m: m.append(m.items()),  # APPENDS
    0x73: _Machine.set_item,  # SETITEM
    0x75: lambda m: m.set_items(m.items()),  # SETITEMS
    0x90: lambda m: m.add_items(m.items()),  # ADDITEMS
    0x63: lambda m: m.push_name(m.line(), m.line()),  # GLOBAL
    0x93: _Machine.stack_global,  # STACK_GLOBAL
    0x52: _Machine.make,  # REDUCE
    0x81: _Machine.make,  # NEWOBJ
    0x62: _Machine.build,  # BUILD
    0x51: lambda m: m.stack.append(Reference(m.stack.pop())),  # BINPERSID
    0x71: lambda m: m.put(1),  # BINPUT
    0x72: lambda m: m.put(4),  # LONG_BINPUT
    0x6A: lambda m: m.stack.append(m.memo[m.number(4)]),  # LONG_BINGET
}

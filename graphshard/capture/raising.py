"""Branches of running code of which one raises an error, such as an `assert`."""

from __future__ import annotations

import dis
import os
from bisect import bisect_right
from functools import cache
from types import FrameType

from graphshard.errors import is_library

_TRACE = os.path.join(os.path.dirname(__file__), "traced_module.py")
"""The file whose frame called the model."""

_ENDS = frozenset({"RETURN_VALUE", "RETURN_CONST", "YIELD_VALUE", "RERAISE", "FOR_ITER", "SEND"})


def raising_answer(frame: FrameType | None) -> bool | None:
    """The truth value at which the branch that code is about to take raises an error.

    The code is that of the innermost frame at a branch, which may be torch's, and else that of the
    innermost one outside torch. None if it is at no branch, or if both ways or none raise.
    """
    while frame is not None:
        code = [*dis.get_instructions(frame.f_code)]
        at = _at(code, frame.f_lasti)
        if code[at].opname == "TO_BOOL":
            at += 1
        if "POP_JUMP" in code[at].opname or not is_library(frame.f_code.co_filename):
            break
        frame = frame.f_back
    if frame is None or not code[at].opname.endswith(("IF_TRUE", "IF_FALSE")) or _is_caught(frame):
        return None
    jumps_if = code[at].opname.endswith("IF_TRUE")
    jumping, falling = _raises(code, _at(code, code[at].argval)), _raises(code, at + 1)
    if jumping == falling:
        return None
    return jumps_if if jumping else not jumps_if


def _at(code: list[dis.Instruction], offset: int) -> int:
    """The index of the instruction at or around an offset."""
    return bisect_right([each.offset for each in code], offset) - 1


def _raises(code: list[dis.Instruction], start: int) -> bool:
    """Whether the code from here on raises an error on every way, going forwards only."""

    @cache
    def raises(start: int) -> bool:
        for index in range(start, len(code)):
            name = code[index].opname
            if name == "RAISE_VARARGS":
                return True
            if "JUMP" in name:
                targets = [_at(code, code[index].argval)]
                if "POP_JUMP" in name:
                    targets.append(index + 1)
                return all(target > index and raises(target) for target in targets)
            if name in _ENDS:
                return False
        return False

    return raises(start)


def _is_caught(frame: FrameType | None) -> bool:
    """Whether the model's code would go on behind an error raised in `frame`."""
    while frame is not None and frame.f_code.co_filename != _TRACE:
        if not is_library(frame.f_code.co_filename):
            code = dis.Bytecode(frame.f_code)
            handlers = {
                entry.target
                for entry in code.exception_entries  # type: ignore[attr-defined]
                if entry.start <= frame.f_lasti < entry.end
            }
            if any(_goes_on([*code], handler) for handler in handlers):
                return True
        frame = frame.f_back
    return False


def _goes_on(code: list[dis.Instruction], handler: int) -> bool:
    """Whether a handler may end an error: one of `except`, but of `finally` or `with`."""
    for each in code[_at(code, handler) :]:
        if each.opname in ("CHECK_EXC_MATCH", "CHECK_EG_MATCH", "POP_EXCEPT"):
            return True
        if each.opname in ("RERAISE", "WITH_EXCEPT_START"):
            return False
    return False

"""Branches of running code of which one raises an error, such as an `assert`."""

from __future__ import annotations

import dis
from bisect import bisect_right
from types import FrameType

from graphshard.errors import is_library

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
    if frame is None or not code[at].opname.endswith(("IF_TRUE", "IF_FALSE")):
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
    for index in range(start, len(code)):
        name = code[index].opname
        if name == "RAISE_VARARGS":
            return True
        if "JUMP" in name:
            targets = [_at(code, code[index].argval)]
            if "POP_JUMP" in name:
                targets.append(index + 1)
            return all(target > index and _raises(code, target) for target in targets)
        if name in _ENDS:
            return False
    return False

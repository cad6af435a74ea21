"""The order of a program's events, in the notation of what FSDP was observed to do."""

from __future__ import annotations

from graphshard.program.program import BACKWARD, FORWARD, Program

SHORT = {"all_gather": "AG:", "free": "FREE:", "reduce_scatter": "RS:", "all_reduce": "AR:"}


def events(program: Program, *, waits: bool = False) -> str:
    """The schedule: AG = all_gather issued, F and B = compute in forward and backward (Bh: the
    head's), RS = reduce_scatter, AR = all_reduce; "|" is the border of the two.
    """
    words: list[str] = []
    phase = FORWARD
    for event in program.schedule():
        if event.phase != phase:
            words.append("|")
            phase = event.phase
        unit = event.unit.removeprefix("layers.") or "root"
        if event.op == "compute":
            if unit != "root":
                word = ("F" if phase == FORWARD else "B") + unit
                if words[-1:] != [word]:  # waits left out may have stood between
                    words.append(word)
            elif phase == BACKWARD and not any(w[0] == "B" for w in words):
                words.append("Bh")
        elif event.op == "wait":
            if waits:
                words.append(f"WAIT:{unit}")
        else:
            words.append(SHORT[event.op] + unit)
    return " ".join(words)

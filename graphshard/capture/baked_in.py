"""Telling the user of Python state that a program keeps as its trace saw it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from graphshard.capture.traced_module import EntryPoint, TracedModel
from graphshard.errors import CaptureError
from graphshard.program.program import Program


def tell_what_is_baked_in(
    traced: TracedModel, drawn_from: Sequence[str], entry: EntryPoint, program: Program
) -> list[str]:
    """Warn of each kind once; returns notes for the program."""
    notes = []
    if drawn_from:
        drawn = " and ".join(drawn_from)
        notes.append(f"random numbers drawn from {drawn} in forward are baked in")
        _warn(
            f"the forward draws random numbers from {drawn}; a captured program keeps those it "
            "saw. Draw them with torch, or pass them as arguments"
        )
    if traced.reads.clocks:
        clocks = " and ".join(f"{name}() (at {line})" for name, line in traced.reads.clocks.items())
        notes.append(f"the time that forward reads is baked in: {clocks}")
        _warn(
            f"the forward reads {clocks}; a captured program keeps the time it saw. Pass it as an "
            "argument"
        )
    assigned = (*traced.state_changes, *(place.path for place, _ in traced.settled))
    if assigned and not program.outputs and entry.method != "forward":
        raise CaptureError(
            f"{entry} returns no tensor and assigns {', '.join(assigned[:5])}, which a captured "
            "program does not; pass it numbers instead of tensors, or set the attributes of the "
            "sharded module, which its programs read"
        )
    if traced.state_changes:
        changed = ", ".join(traced.state_changes[:5])
        notes.append(f"python state assigned in forward is baked in: {changed}")
        line = traced.reads.line_of(traced.state_changes)
        at = f" (at {line})" if line else ""
        _warn(
            f"the forward assigns {changed}{at}; a captured program keeps the value it saw and "
            "does not repeat the assignment. Use a buffer for state that changes from step to step"
        )
    if traced.made_to_require_grad:
        inputs = ", ".join(sorted(traced.made_to_require_grad))
        _warn(
            f"the forward calls requires_grad_() on {inputs}, which in a captured program concerns "
            "values of its own: the tensor that is passed gets no .grad. Call it before, if you "
            "want one"
        )
    return notes


def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=6)

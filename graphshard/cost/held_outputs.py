"""Outputs that a training loop holds, as the variable of `outputs = model(**batch)` does."""

from __future__ import annotations

from dataclasses import replace

from torch import fx

from graphshard.program.program import Program
from graphshard.program.storages import END, RETURNED, Storage, Storages


def hold_outputs(program: Program, storages: Storages) -> list[Storage]:
    """Let outputs outlive their step, and return those of the step before.

    A variable holds what a call returned until the next call returns. So in forward the outputs of
    two calls are alive.

    Args:
        program: a rewritten program.
        storages: those of `program`; the outputs among them get no end.

    Returns:
        One storage for each that the outputs lie in, alive up to the end of the next forward.
    """
    backward = program.first_backward()
    outputs = [node for node in program.results().outputs if isinstance(node, fx.Node)]
    held = {id(s): s for node in outputs for s in storages.of_node.get(node, ())}
    before = []
    for storage in held.values():
        storage.dies, storage.ends = END, []
        last = storages.place[backward] - 1
        before.append(replace(storage, kind=RETURNED, born=0, dies=last, ends=[backward]))
    return before

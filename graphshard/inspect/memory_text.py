"""What a captured step saves, recomputes and holds, for plans."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from graphshard.inspect.fold import fold
from graphshard.inspect.units_text import human_bytes, some_of
from graphshard.program import BACKWARD, Program
from graphshard.remat import RECOMPUTED
from graphshard.step_memory import storages_of


def memory_dict(program: Program) -> dict[str, Any]:
    """Bytes saved from forward to backward by unit, operators recomputed, the most bytes held."""
    storages = storages_of(program)
    return {
        "saved_bytes": dict(sorted(storages.saved_by_unit().items())),
        "recomputed_ops": sum(RECOMPUTED in node.meta for node in program.nodes(BACKWARD)),
        "peak_bytes": max(storages.live(), default=0),
    }


def memory_notes(program: Program) -> Iterator[tuple[str, str]]:
    """The same in sentences, each with its title."""
    facts = memory_dict(program)
    saved: dict[str, int] = facts["saved_bytes"]
    if saved:
        each = [
            f"{line.name or '(root)'} {human_bytes(line.facts)}{' each' if line.count > 1 else ''}"
            for line in fold(list(saved.items()))
        ]
        total = human_bytes(sum(saved.values()))
        yield "saved", f"{total} of activations from forward to backward: {some_of(each)}"
    if facts["recomputed_ops"]:
        yield "recomputed", f"{facts['recomputed_ops']:,} operators of forward, again in backward"
    peak = human_bytes(facts["peak_bytes"])
    yield "peak", f"{peak} held at once by a step, besides shards, their gradients and inputs"

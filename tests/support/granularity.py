"""Toy programs after passes that change what moves together, and how such a program reads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import toy_programs as toys

from graphshard.hardware.hardware import Hardware
from graphshard.passes.set_budget import SetBudget
from graphshard.passes.split_gathers import SplitGathers
from graphshard.passes.split_reduces import SplitReduces
from graphshard.pipeline import default_passes, passes_for, run_passes
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.collective import Mode
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import Program
from graphshard.program.storages import FULL_GRADIENTS, live_unsharded, storages_of

SPLIT = SplitGathers()
REDUCES = SplitReduces()
ALL_FINER = (SPLIT, REDUCES)


def finer(
    build: Callable[[], Program],
    *passes: Pass,
    policy: Policy | None = None,
    hardware: Hardware | None = None,
    mesh: tuple[int, ...] = (4,),
    mode: Mode = (None, (), ()),
    same: bool = True,
    units: Sequence[str] = (),
    may_stay: Sequence[str] = (),
) -> tuple[Program, ShardingPlan]:
    """A toy program in FSDP's order, then after `passes`, computing what was captured.

    `may_stay` are the units that stay gathered if backward begins with them.
    """
    policy = toys.gathering_at_need(policy or Policy())
    program = build()
    plan = toys.make_toy_plan(program, units or toys.UNITS[build], policy, mesh=mesh)
    stay = {unit.fqn: replace(unit.options, may_stay=unit.fqn in may_stay) for unit in plan.units}
    plan = replace(plan, units=tuple(replace(u, options=stay[u.fqn]) for u in plan.units))
    all_passes = (*default_passes(policy), SetBudget(hardware), *passes)
    run_passes(program, plan, passes_for(all_passes, mode))
    if same:
        toys.assert_same_values(build(), program, plan)
    return program, plan


def events(program: Program, phase: str, *kinds: str) -> str:
    """The events of the `kinds` in `phase`, with the parameters a collective moves:
    "gather embed+head, free a".
    """
    short = {
        "all_gather": "gather",
        "reduce_scatter": "reduce",
        "all_reduce": "average",
        "compute": "run",
    }
    words: list[str] = []
    for event, nodes in program.timeline():
        if event.phase != phase:
            continue
        node = nodes[0]
        what = event.unit or "root"
        collective = event.op in ("wait", "free") or ops.is_collective(node)
        if collective:
            params: Any = ops.collective_of(node).kwargs["params"]
            what = "+".join(dict.fromkeys(owner(name) for name in params))
        elif event.op not in ("compute", "arrive"):
            what = owner(str(node.kwargs["param"]))
        kind = short.get(event.op, event.op)
        if event.op == "wait":
            kind = f"wait-{short[str(ops.op_name(ops.collective_of(node)))]}"
        word = f"{kind} {what}"
        if kind in kinds and words[-1:] != [word]:
            words.append(word)
    return ", ".join(words)


def owner(param: str) -> str:
    """ "layers.0.up.weight" as "0", "embed.weight" as "embed"."""
    return param.removeprefix("layers.").split(".")[0]


def most_unsharded(program: Program) -> int:
    return max(live for _, live in live_unsharded(program))


def gradient_bytes(program: Program) -> int:
    """The most bytes of full gradients that wait to be reduced at once."""
    held = [s for s in storages_of(program).all if s.kind == FULL_GRADIENTS]
    return max(
        sum(s.size for s in held if s.born <= place <= s.dies)
        for place in range(len(program.graph.nodes))
    )

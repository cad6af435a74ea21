"""What must hold of a program, checked before the first pass and after each.

Reads only. Some rules hold from a certain pass on: `done` names the passes that have run. Each rule
is one function over the facts of `verify_facts`, listed in `RULES`; the first one broken raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from graphshard.plan import ShardingPlan
from graphshard.program import Program
from graphshard.verify_facts import Facts, Reference
from graphshard.verify_graph import check_layout, check_metadata, check_phases, check_unchanged
from graphshard.verify_memory import check_budget, check_frees, check_lifetimes
from graphshard.verify_sharding import (
    check_gathers,
    check_order,
    check_reduces,
    check_shards,
    check_waits,
)

FINISHED = frozenset({"unshard", "reduce_grads", "insert_free"})
"""The passes after which a program keeps every rule."""

RULES: tuple[Callable[[Facts], None], ...] = (
    check_layout,
    check_metadata,
    check_phases,
    check_shards,
    check_gathers,
    check_waits,
    check_reduces,
    check_order,
    check_frees,
    check_lifetimes,
    check_budget,
    check_unchanged,
)


def verify(
    program: Program,
    plan: ShardingPlan,
    *,
    after: str,
    done: Collection[str] = FINISHED,
    reference: Reference | None = None,
) -> None:
    """Check every rule a program must keep.

    Args:
        program: its nodes have units (see `graphshard.runs.assign_units`).
        plan: the plan it was rewritten by.
        after: the pass that ran last, to be named in an error.
        done: names of the passes that ran; what only holds after "unshard", "reduce_grads" or
            "insert_free" is checked if they are among them.
        reference: the program before the pass, to compare with: the order of its collectives, the
            shapes and dtypes its nodes read, and which parameters have gradients.

    Raises:
        VerifyError: a rule is broken. Names the pass, the rule, the node and its unit, and shows
            the lines of the dump around the node.
    """
    facts = Facts.of(program, plan, after=after, done=frozenset(done), reference=reference)
    for rule in RULES:
        rule(facts)

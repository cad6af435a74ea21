"""What must hold of a program, checked before the first pass and after each.

Reads only. Some rules hold from a certain pass on: `done` holds the classes of those that ran. Each
rule is one function over the facts of `verify_facts`, listed in `RULES`; the first one broken
raises.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from graphshard.passes.accumulate import Accumulate
from graphshard.passes.insert_free import InsertFree
from graphshard.passes.offload_params import OffloadParams
from graphshard.passes.overlap import Overlap
from graphshard.passes.precision import Precision
from graphshard.passes.reduce_grads import ReduceGrads
from graphshard.passes.reduce_replicas import ReduceReplicas
from graphshard.passes.release_early import ReleaseEarly
from graphshard.passes.unshard import Unshard
from graphshard.planning.plan import ShardingPlan
from graphshard.program.program import Program
from graphshard.verify.collectives import (
    check_gathers,
    check_order,
    check_reduces,
    check_shards,
    check_transfers,
    check_waits,
)
from graphshard.verify.copies import check_copies, check_kept
from graphshard.verify.facts import Facts, Reference
from graphshard.verify.graph import (
    check_layout,
    check_metadata,
    check_phases,
    check_tables,
    check_unchanged,
)
from graphshard.verify.groups import check_groups, check_reshards
from graphshard.verify.memory import check_budget, check_frees, check_lifetimes, check_releases
from graphshard.verify.precision import check_precision
from graphshard.verify.regions import check_regions
from graphshard.verify.values import check_values

FINISHED: frozenset[type] = frozenset(
    {Unshard, ReduceGrads, ReduceReplicas, Precision, InsertFree, ReleaseEarly, Overlap}
)
"""The passes after which a program keeps every rule."""


RULES: tuple[Callable[[Facts], None], ...] = (
    check_layout,
    check_metadata,
    check_phases,
    check_transfers,
    check_groups,
    check_copies,
    check_shards,
    check_gathers,
    check_kept,
    check_reshards,
    check_waits,
    check_reduces,
    check_precision,
    check_order,
    check_frees,
    check_lifetimes,
    check_releases,
    check_budget,
    check_tables,
    check_unchanged,
    check_values,
    check_regions,
)


LATER_RULES: Mapping[type, tuple[Callable[[Facts], None], ...]] = {
    OffloadParams: (check_copies,),
    Unshard: (check_shards,),
    ReduceGrads: (check_reduces,),
    ReduceReplicas: (check_reduces,),
    Precision: (check_precision, check_values),
    Accumulate: (check_values,),
    InsertFree: (check_frees,),
    ReleaseEarly: (check_budget,),
    Overlap: (check_budget,),
}
"""The rules that ask for more once a pass has run: all there is to check if it changed nothing."""


def verify(
    program: Program,
    plan: ShardingPlan,
    *,
    after: str,
    done: Collection[type] = FINISHED,
    reference: Reference | None = None,
    rules: Sequence[Callable[[Facts], None]] = RULES,
) -> Facts:
    """Check every rule a program must keep.

    Args:
        program: its nodes have units (see `graphshard.runs.assign_units`).
        plan: the plan it was rewritten by.
        after: the pass that ran last, to be named in an error.
        done: the classes of the passes that ran (a name could be anyone's); what only holds after
            `Unshard`, `ReduceGrads`, `ReduceReplicas`, `Precision`, `InsertFree`, `ReleaseEarly` or
            `Overlap` is checked if they are among them.
        reference: the program before the pass, to compare with: its tables, the order of its
            collectives, the shapes and dtypes its nodes read; and, as captured, which parameters
            have gradients and which values the step returns.
        rules: those to check, of `RULES`.

    Returns:
        What the rules looked at, to make the next reference of.

    Raises:
        VerifyError: a rule is broken. Names the pass, the rule, the node and its unit, and shows
            the lines of the dump around the node.
    """
    facts = Facts.of(program, plan, after=after, done=frozenset(done), reference=reference)
    for rule in rules:
        rule(facts)
    return facts

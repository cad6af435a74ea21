"""The rules that a program must keep, checked before the first pass and after the last.

The checker only reads. Each rule is one function over the facts of `graphshard.verify.facts`, and
a row of `RULES`; the first broken rule raises. Rules know the stages that passes establish, and no
pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from graphshard.planning.plan import ShardingPlan
from graphshard.program.pass_protocol import Stage
from graphshard.program.program import Program
from graphshard.verify.collectives import (
    check_gathers,
    check_groups,
    check_order,
    check_reduces,
    check_reshards,
    check_shards,
    check_transfers,
    check_waits,
)
from graphshard.verify.compute import check_checks, check_random_states, check_regions
from graphshard.verify.copies import check_accumulated, check_copies, check_precision
from graphshard.verify.facts import Facts, Reference
from graphshard.verify.graph import (
    check_constants,
    check_layout,
    check_metadata,
    check_phases,
    check_tables,
    check_unchanged,
)
from graphshard.verify.memory import check_budget, check_frees, check_lifetimes, check_releases
from graphshard.verify.values import check_values


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        name: what the rule is about.
        check: raises VerifyError where the rule is broken.
        since: the stage from which the rule applies at all.
        stricter: the stages from which the rule asks more than before.
    """

    name: str
    check: Callable[[Facts], None]
    since: Stage = Stage.CAPTURED
    stricter: Stage = Stage.CAPTURED


RULES: tuple[Rule, ...] = (
    Rule("layout", check_layout),
    Rule("metadata", check_metadata),
    Rule("phases", check_phases),
    Rule("transfers", check_transfers),
    Rule("groups", check_groups),
    Rule("copies", check_copies, stricter=Stage.OFFLOADED),
    Rule("shards", check_shards, since=Stage.GATHERED),
    Rule("gathers", check_gathers),
    Rule("accumulated", check_accumulated),
    Rule("reshards", check_reshards),
    Rule("waits", check_waits),
    Rule("reduces", check_reduces, since=Stage.REDUCED, stricter=Stage.AVERAGED),
    Rule("precision", check_precision, since=Stage.CAST),
    Rule("order", check_order),
    Rule("frees", check_frees, stricter=Stage.FREED),
    Rule("lifetimes", check_lifetimes),
    Rule("releases", check_releases),
    Rule("budget", check_budget, stricter=Stage.RELEASED | Stage.SCHEDULED),
    Rule("random states", check_random_states),
    Rule("tables", check_tables),
    Rule("unchanged", check_unchanged),
    Rule("constants", check_constants),
    Rule("same values", check_values, stricter=Stage.CAST | Stage.ACCUMULATED),
    Rule("regions", check_regions),
    Rule("checks", check_checks, stricter=Stage.CHECKED),
)
"""Every rule, in the order of the checks: later ones rely on earlier ones."""


OF_EACH_PASS = tuple(rule for rule in RULES if rule.check in (check_accumulated, check_order))
"""The rules that ask more of each pass than of all passes together; their checks are cheap."""


def _all_stages() -> Stage:
    stages = Stage.CAPTURED
    for rule in RULES:
        stages |= rule.since | rule.stricter
    return stages


FINISHED = _all_stages() & ~Stage.OFFLOADED
"""The stages of every finished program: all that a rule asks about, but for the policy's choice."""


def verify(
    program: Program,
    plan: ShardingPlan,
    *,
    after: str,
    done: Stage = FINISHED,
    reference: Reference | None = None,
    rules: Sequence[Rule] = RULES,
) -> Facts:
    """Check `rules` on `program`, and return the facts that they looked at.

    `after` is the name of the pass that ran last, for errors; `done` the stages reached.
    `reference` is the program before the pass, to compare with: its tables, the order of its
    collectives, what its nodes read; and, as captured, which parameters have gradients and which
    values the step returns. The nodes have units (see `graphshard.program.spans.assign_units`).

    Raises:
        VerifyError: a rule is broken. Names the pass, the rule, the node and its unit, and shows
            the lines of the dump around the node.
    """
    facts = Facts.of(program, plan, after=after, done=done, reference=reference)
    for rule in rules:
        if rule.since in done:
            rule.check(facts)
    return facts

"""Rules on memory: gathered values are freed once and not read afterwards; the budget holds."""

from __future__ import annotations

from torch import fx

from graphshard.errors import BudgetError
from graphshard.format import human_bytes
from graphshard.program import ops
from graphshard.program.aliases import aliases_of, unpacks
from graphshard.program.collective import Collective
from graphshard.program.pass_protocol import Stage
from graphshard.program.program import BACKWARD
from graphshard.program.storages import KINDS, Storage, storages_of
from graphshard.verify.facts import Facts


def check_frees(facts: Facts) -> None:
    """The result of a gather is freed once, nothing else is; from `Stage.FREED` on, each is."""
    for wait, frees in facts.frees.items():
        gather = ops.collective_of(wait)
        if gather.target is not ops.all_gather:
            for free in frees:
                facts.fail("frees", free, f"it frees what a {ops.op_name(gather)} returned")
            continue
        if Collective.of(gather).in_place:
            for free in frees:
                facts.fail("frees", free, f"%{wait.name} stands in the copies that ranks keep")
            continue
        if len(frees) > 1:
            facts.fail("frees", frees[1], f"%{wait.name} is freed by %{frees[0].name} already")
        if not frees and Stage.FREED in facts.done:
            facts.fail("frees", wait, f"what %{gather.name} gathered is never freed")


def check_lifetimes(facts: Facts) -> None:
    """No use of an unsharded value, views of it included, comes after its free.

    A collective uses its operands until its wait.
    """
    for wait, frees in facts.frees.items():
        if not frees or ops.collective_of(wait).target is not ops.all_gather:
            continue
        _require_no_later_use(facts, "lifetimes", unpacks(wait), wait, frees[0], "freed")


def _require_no_later_use(
    facts: Facts, rule: str, roots: list[fx.Node], owner: fx.Node, end: fx.Node, done: str
) -> None:
    """Raise if a node behind `end`, a free or a release, uses `roots` or a view of them."""
    late = [
        (facts.place[last], last, value)
        for value in aliases_of(*roots)
        for user in (value, *value.users)
        for last in (user, *facts.waits.get(user, ()))
        if facts.place[last] > facts.place[end]
        # A second release has an error of its own.
        and not (last.target is ops.release and end.target is ops.release)
    ]
    if late:
        _, user, value = min(late, key=lambda item: item[0])
        reads = "ends what reads" if user.target is ops.wait else "reads"
        facts.fail(
            rule,
            user,
            f"it {reads} %{value.name}, which shares the storage of %{owner.name}, after "
            f"%{end.name} {done} it",
        )


def check_releases(facts: Facts) -> None:
    """A parameter is released once and not read afterwards.

    `check_lifetimes` makes sure that a release stands before the free of its gather.
    """
    by_parameter: dict[fx.Node, fx.Node] = {}
    for release in (node for node in facts.nodes if node.target is ops.release):
        picked = _released(facts, release)
        if picked in by_parameter:
            before = by_parameter[picked].name
            facts.fail("releases", release, f"%{picked.name} is released by %{before} already")
        by_parameter[picked] = release
        _require_no_later_use(facts, "releases", [picked], picked, release, "released")


def _released(facts: Facts, release: fx.Node) -> fx.Node:
    """The full parameter that `release` releases."""
    picked = release.args[0] if release.args else None
    if not isinstance(picked, fx.Node) or not ops.is_unpack(picked):
        facts.fail("releases", release, "release must take what a wait on an all_gather gave")
    wait = picked.args[0]
    assert isinstance(wait, fx.Node)
    for other in unpacks(wait):
        if other is not picked and other.args[1] == picked.args[1]:
            facts.fail("releases", release, f"%{other.name} is the same parameter")
    gather = ops.collective_of(wait)
    if gather.target is not ops.all_gather or Collective.of(gather).in_place:
        facts.fail("releases", release, f"%{picked.name} was not gathered into a new buffer")
    if release.meta["phase"] != BACKWARD:
        facts.fail("releases", release, "only backward releases parameters")
    return picked


def check_budget(facts: Facts) -> None:
    """The bytes that a step holds at once stay within `memory_budget` of the policy, in bytes.

    A program that is scheduled by cost keeps the budget from `Stage.SCHEDULED` on, any other from
    `Stage.RELEASED` on. `graphshard.program.storages` counts the bytes.
    """
    budget = facts.plan.policy.memory_budget
    by_cost = facts.plan.policy.schedule == "overlap" or facts.program.budget is not None
    if budget is None or (Stage.SCHEDULED if by_cost else Stage.RELEASED) not in facts.done:
        return
    storages = storages_of(facts.program)
    live = storages.live()
    peak = max(live, default=0)
    if peak > budget:
        place = live.index(peak)
        held = [storage for storage in storages.all if storage.born <= place <= storage.dies]
        raise BudgetError(
            f"memory_budget={budget:,} is too small for a step that holds {human_bytes(peak)} at "
            f"once ({_held_text(held)}); give at least {peak:,} bytes, or recompute more, make "
            "smaller units, prefetch less, or take a smaller batch\n"
            f"{facts.fault('budget', facts.nodes[place], 'most is held here')}"
        )


def _held_text(held: list[Storage], shown: int = 3) -> str:
    """Bytes by kind and of the largest units: "returned 64 B: layers.1 48 B, (root) 16 B"."""
    texts = []
    for kind in KINDS:
        by_unit: dict[str, int] = {}
        for storage in held:
            if storage.kind == kind and storage.size:
                by_unit[storage.unit] = by_unit.get(storage.unit, 0) + storage.size
        if by_unit:
            ranked = sorted(by_unit.items(), key=lambda item: (-item[1], item[0]))
            named = ", ".join(
                f"{unit or '(root)'} {human_bytes(size)}" for unit, size in ranked[:shown]
            )
            more = f" and {len(ranked) - shown} units more" if len(ranked) > shown else ""
            texts.append(f"{kind} {human_bytes(sum(by_unit.values()))}: {named}{more}")
    return "; ".join(texts)

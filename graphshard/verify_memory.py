"""Rules on the memory of gathered parameters: freed once, unread afterwards, within the budget."""

from __future__ import annotations

from collections import Counter

from torch import fx

from graphshard import ops
from graphshard.inspect.text import unit_label
from graphshard.liveness import holders_of
from graphshard.passes.insert_free import InsertFree
from graphshard.verify_facts import Facts


def check_frees(facts: Facts) -> None:
    """What a gather returned is freed once; nothing else is freed."""
    for wait, frees in facts.frees.items():
        gather = ops.collective_of(wait)
        if gather.target is not ops.all_gather:
            for free in frees:
                facts.fail("frees", free, f"it frees what a {ops.op_name(gather)} returned")
            continue
        if gather.kwargs.get("in_place"):
            for free in frees:
                facts.fail("frees", free, f"%{wait.name} stands in the copies that ranks keep")
            continue
        if len(frees) > 1:
            facts.fail("frees", frees[1], f"%{wait.name} is freed by %{frees[0].name} already")
        if not frees and InsertFree in facts.done:
            facts.fail("frees", wait, f"what %{gather.name} gathered is never freed")


def check_lifetimes(facts: Facts) -> None:
    """No use of an unsharded value, views of it included, comes after its free.

    A collective uses its operands until its wait.
    """
    for wait, frees in facts.frees.items():
        if not frees or ops.collective_of(wait).target is not ops.all_gather:
            continue
        freed = facts.place[frees[0]]
        late: list[tuple[int, fx.Node, fx.Node]] = []
        for value in facts.aliases(wait):
            late += [
                (facts.place[last], last, value)
                for user in (value, *value.users)
                for last in (user, *facts.waits.get(user, ()))
                if facts.place[last] > freed
            ]
        if late:
            _, user, value = min(late, key=lambda item: item[0])
            reads = "ends what reads" if user.target is ops.wait else "reads"
            facts.fail(
                "lifetimes",
                user,
                f"it {reads} %{value.name}, which shares the storage of %{wait.name}, after "
                f"%{frees[0].name} freed it",
            )


def check_budget(facts: Facts) -> None:
    """The bytes of gathered parameters alive at once never pass the policy's budget."""
    budget = facts.plan.policy.memory_budget
    if budget is None or InsertFree not in facts.done:
        return
    for node, live, holders in holders_of(facts.program):
        if live > budget:
            sizes: Counter[str] = Counter()
            for holder, size in holders.items():
                part = " (parts)" if holder.target is ops.reshard else ""
                sizes[f"{unit_label(holder.meta['unit'])}{part}"] += size
            told = ", ".join(f"{name} {size:,}" for name, size in sizes.items())
            facts.fail(
                "budget",
                node,
                f"{live:,} bytes of unsharded parameters are alive here ({told}), more than "
                f"memory_budget={budget:,}; make smaller units, prefetch less, or raise the budget",
            )

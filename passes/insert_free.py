"""insert_free: unsharded parameters are freed where the run that last uses them ends."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import fx

from graphshard import ops
from graphshard.errors import PassError
from graphshard.plan import ShardingPlan
from graphshard.program import Program
from graphshard.rewrite import insert_node
from graphshard.runs import Run, Runs, find_runs, unit_ancestry
from graphshard.views import gather_waits


@dataclass(frozen=True)
class InsertFree:
    """Free what each gather holds at the end of the unit's run that uses it last.

    The end of the run, not the last use in it, as a module's parameters are freed when its forward
    or its backward is over. Where several units end together the inner ones are freed, and reduced,
    before the outer ones.
    """

    name: str = field(default="insert_free", init=False)

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: what a gather returned is freed already, never used, or used outside the runs
                of its unit.
        """
        runs = find_runs(program, plan)
        last_use = _last_uses(runs)
        sites: list[tuple[int, int, Run, fx.Node]] = []
        for wait in gather_waits(program):
            unit = wait.meta["unit"]
            if any(user.target is ops.free for user in wait.users):
                raise PassError(f"pass {self.name}: {wait.name} of unit {unit!r} is freed already")
            use = last_use.get(wait)
            run = None if use is None else runs.around(unit, use)
            if run is None:
                where = "never used" if use is None else f"used by {use.name}"
                raise PassError(
                    f"pass {self.name}: {wait.name} of unit {unit!r} is {where}, outside every run "
                    "of its unit, so no place to free it is known"
                )
            sites.append((run.stop, -len(unit_ancestry(unit, plan)), run, wait))
        sites.sort(key=lambda site: site[:2])
        for _, _, run, wait in sites:
            with program.graph.inserting_after(_end(run, plan)):
                insert_node(
                    program,
                    ops.free,
                    (wait,),
                    {},
                    name=f"{run.unit or 'root'}_free",
                    unit=run.unit,
                    phase=run.phase,
                    val=None,
                )


def _last_uses(runs: Runs) -> dict[fx.Node, fx.Node]:
    """By wait, the last node that reads what it returned or anything derived from that."""
    found: dict[fx.Node, fx.Node] = {}
    for value, source in runs.derived.items():
        if source.node.op == "placeholder":
            continue
        wait = source.node.args[0]
        assert isinstance(wait, fx.Node)
        for user in value.users:
            if user.op != "call_function":
                continue
            best = found.get(wait)
            if best is None or runs.position[user] > runs.position[best]:
                found[wait] = user
    return found


def _end(run: Run, plan: ShardingPlan) -> fx.Node:
    """The run's last compute node, or what ends the units inside it right after that."""
    node = run.last
    while _ends_inside(node.next, run, plan):
        node = node.next
    return node


def _ends_inside(node: fx.Node, run: Run, plan: ShardingPlan) -> bool:
    """Whether `node` frees or reduces for a unit inside the run's."""
    if node.op != "call_function" or ops.is_compute(node) or node.meta["phase"] != run.phase:
        return False
    if ops.is_transfer(node):
        if ops.origin(node).op == "placeholder":  # of a shard, to be gathered
            return False
    elif (
        node.target not in (ops.free, ops.keep) and ops.collective_of(node).target is ops.all_gather
    ):
        return False
    unit = node.meta["unit"]
    return unit != run.unit and plan.is_nested(unit, run.unit)

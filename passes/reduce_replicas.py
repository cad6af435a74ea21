"""reduce_replicas: reduced shards are averaged over the groups of ranks that hold equal ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.errors import PassError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import unpacks
from graphshard.program.collective import Collective, params_of
from graphshard.program.edit import insert_reduce
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import Program


@dataclass(frozen=True)
class ReduceReplicas(Pass):
    """On a mesh of two dimensions, one all_reduce over its first after each reduce_scatter.

    It takes the shards that the reduce_scatter's wait returned, so it cannot be launched before
    them. `SinkWaits` moves that wait, and the all_reduce with it, behind the compute of the unit
    that runs next in backward; the all_reduce's own wait goes to the end. So a reduce_scatter hides
    behind the next unit, an all_reduce behind those after it, and each communicator has one
    collective under way at a time, issued in one order by all ranks.

    The averages of equally large groups are averaged, so the result is the average over all ranks
    (HYBRID_SHARD in "PyTorch FSDP", arXiv:2304.11277, section 3.2.2).
    """

    establishes: ClassVar[Stage] = Stage.AVERAGED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PassError: a reduced shard is averaged over the replicas already.
        """
        if plan.replicas == 1:
            return
        results = program.results()
        place_of = {name: i for i, param in enumerate(program.params) for name in param.names}
        for wait in [node for node in program.nodes() if node.target is ops.wait]:
            reduce = ops.collective_of(wait)
            if not ops.is_scatter(reduce):
                continue
            shards = unpacks(wait)
            for shard in shards:
                self._require_unread(shard)
            unit = Collective.of(reduce).unit
            params = params_of(reduce)
            operands = {
                name: (shard, tuple(shard.meta["val"].shape))
                for name, shard in zip(params, shards, strict=True)
            }
            averages, _ = insert_reduce(
                program,
                plan,
                ops.all_reduce,
                unit,
                operands,
                after=shards[-1],
                phase=reduce.meta["phase"],
                group=ops.REPLICATE,
            )
            for name, average in averages.items():
                results.grads[place_of[name]] = average
        program.set_results(results)

    def _require_unread(self, shard: fx.Node) -> None:
        reader = next((user for user in shard.users if user.op != "output"), None)
        if reader is not None:
            raise PassError(
                f"pass {self.name}: {reader.name} reads the reduced shard {shard.name} before it "
                "is averaged over the replicas; run the pass once, right after reduce_grads"
            )

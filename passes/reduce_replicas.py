"""reduce_replicas: average reduced shards over the replicas."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

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
    """On a two-dimensional mesh, insert an all_reduce over replicas behind each reduce_scatter.

    The all_reduce takes the shards that the wait of the reduce_scatter returns. `SinkWaits` moves
    that wait, with the all_reduce, behind the compute of the next unit in backward, and the wait of
    the all_reduce to the end. So the next unit hides the reduce_scatter and later units hide the
    all_reduce, and each communicator has one collective in flight, issued in the same order on all
    ranks. The groups are equally large, so averaging their averages gives the average over all
    ranks. If the caller's own function averages over replicas, gradients of replicated parameters
    pass through it, too.
    """

    establishes: ClassVar[Stage] = Stage.AVERAGED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        if not plan.has_replicas:
            return
        by_caller = plan.replica_all_reduce
        if by_caller:
            program.notes += (f"each all_reduce over {ops.REPLICATE!r} is a call of {by_caller}",)
        results = program.results()
        place_of = {name: i for i, param in enumerate(program.params) for name in param.names}
        for wait in [node for node in program.nodes() if node.target is ops.wait]:
            reduce = ops.collective_of(wait)
            over_shards = by_caller and reduce.target is ops.all_reduce
            if not ops.is_scatter(reduce) and not over_shards:
                continue
            shards = unpacks(wait)
            for shard in shards:
                reader = next((user for user in shard.users if user.op != "output"), None)
                if reader is not None:
                    raise PassError(
                        f"pass {self.name}: {reader.name} reads the reduced shard {shard.name} "
                        "before it is averaged over the replicas; run the pass once, right after "
                        "reduce_grads"
                    )
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

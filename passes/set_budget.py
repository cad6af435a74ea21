"""set_budget: set the byte budget and the hardware for the passes that simulate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphshard.hardware.hardware import Hardware
from graphshard.passes.by_cost import ByCost
from graphshard.passes.merge_gathers import MergeGathers
from graphshard.planning.plan import ShardingPlan
from graphshard.program.annotations import DEFAULT_HARDWARE, Budget
from graphshard.program.pass_protocol import PassLike, apply_passes
from graphshard.program.program import Program
from graphshard.schedule.evaluate import Lifetimes


@dataclass(frozen=True)
class SetBudget(ByCost):
    """Set `program.budget` from the policy's `memory_budget`, or the peak bytes of FSDP's order.

    Args:
        hardware: the hardware to time on. None: "h100-sxm" for a program captured for CUDA,
            "cpu-gloo" for one captured for the CPU.
        forward, backward: the merged gathers ahead that one is issued in FSDP's order.
    """

    hardware: Hardware | None = None
    forward: int = 0
    backward: int = 0

    def apply_before(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> None:
        default = DEFAULT_HARDWARE.get(program.capture_device, DEFAULT_HARDWARE["cuda"])
        hardware = self.hardware or Hardware.load(default)
        limit = plan.policy.memory_budget
        budget = Budget(limit or 0, hardware, of_policy=limit is not None)
        finished = program.copy()
        # Later on, whether and how far small units are merged is decided by cost.
        share = plan.policy.bytes_merged(plan.process_group_backend)
        merge = MergeGathers(share, self.forward, self.backward)
        apply_passes((merge, *rest), finished, plan)
        lifetimes = Lifetimes.of(finished, budget)
        places = lifetimes.places(finished.graph.nodes)
        if limit is None:
            budget = replace(budget, bytes=int(lifetimes.live(places).max()))
        room = int(lifetimes.live(places, sharding=True).max())
        program.budget = replace(budget, room=room)

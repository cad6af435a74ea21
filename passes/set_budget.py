"""set_budget: set the byte budget and the hardware for the passes that simulate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphshard.hardware.hardware import Hardware
from graphshard.passes.by_cost import ByCost
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
    """

    hardware: Hardware | None = None

    def apply_before(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> None:
        default = DEFAULT_HARDWARE.get(program.capture_device, DEFAULT_HARDWARE["cuda"])
        hardware = self.hardware or Hardware.load(default)
        limit = plan.policy.memory_budget
        budget = Budget(limit or 0, hardware, of_policy=limit is not None)
        finished = program.copy() if rest else program
        apply_passes(rest, finished, plan)
        lifetimes = Lifetimes.of(finished, budget)
        places = lifetimes.places(finished.graph.nodes)
        if limit is None:
            budget = replace(budget, bytes=int(lifetimes.live(places).max()))
        room = int(lifetimes.live(places, sharding=True).max())
        program.budget = replace(budget, room=room)

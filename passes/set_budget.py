"""set_budget: what the passes that follow may hold at once, and what they are timed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from graphshard.cost.memory import bytes_held
from graphshard.hardware.hardware import Hardware
from graphshard.planning.plan import ShardingPlan
from graphshard.program.annotations import DEFAULT_HARDWARE, Budget
from graphshard.program.program import Program
from graphshard.schedule.memory import Lifetimes
from graphshard.schedule.search import Step


@dataclass(frozen=True)
class SetBudget:
    """Take the policy's memory_budget, or what the program holds as it is: in FSDP's order.

    Args:
        hardware: what to time on. None: "h100-sxm" for a program captured for CUDA, "cpu-gloo" for
            one captured for the CPU.
        then: the passes that end FSDP's order.
    """

    hardware: Hardware | None = None
    then: Sequence[Step] = ()
    name: str = field(default="set_budget", init=False)

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`."""
        default = DEFAULT_HARDWARE.get(program.capture_device, DEFAULT_HARDWARE["cuda"])
        hardware = self.hardware or Hardware.load(default)
        most = plan.policy.memory_budget
        budget = Budget(most or 0, hardware, of_policy=most is not None)
        whole = program.copy() if self.then else program
        for step in self.then:
            step.apply(whole, plan)
        if most is None:
            held = bytes_held(whole, plan, budget.of_policy, budget.backend)
            budget = replace(budget, bytes=held)
        order = list(whole.graph.nodes)
        program.budget = replace(budget, room=Lifetimes.of(whole, budget).sharding_bytes(order))

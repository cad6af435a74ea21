"""set_budget: what the passes that follow may hold at once, and what they are timed on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from graphshard.cost.memory import bytes_held
from graphshard.hardware.hardware import Hardware
from graphshard.passes.by_cost import ByCost
from graphshard.planning.plan import ShardingPlan
from graphshard.program.annotations import DEFAULT_HARDWARE, Budget
from graphshard.program.pass_protocol import PassLike, apply_passes
from graphshard.program.program import Program
from graphshard.schedule.memory import Lifetimes


@dataclass(frozen=True)
class SetBudget(ByCost):
    """Take the policy's memory_budget, or what the program holds as it is: in FSDP's order.

    Args:
        hardware: what to time on. None: "h100-sxm" for a program captured for CUDA, "cpu-gloo" for
            one captured for the CPU.
    """

    hardware: Hardware | None = None

    def apply_before(self, program: Program, plan: ShardingPlan, rest: Sequence[PassLike]) -> None:
        """See `RehearsingPass.apply_before`."""
        default = DEFAULT_HARDWARE.get(program.capture_device, DEFAULT_HARDWARE["cuda"])
        hardware = self.hardware or Hardware.load(default)
        most = plan.policy.memory_budget
        budget = Budget(most or 0, hardware, of_policy=most is not None)
        whole = program.copy() if rest else program
        apply_passes(rest, whole, plan)
        if most is None:
            held = bytes_held(whole, plan, budget.of_policy, budget.backend)
            budget = replace(budget, bytes=held)
        order = list(whole.graph.nodes)
        program.budget = replace(budget, room=Lifetimes.of(whole, budget).sharding_bytes(order))

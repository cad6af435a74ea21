"""What the user asks for: units, strategy, precision, placement, and policies of other systems."""

from graphshard.policy.base import Policy
from graphshard.policy.by_module import ModulePolicy
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.strategy import Strategy
from graphshard.policy.units import BlockPolicy, LambdaPolicy, SizePolicy

__all__ = [
    "BlockPolicy",
    "LambdaPolicy",
    "MixedPrecision",
    "ModulePolicy",
    "Policy",
    "SizePolicy",
    "Strategy",
]

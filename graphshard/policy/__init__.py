"""The user's request: units, strategy, precision, placement; and other systems' configurations."""

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

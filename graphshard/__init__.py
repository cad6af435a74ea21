"""graphshard: a sharded-training compiler pass for PyTorch."""

from graphshard.api import compile, plan  # noqa: A004  # as torch.compile
from graphshard.cost.compare import Comparison, compare
from graphshard.cost.estimate import Estimate, simulate
from graphshard.cost.hardware import Hardware
from graphshard.errors import (
    CaptureError,
    CheckpointError,
    CollectiveError,
    CostError,
    FingerprintError,
    GraphshardError,
    PassError,
    PlanError,
    PolicyError,
    RuntimeStateError,
    UnsupportedTorchError,
    VerifyError,
)
from graphshard.importers.accelerate import from_accelerate
from graphshard.importers.deepspeed import from_deepspeed
from graphshard.mixed_precision import MixedPrecision
from graphshard.module_policy import ModulePolicy
from graphshard.plan import ParamLayout, ShardingPlan, Unit
from graphshard.policy import BlockPolicy, LambdaPolicy, Policy, SizePolicy, Strategy
from graphshard.program import Event, Program
from graphshard.runtime.module import ShardedModule
from graphshard.tune.auto_policy import AutoPolicy
from graphshard.tune.tuning import Tuning
from graphshard.unit_options import UnitOptions

__all__ = [
    "AutoPolicy",
    "BlockPolicy",
    "CaptureError",
    "CheckpointError",
    "CollectiveError",
    "Comparison",
    "CostError",
    "Estimate",
    "Event",
    "FingerprintError",
    "GraphshardError",
    "Hardware",
    "LambdaPolicy",
    "MixedPrecision",
    "ModulePolicy",
    "ParamLayout",
    "PassError",
    "PlanError",
    "Policy",
    "PolicyError",
    "Program",
    "RuntimeStateError",
    "ShardedModule",
    "ShardingPlan",
    "SizePolicy",
    "Strategy",
    "Tuning",
    "Unit",
    "UnitOptions",
    "UnsupportedTorchError",
    "VerifyError",
    "compare",
    "compile",
    "from_accelerate",
    "from_deepspeed",
    "plan",
    "simulate",
]

"""graphshard: a sharded-training compiler pass for PyTorch."""

import importlib
import importlib.util
import sys

from graphshard.api import compile, plan, simulate  # noqa: A004  # as torch.compile
from graphshard.cost.compare import Comparison, compare
from graphshard.cost.estimate import Estimate
from graphshard.errors import (
    CaptureError,
    CheckpointError,
    CollectiveError,
    CostError,
    FingerprintError,
    GraphshardError,
    NonFiniteError,
    NonFiniteWarning,
    PassError,
    PlanError,
    PolicyError,
    ReplicaError,
    ReplicaWarning,
    RuntimeStateError,
    SizeCheckError,
    UnsupportedTorchError,
    VerifyError,
)
from graphshard.hardware.hardware import Hardware
from graphshard.module.sharded_module import ShardedModule
from graphshard.planning.layout import ParamLayout, Unit
from graphshard.planning.options import UnitOptions
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.accelerate import from_accelerate
from graphshard.policy.by_module import ModulePolicy
from graphshard.policy.deepspeed import from_deepspeed
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.units import BlockPolicy, LambdaPolicy, Policy, SizePolicy, Strategy
from graphshard.program import ops
from graphshard.program.program import Event, Program
from graphshard.state.manifest import latest_checkpoint
from graphshard.tune.auto_policy import AutoPolicy
from graphshard.tune.runs import RunRequest, Runs
from graphshard.tune.tuning import Tuning

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
    "NonFiniteError",
    "NonFiniteWarning",
    "ParamLayout",
    "PassError",
    "PlanError",
    "Policy",
    "PolicyError",
    "Program",
    "ReplicaError",
    "ReplicaWarning",
    "RunRequest",
    "Runs",
    "RuntimeStateError",
    "ShardedModule",
    "ShardingPlan",
    "SizeCheckError",
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
    "latest_checkpoint",
    "ops",
    "plan",
    "simulate",
]

sys.modules["graphshard.ops"] = ops  # the path by which dumped code imports it


def __getattr__(name: str) -> object:
    """A sub-package, loaded when it is first asked for: some need libraries of an extra."""
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")

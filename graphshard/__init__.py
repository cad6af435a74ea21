"""graphshard: a sharded-training compiler pass for PyTorch."""

import importlib
import importlib.util
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphshard.api import compile as compile  # noqa: A004  # as torch.compile
    from graphshard.api import plan as plan
    from graphshard.cost.compare import Comparison as Comparison
    from graphshard.cost.compare import compare as compare
    from graphshard.cost.estimate import Estimate as Estimate
    from graphshard.errors import CaptureError as CaptureError
    from graphshard.errors import CheckpointError as CheckpointError
    from graphshard.errors import CollectiveError as CollectiveError
    from graphshard.errors import CostError as CostError
    from graphshard.errors import FingerprintError as FingerprintError
    from graphshard.errors import GraphshardError as GraphshardError
    from graphshard.errors import NonFiniteError as NonFiniteError
    from graphshard.errors import NonFiniteWarning as NonFiniteWarning
    from graphshard.errors import PassError as PassError
    from graphshard.errors import PlanError as PlanError
    from graphshard.errors import PolicyError as PolicyError
    from graphshard.errors import ReplicaError as ReplicaError
    from graphshard.errors import ReplicaWarning as ReplicaWarning
    from graphshard.errors import RuntimeStateError as RuntimeStateError
    from graphshard.errors import SizeCheckError as SizeCheckError
    from graphshard.errors import UnsupportedTorchError as UnsupportedTorchError
    from graphshard.errors import VerifyError as VerifyError
    from graphshard.hardware.hardware import Hardware as Hardware
    from graphshard.module.sharded_module import ShardedModule as ShardedModule
    from graphshard.planning.layout import ParamLayout as ParamLayout
    from graphshard.planning.layout import Unit as Unit
    from graphshard.planning.layout import UnitOptions as UnitOptions
    from graphshard.planning.plan import ShardingPlan as ShardingPlan
    from graphshard.policy.accelerate import from_accelerate as from_accelerate
    from graphshard.policy.by_module import ModulePolicy as ModulePolicy
    from graphshard.policy.deepspeed import from_deepspeed as from_deepspeed
    from graphshard.policy.precision import MixedPrecision as MixedPrecision
    from graphshard.policy.units import BlockPolicy as BlockPolicy
    from graphshard.policy.units import LambdaPolicy as LambdaPolicy
    from graphshard.policy.units import Policy as Policy
    from graphshard.policy.units import SizePolicy as SizePolicy
    from graphshard.policy.units import Strategy as Strategy
    from graphshard.program.program import Event as Event
    from graphshard.program.program import Program as Program
    from graphshard.simulation import simulate as simulate
    from graphshard.state.manifest import latest_checkpoint as latest_checkpoint
    from graphshard.tune.auto_policy import AutoPolicy as AutoPolicy
    from graphshard.tune.runs import RunRequest as RunRequest
    from graphshard.tune.runs import Runs as Runs
    from graphshard.tune.tuning import Tuning as Tuning

_NAMES = {
    "api": "compile plan",
    "cost.compare": "Comparison compare",
    "cost.estimate": "Estimate",
    "errors": (
        "CaptureError CheckpointError CollectiveError CostError FingerprintError GraphshardError "
        "NonFiniteError NonFiniteWarning PassError PlanError PolicyError ReplicaError "
        "ReplicaWarning RuntimeStateError SizeCheckError UnsupportedTorchError VerifyError"
    ),
    "hardware.hardware": "Hardware",
    "module.sharded_module": "ShardedModule",
    "planning.layout": "ParamLayout Unit UnitOptions",
    "planning.plan": "ShardingPlan",
    "policy.accelerate": "from_accelerate",
    "policy.by_module": "ModulePolicy",
    "policy.deepspeed": "from_deepspeed",
    "policy.precision": "MixedPrecision",
    "policy.units": "BlockPolicy LambdaPolicy Policy SizePolicy Strategy",
    "program.program": "Event Program",
    "simulation": "simulate",
    "state.manifest": "latest_checkpoint",
    "tune.auto_policy": "AutoPolicy",
    "tune.runs": "RunRequest Runs",
    "tune.tuning": "Tuning",
}
"""The public names by the module that defines them, which is loaded when one is first asked for.

A program that only plans then loads neither the search of policies nor the prediction of costs.
"""

_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted([*_MODULE_OF, "ops"])


def __getattr__(name: str) -> object:
    """A public name or a sub-package; some sub-packages need libraries of an extra."""
    if name in _MODULE_OF:
        value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
        globals()[name] = value
        return value
    if name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

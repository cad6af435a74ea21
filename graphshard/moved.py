"""Modules by the paths they once had: importing one gives the module that has its names today.

`import graphshard.views` goes on working, with a DeprecationWarning that names the new path.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

from graphshard.program import ops

MOVED = {
    "annotation": "capture.annotation",
    "attention_work": "cost.attention_work",
    "byte_text": "format",
    "calibrate.command": "cli.calibrate",
    "capture_errors": "capture.errors",
    "casting": "capture.casting",
    "checkpoint_regions": "capture.checkpoints",
    "cli_policy": "cli.policy",
    "collector": "torch_private.gc_pause",
    "column_values": "verify.numbering",
    "consolidate_command": "cli.consolidate",
    "cost.buffers": "cost.memory",
    "cost.command": "cli.simulate",
    "cost.curves": "hardware.curves",
    "cost.duration": "cost.streams",
    "cost.groups": "cost.collective_cost",
    "cost.hardware": "hardware.hardware",
    "cost.subject": "api",
    "data_assignments": "capture.side_effects",
    "dynamic": "capture.dynamic",
    "eager_kernels": "capture.as_eager",
    "eager_ways": "capture.as_eager",
    "fake_mode": "capture.fake_mode",
    "gradient_bytes": "planning.plan",
    "graphable": "passes.cuda_graph",
    "heavy_ops": "cost.op_cost",
    "ignored": "planning.ignored",
    "importers.accelerate": "policy.accelerate",
    "importers.deepspeed": "policy.deepspeed",
    "importers.settings": "policy.settings",
    "inspect.compare_text": "cost.text",
    "inspect.estimate_text": "cost.text",
    "inspect.fold": "format",
    "inspect.memory_text": "inspect.plan_notes",
    "inspect.moved_text": "inspect.plan_notes",
    "inspect.plot": "cost.plot",
    "inspect.progress": "progress",
    "inspect.tables": "format",
    "inspect.text": "program.text",
    "inspect.trace": "cost.trace",
    "inspect.units_text": "format",
    "joint": "capture.joint",
    "liveness": "program.storages",
    "mesh_shape": "planning.mesh",
    "min_cut": "recompute.min_cut",
    "mixed_precision": "policy.precision",
    "model_checks": "planning.model_checks",
    "module_policy": "policy.by_module",
    "module_state": "capture.side_effects",
    "module_tree": "policy.tree",
    "packing": "program.packing",
    "placement": "policy.placement",
    "plan_warnings": "planning.warnings",
    "planner": "planning.planner",
    "policy_base": "policy.base",
    "policy_code": "policy.code",
    "recompute_choice": "policy.recompute",
    "regions": "program.regions",
    "regroup": "program.edit",
    "remat": "recompute.regions",
    "remat_peak": "recompute.peak",
    "remat_problem": "recompute.problem",
    "rewrite": "program.edit",
    "rnn": "capture.as_eager",
    "runs": "program.spans",
    "runtime.any_module": "state.any_module",
    "runtime.blueprint": "module.meta_model",
    "runtime.boxed": "runtime.codegen",
    "runtime.calibration": "calibrate.ranks",
    "runtime.clip": "training.clip",
    "runtime.compile_forms": "runtime.region",
    "runtime.cut": "program.cut",
    "runtime.flat_calls": "module.programs",
    "runtime.half": "runtime.lowered",
    "runtime.kept": "runtime.accumulated",
    "runtime.lanes": "runtime.streams",
    "runtime.local_steps": "training.local_steps",
    "runtime.meta_init": "module.meta_init",
    "runtime.module": "module.sharded_module",
    "runtime.operator_calls": "runtime.codegen",
    "runtime.own_parameter": "runtime.resident",
    "runtime.param_groups": "training.param_groups",
    "runtime.peers": "runtime.gloo",
    "runtime.programs": "module.programs",
    "runtime.reshard": "runtime.gather",
    "runtime.scaler": "training.scaler",
    "runtime.skeleton": "module.sharded_tree",
    "runtime.steps": "runtime.shards",
    "runtime.tangents": "runtime.step",
    "runtime.training_methods": "module.training",
    "runtime.transfers": "runtime.host_copies",
    "runtime.unshard": "training.unsharded",
    "schedule.best": "schedule.search",
    "schedule.budget": "program.annotations",
    "schedule.held": "schedule.memory",
    "schedule.lean": "schedule.search",
    "schedule.lists": "schedule.list_scheduler",
    "schedule.lives": "schedule.memory",
    "schedule.orders": "schedule.evaluate",
    "schedule.score": "schedule.evaluate",
    "schedule.tasks": "schedule.jobs",
    "schedule.trial": "schedule.search",
    "schedule.uses": "schedule.clusters",
    "size_nodes": "program.size_nodes",
    "sizes": "program.sizes",
    "snapshot": "pipeline",
    "state.methods": "module.state",
    "state.slots": "state.state_tensors",
    "step_memory": "program.storages",
    "storages": "program.aliases",
    "strategy": "policy.strategy",
    "structure": "capture.structure",
    "torch_compat": "torch_private.compat",
    "torch_cuda": "torch_private.compat",
    "torch_inductor": "torch_private.inductor",
    "torch_kernels": "torch_private.cpp_kernels",
    "torch_trace": "torch_private.trace",
    "tracing": "capture.traced_module",
    "tune.advice": "tune.reasons",
    "tune.command": "cli.tune",
    "tune.outcome": "tune.tuning",
    "tune.resolve": "tune.tuner",
    "tune.shallow": "tune.extrapolate",
    "unit_options": "planning.options",
    "value_memo": "verify.numbering",
    "verify_columns": "verify.collectives",
    "verify_copies": "verify.copies",
    "verify_facts": "verify.facts",
    "verify_graph": "verify.graph",
    "verify_kept": "verify.copies",
    "verify_memory": "verify.memory",
    "verify_precision": "verify.precision",
    "verify_regions": "verify.regions",
    "verify_replicas": "verify.groups",
    "verify_reshard": "verify.groups",
    "verify_sharding": "verify.collectives",
    "verify_values": "verify.numbering",
    "views": "program.aliases",
    "writes": "capture.side_effects",
    "passes.gather_together": "passes.merge_gathers",
    "passes.keep_if_better": "passes.by_cost",
    "passes.keep_unsharded": "passes.skip_reshard",
    "passes.zeros_for_kept": "passes.zero_missing_grads",
}
"""Old path to new, both below `graphshard`. Packages of today re-export what was in the module of
that name: capture, cli, policy, program, verify.
"""


class MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a module by its old path and loads the one that has taken its place."""

    def __init__(self) -> None:
        self._specs: dict[str, importlib.machinery.ModuleSpec | None] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """A spec for an old path of graphshard's; None for any other module."""
        package, _, name = fullname.partition(".")
        if package != "graphshard" or name not in MOVED:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        """The module of today, with a warning that says where it is."""
        today = f"graphshard.{MOVED[spec.name.partition('.')[2]]}"
        warnings.warn(f"{spec.name} is {today} now", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(today)
        self._specs[today] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is left to run; the import system has put the old path's spec in place of its."""
        module.__spec__ = self._specs.pop(module.__name__)


def find_moved_modules() -> None:
    """Let imports find modules by their old paths."""
    sys.meta_path.append(MovedModules())
    # `graphshard.plan` is the function; the import system would put a module in its place.
    sys.modules["graphshard.plan"] = importlib.import_module("graphshard.planning.plan")
    sys.modules["graphshard.ops"] = ops  # its short name stays: dumped code imports it

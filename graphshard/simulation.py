"""The entry point `simulate`: the time and the memory of a step, before it runs."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

from torch import nn

from graphshard.api import plan as plan_model
from graphshard.api import plan_with_program
from graphshard.cost.caching_allocator import checked_settings
from graphshard.cost.estimate import Estimate, estimate_of, require_device
from graphshard.cost.runner import Runner
from graphshard.errors import CostError
from graphshard.hardware.hardware import Hardware
from graphshard.module.sharded_module import ShardedModule
from graphshard.planning.plan import ShardingPlan
from graphshard.planning.planner import mesh_sizes
from graphshard.planning.searched import asks_for_hardware
from graphshard.policy.base import Policy
from graphshard.policy.fields import is_int, named_arguments
from graphshard.program import ops
from graphshard.program.program import Program

_INPUTS = "give example_inputs or example_kwargs, a call of the model, to capture it from"


@named_arguments
def simulate(
    what: nn.Module | Program | ShardingPlan,
    policy: Policy | None = None,
    *,
    hardware: Hardware | str | os.PathLike[str],
    world_size: int | None = None,
    mesh_shape: Sequence[int] | str | None = None,
    gpus_per_node: int | None = None,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    plan: ShardingPlan | None = None,
    optimizer: str = "adamw",
    tf32: bool = False,
    allocator: str = "",
    runtime: str = "graphshard",
    leave_eager: Collection[str] = (),
    holds_outputs: bool = False,
) -> Estimate:
    """Estimate time and memory of a training step, without process group or cluster.

    Args:
        what: one of

            a model (on meta or not), with a policy or plan, a number of ranks and example inputs;
            a plan with a program, or one without, together with its `model` and example inputs:
            the program is captured for the device of the hardware;
            a sharded module: its program for the example inputs, captured if needed, or without
            inputs the last captured one that trains and reduces gradients;
            a rewritten program, such as one of `ShardedModule.programs`.
        policy: for a model. A schedule="overlap" without hardware uses `hardware`.
        hardware: a preset's name, a file of `graphshard calibrate`, or a `Hardware`.
        world_size: number of ranks, for a model.
        mesh_shape: the mesh of the ranks, for a model; as for `graphshard.plan`.
        gpus_per_node: ranks on a node. None: as in `hardware`; 8 in the presets of GPUs.
        example_inputs: positional arguments of a call.
        example_kwargs: keyword arguments of that call.
        model: the model of a plan without a program.
        plan: for a model; or of a program, if passes were applied to it by hand.
        optimizer: "adamw" (foreach), "adamw-fused", "sgd", "sgd-momentum" or "none".
        tf32: float32 matrix products run as TF32.
        allocator: what PYTORCH_CUDA_ALLOC_CONF will be on GPUs, such as "expandable_segments:True";
            "none" for PYTORCH_NO_CUDA_MEMORY_CACHING=1, so that nothing is reserved but tensors.
        runtime: "graphshard", or "fsdp2" for torch's `fully_shard` under the same plan, which
            copies each gathered parameter out of a buffer; it merges no units, so a policy for it
            has `merge_below=0`.
        leave_eager: FQNs of units and modules that are not compiled, of a program with
            backend="inductor"; [""] for a model that is compiled block by block.
        holds_outputs: the training loop's variables hold what a call returned until the next call
            returns, as in `outputs = model(**batch)`; so forward holds the outputs of two calls.

    Raises:
        CostError: there is no program to simulate, it is for another kind of device than the
            hardware, or an argument is unknown or has no effect.
        PlanError, PolicyError, CaptureError: the model cannot be planned or captured.
    """
    machine = Hardware.load(hardware)
    if gpus_per_node is not None:
        if not is_int(gpus_per_node) or gpus_per_node < 1:
            raise CostError(f"gpus_per_node must be 1 rank or more; got {gpus_per_node!r}")
        machine = machine.with_(gpus_per_node=gpus_per_node)
    if policy is not None and asks_for_hardware(policy):
        policy = replace(policy, hardware=machine)
    arguments = SimulationArguments(
        machine,
        model,
        plan,
        policy,
        world_size,
        mesh_shape,
        example_inputs,
        example_kwargs,
    )
    plan = plan_to_simulate(what, arguments)
    if plan.program is not None:
        require_device(plan.program, machine)
    return estimate_of(
        plan,
        machine,
        optimizer=optimizer,
        tf32=tf32,
        allocator=checked_settings(allocator),
        runner=Runner.of(runtime, leave_eager, holds_outputs),
    )


@dataclass(frozen=True)
class SimulationArguments:
    """The arguments of `simulate` that determine the program."""

    machine: Hardware
    model: nn.Module | None = None
    plan: ShardingPlan | None = None
    policy: Policy | None = None
    world_size: int | None = None
    mesh_shape: Sequence[int] | str | None = None
    example_inputs: Sequence[Any] | None = None
    example_kwargs: Mapping[str, Any] | None = None

    @property
    def has_inputs(self) -> bool:
        """Whether there are example inputs to capture a model with."""
        return self.example_inputs is not None or self.example_kwargs is not None

    def with_program(self, plan: ShardingPlan, model: nn.Module) -> ShardingPlan:
        """`plan` with the program of the example inputs."""
        args, kwargs = self.example_inputs, self.example_kwargs
        device = self.machine.program_device
        return plan_with_program(plan, model, args, kwargs, device=device)

    def refuse(self, what: str, **reasons: str) -> None:
        """Refuse the arguments named in `reasons`."""
        for name, why in reasons.items():
            if getattr(self, name) is not None:
                raise CostError(f"{name} has no place in a simulation of {what}: {why}")


def plan_to_simulate(what: Any, arguments: SimulationArguments) -> ShardingPlan:
    """Return the plan, with its program, that `what` stands for; see `graphshard.simulate`."""
    match what:
        case Program():
            return _plan_of_program(what, arguments)
        case ShardedModule():
            return _plan_of_sharded(what, arguments)
        case ShardingPlan():
            return _with_its_program(what, arguments)
        case nn.Module():
            return _plan_of_model(what, arguments)
    raise CostError(
        "simulate takes a model, a program, a plan or a sharded module; got a "
        f"{type(what).__name__}"
    )


def _plan_of_program(program: Program, arguments: SimulationArguments) -> ShardingPlan:
    why = "it is captured and rewritten already"
    arguments.refuse(
        "a program",
        model=why,
        policy=why,
        example_inputs=why,
        example_kwargs=why,
        world_size="the program is for the mesh it was rewritten for",
        mesh_shape="the program is for the mesh it was rewritten for",
    )
    plan = arguments.plan or program.plan
    if plan is None:
        raise CostError("the program was rewritten by no plan; pass the plan it is for as plan=")
    if plan.mesh_shape != program.mesh_shape:
        raise CostError(
            f"the plan is for a mesh of shape {plan.mesh_shape}, the program for one of "
            f"{program.mesh_shape}; pass the plan the program was rewritten by"
        )
    missing = [param.fqn for param in program.params if param.fqn not in plan.layouts]
    if missing:
        raise CostError(
            f"the plan knows no parameter {missing[0]!r} of the program; pass the plan the program "
            "was rewritten by, or none"
        )
    return replace(plan, program=program)


def _plan_of_sharded(sharded: ShardedModule, arguments: SimulationArguments) -> ShardingPlan:
    why = "it has its own"
    arguments.refuse(
        "a sharded module", model=why, plan=why, policy=why, world_size=why, mesh_shape=why
    )
    if arguments.has_inputs:
        program = sharded.capture(
            tuple(arguments.example_inputs or ()), dict(arguments.example_kwargs or {})
        )
    elif sharded.programs:
        program = _training_program(sharded.programs)
    else:
        raise CostError(f"the sharded module has captured no program yet; {_INPUTS}")
    return replace(sharded.plan, program=program)


def _training_program(programs: Sequence[Program]) -> Program:
    """Return the last program that trains and reduces, else that trains, else the last one."""
    trains = [program for program in programs if program.grad]
    reduces = [
        p for p in trains if not any(node.target is ops.accumulate_grad for node in p.nodes())
    ]
    return (reduces or trains or list(programs))[-1]


def _with_its_program(plan: ShardingPlan, arguments: SimulationArguments) -> ShardingPlan:
    why = "the plan is made already; simulate the model for another one"
    arguments.refuse("a plan", plan=why, policy=why, world_size=why, mesh_shape=why)
    if plan.program is not None:
        why = "the plan has a program"
        arguments.refuse("a plan", model=why, example_inputs=why, example_kwargs=why)
        return plan
    if arguments.model is None or not arguments.has_inputs:
        raise CostError(
            "there is no program to simulate yet: the plan was made without example inputs; give "
            "them to graphshard.plan or graphshard.compile, or pass model= and example_inputs= here"
        )
    return arguments.with_program(plan, arguments.model)


def _plan_of_model(model: nn.Module, arguments: SimulationArguments) -> ShardingPlan:
    arguments.refuse("a model", model="it is what is simulated")
    if not arguments.has_inputs:
        raise CostError(f"a model is simulated on a call of it; {_INPUTS}")
    if arguments.plan is not None:
        why = "the plan is made already"
        arguments.refuse("a model by a plan", policy=why, world_size=why, mesh_shape=why)
        if arguments.plan.program is not None:
            raise CostError("the plan has a program already; simulate the plan itself")
        return arguments.with_program(arguments.plan, model)
    if arguments.policy is None:
        raise CostError("a model is simulated under a policy (or a plan); give policy=")
    if arguments.world_size is None and arguments.mesh_shape is None:
        raise CostError(
            "a model is simulated on a number of ranks; give world_size= (1 for a single device) "
            "or mesh_shape="
        )
    ranks = arguments.world_size or prod(mesh_sizes(arguments.mesh_shape or (1,)))
    by_gloo = arguments.machine.process_group_backend == "gloo"
    return plan_model(
        model,
        arguments.policy,
        process_group_backend=arguments.machine.process_group_backend,
        hosts=arguments.machine.nodes(ranks) if by_gloo else 1,
        world_size=arguments.world_size,
        mesh_shape=arguments.mesh_shape,
        example_inputs=arguments.example_inputs,
        example_kwargs=arguments.example_kwargs,
        device=arguments.machine.program_device,
    )

"""What a simulation is given, as a plan with a program."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from graphshard import ops
from graphshard.cost.program_plan import plan_of
from graphshard.errors import CostError
from graphshard.plan import ShardingPlan
from graphshard.policy_base import Policy
from graphshard.program import Program
from graphshard.runtime.module import ShardedModule

_INPUTS = "give example_inputs or example_kwargs, a call of the model, to capture it from"


@dataclass(frozen=True)
class Request:
    """The arguments of a simulation that say which program is meant."""

    model: nn.Module | None = None
    plan: ShardingPlan | None = None
    policy: Policy | None = None
    world_size: int | None = None
    mesh_shape: Sequence[int] | None = None
    example_inputs: Sequence[Any] | None = None
    example_kwargs: Mapping[str, Any] | None = None

    @property
    def has_inputs(self) -> bool:
        """Whether there is a call to capture a model from."""
        return self.example_inputs is not None or self.example_kwargs is not None

    def refuse(self, what: str, **reasons: str) -> None:
        """Refuse each argument named in `reasons` that was given.

        Raises:
            CostError: one was; says why it has no place beside `what`.
        """
        for name, why in reasons.items():
            if getattr(self, name) is not None:
                raise CostError(f"{name} has no place in a simulation of {what}: {why}")


def planned(what: Any, request: Request) -> ShardingPlan:
    """The plan and program that `what` stands for; see `graphshard.simulate`.

    Raises:
        CostError: no program follows from the arguments, or one of them has no effect.
        PlanError, PolicyError, CaptureError: the model cannot be planned or captured.
    """
    match what:
        case Program():
            return _of_program(what, request)
        case ShardedModule():
            return _of_sharded(what, request)
        case ShardingPlan():
            return _of_plan(what, request)
        case nn.Module():
            return _of_model(what, request)
    raise CostError(
        "simulate takes a model, a program, a plan or a sharded module; got a "
        f"{type(what).__name__}"
    )


def _of_program(program: Program, request: Request) -> ShardingPlan:
    made = "it is captured and rewritten already"
    request.refuse(
        "a program",
        model=made,
        policy=made,
        example_inputs=made,
        example_kwargs=made,
        world_size="the program is for the mesh it was rewritten for",
        mesh_shape="the program is for the mesh it was rewritten for",
    )
    plan = request.plan
    if plan is None:
        return plan_of(program)
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


def _of_sharded(sharded: ShardedModule, request: Request) -> ShardingPlan:
    made = "it has its own"
    request.refuse(
        "a sharded module", model=made, plan=made, policy=made, world_size=made, mesh_shape=made
    )
    if request.has_inputs:
        program = sharded.capture(
            tuple(request.example_inputs or ()), dict(request.example_kwargs or {})
        )
    elif sharded.programs:
        program = _to_train(sharded.programs)
    else:
        raise CostError(f"the sharded module has captured no program yet; {_INPUTS}")
    return replace(sharded.plan, program=program)


def _to_train(programs: Sequence[Program]) -> Program:
    """The last program that trains and reduces its gradients; else that trains; else the last."""
    trains = [program for program in programs if program.grad]
    reduces = [p for p in trains if not any(node.target is ops.keep for node in p.nodes())]
    return (reduces or trains or list(programs))[-1]


def _of_plan(plan: ShardingPlan, request: Request) -> ShardingPlan:
    from graphshard.api import with_program

    made = "the plan is made already; simulate the model for another one"
    request.refuse("a plan", plan=made, policy=made, world_size=made, mesh_shape=made)
    if plan.program is not None:
        made = "the plan has a program"
        request.refuse("a plan", model=made, example_inputs=made, example_kwargs=made)
        return plan
    if request.model is None or not request.has_inputs:
        raise CostError(
            "there is no program to simulate yet: the plan was made without example inputs; give "
            "them to graphshard.plan or graphshard.compile, or pass model= and example_inputs= here"
        )
    return with_program(plan, request.model, request.example_inputs, request.example_kwargs)


def _of_model(model: nn.Module, request: Request) -> ShardingPlan:
    from graphshard.api import plan, with_program

    request.refuse("a model", model="it is what is simulated")
    if not request.has_inputs:
        raise CostError(f"a model is simulated on a call of it; {_INPUTS}")
    if request.plan is not None:
        made = "the plan is made already"
        request.refuse("a model by a plan", policy=made, world_size=made, mesh_shape=made)
        if request.plan.program is not None:
            raise CostError("the plan has a program already; simulate the plan itself")
        return with_program(request.plan, model, request.example_inputs, request.example_kwargs)
    if request.policy is None:
        raise CostError("a model is simulated under a policy (or a plan); give policy=")
    if request.world_size is None and request.mesh_shape is None:
        raise CostError(
            "a model is simulated on a number of ranks; give world_size= (1 for a single device) "
            "or mesh_shape="
        )
    return plan(
        model,
        request.policy,
        world_size=request.world_size,
        mesh_shape=request.mesh_shape,
        example_inputs=request.example_inputs,
        example_kwargs=request.example_kwargs,
    )

"""The entry points: the stages in order, nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import nn

from graphshard.capture.dynamic import Dynamic
from graphshard.capture.entry import capture
from graphshard.cost.estimate import Estimate, estimate_of
from graphshard.cost.program_plan import plan_of
from graphshard.errors import CostError, PlanError, PolicyError
from graphshard.hardware.hardware import Hardware
from graphshard.module.sharded_module import ShardedModule
from graphshard.module.sharded_tree import TreeModule
from graphshard.pipeline import (
    backend_passes,
    default_passes,
    run_passes,
    with_capture_warnings,
)
from graphshard.planning.model_checks import require_module
from graphshard.planning.plan import ShardingPlan
from graphshard.planning.planner import make_plan, require_policy
from graphshard.policy.base import Policy
from graphshard.policy.fields import is_int
from graphshard.program import ops
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import Program
from graphshard.progress import Progress, Stages
from graphshard.runtime.group import find_group
from graphshard.torch_private.inductor import require_inductor
from graphshard.tune.auto_policy import AutoPolicy
from graphshard.tune.tuner import needs_groups, search_plan

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def compile(  # noqa: A001  # as torch.compile
    model: nn.Module,
    policy: Policy | AutoPolicy,
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    backend: str = "eager",
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    passes: Sequence[Pass] = (),
    check: bool | None = None,
    progress: Stages | None = None,
) -> ShardedModule:
    """Shard `model` over the ranks of `mesh`; every rank calls this alike.

    Args:
        model: on meta or with real weights; stays as it is. Real weights are sharded; a model on
            meta gets values by `init_weights`, `load_full_state_dict` or a checkpoint.
        policy: which parameters are gathered together, and when; an `AutoPolicy` is searched first,
            which needs example inputs.
        example_inputs: positional arguments of a call, real, meta or fake tensors among them, to
            capture a program at once. None: programs are captured when a call needs one.
        example_kwargs: keyword arguments of that call.
        mesh: of one dimension, or for the HYBRID strategies of two: parameters are replicated over
            the first and sharded over the last. None: the default process group (for a HYBRID
            strategy the ranks of a node, as LOCAL_WORLD_SIZE or the number of CUDA devices says,
            share the shards), or a single rank if there is none.
        device: where the model runs. None: on the mesh's kind of device; without a mesh on the
            current CUDA device under NCCL, on the CPU under other backends, and on a single rank
            without a process group where the model is (from meta: the CPU).
        backend: what runs compute. "eager": torch, operator by operator; "inductor": Inductor
            compiles what stands between collectives, waits and frees, region by region, each
            structure once, and random numbers still come from torch's own generators. The first
            call takes the longer for it, unless its cache on disk knows the regions. One that it
            cannot compile runs operator by operator, and the plan says which and why.
        dynamic: dimensions whose size may differ from call to call, by argument of the forward (or
            path of a tensor in a nested one), with a name: {"input_ids": {0: "batch", 1: "seq"}}.
            One program serves all sizes of at least 2 it is right for; dimensions of one name have
            one size in a call. None: each shape has a program of its own.
        passes: applied after the default ones, in order.
        check: poison freed storage and check every value's shape and dtype. None: if the
            environment variable GRAPHSHARD_CHECK is 1.
        progress: told of each stage. None: a bar on stderr, if that is a terminal.

    Raises:
        PolicyError: the policy, the mesh and the model do not fit; or `backend` is unknown, or
            another argument is not of the kind above.
        PlanError: the model cannot be planned, or this is called in inference mode.
        CaptureError, PassError, VerifyError: its program cannot be made, given example inputs; a
            model that fixes a size asked to be dynamic is such a case.
        UnsupportedTorchError: this torch compiles otherwise than "inductor" knows.
    """
    last = backend_passes(backend)
    if last:
        require_inductor()
    if torch.is_inference_mode_enabled():
        raise PlanError(
            "shards are parameters to train, which cannot be made in torch.inference_mode(); call "
            "graphshard.compile outside of it (to run without gradients, use torch.no_grad())"
        )
    _check_arguments(model, example_inputs, example_kwargs, passes)
    if not isinstance(policy, AutoPolicy):
        require_policy(policy)
    sizes = Dynamic.of(model, dynamic)
    group = find_group(mesh, device, alone=_device_of(model), hybrid=needs_groups(policy))
    group.check = os.environ.get("GRAPHSHARD_CHECK") == "1" if check is None else check
    progress = progress or Progress()
    if isinstance(policy, AutoPolicy):
        policy = search_plan(
            policy.on(group.device),
            model,
            example_inputs,
            example_kwargs,
            world_size=group.size,
            mesh_shape=group.mesh_shape,
            device=group.device,
            progress=progress,
        ).policy
    with progress.stage("plan"):
        plan = make_plan(model, policy, world_size=group.size, mesh_shape=group.mesh_shape)
        plan = replace(plan, backend=backend)
    for ranks in sorted({unit.options.reshard_ranks or 0 for unit in plan.units} - {0}):
        group.within(ranks)
    with progress.stage("shard"):
        every = (
            *default_passes(policy, waits_at_once=group.backend == "gloo"),
            *passes,
            *last,
        )
        sharded = ShardedModule(model, plan, group, every, sizes)
    if example_inputs is not None or example_kwargs is not None:
        sharded.capture(tuple(example_inputs or ()), dict(example_kwargs or {}), progress)
    return sharded


def plan(
    model: nn.Module,
    policy: Policy | AutoPolicy,
    *,
    world_size: int | None = None,
    mesh_shape: Sequence[int] | None = None,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    backend: str = "eager",
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    passes: Sequence[Pass] = (),
    progress: Stages | None = None,
) -> ShardingPlan:
    """The plan `compile` would follow, made with no process group and no parameter memory.

    It is that of ranks over NCCL: over Gloo, in FSDP's order, `compile` waits for each reduce
    before it goes on, so that less is held there.

    Args:
        model: on meta or with real weights; stays as it is.
        policy: which parameters are gathered together, and when; an `AutoPolicy` is searched first,
            which needs example inputs.
        world_size: number of ranks. None: that of `mesh_shape`, or 1.
        mesh_shape: their arrangement, `(ranks,)` or, for the HYBRID strategies, `(replicas, ranks
            to shard over)`. None: `(world_size,)`.
        example_inputs: as for `compile`; with them the step is captured, rewritten and verified,
            and `plan.program` is the rewritten program, else it is None.
        example_kwargs: keyword arguments of that call.
        device: where the program is to run.
        backend: as for `compile`; the program then shows its regions, and nothing is compiled.
        dynamic: as for `compile`.
        passes: applied after the default ones, in order.
        progress: told of each stage. None: a bar on stderr, if that is a terminal.

    Raises:
        PolicyError, PlanError: the policy, the mesh and the model do not fit, or another argument
            is not of the kind above.
        CaptureError, PassError, VerifyError: the program cannot be made, given example inputs.
    """
    _check_arguments(model, example_inputs, example_kwargs, passes)
    backend_passes(backend)  # checks it
    sizes = Dynamic.of(model, dynamic)
    shape = None if mesh_shape is None else tuple(mesh_shape)
    if world_size is None:
        world_size = torch.Size(shape or (1,)).numel()
    progress = progress or Progress()
    if isinstance(policy, AutoPolicy):
        found = search_plan(
            policy,
            model,
            example_inputs,
            example_kwargs,
            world_size=world_size,
            mesh_shape=shape,
            device=device,
            progress=progress,
        )
        if sizes is None and not passes and backend == "eager":
            return found
        policy = found.policy
    with progress.stage("plan"):
        made = make_plan(model, policy, world_size=world_size, mesh_shape=shape)
        made = replace(made, backend=backend)
    if example_inputs is None and example_kwargs is None:
        return made
    return with_program(
        made,
        model,
        example_inputs,
        example_kwargs,
        device=device,
        sizes=sizes,
        passes=passes,
        progress=progress,
    )


def simulate(
    what: nn.Module | Program | ShardingPlan,
    *,
    policy: Policy | None = None,
    hardware: Hardware | str | os.PathLike[str],
    world_size: int | None = None,
    mesh_shape: Sequence[int] | None = None,
    gpus_per_node: int | None = None,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    model: nn.Module | None = None,
    plan: ShardingPlan | None = None,
    optimizer: str = "adamw",
    backend: str | None = None,
    tf32: bool = False,
) -> Estimate:
    """Predict time and memory of a training step, with no process group and no cluster.

    Args:
        what: one of

            a model (on meta or not), with a policy or plan, a number of ranks and example inputs;
            a plan that has a program, or one that has none, with its `model` and example inputs;
            a sharded module: of its programs the one captured last that trains and reduces its
            gradients, or the one for the example inputs, captured if need be;
            a rewritten program, such as one of `ShardedModule.programs`: its own mesh, its shards
            as its placeholders show them. Parameters that no collective serves count as the
            root's; with its `plan` they count where they belong.
        policy: for a model. One with schedule="overlap" and no hardware is timed on `hardware`.
        hardware: a preset's name, a file of `graphshard calibrate`, or a `Hardware`.
        world_size: number of ranks, for a model.
        mesh_shape: their arrangement, for a model.
        gpus_per_node: ranks on a node. None: as `hardware` says; 8 in the presets of GPUs.
        example_inputs: positional arguments of a call.
        example_kwargs: keyword arguments of that call.
        model: of a plan that has no program.
        plan: of a program, or for a model.
        optimizer: "adamw" (foreach), "adamw-fused", "sgd", "sgd-momentum" or "none".
        backend: "nccl" or "gloo", which need different buffers. None: by the hardware's kind.
        tf32: float32 matrix products run as TF32.

    Raises:
        CostError: there is no program to simulate, or an argument is unknown or has no effect.
        PlanError, PolicyError, CaptureError: the model cannot be planned or captured.
    """
    described = Hardware.load(hardware)
    if gpus_per_node is not None:
        if not is_int(gpus_per_node) or gpus_per_node < 1:
            raise CostError(f"gpus_per_node must be 1 rank or more; got {gpus_per_node!r}")
        described = described.with_(gpus_per_node=gpus_per_node)
    if policy is not None and policy.schedule == "overlap" and policy.hardware is None:
        policy = replace(policy, hardware=described)
    request = Request(model, plan, policy, world_size, mesh_shape, example_inputs, example_kwargs)
    plan = planned(what, request)
    return estimate_of(plan, described, optimizer=optimizer, backend=backend, tf32=tf32)


def with_program(
    made: ShardingPlan,
    model: nn.Module,
    example_inputs: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    *,
    device: torch.device | str = "cpu",
    sizes: Dynamic | None = None,
    passes: Sequence[Pass] = (),
    progress: Stages | None = None,
) -> ShardingPlan:
    """The plan `made` for `model` with the program of a call, captured, rewritten and verified.

    The arguments are those of `plan`; `sizes` are those that are symbols.

    Raises:
        CaptureError, PassError, VerifyError: the program cannot be made.
    """
    progress = progress or Progress()
    args, kwargs = tuple(example_inputs or ()), dict(example_kwargs or {})
    names = None
    if sizes is not None:
        args, kwargs, names = sizes.of_example(args, kwargs)
    with progress.stage("capture"):
        program = capture(
            model,
            args,
            kwargs,
            device=device,
            grad=torch.is_grad_enabled(),
            precisions=made.precisions,
            names=names,
        ).program
    made = with_capture_warnings(made, program)
    program.stale = made.stale_after_step
    every = (*default_passes(made.policy), *passes, *backend_passes(made.backend))
    run_passes(program, made, every, progress=progress)
    return replace(made, program=program)


def _check_arguments(
    model: nn.Module,
    example_inputs: object,
    example_kwargs: object,
    passes: object,
) -> None:
    require_module(model)
    for fqn, module in model.named_modules():
        if isinstance(module, TreeModule):
            raise PlanError(
                f"a model is sharded once; {fqn or 'the model'} is sharded already; compile the "
                "model it was made from"
            )
    if example_inputs is not None and not _is_sequence(example_inputs):
        raise PolicyError(
            "example_inputs must be a tuple of the call's positional arguments; got a "
            f"{type(example_inputs).__name__}; pass (x,) for a single one, and named ones as "
            "example_kwargs"
        )
    if example_kwargs is not None and not isinstance(example_kwargs, Mapping):
        raise PolicyError(
            "example_kwargs must be a dict from the names of the call's keyword arguments to their "
            f'values; got a {type(example_kwargs).__name__}; pass {{"name": value}}'
        )
    _check_passes(passes)


def _check_passes(passes: object) -> None:
    if not _is_sequence(passes):
        raise PolicyError(
            f"passes must be a list or tuple of passes; got {passes!r}; pass [it] for a single one"
        )
    for step in passes:
        if isinstance(step, type):
            raise PolicyError(
                f"passes must hold instances; got the class {step.__name__}; "
                f"pass {step.__name__}() instead"
            )
        if not (
            isinstance(getattr(step, "name", None), str) and callable(getattr(step, "apply", None))
        ):
            raise PolicyError(
                "a pass has a name (a string) and a method apply(program, plan); "
                f"{step!r} lacks one of them; define both"
            )


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str)


def _device_of(model: nn.Module) -> torch.device:
    devices = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(devices, torch.device("cpu"))


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

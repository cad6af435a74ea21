"""The entry points `compile` and `plan`: each runs the stages in order."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal, TypeGuard

import torch
from torch import Tensor, nn

import graphshard.state as states
from graphshard.capture.dynamic import AUTO, Dynamic
from graphshard.errors import PlanError, PolicyError
from graphshard.hardware.hardware import Hardware
from graphshard.module.sharded_module import ShardedModule
from graphshard.module.sharded_tree import TreeModule
from graphshard.planning.model_checks import require_module, without_compiler
from graphshard.planning.plan import ShardingPlan
from graphshard.planning.planner import (
    make_plan,
    mesh_sizes,
    name_of_all_reduce,
    require_backend,
    require_policy,
)
from graphshard.planning.searched import (
    PolicySearch,
    asks_for_hardware,
    needs_groups,
    received,
    sendable,
)
from graphshard.policy.base import Policy
from graphshard.policy.fields import is_int, named_arguments
from graphshard.program.pass_protocol import PassLike
from graphshard.progress import Progress, Stages
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.calls import call_text
from graphshard.runtime.cuda_graphs import registration
from graphshard.runtime.group import (
    group_or_refusal,
    mesh_of,
    number_of_hosts,
    with_mesh,
    without_cpu_index,
)
from graphshard.torch_private.inductor import require_inductor

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from graphshard.tune.auto_policy import AutoPolicy


@named_arguments
def compile(  # noqa: A001  # as torch.compile
    model: nn.Module,
    policy: Policy | AutoPolicy,
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | Sequence[int] | str | None = None,
    device: torch.device | str | None = None,
    backend: str = "eager",
    dynamic: Mapping[str, Mapping[int, str]] | Literal["auto"] | None = "auto",
    passes: Sequence[PassLike] = (),
    replica_all_reduce: Callable[[Tensor], Any] | None = None,
    check: bool | None = None,
    progress: Stages | None = None,
) -> ShardedModule:
    """Shard `model` over the ranks of `mesh`; every rank must call this with the same arguments.

    Args:
        model: on meta or with real weights; it is not changed. Real weights are sharded; a model on
            meta gets values by `init_weights`, `load_full_state_dict` or a checkpoint.
        policy: chooses the units and their options; an `AutoPolicy` is searched first, which needs
            example inputs.
        example_inputs: positional arguments of a call (tensors may be real, meta or fake), to
            capture a program at once. None: programs are captured when a call needs one.
        example_kwargs: keyword arguments of that call.
        mesh: a mesh of one dimension, or for the HYBRID strategies of two: parameters are
            replicated over the first and sharded over the last. A DeviceMesh, or the sizes of one
            of all ranks: (2, 4) or "2x4". None: the default process group, or
            a single rank if there is none (where WORLD_SIZE in the environment says that there are
            more, the group is made by `init_process_group()`); for a HYBRID strategy the ranks of a
            node (by LOCAL_WORLD_SIZE or the number of CUDA devices) form a shard group.
        device: the device to run on. None: the mesh's kind of device. Without a mesh: the current
            CUDA device under NCCL, the CPU under other backends, and without a process group the
            model's own device (the CPU for a model on meta).
        backend: runs compute. "eager": torch, operator by operator. "inductor": Inductor compiles
            the regions between collectives, waits and frees, each structure once; random numbers
            still come from torch's own generators. Its first call takes longer, unless the disk
            cache has the regions. A region that cannot be compiled runs operator by operator, and
            the plan says which and why.
        dynamic: the dimensions whose size is a symbol, so that one program serves all valid sizes
            of at least 2. "auto": those that change; the first shape has a program of its own, the
            second makes the one of all later shapes. A dimension that the model fixes stays fixed,
            which the log and `program.notes` say; under `cuda_graph` or a `memory_budget`, whose
            choices hold for one shape, all do. Or names, by argument of the forward (or path of a
            tensor in a nested one): {"input_ids": {0: "batch", 1: "seq"}}; dimensions of one name
            have one size in a call. None: a program per shape.
        passes: passes to apply after the default ones, in order.
        replica_all_reduce: averages gradients over the replicas of a HYBRID strategy, in place of
            the mesh's process group: a function that averages a flat tensor (of each unit, in its
            reduce dtype) in place, and returns an object with `wait()`, or None. On a mesh of
            shape (1, ranks) the replicas are other jobs that only this function knows of. Plan
            and dump name it.
        check: poison freed storage and check every value's shape and dtype. None: only if the
            environment variable GRAPHSHARD_CHECK is 1.
        progress: shows each stage. None: a bar on stderr, if that is a terminal.

    Raises:
        PolicyError: the policy, the mesh and the model do not fit, or an argument is invalid.
        PlanError: the model cannot be planned, or this is called in inference mode.
        ReplicaError: the ranks came with different weights or buffers, and the policy has no
            `sync_module_states`.
        CaptureError, PassError, VerifyError: no program can be made for the example inputs, for
            example because the model fixes a dynamic size.
        UnsupportedTorchError: `backend="inductor"` does not support this version of torch.
        FingerprintError: the ranks make different calls, or their models or policies differ.
        CollectiveError: a rank did not call this within the group's timeout.
    """
    model = without_compiler(model)
    group, refusal = group_or_refusal(mesh, device, alone=_device_of(model))
    agreement = Agreement(group)
    agreement.made_by = _compile_text(model, policy, backend, dynamic, passes, check)
    with agreement.call(agreement.made_by):
        with agreement.part():
            if refusal is not None:
                raise refusal
            _check_compile(model, policy, backend, example_inputs, example_kwargs, passes)
            sizes = dynamic if dynamic == AUTO else Dynamic.of(model, dynamic)
        agreement.join()
        progress = progress or Progress()
        group, hybrid = agreement.group, needs_groups(policy)
        group.hosts = number_of_hosts(group)
        if asks_for_hardware(policy) and group.size > 1 and group.backend in ("gloo", "nccl"):
            from graphshard.runtime.links import measured_on  # with costs; few policies need it

            with progress.stage("measure links"):
                policy = replace(policy, hardware=measured_on(group))
        if isinstance(policy, PolicySearch):
            found = None
            with agreement.part() as part:
                seconds = policy.seconds
                search = policy.on(group.device)
                policy = search.plan(
                    model,
                    example_inputs=example_inputs,
                    example_kwargs=example_kwargs,
                    world_size=group.size,
                    mesh_shape=mesh_of(group, mesh, device, hybrid=hybrid),
                    device=group.device,
                    progress=progress,
                ).policy
                found = sendable(policy) if seconds and group.size > 1 else None
                part.same += ["a search of limited time"] if found else []
            if found is not None:  # the ranks' searches may have ended at other points
                policy = received(group.all_gather_object(found)[0], policy)
        with agreement.part() as part:
            mesh_shape = mesh_of(group, mesh, device, hybrid=hybrid)
            with progress.stage("plan"):
                plan = make_plan(model, policy, world_size=group.size, mesh_shape=mesh_shape)
                plan = replace(plan, backend=backend)
            plan = replace(plan, replica_all_reduce=name_of_all_reduce(replica_all_reduce, plan))
            part.same += plan.lines()
            registered = registration(group, cuda_graph=policy.cuda_graph)
            part.same += [registered] if registered else []
        agreement.group = group = with_mesh(group, mesh_shape)
        plan = replace(
            plan,
            runs_on=group.runs_on,
            process_group_backend=group.backend,
            hosts=group.hosts,
        )
        group.replica_all_reduce = replica_all_reduce
        group.check = os.environ.get("GRAPHSHARD_CHECK") == "1" if check is None else check
        for ranks in sorted({unit.options.reshard_ranks or 0 for unit in plan.units} - {0}):
            group.within(ranks)
        for shape in plan.grids:
            group.grid(shape)
        with agreement.part() as part:
            part.flag = True  # this rank came with a model of its own, as none that rebinds does
            with progress.stage("shard"):
                sharded = ShardedModule(model, plan, group, passes, sizes, agreement)
        if all(part.flags) and not policy.sync_module_states:
            states.replicas.require_one_model(sharded._graphshard.bindings, model)
        with agreement.part():
            if "accelerate" in sys.modules:
                from graphshard.hf.accelerators import let_accelerators_prepare

                let_accelerators_prepare()
            if example_inputs is not None or example_kwargs is not None:
                sharded.capture(tuple(example_inputs or ()), dict(example_kwargs or {}), progress)
    return sharded


@named_arguments
def plan(
    model: nn.Module,
    policy: Policy | AutoPolicy,
    *,
    world_size: int | None = None,
    mesh_shape: Sequence[int] | str | None = None,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str | None = None,
    backend: str = "eager",
    process_group_backend: str | None = None,
    hosts: int = 1,
    dynamic: Mapping[str, Mapping[int, str]] | None = None,
    passes: Sequence[PassLike] = (),
    progress: Stages | None = None,
) -> ShardingPlan:
    """Return the plan that `compile` would make, without process group or parameter memory.

    Args:
        model: on meta or with real weights; it is not changed.
        policy: chooses the units and their options; an `AutoPolicy` is searched first, which needs
            example inputs.
        world_size: number of ranks. None: that of `mesh_shape`, or 1.
        mesh_shape: the mesh of the ranks, `(ranks,)` or, for the HYBRID strategies, `(replicas,
            ranks to shard over)`, also as "2x4". None: `(world_size,)`.
        example_inputs: as for `compile`. With them the step is captured, rewritten and verified,
            and `plan.program` is the rewritten program; otherwise it is None.
        example_kwargs: keyword arguments of that call.
        device: the device that the program will run on. None: that of the policy's `hardware`, or
            "cpu" for ranks by Gloo, or "cuda".
        backend: as for `compile`; the program shows its regions, but nothing is compiled.
        process_group_backend: "nccl" or "gloo" connects the ranks. None: "gloo" for the CPU, else
            "nccl". Over "gloo" on one host, with schedule "fsdp", by default, no gather is issued
            ahead in forward, and each reduce is waited for at once.
        hosts: of the ranks that Gloo connects.
        dynamic: as for `compile`, but not "auto", which learns from calls.
        passes: passes to apply after the default ones, in order.
        progress: shows each stage. None: a bar on stderr, if that is a terminal.

    Raises:
        PolicyError, PlanError: the policy, the mesh and the model do not fit, or an argument is
            invalid.
        CaptureError, PassError, VerifyError: no program can be made for the example inputs.
    """
    model = without_compiler(model)
    _check_arguments(model, example_inputs, example_kwargs, passes)
    require_backend(backend)
    if not isinstance(policy, PolicySearch):
        require_policy(policy)
    device, process_group_backend = _place(policy, device, process_group_backend)
    sizes = Dynamic.of(model, dynamic)
    shape = None if mesh_shape is None else mesh_sizes(mesh_shape)
    ranks_unsaid = world_size is None and shape is None
    if world_size is None:
        world_size = torch.Size(shape or (1,)).numel()
    most = world_size if process_group_backend == "gloo" else 1
    if not is_int(hosts) or not 1 <= hosts <= most:
        raise PolicyError(
            f'hosts counts the hosts of ranks that process_group_backend="gloo" connects; got '
            f"{hosts!r} for {world_size} ranks by {process_group_backend!r}; give 1 to {most}, or "
            "leave it out"
        )
    progress = progress or Progress()
    if isinstance(policy, PolicySearch):
        tuned_plan = policy.plan(
            model,
            example_inputs=example_inputs,
            example_kwargs=example_kwargs,
            world_size=world_size,
            mesh_shape=shape,
            device=device,
            progress=progress,
        )
        if sizes is None and not passes and backend == "eager":
            return tuned_plan
        policy = tuned_plan.policy
    with progress.stage("plan"):
        sharding_plan = make_plan(model, policy, world_size=world_size, mesh_shape=shape)
        sharding_plan = replace(
            sharding_plan,
            backend=backend,
            process_group_backend=process_group_backend if world_size > 1 else "none",
            hosts=hosts,
        )
        if ranks_unsaid:
            warnings = (*sharding_plan.warnings, _ONE_RANK)
            sharding_plan = replace(sharding_plan, warnings=warnings)
    if example_inputs is None and example_kwargs is None:
        return sharding_plan
    return plan_with_program(
        sharding_plan,
        model,
        example_inputs,
        example_kwargs,
        device=device,
        sizes=sizes,
        passes=passes,
        progress=progress,
    )


_ONE_RANK = (
    "this plan is for 1 rank, which shards nothing, since graphshard.plan got no number of ranks; "
    "give world_size= or mesh_shape="
)


def _place(
    policy: Policy | AutoPolicy, device: torch.device | str | None, backend: str | None
) -> tuple[torch.device, str]:
    """The device of a program and what connects its ranks; what is not given follows the other."""
    if backend not in (None, "nccl", "gloo"):
        raise PolicyError(f'process_group_backend must be "nccl" or "gloo"; got {backend!r}')
    if device is None and policy.hardware is not None:
        device = Hardware.load(policy.hardware).program_device
    device = without_cpu_index(device or ("cpu" if backend == "gloo" else "cuda"))
    if backend is None:
        backend = "gloo" if device.type == "cpu" else "nccl"
    if backend == "nccl" and device.type == "cpu":
        raise PolicyError(
            'process_group_backend="nccl" connects CUDA devices, and the program is for the CPU; '
            "leave one of process_group_backend and device out, and it follows the other"
        )
    return device, backend


def plan_with_program(
    sharding_plan: ShardingPlan,
    model: nn.Module,
    example_inputs: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    *,
    device: torch.device | str = "cpu",
    sizes: Dynamic | None = None,
    passes: Sequence[PassLike] = (),
    progress: Stages | None = None,
) -> ShardingPlan:
    """Capture a call of `model`, rewrite and verify it, and return the plan with the program.

    The other arguments are those of `plan`; `sizes` holds the dynamic sizes.
    """
    # The passes and the trace are loaded where a program is made: units need none.
    from graphshard.capture.entry import capture
    from graphshard.pipeline import every_pass, run_passes, with_capture_warnings

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
            precisions=sharding_plan.precisions,
            names=names,
            progress=progress,
        ).program
    sharding_plan = with_capture_warnings(sharding_plan, program)
    program.stale = sharding_plan.stale_after_step
    every = every_pass(sharding_plan, passes)
    run_passes(program, sharding_plan, every, progress=progress)
    return replace(sharding_plan, program=program)


def _compile_text(
    model: object,
    policy: object,
    backend: object,
    dynamic: object,
    passes: object,
    check: object,
) -> str:
    """The call of `compile` as ranks compare it; the arguments may still be wrong ones."""
    names = [type(each).__name__ for each in passes] if _is_sequence(passes) else passes
    arguments = {"backend": backend, "dynamic": dynamic, "passes": names or (), "check": check}
    text = call_text(compile, "", **arguments).removeprefix("compile(")
    given = f"{type(model).__name__}, {type(policy).__name__}"
    return f"graphshard.compile({given}{'' if text == ')' else ', '}{text}"


def _check_compile(
    model: nn.Module,
    policy: object,
    backend: str,
    example_inputs: object,
    example_kwargs: object,
    passes: object,
) -> None:
    require_backend(backend)
    if backend == "inductor":
        require_inductor()
    if torch.is_inference_mode_enabled():
        raise PlanError(
            "shards are parameters to train, which cannot be made in torch.inference_mode(); call "
            "graphshard.compile outside of it (to run without gradients, use torch.no_grad())"
        )
    _check_arguments(model, example_inputs, example_kwargs, passes)
    if not isinstance(policy, PolicySearch):
        require_policy(policy)


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
    if not isinstance(model, nn.Module):  # which is refused later
        return torch.device("cpu")
    devices = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(devices, torch.device("cpu"))

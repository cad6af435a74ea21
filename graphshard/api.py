"""The two entry points: the stages in order, nothing else."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from graphshard.capture import capture
from graphshard.errors import PolicyError
from graphshard.inspect.progress import Progress
from graphshard.pipeline import Pass, Stages, default_passes, run_passes
from graphshard.plan import ShardingPlan
from graphshard.planner import make_plan, with_capture_warnings
from graphshard.policy import Policy
from graphshard.runtime.group import find_group
from graphshard.runtime.module import ShardedModule

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

BACKENDS = ("eager",)


def compile(  # noqa: A001  # as torch.compile
    model: nn.Module,
    policy: Policy,
    *,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    mesh: DeviceMesh | None = None,
    device: torch.device | str | None = None,
    backend: str = "eager",
    passes: Sequence[Pass] = (),
    check: bool | None = None,
    progress: Stages | None = None,
) -> ShardedModule:
    """Shard `model` over the ranks of `mesh`; every rank calls this alike.

    Args:
        model: on meta or with real weights; stays as it is. Real weights are sharded; a model on
            meta gets values by `init_weights`, `load_full_state_dict` or a checkpoint.
        policy: which parameters are gathered together, and when.
        example_inputs: positional arguments of a call, real, meta or fake tensors among them, to
            capture a program at once. None: programs are captured when a call needs one.
        example_kwargs: keyword arguments of that call.
        mesh: one-dimensional. None: the default process group, or a single rank if there is none.
        device: where the model runs. None: on the mesh's kind of device; without a mesh on the
            current CUDA device under NCCL, on the CPU under other backends, and on a single rank
            without a process group where the model is (from meta: the CPU).
        backend: "eager" runs the program operator by operator.
        passes: applied after the default ones, in order.
        check: poison freed storage and check every value's shape and dtype. None: if the
            environment variable GRAPHSHARD_CHECK is 1.
        progress: told of each stage. None: a bar on stderr, if that is a terminal.

    Raises:
        PolicyError: the policy, the mesh and the model do not fit; or `backend` is unknown.
        PlanError: the model cannot be planned.
        CaptureError, PassError, VerifyError: its program cannot be made, given example inputs.
    """
    if backend not in BACKENDS:
        raise PolicyError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    group = find_group(mesh, device, alone=_device_of(model))
    group.check = os.environ.get("GRAPHSHARD_CHECK") == "1" if check is None else check
    progress = progress or Progress()
    with progress.stage("plan"):
        plan = make_plan(model, policy, world_size=group.size)
    with progress.stage("shard"):
        sharded = ShardedModule(model, plan, group, (*default_passes(policy), *passes))
    if example_inputs is not None or example_kwargs is not None:
        sharded.capture(tuple(example_inputs or ()), dict(example_kwargs or {}), progress)
    return sharded


def plan(
    model: nn.Module,
    policy: Policy,
    *,
    world_size: int | None = None,
    mesh_shape: Sequence[int] | None = None,
    example_inputs: Sequence[Any] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    device: torch.device | str = "cpu",
    passes: Sequence[Pass] = (),
    progress: Stages | None = None,
) -> ShardingPlan:
    """The plan `compile` would follow, made with no process group and no parameter memory.

    Args:
        model: on meta or with real weights; stays as it is.
        policy: which parameters are gathered together, and when.
        world_size: number of ranks. None: that of `mesh_shape`, or 1.
        mesh_shape: their arrangement. None: `(world_size,)`.
        example_inputs: as for `compile`; with them the step is captured, rewritten and verified,
            and `plan.program` is the rewritten program, else it is None.
        example_kwargs: keyword arguments of that call.
        device: where the program is to run.
        passes: applied after the default ones, in order.
        progress: told of each stage. None: a bar on stderr, if that is a terminal.

    Raises:
        PolicyError, PlanError: the policy, the mesh and the model do not fit.
        CaptureError, PassError, VerifyError: the program cannot be made, given example inputs.
    """
    shape = None if mesh_shape is None else tuple(mesh_shape)
    if world_size is None:
        world_size = torch.Size(shape or (1,)).numel()
    progress = progress or Progress()
    with progress.stage("plan"):
        made = make_plan(model, policy, world_size=world_size, mesh_shape=shape)
    if example_inputs is None and example_kwargs is None:
        return made
    args, kwargs = tuple(example_inputs or ()), dict(example_kwargs or {})
    with progress.stage("capture"):
        program = capture(model, args, kwargs, device=device, grad=torch.is_grad_enabled()).program
    made = with_capture_warnings(made, program)
    run_passes(program, made, (*default_passes(policy), *passes), progress=progress)
    return replace(made, program=program)


def _device_of(model: nn.Module) -> torch.device:
    devices = (p.device for p in model.parameters() if p.device.type != "meta")
    return next(devices, torch.device("cpu"))

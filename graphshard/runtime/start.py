"""The ranks and the device that a compile runs on: found, started or refused."""

from __future__ import annotations

import os
import warnings
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from graphshard.errors import GraphshardError, PolicyError
from graphshard.runtime.group import Group, meeting_group, without_cpu_index


def group_or_refusal(
    mesh: Any, device: Any, *, alone: torch.device
) -> tuple[Group, GraphshardError | None]:
    """The group that `compile` runs on with these arguments, or the reason why there is none.

    With a reason, the group is that of all ranks there are, to tell them.

    Args:
        mesh: as `compile` got it.
        device: the same.
        alone: where a single rank without a group runs if `device` is None.
    """
    try:
        if mesh is not None and not isinstance(mesh, DeviceMesh):
            raise PolicyError(
                f"mesh must be a DeviceMesh or None; got {mesh!r}; make one by "
                'torch.distributed.device_mesh.init_device_mesh("cuda", (ranks,)), or leave it out '
                "to use the default process group"
            )
        device = None if device is None else usable_device(device)
        if mesh is None:
            join_launched_ranks()
        return meeting_group(mesh, device, alone=alone), None
    except GraphshardError as error:
        return meeting_group(None, "cpu"), error


def usable_device(device: Any) -> torch.device:
    """`device` as a torch.device that this process can compute on."""
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise PolicyError(
            f'device must be a torch.device or its name, such as "cuda" or "cpu"; got {device!r} '
            f"({reason})"
        ) from None
    if found.type == "meta":
        raise PolicyError(
            "tensors on the meta device have no values, so nothing runs there; leave device= out, "
            "or plan the model without ranks by graphshard.plan"
        )
    if found.type == "cpu":
        return without_cpu_index(found)
    api = getattr(torch, found.type, None)
    count = api.device_count() if api is not None and api.is_available() else 0
    if (found.index or 0) >= count:
        there = f"{count} of them" if count else f"no usable {found.type.upper()} device"
        raise PolicyError(
            f"device={str(found)!r} is not there: torch {torch.__version__} finds {there} on this "
            'machine; pass device="cpu" or leave it out. To see the program for a device that is '
            "elsewhere, use graphshard.plan"
        )
    return found


def join_launched_ranks() -> None:
    """Make the default process group if a launcher started several ranks and nobody made it.

    As torch's `fully_shard`, by `init_process_group()`, so by the environment; a warning says so.
    """
    ranks = os.environ.get("WORLD_SIZE", "")
    launched = ranks.isdecimal() and int(ranks) > 1
    if not launched or not dist.is_available() or dist.is_initialized():
        return
    names = ("RANK", "MASTER_ADDR", "MASTER_PORT")
    if lacking := [name for name in names if name not in os.environ]:
        raise PolicyError(
            f"WORLD_SIZE is {ranks} in the environment, there is no process group, and "
            f"{' and '.join(lacking)} {'are' if len(lacking) > 1 else 'is'} not set to make one; "
            "start the ranks by torchrun, call torch.distributed.init_process_group(...) before "
            "graphshard.compile, or unset WORLD_SIZE for a single process"
        )
    dist.init_process_group()
    if os.environ["RANK"] == "0":
        warnings.warn(
            f"WORLD_SIZE is {ranks} in the environment and there was no process group, so "
            "graphshard.compile called torch.distributed.init_process_group(); call it yourself "
            "to choose its backend, and destroy_process_group() at the end",
            stacklevel=4,  # the caller of compile
        )

"""Going on with process groups that were made anew, after the old ones failed or were aborted.

Lowered programs hold `Group` objects, and parameters, gradients and optimizer states the mesh. Both
stay the same objects and get the new process groups, so nothing is planned or captured again.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh

from graphshard.errors import PolicyError, RuntimeStateError
from graphshard.program import ops
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.group import Group, meeting_group, number_of_hosts, with_mesh
from graphshard.runtime.lowered import Bindings
from graphshard.torch_private import compat as torch_compat


def rebind(bindings: Bindings, mesh: DeviceMesh | None) -> None:
    """Give a module's groups and mesh the process groups of `mesh`, which equals the old one.

    None: of a mesh made over the default process group.
    """
    group, plan = bindings.group, bindings.plan
    if group.mesh is None:
        raise RuntimeStateError(
            "this module runs on a single rank without a process group, so there is none to "
            "replace; compile it again to run on several"
        )
    is_mesh = mesh is None or isinstance(mesh, DeviceMesh)
    agreement = Agreement(meeting_group(mesh if is_mesh else None, group.device))
    agreement.made_by = bindings.agreement.made_by
    # The meetings of graphshard.compile, so that new ranks may be in it.
    with agreement.call(agreement.made_by):
        with agreement.part():
            if not is_mesh:
                raise PolicyError(
                    f"mesh must be a DeviceMesh or None; got {mesh!r}; make one of the old ranks, "
                    "shape and names by torch.distributed.device_mesh.init_device_mesh, or leave "
                    "it out to use the default process group"
                )
            if plan.policy.cuda_graph:
                raise RuntimeStateError(
                    "CUDA graphs have recorded collectives of the old process groups; compile the "
                    "module again, or use a policy with cuda_graph=False"
                )
        agreement.join()
        agreement.group.hosts = number_of_hosts(agreement.group)
        with agreement.part() as part:
            _require_same_ranks(group, agreement.group, mesh)
            part.same += plan.lines()
        new = with_mesh(agreement.group, group.mesh_shape)
        for name in group.subgroups:
            if name not in new.subgroups:  # a part of the group that shards
                new.within(int(name.removeprefix(ops.RESHARD)))
        grids = {shape: new.grid(shape) for shape in plan.grids}
        with agreement.part() as part:
            part.flag = False  # this rank goes on with the model it has; others make theirs
        with agreement.part():
            _take(group, new)
            torch_compat.move_mesh(group.mesh, new.mesh)
            for shape, grid in grids.items():
                torch_compat.move_mesh(group.grid(shape), grid)
    agreement.group = group
    agreement.watch()
    # The same object, which others hold, begins again on the new Store.
    vars(bindings.agreement).update(vars(agreement))


def _require_same_ranks(old: Group, new: Group, mesh: DeviceMesh | None) -> None:
    """Check that the new group has the ranks and the backend of the old one."""
    if mesh is not None and mesh != old.mesh:
        raise PolicyError(
            f"the module is sharded over {old.mesh}; got {mesh}; pass a mesh of the same ranks, "
            "shape and names, or compile again and load a checkpoint"
        )
    if (new.size, new.rank) != (old.size, old.rank):
        raise PolicyError(
            f"this was rank {old.rank} of {old.size} of the module and is rank {new.rank} of "
            f"{new.size} now; keep ranks as they were, or compile again and load a checkpoint"
        )
    if new.backend != old.backend:
        raise PolicyError(
            f"the programs were made for the backend {old.backend!r}; the new groups have "
            f"{new.backend!r}; make them with the old backend, or compile again"
        )
    if (new.hosts > 1) != (old.hosts > 1):
        raise PolicyError(
            f"the programs were made for ranks of {old.hosts} host(s), now they are on "
            f"{new.hosts}; between hosts gathers are issued ahead, so compile again"
        )


def _take(group: Group, new: Group) -> None:
    """Give `group` and the groups in it the process groups of `new`."""
    for name in ("process_group", "rank", "size", "timeout", "pairwise"):
        setattr(group, name, getattr(new, name))
    for name, subgroup in group.subgroups.items():
        _take(subgroup, new.subgroups[name])

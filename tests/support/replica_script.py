"""One rank of a training whose replicas die and return; see test_replicas_return.py.

    replica_script.py mesh FOLDER RANK LIFE     four ranks as 2 x 2; replica 1 dies at step 3
    replica_script.py jobs FOLDER REPLICA LIFE  two jobs of one rank, which a function averages over

LIFE counts the starts of a process. Each writes the losses and the final state to a file.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from models import Block, TiedGPT, tokens_of
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from graphshard.errors import CollectiveError

STEPS, DEATH = 8, 3
POLICY = graphshard.BlockPolicy({Block}, strategy="HYBRID_SHARD")


def model() -> TiedGPT:
    torch.manual_seed(0)
    return TiedGPT(2)


def adamw(module: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def forward(module: torch.nn.Module, number: int, step: int) -> Tensor:
    """The loss of a step, with the same dropout whenever it is computed."""
    torch.manual_seed(100 * step + number)
    return module(*tokens_of(number, step))


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.01)


# -- one mesh -------------------------------------------------------------------------------------


def join(folder: Path, rank: int, life: int) -> DeviceMesh:
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store{life}",
        rank=rank,
        world_size=4,
        timeout=timedelta(seconds=60),
    )
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def copy_from_first_replica(
    sharded: graphshard.ShardedModule, optim: torch.optim.Optimizer, mesh: DeviceMesh, step: int
) -> int:
    """Give every replica the shards of the first; the step it stands at."""
    state: list[Any] = [
        (
            {name: value.clone() for name, value in sharded.local_state_dict().items()},
            sharded.optimizer_state_dict(optim, kind="local"),
            step,
        )
    ]
    dist.broadcast_object_list(state, group_src=0, group=mesh.get_group("replicate"))
    weights, moments, step = state[0]
    sharded.load_local_state_dict(weights)
    sharded.load_optimizer_state_dict(optim, moments, kind="local")
    return step


def on_a_mesh(folder: Path, rank: int, life: int) -> dict[str, Any]:
    mesh = join(folder, rank, life)
    sharded = graphshard.compile(model(), POLICY, mesh=mesh)
    optim = adamw(sharded)
    step, failed, losses = 0, 0, {}
    if life:
        step = copy_from_first_replica(sharded, optim, mesh, step)
    while step < STEPS:
        if not life and rank >= 2 and step == DEATH and (folder / "kill").exists():
            forward(sharded, rank, step)
            die()  # with its peer; the first replica is about to run backward
        try:
            loss = forward(sharded, rank, step)
            loss.backward()
        except CollectiveError:
            failed += 1
            optim.zero_grad()
            dist.destroy_process_group()
            wait_for(folder / "again")
            mesh = join(folder, rank, life + 1)
            sharded.rebind(mesh)
            step = copy_from_first_replica(sharded, optim, mesh, step)
            continue
        sharded.clip_grad_norm_(1.0)
        optim.step()
        optim.zero_grad()
        losses[step] = loss.item()
        step += 1
    sharded.save_checkpoint(folder / "end", optim)
    return {"losses": losses, "failed": failed, **state_of(sharded, optim)}


def state_of(sharded: graphshard.ShardedModule, optim: torch.optim.Optimizer) -> dict[str, Any]:
    moments = sharded.optimizer_state_dict(optim, kind="local")["state"]
    return {"weights": dict(sharded.local_state_dict()), "moments": moments}


# -- jobs -----------------------------------------------------------------------------------------


class Jobs:
    """Averages over replicas that are jobs of their own, through a Store."""

    def __init__(self, folder: Path, replica: int) -> None:
        file = str(folder / "outer")
        self.store = dist.FileStore(file)
        self.replica, self.members, self.call = replica, {0, 1}, 0
        self.died_in: int | None = None

    def average(self, flat: Tensor) -> None:
        if self.members == {self.replica}:
            return
        name = f"average {self.call}"
        self.call += 1
        if self.call - 1 == self.died_in:
            die()
        self.store.set(f"{name} of {self.replica}", flat.numpy().tobytes())
        keys = [f"{name} of {member}" for member in sorted(self.members)]
        deadline = time.monotonic() + (5.0 if self.call > 1 else 60.0)  # while the other starts
        while not self.store.check(keys):
            if time.monotonic() > deadline:
                self.members = {self.replica}
                raise RuntimeError("the other replica is gone")
            time.sleep(0.002)
        parts = [torch.frombuffer(bytearray(self.store.get(k)), dtype=flat.dtype) for k in keys]
        flat.copy_(torch.stack(parts).mean(0))

    def let_join(self, state: Any) -> None:
        """Let a replica that waits go on from `state`."""
        self.members, self.call = {0, 1}, 1000
        torch.save(state, Path(self.store.path).parent / "part")
        (Path(self.store.path).parent / "part").rename(Path(self.store.path).parent / "state")


def as_jobs(folder: Path, replica: int, life: int) -> dict[str, Any]:
    jobs = Jobs(folder, replica)
    sharded = graphshard.compile(model(), POLICY, replica_all_reduce=jobs.average)
    optim = adamw(sharded)
    step, failed, alone, losses = 0, 0, [], {}
    if life:
        (folder / "knock").touch()
        wait_for(folder / "state")
        weights, moments, step = torch.load(folder / "state")
        sharded.load_local_state_dict(weights)
        sharded.load_optimizer_state_dict(optim, moments, kind="local")
        jobs.call = 1000
    while step < STEPS:
        if jobs.members == {replica} and step == DEATH + 2:
            wait_for(folder / "knock")
            moments = sharded.optimizer_state_dict(optim, kind="local")
            jobs.let_join((dict(sharded.local_state_dict()), moments, step))
        if not life and replica == 1 and step == DEATH:
            jobs.died_in = jobs.call + 1  # the first unit of this step was averaged
        loss = forward(sharded, replica, step)
        try:
            loss.backward()
        except CollectiveError:
            failed += 1
            optim.zero_grad()
            continue
        if jobs.members == {replica}:
            alone.append(step)
        optim.step()
        optim.zero_grad()
        losses[step] = loss.item()
        step += 1
    return {"losses": losses, "failed": failed, "alone": alone, **state_of(sharded, optim)}


def main() -> None:
    mode, folder, number, life = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    run = {"mesh": on_a_mesh, "jobs": as_jobs}[mode]
    result = run(folder, number, life)
    torch.save(result, folder / f"result {number}")
    os._exit(0)  # Gloo may abort while the interpreter ends


if __name__ == "__main__":
    main()

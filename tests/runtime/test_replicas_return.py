"""Replicas that die and come back, and the caller's own average over replicas."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Block, TiedGPT, tokens_of
from paths import ROOT, SUPPORT
from ranks import run_ranks
from state_checks import assert_same
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from graphshard.errors import CollectiveError, PolicyError, RuntimeStateError
from graphshard.torch_private.dtensors import full_tensor

# -- one rank of a training whose replicas die and return ------------------------------------------


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


def main() -> None:
    """Run one of four ranks as 2 x 2: FOLDER RANK LIFE.

    Replica 1 dies at step 3. LIFE counts the starts of a process, which writes its losses and its
    final state to a file.
    """
    folder, number, life = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    result = on_a_mesh(folder, number, life)
    torch.save(result, folder / f"result {number}")
    os._exit(0)  # Gloo may abort while the interpreter ends


# -- tests -----------------------------------------------------------------------------------------


class Ranks:
    """Processes of `main`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[tuple[int, int], subprocess.Popen[bytes]] = {}

    def start(self, *numbers: int, life: int) -> None:
        path = f"{ROOT}{os.pathsep}{SUPPORT}"
        for number in numbers:
            with (self.folder / f"log {number} {life}").open("w") as log:
                command = [str(self.folder), str(number), str(life)]
                self.processes[number, life] = subprocess.Popen(
                    [sys.executable, __file__, *command],
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )

    def wait(self, *numbers: int, life: int, code: int = 0) -> None:
        for number in numbers:
            ended = self.processes[number, life].wait(150)
            log = (self.folder / f"log {number} {life}").read_text()
            assert ended == code, f"rank {number} ended with {ended}\n{log[-5000:]}"

    def results(self, count: int) -> list[dict[str, Any]]:
        return [torch.load(self.folder / f"result {number}") for number in range(count)]


@contextmanager
def ranks(folder: Path) -> Iterator[Ranks]:
    started = Ranks(folder)
    try:
        yield started
    finally:
        for process in started.processes.values():
            process.kill()
            process.wait()


def same_state(first: dict[str, Any], second: dict[str, Any]) -> None:
    assert_same(first["weights"], second["weights"])
    assert first["moments"].keys() == second["moments"].keys()
    for name, entries in first["moments"].items():
        assert_same(entries, second["moments"][name])


@pytest.mark.slow
def test_ranks_go_on_with_new_process_groups_to_the_same_bits(tmp_path: Path) -> None:
    found = {}
    for name in ("undisturbed", "killed"):
        folder = tmp_path / name
        folder.mkdir()
        with ranks(folder) as group:
            if name == "killed":
                (folder / "kill").touch()
            group.start(0, 1, 2, 3, life=0)
            if name == "killed":
                group.wait(2, 3, life=0, code=-signal.SIGKILL)
                group.start(2, 3, life=1)
                (folder / "again").touch()
            for number in range(4):
                group.wait(number, life=int(name == "killed" and number > 1))
            found[name] = group.results(4)
    for rank, (before, after) in enumerate(zip(*found.values(), strict=True)):
        assert (before["failed"], after["failed"]) == (0, int(rank < 2))
        lived = range(STEPS) if rank < 2 else range(DEATH, STEPS)
        assert after["losses"] == {step: before["losses"][step] for step in lived}
        same_state(before, after)


def halved(calls: list[int]) -> Any:
    def halve(flat: torch.Tensor) -> None:
        calls.append(flat.numel())
        flat.mul_(0.5)

    return halve


def grads(module: nn.Module, inputs: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)  # dropout
    module(*inputs).backward()
    return {name: param.grad for name, param in module.named_parameters()}


class WithScale(TiedGPT):
    """A parameter without dimensions is not sharded."""

    def __init__(self) -> None:
        super().__init__(1)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, idx: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().forward(idx, targets) * self.scale


def test_every_gradient_passes_through_the_callers_function_and_the_dump_says_so() -> None:
    calls: list[int] = []
    inputs = tokens_of(0, 0)
    torch.manual_seed(0)
    plain = WithScale()
    sharded = graphshard.compile(
        plain, POLICY, example_inputs=inputs, replica_all_reduce=halved(calls)
    )
    expected = grads(plain, inputs)
    for name, grad in grads(sharded, inputs).items():
        torch.testing.assert_close(grad, expected[name] / 2)
    assert sum(calls) == sum(p.numel() for p in plain.parameters())
    name = f"{__name__}.halved.<locals>.halve"
    assert f"replicas  gradients are averaged by {name}\n" in str(sharded.plan)
    assert f"note: each all_reduce over 'replicate' is a call of {name}\n" in str(sharded.program)
    reduces = [event.op for event in sharded.program.schedule() if event.op == "all_reduce"]
    assert len(reduces) == len(calls) + 1, "the scale is reduced over the shards first"


def test_what_cannot_be_replaced_is_refused() -> None:
    block = graphshard.BlockPolicy({Block})
    with pytest.raises(PolicyError, match=r"this one has shape \(1,\); use a HYBRID strategy"):
        graphshard.compile(TiedGPT(1), block, replica_all_reduce=halved([]))
    with pytest.raises(PolicyError, match="must be a function or None; got 3"):
        graphshard.compile(TiedGPT(1), POLICY, replica_all_reduce=3)  # type: ignore[arg-type]
    with pytest.raises(RuntimeStateError, match="there is none to replace"):
        graphshard.compile(TiedGPT(1), POLICY).rebind()


class Waits:
    """What a function may return, which is no work of torch's."""

    def __init__(self, error: Exception | None = None) -> None:
        self.waited, self.error = 0, error

    def wait(self) -> None:
        self.waited += 1
        if self.error is not None:
            raise self.error


def on_gloo_ranks(rank: int) -> None:
    """A mesh whose shards have ranks of their own, and as many calls as there are units."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    policy = graphshard.BlockPolicy({nn.Linear}, strategy="HYBRID_SHARD", merge_below=0)
    returned: list[Any] = []
    failing: list[Exception] = []

    def average(flat: torch.Tensor) -> Any:
        if failing:
            raise failing[0]
        flat.mul_(0.5)
        return returned[0]

    torch.manual_seed(0)
    plain = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    sharded = graphshard.compile(plain, policy, mesh=mesh, replica_all_reduce=average)
    x = torch.ones(2, 8)
    plain(x).sum().backward()
    for work in (None, Waits(), dist.all_reduce(torch.ones(1), async_op=True)):
        returned[:] = [work]
        sharded(x).sum().backward()
        assert not isinstance(work, Waits) or work.waited == 3
        for mine, theirs in zip(sharded.parameters(), plain.parameters(), strict=True):
            assert mine.grad is not None
            assert theirs.grad is not None
            torch.testing.assert_close(full_tensor(mine.grad), theirs.grad / 2)
        sharded.zero_grad()
    for error in (RuntimeError("lost"), ValueError("lost"), KeyError("lost")):
        returned[:] = [Waits(error)]
        for failing[:] in ([error], []):
            with pytest.raises(CollectiveError, match=r"passed as replica_all_reduce .*lost"):
                sharded(x).sum().backward()
            assert all(param.grad is None for param in sharded.parameters())
    returned[:] = [None]
    sharded(x).sum().backward()


def test_on_gloo_ranks() -> None:
    run_ranks(on_gloo_ranks, 2)


if __name__ == "__main__":
    main()

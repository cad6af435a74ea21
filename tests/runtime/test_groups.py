"""Which ranks communicate, where they compute, and for how long they wait."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from full_tensors import full
from ranks import checks_of, on_ranks
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

import graphshard
from graphshard.errors import PolicyError
from graphshard.planning.layout import ParamLayout
from graphshard.runtime.collectives import Operand, wait
from graphshard.runtime.gather import AllGather
from graphshard.runtime.group import find_group, meeting_group, new_process_group
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private.coalesced import coalesced


@pytest.mark.parametrize(
    ("backends", "cuda", "expected"),
    [
        ("cpu:gloo,cuda:nccl", True, "cuda"),  # init_process_group() without a backend
        ("cuda:nccl", True, "cuda"),
        ("cpu:gloo,cuda:nccl", False, "cpu"),
        ("cpu:gloo,cuda:gloo", True, "cpu"),
    ],
)
def test_ranks_with_nccl_compute_on_cuda(backends: str, cuda: bool, expected: str) -> None:
    with (
        mock.patch.object(dist, "is_initialized", return_value=True),
        mock.patch.object(dist, "get_backend", return_value="undefined"),
        mock.patch.object(dist, "get_backend_config", return_value=backends),
        mock.patch.object(torch.cuda, "is_available", return_value=cuda),
        mock.patch.object(torch.cuda, "current_device", return_value=3),
        mock.patch("graphshard.runtime.group.group_of") as group_of,
    ):
        meeting_group(None, None)
    ((_, device),) = [call.args for call in group_of.call_args_list]
    assert device == torch.device("cuda:3" if expected == "cuda" else "cpu")


def test_a_launched_single_rank_has_dtensors_as_several_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "1")  # as some schedulers leave it
    plain = graphshard.compile(nn.Linear(3, 2), graphshard.SizePolicy())
    assert not dist.is_initialized()
    assert not isinstance(plain.weight, DTensor)
    launcher = {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    monkeypatch.setattr(os, "environ", os.environ | launcher)
    model = nn.Linear(3, 2)
    weight = model.weight.detach().clone()
    try:
        sharded = graphshard.compile(model, graphshard.SizePolicy())
        sharded(torch.ones(4, 3)).sum().backward()
        assert torch.equal(sharded.weight.full_tensor(), weight)
        assert torch.equal(sharded.weight.grad.full_tensor(), torch.full((2, 3), 4.0))
    finally:
        dist.destroy_process_group()


def smaller_groups_wait_as_long(rank: int) -> None:
    group = find_group(None, None)
    assert group.timeout == timedelta(seconds=77)
    assert group.within(2).timeout == timedelta(seconds=77)


def nccl_would_wait_for_ranks_outside_of_a_mesh(rank: int) -> None:
    device = torch.device("cpu")
    with mock.patch.object(torch_compat, "is_bound_to_device", return_value=True):
        with pytest.raises(PolicyError, match=r"1 of 2 ranks needs a group of 1 .* device_id"):
            new_process_group([rank], dist.group.WORLD, device, callers=1)
        made = new_process_group([rank], dist.group.WORLD, device, callers=2)
    assert dist.get_world_size(made) == 1


def the_plan_says_where_it_runs(rank: int) -> None:
    sharded = graphshard.compile(nn.Linear(4, 4), graphshard.SizePolicy(1))
    assert "world size 2, mesh 2; on cpu by gloo" in str(sharded.plan)
    assert sharded.plan.to_dict()["runs_on"] == "cpu by gloo"
    assert "forward_prefetch=0 (by default on gloo)" in str(sharded.plan)


def ranks_of_two_hosts_move_bytes_while_they_compute(rank: int) -> None:
    torch.manual_seed(0)
    plain, x = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.ones(2, 4)
    policy = graphshard.BlockPolicy({nn.Linear}, merge_below=0)
    steps = []
    for apart in (False, True):
        with mock.patch.dict(os.environ, NCCL_HOSTID=f"host{rank * apart}"):
            sharded = graphshard.compile(plain, policy, example_inputs=(x,))
        sharded(x).square().sum().backward()
        events = [(event.op, event.unit) for event in sharded.plan.program.schedule()]
        grads = [full(param.grad) for param in sharded.parameters()]
        steps.append((str(sharded.plan), events, grads))
    (_, near, expected), (text, far, grads) = steps
    assert "on cpu by gloo between 2 hosts" in text
    assert "forward_prefetch=1 (by default on gloo between 2 hosts)" in text
    gather, compute, reduce = ("all_gather", "1"), ("compute", "0"), ("reduce_scatter", "1")
    assert near.index(gather) > near.index(compute)
    assert far.index(gather) < far.index(compute)
    assert near[near.index(reduce) + 1] == ("wait", "1")
    assert far[far.index(reduce) + 1] == compute, "it is in flight while backward goes on"
    assert all(map(torch.equal, grads, expected))


def equal_meshes_over_other_groups(rank: int) -> None:
    """torch finds the layouts of results by equal meshes; the groups of the first are gone."""
    norms = []
    for _ in range(2):
        group = dist.new_group([0, 1])
        torch.manual_seed(0)
        mesh = DeviceMesh.from_group(group, "cpu")
        sharded = graphshard.compile(nn.Linear(4, 4), graphshard.SizePolicy(1), mesh=mesh)
        optimizer = torch.optim.AdamW(sharded.parameters())
        for _ in range(2):
            sharded(torch.ones(2, 4)).sum().backward()
        norms.append(sharded.clip_grad_norm_(1.0))
        optimizer.step()
        state = sharded.optimizer_state_dict(optimizer, kind="full")
        assert bool(state) == (rank == 0)
        optimizer.state[sharded.weight]["exp_avg"].redistribute(placements=[Replicate()])
        dist.barrier()
        dist.destroy_process_group(group)
    assert torch.equal(*norms)


class Wrapped:
    """A process group as TORCH_DISTRIBUTED_DEBUG=DETAIL wraps one in torch 2.11."""

    def __init__(self, process_group: Any) -> None:
        self._process_group = process_group

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_coalesced"):
            return self._refuse(name)
        return getattr(self._process_group, name)

    @staticmethod
    def _refuse(name: str) -> Any:
        def call(*_: Any) -> None:
            raise RuntimeError(f"Backend gloo does not support {name}")

        return call


def test_no_rank_needs_numpy() -> None:
    """torch's own function that forgets layouts does, and NumPy is no dependency."""
    code = (
        "import sys; sys.modules['numpy'] = None\n"
        "from graphshard.torch_private import compat; compat.forget_operator_layouts()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def a_backend_without_coalesced_calls(rank: int) -> None:
    group = Wrapped(dist.group.WORLD)
    parts = [torch.full((n,), float(10 * n + rank)) for n in (2, 3)]
    full = [torch.empty(2 * n) for n in (2, 3)]
    coalesced(group, "allgather_into_tensor_coalesced", "nccl")(full, parts).wait()
    assert [t.tolist() for t in full] == [[20.0] * 2 + [21.0] * 2, [30.0] * 3 + [31.0] * 3]
    sums = [torch.empty(n) for n in (2, 3)]
    coalesced(group, "reduce_scatter_tensor_coalesced", "nccl")(sums, full).wait()
    assert [t.tolist() for t in sums] == [[40.0 + 2 * rank] * 2, [60.0 + 2 * rank] * 3]


class Noting(Wrapped):
    """A process group that notes which coalesced calls it gets."""

    called: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.endswith("_coalesced"):
            self.called.append(name)
        return getattr(self._process_group, name)


def readers_of_gloo_wait_for_a_free_core(rank: int) -> None:
    if not hasattr(os, "SCHED_BATCH"):
        return
    group = find_group(None, None).new_group([0, 1], callers=2)
    group.gather_tensor(torch.ones(1))
    tasks = Path("/proc/self/task").iterdir()
    readers = [int(t.name) for t in tasks if (t / "comm").read_text().startswith("gloo_tcp")]
    assert len(readers) >= 2  # one of each group
    assert {os.sched_getscheduler(reader) for reader in readers} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER


def a_step_offers_its_core_to_readers(rank: int) -> None:
    with mock.patch.object(os, "sched_yield", mock.Mock(__name__="sched_yield")) as offered:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(8)))
        sharded = graphshard.compile(model, graphshard.SizePolicy())
        for step in (1, 2):  # the first is checked node by node
            loss = sharded(torch.ones(2, 4))  # 8 addmm, 2 offers
            assert offered.call_count == 7 * step - 5
            loss.sum().backward()  # mm by weight and by input, sum; not the first input's: 23, 5
            assert offered.call_count == 7 * step
            sharded.zero_grad()
        alone = DeviceMesh("cpu", torch.arange(2)[:, None], mesh_dim_names=("ranks", "alone"))
        by_itself = graphshard.compile(model, graphshard.SizePolicy(), mesh=alone["alone"])
        by_itself(torch.ones(2, 4)).sum().backward()
        assert offered.call_count == 14


def gathers_of_gloo_in_flight(rank: int) -> None:
    """Two coalesced gathers of Gloo's at once overwrite memory, so none is called."""
    before = find_group(None, None)
    group = replace(before, process_group=Noting(before.process_group), pairwise=None)
    operands = [
        Operand(ParamLayout(name, (name,), (4, 3), torch.float32, True, "shard", 2), torch.float32)
        for name in ("p", "q")
    ]
    gather = AllGather(group, "a", "forward", operands)
    parts = [[torch.full((2, 3), 10.0 * n + rank) for _ in operands] for n in range(2)]
    pending = [gather(each) for each in parts]
    assert group.gather_tensor(torch.tensor([rank, 7]), meets=True).tolist() == [[0, 7], [1, 7]]
    for n, each in enumerate(pending):
        for gathered in wait(each):
            assert gathered[:, 0].tolist() == [10.0 * n, 10.0 * n, 10.0 * n + 1, 10.0 * n + 1]
    sums = [torch.empty(3)]
    launch = coalesced(group.process_group, "reduce_scatter_tensor_coalesced", "gloo")
    launch(sums, [torch.ones(6)]).wait()
    assert Noting.called == ["reduce_scatter_tensor_coalesced"]


test_on_two_ranks = on_ranks(
    checks_of(globals()),
    2,
    group_timeout=77.0,
)

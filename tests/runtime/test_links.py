"""The links between ranks, measured when `compile` meets them."""

from __future__ import annotations

import os
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from models import Block, TiedGPT, tokens_of
from ranks import on_ranks
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.cost.collective_cost import GroupShape, collective_seconds
from graphshard.hardware.hardware import Hardware
from graphshard.runtime import links


def compiled(on: DeviceMesh | None = None, **fields: object) -> graphshard.ShardedModule:
    torch.manual_seed(0)
    policy = graphshard.BlockPolicy(Block, **fields)
    return graphshard.compile(TiedGPT(1), policy, example_inputs=tokens_of(0, 0), mesh=on)


def hardware_of(model: graphshard.ShardedModule) -> Hardware:
    hardware = model.plan.policy.hardware
    assert isinstance(hardware, Hardware)
    return hardware


def one_figure_on_all_ranks(rank: int) -> None:
    model = compiled(schedule="overlap")
    hardware = hardware_of(model)
    texts: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(texts, repr(hardware.to_dict()))
    assert len(set(texts)) == 1
    links_said = r"links measured now \([\d.e+-]+ GB/s and [\d.e+-]+ ms within a host\)"
    said = f"timed on cpu-gloo on {links_said}"
    assert re.search(said, str(model.plan)), str(model.plan)
    with mock.patch.object(links, "measure", side_effect=AssertionError("measured twice")):
        assert hardware_of(compiled(schedule="overlap")) == hardware
    # What names its hardware, or times nothing, measures nothing.
    with mock.patch.object(links, "measured_on", side_effect=AssertionError("measured")):
        compiled(schedule="overlap", hardware="cpu-gloo")
        compiled()


def ranks_that_measured_in_other_groups_agree(rank: int) -> None:
    links._measured.clear()
    names = []
    for pairs in ([[0, 1], [2, 3]], [[0, 2], [1, 3]]):
        mesh = DeviceMesh("cpu", torch.tensor(pairs), mesh_dim_names=("apart", "together"))
        hardware = hardware_of(compiled(schedule="overlap", on=mesh["together"]))
        names.append(hardware.name)
        by_rank: list[str] = [""] * 4
        dist.all_gather_object(by_rank, repr(hardware.to_dict()))
        assert all(by_rank[a] == by_rank[b] for a, b in pairs)
    # The first rank of each group was measured before: nobody measures again.
    assert (names[0] == names[1]) == (rank < 2)


def links_within_and_between_hosts_are_told_apart(rank: int) -> None:
    # What compute loses beside a gather is that of the links between hosts, measured last.
    lost = mock.patch.object(links, "contention_on_host", side_effect=[0.75, 0.25])
    with lost, mock.patch.dict(os.environ, {"NCCL_HOSTID": f"host{rank // 2}"}):
        hardware = hardware_of(compiled(schedule="overlap"))
        assert hardware.contention == 0.25
        assert hardware.gpus_per_node == 2
        assert {"all_gather", "all_gather.inter", "reduce_scatter.inter"} <= hardware.lines.keys()
        assert "within a host; " in hardware.name
        assert "between hosts" in hardware.name
    # Hosts of different numbers of ranks have no one figure.
    with mock.patch.dict(os.environ, {"NCCL_HOSTID": f"host{min(rank, 1)}"}):
        assert hardware_of(compiled(schedule="overlap")).name == "cpu-gloo"


test_on_two_ranks = on_ranks([one_figure_on_all_ranks], 2)
test_on_four_ranks = pytest.mark.slow(
    on_ranks(
        [ranks_that_measured_in_other_groups_agree, links_within_and_between_hosts_are_told_apart],
        4,
    )
)


def test_a_rank_on_each_host_needs_no_line_within_a_host() -> None:
    between = {"all_gather.inter": (1e-3, 1e-4, 1e-8)}
    hardware = Hardware.load("cpu-gloo").with_(lines=between)
    seconds = collective_seconds("all_gather", 1 << 20, GroupShape(2, 2), hardware, tensors=3)
    assert seconds == 1e-3 + 3e-4 + (1 << 19) * 1e-8

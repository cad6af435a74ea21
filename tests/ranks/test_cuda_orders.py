"""Any valid order of a program keeps memory apart on CUDA's streams, and so does a step that ends
in an error.

The CUDA runtime made of CPU threads reports each use of memory that was not waited for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from ranks import checks_of, is_made_up, on_ranks
from test_cuda_faults import BF16, OFFLOAD, REPLICAS, race, report_races
from test_cuda_ranks import batch, model
from torch import fx

import graphshard
from examples.gpt import Block
from graphshard.passes import offload_activations
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import gather_waits
from graphshard.program.program import Program
from graphshard.runtime.collectives import BoundCollective
from graphshard.runtime.streams import Launched, communicator_stream, copy_stream

pytestmark = pytest.mark.cuda

OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "grad_op": {"strategy": "SHARD_GRAD_OP"},
    "replicas": REPLICAS,
    "ahead": {"forward_prefetch": 2, "reshard_root": True},
    "bf16": {"mixed_precision": BF16["mixed_precision"]},
    "offload": {"offload": OFFLOAD["offload"]},
    "recompute": {"recompute": "selective", "offload": "activations"},
}


@dataclass(frozen=True)
class Shuffled:
    """Gathers and copies are issued earlier, waits and frees come later, each by chance."""

    seed: int
    name: str = "shuffled"

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        chance = random.Random(self.seed)
        waits = gather_waits(program)
        for node in list(program.nodes()):
            if node.target is ops.all_gather or node.target in ops.COPIES:
                self._earlier(node, chance.randrange(60))
            elif node.target is ops.free or (node.target is ops.wait and node not in waits):
                self._later(node, chance.randrange(60))

    def _earlier(self, node: fx.Node, by: int) -> None:
        at = node.prev
        while by and at.op == "call_function" and at not in node.all_input_nodes:
            if at.meta["phase"] != node.meta["phase"] or ops.is_collective(at):
                break
            at, by = at.prev, by - 1
        at.append(node)

    def _later(self, node: fx.Node, by: int) -> None:
        moved = [node, *(user for user in node.users if ops.is_unpack(user))]
        at = moved[-1]
        while by and at.next.op != "output" and not set(moved) & set(at.next.all_input_nodes):
            if at.next.meta["phase"] != node.meta["phase"]:
                break
            at, by = at.next, by - 1
        if at is not moved[-1]:
            for one in reversed(moved):
                at.append(one)


def trained(rank: int, fields: dict[str, Any], *passes: Shuffled) -> tuple[list[Any], list[Any]]:
    """Losses and gradients of two steps, and the order of communication."""
    device = torch.device("cuda", torch.cuda.current_device())
    policy = graphshard.BlockPolicy({Block}, merge_below=0, **fields)
    sharded = graphshard.compile(model(), policy, passes=passes)
    found: list[Any] = []
    for number in range(2):
        loss = sharded(*(ids.to(device) for ids in batch(number, rank, 0)))
        loss.backward()
        found += [loss.detach(), *(p.grad.to_local().clone() for p in sharded.parameters())]
        sharded.zero_grad()
    torch.cuda.synchronize()
    return [value.cpu() for value in found], list(sharded.program.schedule())


def any_order_gives_the_same_numbers(rank: int) -> None:
    offload_activations.ON_CUDA = 1024  # so that those of a small model leave, too
    for seed, (name, fields) in enumerate(OPTIONS.items()):
        expected, order = trained(rank, fields)
        found, other = trained(rank, fields, Shuffled(seed))
        assert order != other, name
        # Kernels of a GPU may add in another order from run to run.
        assert not is_made_up() or all(map(torch.equal, found, expected)), name


def what_an_error_drops_is_waited_for(rank: int) -> None:
    """Between a launch and its wait: memory goes back behind the side stream all the same."""
    if not is_made_up():
        return  # a race is seen by luck
    report_races(False)
    sharded = graphshard.compile(model(), graphshard.BlockPolicy({Block}, merge_below=0))
    ids = [ids.cuda() for ids in batch(0, rank, 0)]
    sharded(*ids).backward()

    def raises(*args: Any) -> None:
        raise RuntimeError("in between")

    def failed() -> str:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(BoundCollective, "wait", raises)
            with pytest.raises(RuntimeError, match="in between"):
                sharded(*ids)
        taken = [torch.zeros(size, device="cuda") for size in range(128, 1 << 14, 128)]
        torch.cuda.synchronize()
        del taken
        return race()

    assert not failed()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launched, "drop", lambda self: None)
        assert failed()
    report_races(True)


def shards_are_cast_by_one_launch_beside_compute(rank: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    precision = BF16["mixed_precision"]
    policy = graphshard.BlockPolicy({Block}, mixed_precision=precision, merge_below=0)
    sharded = graphshard.compile(model(), policy)
    ids = [ids.to(device) for ids in batch(0, rank, 0)]
    sharded(*ids).backward()
    copy, compute, casts = torch._foreach_copy_, torch.cuda.current_stream(), []

    def counted(targets: Any, sources: Any) -> None:
        if (targets[0].dtype, sources[0].dtype) == (torch.bfloat16, torch.float32):
            casts.append((torch.cuda.current_stream() != compute, len(sources)))
        copy(targets, sources)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "_foreach_copy_", counted)
        sharded(*ids).backward()
    gathers = [event for event in sharded.program.schedule() if event.op == "all_gather"]
    assert len(casts) == len(gathers) > 3
    assert all(beside for beside, _ in casts)
    assert sum(count for _, count in casts) > 3 * len(casts)


test_on_two_ranks = on_ranks(
    checks_of(globals()),
    2,
    device="cuda",
    timeout=250.0,
)


def test_communicators_go_before_compute_and_copies_do_not() -> None:
    device = torch.device("cuda", 0)
    assert communicator_stream(device).stream.priority < copy_stream(device, "in").stream.priority

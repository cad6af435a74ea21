"""No memory is read before it is there, nor given to someone else while it is in use."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import Block, TiedGPT, tokens_of
from stream_races import Races, RecordedCuda, recorded_streams, tensors_in
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode

import graphshard
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops, packing
from graphshard.program.aliases import gather_waits
from graphshard.program.program import Program
from graphshard.runtime.collectives import BoundCollective, Pending
from graphshard.runtime.streams import Copy, Launched, communicator_stream, copy_stream

FP16 = graphshard.MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float16)
OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "zero2": {"strategy": "SHARD_GRAD_OP"},
    "no_shard": {"strategy": "NO_SHARD"},
    "zero1": {"strategy": "SHARD_OPTIMIZER"},
    "hybrid": {"strategy": "HYBRID_SHARD"},
    "hybrid_zero2": {"strategy": "HYBRID_SHARD_ZERO2"},
    "partly": {"reshard_after_forward": 2},
    "ahead": {"forward_prefetch": 2, "reshard_root": True},
    "post": {"backward_prefetch": "post"},
    "overlap": {"schedule": "overlap", "hardware": "h100-sxm"},
    "fp16": {"mixed_precision": FP16},
    "recompute": {"recompute": "units"},
    "offload": {"offload": ("params", "activations")},
    "offload_fp16": {"offload": "params", "mixed_precision": FP16},
    "offload_params": {"offload": "params", "schedule": "overlap", "hardware": "h100-sxm"},
    "offload_recompute": {"offload": "activations", "recompute": "selective"},
}


@pytest.fixture(scope="module", autouse=True)
def four_ranks() -> Iterator[None]:
    """One rank of four, on torch's "fake" backend, which packs small tensors as NCCL does."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = dict(packing.GATHER_BELOW), dict(packing.REDUCE_BELOW)
    packing.GATHER_BELOW["fake"], packing.REDUCE_BELOW["fake"] = 2048, 512
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()
    for table, old in zip((packing.GATHER_BELOW, packing.REDUCE_BELOW), before, strict=True):
        table.clear()
        table.update(old)


class Training:
    """A small model on recorded streams, captured; each step notes accesses to memory."""

    def __init__(self, cuda: RecordedCuda, passes: Any = (), **fields: Any) -> None:
        self.cuda = cuda
        with recorded_streams(cuda):
            torch.manual_seed(0)
            mesh = None
            if str(fields.get("strategy", "")).startswith("HYBRID"):
                mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp"))
            policy = graphshard.BlockPolicy(Block, **fields)
            self.model = graphshard.compile(TiedGPT(layers=3), policy, mesh=mesh, passes=passes)
            self.optim = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
            self.batch = tokens_of(1, 0)
            self.model(*self.batch).backward()
        self.optim.zero_grad()

    def step(self, races: Races, *, accumulate: bool = False, forward_only: bool = False) -> None:
        model = self.model
        on_host = model.plan.policy.offloads("params")
        if on_host:
            races.lies_on_host(list(model.parameters()))
        with recorded_streams(self.cuda), races:
            with model.no_sync() if accumulate else nullcontext():
                loss = model(*self.batch)
                if forward_only:
                    del loss
                else:
                    loss.backward()
            if accumulate:
                model(*self.batch).backward()
            if on_host:
                grads = [p.grad for p in model.parameters() if p.grad is not None]
                races.by_host("the optimizer", [grads, list(model.parameters())])
                del grads
        self.optim.step()
        self.optim.zero_grad()


def watched(
    cuda: RecordedCuda, steps: int = 2, *, passes: Any = (), how: Any = None, **fields: Any
) -> Races:
    training, races = Training(cuda, passes, **fields), Races(cuda)
    for _ in range(steps):
        training.step(races, **(how or {}))
    return races


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_no_strategy_races(options: dict[str, Any]) -> None:
    cuda = RecordedCuda()
    races = watched(cuda, **options)
    assert races.found == []
    assert races.accesses > 300
    assert races.freed_behind_side_streams > 5, "side streams were not used"
    assert len(cuda.waits) > 10
    host = [wait for wait in cuda.waits if wait.startswith("the host waits")]
    # With parameters on the host, for copies in each direction, where forward and backward end.
    assert bool(host) == ("params" in options.get("offload", ()))


def test_accumulation_and_forwards_without_backward_do_not_race() -> None:
    assert watched(RecordedCuda(), how={"accumulate": True}).found == []
    races = watched(RecordedCuda(), how={"forward_only": True}, strategy="SHARD_GRAD_OP")
    assert races.found == []


@pytest.mark.parametrize("precision", [None, FP16])
def test_gathers_wait_for_shards_from_the_host_and_compute_does_not(precision: Any) -> None:
    cuda = RecordedCuda()
    training = Training(cuda, offload="params", mixed_precision=precision)
    begin = len(cuda.waits)
    with recorded_streams(cuda), torch.no_grad():
        training.model(*training.batch)
    program = training.model.program
    assert not program.grad
    arrivals = [node for node in program.nodes() if node.target is ops.arrive]
    waits = [wait for wait in cuda.waits[begin:] if wait.endswith("waits for an event")]
    by_compute = [wait for wait in waits if wait.startswith("compute")]
    gathers = [event for event in program.schedule() if event.op == "all_gather"]
    assert len(by_compute) == len(gathers)
    assert len(waits) - len(by_compute) == len(arrivals) > 10


class Copies(TorchDispatchMode):
    """Notes the copies that change a dtype: the stream, and how many tensors of which memory."""

    def __init__(self, cuda: RecordedCuda) -> None:
        super().__init__()
        self.cuda = cuda
        self.seen: list[tuple[str, set[int]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._foreach_copy_.default, torch.ops.aten._to_copy.default):
            read = tensors_in(args[-1])
            if all(tensor.dtype == torch.float32 for tensor in read):
                self.seen.append((self.cuda.current.name, {t.data_ptr() for t in read}))
        return func(*args, **(kwargs or {}))


def test_shards_are_cast_by_one_launch_beside_compute() -> None:
    cuda = RecordedCuda()
    training = Training(cuda, **OPTIONS["fp16"])
    model, copies = training.model, Copies(cuda)
    shards = {t.data_ptr() for t in tensors_in(list(model.parameters()))}
    with recorded_streams(cuda), copies:
        model(*training.batch).backward()
    casts = [(stream, read) for stream, read in copies.seen if read & shards]
    gathers = [event for event in model.program.schedule() if event.op == "all_gather"]
    assert len(casts) == len(gathers) > 4
    assert all(stream.startswith("side stream") for stream, _ in casts)
    assert sum(len(read) for _, read in casts) > 3 * len(casts)


def test_communicators_go_before_compute_and_copies_do_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = RecordedCuda()
    monkeypatch.setattr(torch.cuda, "Stream", cuda.Stream)
    device = torch.device("cuda", 0)
    communicator_stream(device)
    copy_stream.__wrapped__(device, "in")
    assert cuda.priorities == [-1, 0]


# -- it can fail --------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "share", "each"), [("full", 0.9, 1), ("offload", 0.5, 4)])
def test_a_wait_left_out_shows(name: str, share: float, each: int) -> None:
    """Leave out waits of a step in turn. Not all are needed: a later one covers some."""
    cuda = RecordedCuda()
    training = Training(cuda, **OPTIONS[name])
    begin = len(cuda.waits)
    training.step(Races(cuda))
    waits = cuda.waits[begin:]
    left_out = [i for i, wait in enumerate(waits) if wait.startswith("compute waits")]
    left_out = left_out[::each]
    caught = []
    for index in left_out:
        cuda.forgets = frozenset({len(cuda.waits) + index})
        races = Races(cuda)
        training.step(races)
        caught.append(bool(races.found))
    assert len(caught) >= 10
    assert sum(caught) >= share * len(caught), caught


def test_what_waits_for_nothing_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Launched, "join", lambda self: None)
    races = watched(RecordedCuda(), steps=1)
    assert any("reads what side stream" in found for found in races.found)
    assert any(found.startswith("free on compute gives back") for found in races.found)


def test_a_launch_that_does_not_wait_for_compute_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    class Hasty(RecordedCuda):
        def Stream(self, device: torch.device, priority: int = 0) -> Any:  # noqa: N802
            stream = super().Stream(device, priority)
            stream.wait_stream = lambda other: None
            return stream

    races = watched(Hasty(), steps=1)
    assert any("reads what compute wrote" in found for found in races.found)


def test_operands_let_go_of_at_the_launch_show(monkeypatch: pytest.MonkeyPatch) -> None:
    start = BoundCollective.start

    def forgetful(self: BoundCollective, pending: Pending, *args: Any) -> None:
        start(self, pending, *args)
        pending.operands = [torch.empty(0) for _ in pending.operands]

    monkeypatch.setattr(BoundCollective, "start", forgetful)
    races = watched(RecordedCuda(), steps=1, mixed_precision=FP16)
    assert any(found.startswith("free on compute gives back") for found in races.found)


def test_a_copy_whose_source_goes_at_once_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    make = Copy.__init__

    def forgetful(self: Copy, *args: Any) -> None:
        make(self, *args)
        self.source = None

    monkeypatch.setattr(Copy, "__init__", forgetful)
    races = watched(RecordedCuda(), steps=1, offload="activations")
    assert any(found.startswith("free on compute gives back") for found in races.found)


def test_what_is_dropped_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error between a launch and its wait: memory goes back behind the side stream all the
    same."""

    def raises(*args: Any) -> None:
        raise RuntimeError("in between")

    def failed(cuda: RecordedCuda) -> Races:
        with recorded_streams(cuda), ExitStack() as stack:
            model = graphshard.compile(TiedGPT(layers=3), graphshard.BlockPolicy(Block))
            batch = tokens_of(1, 0)
            model(*batch).backward()
            races = stack.enter_context(Races(cuda))
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.setattr(BoundCollective, "wait", raises)
            with pytest.raises(RuntimeError, match="in between"):
                model(*batch)
        return races

    races = failed(RecordedCuda())
    assert races.found == []
    assert races.freed_behind_side_streams
    monkeypatch.setattr(Launched, "drop", lambda self: None)
    assert failed(RecordedCuda()).found


# -- any order ----------------------------------------------------------------------------------


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


@settings(max_examples=6, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    seed=st.integers(0, 1 << 30),
    name=st.sampled_from(["full", "zero2", "ahead", "offload", "fp16", "hybrid"]),
)
def test_no_valid_order_races(seed: int, name: str) -> None:
    assert watched(RecordedCuda(), steps=1, passes=[Shuffled(seed)], **OPTIONS[name]).found == []


def test_orders_are_shuffled() -> None:
    orders = {
        tuple(Training(RecordedCuda(), [Shuffled(seed)]).model.program.schedule())
        for seed in range(3)
    }
    assert len(orders) == 3

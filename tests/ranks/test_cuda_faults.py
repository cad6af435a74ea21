"""The CUDA runtime made of CPU threads shows what it is for: seeded faults.

Each fault takes away an order that the code of streams, collectives, copies, graphs makes. The
runtime tells of a use of memory that was not waited for, or two ranks end with other weights or
losses than without the fault, or in an error. Without it they do none of these.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from ranks import RankError, is_made_up, run_ranks
from test_cuda_ranks import batch, model
from torch import Tensor

import graphshard
from examples.gpt import Block
from graphshard.passes import offload_activations
from graphshard.runtime import cuda_graphs, gather, step
from graphshard.runtime.collectives import BoundCollective
from graphshard.runtime.cuda_graphs import _CapturedGraph
from graphshard.runtime.gather import AllGather
from graphshard.runtime.reduce import AllReduce, ReduceScatterByReduce
from graphshard.runtime.streams import Copy, Launched, SideStream
from graphshard.runtime.tickets import Tickets

pytestmark = pytest.mark.cuda

Put = Callable[..., None]
"""`monkeypatch.setattr`, in the process of a rank."""

FULL: dict[str, Any] = {}
OVERLAP: dict[str, Any] = {"schedule": "overlap"}
BF16 = {**OVERLAP, "mixed_precision": graphshard.MixedPrecision(torch.bfloat16)}
REPLICAS = {"strategy": "NO_SHARD"}
OFFLOAD = {**OVERLAP, "offload": ("params", "activations")}
GRAPHS = {"cuda_graph": True}


# -- streams -------------------------------------------------------------------------------------


def compute_does_not_wait(put: Put, rank: int) -> None:
    put(Launched, "join", lambda self: None)


def a_launch_does_not_wait(put: Put, rank: int) -> None:
    def launch(self: SideStream, work: Callable[..., Any], *args: Any) -> Launched:
        with self.cuda.stream(self.stream):
            work(*args)
        compute = self.cuda.current_stream(self.device)
        return Launched(self.stream.record_event(), compute, self.cuda)

    put(SideStream, "launch", launch)


def an_event_is_recorded_before_the_launch(put: Put, rank: int) -> None:
    def launch(self: SideStream, work: Callable[..., Any], *args: Any) -> Launched:
        compute = self.cuda.current_stream(self.device)
        self.stream.wait_stream(compute)
        event = self.stream.record_event()
        with self.cuda.stream(self.stream):
            work(*args)
        return Launched(event, compute, self.cuda)

    put(SideStream, "launch", launch)


def a_stream_does_not_follow_another(put: Put, rank: int) -> None:
    put(SideStream, "follow", lambda self, launched: None)


# -- collectives ---------------------------------------------------------------------------------


def nobody_waits_for(cls: type[BoundCollective], put: Put, rank: int) -> None:
    wait = cls.wait

    def at_once(self: BoundCollective, pending: Any) -> Any:
        kept.append(pending.launched)
        pending.launched = None
        return wait(self, pending)

    kept: list[Any] = []
    put(cls, "wait", at_once)


def operands_are_given_back_at_the_launch(cls: Any, put: Put, rank: int) -> None:
    """What is allocated before the wait takes their memory."""
    call, wait = cls.__call__, cls.wait
    given_back: dict[int, list[Tensor]] = {}

    def launch(self: Any, given: Any) -> Any:
        pending = call(self, given)
        given_back[id(pending)] = [t.to("meta") for t in pending.operands]
        pending.operands = [t.new_empty(0) for t in pending.operands]
        return pending

    def allocate_and_wait(self: Any, pending: Any) -> Any:
        for like in given_back.pop(id(pending)):
            torch.zeros_like(like, device=torch.cuda.current_device())
        return wait(self, pending)

    put(cls, "__call__", launch)
    put(cls, "wait", allocate_and_wait)


def shards_are_cast_behind_the_launch(put: Put, rank: int) -> None:
    def launch_and_copy(copies: Any, launch: Callable[..., Any], *args: Any) -> Any:
        work = launch(*args)
        gather._copy_all(copies)
        return work

    put(gather, "_copy_and_launch", launch_and_copy)


def a_rank_leaves_out(cls: type[BoundCollective], put: Put, rank: int) -> None:
    start, count = cls.start, [0]

    def without(self: BoundCollective, pending: Any, launch: Any, *args: Any) -> None:
        count[0] += 1
        if rank == 0 or count[0] != 2:
            start(self, pending, launch, *args)

    put(cls, "start", without)


# -- copies to and from the host -----------------------------------------------------------------


def a_copy_arrives_unwaited_for(put: Put, rank: int) -> None:
    kept: list[Any] = []

    def arrive(self: Copy) -> Tensor:
        kept.append(self.launched)
        self.launched = self.source = None
        return self.tensor

    put(Copy, "arrive", arrive)


def a_source_is_given_back_at_once(put: Put, rank: int) -> None:
    make = Copy.__init__

    def forgetful(self: Copy, *args: Any) -> None:
        make(self, *args)
        self.source = None

    put(Copy, "__init__", forgetful)


def the_host_does_not_wait_for_copies(put: Put, rank: int) -> None:
    put(step, "wait_for_copies", lambda device: None)


# -- CUDA graphs ---------------------------------------------------------------------------------


def a_replay_reads_the_first_inputs(put: Put, rank: int) -> None:
    def replay(self: _CapturedGraph, copied: Any) -> Any:
        self.graph.replay()
        return self.results

    put(_CapturedGraph, "replay_with", replay)


def nobody_waits_for_a_replay(put: Put, rank: int) -> None:
    replay = _CapturedGraph.replay_with

    def apart(self: _CapturedGraph, copied: Any) -> Any:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            return replay(self, copied)

    put(_CapturedGraph, "replay_with", apart)


def results_are_not_copied_out(put: Put, rank: int) -> None:
    put(cuda_graphs, "_cloned", lambda value: value)


@dataclass(frozen=True)
class Fault:
    """A fault, and the policy it is tried under."""

    put: Callable[[Put, int], None]
    fields: dict[str, Any] = field(default_factory=dict)


FAULTS = {
    "no wait": Fault(compute_does_not_wait),
    "no wait, bf16": Fault(compute_does_not_wait, BF16),
    "a launch at once": Fault(a_launch_does_not_wait),
    "an event too early": Fault(an_event_is_recorded_before_the_launch),
    "no wait for a gather": Fault(partial(nobody_waits_for, AllGather), OVERLAP),
    "no wait for a reduce": Fault(partial(nobody_waits_for, ReduceScatterByReduce)),
    "no wait for an all_reduce": Fault(partial(nobody_waits_for, AllReduce), REPLICAS),
    "operands of gathers": Fault(partial(operands_are_given_back_at_the_launch, AllGather), BF16),
    "operands of reduces": Fault(
        partial(operands_are_given_back_at_the_launch, ReduceScatterByReduce)
    ),
    "casts behind the launch": Fault(shards_are_cast_behind_the_launch, BF16),
    "a gather left out": Fault(partial(a_rank_leaves_out, AllGather)),
    "a reduce left out": Fault(partial(a_rank_leaves_out, ReduceScatterByReduce)),
    "streams side by side": Fault(a_stream_does_not_follow_another, OFFLOAD),
    "copies arrive unwaited for": Fault(a_copy_arrives_unwaited_for, OFFLOAD),
    "sources of copies": Fault(a_source_is_given_back_at_once, OFFLOAD),
    "the host does not wait": Fault(the_host_does_not_wait_for_copies, OFFLOAD),
    "graphs: old inputs": Fault(a_replay_reads_the_first_inputs, GRAPHS),
    "graphs: no wait": Fault(nobody_waits_for_a_replay, GRAPHS),
    "graphs: results in place": Fault(results_are_not_copied_out, GRAPHS),
}


DELAYED = ("the host does not wait",)
"""Faults that are seen where streams are slow."""
BREAKING = (
    "a gather left out",
    "a reduce left out",
    "graphs: no wait",
)
"""Faults by which one rank ends, or ranks wait for each other."""


def trained(rank: int, fault: Fault, *, without: bool = False) -> list[Tensor]:
    """Losses and weights of a run in which the host reads nothing before its end.

    The fault comes behind three steps, so that ranks agree on their programs, and goes before
    weights are gathered. Meanwhile ranks do not compare their calls, or wrong tickets would part
    them.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    sharded = graphshard.compile(model(), graphshard.BlockPolicy({Block}, **fault.fields))
    optim = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    losses = []
    with pytest.MonkeyPatch.context() as patch:
        for number in range(5):
            if number == 3 and not without:
                patch.setattr(Tickets, "send", lambda self, call: None)
                fault.put(patch.setattr, rank)
            loss = sharded(*(ids.to(device) for ids in batch(number, rank, 0)))
            loss.backward()
            losses.append(loss.detach())
            optim.step()
            optim.zero_grad()
        torch.cuda.synchronize()
    weights = sharded.full_state_dict().values()
    return [value.cpu().clone() for value in (*losses, *weights)]


def report_races(whether: bool) -> None:
    """Whether a race is an error of the device."""
    ctypes.CDLL(None).cuda_on_cpu_report_races(whether)


def race() -> str:
    """The first race since the last call, in words, or nothing."""
    found = ctypes.create_string_buffer(2000)
    ctypes.CDLL(None).cuda_on_cpu_take_race(found, len(found))
    return found.value.decode()


def seen(rank: int, faults: Sequence[str]) -> dict[str, str]:
    """By fault, how it is seen: a race, other numbers, an error, or nothing.

    Races are told and are no errors, so that the next fault finds a device that works.
    """
    offload_activations.ON_CUDA = 1024  # so that those of a small model leave, too
    report_races(False)
    expected: dict[str, list[Tensor]] = {}
    how = {}
    for name in faults:
        fault = FAULTS[name]
        key = str(fault.fields)
        if key not in expected:
            expected[key], again = (trained(rank, fault, without=True) for _ in range(2))
            assert all(map(torch.equal, again, expected[key])), "other numbers without a fault"
            assert not (without := race()), without
        try:
            found = trained(rank, fault)
            same = all(map(torch.equal, found, expected[key]))
            how[name] = race() or ("" if same else "other numbers")
        except torch.AcceleratorError as error:
            how[name] = repr(error)
        torch.cuda.synchronize()
        race()
    return how


@pytest.fixture(autouse=True)
def on_threads() -> None:
    if not is_made_up():
        pytest.skip("on a GPU a race is seen by luck")


run = partial(run_ranks, seen, 2, device="cuda", group_timeout=20.0)


def test_faults_are_seen() -> None:
    alone = (*DELAYED, *BREAKING)
    first, second = run([name for name in FAULTS if name not in alone], timeout=400.0)
    assert [name for name, how in first.items() if not (how or second[name])] == []


@pytest.mark.parametrize(
    "fault",
    [*DELAYED, *(pytest.param(fault, marks=pytest.mark.slow) for fault in BREAKING)],
)
def test_a_fault_is_seen_under_delays(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that breaks ranks also as an error: a process that ends, or ranks that wait."""
    monkeypatch.setenv("CUDA_ON_CPU_DELAY_US", "300")
    monkeypatch.setenv("CUDA_ON_CPU_SEED", "1")
    try:
        found = run([fault], timeout=40.0)
    except RankError:
        assert fault in BREAKING
        return
    assert any(how[fault] for how in found)

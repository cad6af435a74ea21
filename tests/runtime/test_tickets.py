"""Ranks that part ways where the host does not wait for other ranks, as with NCCL."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as dist
from ranks import checks_of, on_ranks

from graphshard.errors import CollectiveError, FingerprintError
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.calls import Call, Fingerprint
from graphshard.runtime.group import Group, find_group
from graphshard.runtime.store import Meetings
from graphshard.runtime.tickets import Tickets

TIMEOUT = 2.0


def agreed(*names: str) -> tuple[Agreement, dict[str, Fingerprint]]:
    """As on NCCL, all ranks having begun the programs `names` before."""
    process_group = dist.new_group(timeout=timedelta(seconds=60))
    group = find_group(None, None)
    group = Group(process_group, group.rank, group.size, group.device, backend="nccl")
    group.timeout = timedelta(seconds=TIMEOUT)
    agreement = Agreement(group)
    agreement.join()
    programs = {
        name: Fingerprint((f"{name} all_gather of layer over 2 ranks: layer.{name} [4] float32",))
        for name in names
    }
    for program in programs.values():
        agreement.require(program)
    return agreement, programs


def known(agreement: Agreement) -> None:
    """Return once the device has compared all tickets, for which the host never waits."""
    tickets: Any = agreement._tickets
    deadline = time.monotonic() + 10.0
    while any(t.differs() is None for t in tickets._under_way) and time.monotonic() < deadline:
        time.sleep(0.01)


def equal_calls(rank: int) -> None:
    agreement, programs = agreed("forward", "backward")
    for _ in range(5):
        for program in programs.values():
            agreement.require(program)
    known(agreement)
    agreement.require(programs["forward"])
    tickets: Any = agreement._tickets
    assert len(tickets._under_way) == 1
    assert tickets._count == 11  # none where programs are new


def another_program(rank: int) -> None:
    """Both know both, and take another one each: the next call is an error."""
    agreement, programs = agreed("forward", "other", "backward")
    agreement.require(programs["forward"])
    agreement.require(programs[("forward", "other")[rank]])
    known(agreement)
    with pytest.raises(FingerprintError) as caught:
        agreement.require(programs["backward"])
    text = str(caught.value)
    assert "the ranks would issue different collectives and hang" in text
    assert "rank 0: forward all_gather of layer over 2 ranks: layer.forward [4] float32" in text
    assert "rank 1: other all_gather of layer over 2 ranks: layer.other [4] float32" in text
    assert f"noticed by rank {rank} in its next call" in text
    with pytest.raises(FingerprintError):  # and stays one
        agreement.require(programs["backward"])


def a_device_that_compares_wrongly(rank: int) -> None:
    """The numbers differ where the calls are the same."""
    agreement, programs = agreed("forward")
    agreement.require(programs["forward"])
    known(agreement)
    tickets: Any = agreement._tickets
    tickets._under_way[-1].received[0] += 1
    with pytest.raises(FingerprintError, match=r"each rank is about to begin .* wrong values"):
        agreement.require(programs["forward"])


def another_call(rank: int) -> None:
    """One rank clips, the other begins a forward; neither waits."""
    agreement, programs = agreed("forward")
    with agreement.call("clip_grad_norm_(max_norm=1.0)"), agreement.part(waits=False):
        pass
    if rank == 0:
        agreement.require(programs["forward"])
    else:
        with agreement.call("clip_grad_norm_(max_norm=1.0)"), agreement.part(waits=False):
            pass
    known(agreement)
    with pytest.raises(FingerprintError) as caught:
        agreement.require(programs["forward"])
    assert "rank 0 is about to begin 'forward all_gather of layer over 2 ranks'" in str(
        caught.value
    )
    assert "rank 1 calls clip_grad_norm_(max_norm=1.0)" in str(caught.value)


def a_new_program_on_one_rank(rank: int) -> None:
    """It waits in the Store for the other, which has gone on, and says where that one is."""
    agreement, programs = agreed("forward")
    new = Fingerprint(("new all_gather of layer over 2 ranks: layer.new [4] float32",))
    if rank == 0:
        agreement.require(programs["forward"])
    else:
        with pytest.raises(CollectiveError) as caught:
            agreement.require(new)
        assert (
            f"did not get here within {TIMEOUT:g} s; rank 0 waits for the other ranks and is"
            in (str(caught.value))
        )
        assert "about to begin 'forward all_gather of layer over 2 ranks'" in str(caught.value)
    dist.barrier()


def calls_that_met(rank: int) -> None:
    """What differed where all ranks met is an error there, and forgotten."""
    agreement, programs = agreed("forward")
    for _ in range(2):
        with (
            pytest.raises(FingerprintError, match=r"rank 0 calls a\(0\), rank 1 calls a\(1\)"),
            agreement.call(f"a({rank})"),
            agreement.part(),
        ):
            pass
        with agreement.call("b()"), agreement.part():
            pass
        agreement.require(programs["forward"])
        known(agreement)


def a_rank_that_is_stuck(rank: int) -> None:
    """Its thread says for it what it does; one that cannot is named."""
    agreement, programs = agreed("forward", "other")
    agreement.require(programs[("forward", "other")[rank]])
    known(agreement)
    if rank == 0:
        with pytest.raises(FingerprintError, match="rank 1: other all_gather of layer"):
            agreement.require(programs["forward"])
    dist.barrier()  # in which rank 1 is, as in a wait for its device


def a_rank_of_which_nothing_is_known(rank: int) -> None:
    agreement, programs = agreed("forward", "other")
    agreement.require(programs[("forward", "other")[rank]])
    known(agreement)
    if rank == 1:
        agreement.group.here.looks_too = None  # as if it had been stopped
    else:
        with pytest.raises(FingerprintError) as caught:
            agreement.require(programs["forward"])
        assert "rank 0 is about to begin 'forward all_gather of layer over" in str(caught.value)
        assert ", and of rank 1 nothing is known (noticed by rank 0" in str(caught.value)
    dist.barrier()


class Launches:
    """A side stream whose work is done at once, and known when the test says so."""

    def __init__(self) -> None:
        self.known = False
        self.joined = 0

    def launch(self, work: Callable[..., Any], *args: Any) -> Launches:
        work(*args)
        return self

    event = property(lambda self: self)

    def query(self) -> bool:
        return self.known

    def drop(self) -> None:
        self.joined += 1


def on_a_side_stream(rank: int) -> None:
    """As on CUDA: nothing is said before the event has passed, and memory goes back behind it."""
    process_group = dist.new_group(timeout=timedelta(seconds=60))
    group = find_group(None, None)
    stream: Any = Launches()
    group = Group(process_group, rank, 2, group.device, backend="nccl", side_stream=stream)
    store = dist.PrefixStore("side", group.store)
    group.here.attach(Meetings(store, rank, 2, 60.0))
    tickets = Tickets(group, store, 1)
    tickets._options.asyncOp = True  # Gloo has nothing else
    tickets.send(Call("calls a()"))
    tickets.send(Call(f"calls b({rank})"))
    assert not tickets.look()
    tickets.drop_known()
    assert stream.joined == 0
    assert group.here._here()[1].text == "the other ranks and calls a()"
    stream.known = True
    assert tickets.look()
    tickets.drop_known()
    assert stream.joined == 1
    calls = tickets.calls(10.0)
    assert {r: call.text for r, (_, call) in calls.items()} == {
        0: "calls b(0)",
        1: "calls b(1)",
    }
    del tickets
    assert stream.joined == 2


def no_host_waits(rank: int) -> None:
    """A rank that is ahead goes on, whatever it knows of the other."""
    agreement, programs = agreed("forward")
    dist.barrier()
    if rank == 1:
        time.sleep(1.0)
    begin = time.monotonic()
    for _ in range(20):
        agreement.require(programs["forward"])
    took = time.monotonic() - begin
    assert took < 0.8, took
    dist.barrier()


test_on_two_ranks = on_ranks(checks_of(globals()), 2)

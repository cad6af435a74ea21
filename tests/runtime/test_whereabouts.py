"""The error of a rank that waits in vain says where all ranks are."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from models import Block, TiedGPT, tokens_of
from ranks import run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.errors import CollectiveError
from graphshard.runtime import whereabouts
from graphshard.runtime.collectives import BoundCollective, Pending
from graphshard.runtime.store import Meetings
from graphshard.runtime.whereabouts import At, Whereabouts, _Watch

TIMEOUT = 3.0
BLOCK = graphshard.BlockPolicy({Block}, merge_below=0)


def store_of(sharded: graphshard.ShardedModule) -> Any:
    return sharded._graphshard.bindings.agreement.meetings.store


def lines(store: Any) -> list[int]:
    """The ranks that have a line in the Store."""
    return [rank for rank in range(dist.get_world_size()) if store.check([f"at/{rank}"])]


def soon(done: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 10.0
    while not done() and time.monotonic() < deadline:
        time.sleep(0.05)
    return done()


def with_short_timeout() -> graphshard.ShardedModule:
    """A module that has run a step, on a group that waits `TIMEOUT` seconds from now on."""
    sharded = graphshard.compile(TiedGPT(3), BLOCK)
    sharded(*tokens_of(0, 0)).backward()
    dist.barrier()
    group = dist.new_group(timeout=timedelta(seconds=TIMEOUT))
    sharded.rebind(DeviceMesh.from_group(group, "cpu"))
    return sharded


def one_stays_behind(rank: int, how: str, folder: Path) -> str:
    sharded = with_short_timeout()
    store, tokens = store_of(sharded), tokens_of(rank, 0)
    # All pause, say so, and take it back when they go on.
    assert soon(lambda: len(lines(store)) == dist.get_world_size())
    dist.barrier()
    sharded(*tokens).backward()
    assert soon(lambda: not lines(store) or len(lines(store)) == 3)
    if rank == 2:
        (folder / "pid").write_text(str(os.getpid()))
        wait = BoundCollective.wait

        def slow(self: BoundCollective, pending: Pending) -> list[Tensor]:
            if (self.unit, self.phase) == ("blocks.1", "backward"):
                if how == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                time.sleep(TIMEOUT + 2)
            return wait(self, pending)

        BoundCollective.wait = slow  # type: ignore[method-assign]
    loss = sharded(*tokens)
    begin = time.monotonic()
    with pytest.raises(CollectiveError) as caught:
        loss.backward()
    if rank != 2:
        assert TIMEOUT - 1 < time.monotonic() - begin < 2 * TIMEOUT
    if rank == 0 and how == "stopped":
        time.sleep(1.0)
        os.kill(int((folder / "pid").read_text()), signal.SIGCONT)
    return str(caught.value)


def all_say_where_they_are(rank: int) -> float:
    sharded = graphshard.compile(TiedGPT(3), BLOCK)
    assert soon(lambda: len(lines(store_of(sharded))) == dist.get_world_size())
    dist.barrier()
    return sharded._graphshard.bindings.group.here.patience


def test_ranks_that_were_given_no_mesh() -> None:
    assert run_ranks(all_say_where_they_are, 2, group_timeout=4.0) == [1.0, 1.0]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["asleep", "stopped"])
def test_a_rank_that_stays_behind(how: str, tmp_path: Path) -> None:
    texts = run_ranks(one_stays_behind, 3, how, tmp_path)
    place = "it has done nothing after reduce_scatter of blocks.2 in backward"
    last = {"asleep": f"has not come there: {place}", "stopped": "says nothing: stopped, dead"}
    for rank in (0, 1):
        text = texts[rank]
        assert text.startswith(f"reduce_scatter of unit blocks.1 in backward failed on rank {rank}")
        assert f"; rank {1 - rank} is there too; rank 2 {last[how]}" in text


# -- in one process -------------------------------------------------------------------------------


class Event:
    """An event of CUDA."""

    done = False

    def query(self) -> bool:
        return self.done


GATHER = [(At(n, f"gather {n}", True), At(n, f"gather {n}", False)) for n in range(4)]


class Ranks:
    """The whereabouts of several ranks, over one Store, which are looked at by hand."""

    def __init__(self, size: int, **options: Any) -> None:
        self.store = dist.HashStore()
        self.all = [Whereabouts() for _ in range(size)]
        for rank, here in enumerate(self.all):
            here.attach(Meetings(self.store, rank, size, TIMEOUT), **options)

    def pass_by(self, seconds: float) -> None:
        """Let time pass, and look."""
        for here in self.all:
            here.look()
        Ranks.now += seconds
        for here in self.all:
            here.look()

    now = 0.0


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ranks]:
    monkeypatch.setattr(_Watch, "add", lambda watch, here: None)
    monkeypatch.setattr(whereabouts.time, "monotonic", lambda: Ranks.now)
    return Ranks


def test_what_is_said_of_each_rank(ranks: Callable[..., Ranks]) -> None:
    made = ranks(6)
    waits = [at for at, _ in GATHER]
    places = [(2, waits[2]), (2, waits[2]), (2, GATHER[2][1]), (2, waits[1]), (1, waits[3])]
    for here, (turn, at) in zip(made.all, places, strict=False):
        here.turn, here.at = turn, at
    mute = made.all.pop()
    made.pass_by(TIMEOUT / 8)
    assert made.all[0].others() == ""  # it has not waited for long
    made.pass_by(TIMEOUT / 4)
    assert made.all[0].others() == (
        "; rank 1 is there too"
        "; rank 2 is past that: it has done nothing after gather 2"
        "; rank 3 has not come there: it waits for gather 1"
        "; rank 4 has not come there: it waits for gather 3"
        "; rank 5 says nothing: stopped, dead, cut off, or busy in code that never pauses"
    )
    for here in made.all:
        here.at = GATHER[0][0]
    made.pass_by(0.0)
    assert not any(made.store.check([f"at/{rank}"]) for rank in range(6))
    assert not mute.line.told
    made.all[0].turn = 3
    made.pass_by(TIMEOUT)
    assert "each of ranks 1 to 4 has not come there: it waits for gather 0" in made.all[0].others()


def test_a_line_that_could_not_be_taken_back(ranks: Callable[..., Ranks]) -> None:
    made = ranks(2, meets=True)
    made.pass_by(TIMEOUT)
    stopped = made.all.pop()
    assert stopped.line.told
    here = made.all[0]
    here.turn, here.at = 1, GATHER[0][0]
    made.pass_by(TIMEOUT)
    assert "; rank 1 has not come there: it has done nothing after the beginning" in here.others()
    here.at = GATHER[1][0]  # so both have met in turn 1
    made.pass_by(TIMEOUT)
    assert "; rank 1 says nothing" in here.others()


def test_a_device_that_is_behind_its_host(
    ranks: Callable[..., Ranks], caplog: pytest.LogCaptureFixture
) -> None:
    """The host has issued all, and waits for nothing."""
    made = ranks(2)
    here, other = made.all
    events = [Event(), Event()]
    for (at, past), event in zip(GATHER, events, strict=False):
        here.launched(at, event)
        here.at = past
    with here.capturing():
        here.launched(GATHER[3][0], Event())  # which nobody may ask
    other.at = GATHER[1][0]
    made.pass_by(TIMEOUT / 3)
    assert "; rank 1 is past that: it waits for gather 1" in here.others()
    assert not caplog.records
    made.pass_by(TIMEOUT / 3)
    assert "rank 0 of 2 waits for gather 0 for 2 s, of at most 3 s; rank 1 is past" in caplog.text
    events[0].done = True
    made.pass_by(TIMEOUT / 2)
    assert "; rank 1 is there too" in here.others()
    events[1].done = True
    made.pass_by(0.0)
    assert here.others() == ""
    made.pass_by(TIMEOUT / 3)
    assert "; rank 1 has not come there: it waits for gather 1" in here.others()


def test_a_store_that_is_gone(ranks: Callable[..., Ranks]) -> None:
    made = ranks(2)

    class Gone:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError("connection reset")

    made.all[0].attach(Meetings(Gone(), 0, 2, TIMEOUT))
    made.pass_by(TIMEOUT)
    assert made.all[0].others() == ""


def test_the_thread_forgets_modules_that_are_gone() -> None:
    done: list[str] = []

    class Notes(dist.HashStore):
        """Notes what the thread does: between two looks a key may come and go unseen."""

        def set(self, key: str, value: str) -> None:
            done.append(f"set {key}")

        def delete_key(self, key: str) -> bool:
            done.append(f"delete {key}")
            return True

        def clone(self) -> Notes:
            return self

    here = Whereabouts()
    here.attach(Meetings(Notes(), 0, 2, 0.2))
    assert soon(lambda: done == ["set at/0"])
    here.at = GATHER[1][0]
    assert soon(lambda: done == ["set at/0", "delete at/0", "set at/0"])
    del here
    assert soon(lambda: done == ["set at/0", "delete at/0"] * 2)

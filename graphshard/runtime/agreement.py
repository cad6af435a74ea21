"""Ranks tell each other what they are about to do, and whether it failed; see README.md."""

from __future__ import annotations

import logging
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.distributed.distributed_c10d import PrefixStore

from graphshard.errors import CollectiveError, FingerprintError, GraphshardError
from graphshard.program.program import BACKWARD, FORWARD
from graphshard.runtime.calls import (
    CANNOT_RUN,
    Call,
    Fingerprint,
    Report,
    difference,
    first_line,
    flags_of,
    is_shared,
    judged,
    mark,
    shared,
    verdict_of,
)
from graphshard.runtime.group import Group
from graphshard.runtime.store import BoundedStore, Meetings
from graphshard.runtime.tickets import Tickets
from graphshard.runtime.whereabouts import connection_of

logger = logging.getLogger("graphshard")

_POLL_SECONDS = 0.02

_ANSWER_SECONDS = 30.0
"""How long a rank waits for an answer of the Store, or the group's timeout if that is shorter."""

_NOTE_SECONDS = 0.5
"""How long a rank that lost the others waits for what they say of themselves."""


@dataclass
class Part:
    """The part of a call that a rank runs by itself.

    same: lines of text that must be the same on all ranks at its end.
    flag: what this rank tells the others at its end.
    flags: afterwards, what each rank told.
    error: of this rank, if it failed; None once the others know. An error that a function of its
        traceback refers to keeps all that these functions refer to, the module among them, until
        the garbage collector runs.
    """

    same: list[str] = field(default_factory=list)
    flag: bool = False
    flags: list[bool] = field(default_factory=list)
    error: BaseException | None = None


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold back the KeyboardInterrupt of one Ctrl-C inside; the second comes at once.

    Not where another thread runs or the script has a handler of its own. The function given raises
    what is held back, as the end of the context does.
    """
    held: list[int] = []

    def hold(number: int, _: Any) -> None:
        if held:
            raise KeyboardInterrupt
        held.append(number)

    def let_go() -> None:
        if held:
            held.clear()
            raise KeyboardInterrupt

    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield let_go
        return
    signal.signal(signal.SIGINT, hold)
    try:
        yield let_go
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        let_go()


class Agreement:
    """What the ranks of one module tell each other.

    agreed: what all ranks have begun together, where they compare at the first time only.
    turn: how often this rank came to a point where ranks compare; equal on ranks that agree.
    module: its number among the modules that this rank compiled on the group; 0 before `join`.
    text: the call that this rank is in.
    made_by: the call that compiled the module, as `call` takes it.
    meetings: None on a single rank, where errors are raised as they are.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.agreed: set[Any] = set()
        self.turn = 0
        self.failures = 0  # meetings over Gloo that raised an error, on all ranks
        self.module = 0
        self.made_by = "rebind()"
        self.meetings: Meetings | None = None
        self.text = "a sharded module"
        self._part = ""  # of the Store
        self._lost = False
        self._tickets: Tickets | None = None
        # With the "fake" backend there are no other ranks.
        if group.size > 1 and group.backend != "fake":
            self._part = f"graphshard/{self._store.add(self._counter, 0) + 1}"
            timeout = group.timeout.total_seconds()
            store = self._bounded(PrefixStore(self._part, group.store))
            self.meetings = Meetings(store, group.rank, group.size, timeout)
            self.watch()

    def watch(self) -> None:
        """Let others know where this rank is, if it does not move on."""
        if self.meetings is not None:
            group = self.group
            connection = connection_of(group.process_group, group.store)
            writes = self._bounded(PrefixStore(self._part, connection))
            group.here.attach(self.meetings, writes=writes, meets=group.backend == "gloo")

    def _bounded(self, store: Any) -> BoundedStore:
        return BoundedStore(store, min(_ANSWER_SECONDS, self.group.timeout.total_seconds()))

    @property
    def _store(self) -> BoundedStore:
        """The Store that all modules of the group share."""
        return self._bounded(self.group.store)

    @property
    def _counter(self) -> str:
        return f"graphshard/modules/{self.group.rank}"

    def join(self) -> None:
        """Give the module its number, once all ranks are known to compile it."""
        if self.meetings is not None:
            self.module = self._store.add(self._counter, 1)

    # -- forward and backward -------------------------------------------------------------------

    def require(self, fingerprint: Fingerprint) -> None:
        """Return once every rank is known to begin the same forward or backward."""
        if self.meetings is None or not fingerprint.lines:
            return
        self._meet(fingerprint.call, Part(), once=fingerprint.call.number)

    @contextmanager
    def half(
        self,
        phase: str,
        fingerprint: Fingerprint,
        finish: Callable[[], None],
        *,
        flag: bool = False,
        ends: bool = False,
        alone: bool = False,
    ) -> Iterator[Part]:
        """Run a forward or backward, which all ranks begin together.

        On Gloo, a rank on which the body fails does by `finish` what the others wait for, before it
        raises its error, of which the caller tells them by `give_up`, but for `ends` and `alone`.
        Ctrl-C waits for the end of the body, so that it cannot come between two messages.

        flag: what this rank tells the others at the beginning, on Gloo.
        ends: the ranks meet at the end, too: where one failed, all raise an error.
        alone: the others need not know of an error: what they have is right.
        """
        if self.meetings is None or self.group.backend != "gloo" or not fingerprint.lines:
            self.require(fingerprint)
            try:
                yield Part(flags=[flag])
            except Exception as error:
                if alone:
                    mark(error)
                raise
            return
        part, here = Part(), self.group.here
        with interrupts_held() as let_go:
            part.flags = self._meet(fingerprint.call, Part(flag=flag))
            here.begun, here.lost = 0, False
            try:
                try:
                    yield part
                    let_go()
                except BaseException as error:
                    if not here.lost:
                        self._try(finish)
                    mark(error, told=here.lost or alone)  # it may be an object raised before
                    if here.lost or not ends:
                        raise
                    part.error = error
                if ends:
                    self._end(part, _ENDS[phase], keeps=True)
            finally:
                part.error = None

    def _try(self, finish: Callable[[], None]) -> None:
        """Call it; where it fails, the others learn of the error by the group's timeout only."""
        try:
            finish()
        except Exception as failure:
            self.group.here.lost = True
            logger.warning(
                "rank %d: a call failed, and so did telling the other ranks: %s",
                self.group.rank,
                first_line(failure),
            )

    def any_rank(self, flag: bool, call: Call) -> bool:
        """Whether the flag of any rank is set; all make this `call`."""
        if self.meetings is None:
            return flag
        here = self.group.here
        before, here.at = here.at, call.at
        flags = self._meet_by_collective(call, Part(flag=flag))
        here.at = before
        return any(flags)

    def give_up(self, error: Exception) -> None:
        """Tell the others, which are about to run a forward, of the `error` that ended this one's.

        On NCCL only as long as no program is known to all, since they wait for no rank after that.
        """
        known = self.group.backend != "gloo" and self.agreed
        if self.meetings is None or is_shared(error) or known:
            return
        logger.warning(
            "rank %d: a call failed; it waits for the other ranks, so that all raise this: %s",
            self.group.rank,
            first_line(error),
        )
        part = Part(error=error)
        try:
            self._end(part, Call(CANNOT_RUN), keeps=not isinstance(error, GraphshardError))
        finally:
            part.error = None
            del error

    # -- calls ----------------------------------------------------------------------------------

    @contextmanager
    def call(self, text: str) -> Iterator[None]:
        """A call that all ranks make, named `text`, in whose parts they meet."""
        before, self.text = self.text, text
        try:
            yield
        except Exception as error:
            if self.meetings is None or is_shared(error):
                raise
            failed = f"calls {text}, which failed with {first_line(error)}"
            lost = [self._loss(error, Call(failed))]
            if isinstance(error, GraphshardError):
                raise
            raise lost.pop() from error
        finally:
            self.text = before

    @contextmanager
    def part(
        self, *, text: str | None = None, waits: bool = True, keeps: bool = False
    ) -> Iterator[Part]:
        """Run code on this rank by itself, then meet all ranks.

        Nothing inside may move data between ranks, but for further parts.

        text: of the call, if it is not that of the last `call`.
        waits: the host waits for the other ranks. If not, they meet only the first time on
            backends other than Gloo, and the error of one rank is its own there.
        keeps: a rank on which it failed raises its error as it is.
        """
        part = Part()
        try:
            try:
                yield part
            except Exception as error:
                if self.meetings is None or is_shared(error):
                    raise
                part.error = error
            if self.meetings is None:
                part.flags = [part.flag]
                return
            call = Call(f"calls {text or self.text}", tuple(part.same))
            once = None if waits else call.text.partition("(")[0]
            self._end(part, call, keeps=keeps, once=once)
        finally:
            part.error = None

    def _end(self, part: Part, call: Call, *, keeps: bool, once: Any = None) -> None:
        try:
            part.flags = self._meet(call, part, once=once)
        except GraphshardError as of_all:
            if part.error is None or not keeps:
                raise
            mark(part.error)
            of_all.__cause__ = None  # which is this very error
            raise part.error from of_all

    # -- meeting --------------------------------------------------------------------------------

    def _meet(self, call: Call, part: Part, *, once: Any = None) -> list[bool]:
        """The flags of all ranks, once they make the same call and none failed.

        once: where the host may not wait, compare only if this was not compared before.
        """
        self.turn += 1
        here = self.group.here
        here.turn, here.at = self.turn, call.at
        if self.group.backend == "gloo":
            return self._meet_by_collective(call, part)
        if (parted := self._parted()) is not None:
            raise parted
        if once is not None and once in self.agreed:
            if part.error is not None:
                raise part.error
            self._send_ticket(call)
            return []
        flags = self._meet_in_store(call, part)
        if once is not None:
            self.agreed.add(once)
        return flags

    def _meet_by_collective(self, call: Call, part: Part) -> list[bool]:
        """As `_meet`, by one collective that all calls share: three integers of each rank.

        They are the module's number, that of the call, and bits: a flag, and whether it failed.
        """
        mine = [self.module, call.number, int(part.flag) + 2 * (part.error is not None)]
        group = self.group
        try:
            sent = torch.tensor(mine, device=group.device)
            of_all: list[list[int]] = group.gather_tensor(sent, meets=True).tolist()
            if all(theirs[:2] == mine[:2] and theirs[2] < 2 for theirs in of_all):
                self._forget()
                return [bool(theirs[2]) for theirs in of_all]
            reports = group.all_gather_object(Report.of(self.module, call, part.error))
        except RuntimeError as failure:
            raise self._loss(failure, call, part.error) from (part.error or failure)
        self.failures += 1
        raise shared(verdict_of(reports), part.error)

    def _meet_in_store(self, call: Call, part: Part) -> list[bool]:
        """As `_meet`, by keys of the Store."""
        meetings, turn, digest = self.meetings, self.turn, f"{self.module}/{call.number}"
        assert meetings is not None
        try:
            mine = pickle.dumps((digest, part.error is not None, part.flag))
            flags: list[bool] | None = pickle.loads(meetings.decide(f"{turn}", mine, flags_of))
            if flags is not None:
                self._forget()
                return flags
            # The lines of a call are long, and the same on most ranks: one of these gives them.
            is_first = meetings.store.add(f"{turn}/said/{digest}", 1) == 1
            report = replace(Report.of(self.module, call, part.error), call=Call(call.text))
            mine = pickle.dumps((report, digest, call.lines if is_first else None))
            verdict = meetings.decide(f"{turn}/reports", mine, judged)
        except RuntimeError as failure:
            raise self._loss(failure, call, part.error) from (part.error or failure)
        raise shared(pickle.loads(verdict), part.error)

    def _send_ticket(self, call: Call) -> None:
        """Let the devices compare what ranks begin.

        Only of calls whose collectives follow at once: a rank that waits in the Store can give up,
        and a collective that other ranks never join would be lost.
        """
        if self._tickets is None:
            assert self.meetings is not None
            self._tickets = Tickets(self.group, self.meetings.store, self.module)
            self.group.here.looks_too = weakref.ref(self._tickets)
        self._tickets.drop_known()
        self._tickets.send(call)

    def _parted(self) -> FingerprintError | None:
        """The error of ranks that went on with different calls; None if no ticket told of it."""
        if self._tickets is None or not self._tickets.look():
            return None
        # A rank that is stuck says what it does once it did not move for so long.
        calls = self._tickets.calls(2 * self.group.here.patience)
        silent = [rank for rank in range(self.group.size) if rank not in calls]
        reports = [Report.of(module, call, None) for module, call in calls.values()]
        if silent:
            said = ", ".join(f"rank {rank} {call.text}" for rank, (_, call) in calls.items())
            names = ", ".join(map(str, silent))
            text = f"the ranks make different calls: {said}, and of rank {names} nothing is known"
        else:
            text = difference(reports)
        error = FingerprintError(
            f"{text} (noticed by rank {self.group.rank} in its next call; what ranks computed "
            "since is worthless: start again from a checkpoint)"
        )
        mark(error)
        return error

    # -- errors ---------------------------------------------------------------------------------

    def _loss(
        self, failure: Exception, call: Call, own: BaseException | None = None
    ) -> CollectiveError:
        """The error of a rank that cannot go on with the others; leaves a note for them."""
        group = self.group
        self._lost = True
        if (parted := self._parted()) is not None:
            return parted
        text = call.text if own is None else f"{call.text}, which failed with {first_line(own)}"
        notes = self._notes(text)
        others = [rank for rank in range(group.size) if rank != group.rank]
        silent = [str(rank) for rank in others if rank not in notes] or [str(r) for r in others]
        who = f"rank {silent[0]}" if len(silent) == 1 else f"one of ranks {', '.join(silent)}"
        error = CollectiveError(
            f"rank {group.rank} of {group.size} {text}"
            + "".join(f", rank {rank} {note}" for rank, note in notes.items())
            + f", but {who} died, raised an error, or did not get here within "
            f"{group.timeout.total_seconds():g} s{group.here.others()}; "
            "every rank must make the same calls of a sharded module, and of backward, equally "
            "often and in the same order; look for the first error in the logs of all ranks "
            f"({first_line(failure)})"
        )
        mark(error)
        return error

    def _notes(self, mine: str) -> dict[int, str]:
        notes: dict[int, str] = {}
        others = [rank for rank in range(self.group.size) if rank != self.group.rank]
        with suppress(Exception):  # the Store may be gone with the rank that held it
            store = self._store
            store.set(_note_of(self.group.rank), mine)
            deadline = time.monotonic() + _NOTE_SECONDS
            while len(notes) < len(others) and time.monotonic() < deadline:
                for rank in others:
                    if rank not in notes and store.check([_note_of(rank)]):
                        notes[rank] = store.get(_note_of(rank)).decode()
                time.sleep(_POLL_SECONDS)
        return dict(sorted(notes.items()))

    def _forget(self) -> None:
        """Take back the note that this rank left, if any, since the ranks have met again."""
        if self._lost:
            self._lost = False
            with suppress(Exception):
                self._store.delete_key(_note_of(self.group.rank))


_ENDS = {phase: Call(f"calls {phase}") for phase in (FORWARD, BACKWARD)}

UNCHANGED = Call("calls the module and saw no change of some parameter since the last call")

ANSWERED = Call("ran a forward that decides by what it computes")


def _note_of(rank: int) -> str:
    return f"graphshard/lost/{rank}"

"""Ranks tell each other what they are about to do, and whether it failed, before they go on.

Every call that moves data between ranks consists of parts that run on each rank by itself, and of
collectives between them. At the end of a part all ranks meet in one exchange that is the same for
all calls: if they make different calls, or a part failed on one of them, each rank raises the same
error. See README.md.
"""

from __future__ import annotations

import inspect
import logging
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from graphshard.errors import CollectiveError, FingerprintError, GraphshardError, PolicyError
from graphshard.runtime.bounded_store import BoundedStore
from graphshard.runtime.fingerprint import Call, Fingerprint
from graphshard.runtime.group import Group
from graphshard.runtime.meetings import Meetings
from graphshard.runtime.reports import (
    CANNOT_RUN,
    Report,
    difference,
    first_line,
    is_shared,
    judged,
    mark,
    shared,
    verdict_of,
)
from graphshard.runtime.tickets import Tickets
from graphshard.runtime.whereabouts import connection_of

logger = logging.getLogger("graphshard")

_POLL_SECONDS = 0.02

_ANSWER_SECONDS = 30.0
"""How long a rank waits for an answer of the Store, or the group's timeout if that is shorter."""

_NOTE_SECONDS = 0.5
"""How long a rank that lost the others waits for what they say of themselves."""


def call_text(method: Callable[..., Any], name: str = "", /, **arguments: Any) -> str:
    """A call for messages, without arguments left at their defaults: "clip(max_norm=1.0)".

    Args:
        method: what is called.
        name: its name; "" for its own.
        **arguments: those that ranks must give alike; one named `path`, or that has no name in
            calls, is shown without it.
    """
    parameters = _parameters(method)
    shown = []
    for key, value in arguments.items():
        parameter = parameters.get(key)
        default = inspect.Parameter.empty if parameter is None else parameter.default
        if default is inspect.Parameter.empty or value != default:
            bare = key == "path" or (
                parameter is not None and parameter.kind is parameter.POSITIONAL_ONLY
            )
            shown.append(f"{'' if bare else f'{key}='}{_value_text(value)}")
    return f"{name or method.__name__}({', '.join(shown)})"


def listed(names: Any) -> Any:
    """`names` for a call's text and its checks: several in a list, one name or None as it is.

    So is what is none of these, for a check inside of a part to refuse; see `require_names`.
    """
    is_several = isinstance(names, Iterable) and not isinstance(names, str)
    return list(names) if is_several else names


def require_names(argument: str, names: Any, of: str) -> list[str]:
    """The names in what `listed` returned; [] of None.

    Args:
        argument: its name, for messages.
        names: the value.
        of: what it names, for messages.
    """
    found = [names] if isinstance(names, str) else [] if names is None else names
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise PolicyError(f"{argument} must be {of}, or several in a list, or None; got {names!r}")
    return found


@cache
def _parameters(method: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(method).parameters


def _value_text(value: Any) -> str:
    if isinstance(value, os.PathLike):
        return repr(os.fspath(value))
    if isinstance(value, Tensor):
        return f"tensor({value.item()!r})"
    text = repr(value)
    # An object with a state or an address is another one on each rank.
    return type(value).__name__ if hasattr(value, "state_dict") or " at 0x" in text else text


@dataclass
class Part:
    """The part of a call that a rank runs by itself.

    same: lines of text that must be the same on all ranks at its end.
    flag: what this rank tells the others at its end.
    flags: afterwards, what each rank told.
    """

    same: list[str] = field(default_factory=list)
    flag: bool = False
    flags: list[bool] = field(default_factory=list)


class _Failure:
    """The error of this rank's part, if it failed; None once the others know.

    Functions hold this, not the error: an error that a function of its traceback refers to keeps
    all that these functions refer to, the module among them, until the garbage collector runs.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


@contextmanager
def interrupts_held() -> Iterator[Callable[[], None]]:
    """Hold back the KeyboardInterrupt of one Ctrl-C inside; the second comes at once.

    Not where another thread runs or the script has a handler of its own.

    Yields:
        A function that raises what is held back, as the end of the context does.
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

    Args:
        group: the ranks; on a single one, errors are raised as they are.
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
        """Return once every rank is known to begin the same forward or backward.

        Args:
            fingerprint: of the graph that this rank is about to run.
        """
        if self.meetings is None or not fingerprint.lines:
            return
        self._meet(fingerprint.call, once=fingerprint.call.number)

    @contextmanager
    def half(
        self,
        phase: str,
        fingerprint: Fingerprint,
        finish: Callable[[], None],
        *,
        ends: bool = False,
        alone: bool = False,
    ) -> Iterator[Part]:
        """Run a forward or backward, which all ranks begin together.

        On Gloo, a rank on which the body fails does by `finish` what the others wait for, before it
        raises its error, of which the caller tells them by `give_up`, but for `ends` and `alone`.
        Ctrl-C waits for the end of the body, so that it cannot come between two messages.

        Args:
            phase: "forward" or "backward".
            fingerprint: of the graph that this rank is about to run.
            finish: takes part in the collectives that the body did not come to.
            ends: the ranks meet at the end, too: where one failed, all raise an error.
            alone: the others need not know of an error: what they have is right.
        """
        if self.meetings is None or self.group.backend != "gloo" or not fingerprint.lines:
            self.require(fingerprint)
            try:
                yield Part()
            except Exception as error:
                if alone:
                    mark(error)
                raise
            return
        part, own, here = Part(), _Failure(), self.group.here
        with interrupts_held() as let_go:
            self.require(fingerprint)
            here.begun, here.lost = 0, False
            try:
                try:
                    yield part
                    let_go()
                except BaseException as error:
                    if not here.lost:
                        self._finish(finish)
                    mark(error, told=here.lost or alone)  # it may be an object raised before
                    if here.lost or not ends:
                        raise
                    own.error = error
                if ends:
                    self._end(part, own, Call(f"calls {phase}"), keeps=True)
            finally:
                own.error = None

    def _finish(self, finish: Callable[[], None]) -> None:
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

    def any_rank(self, changed: bool) -> bool:
        """Whether any rank says that its rows of resident parameters changed; all call this."""
        if self.meetings is None:
            return changed
        self.group.here.at = _UNCHANGED.at
        return any(self._meet_by_tickets(_UNCHANGED, _Failure(), flag=changed))

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
        own = _Failure(error)
        try:
            self._meet(Call(CANNOT_RUN), own)
        except GraphshardError as of_all:
            if isinstance(error, GraphshardError):
                raise
            mark(error)
            of_all.__cause__ = None  # which is this very error
            raise error from of_all
        finally:
            own.error = None
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

        Args:
            text: of the call, if it is not that of the last `call`.
            waits: the host waits for the other ranks. If not, they meet only the first time on
                backends other than Gloo, and the error of one rank is its own there.
            keeps: a rank on which it failed raises its error as it is.
        """
        part, own = Part(), _Failure()
        try:
            try:
                yield part
            except Exception as error:
                if self.meetings is None or is_shared(error):
                    raise
                own.error = error
            if self.meetings is None:
                part.flags = [part.flag]
                return
            call = Call(f"calls {text or self.text}", tuple(part.same))
            once = None if waits else call.text.partition("(")[0]
            self._end(part, own, call, keeps=keeps, once=once)
        finally:
            own.error = None

    def _end(self, part: Part, own: _Failure, call: Call, *, keeps: bool, once: Any = None) -> None:
        try:
            part.flags = self._meet(call, own, flag=part.flag, once=once)
        except GraphshardError as of_all:
            if own.error is None or not keeps:
                raise
            mark(own.error)
            of_all.__cause__ = None  # which is this very error
            raise own.error from of_all

    # -- meeting --------------------------------------------------------------------------------

    def _meet(
        self,
        call: Call,
        own: _Failure | None = None,
        *,
        flag: bool = False,
        once: Any = None,
    ) -> list[bool]:
        """The flags of all ranks, once they make the same call and none failed.

        Args:
            call: what this rank does.
            own: whether this rank failed; None: it did not.
            flag: to tell.
            once: where the host may not wait, compare only if this was not compared before.
        """
        own = own or _Failure()
        self.turn += 1
        here = self.group.here
        here.turn, here.at = self.turn, call.at
        if self.group.backend == "gloo":
            return self._meet_by_tickets(call, own, flag=flag)
        if (parted := self._parted()) is not None:
            raise parted
        if once is not None and once in self.agreed:
            if own.error is not None:
                raise own.error
            self._send_ticket(call)
            return []
        flags = self._meet_in_store(call, own, flag=flag)
        if once is not None:
            self.agreed.add(once)
        return flags

    def _meet_by_tickets(self, call: Call, own: _Failure, *, flag: bool) -> list[bool]:
        """As `_meet`, by one collective that all calls share.

        A ticket is the module's number, that of the call, and bits: a flag, and whether it failed.
        """
        bits = int(flag) + 2 * (own.error is not None)
        ticket = [self.module, call.number, bits]
        group = self.group
        try:
            tickets = group.gather_ints(ticket)
            if all(theirs[:2] == ticket[:2] and theirs[2] < 2 for theirs in tickets):
                if self._lost:
                    self._forget()
                return [bool(theirs[2]) for theirs in tickets]
            reports = group.all_gather_object(Report.of(self.module, call, own.error))
        except RuntimeError as failure:
            raise self._loss(failure, call, own.error) from (own.error or failure)
        self.failures += 1
        raise shared(verdict_of(reports), own.error)

    def _meet_in_store(self, call: Call, own: _Failure, *, flag: bool) -> list[bool]:
        """As `_meet`, by keys of the Store."""
        meetings, turn, digest = self.meetings, self.turn, f"{self.module}/{call.number}"
        assert meetings is not None
        try:
            flags = meetings.meet(turn, digest, flag=flag, failed=own.error is not None)
            if flags is not None:
                if self._lost:
                    self._forget()
                return flags
            # The lines of a call are long, and the same on most ranks: one of these gives them.
            lines = call.lines if meetings.first_to_say(turn, digest) else None
            report = replace(Report.of(self.module, call, own.error), call=Call(call.text))
            mine = pickle.dumps((report, digest, lines))
            verdict = meetings.judge(turn, mine, judged)
        except RuntimeError as failure:
            raise self._loss(failure, call, own.error) from (own.error or failure)
        raise shared(pickle.loads(verdict), own.error)

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
        """Leave a note for the others; return theirs."""
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
        """Take the note back, since the ranks have met again."""
        self._lost = False
        with suppress(Exception):
            self._store.delete_key(_note_of(self.group.rank))


_UNCHANGED = Call("calls the module and saw no change of some parameter since the last call")


def _note_of(rank: int) -> str:
    return f"graphshard/lost/{rank}"

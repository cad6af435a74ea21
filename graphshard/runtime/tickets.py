"""What ranks begin, compared on the device, where the host must not wait for other ranks.

See README.md.
"""

from __future__ import annotations

import logging
import pickle
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from graphshard.runtime.calls import Call
from graphshard.runtime.group import Group
from graphshard.runtime.streams import Launched
from graphshard.torch_private import compat as torch_compat

logger = logging.getLogger("graphshard")

_POLL_SECONDS = 0.02
_MOST_CALLS = 256  # whose numbers are kept on the device


@dataclass
class _Ticket:
    """One all_reduce under way.

    count: how many were sent before it, on every rank. sent: on the device. received: on the host.
    """

    count: int
    call: Call
    sent: Tensor
    received: Tensor
    launched: Launched | None = None
    work: Any = None

    def __del__(self) -> None:
        if self.launched is not None:  # the memory of `sent` goes back to the compute stream
            self.launched.drop()

    def differs(self) -> bool | None:
        """Whether ranks sent different numbers; None as long as that is not known here."""
        if self.launched is not None and not self.launched.event.query():
            return None
        if self.work is not None and not self.work.is_completed():
            return None
        high, low = self.received.tolist()
        return bool(high != -low)


class Tickets:
    """The tickets of the ranks of one module, whose number must be the same on all of them."""

    def __init__(self, group: Group, store: Any, module: int) -> None:
        self._group, self._store, self._module = group, store, module
        self._under_way: deque[_Ticket] = deque()
        self._count = 0
        self._numbers: dict[int, Tensor] = {}  # by the number of a call
        self._parted: _Ticket | None = None
        self._options = torch_compat.collective_options("AllreduceOptions")
        self._options.reduceOp = dist.ReduceOp.MAX
        self._options.asyncOp = group.side_stream is None

    def send(self, call: Call) -> None:
        """Start to compare `call`; the host waits for nothing."""
        sent = self._numbers_of(call).clone()
        received = torch.empty_like(sent, device="cpu", pin_memory=True) if sent.is_cuda else sent
        ticket = _Ticket(self._count, call, sent, received)
        side_stream, reduce = self._group.side_stream, self._group.process_group.allreduce
        if side_stream is None:
            ticket.work = reduce([sent], self._options)
        else:
            ticket.launched = side_stream.launch(self._reduce, reduce, ticket)
            self._group.here.launched(call.at, ticket.launched.event)
        self._count += 1
        self._under_way.append(ticket)

    def _reduce(self, reduce: Any, ticket: _Ticket) -> None:
        work = reduce([ticket.sent], self._options)
        if work is not None:
            work.wait()
        if ticket.received is not ticket.sent:
            ticket.received.copy_(ticket.sent, non_blocking=True)

    def _numbers_of(self, call: Call) -> Tensor:
        """The number of `call` of this module and its negative, int64 (2,), on the device."""
        numbers = self._numbers.get(call.number)
        if numbers is None:
            if len(self._numbers) >= _MOST_CALLS:  # arguments of calls may differ in each step
                self._numbers.clear()
            number = Call(f"module {self._module}", (str(call.number),)).number
            numbers = torch.tensor([number, -number], device=self._group.device)
            self._numbers[call.number] = numbers
        return numbers

    # -- when ranks part ------------------------------------------------------------------------

    def look(self) -> bool:
        """Whether some known ticket differs; then this rank's call is in the Store.

        Another thread may look too, for a rank that is stuck.
        """
        if self._parted is None:
            self._parted = next((t for t in [*self._under_way] if t.differs()), None)
            if self._parted is not None:
                self._tell(self._parted)
        return self._parted is not None

    def drop_known(self) -> None:
        """Forget the tickets that are known to be equal."""
        while self._under_way and self._under_way[0].differs() is False:
            self._under_way.popleft()

    def _tell(self, ticket: _Ticket) -> None:
        """Put the call into the Store; the lines only where no rank with the same call did."""
        call, store = ticket.call, self._store
        logger.error(
            "rank %d of %d %s, and other ranks do not",
            self._group.rank, self._group.size, call.text,
        )  # fmt: skip
        with suppress(RuntimeError):
            lines = f"parted/{ticket.count}/lines/{call.number}"
            if store.add(f"{lines}/said", 1) == 1:
                store.set(lines, pickle.dumps(call.lines))
            mine = pickle.dumps((self._module, call.text, call.number))
            store.set(f"parted/{ticket.count}/{self._group.rank}", mine)

    def calls(self, seconds: float) -> dict[int, tuple[int, Call]]:
        """By rank, the module and the call in which ranks parted, of those that say it in time.

        Some may be stuck.
        """
        assert self._parted is not None
        store, begin = self._store, f"parted/{self._parted.count}"
        group, deadline = self._group, time.monotonic() + seconds
        found = {group.rank: (self._module, self._parted.call)}
        while len(found) < group.size:
            for rank in range(group.size):
                if rank not in found and store.check([f"{begin}/{rank}"]):
                    module, text, number = pickle.loads(store.get(f"{begin}/{rank}"))
                    lines: tuple[str, ...] = ()
                    with suppress(RuntimeError):
                        store.wait([f"{begin}/lines/{number}"])
                        lines = pickle.loads(store.get(f"{begin}/lines/{number}"))
                    found[rank] = module, Call(text, lines)
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        return dict(sorted(found.items()))

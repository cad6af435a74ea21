"""The reasons why compute waits for a collective.

An exposed collective ends after compute needs its result, because its communicator was busy when it
was issued, or because it was issued too late. For a late issue, the nodes between it and the
compute before it are searched for the obstacle. Each reason names its obstacle: without it, compute
would pass the wait earlier.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import fx

from graphshard.cost.memory import held_by_place
from graphshard.cost.timeline import Span, Timeline, Transfer
from graphshard.format import human_bytes, human_seconds
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import transfers_into
from graphshard.program.collective import param_of, params_of
from graphshard.program.program import FORWARD, Program
from graphshard.program.storages import new_bytes


@dataclass(frozen=True)
class Cause:
    """The exposed seconds of one estimate for one op, phase and kind of reason.

    seconds: the sum over `count` collectives or copies. worst: the one with the most seconds.
    reason: the reason of `worst`.
    """

    op: str
    phase: str
    kind: str
    seconds: float
    count: int
    worst: Transfer
    reason: Reason

    @property
    def text(self) -> str:
        """The text of `reason`."""
        return f"besides, {self.reason.text}" if self.reason.next else self.reason.text


BEHIND = "behind"  # another collective on the same communicator


START = "start"  # nothing runs before it


LOSS = "loss"  # backward has not begun


HELD = "held"  # the unit's previous gather is not freed yet


ORDER = "order"  # a gather that stands before it is held


BUDGET = "budget"  # the byte budget of a program scheduled by cost


POLICY = "policy"  # the prefetch that the policy asks for


ARRIVES = "arrives"  # its shards come from the host


GRADIENTS = "gradients"  # its gradients are computed right before it


PLACED = "placed"  # compute stands between its operands and it


IN_FLIGHT = "in flight"  # it is waited for before another reduce


RESULT = "result"  # it needs the result of another collective


END = "end"  # nothing runs after it


_NEGLIGIBLE = 0.02  # the fraction of a collective's time or exposure that is not reported


@dataclass(frozen=True)
class Reason:
    """One reason why a collective is exposed.

    kind: a constant of this module. seconds: the part of the exposure it explains. obstacle: the
    name of the node in the way; "" if there is no single one. text: the reason as a clause that
    follows "since". next: whether it takes effect only without the reason before it.
    """

    kind: str
    seconds: float
    obstacle: str
    text: str
    next: bool = False


class Reasons:
    """The reasons for every exposed transfer of the timeline of a program."""

    def __init__(self, program: Program, plan: ShardingPlan, timeline: Timeline) -> None:
        self.program, self.plan, self.timeline = program, plan, timeline
        self.nodes = list(program.graph.nodes)

    def of(self, transfer: Transfer) -> tuple[Reason, ...]:
        """The reasons why compute waits for `transfer`; empty if it does not.

        A second reason is the obstacle that remains without the first.
        """
        if not transfer.exposed:
            return ()
        reasons = []
        span, stalls = transfer.span, self._stalls(transfer)
        # The time of issue if compute did not wait right before it.
        issued = span.issued - sum(stall.exposed for stall in stalls)
        alone = max(0.0, issued + span.seconds - transfer.waited_at)
        if alone < _NEGLIGIBLE * transfer.exposed:
            alone = 0.0
        elif alone > (1 - _NEGLIGIBLE) * transfer.exposed:
            alone = transfer.exposed
        queued = transfer.exposed - alone
        if queued:
            reasons.append(self._behind(transfer, stalls, queued))
        if alone:
            reasons.append(replace(self._late(transfer, alone), next=bool(reasons)))
        return tuple(reasons)

    def _stalls(self, transfer: Transfer) -> list[Transfer]:
        """The transfers compute waits for between the compute before `transfer` and its issue."""
        _, gap = self._gap(self.nodes[transfer.span.place])
        places = {self.place[node] for node in gap}
        transfers = self.timeline.transfers
        return [each for each in transfers if each.exposed and each.waited_place in places]

    def _behind(self, transfer: Transfer, stalls: list[Transfer], seconds: float) -> Reason:
        """The reason of `seconds` that a transfer waits for earlier ones."""
        ends = [stall.span for stall in stalls]
        span = transfer.behind or max(ends, key=lambda span: span.end)
        node = self.nodes[span.place]
        earlier = _op_of_unit(span.name, span.unit)
        if node in _moved_with(self.nodes[transfer.span.place]):
            return Reason(ARRIVES, seconds, node.name, "its shards must arrive from the host first")
        if span.stream != transfer.span.stream:
            text = f"compute waits for the {earlier} before it issues it"
            return Reason(BEHIND, seconds, node.name, text)
        text = f"its stream is busy with the {earlier}"
        queue = self._queue(span)
        if len(queue) > 1:
            first = queue[0]
            took = human_seconds(span.end - first.start)
            text += (
                f", the last of {len(queue)} in a row since the "
                f"{_op_of_unit(first.name, first.unit)}, which take {took} together"
            )
        return Reason(BEHIND, seconds, node.name, text)

    def _queue(self, last: Span) -> list[Span]:
        """The spans that ran without a pause on the stream of `last`, up to `last`."""
        queue = [last]
        spans = [span for span in self.timeline.spans if span.stream == last.stream]
        place = spans.index(last)
        while place and spans[place - 1].end >= queue[0].start:
            place -= 1
            queue.insert(0, spans[place])
        return queue

    # -- obstacles of late gathers and copies -----------------------------------------------------

    def _late(self, transfer: Transfer, seconds: float) -> Reason:
        """The reason of `seconds` that a transfer is issued too late."""
        node = self.nodes[transfer.span.place]
        if node.target in ops.REDUCES:
            return self._late_reduce(node, transfer, seconds)
        kind, obstacle, text = self._obstacle(node)
        ahead = transfer.waited_at - transfer.span.issued
        took = human_seconds(transfer.span.seconds)
        if ahead > _NEGLIGIBLE * transfer.span.seconds:
            text += f", {human_seconds(ahead)} before its use, and it takes {took}"
        return Reason(kind, seconds, obstacle, text)

    def _obstacle(self, node: fx.Node) -> tuple[str, str, str]:
        """Kind, obstacle and text of why a gather, or a copy to the device, is not issued before
        the last compute.
        """
        before, gap = self._gap(node)
        is_gather = node.target is ops.all_gather
        if before is None:
            return START, "", "the step begins with it, and nothing runs before that could hide it"
        params = set(_params(node)) if is_gather else set()
        for free in gap:
            if free.target is ops.free and params & set(_params(ops.collective_of(free))):
                gather = ops.collective_of(free)
                return (
                    HELD,
                    free.name,
                    "before that the unit's previous gather is still held, and it would be in "
                    f"memory twice (until {gather.name} is freed)",
                )
        if before.meta["phase"] == FORWARD != node.meta["phase"]:
            return (
                LOSS,
                self.program.first_backward().name,
                "backward begins with it, and is not begun before forward is over",
            )
        for other in gap if is_gather else ():
            if other.target is ops.all_gather and self._obstacle(other)[0] in (HELD, ORDER):
                return (
                    ORDER,
                    other.name,
                    f"gathers keep their order, and the {_op_text(other)} before it is held back",
                )
        if not is_gather:
            return POLICY, "", "copies are issued one step ahead"
        budget = self.program.budget
        if budget is not None and budget.unchanged_because is None:
            above = (
                self._budgeted[self.place[before]] + new_bytes(node, self.program) - budget.bytes
            )
            if above > 0:
                return (
                    BUDGET,
                    before.name,
                    f"issued before {before.name} it would put {human_bytes(above)} above the "
                    f"budget of {human_bytes(budget.bytes)}",
                )
            return POLICY, "", f"overlap issues it there, by times for {budget.hardware.name}"
        return POLICY, "", self._by_policy(node)

    @cached_property
    def _budgeted(self) -> Sequence[int]:
        """By place, the bytes that count in the budget."""
        budget = self.program.budget
        assert budget is not None
        return held_by_place(self.program, budget)

    def _by_policy(self, node: fx.Node) -> str:
        """The policy's prefetch that places a gather, as a clause."""
        policy = self.plan.policy
        if node.meta["phase"] == FORWARD:
            ahead = policy.forward_units_ahead(self.plan.process_group_backend, self.plan.hosts)
            if not ahead:
                return "it is issued where its result is needed (forward_prefetch=0)"
            return f"forward_prefetch={ahead} issues it so many units ahead"
        if policy.backward_prefetch is None:
            return "it is issued where its result is needed (backward_prefetch=None)"
        where = "before" if policy.backward_prefetch == "pre" else "after"
        return (
            f"backward_prefetch={policy.backward_prefetch!r} issues it {where} the compute of the "
            "unit that runs before"
        )

    def _gap(self, node: fx.Node) -> tuple[fx.Node | None, list[fx.Node]]:
        """The last node before `node` that takes compute time, and the nodes between, in order.

        Casts of the operands of `node` are issued with it and count as between.
        """
        with_it = _moved_with(node)
        gap: list[fx.Node] = []
        for other in self.nodes[self.place[node] - 1 :: -1]:
            if self._takes_time(other) and other not in with_it:
                return other, gap[::-1]
            gap.append(other)
        return None, gap[::-1]

    def _takes_time(self, node: fx.Node) -> bool:
        return self._seconds_of(node) > 0

    def _seconds_of(self, node: fx.Node) -> float:
        if not ops.is_compute(node) and node.target is not ops.cast:
            return 0.0
        at, place = self.timeline.at, self.place[node]
        return at[place] - (at[place - 1] if place else 0.0)

    @cached_property
    def place(self) -> Mapping[fx.Node, int]:
        """By node, its index in the graph."""
        return {node: index for index, node in enumerate(self.nodes)}

    # -- reduces ----------------------------------------------------------------------------------

    def _late_reduce(self, node: fx.Node, transfer: Transfer, seconds: float) -> Reason:
        """The reason of `seconds` that a reduce ends too late."""
        took = human_seconds(transfer.span.seconds)
        source = max(map(ops.origin, node.all_input_nodes), key=self.place.__getitem__)
        ready = self.place[source]
        kind, obstacle, since = (
            GRADIENTS,
            source.name,
            f"its gradients are complete only with {source.name}",
        )
        if ops.is_unpack(source):
            source = ops.collective_of(source)
            since = f"it needs the result of the {_op_text(source)}"
            kind, obstacle = RESULT, source.name
        with_it = _moved_with(node)
        between = [n for n in self.nodes[ready + 1 : transfer.span.place] if n not in with_it]
        late = sum(map(self._seconds_of, between))
        if late > _NEGLIGIBLE * transfer.span.seconds:
            before, _ = self._gap(node)
            assert before is not None
            kind, obstacle = PLACED, before.name
            since = (
                f"it is issued {human_seconds(late)} of compute after its gradients are complete"
            )
        following = self._after_wait(transfer.waited_place)
        if following is None:
            ahead = transfer.waited_at - transfer.span.issued
            negligible = ahead <= _NEGLIGIBLE * transfer.span.seconds
            where = "with it" if negligible else f"{human_seconds(ahead)} after it is issued"
            text = f"the step ends {where}, and it takes {took}: {since}"
            return Reason(kind if kind == PLACED else END, seconds, obstacle, text)
        if following.target in ops.REDUCES:
            text = (
                f"it takes {took} and is waited for before the {_op_text(following)} is issued, "
                "so that one unit's full gradients are under way at a time"
            )
            return Reason(IN_FLIGHT, seconds, following.name, text)
        if not any(_comes_from(value, node) for value in following.all_input_nodes):
            text = (
                f"it takes {took} and is waited for before {following.name}, to give back the "
                "memory of its gradients"
            )
            return Reason(IN_FLIGHT, seconds, following.name, text)
        text = f"it takes {took}, {following.name} needs it, and {since}"
        return Reason(kind, seconds, obstacle, text)

    def _after_wait(self, place: int) -> fx.Node | None:
        """The next reduce or compute after the wait at `place`; None at the end of the step.

        Casts of its results, or of the operands of the next collective, do not count.
        """
        if place > self._last_compute:
            return None
        for node in self.nodes[place + 1 :]:
            if node.target in ops.REDUCES or (ops.is_compute(node) and self._takes_time(node)):
                return node
        return None

    @cached_property
    def _last_compute(self) -> int:
        """The place of the last compute node that takes time."""
        places = (self.place[n] for n in self.nodes if ops.is_compute(n) and self._takes_time(n))
        return max(places, default=0)


def _comes_from(value: fx.Node, collective: fx.Node) -> bool:
    """Whether `value` is a result of `collective`, or a cast or copy of one."""
    source = ops.origin(value)
    return ops.is_unpack(source) and ops.collective_of(source) is collective


def _moved_with(node: fx.Node) -> set[fx.Node]:
    """The casts and copies that bring the operands of a collective to it."""
    return set(transfers_into(node)) if ops.is_collective(node) else set()


def reasons_text(reasons: Sequence[Reason]) -> str:
    """The reasons as the end of a sentence, with the seconds of each if there are several."""
    if not reasons:
        return ""
    if len(reasons) == 1:
        return reasons[0].text
    return "; ".join(
        f"{human_seconds(reason.seconds)}: {'were that not so: ' * reason.next}{reason.text}"
        for reason in reasons
    )


def _params(node: fx.Node) -> tuple[str, ...]:
    if node.target in ops.COPIES:
        param = param_of(node)
        return () if param is None else (param,)
    return params_of(node)


def _op_text(node: fx.Node) -> str:
    return _op_of_unit(str(ops.op_name(node)), str(node.meta.get("unit", "")))


def _op_of_unit(op: str, unit: str) -> str:
    return f"{op} of {unit or '(root)'}"

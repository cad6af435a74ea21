"""Two estimates side by side: what differs, and why."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from graphshard.cost.estimate import Estimate
from graphshard.cost.reasons import Reason
from graphshard.cost.timeline import Transfer
from graphshard.errors import CostError

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Cause:
    """Exposed seconds that one estimate has for one kind of reason: of an op in a phase.

    count collectives or copies are exposed for it; `worst` is the one that is most.
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
        """The reason of the worst, by itself."""
        return f"besides, {self.reason.text}" if self.reason.next else self.reason.text


@dataclass(frozen=True)
class Comparison:
    """Two estimates of steps, and what they are called."""

    a: Estimate
    b: Estimate
    names: tuple[str, str] = ("A", "B")

    @property
    def faster_by(self) -> float:
        """Seconds by which a step of `b` is shorter than one of `a`; negative if it is longer."""
        return self.a.step_seconds - self.b.step_seconds

    @property
    def smaller_by(self) -> int:
        """Bytes by which the peak of `b` is below that of `a`; negative if it is above."""
        return self.a.peak_bytes - self.b.peak_bytes

    @cached_property
    def policy_differences(self) -> Mapping[str, tuple[str, str]]:
        """Fields of the policies that differ, each as text; "" where one has none."""
        fields = []
        for estimate in (self.a, self.b):
            policy = estimate.plan.policy
            own = {"policy": type(policy).__name__} | policy.own_options()
            fields.append(own | policy.shared_options())
        one, other = fields
        return {
            name: (one.get(name, ""), other.get(name, ""))
            for name in {**one, **other}
            if one.get(name, "") != other.get(name, "")
        }

    @cached_property
    def causes(self) -> tuple[Mapping[tuple[str, str, str], Cause], ...]:
        """Of each estimate, what exposes communication, by op, phase and kind of reason."""
        return tuple(map(causes_of, (self.a, self.b)))

    def to_dict(self) -> dict[str, Any]:
        """Both estimates as plain data, ready for JSON, and the policies' differences."""
        return {
            "names": list(self.names),
            "estimates": [self.a.to_dict(), self.b.to_dict()],
            "policies": {name: list(pair) for name, pair in self.policy_differences.items()},
        }

    def __str__(self) -> str:
        from graphshard.inspect.compare_text import compare_text

        return compare_text(self)

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        return Text(str(self))


def compare(a: Estimate, b: Estimate, *, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """What differs between two estimates, such as of one model under two policies.

    Args:
        a: from `graphshard.simulate`.
        b: likewise; what it has more or less is said of it.
        names: what to call them.

    Raises:
        CostError: one of them is no estimate, or they have one name.
    """
    for given in (a, b):
        if not isinstance(given, Estimate):
            raise CostError(
                "compare takes two estimates, as graphshard.simulate returns them; got a "
                f"{type(given).__name__}"
            )
    if len(set(names)) != 2:
        raise CostError(f"two estimates are compared under two names; got {names!r}")
    first, second = names
    return Comparison(a, b, (first, second))


def causes_of(estimate: Estimate) -> dict[tuple[str, str, str], Cause]:
    """What exposes the communication of `estimate`, the worst first."""
    found: dict[tuple[str, str, str], list[tuple[Reason, Transfer]]] = defaultdict(list)
    for transfer in estimate.transfers:
        for reason in estimate.reasons(transfer):
            found[transfer.op, transfer.span.phase, reason.kind].append((reason, transfer))
    causes = []
    for (op, phase, kind), alike in found.items():
        reason, worst = max(alike, key=lambda pair: pair[0].seconds)
        total = sum(each.seconds for each, _ in alike)
        causes.append(Cause(op, phase, kind, total, len(alike), worst, reason))
    causes.sort(key=lambda cause: -cause.seconds)
    return {(cause.op, cause.phase, cause.kind): cause for cause in causes}


def sent(estimate: Estimate) -> tuple[Counter[str], Counter[str]]:
    """By op, how many collectives and copies a step has, and the bytes of their full tensors."""
    numbers: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for transfer in estimate.transfers:
        numbers[transfer.op] += 1
        moved[transfer.op] += transfer.bytes
    return numbers, moved

"""Compare two estimates: their differences, and the reasons for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from graphshard.cost.estimate import Estimate
from graphshard.cost.reasons import Cause
from graphshard.cost.spread import apart, ranges_apart
from graphshard.cost.text import causes_of
from graphshard.errors import CostError

if TYPE_CHECKING:
    from rich.console import RenderableType


@dataclass(frozen=True)
class Comparison:
    """Two estimates of a step under two names."""

    a: Estimate
    b: Estimate
    names: tuple[str, str] = ("A", "B")

    @property
    def faster_by(self) -> float:
        """Seconds by which a step of `b` is shorter than one of `a`; negative if it is longer."""
        return self.a.step_seconds - self.b.step_seconds

    @property
    def apart(self) -> bool:
        """Whether the times differ by more than the predictions may be wrong.

        Two policies on one machine share most of the error; estimates of different machines, ranks
        or models do not, and their ranges must not overlap.
        """
        a, b = self.a, self.b
        if a.hardware == b.hardware and a.plan.world_size == b.plan.world_size:
            return apart(a.step_seconds, b.step_seconds, a.hardware)
        return ranges_apart(a.step_range, b.step_range)

    @property
    def smaller_by(self) -> int:
        """Bytes by which the peak of `b` is below that of `a`; negative if it is above."""
        return self.a.peak_bytes - self.b.peak_bytes

    @cached_property
    def policy_differences(self) -> Mapping[str, tuple[str, str]]:
        """Policy fields with different values, as text; "" where a policy lacks the field."""
        fields = []
        for estimate in (self.a, self.b):
            policy = estimate.plan.policy
            options = {"policy": type(policy).__name__} | policy.own_options()
            fields.append(options | policy.shared_options())
        one, other = fields
        return {
            name: (one.get(name, ""), other.get(name, ""))
            for name in {**one, **other}
            if one.get(name, "") != other.get(name, "")
        }

    @cached_property
    def causes(self) -> tuple[Mapping[tuple[str, str, str], Cause], ...]:
        """The causes of exposed communication of each estimate, by op, phase and reason kind."""
        return tuple(map(causes_of, (self.a, self.b)))

    def to_dict(self) -> dict[str, Any]:
        """Both estimates and the differences of their policies as plain data, ready for JSON."""
        return {
            "names": list(self.names),
            "estimates": [self.a.to_dict(), self.b.to_dict()],
            "apart": self.apart,
            "policies": {name: list(pair) for name, pair in self.policy_differences.items()},
        }

    def __str__(self) -> str:
        from graphshard.cost.text import compare_text

        return compare_text(self)

    def __rich__(self) -> RenderableType:
        from rich.text import Text

        return Text(str(self))


def compare(a: Estimate, b: Estimate, *, names: tuple[str, str] = ("A", "B")) -> Comparison:
    """Compare two estimates, for example of one model under two policies.

    Args:
        a: an estimate from `graphshard.simulate`, the baseline.
        b: another estimate; the differences are those of `b` relative to `a`.
        names: the names of `a` and `b` in texts.

    Raises:
        CostError: an argument is not an estimate, or both names are equal.
    """
    for estimate in (a, b):
        if not isinstance(estimate, Estimate):
            raise CostError(
                "compare takes two estimates, as graphshard.simulate returns them; got a "
                f"{type(estimate).__name__}"
            )
    if len(set(names)) != 2:
        raise CostError(f"two estimates are compared under two names; got {names!r}")
    first, second = names
    return Comparison(a, b, (first, second))

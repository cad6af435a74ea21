"""Two estimates side by side: what differs, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from graphshard.cost.estimate import Estimate
from graphshard.cost.reasons import Cause
from graphshard.cost.text import causes_of
from graphshard.errors import CostError

if TYPE_CHECKING:
    from rich.console import RenderableType


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
        from graphshard.cost.text import compare_text

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

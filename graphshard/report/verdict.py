"""The line that a page begins with: whether a step fits, how fast it is, and what slows it down."""

from __future__ import annotations

from html import escape
from typing import Any

from graphshard.format import human_bytes, human_seconds

_REASONS = 3


def verdict(estimate: dict[str, Any]) -> str:
    """The verdict on `Estimate.to_dict(details=True)` as HTML; links name places of the program."""
    left = estimate["hardware"]["memory_bytes"] - estimate["device_bytes"]
    of = human_bytes(estimate["hardware"]["memory_bytes"])
    fits = f"Fits in {of}" if estimate["fits"] else f"Does not fit in {of}"
    over = f"{human_bytes(left)} to spare" if left >= 0 else f"{human_bytes(-left)} too much"
    memory = estimate["memory"]
    at_peak = memory["place"][memory["peak"]]
    peak = _link(at_peak, f"peak of {human_bytes(estimate['peak_bytes'])}")
    step = estimate["step_seconds"]
    share = estimate["exposed_seconds"] / step if step else 0.0
    low, high = map(human_seconds, estimate["step_range"])
    expected = f" ({low} to {high} expected)" if low != high else ""
    sentences = [
        f'<strong class="{"good" if estimate["fits"] else "bad"}">{fits}</strong>: {over} at the '
        f"{peak}.",
        f"A step takes <strong>{human_seconds(step)}</strong>{expected} at "
        f"<strong>{estimate['mfu']:.1%}</strong> of the device's peak (MFU), of which "
        f"<strong>{human_seconds(estimate['exposed_seconds'])}</strong> ({share:.1%}) are exposed "
        "communication.",
    ]
    causes = estimate["causes"][:_REASONS]
    if not causes:
        return f"<p>{' '.join([*sentences, 'Compute waits for nothing.'])}</p>"
    return f"<p>{' '.join(sentences)}</p>\n<ol>{''.join(_cause(c, estimate) for c in causes)}</ol>"


def _cause(cause: dict[str, Any], estimate: dict[str, Any]) -> str:
    worst = estimate["transfers"][cause["worst_transfer"]]
    unit = worst["unit"] or "(root)"
    more = f" and {cause['count'] - 1} more" if cause["count"] > 1 else ""
    what = _link(worst["place"], f"{cause['op']} of {unit}")
    return (
        f"<li><strong>{human_seconds(cause['seconds'])}</strong>: {what}{more} in "
        f"{cause['phase']}: {escape(cause['text'])}</li>"
    )


def _link(place: int, text: str) -> str:
    return f'<a href="#place-{place}" data-place="{place}">{escape(text)}</a>'

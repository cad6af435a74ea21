"""Reports of ranks whose calls differ or fail, and the error made of them."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from graphshard.errors import CollectiveError, FingerprintError, GraphshardError
from graphshard.runtime.fingerprint import Call, first_difference

_SHARED = "_graphshard_shared"
"""The attribute of an error that all ranks raise, which they need not tell each other again."""


CANNOT_RUN = "calls the module"
"""The words of a rank that raised an error where the others are about to run a program."""


@dataclass(frozen=True)
class Report:
    """The words of a rank about itself once it is known that ranks differ, or that one failed."""

    module: int
    call: Call
    kind: type[GraphshardError] | None = None
    error: str | None = None

    @staticmethod
    def of(module: int, call: Call, error: BaseException | None) -> Report:
        """The report of a rank that makes `call` of `module`, in which `error` was raised."""
        if error is None:
            return Report(module, call)
        if isinstance(error, GraphshardError):
            return Report(module, call, type(error), str(error))
        text = f"{call.text.removeprefix('calls ')} failed: {type(error).__name__}: {error}"
        return Report(module, call, CollectiveError, text)


@dataclass(frozen=True)
class Verdict:
    """The error that all ranks raise.

    everywhere: whether it is the same error that each of them met.
    """

    kind: type[GraphshardError]
    text: str
    everywhere: bool = False


def verdict_of(reports: Sequence[Report]) -> Verdict:
    """The error for ranks that differ, or one of which failed."""
    errors = [report.error for report in reports]
    rank = next((rank for rank, text in enumerate(errors) if text is not None), None)
    running = [r for r in reports if r.error is None or r.call.text != CANNOT_RUN]
    if len({(report.module, report.call.text) for report in running}) > 1 or rank is None:
        return Verdict(FingerprintError, difference(reports))
    everywhere = all(text == errors[rank] for text in errors)
    where = "" if everywhere else f" (on rank {rank})"
    return Verdict(reports[rank].kind or CollectiveError, f"{errors[rank]}{where}", everywhere)


def judged(values: list[bytes]) -> bytes:
    """The pickled verdict on pickled (report without lines, digest, lines or None)."""
    said = [pickle.loads(value) for value in values]
    lines = {digest: lines for _, digest, lines in said if lines is not None}
    reports = [
        replace(report, call=Call(report.call.text, lines[digest])) for report, digest, _ in said
    ]
    return pickle.dumps(verdict_of(reports))


def shared(verdict: Verdict, own: BaseException | None) -> GraphshardError:
    """The error of a verdict; `own`, this rank's, if all ranks met it and it is of our classes."""
    if verdict.everywhere and isinstance(own, GraphshardError):
        mark(own)
        return own
    error = _made(verdict.kind, verdict.text)
    error.__cause__ = own
    mark(error)
    return error


def is_shared(error: BaseException) -> bool:
    """Whether all ranks raise `error`, and know it, or it is no use to tell them."""
    return getattr(error, _SHARED, False)


def mark(error: BaseException, *, told: bool = True) -> None:
    """Note whether all ranks raise `error`, or it is no use to tell them."""
    setattr(error, _SHARED, told)


def _made(kind: type[GraphshardError], text: str) -> GraphshardError:
    """An error of `kind`, or of its nearest base that takes a text alone."""
    for base in kind.__mro__:
        if issubclass(base, GraphshardError):
            with suppress(TypeError):
                return base(text)
    return CollectiveError(text)


def first_line(error: BaseException) -> str:
    """The class of `error` and the first line of its text."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def difference(reports: Sequence[Report]) -> str:
    """The message for ranks that gave these `reports`."""
    first = reports[0]
    modules = [report.module for report in reports]
    texts = [
        r.call.text
        + (f" of module {r.module}" if len(set(modules)) > 1 and r.module else "")
        + (f", where {r.error}" if r.error else "")
        for r in reports
    ]
    if len(set(modules)) > 1 and all(modules):
        begin = "the ranks call different modules, numbered as they were compiled: "
    elif len(set(texts)) > 1 and not all(r.call.text.startswith("is about to") for r in reports):
        begin = "the ranks make different calls: "
    else:
        other = next(rank for rank, report in enumerate(reports) if report.call != first.call)
        call = first.call.text if first.call.text.startswith("calls ") else ""
        return first_difference(call, other, first.call.lines, reports[other].call.lines)
    ranks = {text: [r for r, other in enumerate(texts) if other == text] for text in texts}
    return begin + ", ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))} {text}"
        for text, who in ranks.items()
    ) + (
        "; every rank must make the same calls of a sharded module, and of backward, in the same "
        "order and with equal arguments, and step its optimizer, clear gradients and write "
        "parameters alike"
    )  # fmt: skip

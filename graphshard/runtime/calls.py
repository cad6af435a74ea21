"""Texts of the calls that ranks make, which they compare, and the error where these differ."""

from __future__ import annotations

import hashlib
import inspect
import os
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import zip_longest
from typing import Any

from torch import Tensor, fx

from graphshard.errors import CollectiveError, FingerprintError, GraphshardError, PolicyError
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.placement import along_text
from graphshard.program import ops
from graphshard.program.collective import Collective, operands_of
from graphshard.program.finite import values_of
from graphshard.runtime.whereabouts import At

_DIGITS = 15  # of a hexadecimal digest: 60 bits, which fit an int64


@dataclass(frozen=True)
class Call:
    """What a rank is about to do: a text that follows "rank 0", and what else must be alike."""

    text: str
    lines: tuple[str, ...] = ()

    @cached_property
    def number(self) -> int:
        """60 bits of a digest of text and lines."""
        digest = hashlib.sha256("\n".join((self.text, *self.lines)).encode()).hexdigest()
        return int(digest[:_DIGITS], 16)

    @cached_property
    def at(self) -> At:
        """The place where ranks tell each other of it."""
        return At(0, f"the other ranks and {self.text}", True)


@dataclass(frozen=True)
class Fingerprint:
    """The collectives of a graph, one line of text each, independent of batch sizes."""

    lines: tuple[str, ...]

    @staticmethod
    def of(graph: fx.Graph, plan: ShardingPlan) -> Fingerprint:
        """The fingerprint of the forward or backward `graph` of a program."""
        return Fingerprint(tuple(_collective_lines(graph, plan)))

    @cached_property
    def call(self) -> Call:
        """The forward or backward that issues them."""
        return Call(f"is about to begin {self.lines[0].partition(':')[0]!r}", self.lines)

    def __add__(self, other: Fingerprint) -> Fingerprint:
        return Fingerprint(self.lines + other.lines)


def _collective_lines(graph: fx.Graph, plan: ShardingPlan) -> Iterator[str]:
    """Phase, operation, unit and ranks of each collective, with shape and dtype of its operands."""
    for node in graph.nodes:
        if node.target is ops.report_finite:
            checks = len(values_of(node))
            yield f"{node.meta['phase']} report of {checks} checks over {plan.world_size} ranks"
        if ops.is_collective(node):
            collective = Collective.of(node)
            operands = ", ".join(
                f"{name} {list(plan.layouts[name].shape)} {str(o.meta['val'].dtype)[6:]}"
                + (f" by {along_text(dim)}" if (dim := plan.layouts[name].dim) else "")
                for name, o in zip(collective.params, operands_of(node), strict=True)
            )
            unit = collective.unit or "(root)"
            ranks = _ranks(collective, plan)
            yield f"{node.meta['phase']} {collective.op.name} of {unit} over {ranks}: {operands}"


def _ranks(collective: Collective, plan: ShardingPlan) -> str:
    group = collective.group
    if group == ops.RESHARD:
        return f"groups of {collective.ranks} ranks"
    sizes = {ops.SHARD: plan.shard_size, ops.REPLICATE: plan.replicas, ops.ALL: plan.world_size}
    dimension = f" along {group!r} of {plan.mesh_shape}" if len(plan.mesh_shape) > 1 else ""
    return f"{sizes[group]} ranks{dimension}"


def first_difference(call: str, other: int, mine: Sequence[str], theirs: Sequence[str]) -> str:
    """The message for rank 0 with the lines `mine` and rank `other` with `theirs`, which differ.

    `call` is "calls ..." if the lines are of such a call; "" if they are collectives of a program.
    """
    end = "nothing more"
    pairs = zip_longest(mine, theirs, fillvalue=end)
    index, (first, second) = next(
        (index, pair) for index, pair in enumerate(pairs) if pair[0] != pair[1]
    )
    shown = f"\n  rank 0: {first or end}\n  rank {other}: {second or end}\n"
    if call:
        return (
            f"every rank {call}, but what it works on differs first at number {index + 1}:{shown}"
            "every rank must have the same model, policy and options, and an optimizer that has "
            "stepped equally often"
        )
    return (
        "the ranks would issue different collectives and hang; they differ first at number "
        f"{index + 1}:{shown}every rank must run the same model with the same policy, take the "
        "same branches and run backward and no_grad alike (only batch sizes and lengths may "
        "differ); gather_unused=True in the policy lets ranks use different units, as where some "
        "have images and others none, if each runs its units in the order of the plan, and once"
    )


def call_text(method: Callable[..., Any], name: str = "", /, **arguments: Any) -> str:
    """A call for messages, without arguments left at their defaults: "clip(max_norm=1.0)".

    `arguments` are those that ranks must give alike; one named `path`, or that has no name in
    calls, is shown without its name.
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
    """The names in what `listed` returned for an argument that is the name `of` something."""
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


def flags_of(values: list[bytes]) -> bytes:
    """The pickled flags of ranks that said (digest, failed, flag); None if they do not agree."""
    said = [pickle.loads(value) for value in values]
    alike = {(digest, failed) for digest, failed, _ in said} == {(said[0][0], False)}
    return pickle.dumps([flag for _, _, flag in said] if alike else None)


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
        others = (rank for rank, report in enumerate(reports) if report.call != first.call)
        other = next(others, None)
        if other is None:
            return (
                f"each rank {first.call.text}, but the numbers by which devices compared this call "
                "differ: a device's memory, or a collective, gave wrong values"
            )
        call = first.call.text if first.call.text.startswith("calls ") else ""
        text = first_difference(call, other, first.call.lines, reports[other].call.lines)
        ways = [_way_of(report.call.lines) for report in reports]
        if call or len(set(ways)) == 1:
            return text
        return (
            f"{text}\n{_by_rank(ways)}: every rank must call forward, also where one rank alone "
            "evaluates, logs or saves what it returns"
        )
    return begin + _by_rank(texts) + (
        "; every rank must make the same calls of a sharded module, and of backward, in the same "
        "order and with equal arguments, and step its optimizer, clear gradients and write "
        "parameters alike"
    )  # fmt: skip


def _by_rank(texts: Sequence[str]) -> str:
    """What each rank does, ranks that do the same together."""
    ranks = {text: [r for r, other in enumerate(texts) if other == text] for text in texts}
    return ", ".join(
        f"rank{'s' if len(who) > 1 else ''} {', '.join(map(str, who))} {text}"
        for text, who in ranks.items()
    )


def _way_of(lines: Sequence[str]) -> str:
    """How a rank calls the model, by the collectives of its call."""
    backward = [line.startswith("backward") for line in lines]
    if all(backward):
        return "calls backward"
    return f"calls forward {'with' if any(backward) else 'without'} gradients"

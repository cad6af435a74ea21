"""Where NaN or infinity began: a step run again, operator by operator, with a look at each value.

All ranks run it again alike; see README.md of passes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.errors import NonFiniteError, NonFiniteWarning, warn_user
from graphshard.program import ops
from graphshard.program.collective import operands_of, params_of
from graphshard.program.cut import cut, cut_backward
from graphshard.program.finite import Check, checks_of, is_floating, may_hold_infinities, values_of
from graphshard.program.program import FORWARD, Program
from graphshard.program.text import node_line, source_line
from graphshard.runtime.calls import mark
from graphshard.runtime.finite import Found
from graphshard.runtime.group import as_reals
from graphshard.runtime.lower import generators_of, lower


@dataclass
class Replay:
    """What it takes to run a call of a step again.

    inputs: the call's tensors; the same objects, so a caller that overwrites them between forward
        and backward makes the search fail.
    overwritten: by place among the arguments of forward, a copy of each that forward changed.
    random: the states of the generators of random numbers at the beginning, if it draws any.
    tangents: the gradients of the outputs; set when backward begins.
    """

    inputs: list[Tensor]
    overwritten: dict[int, Tensor]
    random: list[Any]
    tangents: list[Tensor | None] = field(default_factory=list)

    @classmethod
    def of(cls, step: Any, inputs: Sequence[Tensor], args: Sequence[Any]) -> Replay:
        """The replay of a call of a `Step` whose forward is about to run on `args`."""
        generators = generators_of(step.bindings.group.device) if step.draws else []
        overwritten = {place: args[place].clone() for place in step.overwrites}
        return cls(list(inputs), overwritten, [get() for get, _ in generators])

    @contextlib.contextmanager
    def random_numbers(self, device: torch.device) -> Iterator[None]:
        """Draw the numbers of the call inside; the generators are then as they were before."""
        generators = generators_of(device) if self.random else []
        now = [get() for get, _ in generators]
        try:
            for (_, put), state in zip(generators, self.random, strict=True):
                put(state)
            yield
        finally:
            for (_, put), state in zip(generators, now, strict=True):
                put(state)


def overwritten_by(program: Program) -> list[int]:
    """The places among the arguments of forward whose values it changes."""
    ends = [param.node for param in program.params]
    ends += [buffer.node for buffer in program.buffers]
    ends += [entry.node for entry in program.inputs]
    return [ends.index(entry.target) for entry in program.mutations]


@dataclass(frozen=True)
class Origin:
    """The node of a program at which a value was wrong first on a rank, and what it says of itself.

    of: what was checked there: "outputs", "gradients" or "reduced gradients".
    """

    node: str
    of: str
    text: str


class _Looking(fx.Interpreter):
    """Runs a lowered graph and notes the nodes whose values hold NaN or an unexpected infinity."""

    def __init__(self, module: fx.GraphModule, may_hold: set[str], bad: dict[str, str]) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._may_hold = may_hold
        self._bad = bad

    def run_node(self, node: fx.Node) -> Any:
        value = super().run_node(node)
        if isinstance(value, Tensor) and is_floating(value) and node.op != "output":
            what = _what_is_wrong(value, masked=node.name in self._may_hold)
            if what is not None:
                self._bad[node.name] = what
        return value


def _what_is_wrong(value: Tensor, *, masked: bool) -> str | None:
    """Which elements are wrong, such as "NaN in 3 of 8 elements"; None if all are finite."""
    real = as_reals(value)
    found = {"NaN": real.isnan(), "inf": real == float("inf"), "-inf": real == float("-inf")}
    if masked:
        del found["-inf"]
    texts = [
        f"{name} in {count:,} of {real.numel():,} elements"
        for name, where in found.items()
        if (count := int(where.sum()))
    ]
    return " and ".join(texts) or None


def tell(step: Any, program: Program, replay: Replay, found: Found, *, raises: bool) -> None:
    """Raise an error, or warn, about a `Step` whose report found something; all ranks call this.

    A warning searches only at a check's first time. `program` is that of the step; with another
    backward, if some outputs had no gradient.
    """
    group = step.bindings.group
    check = next(node for node in checks_of(program) if node.name == found.check)
    told = step.bindings.reports.told
    search = raises or check.name not in told
    told.add(check.name)
    of, ranks, origin = str(Check.of_node(check).of), found.ranks, None
    if of == ops.REDUCED:
        ranks = ()  # a search tells which gave it a wrong gradient
    if search:
        # All ranks take part, since its collectives are run again.
        bad = _run_again(step, program, replay, forward_only=check.meta["phase"] == FORWARD)
        of, ranks, origin = _first_of(
            group.all_gather_object(_origin(program, check, bad)), check, found
        )
    lines = [_first(check, of, ranks, group.size)]
    if origin is not None:
        lines.append(origin.text)
    elif search:
        lines.append(
            "it did not come up again when the step was run once more, operator by operator: "
            "compiled code rounds otherwise, or an input was overwritten since"
        )
    if not raises:
        warn_user("\n".join(lines), NonFiniteWarning)
        return
    lines.append(_advice(program))
    node = None if origin is None else origin.node
    error = NonFiniteError("\n".join(lines), check.meta["unit"], check.meta["phase"], ranks, node)
    mark(error)  # all ranks raise it
    raise error


def _first_of(
    origins: Sequence[Origin | None], check: fx.Node, found: Found
) -> tuple[str, tuple[int, ...], Origin | None]:
    """What was wrong first, on which ranks, and where it begins on the first of them.

    `origins` say where each rank found a wrong value of `check`, or a gradient that made one.
    """
    of = str(Check.of_node(check).of)
    begun = {rank: each for rank, each in enumerate(origins) if each is not None}
    if of == ops.REDUCED:
        given = {rank: each for rank, each in begun.items() if each.of == ops.GRADIENTS}
        if given:
            return ops.GRADIENTS, tuple(given), next(iter(given.values()))
    return of, found.ranks, next((begun[rank] for rank in found.ranks if rank in begun), None)


def _first(check: fx.Node, of: str, ranks: Sequence[int], size: int) -> str:
    unit, phase = check.meta["unit"], check.meta["phase"]
    where = f"unit {unit!r}" if unit else "the root unit"
    on = f", on rank {', '.join(map(str, ranks))} of {size}"
    if len(ranks) in (0, size):
        on = "" if len(ranks) < 2 else ", on every rank"
    return f"NaN or infinity came up first in the {of} of {where}, in {phase}{on}"


def _advice(program: Program) -> str:
    if not program.grad:
        return 'check_finite="warn" goes on'
    if any(node.target is ops.accumulate_grad for node in program.nodes()):
        return (
            "it was added to the gradients accumulated by no_sync(), which the module's "
            'zero_grad() drops; check_finite="warn" goes on'
        )
    return (
        "this backward added nothing to .grad, so the batch can be skipped; "
        'check_finite="warn" goes on'
    )


def _run_again(
    step: Any, program: Program, replay: Replay, *, forward_only: bool
) -> dict[str, str]:
    """Run a call again: by the name of a node, what was wrong with its value."""
    bindings = step.bindings
    bad: dict[str, str] = {}
    may_hold = {node.name for node in may_hold_infinities(program)}

    def run(graph: fx.Graph, args: Sequence[Any]) -> Any:
        return _Looking(lower(graph, bindings), may_hold, bad).run(
            *args, enable_io_processing=False
        )

    args = step.forward_args(replay.inputs)
    for place, value in replay.overwritten.items():
        args[place] = value
    with (
        torch.no_grad(),
        replay.random_numbers(bindings.group.device),
        step.versions_kept(),
        bindings.accumulated.paused(),
    ):
        _, _, tensors, others = run(cut(step.program).forward, args)
        if not forward_only:
            run(cut_backward(program, step.saved), [*tensors, *others, *replay.tangents])
    bindings.reports.take()
    return bad


def _origin(program: Program, check: fx.Node, bad: dict[str, str]) -> Origin | None:
    """Where what is wrong with the values of `check` begins on this rank; None if nothing is.

    Values that were reduced are right if the gradients are that this rank gave to the reduce, and
    they fit their dtype. `bad` says by the name of a node what is wrong with its value.
    """
    of = str(Check.of_node(check).of)
    values = values_of(check)
    if of == ops.REDUCED:
        given = [*map(_given, values)]
        return _beginning(program, given, ops.GRADIENTS, bad) or _overflow(values, bad)
    return _beginning(program, values, of, bad)


def _given(value: fx.Node) -> fx.Node:
    """The gradient that a rank gave to the reduces that the reduced `value` comes out of."""
    while ops.is_reduced(value):
        value = _operand(ops.origin(value))
    return value


def _overflow(values: Sequence[fx.Node], bad: dict[str, str]) -> Origin | None:
    """The first reduce whose sum is wrong, of operands that are right on every rank."""
    value = next((value for value in values if value.name in bad), None)
    if value is None:
        return None
    node = ops.origin(value)
    collective, name = ops.collective_of(node), _param(node)
    text = (
        f"the reduced gradient of {name!r} has {bad[value.name]}, though it was finite on each "
        f"rank: the sum over the ranks does not fit its dtype\n  {_line_of(collective)}"
    )
    return Origin(collective.name, ops.REDUCED, text)


def _beginning(
    program: Program, values: Sequence[fx.Node], of: str, bad: dict[str, str]
) -> Origin | None:
    """The first node, in order, that gave a wrong value from operands that were right."""
    reached = {value for value in values if value.name in bad}
    stack = [*reached]
    while stack:
        wrong = {value for value in _operands(stack.pop()) if value.name in bad} - reached
        reached |= wrong
        stack += wrong
    # Operands stand in front of what reads them, so those of the first one are right.
    first = next((node for node in program.graph.nodes if node in reached), None)
    if first is None:
        return None
    return Origin(first.name, of, f"it begins in {_told(program, first, bad[first.name])}")


def _operand(result: fx.Node) -> fx.Node:
    place: Any = result.args[1]
    return operands_of(ops.collective_of(result))[place]


def _param(result: fx.Node) -> str:
    place: Any = result.args[1]
    return params_of(ops.collective_of(result))[place]


def _operands(node: fx.Node) -> list[fx.Node]:
    """The operands of a node, through collectives, waits and operators with several results."""
    operands: list[fx.Node] = []
    stack = list(node.all_input_nodes)
    if ops.is_unpack(node):
        if ops.collective_of(node).target is ops.all_gather:
            return []  # the parameter itself is wrong
        stack = [_operand(node)]
    for value in stack:  # grows while it is walked
        if isinstance(value.meta.get("val"), Tensor):
            operands.append(value)
        else:
            stack += value.all_input_nodes
    return operands


def _told(program: Program, node: fx.Node, what: str) -> str:
    if ops.is_unpack(node):
        return f"the parameter {_param(node)!r} itself, which has {what}"
    ends: list[tuple[str, str, fx.Node | None]] = [
        *(("parameter", p.fqn, p.node) for p in program.params),
        *(("buffer", b.fqn, b.node) for b in program.buffers),
        *(("input", i.path, i.node) for i in program.inputs),
        *(
            ("gradient that backward was called with, of output", o.path, o.tangent)
            for o in program.outputs
        ),
    ]
    for kind, name, end in ends:
        if end is node:
            return f"the {kind} {name!r} itself, which has {what}"
    return f"%{node.name}, which has {what} from finite operands:\n  {_line_of(node)}"


def _line_of(node: fx.Node) -> str:
    """A node as the dump shows it, and the line of the model that it comes from."""
    text, line = node_line(node), source_line(node)
    return text if line is None else f"{text}\n  {line}"

"""Where NaN or infinity began: a step run again, operator by operator, with a look at each value.

Only a step whose report found something is run again, by all ranks alike. From the check that was
not finite a search follows wrong operands upwards, to the first operator that made one from finite
operands.
"""

from __future__ import annotations

import contextlib
import linecache
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, fx

from graphshard.errors import NonFiniteError, NonFiniteWarning
from graphshard.program import ops
from graphshard.program.collective import operands_of, params_of
from graphshard.program.cut import Crossing, cut, cut_backward
from graphshard.program.finite import Check, checks_of, is_floating, may_hold_infinities, values_of
from graphshard.program.program import FORWARD, Program
from graphshard.program.text import node_line
from graphshard.runtime.finite import Found
from graphshard.runtime.lower import lower
from graphshard.runtime.lowered import Bindings


class Step(Protocol):
    """What a search needs of a `graphshard.runtime.step.Step`."""

    program: Program
    bindings: Bindings
    saved: tuple[Crossing, ...]
    draws: bool  # random numbers
    overwrites: list[int]  # the places among the arguments of forward that it changes

    def forward_args(self, inputs: Sequence[Tensor]) -> list[Any]:
        """The arguments of the forward graph."""

    def versions_kept(self) -> contextlib.AbstractContextManager[Any]:
        """A context in which gathers change no version counters."""


@dataclass
class Replay:
    """What it takes to run a call of a step again.

    inputs: the call's tensors; the same objects, so a caller that overwrites them between forward
        and backward makes the search fail.
    overwritten: by place among the arguments of forward, a copy of each that forward changed.
    random: the states of the generators of random numbers at the beginning: the CPU's, and the
        device's if that is another.
    tangents: the gradients of the outputs; set when backward begins.
    """

    inputs: list[Tensor]
    overwritten: dict[int, Tensor]
    random: tuple[Tensor, ...]
    tangents: list[Tensor | None] = field(default_factory=list)

    @classmethod
    def of(cls, step: Step, inputs: Sequence[Tensor], args: Sequence[Any]) -> Replay:
        """The replay of a call that is about to run.

        Args:
            step: its program.
            inputs: its tensors.
            args: the arguments of forward, the last of which are `inputs`.
        """
        random: tuple[Tensor, ...] = ()
        if step.draws:
            device = step.bindings.group.device
            random = (torch.get_rng_state(),)
            if device.type == "cuda":
                random += (torch.cuda.get_rng_state(device),)
        return cls(list(inputs), {place: args[place].clone() for place in step.overwrites}, random)

    @contextlib.contextmanager
    def random_numbers(self, device: torch.device) -> Iterator[None]:
        """Draw the numbers of the call inside; the generators are then as they were before."""
        devices = [device] if device.type == "cuda" else []
        with torch.random.fork_rng(devices, enabled=bool(self.random)):
            if self.random:
                torch.set_rng_state(self.random[0])
            for state in self.random[1:]:
                torch.cuda.set_rng_state(state, device)
            yield


def overwritten_by(program: Program) -> list[int]:
    """The places among the arguments of forward whose values it changes."""
    ends = [param.node for param in program.params]
    ends += [buffer.node for buffer in program.buffers]
    ends += [entry.node for entry in program.inputs]
    return [ends.index(entry.target) for entry in program.mutations]


@dataclass(frozen=True)
class Origin:
    """The node of a program at which a value was wrong first, and what it says about itself."""

    node: str
    text: str


class _Looking(fx.Interpreter):
    """Runs a lowered graph and notes the nodes whose values hold NaN or an unexpected infinity."""

    def __init__(self, module: fx.GraphModule, may_hold: set[str], bad: dict[str, str]) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._may_hold = may_hold
        self._bad = bad

    def run_node(self, node: fx.Node) -> Any:
        """Run one node and look at its value."""
        value = super().run_node(node)
        if isinstance(value, Tensor) and is_floating(value) and node.op != "output":
            what = _what_is_wrong(value, masked=node.name in self._may_hold)
            if what is not None:
                self._bad[node.name] = what
        return value


def _what_is_wrong(value: Tensor, *, masked: bool) -> str | None:
    """Which elements are wrong, such as "NaN in 3 of 8 elements"; None if all are finite."""
    real = torch.view_as_real(value) if value.is_complex() else value
    found = {"NaN": real.isnan(), "inf": real == float("inf"), "-inf": real == float("-inf")}
    if masked:
        del found["-inf"]
    texts = [
        f"{name} in {count:,} of {real.numel():,} elements"
        for name, where in found.items()
        if (count := int(where.sum()))
    ]
    return " and ".join(texts) or None


def tell(
    step: Step,
    program: Program,
    replay: Replay,
    found: Found,
    grads: Sequence[Tensor | None],
    *,
    raises: bool,
) -> None:
    """Raise an error, or warn, about a step whose report found something; all ranks call this.

    Args:
        step: the step.
        program: its program; with another backward, if some outputs had no gradient.
        replay: what it takes to run the call again.
        found: by the report.
        grads: the reduced gradients, one for each parameter of the program; none after a forward.
        raises: raise `NonFiniteError`; or else warn, and search only at a check's first time.

    Raises:
        NonFiniteError: always, if `raises`.
        CollectiveError: another rank died meanwhile.
    """
    group = step.bindings.group
    check = next(node for node in checks_of(program) if node.name == found.check)
    mine: Origin | None = None
    told = step.bindings.reports.told
    search = raises or check.name not in told
    told.add(check.name)
    if Check.of_node(check).of == ops.REDUCED:
        mine = _wrong_grad(program, check, grads)
    elif search:
        # All ranks take part, since its collectives are run again.
        bad = _run_again(step, program, replay, forward_only=check.meta["phase"] == FORWARD)
        mine = _origin(program, check, bad) if group.rank in found.ranks else None
    origins = group.all_gather_object(mine)
    origin = next((origins[rank] for rank in found.ranks if origins[rank] is not None), None)
    lines = [_first(check, found, group.size)]
    if origin is not None:
        lines.append(origin.text)
    elif search:
        lines.append(
            "it did not come up again when the step was run once more, operator by operator: "
            "compiled code rounds otherwise, or an input was overwritten since"
        )
    if not raises:
        warnings.warn("\n".join(lines), NonFiniteWarning, stacklevel=2)
        return
    lines.append(_advice(program))
    node = None if origin is None else origin.node
    raise NonFiniteError(
        "\n".join(lines), check.meta["unit"], check.meta["phase"], found.ranks, node
    )


def _first(check: fx.Node, found: Found, size: int) -> str:
    unit, ranks = check.meta["unit"], ", ".join(map(str, found.ranks))
    where = f"unit {unit!r}" if unit else "the root unit"
    on = "on every rank" if len(found.ranks) == size else f"on rank {ranks} of {size}"
    on = "" if size == 1 else f", {on}"
    of, phase = Check.of_node(check).of, check.meta["phase"]
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


def _wrong_grad(program: Program, check: fx.Node, grads: Sequence[Tensor | None]) -> Origin | None:
    """The first gradient that was finite on every rank before its reduce, and is not behind it."""
    wrong = {
        param.fqn: what
        for param, grad in zip(program.params, grads, strict=False)
        if grad is not None and (what := _what_is_wrong(grad, masked=False)) is not None
    }
    for value in values_of(check):
        collective = ops.collective_of(ops.origin(value))
        for name in params_of(collective):
            if name in wrong:
                text = (
                    f"the reduced gradient of {name!r} has {wrong[name]}, though it was finite on "
                    f"each rank: the sum over the ranks does not fit its dtype"
                )
                return Origin(collective.name, f"{text}\n  {_line_of(collective)}")
    return None


def _run_again(
    step: Step, program: Program, replay: Replay, *, forward_only: bool
) -> dict[str, str]:
    """Run a call again: by the name of a node, what was wrong with its value."""
    bindings = step.bindings
    bad: dict[str, str] = {}
    may_hold = {node.name for node in may_hold_infinities(program)}

    def run(graph: fx.Graph, args: Sequence[Any]) -> Any:
        module = lower(
            graph,
            bindings.plan,
            bindings.group,
            bindings.accumulated,
            bindings.reports,
            bindings.forms,
        )
        return _Looking(module, may_hold, bad).run(*args, enable_io_processing=False)

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
            tangents = [*replay.tangents]
            run(cut_backward(program, step.saved), [*tensors, *others, *tangents])
    bindings.reports.take()
    return bad


def _origin(program: Program, check: fx.Node, bad: dict[str, str]) -> Origin | None:
    """The first node, in order, that gave a wrong value from operands that were right."""
    by_name = {node.name: node for node in program.graph.nodes}
    reached = {value.name for value in values_of(check) if value.name in bad}
    stack = list(reached)
    begins: set[str] = set()
    while stack:
        node = by_name[stack.pop()]
        wrong = [value.name for value in _operands(node) if value.name in bad]
        if not wrong:
            begins.add(node.name)
        stack += [name for name in wrong if name not in reached]
        reached.update(wrong)
    first = next((node for node in program.graph.nodes if node.name in begins), None)
    if first is None:
        return None
    return Origin(first.name, f"it begins in {_told(program, first, bad[first.name])}")


def _operands(node: fx.Node) -> list[fx.Node]:
    """The operands of a node, through collectives, waits and operators with several results."""
    operands: list[fx.Node] = []
    stack = list(node.all_input_nodes)
    if ops.is_unpack(node):
        collective = ops.collective_of(node)
        if collective.target is ops.all_gather:
            return []  # the parameter itself is wrong
        stack = [operands_of(collective)[node.args[1]]]  # type: ignore[index]
    for value in stack:  # grows while it is walked
        if isinstance(value.meta.get("val"), Tensor):
            operands.append(value)
        else:
            stack += value.all_input_nodes
    return operands


def _told(program: Program, node: fx.Node, what: str) -> str:
    if ops.is_unpack(node):
        collective = ops.collective_of(node)
        name = params_of(collective)[node.args[1]]  # type: ignore[index]
        return f"the parameter {name!r} itself, which has {what}"
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
    text = node_line(node)
    if "line" not in node.meta:
        return text
    file, number, function = node.meta["line"]
    source = linecache.getline(file, number).strip()
    of = "" if node.meta["phase"] == FORWARD else "the backward of "
    return f"{text}\n  {of}{file}:{number} in {function}: {source}"

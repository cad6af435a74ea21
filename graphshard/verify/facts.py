"""The facts that the rules look at, gathered in one walk, and the error for a broken rule."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import fx

from graphshard.errors import VerifyError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import Collective, OneTensor, param_of
from graphshard.program.pass_protocol import Stage
from graphshard.program.program import ParamEntry, Program, Signature, signature, signatures
from graphshard.program.text import node_line
from graphshard.verify.numbering import Values

CollectiveKey = tuple[str, str, str, tuple[str, ...], str]

Issued = tuple[CollectiveKey, fx.Node]
"""A collective with its key."""


@dataclass(frozen=True)
class Reference:
    """A program as it was before a pass, with the captured facts that must stay as they were."""

    graded: frozenset[str]  # parameters with a gradient, when captured
    values: Values | None  # when captured; None after a pass that may change them
    tables: Mapping[str, tuple[Any, ...]]
    settings: Mapping[str, Any]  # see `settings_of`
    added: frozenset[tuple[str, str]] | None  # see `added_by`; None for a pass that may change it
    collectives: Sequence[Issued]  # in order
    reads: Mapping[fx.Node, tuple[Signature, ...]]  # shape and dtype of each compute node's inputs
    results: tuple[tuple[Signature, ...], ...]  # of outputs and mutations
    signatures: Signatures  # of every tensor asked about so far

    @classmethod
    def of(
        cls, program: Program, captured: Reference | None = None, facts: Facts | None = None
    ) -> Reference:
        """The reference of `program` as it is now, before the next pass rewrites it.

        `captured` was taken before the first pass; `facts` are of `program`, if it was verified
        just now.
        """
        cache = Signatures() if facts is None else facts.signatures
        results = program.results()
        graded = frozenset(
            param.fqn
            for param, grad in zip(program.params, results.grads, strict=True)
            if grad is not None
        )
        return cls(
            graded=graded if captured is None else captured.graded,
            values=Values.of(program) if captured is None else captured.values,
            tables=tables_of(program),
            settings=settings_of(program),
            added=added_by(program),
            collectives=issued_by(program, facts),
            reads=reads_of(program.graph.nodes, cache) if facts is None else facts.reads,
            results=(signatures(results.outputs), signatures(results.mutations)),
            signatures=cache,
        )

    def moved_to(self, program: Program, facts: Facts | None) -> Reference:
        """This reference with what `OF_EACH_PASS` looks at, as it is in `program` now."""
        return replace(self, added=added_by(program), collectives=issued_by(program, facts))


def tables_of(program: Program) -> dict[str, tuple[Any, ...]]:
    """The tables of a program's inputs and results, by their names."""
    return {
        name: getattr(program, name)
        for name in ("params", "buffers", "inputs", "outputs", "mutations")
    }


def settings_of(program: Program) -> dict[str, Any]:
    """The fields of a program that say how it was captured, and for which ranks."""
    return {
        name: getattr(program, name)
        for name in ("training", "grad", "capture_device", "device", "mesh_shape", "stale")
    }


def added_by(program: Program) -> frozenset[tuple[str, str]]:
    """The accumulated gradients that `program` adds: parameter, and "gradient" or "shard"."""
    adds = program.graph.find_nodes(op="call_function", target=ops.add_accumulated, sort=False)
    return frozenset((str(param_of(node)), str(OneTensor.of(node).accumulated_as)) for node in adds)


def issued_by(program: Program, facts: Facts | None) -> list[Issued]:
    """The collectives of `program` in their order; `facts` are as those of `Reference.of`."""
    if facts is not None:
        return facts.issued
    return [(collective_key(node), node) for node in program.nodes() if ops.is_collective(node)]


def collective_key(node: fx.Node) -> CollectiveKey:
    """The part of a collective that ranks must agree on: phase, op, unit, parameters, group."""
    collective = Collective.of(node)
    where = node.meta["phase"], collective.op.name, collective.unit
    return *where, tuple(collective.params), collective.group


@dataclass
class Facts:
    """One program under verification, and its nodes by their roles."""

    program: Program
    plan: ShardingPlan
    after: str
    done: Stage
    reference: Reference | None
    nodes: list[fx.Node] = field(default_factory=list)
    place: dict[fx.Node, int] = field(default_factory=dict)
    collectives: list[fx.Node] = field(default_factory=list)
    waits: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # by collective
    frees: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)  # by wait
    params: dict[str, ParamEntry] = field(default_factory=dict)
    signatures: Signatures = field(default_factory=lambda: Signatures())

    @cached_property
    def issued(self) -> list[Issued]:
        """Every collective with its key, in order."""
        return [(collective_key(node), node) for node in self.collectives]

    @cached_property
    def reads(self) -> Mapping[fx.Node, tuple[Signature, ...]]:
        """Shape and dtype of each input of every compute node."""
        return reads_of(self.nodes, self.signatures)

    @classmethod
    def of(
        cls,
        program: Program,
        plan: ShardingPlan,
        *,
        after: str,
        done: Stage,
        reference: Reference | None,
    ) -> Facts:
        """The facts of `program`."""
        facts = cls(program, plan, after, done, reference)
        if reference is not None:
            facts.signatures = reference.signatures
        facts.nodes = list(program.graph.nodes)
        facts.place = {node: index for index, node in enumerate(facts.nodes)}
        facts.params = {param.fqn: param for param in program.params}
        for node in facts.nodes:
            if node.op != "call_function":
                continue
            if ops.is_collective(node):
                facts.collectives.append(node)
                facts.waits.setdefault(node, [])
            elif node.target is ops.wait:
                facts.waits.setdefault(facts.operand(node), []).append(node)
                facts.frees.setdefault(node, [])
            elif node.target is ops.free:
                facts.frees.setdefault(facts.operand(node), []).append(node)
        return facts

    def operand(self, node: fx.Node) -> fx.Node:
        """The collective that a `wait` ends, or the wait whose results a `free` frees."""
        source = node.args[0] if node.args else None
        allowed = ops.COLLECTIVES if node.target is ops.wait else {ops.wait}
        if not isinstance(source, fx.Node) or source.target not in allowed:
            operand = "a collective" if node.target is ops.wait else "a wait on an all_gather"
            self.fail("operands", node, f"{ops.op_name(node)} must take {operand}")
        return source

    def gathers(self) -> list[fx.Node]:
        """Every all_gather, in order."""
        return [node for node in self.collectives if node.target is ops.all_gather]

    def fail(self, rule: str, node: fx.Node | None, text: str) -> NoReturn:
        """Raise the error for `node`, or for the whole program."""
        raise VerifyError(self.fault(rule, node, text))

    def fault(self, rule: str, node: fx.Node | None, text: str) -> str:
        """The message for `node`, or for the whole program, with the lines of the dump around."""
        lines = [f"after pass {self.after!r} the program breaks the rule {rule!r}: {text}"]
        if node is not None:
            unit = node.meta.get("unit", "?")
            lines.append(
                f"node %{node.name}, unit {unit!r}" if unit else f"node %{node.name}, root unit"
            )
            lines += self.around(node)
        return "\n".join(lines)

    def around(self, node: fx.Node) -> list[str]:
        """The lines of the dump from two before `node` to two after it."""
        at = self.place.get(node)
        if at is None:
            return []
        shown = self.nodes[max(0, at - 2) : at + 3]
        return [f"{'>' if n is node else ' '} {_cut(node_line(n))}" for n in shown]


class Signatures:
    """A cache of shapes and dtypes: each tensor is asked once, however many passes there are."""

    def __init__(self) -> None:
        # Holding the tensor keeps its id from being used again.
        self._by_id: dict[int, tuple[torch.Tensor, Signature]] = {}

    def of(self, val: Any) -> Signature:
        """The signature of `val`; see `signature`."""
        entry = self._by_id.get(id(val))
        if entry is not None:
            return entry[1]
        result = signature(val)
        if isinstance(val, torch.Tensor):
            self._by_id[id(val)] = val, result
        return result


def reads_of(
    nodes: Iterable[fx.Node], signatures: Signatures
) -> dict[fx.Node, tuple[Signature, ...]]:
    """Shape and dtype of each input of the compute nodes among `nodes`."""
    # Each value is asked once, since many nodes read it. Results of collectives are never read as
    # they are: an unpack picks from them.
    by_value = {
        node: signatures.of(node.meta.get("val"))
        for node in nodes
        if not ops.is_collective(node) and node.target is not ops.wait
    }
    return {
        node: tuple([by_value.get(value, ()) for value in node.all_input_nodes])
        for node in by_value
        if ops.is_compute(node)
    }


def _cut(line: str, width: int = 160) -> str:
    return line if len(line) <= width else line[: width - 3] + "..."

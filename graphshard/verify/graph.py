"""Rules on the graph: the places of inputs and results, the metadata, the phases, the tables."""

from __future__ import annotations

from dataclasses import fields
from itertools import chain, zip_longest
from typing import Any

from torch import fx

from graphshard.program.program import BACKWARD, FORWARD, signatures
from graphshard.program.text import argument_text
from graphshard.verify.facts import Facts, settings_of, tables_of
from graphshard.verify.numbering import constants_of


def check_layout(facts: Facts) -> None:
    """Placeholders in the order of the tables, then forward, then backward, then one output."""
    program = facts.program
    expected = [
        *(entry.node for entry in program.params),
        *(entry.node for entry in program.buffers),
        *(entry.node for entry in program.inputs),
        *(entry.tangent for entry in program.outputs if entry.tangent is not None),
    ]
    placeholders = [node for node in facts.nodes if node.op == "placeholder"]
    for entry, node in zip(expected, placeholders, strict=False):
        if entry is not node:
            facts.fail("layout", node, f"the tables expect placeholder %{entry.name} here")
    if len(expected) != len(placeholders):
        facts.fail(
            "layout",
            None,
            f"the tables name {len(expected)} placeholders, the graph has {len(placeholders)}",
        )
    rank = {"placeholder": 0, FORWARD: 1, BACKWARD: 2, "output": 3}
    latest = 0
    for node in facts.nodes:
        kind = node.op if node.op in rank else node.meta.get("phase")
        if kind not in rank:
            facts.fail("layout", node, f"its phase is {kind!r}, not {FORWARD!r} or {BACKWARD!r}")
        if rank[kind] < latest:
            facts.fail("layout", node, f"{kind} nodes must stand before what is above it")
        latest = rank[kind]
    if latest != rank["output"] or sum(node.op == "output" for node in facts.nodes) != 1:
        facts.fail("layout", facts.nodes[-1], "the graph must end in its one output")
    results = program.results()
    for name, values, table in (
        ("outputs", results.outputs, program.outputs),
        ("mutations", results.mutations, program.mutations),
        ("grads", results.grads, program.params),
        ("input_grads", results.input_grads, program.inputs),
    ):
        if len(values) != len(table):
            facts.fail(
                "layout",
                program.output_node,
                f"{len(values)} {name} are returned, the table has {len(table)}",
            )


_NEEDED = frozenset({"val", "phase", "fqn", "unit"})


def check_metadata(facts: Facts) -> None:
    """Every node has its value, phase, module and unit in `meta`, and stands behind its inputs."""
    for index, node in enumerate(facts.nodes):
        if node.op == "call_function" and not node.meta.keys() >= _NEEDED:
            missing = ", ".join(sorted(_NEEDED - node.meta.keys()))
            facts.fail("metadata", node, f"meta lacks {missing}")
        for value in node.all_input_nodes:
            at = facts.place.get(value)
            if at is None:
                facts.fail("metadata", node, f"it reads %{value.name}, erased from the graph")
            if at >= index:
                facts.fail("metadata", node, f"it reads %{value.name}, which stands below it")


def check_phases(facts: Facts) -> None:
    """Forward neither reads nor returns a value of backward; tangents belong to backward.

    A program without gradients has no backward.
    """
    if not facts.program.grad:
        for node in facts.program.nodes(BACKWARD):
            facts.fail("phases", node, "it is in backward, which a program without gradients lacks")
    tangents = {entry.tangent for entry in facts.program.outputs}

    def in_backward(value: fx.Node) -> bool:
        return value in tangents or (
            value.op == "call_function" and value.meta["phase"] == BACKWARD
        )

    for node in facts.program.nodes(FORWARD):
        for value in node.all_input_nodes:
            if in_backward(value):
                facts.fail("phases", node, f"it is in forward and reads %{value.name} of backward")
    results = facts.program.results()
    for value in chain(results.outputs, results.mutations):
        if isinstance(value, fx.Node) and in_backward(value):
            facts.fail("phases", value, "it is in backward, but forward returns it")


def check_tables(facts: Facts) -> None:
    """A pass leaves the tables, and what says how the program was captured, as they were."""
    if facts.reference is None:
        return
    earlier = facts.reference.settings
    for name, setting in settings_of(facts.program).items():
        if setting != earlier[name]:
            facts.fail(
                "unchanged",
                None,
                f"the program's {name} was {argument_text(earlier[name])} before the pass, and is "
                f"{argument_text(setting)}",
            )
    for table, entries in tables_of(facts.program).items():
        for index, (now, was) in enumerate(zip_longest(entries, facts.reference.tables[table])):
            if now != was:
                facts.fail(
                    "unchanged",
                    None,
                    f"entry {index} of the program's {table} was {_entry_text(was)} before the "
                    f"pass, and is {_entry_text(now)}",
                )


def check_constants(facts: Facts) -> None:
    """A constant is the tensor that it was when captured, and nothing was written into it.

    A pass that says that it changes values may change constants; see `Pass.changes_values`.
    `check_tables` makes sure that the same constants are there.
    """
    captured = None if facts.reference is None else facts.reference.values
    if captured is None:
        return
    for was, now in zip(captured.constants, constants_of(facts.program), strict=True):
        same = now.value is was.value
        if not same or now.version != was.version:
            node = next(entry.node for entry in facts.program.buffers if entry.fqn == now.fqn)
            how = "was written in place" if same else "is another tensor"
            facts.fail("constants", node, f"the constant {now.fqn!r} {how}")


def check_unchanged(facts: Facts) -> None:
    """Inputs of nodes, and results of the step, have the shapes and dtypes they had before."""
    if facts.reference is None:
        return
    earlier = facts.reference.reads
    for node, now in facts.reads.items():
        before = earlier.get(node, now)
        if now != before:
            facts.fail("unchanged", node, f"it reads {now}, and read {before} before the pass")
    results = facts.program.results()
    for values, before in zip(
        (results.outputs, results.mutations), facts.reference.results, strict=True
    ):
        for value, now, was in zip(values, signatures(values), before, strict=True):
            if now != was:
                node = value if isinstance(value, fx.Node) else facts.program.output_node
                facts.fail("unchanged", node, f"the step returns {now}, and {was} before the pass")


def _entry_text(entry: Any) -> str:
    if entry is None:
        return "not there"
    shown = ((f.name, getattr(entry, f.name)) for f in fields(entry) if f.compare)
    return f"({', '.join(f'{name}={argument_text(value)}' for name, value in shown)})"

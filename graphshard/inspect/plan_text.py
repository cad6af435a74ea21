"""A sharding plan for people (plain text, a rich table) and for programs (plain data)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from graphshard.inspect.fold import Folded, fold
from graphshard.inspect.units_text import human_bytes, human_count, mesh_text, some_of
from graphshard.plan import ParamLayout, ShardingPlan, Unit
from graphshard.strategy import Strategy

COLUMNS = ("unit", "class", "units", "params", "numel", "sharded", "unsharded", "padding")
_LEFT_ALIGNED = 2  # of the columns
_ALWAYS_SHOWN = ("backward_prefetch", "forward_prefetch")  # of the options; others if chosen

_LEGEND = """\
sharded: bytes each rank stores; unsharded: bytes while gathered; padding: bytes over all ranks;
a line of several units gives the numbers of one"""


class _Facts(NamedTuple):
    """What a line says about a unit; units fold only if all of it is equal."""

    module_class: str
    params: int
    numel: int
    sharded: int
    unsharded: int
    padding: int


def plan_text(plan: ShardingPlan, *, unfold: bool = False) -> str:
    """The plan as plain text that is the same in every process.

    Equal layers share one line (`layers.0-79.mlp`); `unfold` gives every unit a line of its own.
    """
    rows = [COLUMNS, *(_cells(line) for line in _lines(plan, unfold)), _total(plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(COLUMNS))]
    body = [_aligned(row, widths) for row in rows]
    rule = "-" * len(body[0])
    table = [body[0].rstrip(), rule, *(row.rstrip() for row in body[1:-1]), rule, body[-1].rstrip()]
    header = [f"{name:<9} {value}" if name else value for name, value in _header(plan)]
    notes = [f"{name}: {value}" for name, value in _notes(plan)]
    return "\n".join([*header, "", *table, _LEGEND, *notes])


def plan_table(plan: ShardingPlan, *, unfold: bool = False) -> RenderableType:
    """The content of `plan_text` for a terminal, in colours, to be printed by rich."""
    header = Text("\n").join(
        Text.assemble((f"{name:<9} ", "dim"), value) if name else Text(value, style="bold")
        for name, value in _header(plan)
    )
    table = Table(box=box.SIMPLE, padding=0, show_edge=False, show_footer=True)
    for position, (name, total) in enumerate(zip(COLUMNS, _total(plan), strict=True)):
        table.add_column(
            name,
            footer=total,
            justify="left" if position < _LEFT_ALIGNED else "right",
            style="cyan" if position == 0 else None,
            no_wrap=position >= _LEFT_ALIGNED,
            overflow="fold",
        )
    for line in _lines(plan, unfold):
        table.add_row(*(Text(cell) for cell in _cells(line)))
    notes = [
        Text.assemble((f"{name}: ", "bold yellow" if name == "warning" else "dim"), value)
        for name, value in _notes(plan)
    ]
    return Group(header, Text(), table, Text(_LEGEND, style="dim"), *notes)


def plan_dict(plan: ShardingPlan, units: bool = True) -> dict[str, Any]:
    """The plan as plain data, ready for JSON; sizes in elements and bytes, never folded.

    `units=False` leaves out the list of units.
    """
    data: dict[str, Any] = {
        "model": plan.units[0].module_class,
        "policy": plan.policy.to_dict(),
        "world_size": plan.world_size,
        "mesh_shape": list(plan.mesh_shape),
        "shard_size": plan.shard_size,
        "replicas": plan.replicas,
        "total": {"units": len(plan.units), **_sum(plan)._asdict()},
        "warnings": list(plan.warnings),
    }
    del data["total"]["module_class"]
    if units:
        data["units"] = [_unit_dict(unit) for unit in plan.units]
    return data


def _unit_dict(unit: Unit) -> dict[str, Any]:
    return {
        "fqn": unit.fqn,
        **_facts(unit)._asdict(),
        "params": [_layout_dict(layout) for layout in unit.layouts],
    }


def _layout_dict(layout: ParamLayout) -> dict[str, Any]:
    return {
        "fqn": layout.fqn,
        "names": list(layout.names),
        "shape": list(layout.shape),
        "dtype": str(layout.dtype).removeprefix("torch."),
        "requires_grad": layout.requires_grad,
        "placement": layout.placement,
        "shard_shape": list(layout.shard_shape),
    }


def _header(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    numel = _sum(plan).numel
    units = f"{len(plan.units):,} unit{'s' if len(plan.units) > 1 else ''}"
    yield (
        "",
        f"sharding plan of {plan.units[0].module_class}: {numel:,} parameters "
        f"({human_count(numel)}) in {units}",
    )
    policy = plan.policy
    shared = policy.shared_options()
    shown = {name: shared[name] for name in _ALWAYS_SHOWN} | policy.chosen_options()
    strategy = shared["strategy"]
    shown.pop("strategy", None)
    yield "policy", f"{type(policy).__name__}{_options(policy.own_options())}"
    mesh = mesh_text(plan.mesh_shape)
    yield "sharding", f"{strategy}, world size {plan.world_size}, mesh {mesh}"
    yield "schedule", ", ".join(f"{name}={value}" for name, value in shown.items())


def _options(options: dict[str, str]) -> str:
    return f"({', '.join(f'{name}={value}' for name, value in options.items())})"


def _lines(plan: ShardingPlan, unfold: bool) -> list[Folded[_Facts]]:
    rows = [(unit.fqn, _facts(unit)) for unit in plan.units]
    return [Folded(*row, 1) for row in rows] if unfold else fold(rows)


def _facts(unit: Unit) -> _Facts:
    return _Facts(
        unit.module_class,
        len(unit.params),
        unit.numel,
        unit.sharded_bytes,
        unit.unsharded_bytes,
        unit.padding_bytes,
    )


def _sum(plan: ShardingPlan) -> _Facts:
    columns = zip(*(_facts(unit)[1:] for unit in plan.units), strict=True)
    return _Facts("", *(sum(column) for column in columns))


def _cells(line: Folded[_Facts]) -> tuple[str, ...]:
    facts = line.facts
    return (
        line.name or "(root)",
        facts.module_class,
        f"{line.count:,}",
        f"{facts.params:,}",
        f"{facts.numel:,}",
        human_bytes(facts.sharded),
        human_bytes(facts.unsharded),
        human_bytes(facts.padding),
    )


def _total(plan: ShardingPlan) -> tuple[str, ...]:
    return _cells(Folded("total", _sum(plan), len(plan.units)))


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(
        cell.ljust(width) if column < _LEFT_ALIGNED else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=True))
    )


def _notes(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    layouts = [(unit, layout) for unit in plan.units for layout in unit.layouts]
    for unit, layout in layouts:
        if len(layout.names) > 1:
            yield "tied", f"{some_of(layout.names, ' = ')}, stored once in {unit.fqn or '(root)'}"
    replicated = [layout.fqn for _, layout in layouts if not layout.sharded]
    if replicated and plan.policy.strategy is not Strategy.NO_SHARD:
        yield "replicated", f"{some_of(replicated)} (no dimension to shard)"
    for note in plan.policy.notes:
        yield "note", note
    for warning in plan.warnings:
        yield "warning", warning

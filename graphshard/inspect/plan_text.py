"""A sharding plan as plain text, as a rich table, and as plain data."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import fx

from graphshard.cost.streams import moved_bytes
from graphshard.errors import GraphshardError
from graphshard.format import Folded, fold, human_bytes, human_count, mesh_text, some_of
from graphshard.planning.layout import ParamLayout, Unit, UnitOptions, options_of
from graphshard.planning.plan import ShardingPlan, gradient_bytes, padding_text
from graphshard.planning.planner import fitted
from graphshard.planning.slabs import pack
from graphshard.policy.base import plain_of
from graphshard.policy.placement import along_text
from graphshard.policy.strategy import Strategy
from graphshard.program import ops
from graphshard.program.aliases import gather_waits
from graphshard.program.collective import Collective
from graphshard.program.program import BACKWARD, FORWARD, RECOMPUTED, Program
from graphshard.program.sizes import assumed_text
from graphshard.program.storages import storages_of

COLUMNS = ("unit", "class", "units", "params", "numel", "sharded", "unsharded", "padding")


OWN = "own options"  # a column only if units have options other than the policy's


_LEFT_ALIGNED = 2  # of the columns


_ALWAYS_SHOWN = ("backward_prefetch", "forward_prefetch")  # options shown even with defaults


_LEGEND = """\
sharded: bytes each rank stores; unsharded: bytes while gathered; padding: bytes over all ranks;
a line of several units gives the numbers of one"""


class _Facts(NamedTuple):
    """The facts of a unit's line; units fold only if all of them are equal."""

    module_class: str
    params: int
    numel: int
    sharded: int
    unsharded: int
    padding: int
    own: str = ""  # the options that differ from the policy's


def plan_text(plan: ShardingPlan, *, unfold: bool = False) -> str:
    """Return the plan as plain text that is the same in every process.

    Equal layers share one line (`layers.0-79.mlp`); `unfold` prints every unit on its own line.
    """
    columns = _columns(plan)
    rows = [columns, *(_cells(line) for line in _lines(plan, unfold)), _total(plan)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(columns))]
    body = [_aligned(row, widths) for row in rows]
    rule = "-" * len(body[0])
    table = [body[0].rstrip(), rule, *(row.rstrip() for row in body[1:-1]), rule, body[-1].rstrip()]
    header = [f"{name:<9} {value}" if name else value for name, value in _header(plan)]
    notes = [f"{name}: {value}" for name, value in _notes(plan)]
    return "\n".join([*header, "", *table, _LEGEND, *notes])


def plan_table(plan: ShardingPlan, *, unfold: bool = False) -> RenderableType:
    """Return the content of `plan_text` as a coloured table for rich to print."""
    header = Text("\n").join(
        Text.assemble((f"{name:<9} ", "dim"), value) if name else Text(value, style="bold")
        for name, value in _header(plan)
    )
    table = Table(box=box.SIMPLE, padding=0, show_edge=False, show_footer=True)
    columns = _columns(plan)
    for position, (name, total) in enumerate(zip(columns, _total(plan), strict=False)):
        table.add_column(
            name,
            footer=total,
            justify="left" if _is_words(position) else "right",
            style="cyan" if position == 0 else None,
            no_wrap=not _is_words(position),
            overflow="fold",
        )
    for line in _lines(plan, unfold):
        table.add_row(*(Text(cell) for cell in _cells(line)[: len(columns)]))
    notes = [
        Text.assemble((f"{name}: ", "bold yellow" if name == "warning" else "dim"), value)
        for name, value in _notes(plan)
    ]
    return Group(header, Text(), table, Text(_LEGEND, style="dim"), *notes)


def plan_dict(plan: ShardingPlan, units: bool = True) -> dict[str, Any]:
    """Return the plan as plain data, ready for JSON; sizes in elements and bytes, never folded.

    `units=False` leaves out the list of units.
    """
    data: dict[str, Any] = {
        "model": plan.units[0].module_class,
        "policy": plan.policy.to_dict(),
        "world_size": plan.world_size,
        "runs_on": plan.runs_on or None,
        "mesh_shape": list(plan.mesh_shape),
        "shard_size": plan.shard_size,
        "replicas": plan.replicas,
        "total": {"units": len(plan.units), **_sum(plan)._asdict()},
        "gradient_bytes": vars(gradient_bytes(plan)),
        "ignored": [_layout_dict(layout) for layout in plan.ignored],
        "warnings": list(plan.warnings),
        "backend": plan.backend,
    }
    del data["total"]["module_class"], data["total"]["own"]
    if plan.replica_all_reduce:
        data["replica_all_reduce"] = plan.replica_all_reduce
    if plan.program is not None:
        data["memory"] = memory_dict(plan.program)
        if plan.program.budget is not None:
            data["schedule"] = plan.program.budget.to_dict()
        if plan.program.regions is not None:
            data["regions"] = plan.program.regions.to_dict()
    if units:
        data["units"] = [_unit_dict(unit, plan) for unit in plan.units]
    return data


def _unit_dict(unit: Unit, plan: ShardingPlan) -> dict[str, Any]:
    data = {"fqn": unit.fqn, **_facts(unit, plan)._asdict()}
    del data["own"]
    options = {name: plain_of(value) for name, value in vars(unit.options).items()}
    params = [_layout_dict(layout) for layout in unit.layouts]
    return {**data, "options": options, "params": params}


def _layout_dict(layout: ParamLayout) -> dict[str, Any]:
    return {
        "fqn": layout.fqn,
        "names": list(layout.names),
        "shape": list(layout.shape),
        "dtype": str(layout.dtype).removeprefix("torch."),
        "requires_grad": layout.requires_grad,
        "placement": layout.placement,
        "dim": layout.dim if layout.sharded else None,
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
    backend = plan.process_group_backend
    shared = policy.shared_options()
    by_cost = policy.schedule == "overlap"  # prefetch options then have no effect
    options = {name: shared[name] for name in _ALWAYS_SHOWN if not by_cost}
    options |= policy.chosen_options()
    if not by_cost and policy.forward_prefetch is None:
        ahead = policy.forward_units_ahead(backend, plan.hosts)
        on = backend.replace("none", "one rank")
        on += f" between {plan.hosts} hosts" if plan.hosts > 1 else ""
        options["forward_prefetch"] = f"{ahead} (by default on {on})"
    strategy = shared["strategy"]
    options.pop("strategy", None)
    yield "policy", f"{type(policy).__name__}{_options(policy.own_options())}"
    mesh = mesh_text(plan.mesh_shape)
    on = f"; on {plan.runs_on}" if plan.runs_on else ""
    if not on and backend != "none":
        on = f"; planned for {backend}"
    yield "sharding", f"{strategy}, world size {plan.world_size}, mesh {mesh}{on}"
    if plan.replica_all_reduce:
        yield "replicas", f"gradients are averaged by {plan.replica_all_reduce}"
    yield "schedule", ", ".join(f"{name}={value}" for name, value in options.items())
    if plan.backend != "eager":
        regions = None if plan.program is None else plan.program.regions
        yield "backend", plan.backend + ("" if regions is None else f", regions: {regions}")
    size = gradient_bytes(plan)
    if size.accumulated:
        yield (
            "gradients",
            f"{human_bytes(size.reduced)} on each rank; {human_bytes(size.accumulated)} if kept "
            "whole by no_sync()",
        )


def _options(options: dict[str, str]) -> str:
    return f"({', '.join(f'{name}={value}' for name, value in options.items())})"


def _lines(plan: ShardingPlan, unfold: bool) -> list[Folded[_Facts]]:
    rows = [(unit.fqn, _facts(unit, plan)) for unit in plan.units]
    return [Folded(*row, 1) for row in rows] if unfold else fold(rows)


def _columns(plan: ShardingPlan) -> tuple[str, ...]:
    any_own = any(_facts(unit, plan).own for unit in plan.units)
    return (*COLUMNS, OWN) if any_own else COLUMNS


def _is_words(column: int) -> bool:
    return column < _LEFT_ALIGNED or column >= len(COLUMNS)


def _facts(unit: Unit, plan: ShardingPlan) -> _Facts:
    return _Facts(
        unit.module_class,
        len(unit.params),
        unit.numel,
        unit.sharded_bytes,
        unit.unsharded_bytes,
        unit.padding_bytes,
        unit.options.difference(_usual(unit, plan)),
    )


def _usual(unit: Unit, plan: ShardingPlan) -> UnitOptions:
    """Return the options that `unit` would have without overrides."""
    options = options_of(plan.policy, unit.fqn, {})
    try:
        return fitted(options, unit.fqn, plan.mesh_shape)
    except GraphshardError:  # the policy's strategy does not fit the mesh; all units override it
        return options


def _sum(plan: ShardingPlan) -> _Facts:
    columns = zip(*(_facts(unit, plan)[1:-1] for unit in plan.units), strict=True)
    params, numel, sharded, unsharded, padding = (sum(column) for column in columns)
    return _Facts("", params, numel, sharded, unsharded, padding)


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
        facts.own,
    )


def _total(plan: ShardingPlan) -> tuple[str, ...]:
    return _cells(Folded("total", _sum(plan), len(plan.units)))


def _aligned(row: tuple[str, ...], widths: list[int]) -> str:
    return "  ".join(
        cell.ljust(width) if _is_words(column) else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(row, widths, strict=False))
    )


def _notes(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    layouts = [(unit, layout) for unit in plan.units for layout in unit.layouts]
    for unit, layout in layouts:
        if len(layout.names) > 1:
            yield "tied", f"{some_of(layout.names, ' = ')}, stored once in {unit.fqn or '(root)'}"
    yield from _placements(plan)
    cast = [layout for unit, layout in layouts if unit.options.precision is not None]
    if kept := [layout.fqn for layout in cast if layout.dtype.is_complex]:
        yield "precision", f"{some_of(kept)}, complex, computed and reduced as stored"
    if plan.ignored:
        numel = sum(layout.numel for layout in plan.ignored)
        yield (
            "ignored",
            f"{some_of([layout.fqn for layout in plan.ignored])}, {numel:,} elements, whole on "
            "every rank, gradients not reduced",
        )
    if plan.policy.offloads("params"):
        stored = human_bytes(_sum(plan).sharded)
        largest = human_bytes(max(unit.unsharded_bytes for unit in plan.units))
        yield (
            "host",
            f"{stored} of parameters per rank lie there, with their gradients and optimizer state; "
            f"while gathered the largest unit takes {largest} of the device as before",
        )
        yield from _pinned(plan)
    if plan.program is not None:
        yield from _of_program(plan, plan.program)
    for note in plan.policy.notes:
        yield "note", note
    yield from _resharded(plan)
    for warning in plan.warnings:
        yield "warning", warning


def _of_program(plan: ShardingPlan, program: Program) -> Iterator[tuple[str, str]]:
    if program.budget is not None:
        yield "schedule", str(program.budget)
    yield from moved_notes(plan)
    if program.grad:
        yield from memory_notes(program)
    if program.cuda_graphs is not None:
        yield "cuda graph", str(program.cuda_graphs)


def _pinned(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    """Yield a note on the memory that torch pins for shards on the host, if that is more."""
    device = plan.runs_on if plan.program is None else plan.program.device
    layouts = {layout.fqn: layout for unit in plan.units for layout in unit.layouts}
    sizes = [layout.shard_bytes for layout in layouts.values() if not layout.resident]
    slabs = pack(sizes)
    if device.startswith("cuda") and slabs.total_bytes > 1.02 * sum(sizes):
        yield (
            "pinned",
            f"{human_bytes(slabs.total_bytes)} of memory for these parameters, in "
            f"{len(slabs.sizes)} blocks, which torch rounds up to powers of two",
        )


def _placements(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    """Yield notes on parameters that are not simply split along dim 0, with the reason."""
    named: dict[str, list[str]] = {}
    for unit in plan.units:
        for layout in unit.layouts:
            named.setdefault(_placement(unit, layout), []).append(
                f"{layout.fqn} {list(layout.shape)}" if layout.shape else layout.fqn
            )
    for kind, reason in (
        ("replicated", " (no dimension to shard)"),
        ("copied", ": every rank keeps them whole"),
        *((kind, "") for kind in sorted(named) if kind.startswith("dim")),
    ):
        if kind in named:
            yield kind.replace("copied", "replicated"), f"{some_of(named[kind])}{reason}"
    if (padding := padding_text(plan)) is not None:
        yield "padding", padding


def _placement(unit: Unit, layout: ParamLayout) -> str:
    if layout.sharded:
        return along_text(layout.dim) if layout.dim else ""
    if unit.options.strategy is Strategy.NO_SHARD:
        return ""
    return "copied" if layout.shape else "replicated"


def _resharded(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    """Yield notes on units resharded to groups after forward, by the size of the groups."""
    ranks_of = {unit.fqn: unit.options.reshard_ranks for unit in plan.units}
    for ranks in sorted({ranks for ranks in ranks_of.values() if ranks}):
        units = [unit for unit in plan.units if ranks_of[unit.fqn] == ranks]
        shard_bytes = sum(
            layout.over(ranks).full_bytes // ranks
            for unit in units
            for layout in unit.layouts
            if layout.sharded
        )
        lines = fold([(fqn, other == ranks) for fqn, other in ranks_of.items()])
        names = [line.name or "(root)" for line in lines if line.facts]
        yield (
            "resharded",
            f"{some_of(names)} to groups of {ranks} ranks, each rank keeping up to "
            f"{human_bytes(shard_bytes)} between forward and backward",
        )


def memory_dict(program: Program) -> dict[str, Any]:
    """Return bytes saved for backward by unit, the number of recomputed ops, and peak bytes."""
    storages = storages_of(program)
    saved = storages.saved_by(lambda storage: storage.unit)
    return {
        "saved_bytes": dict(sorted(saved.items(), key=lambda item: _in_order(item[0]))),
        "recomputed_ops": sum(RECOMPUTED in node.meta for node in program.nodes(BACKWARD)),
        "peak_bytes": max(storages.live(), default=0),
    }


def _in_order(fqn: str) -> list[tuple[bool, int, str]]:
    """A key by which blocks.2 comes before blocks.10."""
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in fqn.split(".")
    ]


def memory_notes(program: Program) -> Iterator[tuple[str, str]]:
    """Yield the facts of `memory_dict` as sentences, each with its title."""
    facts = memory_dict(program)
    saved: dict[str, int] = facts["saved_bytes"]
    if saved:
        each = [
            f"{line.name or '(root)'} {human_bytes(line.facts)}{' each' if line.count > 1 else ''}"
            for line in fold(list(saved.items()))
        ]
        total = human_bytes(sum(saved.values()))
        yield "saved", f"{total} of activations from forward to backward: {some_of(each)}"
    if facts["recomputed_ops"]:
        yield "recomputed", f"{facts['recomputed_ops']:,} operators of forward, again in backward"
    peak = human_bytes(facts["peak_bytes"])
    yield "peak", f"{peak} held at once by a step, besides shards, their gradients and inputs"
    if program.assumed_sizes:
        yield "sizes", assumed_text(program.assumed_sizes)


def moved_notes(plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    """Yield notes on how a program moves parameters and gradients, each with its title.

    They name units that are gathered or reduced in parts or together, or that stay unsharded.
    """
    program = plan.program
    if program is None:
        return
    for is_of_kind, verb, name in (
        (ops.is_gather, "gathered", "all_gather"),
        (ops.is_scatter, "reduced", "reduce_scatter"),
    ):
        collectives = [node for node in program.nodes() if is_of_kind(node)]
        for unit in plan.units:
            parts = _parts(collectives, unit.fqn)
            if len(parts) > 1:
                inside = f"{unit.fqn}." if unit.fqn else ""
                short = [[name.removeprefix(inside) for name in part] for part in parts]
                names = "; ".join(some_of(part, shown=2) for part in short)
                yield "apart", f"{unit.fqn or '(root)'} is {verb} in {len(parts)} parts: {names}"
        together = [node for node in collectives if Collective.of(node).several_units]
        if together:
            most = max(len(set(Collective.of(node).units)) for node in together)
            size = human_bytes(max(moved_bytes(node, program) for node in together))
            times = {1: "once", 2: "twice"}.get(len(together), f"{len(together)} times")
            yield (
                "together",
                f"adjacent units share one {name}, {times} in a step, with at most {most} units "
                f"and {size} in it",
            )
    unsharded = _kept_unsharded(program, plan)
    if unsharded:
        lines = fold([(unit, ()) for unit in unsharded])
        units = ", ".join(line.name or "(root)" for line in lines)
        yield "unsharded", f"{units} from forward to backward, not gathered again"


def _parts(collectives: Sequence[fx.Node], unit: str) -> list[list[str]]:
    """Return the distinct sets of parameters that a unit's collectives move in one phase."""
    by_phase: dict[str, dict[tuple[str, ...], None]] = {FORWARD: {}, BACKWARD: {}}
    for node in collectives:
        collective = Collective.of(node)
        if not collective.several_units and collective.unit == unit:
            by_phase[node.meta["phase"]][collective.params] = None
    parts = by_phase[FORWARD] if len(by_phase[FORWARD]) > 1 else by_phase[BACKWARD]
    return list(map(list, parts))


def _kept_unsharded(program: Program, plan: ShardingPlan) -> list[str]:
    """Return units that are kept from forward to backward although the plan reshards them."""
    units: set[str] = set()
    for wait in gather_waits(program):
        freed = [user.meta["phase"] for user in wait.users if user.target is ops.free]
        if [wait.meta["phase"], *freed] == [FORWARD, BACKWARD]:
            gathered = set(Collective.of(ops.collective_of(wait)).units)
            units |= {unit for unit in gathered if plan.unit(unit).options.reshard}
    return [unit.fqn for unit in plan.units if unit.fqn in units]

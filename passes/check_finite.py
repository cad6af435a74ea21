"""check_finite: check values for NaN and infinity on the device, and report them once a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, ClassVar

import torch
from torch import fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.aliases import bytes_text, derived_values, storage_root
from graphshard.program.collective import operands_of
from graphshard.program.edit import fake_as, fake_like, insert_node
from graphshard.program.finite import final_gradients, is_floating, may_hold_infinities
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import BACKWARD, FORWARD, RECOMPUTED, Program
from graphshard.program.regions import picks_from, works


@dataclass(frozen=True)
class CheckFinite(Pass):
    """Insert a `check_finite` wherever a wrong number can be pinned on a unit, and one report.

    Checked are, in forward, the values that leave a stretch of a unit's compute or that the step
    returns, if they depend on a parameter; in backward, the gradients that leave a stretch, those
    that are accumulated, and those that come out of the last reduce. A gradient that enters a
    reduce is not, since whatever is wrong with it comes out on some rank. A value that may hold
    -inf, such as a mask (see `graphshard.program.finite`), is checked for NaN and +inf. Integers,
    and views of parameters, are not checked. A check stands between the compute of two units or
    next to communication, so it divides no region.
    """

    establishes: ClassVar[Stage] = Stage.CHECKED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        checks = _Checks(program)
        checks.add_leaving(plan)
        for node in list(program.nodes(BACKWARD)):
            if node.target in ops.REDUCES:
                checks.add_reduce(node)
        checks.add_accumulated()
        checks.report()


class _Checks:
    """Inserts the checks of one program."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.may_hold = may_hold_infinities(program)
        self.read: list[fx.Node] = []

    def insert(self, values: Iterable[fx.Node], unit: str, of: str, before: fx.Node) -> None:
        """Insert the checks of `values` before a node: one, or two if some are masks."""
        floating = [v for v in dict.fromkeys(values) if is_floating(v.meta.get("val"))]
        phase = FORWARD if of == ops.OUTPUTS else BACKWARD
        for masked in (False, True):
            chosen = [v for v in floating if (phase == FORWARD and v in self.may_hold) is masked]
            if not chosen:
                continue
            kwargs: dict[str, Any] = {"unit": unit, "of": of}
            with self.program.graph.inserting_before(before):
                insert_node(
                    self.program,
                    ops.check_finite,
                    (chosen,),
                    kwargs | ({"masked": True} if masked else {}),
                    name=f"{unit or 'root'}_{of.replace(' ', '_')}_finite",
                    unit=unit,
                    phase=phase,
                    val=_number(chosen),
                )
            self.read += chosen

    def add_leaving(self, plan: ShardingPlan) -> None:
        """Check what leaves a stretch of one unit's compute, behind the stretch."""
        by_place: dict[tuple[fx.Node, str, str], list[fx.Node]] = {}
        seen: set[fx.Node] = set()
        ends = self._stretch_ends()
        for node in _leaving(self.program, plan):
            root = storage_root(node)
            if root not in seen:
                seen.update((root, node))
                place = ends[node], node.meta["unit"], node.meta["phase"]
                by_place.setdefault(place, []).append(node)
        for (before, unit, phase), values in by_place.items():
            of = ops.OUTPUTS if phase == FORWARD else ops.GRADIENTS
            self.insert(values, unit, of, before)

    def _stretch_ends(self) -> dict[fx.Node, fx.Node]:
        """By node, the node behind its stretch: the first compute of the next unit.

        A result that is picked only behind the end of its operator's stretch is checked at once.
        """
        ends: dict[fx.Node, fx.Node] = {}
        for phase in (FORWARD, BACKWARD):
            end = self.program.output_node
            if phase == FORWARD:
                end = self.program.first_backward()
            unit, first = None, end
            for node in reversed(list(self.program.nodes(phase))):
                if works(node) and unit != node.meta["unit"]:
                    end, unit = first, node.meta["unit"]
                if ops.is_compute(node) and node.meta["unit"] == unit:
                    first = node
                ends[node] = end
        for node in ends:
            source = picks_from(node)
            if source is not None and source in ends:
                ends[node] = max(ends[source], node.next)
        return ends

    def add_reduce(self, reduce: fx.Node) -> None:
        """Check the gradients that leave `reduce` if no other follows."""
        if self.program.world_size == 1:
            self.insert(operands_of(reduce), reduce.meta["unit"], ops.GRADIENTS, reduce)
        elif final := final_gradients(reduce):
            before = max(final).next
            for unit, grads in groupby(final, key=lambda grad: str(grad.meta["unit"])):
                self.insert(grads, unit, ops.REDUCED, before)

    def add_accumulated(self) -> None:
        """Check the gradients of each run of nodes that accumulate them."""
        run: list[fx.Node] = []
        for node in [*self.program.nodes(BACKWARD), self.program.output_node]:
            if run and (
                node.target is not ops.accumulate_grad or node.meta["unit"] != run[0].meta["unit"]
            ):
                grads = [grad for each in run for grad in each.all_input_nodes]
                of = ops.REDUCED if any(map(ops.is_reduced, grads)) else ops.GRADIENTS
                self.insert(grads, run[0].meta["unit"], of, run[0])
                run = []
            if node.target is ops.accumulate_grad:
                run.append(node)

    def report(self) -> None:
        """Insert the report of all checks as the last node."""
        program = self.program
        numbers = [node for node in program.nodes() if node.target is ops.check_finite]
        if not numbers:
            return
        with program.graph.inserting_before(program.output_node):
            insert_node(
                program,
                ops.report_finite,
                (numbers,),
                name="root_report_finite",
                unit="",
                phase=BACKWARD if program.grad else FORWARD,
            )
        size = bytes_text(self.read)
        program.notes = (
            *program.notes,
            f"checks {size} bytes for NaN and infinity in {len(numbers):,} places, and reports "
            "them once",
        )


def _leaving(program: Program, plan: ShardingPlan) -> list[fx.Node]:
    """The values that leave the compute of their unit within a phase, or that the step returns."""
    parameters = derived_values(program, plan)
    reached: set[fx.Node] = {param.node for param in program.params}
    results = program.results()
    returned = {
        FORWARD: set(results.outputs),
        BACKWARD: {*results.input_grads, *results.grads},
    }
    leaving = []
    for node in program.nodes():
        if any(value in reached for value in node.all_input_nodes):
            reached.add(node)
        if node in parameters or RECOMPUTED in node.meta or not ops.is_compute(node):
            continue
        unit, phase = node.meta["unit"], node.meta["phase"]
        if phase == FORWARD and node not in reached:
            continue
        leaves = node in returned[phase] and not ops.is_reduced(node)
        leaves = leaves or any(
            ops.is_compute(user) and user.meta["phase"] == phase and user.meta["unit"] != unit
            for user in node.users
        )
        if leaves:
            leaving.append(node)
    return leaving


def _number(values: Sequence[fx.Node]) -> torch.Tensor:
    """The value of a check of `values`: float64 if one of them is of 64 bits, or else float32."""
    vals: list[torch.Tensor] = [value.meta["val"] for value in values]
    wide = any(val.dtype in (torch.float64, torch.complex128) for val in vals)
    return fake_as(fake_like(vals[0], ()), torch.float64 if wide else torch.float32)

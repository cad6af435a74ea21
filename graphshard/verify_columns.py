"""Rules on gradients reduced in pieces: all columns are there, once, in order."""

from __future__ import annotations

from typing import Any

from torch import fx

from graphshard import ops
from graphshard.plan import ParamLayout
from graphshard.verify_facts import Facts


class Pieces:
    """The reduces that move some columns of a gradient, by parameter, in order."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        self.of_param: dict[str, list[fx.Node]] = {}

    def layouts(self, reduce: fx.Node, layouts: list[ParamLayout]) -> list[ParamLayout]:
        """The layouts of what `reduce` moves: of its columns, if it moves some.

        They must follow those of the reduces before.
        """
        columns: Any = reduce.kwargs.get("columns")
        if columns is None:
            return layouts
        (layout, *others) = layouts
        width = len(layout.shape) - 1
        if others or width < 1 or layout.dim == width:
            self.facts.fail(
                "reduces", reduce, "columns are of one parameter, and not split over the ranks"
            )
        before = self.of_param.setdefault(layout.fqn, [])
        start = _end(before[-1]) if before else 0
        if columns[0] != start or not start < columns[1] <= layout.shape[-1]:
            self.facts.fail(
                "reduces", reduce, f"it reduces columns {columns}; those from {start} are next"
            )
        before.append(reduce)
        return [layout.columns(*columns)]

    def are_of(self, reduce: fx.Node, param: str) -> bool:
        """Whether `reduce` moves columns of `param`, and one before it did, too."""
        return reduce in self.of_param.get(param, [])[1:]

    def check_complete(self) -> None:
        """The last columns are reduced as well."""
        for name, reduces in self.of_param.items():
            if _end(reduces[-1]) != self.facts.plan.layouts[name].shape[-1]:
                self.facts.fail(
                    "reduces", reduces[-1], f"the last columns of {name!r} are never reduced"
                )

    def picked(self, grad: fx.Node, param: str) -> fx.Node:
        """What is picked out of the last reduce for `grad`, the whole gradient of `param`."""
        node = ops.origin(grad)
        parts = ops.joined(node)
        if parts and list(map(ops.collective_of, parts)) == self.of_param.get(param):
            return parts[-1]
        return node


def _end(reduce: fx.Node) -> int:
    columns: Any = reduce.kwargs["columns"]
    return int(columns[1])

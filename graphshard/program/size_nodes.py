"""The nodes that compute symbolic sizes: one for each size, and more where a pass needs them.

A trace reads sizes off whichever tensor is at hand. In backward that would save a whole activation
for one number. So each size is read off an input of the program, in forward, where it is first
needed. Every later node of the same size reads that number, and only the number is saved.

A size that depends on values is read off the result of the operator that made it, right behind that
operator. What the model promises about such sizes is checked by a node behind them.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import torch
from torch import fx

from graphshard.errors import CaptureError, PassError
from graphshard.program.program import BACKWARD, FORWARD, Program
from graphshard.program.sizes import Sizes, check_sizes, expression_text, is_size, size_text
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private import unbacked
from graphshard.torch_private.compat import SYMBOLIC

_aten = torch.ops.aten


_ASKING = frozenset(
    {
        _aten.sym_size.int,
        _aten.sym_stride.int,
        _aten.sym_numel.default,
        _aten.sym_storage_offset.default,
    }
)


class SizeNodes:
    """Inserts the nodes of symbolic sizes while a joint graph is copied in order.

    Args:
        graph: the new graph, with placeholders and no other nodes yet.
        sizes: the symbols of the program.
        inputs: the placeholders of inputs, to read sizes off.
    """

    def __init__(self, graph: fx.Graph, sizes: Sizes, inputs: Sequence[fx.Node]) -> None:
        self.graph = graph
        self.sizes = sizes
        self.inputs = inputs
        self.by_size: dict[tuple[type, Any], fx.Node] = {}
        self.by_values: dict[Any, fx.Node] = {}  # by unbacked symbol, as traced
        self.last_forward: fx.Node = next(iter(reversed(graph.nodes)))

    def before(
        self, old: fx.Node, new: Mapping[fx.Node, Any], fqn: str, phase: str
    ) -> fx.Node | None:
        """The new node for `old`, if its value is a size that has a node or can get one."""
        if not is_size(old) or unbacked.binds(old):
            return None
        value = old.meta["val"]
        key = _key(value)
        if key in self.by_size:
            return self.by_size[key]
        for size in self.sizes.symbols:
            if key == (torch.SymInt, size.symbol):
                return self._insert_symbol(size, fqn, phase)
        if phase == BACKWARD and old.target in _ASKING:
            operands = [new[operand] for operand in old.all_input_nodes]
            if all(operand.meta["phase"] == FORWARD for operand in operands):
                return self._insert_in_forward(
                    old.target, (operands[0], *old.args[1:]), old.name, "", value
                )
        return None

    def of(self, old: fx.Node) -> fx.Node | None:
        """The new node for the size `old`, if one was met before."""
        return self.by_size.get(_key(old.meta["val"]))

    def after(self, node: fx.Node) -> None:
        """Record the node that was just copied."""
        if is_size(node):
            self.by_size.setdefault(_key(node.meta["val"]), node)
        elif node.meta["phase"] == FORWARD:
            self.last_forward = node
        for symbol in unbacked.raw_symbols(node.meta.get("val")):
            if symbol not in self.by_values:
                self._read_off(symbol, node)

    def _read_off(self, symbol: Any, node: fx.Node) -> None:
        """Let a node compute `symbol`, if `node`, just copied, has it or has it as a size."""
        val = node.meta["val"]
        if isinstance(val, torch.Tensor):
            shape: tuple[Any, ...] = tuple(val.shape)
            dims = [
                dim
                for dim, size in enumerate(shape)
                if isinstance(size, SYMBOLIC) and unbacked.raw_expression(size) == symbol
            ]
            if not dims:
                return
            args, phase = (node, dims[0]), node.meta["phase"]
            reader = self._insert(
                _aten.sym_size.int, args, f"{node.name}_size", node.meta["fqn"], shape[dims[0]],
                phase,
            )  # fmt: skip
            if phase == FORWARD:
                self.last_forward = reader
        elif is_size(node):
            reader = node
        else:
            return
        self.by_values[symbol] = reader
        self.sizes.add_by_values(symbol, node.name, node.meta["fqn"])

    def finish(self) -> None:
        """Insert nodes for the symbols that no node needed, since a later pass may need them.

        Insert the checks of what the model promises about sizes that depend on values, too.
        """
        self._insert_checks()
        for size in self.sizes.symbols:
            key = torch.SymInt, size.symbol
            if key not in self.by_size and torch_compat.size_expression(size.value) == size.symbol:
                self._insert_symbol(size, "", BACKWARD)
        for node in self.graph.nodes:
            for leaf in torch.utils._pytree.tree_leaves((node.args, node.kwargs)):
                if isinstance(leaf, SYMBOLIC):
                    raise CaptureError(
                        f"node {node.name} of the captured step holds the size {size_text(leaf)}, "
                        "which no node computes; leave it out of dynamic"
                    )

    def _insert_symbol(self, size: Any, fqn: str, phase: str) -> fx.Node:
        target = _aten.sym_stride.int if size.is_stride else _aten.sym_size.int
        args = self.inputs[size.input], size.dim
        if phase == BACKWARD:
            return self._insert_in_forward(target, args, size.name, fqn, size.value)
        return self._insert(target, args, size.name, fqn, size.value)

    def _insert_in_forward(
        self, target: Any, args: Any, name: str, fqn: str, value: Any
    ) -> fx.Node:
        """Insert a node after the last node of forward."""
        with self.graph.inserting_after(self.last_forward):
            return self._insert(target, args, name, fqn, value)

    def _insert(
        self, target: Any, args: Any, name: str, fqn: str, value: Any, phase: str = FORWARD
    ) -> fx.Node:
        node = self.graph.create_node("call_function", target, args, {}, name=name)
        node.meta = {"val": value, "phase": phase, "fqn": fqn}
        self.by_size[_key(value)] = node
        return node

    def _insert_checks(self) -> None:
        """Insert a node for each promise, behind the nodes of the numbers that it is about."""
        place = {node: index for index, node in enumerate(self.graph.nodes)}
        of_symbol = dict(self.by_values)
        for size in self.sizes.symbols:
            key = torch.SymInt, size.symbol
            if key in self.by_size:
                of_symbol[size.symbol] = self.by_size[key]
        guessed: list[fx.Node] = []  # numbers that guesses so far are about
        checks = []
        for condition, line, kwargs in self._checks():
            symbols = sorted(condition.free_symbols, key=str)
            text = expression_text(condition, self.sizes.names)
            if not of_symbol.keys() >= set(symbols):
                if condition in self.sizes.of_slices:
                    continue  # of a slice that the program does not make
                is_true = self.sizes.is_true_of_calls
                if is_true is not None and is_true(condition):
                    continue
                at = f"\n  at {line}" if line else ""
                raise CaptureError(
                    f"the model relies on {text}, about the size of a value that it does not use, "
                    f"so a program does not compute it; use it, or leave out the check{at}"
                )
            numbers = {str(self.sizes.names[s]): of_symbol[s] for s in symbols}
            about = list(numbers.values())
            if kwargs:  # a guess counts only where those before it are right
                about = guessed = [*guessed, *about]
            last = max(about, key=place.__getitem__)
            if kwargs and last.meta["phase"] == BACKWARD:
                raise CaptureError(
                    f"backward decides by the values of a tensor ({text}), and no call can run it "
                    f"again with another answer; compute both ways, by torch.where\n"
                    f"  at {line}"
                )
            checks.append((last, (text, line, numbers), kwargs))
        # Of one number the first stands first: what else does not hold may be its fault.
        for last, arguments, kwargs in reversed(checks):
            with self.graph.inserting_after(last):
                check = self.graph.create_node(
                    "call_function", check_sizes, arguments, kwargs, name="check"
                )
            check.meta = {"val": None, "phase": last.meta["phase"], "fqn": last.meta["fqn"]}

    def _checks(self) -> Iterator[tuple[Any, str | None, dict[str, Any]]]:
        """Each condition to check, the line that states it, and the keywords of `check_sizes`."""
        for number, (condition, answer, line) in enumerate(self.sizes.guesses):
            condition = condition.xreplace(self.sizes.of_last_run)
            yield condition, line, {"guess": number, "answer": answer}
        for promise in self.sizes.promises():
            if not promise.is_guess:
                yield promise.condition, promise.line, {}


def _key(value: Any) -> tuple[type, Any]:
    return type(value), torch_compat.size_expression(value)


# -- sizes a pass needs ---------------------------------------------------------------------------


def symbol_nodes(nodes: Iterable[fx.Node]) -> dict[Any, fx.Node]:
    """The first of `nodes` for each symbol of a size, by torch's symbol."""
    by_symbol: dict[Any, fx.Node] = {}
    for node in nodes:
        if is_size(node):
            expression = torch_compat.size_expression(node.meta["val"])
            if expression.is_symbol:
                by_symbol.setdefault(expression, node)
    return by_symbol


def as_arguments(
    program: Program, sizes: Sequence[Any], *, unit: str, phase: str
) -> list[int | fx.Node]:
    """Turn `sizes` into arguments of a node: numbers, or nodes for symbolic sizes.

    Nodes that compute with symbols are inserted at the graph's insertion point.
    """
    symbols = symbol_nodes(program.nodes()) if any(isinstance(s, SYMBOLIC) for s in sizes) else {}

    def node_of(expression: Any) -> Any:
        if expression.is_Integer:
            return int(expression)
        if expression in symbols:
            return symbols[expression]
        operands = [node_of(operand) for operand in expression.args]
        operation = _OPERATIONS.get(expression.func.__name__)
        if operation is None or not operands:
            raise PassError(f"no node can compute the size {expression}")

        def apply(left: Any, right: Any) -> Any:
            if isinstance(left, int) and isinstance(right, int):
                return operation(left, right)
            vals = [x.meta["val"] if isinstance(x, fx.Node) else x for x in (left, right)]
            node = program.graph.create_node("call_function", operation, (left, right))
            node.meta.update(val=operation(*vals), phase=phase, fqn=unit, unit=unit)
            return node

        return reduce(apply, operands)

    return [
        node_of(torch_compat.size_expression(s)) if isinstance(s, SYMBOLIC) else int(s)
        for s in sizes
    ]


_OPERATIONS: Mapping[str, Any] = {
    "Add": operator.add,
    "Mul": operator.mul,
    "FloorDiv": operator.floordiv,
    "Mod": operator.mod,
    "PythonMod": operator.mod,
    "Max": torch.sym_max,
    "Min": torch.sym_min,
}

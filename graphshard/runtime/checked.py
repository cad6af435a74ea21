"""Checking mode: half of a program run node by node, each value held against what was promised."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.errors import RuntimeStateError
from graphshard.program.sizes import number_of


class CheckedRun(fx.Interpreter):
    """Runs a lowered graph and compares every tensor's shape and dtype with its node's `val`.

    Of symbolic sizes each symbol must stand for one number in a run.

    An error keeps its own text, to which fx would add the node and its stack.

    Raises (on a call):
        RuntimeStateError: a value is not what its node says.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.numbers: dict[Any, int] = {}  # of the symbols met in this run

    def __call__(self, args: list[Any]) -> Any:
        """As the graph's own code: takes the list of arguments and empties it."""
        given = tuple(args)
        args.clear()
        self.numbers = {}
        return self.run(*given, enable_io_processing=False)

    def run_node(self, node: fx.Node) -> Any:
        """Run one node and check what came out."""
        result = super().run_node(node)
        if node.op != "output":
            self._check(node, node.meta.get("val"), result)
        return result

    def _check(self, node: fx.Node, promised: Any, value: Any) -> None:
        if isinstance(promised, (list, tuple)) and isinstance(value, (list, tuple)):
            for one_promised, one_value in zip(promised, value, strict=True):
                self._check(node, one_promised, one_value)
        elif isinstance(promised, Tensor) and isinstance(value, Tensor):
            expected = [
                number_of(size, self.numbers, found)
                for size, found in zip_longest(promised.shape, value.shape)
            ]
            if expected != list(value.shape) or promised.dtype != value.dtype:
                raise RuntimeStateError(
                    f"node {node.name} in {node.meta['phase']} gave {tuple(value.shape)} "
                    f"{value.dtype}, its program says {tuple(expected)} {promised.dtype}; the pass "
                    "that wrote it is wrong"
                )
        elif isinstance(promised, torch.SymInt) and isinstance(value, int):
            expected_number = number_of(promised, self.numbers, value)
            if expected_number != value:
                raise RuntimeStateError(
                    f"node {node.name} in {node.meta['phase']} gave {value}, its program says "
                    f"{expected_number}; the pass that wrote it is wrong"
                )

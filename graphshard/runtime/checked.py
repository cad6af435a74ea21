"""Checking mode: a lowered graph run node by node, each value compared with its node's `val`."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.errors import RuntimeStateError
from graphshard.program.sizes import number_of


class CheckedRun(fx.Interpreter):
    """Runs a lowered graph and compares every tensor's shape and dtype with its node's `val`.

    Each symbol of a symbolic size must have one value throughout a run. Errors of nodes keep their
    text, without the node and stack that fx would add.

    Raises (on a call):
        RuntimeStateError: a value differs from its node's `val`.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.numbers: dict[Any, int] = {}  # by symbol, in this run

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph on `args`, which is emptied, as by the graph's own code."""
        arguments = tuple(args)
        args.clear()
        self.numbers = {}
        return self.run(*arguments, enable_io_processing=False)

    def run_node(self, node: fx.Node) -> Any:
        """Run one node and check its result."""
        result = super().run_node(node)
        if node.op != "output":
            self._check(node, node.meta.get("val"), result)
        return result

    def _check(self, node: fx.Node, val: Any, value: Any) -> None:
        if isinstance(val, (list, tuple)) and isinstance(value, (list, tuple)):
            for item_val, item in zip(val, value, strict=True):
                self._check(node, item_val, item)
        elif isinstance(val, Tensor) and isinstance(value, Tensor):
            if val.dtype == torch.uint8 and tuple(val.shape) == (0,):
                return  # the workspace of a kernel, to which torch's fake kernels give no size
            expected = [
                number_of(size, self.numbers, actual)
                for size, actual in zip_longest(val.shape, value.shape)
            ]
            if expected != list(value.shape) or val.dtype != value.dtype:
                raise RuntimeStateError(
                    f"node {node.name} in {node.meta['phase']} gave {tuple(value.shape)} "
                    f"{value.dtype}, its program says {tuple(expected)} {val.dtype}; the pass "
                    "that wrote it is wrong"
                )
        elif isinstance(val, torch.SymInt) and isinstance(value, int):
            expected_number = number_of(val, self.numbers, value)
            if expected_number != value:
                raise RuntimeStateError(
                    f"node {node.name} in {node.meta['phase']} gave {value}, its program says "
                    f"{expected_number}; the pass that wrote it is wrong"
                )

"""Checking mode: half of a program run node by node, each value held against what was promised."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from graphshard.errors import RuntimeStateError


class CheckedRun(fx.Interpreter):
    """Runs a lowered graph and compares every tensor's shape and dtype with its node's `val`.

    An error keeps its own text, to which fx would add the node and its stack.

    Raises (on a call):
        RuntimeStateError: a value is not what its node says.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.extra_traceback = False

    def __call__(self, args: list[Any]) -> Any:
        """As the graph's own code: takes the list of arguments and empties it."""
        given = tuple(args)
        args.clear()
        return self.run(*given, enable_io_processing=False)

    def run_node(self, node: fx.Node) -> Any:
        """Run one node and check what came out."""
        result = super().run_node(node)
        if node.op != "output":
            _check(node, node.meta.get("val"), result)
        return result


def _check(node: fx.Node, promised: Any, value: Any) -> None:
    if isinstance(promised, (list, tuple)) and isinstance(value, (list, tuple)):
        for one_promised, one_value in zip(promised, value, strict=True):
            _check(node, one_promised, one_value)
    elif isinstance(promised, Tensor) and isinstance(value, Tensor):
        expected: tuple[torch.Size, torch.dtype] = (promised.shape, promised.dtype)
        found = (value.shape, value.dtype)
        if expected != found:
            raise RuntimeStateError(
                f"node {node.name} in {node.meta['phase']} gave {tuple(found[0])} {found[1]}, its "
                f"program says {tuple(expected[0])} {expected[1]}; the pass that wrote it is wrong"
            )

"""A lowered graph run node by node, each value compared with its node's `val`."""

from __future__ import annotations

import logging
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.errors import RuntimeStateError
from graphshard.program.cut import GIVEN_BY
from graphshard.program.regions import picks_from
from graphshard.program.sizes import number_of
from graphshard.program.text import source_line
from graphshard.runtime.collectives import BoundCollective
from graphshard.runtime.region import RegionCall, pack
from graphshard.torch_private.kernels import stated_results

logger = logging.getLogger("graphshard")


class CheckedRun(fx.Interpreter):
    """Runs a lowered graph and compares every tensor's shape and dtype with its node's `val`.

    Compiled regions and collectives are made for the operands that the program states. Where a
    kernel gives another dtype or shape than its fake kernel stated, they would compute wrong
    numbers, so such an operand is an error before they run. Operators take what they are given.

    Each symbol of a symbolic size must have one value throughout a run. Errors of nodes keep their
    text, without the node and stack that fx would add.

    Args:
        module: the lowered graph.
        strict: checking mode. Also a value that a pass stated wrongly is an error; one that a
            kernel gives otherwise, and that operators alone take, is logged.

    Raises (on a call):
        RuntimeStateError: a value differs from its node's `val`.
    """

    def __init__(self, module: fx.GraphModule, *, strict: bool) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self.strict = strict
        self.takers = _takers(module.graph)
        self.numbers: dict[Any, int] = {}  # by symbol, in this run
        self.blamed: dict[fx.Node, str] = {}  # the kernel behind each value that differs

    def __call__(self, args: list[Any]) -> Any:
        """Run the graph on `args`, which is emptied, as by the graph's own code."""
        self.numbers, self.blamed = {}, {}
        for node, value in zip(self.graph.find_nodes(op="placeholder"), args, strict=True):
            self._check(node, value)
        return self.boxed_run(args)

    def run_node(self, node: fx.Node) -> Any:
        """Run one node and check its result."""
        result = super().run_node(node)
        if node.op != "output":
            self._check(node, result)
        return result

    def _check(self, node: fx.Node, value: Any) -> None:
        difference = self._difference(node.meta.get("val"), value)
        if difference is None:
            return
        blamed = self._kernel_behind(node, value)
        if blamed is None:
            if self.strict:
                raise RuntimeStateError(
                    f"node {node.name} in {node.meta['phase']} gave {difference}; the pass that "
                    "wrote it is wrong"
                )
            return
        self.blamed[node] = blamed
        passed_on = any(source in self.blamed for source in node.all_input_nodes)
        line = source_line(node)
        text = f"{blamed} gave {node.name} as {difference}" + (f"\n  {line}\n" if line else "; ")
        if taker := self.takers.get(node):
            raise RuntimeStateError(
                f"{text}{taker} is made for what the program says, and would compute wrong "
                "numbers. The operator's fake kernel states what its real kernel does not give: "
                "correct it (torch.library.register_fake), or cast the operands of an operator of "
                "torch's to one dtype in the model"
            )
        if self.strict and node.op != "placeholder" and not passed_on:
            logger.warning("graphshard: %sits fake kernel states it so", text)

    def _difference(self, val: Any, value: Any) -> str | None:
        """How `value` differs from `val`; None if it does not."""
        if isinstance(val, (list, tuple)) and isinstance(value, (list, tuple)):
            pairs = zip(val, value, strict=True)
            return next((text for pair in pairs if (text := self._difference(*pair))), None)
        if isinstance(val, Tensor) and isinstance(value, Tensor):
            if val.dtype == torch.uint8 and tuple(val.shape) == (0,):
                return None  # the workspace of a kernel, to which torch's fake kernels give no size
            expected = [
                number_of(size, self.numbers, actual)
                for size, actual in zip_longest(val.shape, value.shape)
            ]
            if expected != list(value.shape) or val.dtype != value.dtype:
                return (
                    f"{tuple(value.shape)} {value.dtype}, its program says {tuple(expected)} "
                    f"{val.dtype}"
                )
        elif isinstance(val, torch.SymInt) and isinstance(value, int):
            expected_number = number_of(val, self.numbers, value)
            if expected_number != value:
                return f"{value}, its program says {expected_number}"
        return None

    def _kernel_behind(self, node: fx.Node, value: Any) -> str | None:
        """The operator whose kernel gives another value than was stated; None: `val` is wrong.

        It is the node's own, that of a value it reads, or one of forward.
        """
        for source in node.all_input_nodes:
            if source in self.blamed:
                return self.blamed[source]
        picked = picks_from(node)
        if picked is not None and isinstance(picked.target, RegionCall):
            return f"the compiled code of {picked.name}"
        if node.op == "placeholder":
            return node.meta.get(GIVEN_BY)
        if not isinstance(node.target, torch._ops.OpOverload):
            return None
        stated = stated_results(node.target, *self.fetch_args_kwargs_from_env(node))
        if stated is None or self._difference(stated, value) is None:
            return None
        return f"{node.target} in {node.meta['phase']}"


def _takers(graph: fx.Graph) -> dict[fx.Node, str]:
    """By value that a compiled region or a collective takes, the name of that."""
    takers: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.target is pack:
            name = f"the compiled region {node.name.removeprefix('pack_')}"
        elif isinstance(node.target, BoundCollective):
            name = f"{node.target.op} of unit {node.target.unit or '(root)'}"
        else:
            continue
        for value in node.all_input_nodes:
            takers.setdefault(value, f"{name} in {node.meta['phase']}")
    return takers

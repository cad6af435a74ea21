"""Forward or backward of a program as a rank runs it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.errors import RuntimeStateError
from graphshard.program.annotations import Regions
from graphshard.program.cut import GIVEN_BY
from graphshard.program.program import copy_node
from graphshard.program.regions import picks_from
from graphshard.program.sizes import number_of
from graphshard.program.text import source_line
from graphshard.runtime.calls import Fingerprint
from graphshard.runtime.collectives import BoundCollective
from graphshard.runtime.gather import AllGather
from graphshard.runtime.lower import EVENTS, Bindings, lower, module_of, phase_of
from graphshard.runtime.region import Form, RegionCall, pack
from graphshard.torch_private.compat import named_range, profiler_check
from graphshard.torch_private.kernels import stated_results

logger = logging.getLogger("graphshard")


class CheckedRun(fx.Interpreter):
    """Runs a lowered graph and compares every tensor's shape and dtype with its node's `val`.

    Compiled regions and collectives are made for the operands that the program states. Where a
    kernel gives another dtype or shape than its fake kernel stated, they would compute wrong
    numbers, so such an operand is an error before they run. Operators take what they are given.

    Each symbol of a symbolic size must have one value throughout a run. Errors of nodes keep their
    text, without the node and stack that fx would add.

    strict: checking mode. Also a value that a pass stated wrongly is an error; one that a kernel
        gives otherwise, and that operators alone take, is logged.
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


class NamedRun:
    """Runs a lowered graph; its events are ranges, in one of the whole: "graphshard forward".

    Its code is that of the graph, with a call in front of each event that ends one range and begins
    the next. So the code that runs without a profiler has nothing of it. `runner` makes the
    function that runs a module on a list of arguments.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        phase: str,
        runner: Callable[[fx.GraphModule], Callable[[list[Any]], Any]],
    ) -> None:
        self._name = f"graphshard {phase}"
        self._ranges = _Ranges()
        self._run = runner(module_of(_marked(module.graph, self._ranges)))

    def __call__(self, args: list[Any]) -> Any:
        """The results for `args`, which is emptied."""
        with named_range(self._name):
            try:
                return self._run(args)
            finally:
                self._ranges.close()


class _Ranges:
    """The ranges of one half of a step, of which one is open at a time."""

    def __init__(self) -> None:
        self._open: Any = None
        self.__name__ = self.__qualname__ = "begin"
        self.__module__ = "graphshard"  # fx prints a call by these

    def __call__(self, name: str) -> None:
        self.close()
        self._open = named_range(name)
        self._open.__enter__()

    def close(self) -> None:
        if self._open is not None:
            self._open.__exit__(None, None, None)
            self._open = None


def _marked(graph: fx.Graph, ranges: _Ranges) -> fx.Graph:
    """A copy of the lowered `graph` that begins a range in front of each event."""
    marked = fx.Graph()
    new: dict[fx.Node, Any] = {}
    last = None
    for node in graph.nodes:
        for event in node.meta.get(EVENTS, ()):
            if event is not None and event != last:
                marked.call_function(ranges, (event[1],))
                last = event
        new[node] = copy_node(marked, node, new)
    return marked


Runner = Callable[[list[Any]], Any]


class LoweredGraph:
    """Forward or backward of a program, lowered.

    module: its code.
    fingerprint: its sequence of collectives.
    """

    def __init__(self, graph: fx.Graph, bindings: Bindings, regions: Regions | None) -> None:
        self.module = lower(graph, bindings, regions)
        self.fingerprint = Fingerprint.of(graph, bindings.plan)
        self._check = bindings.group.check
        self._here = bindings.group.here
        self._run = self._runner(self.module) if self._check else self._first_run
        self._named: Runner | None = None
        self._profiled = profiler_check()

    @property
    def run(self) -> Runner:
        """Runs the code on arguments, which it empties; with checks in checking mode, or at first.

        While a profiler is on, each event has a range of its own.
        """
        return self._named_run if self._profiled() else self._run

    def finish(self, params: Sequence[Any]) -> None:
        """Take part in the collectives that a run did not come to, so that no rank waits for them.

        Gathers send this rank's shards, as in a run: what other ranks get is right. Reduces send
        poison, so all ranks must then raise an error. `params` has the parameters in the places of
        the arguments, and None in those of others.
        """
        nodes = self.module.graph.nodes
        places = self.module.graph.find_nodes(op="placeholder")
        known: dict[fx.Node, Any] = dict(zip(places, params, strict=False))
        self._here.begun, self._here.done = 0, self._here.begun
        try:
            for node in nodes:
                if isinstance(node.target, BoundCollective):
                    gathers = isinstance(node.target, AllGather)
                    operands: Any = node.args[0]
                    node.target.take_part([_of(o, known) if gathers else None for o in operands])
                elif (take_part := getattr(node.target, "take_part", None)) is not None:
                    take_part(())
        finally:
            self._here.done = 0

    def _first_run(self, args: list[Any]) -> Any:
        """Hold the operands of regions and collectives against the program, this once."""
        results = CheckedRun(self.module, strict=False)(args)
        self._run = self.module.forward
        return results

    def _named_run(self, args: list[Any]) -> Any:
        if self._named is None:
            self._named = NamedRun(self.module, phase_of(self.module.graph), self._runner)
        return self._named(args)

    def _runner(self, module: fx.GraphModule) -> Runner:
        return CheckedRun(module, strict=True) if self._check else module.forward

    def forms(self) -> Iterator[Form]:
        """The forms of its regions, each once."""
        calls = (node.target for node in self.module.graph.nodes)
        return iter(dict.fromkeys(call.form for call in calls if isinstance(call, RegionCall)))


def _of(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """The value of `node`, which is made of `known` ones by casts and the like; None if it is not.

    Those that were made of `known` ones are added to these.
    """
    if node not in known:
        sources = [_of(source, known) for source in node.all_input_nodes]
        lacks = not sources or any(source is None for source in sources)
        target: Any = None if isinstance(node.target, BoundCollective) else node.target
        known[node] = (
            None
            if lacks or target is None
            else target(*fx.map_arg(node.args, known.get), **fx.map_arg(node.kwargs, known.get))
        )
    return known[node]

"""A builder of small joint programs, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphshard.program.program import (
    BACKWARD,
    FORWARD,
    InputEntry,
    OutputEntry,
    ParamEntry,
    Program,
    Results,
)

aten = torch.ops.aten
WIDTH, VOCAB, BATCH = 6, 10, 4


class Toy:
    """Builds a joint graph as AOTAutograd lays it out: forward, then backward in reverse.

    Each layer method emits its forward nodes and remembers how to emit its backward nodes.
    """

    def __init__(self, params: dict[str, tuple[int, ...]], **options: Any) -> None:
        self.mode = FakeTensorMode()
        self.graph = fx.Graph()
        self.phase = FORWARD
        self.module = ""
        self.tape: list[Callable[[fx.Node], fx.Node | None]] = []
        self.grads: dict[str, fx.Node] = {}
        self.frozen = options.get("frozen", ())
        self.tied = options.get("tied", {})
        self.params = {name: self._placeholder(name, shape) for name, shape in params.items()}
        self.ids = self._placeholder("ids", (BATCH,), torch.int64)
        self.tangents: list[fx.Node] = []

    def tangent(self, *shape: int) -> None:
        """Declare the gradient of the next output; before any layer."""
        node = self._placeholder(f"tangent_{len(self.tangents)}", shape)
        node.meta["phase"] = BACKWARD
        self.tangents.append(node)

    def _placeholder(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype = torch.float32
    ) -> fx.Node:
        node = self.graph.placeholder(name.replace(".", "_"))
        with self.mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        node.meta.update(phase=FORWARD, fqn="")
        return node

    def op(self, target: Any, *args: Any, module: str | None = None) -> fx.Node:
        """One node, its value computed from those of its arguments."""
        node = self.graph.call_function(target, args)
        values = fx.map_arg(args, lambda n: n.meta["val"])
        with self.mode:
            val = target(*values)
        fqn = self.module if module is None else module
        node.meta.update(val=val, phase=self.phase, fqn=fqn)
        return node

    def _grad(self, name: str, grad: fx.Node) -> None:
        if name in self.frozen:
            return
        if name in self.grads:
            grad = self.op(aten.add.Tensor, self.grads[name], grad)
        self.grads[name] = grad

    def embedding(self, name: str) -> fx.Node:
        module = name.rpartition(".")[0]
        y = self.op(aten.embedding.default, self.params[name], self.ids, module=module)

        def backward(gy: fx.Node) -> None:
            self.module = module
            self._grad(
                name, self.op(aten.embedding_dense_backward.default, gy, self.ids, VOCAB, -1, False)
            )

        self.tape.append(backward)
        return y

    def linear(self, x: fx.Node, name: str, view: Callable[[fx.Node], fx.Node] | None = None):
        """x @ w.T, where `view` may make the transposed weight some other way."""
        module = name.rpartition(".")[0]
        self.module = module
        wt = (view or self.transpose)(self.params[name])
        y = self.op(aten.mm.default, x, wt)

        def backward(gy: fx.Node) -> fx.Node:
            self.module = module
            gx = self.op(aten.mm.default, gy, self.transpose(wt))
            if name not in self.frozen:
                gw = self.op(aten.mm.default, self.transpose(gy), x)
                self._grad(name, self.transpose(self.transpose(gw)))
            return gx

        self.tape.append(backward)
        return y

    def transpose(self, x: fx.Node) -> fx.Node:
        return self.op(aten.t.default, x)

    def relu(self, x: fx.Node, module: str) -> fx.Node:
        y = self.op(aten.relu.default, x, module=module)
        self.tape.append(
            lambda gy: self.op(aten.threshold_backward.default, gy, y, 0, module=module)
        )
        return y

    def scale(self, x: fx.Node, name: str) -> fx.Node:
        """x * s for a parameter without dimensions."""
        module, s = name.rpartition(".")[0], self.params[name]
        y = self.op(aten.mul.Tensor, x, s, module=module)

        def backward(gy: fx.Node) -> fx.Node:
            self.module = module
            product = self.op(aten.mul.Tensor, gy, x)
            self._grad(name, self.op(aten.sum.default, product))
            return self.op(aten.mul.Tensor, gy, s)

        self.tape.append(backward)
        return y

    def block(self, x: fx.Node, module: str) -> fx.Node:
        x = self.linear(x, f"{module}.up.weight")
        return self.linear(self.relu(x, module), f"{module}.down.weight")

    def finish(self, output: fx.Node, *, grad: bool = True, extra: Sequence[Any] = ()) -> Program:
        """The program, with backward unless `grad` is False."""
        if grad:
            self.phase = BACKWARD
            gy: fx.Node | None = self.tangents[0]
            for step in reversed(self.tape):
                assert gy is not None
                gy = step(gy)
        params = tuple(
            ParamEntry(
                name,
                (name, *self.tied.get(name, ())),
                tuple(node.meta["val"].shape),
                node.meta["val"].stride(),
                node.meta["val"].dtype,
                name not in self.frozen,
                node,
            )
            for name, node in self.params.items()
        )
        outputs = [output, *extra]
        grads = [self.grads.get(name) for name in self.params]
        self.graph.output(Results(outputs, [], grads, [None]).as_args()[0])
        return Program(
            graph=self.graph,
            params=params,
            buffers=(),
            inputs=(InputEntry("args[0]", self.ids),),
            outputs=tuple(
                OutputEntry(f"[{i}]", self.tangents[i] if grad and i < len(self.tangents) else None)
                for i in range(len(outputs))
            ),
            mutations=(),
            training=True,
            grad=grad,
        )

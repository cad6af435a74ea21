"""Small joint programs built by hand, their plans, and a way to run one rank of them alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphshard.passes.offload_activations import OffloadActivations
from graphshard.pipeline import default_passes, run_passes
from graphshard.planning.layout import ParamLayout, Unit, options_of
from graphshard.planning.plan import REPLICATED, SHARDED, ShardingPlan
from graphshard.planning.planner import fitted
from graphshard.policy.units import Policy, Strategy
from graphshard.program import ops
from graphshard.program.pass_protocol import Pass
from graphshard.program.program import (
    BACKWARD,
    FORWARD,
    InputEntry,
    OutputEntry,
    ParamEntry,
    Program,
    Results,
)
from graphshard.runtime import shards as stored

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


def block_params(module: str, hidden: int = 8) -> dict[str, tuple[int, ...]]:
    return {f"{module}.up.weight": (hidden, WIDTH), f"{module}.down.weight": (WIDTH, hidden)}


def blocks(n: int = 3, *, grad: bool = True, kind: type[Toy] = Toy) -> Program:
    """Embedding, n blocks, head: the model of the schedules FSDP was observed with."""
    params: dict[str, tuple[int, ...]] = {"embed.weight": (VOCAB, WIDTH)}
    for i in range(n):
        params |= block_params(f"layers.{i}")
    toy = kind(params | {"head.weight": (VOCAB, WIDTH)})
    if grad:
        toy.tangent(BATCH, VOCAB)
    x = toy.embedding("embed.weight")
    for i in range(n):
        x = toy.block(x, f"layers.{i}")
    return toy.finish(toy.linear(x, "head.weight"), grad=grad)


def shared_block(times: int = 3) -> Program:
    """One block used several times in a row, the root's own code between the uses."""
    toy = Toy({"embed.weight": (VOCAB, WIDTH)} | block_params("block"))
    toy.tangent(BATCH, WIDTH)
    x = toy.embedding("embed.weight")
    for _ in range(times):
        x = toy.relu(toy.block(x, "block"), "")
    return toy.finish(x)


def back_and_forth() -> Program:
    """Block a, block b, block a again."""
    toy = Toy({"embed.weight": (VOCAB, WIDTH)} | block_params("a") | block_params("b"))
    toy.tangent(BATCH, WIDTH)
    x = toy.embedding("embed.weight")
    for name in ("a", "b", "a"):
        x = toy.block(x, name)
    return toy.finish(x)


def nested() -> Program:
    """A unit with parameters of its own used before, between and after two units inside it."""
    toy = Toy(
        {"embed.weight": (VOCAB, WIDTH)}
        | block_params("tower.0")
        | {"tower.mix.weight": (WIDTH, WIDTH)}
        | block_params("tower.1")
        | block_params("top")
    )
    toy.tangent(BATCH, WIDTH)
    x = toy.embedding("embed.weight")
    x = toy.block(x, "tower.0")
    x = toy.linear(x, "tower.mix.weight")
    x = toy.block(x, "tower.1")
    return toy.finish(toy.block(x, "top"))


def odd_params() -> Program:
    """A tied, a frozen, an unused, an uneven and a 0-dim parameter."""
    toy = Toy(
        {"embed.weight": (VOCAB, WIDTH)}
        | block_params("a", hidden=7)
        | {"a.unused": (3,), "a.gain": ()}
        | block_params("b", hidden=3)
        | {"gain": ()},
        frozen=("b.up.weight",),
        tied={"embed.weight": ("head.weight",)},
    )
    toy.tangent(BATCH, VOCAB)
    x = toy.embedding("embed.weight")
    x = toy.scale(toy.block(x, "a"), "a.gain")
    x = toy.scale(toy.block(x, "b"), "gain")
    return toy.finish(toy.linear(x, "embed.weight"))


UNITS: dict[Callable[..., Program], tuple[str, ...]] = {
    blocks: ("", "layers.0", "layers.1", "layers.2"),
    shared_block: ("", "block"),
    back_and_forth: ("", "a", "b"),
    nested: ("", "tower", "tower.0", "tower.1", "top"),
    odd_params: ("", "a", "b"),
}


def make_toy_plan(
    program: Program,
    units: Sequence[str],
    policy: Policy | None = None,
    world_size: int = 4,
    mesh: tuple[int, ...] | None = None,
) -> ShardingPlan:
    """A plan with these units for a program built here, on `mesh` or one of `world_size` ranks.

    Every unit is gathered by itself, unless `policy` says otherwise.
    """
    policy = one_by_one(policy or Policy())
    mesh = mesh or (world_size,)
    owned: dict[str, list[ParamLayout]] = {unit: [] for unit in units}
    for param in program.params:
        owner = param.fqn
        while owner not in owned:
            owner = owner.rpartition(".")[0]
        sharded = bool(param.shape) and policy.strategy is not Strategy.NO_SHARD
        owned[owner].append(
            ParamLayout(
                param.fqn,
                param.names,
                param.shape,
                param.dtype,
                param.requires_grad,
                SHARDED if sharded else REPLICATED,
                mesh[-1],
                precision=policy.mixed_precision,
            )
        )
    made = tuple(
        Unit(fqn, "Toy", tuple(layouts), fitted(options_of(policy, fqn, {}), fqn, mesh))
        for fqn, layouts in owned.items()
    )
    return ShardingPlan(made, policy, prod(mesh), mesh)


def one_by_one(policy: Policy) -> Policy:
    """`policy`, by default with each unit's gather by itself, in forward and in backward.

    Tests look at one thing at a time.
    """
    if policy.merge_below is None:
        policy = dataclasses.replace(policy, merge_below=0)
    if policy.reshard_after_forward is None and Strategy(policy.strategy).frees_after_forward:
        policy = dataclasses.replace(policy, reshard_after_forward=True)
    return policy


def gathering_at_need(policy: Policy) -> Policy:
    """`one_by_one`, and by default with no gather ahead in forward."""
    if policy.forward_prefetch is not None or policy.schedule != "fsdp":
        return one_by_one(policy)
    return one_by_one(dataclasses.replace(policy, forward_prefetch=0))


def rewritten(
    build: Callable[..., Program],
    policy: Policy | None = None,
    world_size: int = 4,
    mesh: tuple[int, ...] | None = None,
    passes: Sequence[Pass] | None = None,
    **options: Any,
) -> tuple[Program, ShardingPlan]:
    """A toy program after `passes`; None: all those of `policy`.

    A program that is not in UNITS has the units of `blocks`.
    """
    policy = gathering_at_need(policy or Policy())
    program = build(**options)
    program.device = "cuda"  # that of the made-up machines
    units = UNITS.get(build, UNITS[blocks])
    plan = make_toy_plan(program, units, policy, world_size, mesh)
    run_passes(program, plan, default_passes(policy) if passes is None else passes)
    return program, plan


class OneRank(fx.Interpreter):
    """Runs what one rank runs, with no other: gathers find the full parameters in a table, reduces
    cut this rank's part out of its own gradient, times the ranks for a sum, and a freed parameter
    becomes NaN."""

    def __init__(
        self, program: Program, plan: ShardingPlan, full: dict[str, Tensor], rank: int
    ) -> None:
        super().__init__(fx.GraphModule(torch.nn.Module(), program.graph))
        self.plan, self.full, self.rank = plan, full, rank

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target is ops.all_gather:
            full = []
            for given, name in zip(args[0], kwargs["params"], strict=True):
                own = self.part(self.full[name], name, kwargs.get("ranks"))
                assert torch.equal(given, own.to(given.dtype))
                full.append(self.full[name].to(given.dtype, copy=True))
            return full
        if target in ops.SCATTERS:
            return self.reduced(self.alike(args[0], **kwargs), **kwargs)
        if target is ops.reshard:
            return self.part(args[0], kwargs["param"], kwargs["ranks"])
        if target is ops.all_reduce:
            return self.alike(args[0], **kwargs)
        if target is ops.wait:
            return args[0]
        if target in ops.TRANSFERS:
            return args[0].to(kwargs.get("dtype"))
        if target in (ops.free, ops.release):
            for value in args[0] if target is ops.free else args:
                value.fill_(float("nan"))
            return None
        return super().call_function(target, args, kwargs)

    def alike(self, grads: Sequence[Tensor], **_: Any) -> list[Tensor]:
        """What a reduce gives where all ranks have the same gradients."""
        return list(grads)

    def reduced(self, grads: Sequence[Tensor], *, params: Sequence[str], **_: Any) -> list[Tensor]:
        """This rank's parts of gradients."""
        return [self.part(grad, name) for grad, name in zip(grads, params, strict=True)]

    def part(self, full: Tensor, name: str, ranks: int | None = None) -> Tensor:
        """What this rank holds of a parameter, or its share as one of a group of `ranks`."""
        layout = self.plan.layouts[name]
        if ranks is None:
            return part_of(full, layout, self.rank)
        return part_of(full, layout.over(ranks), self.rank % ranks)


def shard(full: Tensor, plan: ShardingPlan, name: str, rank: int) -> Tensor:
    """What `rank` holds of a parameter or its gradient, zeros where it is padding."""
    return part_of(full, plan.layouts[name], rank)


def part_of(full: Tensor, layout: ParamLayout, rank: int) -> Tensor:
    """What `rank` holds by `layout`, zeros where it is padding."""
    padded = full.new_zeros(layout.shard_shape)
    part = stored.part_of(full, layout, rank)
    stored.without_padding(padded, layout.part_shape(rank)).copy_(part)
    return padded


def assert_same_values(captured: Program, program: Program, plan: ShardingPlan) -> None:
    """Every rank returns what the captured program returns, and its shards of the gradients."""
    generator = torch.Generator().manual_seed(0)

    def sample(val: Tensor) -> Tensor:
        if val.dtype.is_floating_point:
            return torch.randn(tuple(val.shape), generator=generator, dtype=val.dtype)
        return torch.randint(VOCAB, tuple(val.shape), generator=generator)

    full = {p.fqn: sample(p.node.meta["val"]) for p in captured.params}
    rest = [
        sample(node.meta["val"])
        for node in captured.graph.nodes
        if node.op == "placeholder" and node not in {p.node for p in captured.params}
    ]
    alone = fx.Interpreter(fx.GraphModule(torch.nn.Module(), captured.graph))
    expected = alone.run(*full.values(), *rest)
    for rank in range(plan.shard_size):
        shards = [shard(value, plan, name, rank) for name, value in full.items()]
        actual = OneRank(program, plan, full, rank).run(*shards, *rest)
        for wanted, found in zip(expected[0], actual[0], strict=True):
            assert torch.equal(wanted, found)
        for param, wanted, found in zip(captured.params, expected[2], actual[2], strict=True):
            assert (wanted is None) == (found is None), param.fqn
            if wanted is not None:
                assert torch.equal(shard(wanted, plan, param.fqn, rank), found), param.fqn


def without_bound(policy: Policy) -> list[Any]:
    return [
        dataclasses.replace(step, min_bytes=0) if isinstance(step, OffloadActivations) else step
        for step in default_passes(policy)
    ]


def offloaded(
    build: Callable[..., Program], offload: Any = "activations", **fields: Any
) -> tuple[Program, ShardingPlan]:
    policy = gathering_at_need(Policy(offload=offload, **fields))
    program = build()
    plan = make_toy_plan(program, UNITS[build], policy)
    run_passes(program, plan, without_bound(policy))
    return program, plan


# -- edits of a program --------------------------------------------------------------------------


def named(program: Program, name: str) -> fx.Node:
    return next(node for node in program.graph.nodes if node.name == name)


def emit(program: Program, after: fx.Node, target: Any, *args: Any, like: fx.Node) -> fx.Node:
    """A compute node right after another, with the value and place of `like`."""
    with program.graph.inserting_after(after):
        node = program.graph.call_function(target, args)
    node.meta = {**like.meta, "phase": after.meta["phase"], "unit": after.meta["unit"]}
    return node


# -- the order of events, in the notation of what FSDP was observed to do --------------------------


SHORT = {"all_gather": "AG:", "free": "FREE:", "reduce_scatter": "RS:", "all_reduce": "AR:"}


def events(program: Program, *, waits: bool = False) -> str:
    """The schedule: AG = all_gather issued, F and B = compute in forward and backward (Bh: the
    head's), RS = reduce_scatter, AR = all_reduce; "|" is the border of the two.
    """
    words: list[str] = []
    phase = FORWARD
    for event in program.schedule():
        if event.phase != phase:
            words.append("|")
            phase = event.phase
        unit = event.unit.removeprefix("layers.") or "root"
        if event.op == "compute":
            if unit != "root":
                word = ("F" if phase == FORWARD else "B") + unit
                if words[-1:] != [word]:  # waits left out may have stood between
                    words.append(word)
            elif phase == BACKWARD and not any(w[0] == "B" for w in words):
                words.append("Bh")
        elif event.op == "wait":
            if waits:
                words.append(f"WAIT:{unit}")
        else:
            words.append(SHORT[event.op] + unit)
    return " ".join(words)

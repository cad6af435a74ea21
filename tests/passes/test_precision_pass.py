"""Mixed precision in programs: which casts there are, where they stand, what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from toy_programs import (
    Toy,
    assert_same_values,
    blocks,
    rewritten,
)

import graphshard
from graphshard import BlockPolicy, MixedPrecision
from graphshard.capture.casting import place_casts
from graphshard.capture.entry import capture
from graphshard.errors import CaptureError, PassError
from graphshard.planning.plan import ShardingPlan, gradient_bytes
from graphshard.planning.planner import make_plan
from graphshard.policy.precision import Precisions
from graphshard.policy.units import Policy
from graphshard.program import ops
from graphshard.program.aliases import cast_dtype
from graphshard.program.program import BACKWARD, FORWARD, Program

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
cast_op = torch.ops.prims.convert_element_type.default


class MixedToy(Toy):
    """Computes in bfloat16 by casts that capture puts in place."""

    def tangent(self, *shape: int) -> None:
        super().tangent(*shape)
        node = self.tangents[-1]
        node.meta["val"] = node.meta["val"].to(BF16)
        self.stored = self.params
        self.params = {n: self.op(cast_op, p, BF16, module=n) for n, p in self.stored.items()}

    def finish(self, output: fx.Node, **options: Any) -> Program:
        self.phase = BACKWARD
        gy: fx.Node | None = self.tangents[0]
        for step in reversed(self.tape):
            assert gy is not None
            gy = step(gy)
        self.tape = []
        self.grads = {n: self.op(cast_op, g, F32, module=n) for n, g in self.grads.items()}
        self.params = self.stored
        program = super().finish(output, **options)
        place_casts(program, Precisions({}, dict.fromkeys(self.params, BF16)))
        return program


def mixed_blocks() -> Program:
    return blocks(kind=MixedToy)


def casts(program: Program, phase: str) -> list[tuple[str, str]]:
    """(unit, dtype) of every event of casts."""
    return [
        (event.unit, str(nodes[0].kwargs["dtype"])[6:])
        for event, nodes in program.timeline()
        if event.op == "cast" and event.phase == phase
    ]


def dtypes(program: Program, target: object) -> set[torch.dtype]:
    """What all collectives of a kind move."""
    found = [n for n in program.nodes() if n.target is target]
    return {operand.meta["val"].dtype for node in found for operand in node.args[0]}


def test_a_mixed_program(golden: Callable[[str, str], None]) -> None:
    program, _ = rewritten(mixed_blocks, Policy(mixed_precision=MixedPrecision(BF16, F32)))
    golden("schedule_mixed.txt", str(program))


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("reduce_dtype", [F32, BF16, None])
@pytest.mark.parametrize("prefetch", ["pre", "post"])
def test_values_stay(strategy: str, reduce_dtype: torch.dtype | None, prefetch: str) -> None:
    policy = Policy(
        strategy=strategy,
        backward_prefetch=prefetch,
        mixed_precision=MixedPrecision(BF16, reduce_dtype),
    )
    program, plan = rewritten(mixed_blocks, policy)
    assert_same_values(mixed_blocks(), program, plan)
    reduces = ops.all_reduce if strategy == "NO_SHARD" else ops.reduce_scatter
    assert dtypes(program, reduces) == {reduce_dtype or BF16}
    assert dtypes(program, ops.all_gather) == (set() if strategy == "NO_SHARD" else {BF16})
    # No parameter is cast once it is gathered, no gradient by the model's own compute.
    compute = [n for n in program.nodes() if ops.is_compute(n) and cast_dtype(n) is not None]
    assert len(compute) == (8 if strategy == "NO_SHARD" else 0)


def test_gradients_are_cast_before_or_after_their_reduce() -> None:
    units = ["layers.2", "layers.1", "layers.0", ""]
    high, _ = rewritten(mixed_blocks, Policy(mixed_precision=MixedPrecision(BF16, F32)))
    low, _ = rewritten(mixed_blocks, Policy(mixed_precision=MixedPrecision(BF16)))
    kept, _ = rewritten(
        mixed_blocks, Policy(mixed_precision=MixedPrecision(BF16, keep_low_precision_grads=True))
    )
    for program, is_cast in ((high, True), (low, True), (kept, False)):
        found = [unit for unit, dtype in casts(program, BACKWARD) if dtype == "float32"]
        assert found == (units if is_cast else [])
    assert {g.meta["val"].dtype for g in kept.results().grads} == {BF16}
    assert {g.meta["val"].dtype for g in low.results().grads} == {F32}


def test_a_parameter_read_in_its_own_dtype_is_refused() -> None:
    with pytest.raises(PassError, match=r"reads parameter 'embed.weight' in torch.float32, which"):
        rewritten(blocks, Policy(mixed_precision=MixedPrecision(BF16)))


# -- captured -------------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.down = nn.Linear(6, 4)
        self.register_buffer("shift", torch.linspace(0, 1, 4))
        self.register_buffer("seen", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(self.norm(self.up(x))) + self.shift.to(x.dtype)
        self.seen.add_(y.detach().mean(0))
        return y


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def planned(model: nn.Module | None = None, **fields: Any) -> ShardingPlan:
    policy = BlockPolicy({Block}, mixed_precision=MixedPrecision(**fields))
    with torch.device("meta"):
        model = model or Net()
    return graphshard.plan(model, policy, world_size=2, example_inputs=(torch.zeros(5, 4),))


def program_of(plan: ShardingPlan) -> Program:
    assert plan.program is not None
    return plan.program


def returned(plan: ShardingPlan) -> torch.dtype:
    return program_of(plan).results().outputs[0].meta["val"].dtype


def test_batch_norm_stays_float32() -> None:
    plan = planned(param_dtype=BF16, buffer_dtype=BF16)
    for node in program_of(plan).nodes(FORWARD):
        if "batch_norm" in str(node.target):
            assert {v.meta["val"].dtype for v in node.all_input_nodes} == {F32}
            (normed,) = [user for user in node.users if user.args[1] == 0]
            assert [cast_dtype(user) for user in normed.users] == [BF16]
    dtype_of = {name: layout.compute_dtype for name, layout in plan.layouts.items()}
    assert dtype_of["blocks.0.norm.weight"] == F32
    assert dtype_of["blocks.0.up.weight"] == BF16
    assert plan.layouts["blocks.0.norm.weight"].reduce_dtype == F32


def test_the_plan_counts_bytes_as_they_are_gathered() -> None:
    own, mixed = planned(), planned(param_dtype=BF16)
    assert [u.sharded_bytes for u in own.units] == [u.sharded_bytes for u in mixed.units]
    norm = 2 * 6 * 4  # weight and bias of BatchNorm, in float32 as before
    for a, b in zip(own.units[1:], mixed.units[1:], strict=True):
        assert b.unsharded_bytes - norm == (a.unsharded_bytes - norm) / 2
    whole, kept = gradient_bytes(own).accumulated, gradient_bytes(mixed).accumulated
    assert kept - 2 * norm == (whole - 2 * norm) / 2  # of two blocks


def test_inputs_and_outputs_of_units() -> None:
    assert returned(planned(param_dtype=BF16)) == BF16
    assert returned(planned(param_dtype=BF16, output_dtype=F32)) == F32
    assert returned(planned(output_dtype=F16)) == F16
    for cast in (True, False):
        program = program_of(planned(param_dtype=BF16, cast_forward_inputs=cast))
        read_by = [cast_dtype(user) for user in program.inputs[0].node.users]
        assert read_by == ([BF16] if cast else [None] * len(read_by))


def test_buffers_are_shown_in_their_dtype_and_keep_their_own() -> None:
    program = program_of(planned(param_dtype=BF16, buffer_dtype=F16))
    by_name = {buffer.fqn: buffer.node for buffer in program.buffers}
    assert {cast_dtype(user) for user in by_name["blocks.0.shift"].users} == {F16}
    assert by_name["blocks.0.norm.running_mean"].meta["val"].dtype == F32
    written = {
        m.name: v.meta["val"].dtype
        for m, v in zip(program.mutations, program.results().mutations, strict=True)
    }
    assert written["blocks.0.seen"] == F32  # cast back
    assert "blocks.0.shift" not in written
    assert "blocks.0.norm.running_mean" in written


def test_precision_per_unit() -> None:
    policy = graphshard.ModulePolicy(
        {Block: {}, "blocks.1": {"mixed_precision": MixedPrecision(F16, output_dtype=F32)}},
        merge_below=0,
    )
    plan = graphshard.plan(Net(), policy, world_size=2, example_inputs=(torch.zeros(5, 4),))
    found = {
        node.kwargs["unit"]: {o.meta["val"].dtype for o in node.args[0]}
        for node in program_of(plan).nodes(FORWARD)
        if node.target is ops.all_gather
    }
    assert found == {"": {F32}, "blocks.0": {F32}, "blocks.1": {F16, F32}}


class Clamped(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-1, 1)
        return super().forward(x)


def test_a_change_to_the_copy_of_a_parameter_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"changes parameter 'head.weight' in place"):
        planned(Clamped(), param_dtype=BF16)


def test_reduces_are_not_put_off_to_the_end_of_backward() -> None:
    """Autograd orders the casts of gradients after all else; capture puts them in place."""
    plan = make_plan(
        Net(), BlockPolicy({Block}, mixed_precision=MixedPrecision(BF16)), world_size=2
    )
    program = capture(Net(), (torch.zeros(5, 4),), precisions=plan.precisions).program
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    grads = [place[grad] for grad in program.results().grads]
    assert grads[-1] < place[program.first_backward()] + 8  # the head's, first in backward
    units = [e.unit for e in program_of(planned(param_dtype=BF16)).schedule()]
    assert units.index("blocks.1") < units.index("blocks.0", units.index("blocks.1"))


# -- buffers of another dtype ---------------------------------------------------------------------


class WithBuffer(nn.Module):
    """A float32 buffer that meets, by `work`, the result of a layer in another dtype."""

    def __init__(self, work: Callable[[nn.Module, Tensor, Tensor], Tensor], *shape: int) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(shape))
        self.layer, self.work = nn.Linear(4, 4), work

    def forward(self, x: Tensor) -> Tensor:
        return self.work(self.layer, x, self.table)


MEETS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "added before a layer": (
        lambda: WithBuffer(lambda layer, x, table: layer(x + table), 4),
        r"buffer 'table' is torch.float32, .* meets torch.bfloat16 in aten.addmm.default of layer",
    ),
    "of spectral_norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        r"buffer 'parametrizations.weight.0._[uv]' is torch.float32, .* in aten.mv.default of",
    ),
    "weights of a loss": (
        lambda: WithBuffer(
            lambda layer, x, table: nn.functional.cross_entropy(
                layer(x), torch.zeros(2, dtype=torch.int64), table
            ),
            4,
        ),
        r"buffer 'table' is torch.float32, .* in aten.nll_loss_forward.default of",
    ),
    "in a batched product, which a trace refuses": (
        lambda: WithBuffer(lambda layer, x, table: torch.bmm(layer(x)[None], table), 1, 4, 4),
        r"meets operands of two dtypes, .* here 'table' \(torch.float32\)",
    ),
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("name", MEETS)
def test_a_buffer_that_meets_another_dtype_is_named(name: str, early: bool) -> None:
    model, message = MEETS[name]
    x = torch.randn(2, 4)

    def run(**fields: Any) -> None:
        policy = graphshard.LambdaPolicy(
            lambda _: False, mixed_precision=MixedPrecision(param_dtype=BF16, **fields)
        )
        sharded = graphshard.compile(model(), policy, example_inputs=(x,) if early else None)
        assert not early or sharded.program
        sharded(x).float().sum().backward()

    with pytest.raises(CaptureError, match=message) as caught:
        run()
    assert "buffer_dtype=" in str(caught.value)
    of_torch = name == "of spectral_norm"
    assert of_torch or re.search(r"test_precision_pass\.py:\d+ in", str(caught.value))
    run(buffer_dtype=BF16)


def test_buffers_that_operators_promote_are_left_alone() -> None:
    model = WithBuffer(lambda layer, x, table: layer(x) + table, 4)
    policy = graphshard.LambdaPolicy(
        lambda _: False, mixed_precision=MixedPrecision(param_dtype=BF16)
    )
    assert graphshard.compile(model, policy)(torch.randn(2, 4)).dtype == torch.float32

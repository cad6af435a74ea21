"""Finished programs to corrupt: one small model under every policy that inserts other ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, fx, nn
from toy_programs import gathering_at_need

from graphshard import BlockPolicy, MixedPrecision
from graphshard.capture.dynamic import Dynamic
from graphshard.capture.entry import capture
from graphshard.hardware.hardware import Hardware
from graphshard.passes.form_regions import FormRegions
from graphshard.passes.offload_activations import OffloadActivations
from graphshard.passes.recompute import Recompute
from graphshard.passes.release_early import ReleaseEarly
from graphshard.passes.set_budget import SetBudget
from graphshard.passes.split_gathers import SplitGathers
from graphshard.passes.split_reduces import SplitReduces
from graphshard.pipeline import default_passes, passes_for
from graphshard.planning.plan import ShardingPlan
from graphshard.planning.planner import make_plan
from graphshard.program.collective import Mode
from graphshard.program.pass_protocol import PassLike, Stage, apply_passes, stages_of
from graphshard.program.program import Program
from graphshard.program.spans import assign_units
from graphshard.verify.facts import Reference
from graphshard.verify.numbering import Values
from graphshard.verify.rules import FINISHED, verify

WIDTH, WORDS = 8, 12


class Layer(nn.Module):
    """Two weights of one shape, attention and a random draw in one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x)).unsqueeze(1)
        h = nn.functional.scaled_dot_product_attention(h, h, h, is_causal=True).squeeze(1)
        return x + self.down(torch.sin(nn.functional.dropout(h, 0.25, self.training)))


class Net(nn.Module):
    """Tied and frozen parameters, and inputs, outputs, buffers and constants of one shape each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.frozen = nn.Parameter(torch.linspace(1.5, 0.5, WIDTH), requires_grad=False)
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("square", torch.ones(WIDTH))
        self.shift, self.stretch = torch.linspace(0, 1, WIDTH), torch.linspace(1, 2, WIDTH)

    def forward(self, ids: Tensor, left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
        left, right = (nn.functional.dropout(side, 0.1, self.training) for side in (left, right))
        x = self.embed(ids) * self.stretch + self.shift + left * self.scale - right * self.frozen
        if self.training:
            self.mean.lerp_(x.detach().mean((0, 1)), 0.1)
            self.square.lerp_(x.detach().square().mean((0, 1)), 0.1)
        x = x / (self.square + self.mean.abs())
        for layer in self.layers:
            x = layer(x)
        return self.head(x), nn.functional.linear(x, self.embed.weight)


def example() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs of `Net`."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(WORDS, (2, 4), generator=generator)
    left, right = torch.randn(2, 2, 4, WIDTH, generator=generator)
    return ids, left.requires_grad_(), right.requires_grad_()


BF16 = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LOW = MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, keep_low_precision_grads=True
)


SPLIT: tuple[PassLike, ...] = (
    SetBudget(Hardware.load("h100-sxm")),
    SplitGathers(),
    SplitReduces(),
)
"""Passes that split every gather and reduce that can be, whatever it costs."""


def of_any_size(step: PassLike, draws_again: bool = False) -> PassLike:
    """`step`, applied to tensors however small."""
    small = isinstance(step, (OffloadActivations, ReleaseEarly))
    small |= draws_again and isinstance(step, Recompute)
    return dataclasses.replace(step, min_bytes=1) if small else step  # type: ignore[type-var]


@dataclass(frozen=True)
class Setting:
    """How a program is made: policy, mesh, further passes, accumulation, capture."""

    policy: Mapping[str, Any]
    mesh: tuple[int, ...] = (2,)
    last: tuple[PassLike, ...] = ()
    keep: str | None = None
    add: str | None = None  # what was accumulated of every trainable parameter
    grad: bool = True
    dynamic: bool = False
    draws_again: bool = False  # however small the masks


SETTINGS: dict[str, Setting] = {
    "full": Setting({}),
    "zero2": Setting({"strategy": "SHARD_GRAD_OP"}),
    "zero1": Setting({"strategy": "SHARD_OPTIMIZER"}),
    "ddp": Setting({"strategy": "NO_SHARD"}),
    "hybrid": Setting({"strategy": "HYBRID_SHARD"}, mesh=(2, 2)),
    "partial": Setting({"reshard_after_forward": 2}, mesh=(4,)),
    "mixed": Setting({"mixed_precision": BF16}),
    "low": Setting({"mixed_precision": LOW, "strategy": "HYBRID_SHARD"}, mesh=(2, 2)),
    "recompute": Setting({"recompute": "units"}),
    "offload": Setting({"offload": ("params", "activations")}),
    "prefetch": Setting({"forward_prefetch": 1, "backward_prefetch": "post", "reshard_root": True}),
    "split": Setting({}, last=SPLIT),
    "overlap": Setting({"schedule": "overlap", "hardware": "h100-sxm"}, mesh=(8,)),
    "kept": Setting({}, keep="gradient"),
    "added": Setting({}, add="gradient"),
    "shards kept": Setting({"strategy": "HYBRID_SHARD"}, mesh=(2, 2), keep="shard"),
    "shards added": Setting({"strategy": "HYBRID_SHARD"}, mesh=(2, 2), add="shard"),
    "mixed added": Setting({"mixed_precision": BF16}, add="gradient"),
    "checked": Setting({"check_finite": "error"}),
    "regions": Setting({}, last=(FormRegions(),)),
    "forward": Setting({"reshard_root": True}, grad=False),
    "dynamic": Setting({"recompute": "units"}, dynamic=True),
    "drawn again": Setting({"recompute": "units"}, draws_again=True),
}


@dataclass(frozen=True)
class Sample:
    """A finished program, its plan, and the reference that a further pass is verified against."""

    program: Program
    plan: ShardingPlan
    reference: Reference
    done: Stage

    def verify(self) -> None:
        """Check every rule, as after a pass behind the last one."""
        state = {"done": self.done, "reference": self.reference}
        verify(self.program, self.plan, after="corruption", **state)

    def copy(self) -> Sample:
        """An independent copy, to corrupt; `capture` and the passes take far longer."""
        program = self.program.copy()
        new = dict(zip(self.program.graph.nodes, program.graph.nodes, strict=True))
        reference = self.reference
        return dataclasses.replace(
            self,
            program=program,
            reference=dataclasses.replace(
                reference,
                values=None if reference.values is None else _moved(reference.values, new),
                tables={name: getattr(program, name) for name in reference.tables},
                reads={new[node]: reads for node, reads in reference.reads.items()},
            ),
        )


def _moved(values: Values, new: Mapping[fx.Node, fx.Node]) -> Values:
    """The same numbers, of the copies of the nodes; those of erased nodes are left out."""
    keys = [
        (*key[:-1], new.get(key[-1], key[-1])) if isinstance(key[-1], fx.Node) else key
        for key in values.keys
    ]
    return dataclasses.replace(
        values,
        keys=keys,
        by_key={key: number for number, key in enumerate(keys)},
        of_node={new[node]: n for node, n in values.of_node.items() if node in new},
        effects=[new[node] for node in values.effects],
        memo={},
    )


@cache
def _capture(setting_key: tuple[Any, ...]) -> tuple[Program, Any]:
    grad, dynamic, precision = setting_key
    model, args = Net(), example()
    names, kwargs = None, {}
    if dynamic:
        dims = {name: {0: "batch", 1: "seq"} for name in ("ids", "left", "right")}
        sizes = Dynamic.of(model, dims)
        assert sizes is not None
        args, kwargs, names = sizes.of_example(args, {})  # type: ignore[assignment]
    plan = make_plan(model, BlockPolicy({Layer}, mixed_precision=precision), world_size=2)
    captured = capture(model, args, kwargs, grad=grad, names=names, precisions=plan.precisions)
    return captured.program, model


@cache
def sample(name: str) -> Sample:
    """The finished program of a setting, verified. It is shared: corrupt a copy."""
    setting = SETTINGS[name]
    policy = gathering_at_need(BlockPolicy({Layer}, **setting.policy))
    captured, model = _capture((setting.grad, setting.dynamic, policy.mixed_precision))
    plan = make_plan(model, policy, world_size=prod(setting.mesh), mesh_shape=setting.mesh)
    program = captured.copy()
    program.stale = plan.stale_after_step
    assign_units(program, plan)
    reference = Reference.of(program)
    trained = [p.fqn for p in program.params if p.requires_grad]
    added = {
        kind: frozenset(trained if setting.add == kind else ()) for kind in ("gradient", "shard")
    }
    mode: Mode = (setting.keep, added["gradient"], added["shard"])  # type: ignore[assignment]
    passes = tuple(
        of_any_size(step, setting.draws_again) for step in passes_for(default_passes(policy), mode)
    )
    passes += setting.last
    apply_passes(passes, program, plan)
    done = FINISHED | stages_of(*passes)
    facts = verify(
        program,
        plan,
        after="the passes",
        done=done,
        reference=dataclasses.replace(reference, collectives=(), reads={}, added=None),
    )
    return Sample(program, plan, Reference.of(program, reference, facts), done)

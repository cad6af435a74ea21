"""The systems that `rivals.py` compares: each shards a model and makes the step that trains it.

The model's weights, the batches, the optimizer and the modules that are units are the same for all.
Everything else is each system's default: prefetching, what is freed after forward, buckets.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import graphshard
from examples.benchmarks.benchmark_models import LEARNING_RATE, Batch, loss_of
from graphshard.runtime import gloo


@dataclass(frozen=True)
class Setting:
    """The settings of a system besides the model."""

    mesh: DeviceMesh
    device: torch.device
    units: tuple[str, ...]  # class names of the modules that are units, the root besides
    dtype: torch.dtype | None  # to compute, gather and reduce in; None: the parameters' own
    batch: Batch | None  # an example; None: captured at the first call
    reduce_dtype: torch.dtype | None = None  # None: `dtype`
    hardware: str | None = None  # what "overlap" is timed on

    def blocks(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        return [(n, m) for n, m in model.named_modules() if type(m).__name__ in self.units]


@dataclass
class Trained:
    """A system at work on a rank: what a step calls, and what lives between steps.

    scheduling: of Gloo's reading threads in its steps, which graphshard changes for the process.
    """

    called: Callable[..., Any]
    module: nn.Module
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    scheduling: int = getattr(os, "SCHED_OTHER", 0)

    @cached_property
    def optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.module.parameters(), lr=LEARNING_RATE)

    @cached_property
    def readers(self) -> list[int]:
        return list(gloo.readers())

    def step(self, batch: Batch, before_optimizer: Callable[[], None] | None = None) -> Tensor:
        """A whole training step; the loss."""
        for reader in self.readers:
            os.sched_setscheduler(reader, self.scheduling, os.sched_param(0))
        with self.context():
            loss = loss_of(self.called(**batch))
        loss.backward()
        if before_optimizer is not None:
            before_optimizer()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def kept(self) -> list[Any]:
        """Every tensor known to outlive a step."""
        states = [list(state.values()) for state in self.optimizer.state.values()]
        return [list(self.module.parameters()), list(self.module.buffers()), states]


@dataclass(frozen=True)
class System:
    """A system under the name the table has for it."""

    name: str
    build: Callable[[Setting, nn.Module], Trained]
    compiled: bool = False


def graphshard_step(
    setting: Setting, model: nn.Module, backend: str = "eager", **options: Any
) -> Trained:
    """Ours, under a `BlockPolicy` with these options."""
    if setting.dtype is not None:
        options["mixed_precision"] = graphshard.MixedPrecision(setting.dtype, setting.reduce_dtype)
    if options.get("schedule") == "overlap":
        options.setdefault("hardware", setting.hardware)
    if setting.mesh.ndim > 1:
        options["strategy"] = "HYBRID_SHARD"
    sharded = graphshard.compile(
        model,
        graphshard.BlockPolicy(setting.units, **options),
        example_kwargs=setting.batch,
        mesh=setting.mesh,
        device=setting.device,
        backend=backend,
    )
    return Trained(sharded, sharded, scheduling=getattr(os, "SCHED_BATCH", 0))


def fully_shard_step(
    setting: Setting, model: nn.Module, compiled: str = "", **of_blocks: Any
) -> Trained:
    """FSDP2's, with these options for blocks; `compiled`: "blocks" or "whole"."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    blocks = setting.blocks(model)
    if compiled == "blocks":
        # Hooks stand on what is sharded: around the compiled code, not in it.
        blocks = [(name, torch.compile(block)) for name, block in blocks]
        for name, block in blocks:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path).register_module(leaf, block)
    options: dict[str, Any] = {"mesh": setting.mesh}
    if setting.dtype is not None:
        options["mp_policy"] = MixedPrecisionPolicy(setting.dtype, setting.reduce_dtype)
    for _, block in blocks:
        fully_shard(block, **options, **of_blocks)
    fully_shard(model, **options)
    return Trained(torch.compile(model) if compiled == "whole" else model, model)


def _ddp(setting: Setting, model: nn.Module) -> Trained:
    from torch.nn.parallel import DistributedDataParallel

    replicated = DistributedDataParallel(model)
    context: Any = nullcontext
    if setting.dtype is not None:
        context = partial(torch.autocast, setting.device.type, setting.dtype)
    return Trained(replicated, replicated, context)


def _alone(setting: Setting, model: nn.Module) -> Trained:
    """Compute and the optimizer of a rank's share of the tensors, in float32; no messages."""
    trained, params = Trained(model, model), list(model.parameters())
    share = params[: len(params) // setting.mesh.size()]
    trained.optimizer = torch.optim.AdamW(share, lr=LEARNING_RATE)
    trained.optimizer.zero_grad = model.zero_grad
    return trained


class _Square(nn.Module):
    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__()
        self.squared = nn.ParameterList(parameters)

    def forward(self, x: Tensor) -> Tensor:
        return x + sum(parameter.flatten()[:1].square().sum() for parameter in self.squared)


def _messages(setting: Setting, model: nn.Module) -> Trained:
    """Graphshard's messages: forward and backward read a number of each parameter, and no more."""
    blocks = [block for _, block in setting.blocks(model)]
    within = {id(parameter) for block in blocks for parameter in block.parameters()}
    rest = _Square(p for p in model.parameters() if id(p) not in within)
    squares = nn.Sequential(rest, *(_Square(block.parameters()) for block in blocks))
    example = {"input": torch.zeros(1, device=setting.device)}
    trained = graphshard_step(replace(setting, units=("_Square",), batch=example), squares)
    trained.called = lambda **batch: trained.module(**example)
    trained.optimizer = torch.optim.SGD(trained.module.parameters())
    trained.optimizer.step = lambda: None
    return trained


def shard_simply(model: nn.Module, mesh: DeviceMesh, dtype: torch.dtype | None = None) -> None:
    """Shard every parameter of `model` in place by DTensor alone, for torch.compile to schedule.

    After Zhang et al. 2024, "SimpleFSDP: Simpler Fully Sharded Data Parallel with torch.compile"
    (arXiv:2411.00284), written from its description. Each parameter is a `DTensor(Shard(0))`;
    whoever reads it gets a tensor that was redistributed to every rank, whose gradient is an
    average over ranks and is redistributed back to shards. So one traced graph holds gathers and
    reduces, one per parameter, and the compiler may merge and move them. The gather stands in a
    region that is recomputed in backward, so that gathered parameters are not saved.
    """
    shards: dict[int, nn.Parameter] = {}
    for module in list(model.modules()):
        names = [name for name, value in module._parameters.items() if value is not None]
        for name in names:
            whole = module._parameters[name]
            if id(whole) not in shards:
                split = distribute_tensor(whole.detach(), mesh, [Shard(0)])
                shards[id(whole)] = nn.Parameter(split, requires_grad=whole.requires_grad)
            module._parameters[name] = shards[id(whole)]
        if names:
            # A property of the class goes before what nn.Module looks up in `_parameters`.
            getters = {name: property(partial(_read, name=name, dtype=dtype)) for name in names}
            kind = type(module)
            module.__class__ = type(f"Sharded{kind.__name__}", (kind,), getters)


def _read(module: nn.Module, name: str, dtype: torch.dtype | None) -> Tensor:
    shard = module._parameters[name]
    contexts = partial(create_selective_checkpoint_contexts, _recompute)
    return checkpoint(_gathered, shard, dtype, use_reentrant=False, context_fn=contexts)


def _recompute(*args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE


def _gathered(shard: DTensor, dtype: torch.dtype | None) -> Tensor:
    if dtype is not None and shard.is_floating_point():
        shard = shard.to(dtype)
    return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])


def _simple_fsdp(setting: Setting, model: nn.Module) -> Trained:
    largest = max(sum(p.nbytes for p in block.parameters()) for _, block in setting.blocks(model))
    shard_simply(model, setting.mesh, setting.dtype)
    # Merged up to the size of a unit, which is what the units of the others are.
    size = largest / 2**20 * (1 if setting.dtype is None else 0.5)
    buckets = {
        "bucket_all_gathers_fx": "all",
        "bucket_all_gathers_fx_bucket_size_determinator": lambda *_: size,
        "bucket_reduce_scatters_fx": "all",
        "bucket_reduce_scatters_fx_bucket_size_determinator": lambda *_: size,
    }
    return Trained(torch.compile(model, fullgraph=True, options=buckets), model)


OURS, OURS_COMPILED, OURS_OVERLAP = "graphshard", "graphshard inductor", "graphshard overlap"
ALONE, MESSAGES = "ranks alone", "messages"
FSDP2, FSDP2_BLOCKS, FSDP2_WHOLE = "FSDP2", "FSDP2 compile blocks", "FSDP2 compile whole"

SYSTEMS = (
    System(OURS, graphshard_step),
    System(FSDP2, fully_shard_step),
    System(OURS_OVERLAP, partial(graphshard_step, schedule="overlap")),
    System("DDP", _ddp),
    System(OURS_COMPILED, partial(graphshard_step, backend="inductor"), compiled=True),
    System(FSDP2_BLOCKS, partial(fully_shard_step, compiled="blocks"), compiled=True),
    System(FSDP2_WHOLE, partial(fully_shard_step, compiled="whole"), compiled=True),
    System("SimpleFSDP", _simple_fsdp, compiled=True),
    System(ALONE, _alone),
    System(MESSAGES, _messages),
)

"""The systems that `rivals.py` compares: each shards a model and makes the step that trains it.

The model's weights, the batches, the optimizer and the modules that are units are the same for all.
Everything else is each system's default: prefetching, what is freed after forward, buckets.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from examples.benchmarks.benchmark_models import Batch, loss_of
from examples.benchmarks.rival_models import LEARNING_RATE
from examples.benchmarks.simple_fsdp import shard_simply
from graphshard.program import ops


@dataclass(frozen=True)
class Setting:
    """The settings of a system besides the model."""

    mesh: DeviceMesh
    device: torch.device
    units: tuple[str, ...]  # class names of the modules that are units, the root besides
    dtype: torch.dtype | None  # to compute, gather and reduce in; None: the parameters' own
    batch: Batch  # an example
    hardware: str | None = None  # what "overlap" is timed on

    def blocks(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The units in `model`, by name."""
        return [(n, m) for n, m in model.named_modules() if type(m).__name__ in self.units]


@dataclass
class Trained:
    """A system at work on a rank: what a step calls, and what lives between steps."""

    call: Callable[..., Any]
    module: nn.Module
    optimizer: Any
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    program: Any = None  # graphshard's, which says what it communicates

    def step(self, batch: Batch, before_optimizer: Callable[[], None] | None = None) -> Tensor:
        """A whole training step; the loss."""
        with self.context():
            loss = loss_of(self.call(**batch))
        loss.backward()
        if before_optimizer is not None:
            before_optimizer()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    @property
    def parameters(self) -> list[Tensor]:
        """The parameters that the optimizer updates."""
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def kept(self) -> list[Any]:
        """Every tensor known to outlive a step."""
        states = [list(state.values()) for state in self.optimizer.state.values()]
        return [self.parameters, list(self.module.buffers()), states]

    @property
    def collectives(self) -> int | None:
        """The collectives that the program issues in a step; None where there is no program."""
        if self.program is None:
            return None
        return sum(ops.is_collective(node) for node in self.program.nodes())


@dataclass(frozen=True)
class System:
    """A system under the name the table has for it.

    why_not: why it cannot run here (on this device, in this dtype); empty if it can be tried.
    """

    name: str
    build: Callable[[Setting, nn.Module], Trained]
    compiled: bool = False
    why_not: Callable[[Setting], str] = lambda setting: ""
    note: str = ""


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)


# -- graphshard ------------------------------------------------------------------------------------


def graphshard_step(
    setting: Setting, model: nn.Module, backend: str = "eager", **options: Any
) -> Trained:
    """Ours, under a `BlockPolicy` with these options."""
    if setting.dtype is not None:
        options["mixed_precision"] = graphshard.MixedPrecision(param_dtype=setting.dtype)
    sharded = graphshard.compile(
        model,
        graphshard.BlockPolicy(setting.units, **options),
        example_kwargs=setting.batch,
        mesh=setting.mesh,
        device=setting.device,
        backend=backend,
    )
    return Trained(sharded, sharded, _adamw(sharded), program=sharded.program)


def _overlap(setting: Setting, model: nn.Module) -> Trained:
    return graphshard_step(setting, model, schedule="overlap", hardware=setting.hardware)


# -- torch -----------------------------------------------------------------------------------------


def _fully_shard(setting: Setting, model: nn.Module, compiled: str = "") -> Trained:
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
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=setting.dtype)
    for _, block in blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    call = torch.compile(model) if compiled == "whole" else model
    return Trained(call, model, _adamw(model))


def _fsdp1(setting: Setting, model: nn.Module) -> Trained:
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    classes = {type(block) for _, block in setting.blocks(model)}
    precision = None if setting.dtype is None else MixedPrecision(param_dtype=setting.dtype)
    sharded = FullyShardedDataParallel(
        model,
        process_group=setting.mesh.get_group(),
        auto_wrap_policy=ModuleWrapPolicy(classes),
        mixed_precision=precision,
        device_id=setting.device,
        use_orig_params=True,
    )
    return Trained(sharded, sharded, _adamw(sharded))


def _ddp(setting: Setting, model: nn.Module) -> Trained:
    from torch.nn.parallel import DistributedDataParallel

    replicated = DistributedDataParallel(model, process_group=setting.mesh.get_group())
    context: Any = nullcontext
    if setting.dtype is not None:
        context = partial(torch.autocast, setting.device.type, setting.dtype)
    return Trained(replicated, replicated, _adamw(replicated), context)


def _always(size: float, index: int) -> float:
    return size


def _simple_fsdp(setting: Setting, model: nn.Module) -> Trained:
    largest = max(sum(p.nbytes for p in block.parameters()) for _, block in setting.blocks(model))
    shard_simply(model, setting.mesh, setting.dtype)
    # Merged up to the size of a unit, which is what the units of the others are.
    size = largest / 2**20 * (1 if setting.dtype is None else 0.5)
    buckets = {
        "bucket_all_gathers_fx": "all",
        "bucket_all_gathers_fx_bucket_size_determinator": partial(_always, size),
        "bucket_reduce_scatters_fx": "all",
        "bucket_reduce_scatters_fx_bucket_size_determinator": partial(_always, size),
    }
    call = torch.compile(model, fullgraph=True, options=buckets)
    return Trained(call, model, _adamw(model))


# -- DeepSpeed -------------------------------------------------------------------------------------


@dataclass
class _Engine(Trained):
    """A model whose backward and update are its engine's."""

    def step(self, batch: Batch, before_optimizer: Callable[[], None] | None = None) -> Tensor:
        """A whole training step; the loss."""
        loss = loss_of(self.call(**batch))
        self.call.backward(loss)  # type: ignore[attr-defined]
        if before_optimizer is not None:
            before_optimizer()
        self.call.step()  # type: ignore[attr-defined]
        return loss.detach()


def _deepspeed(setting: Setting, model: nn.Module, deep_compile: bool) -> Trained:
    import deepspeed

    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": next(iter(setting.batch.values())).shape[0],
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": setting.dtype is torch.bfloat16},
        "zero_allow_untested_optimizer": True,
    }
    if deep_compile:
        config["compile"] = {"deepcompile": True}
    engine, optimizer, *_ = deepspeed.initialize(
        model=model, optimizer=_adamw(model), config=config, dist_init_required=False
    )
    if deep_compile:
        engine.compile()
    return _Engine(engine, engine, optimizer)


def _no_deepspeed(setting: Setting) -> str:
    missing = []
    if importlib.util.find_spec("deepspeed") is None:
        missing.append("the package deepspeed is not installed")
    if setting.device.type != "cuda":
        missing.append("it runs on GPUs only")
    return " and ".join(missing)


OURS, OURS_COMPILED, OURS_OVERLAP = "graphshard", "graphshard inductor", "graphshard overlap"
FSDP2, FSDP2_BLOCKS, FSDP2_WHOLE = "FSDP2", "FSDP2 compile blocks", "FSDP2 compile whole"

SYSTEMS = (
    System(OURS, graphshard_step),
    System(FSDP2, _fully_shard),
    System(OURS_OVERLAP, _overlap),
    System("FSDP1", _fsdp1),
    System("DDP", _ddp, note="whole parameters and gradients on every rank; bf16 by autocast"),
    System(
        OURS_COMPILED,
        partial(graphshard_step, backend="inductor"),
        compiled=True,
    ),
    System(FSDP2_BLOCKS, partial(_fully_shard, compiled="blocks"), compiled=True),
    System(FSDP2_WHOLE, partial(_fully_shard, compiled="whole"), compiled=True),
    System("SimpleFSDP", _simple_fsdp, compiled=True),
    System(
        "DeepSpeed ZeRO-3",
        partial(_deepspeed, deep_compile=False),
        why_not=_no_deepspeed,
    ),
    System(
        "DeepSpeed DeepCompile",
        partial(_deepspeed, deep_compile=True),
        compiled=True,
        why_not=_no_deepspeed,
    ),
)

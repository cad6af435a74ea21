"""PyTorch Lightning: `Trainer(strategy=GraphShardStrategy(policy))`.

Needs the extra `lightning`. Lightning starts the ranks, feeds them and steps the optimizers; the
modules a LightningModule holds are compiled in its place, so `training_step` calls sharded modules.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphshard.api import compile as compile_module
from graphshard.errors import CheckpointError, PlanError, PolicyError
from graphshard.module.sharded_module import ShardedModule
from graphshard.policy.base import Policy
from graphshard.state.any_module import (
    full_optimizer_state,
    full_state,
    load_full_optimizer_state,
    load_full_state,
    load_sharded,
    save_sharded,
)

try:
    import lightning.pytorch as pl
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError(
        "graphshard.lightning needs PyTorch Lightning; install graphshard[lightning]"
    ) from error


_REST = "rest.pt"  # of a sharded checkpoint: everything but parameters and optimizer states


class GraphShardStrategy(DDPStrategy):
    """Trains a LightningModule whose modules are sharded by graphshard.

    Every child module of the LightningModule that has parameters is compiled under `policy` and
    takes the child's place, before `configure_optimizers` runs. Precision, accumulation, gradient
    clipping, logging and callbacks are Lightning's own; `Trainer(precision="bf16-mixed")` works by
    autocast, `policy.mixed_precision` by graphshard.

    Args:
        policy: which parameters are gathered together, and when.
        modules: the attributes to compile, such as ("generator", "critic"). None: every child with
            parameters.
        sharded_checkpoint: write checkpoints as a folder with every rank's own part, rather than as
            one file with everything, which rank 0 writes. Either can be loaded on any number of
            ranks.
        compile_options: passed on to `graphshard.compile` (`backend`, `passes`, `check`, `mesh`).
        **kwargs: of Lightning's own `DDPStrategy` (`process_group_backend`, `timeout`,
            `start_method`).

    Raises:
        PolicyError: `policy` is none, or `modules` names something that is no child module.
        PlanError: a child cannot be compiled, or parameters lie outside of all children.
    """

    strategy_name = "graphshard"

    def __init__(
        self,
        policy: Policy,
        *,
        modules: Sequence[str] | None = None,
        sharded_checkpoint: bool = False,
        compile_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if not isinstance(policy, Policy):
            raise PolicyError(
                f"GraphShardStrategy takes a policy, such as BlockPolicy({{Block}}); got {policy!r}"
            )
        self.policy = policy
        self._modules = modules
        self._sharded_checkpoint = sharded_checkpoint
        self._compile_options = dict(compile_options or {})

    # -- setting up ------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Compile the modules, then let Lightning make the optimizers over their shards."""
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        assert module is not None
        self._shard(module)
        self.model = module
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _shard(self, module: pl.LightningModule) -> None:
        names = self._names(module)
        for name in names:
            child = getattr(module, name)
            if isinstance(child, ShardedModule):
                continue
            if isinstance(child, nn.ModuleList | nn.ModuleDict):
                raise PlanError(
                    f"{name} is a {type(child).__name__}, which never runs itself; put it into a "
                    "module with a forward, or shard other modules by GraphShardStrategy(modules=)"
                )
            where: dict[str, Any] = (
                {} if "mesh" in self._compile_options else {"device": self.root_device}
            )
            setattr(
                module, name, compile_module(child, self.policy, **where, **self._compile_options)
            )
        inside = tuple(f"{name}." for name in names)
        outside = [name for name, _ in module.named_parameters() if not name.startswith(inside)]
        if outside:
            raise PlanError(
                f"parameter {outside[0]!r} is in none of the sharded modules {list(names)}, so "
                "nobody would average its gradients; put it into a child module, or name the "
                "module it is in"
            )
        for name, other in module.named_children():
            if name not in names:
                other.to(self.root_device)

    def _names(self, module: nn.Module) -> list[str]:
        children = dict(module.named_children())
        if self._modules is None:
            return [
                name for name, child in children.items() if any(True for _ in child.parameters())
            ]
        for name in self._modules:
            if name not in children:
                raise PolicyError(
                    f"modules names {name!r}, which is no child module of "
                    f"{type(module).__name__}; it has {sorted(children)}"
                )
        return list(self._modules)

    def configure_ddp(self) -> None:
        """Nothing: gradients are averaged by the programs."""

    def model_to_device(self) -> None:
        """Nothing: shards are made on the device."""

    def teardown(self) -> None:
        """Leave the shards where they are: another loop may follow on the same module."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints -----------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A checkpoint is loaded into the shards, so they have to be there."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """Optimizer states are loaded by `load_checkpoint`."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The state dict to save: full on rank 0, or every rank's DTensors."""
        assert self.lightning_module is not None
        if self._sharded_checkpoint:
            return self.lightning_module.state_dict()
        return full_state(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """The optimizer's state by parameter name: full on rank 0; a sharded one is saved apart."""
        if self._sharded_checkpoint:
            return {}
        assert self.lightning_module is not None
        return full_optimizer_state(self.lightning_module, _plain(optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write one file on rank 0, or a folder with a part of every rank."""
        path = Path(self.broadcast(filepath))
        if not self._sharded_checkpoint:
            if self.is_global_zero and path.is_dir():
                shutil.rmtree(path)
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        assert self.lightning_module is not None
        checkpoint.pop("state_dict", None)
        checkpoint.pop("optimizer_states", None)
        save_sharded(path, self.lightning_module, list(map(_plain, self.optimizers)))
        if self.is_global_zero:
            torch.save(checkpoint, path / _REST)
        self.barrier()

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load either kind into the shards and the optimizers.

        Raises:
            CheckpointError: there is no such checkpoint, or it is of another model.
        """
        path = Path(self.broadcast(checkpoint_path))
        assert self.lightning_module is not None
        module, optimizers = self.lightning_module, list(map(_plain, self.optimizers))
        if path.is_dir():
            load_sharded(path, module, optimizers)
            return torch.load(path / _REST, map_location="cpu", weights_only=bool(weights_only))
        if not path.is_file():
            raise CheckpointError(f"there is no checkpoint {path}")
        checkpoint: dict[str, Any] = torch.load(
            path, map_location="cpu", mmap=True, weights_only=bool(weights_only)
        )
        load_full_state(module, checkpoint["state_dict"], strict=module.strict_loading)
        for optimizer, state in zip(
            optimizers, checkpoint.get("optimizer_states", ()), strict=False
        ):
            load_full_optimizer_state(module, optimizer, state)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Nothing: `load_checkpoint` did it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Nothing: `load_checkpoint` did it."""

    # -- stepping --------------------------------------------------------------------------------

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Nothing has to be prepared."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Nothing is left to do."""


def _plain(optimizer: Any) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer

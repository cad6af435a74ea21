"""PyTorch Lightning: `Trainer(strategy=GraphShardStrategy(policy))`.

Needs the extra `lightning`. Lightning starts the ranks, feeds them and steps the optimizers. The
child modules of the LightningModule are compiled, so `training_step` calls sharded modules.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from graphshard.api import compile as compile_module
from graphshard.errors import CheckpointError, PlanError, PolicyError
from graphshard.module.sharded_module import ShardedModule
from graphshard.plain_data import shortened
from graphshard.planning.planner import require_policy
from graphshard.policy.base import Policy
from graphshard.state.any_module import (
    full_optimizer_state,
    full_state,
    load_full_optimizer_state,
    load_full_state,
    load_sharded,
    save_sharded,
)
from graphshard.state.archive import ForeignError, load_file

try:
    import lightning.pytorch as pl
    from lightning.pytorch.core.optimizer import LightningOptimizer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.trainer.states import TrainerFn
except ImportError as error:
    raise ImportError(
        "graphshard.lightning needs PyTorch Lightning; install graphshard[lightning]"
    ) from error


_REST = "rest.pt"  # the part of a sharded checkpoint without parameters and optimizer states


class GraphShardStrategy(DDPStrategy):
    """Train a LightningModule with child modules sharded by graphshard.

    Every child module with parameters is compiled under `policy` and replaced by its sharded
    module before `configure_optimizers` runs. Precision, accumulation, gradient clipping, logging
    and callbacks remain Lightning's: `Trainer(precision="bf16-mixed")` uses autocast, "bf16-true"
    makes parameters of that dtype, and `policy.mixed_precision` is graphshard's casts. Every rank
    takes rank 0's weights, as under DDP.

    Args:
        policy: chooses the units and their options.
        modules: the attributes to compile, such as ("generator", "critic"). None: every child with
            parameters.
        sharded_checkpoint: write a checkpoint as a folder with every rank's shards, instead of one
            full file from rank 0. Both can be loaded on any number of ranks.
        trust: unpickle whatever a checkpoint to load holds, which may run code of its author.
            Otherwise tensors, plain data and the classes of `torch.serialization.add_safe_globals`
            are loaded. (Lightning does not hand the `weights_only` of `fit` to this strategy.)
        compile_options: options of `graphshard.compile` (`backend`, `passes`, `check`, `mesh`).
        **kwargs: options of Lightning's `DDPStrategy` (`process_group_backend`, `timeout`,
            `start_method`).

    Raises:
        PolicyError: `policy` is no policy, or `modules` names something that is no child module.
        PlanError: a child cannot be compiled, or parameters are outside all children.
    """

    strategy_name = "graphshard"

    def __init__(
        self,
        policy: Policy,
        *,
        modules: Sequence[str] | None = None,
        sharded_checkpoint: bool = False,
        trust: bool = False,
        compile_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        require_policy(policy)
        self.policy = policy
        self._modules = modules
        self._sharded_checkpoint = sharded_checkpoint
        self._trust = trust
        self._compile_options = dict(compile_options or {})

    # -- setting up ------------------------------------------------------------------------------

    def setup(self, trainer: Any) -> None:
        """Compile the modules, then let Lightning make the optimizers of their shards."""
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
            options = dict(self._compile_options)
            if "mesh" not in options:
                options.setdefault("device", self.root_device)
            policy = replace(self.policy, sync_module_states=True)  # as Lightning's DDP does
            child = self.precision_plugin.convert_module(child)
            setattr(module, name, compile_module(child, policy, **options))
        inside = tuple(f"{name}." for name in names)
        outside = [name for name, _ in module.named_parameters() if not name.startswith(inside)]
        if outside:
            raise PlanError(
                f"parameter {outside[0]!r} is in none of the sharded modules {list(names)}, so "
                "its gradients would not be averaged; put it into a child module, or name the "
                "module it is in"
            )
        for name, other in module.named_children():
            if name not in names:
                self.precision_plugin.convert_module(other).to(self.root_device)

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
        """Do nothing: the programs average gradients."""

    def model_to_device(self) -> None:
        """Do nothing: shards are made on the device."""

    def teardown(self) -> None:
        """Tear down all but the shards, since another loop may use the same module."""
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # -- checkpoints -----------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """True: a checkpoint is loaded into shards, which `setup` makes."""
        return True

    @property
    def lightning_restore_optimizer(self) -> bool:
        """False: `load_checkpoint` loads optimizer states."""
        return False

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the state dict to save: full on rank 0, or every rank's DTensors."""
        assert self.lightning_module is not None
        if self._sharded_checkpoint:
            return self.lightning_module.state_dict()
        return full_state(self.lightning_module)

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the full optimizer state by parameter name on rank 0; {} if saved sharded."""
        if self._sharded_checkpoint:
            return {}
        assert self.lightning_module is not None
        return full_optimizer_state(self.lightning_module, _unwrapped(optimizer))

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write one full file on rank 0, or a folder with every rank's shards."""
        path = Path(self.broadcast(filepath))
        if not self._sharded_checkpoint:
            if self.is_global_zero and path.is_dir():
                shutil.rmtree(path)
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        assert self.lightning_module is not None
        checkpoint.pop("state_dict", None)
        checkpoint.pop("optimizer_states", None)
        save_sharded(path, self.lightning_module, list(map(_unwrapped, self.optimizers)))
        if self.is_global_zero:
            torch.save(checkpoint, path / _REST)
        self.barrier()

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load a full or sharded checkpoint into the shards and the optimizers.

        Args:
            checkpoint_path: the file or folder.
            weights_only: False is as `trust=True` in the strategy; True, or None, leaves it to
                `trust`.

        Returns:
            The file's contents, or the part of the folder that is neither model nor optimizer.

        Raises:
            CheckpointError: there is no such checkpoint, it is damaged or of another model, or
                holds what only `trust` allows.
        """
        path = Path(self.broadcast(checkpoint_path))
        assert self.lightning_module is not None
        module, optimizers = self.lightning_module, list(map(_unwrapped, self.optimizers))
        trust = self._trust or weights_only is False
        if path.is_dir():
            checkpoint = read_file(path / _REST, trust=trust)
            load_sharded(path, module, optimizers, trust=trust)
            return checkpoint
        if not path.is_file():
            raise CheckpointError(f"there is no checkpoint {path}")
        checkpoint = read_file(path, trust=trust)
        state, states = checkpoint.get("state_dict"), checkpoint.get("optimizer_states", ())
        if not isinstance(state, Mapping) or not isinstance(states, list | tuple):
            raise CheckpointError(f"{path} is no checkpoint of Lightning: it has no state_dict")
        load_full_state(module, state, strict=module.strict_loading)
        for optimizer, optimizer_state in zip(optimizers, states, strict=False):
            load_full_optimizer_state(module, optimizer, optimizer_state)
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Do nothing: `load_checkpoint` has loaded it."""

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Do nothing: `load_checkpoint` has loaded it."""

    # -- stepping --------------------------------------------------------------------------------

    def pre_backward(self, closure_loss: Tensor) -> None:
        """Do nothing."""

    def post_backward(self, closure_loss: Tensor) -> None:
        """Do nothing."""


def read_file(file: Path, *, trust: bool) -> dict[str, Any]:
    """Return the contents of a file of `torch.save`; tensors are mapped, not read.

    Args:
        file: its path.
        trust: unpickle whatever it holds, which may run code of its author.

    Raises:
        CheckpointError: it is damaged, holds no dict, or holds what only `trust` allows.
    """
    try:
        if trust:
            contents = torch.load(file, map_location="cpu", mmap=True, weights_only=False)
        else:
            contents = load_file(file)
    except ForeignError as error:
        raise CheckpointError(
            f"{file} holds more than tensors and plain data, which may run code; pass trust=True "
            f"to GraphShardStrategy if you trust whoever wrote it ({shortened(str(error))})"
        ) from error
    except Exception as error:  # whatever reading damaged bytes raises
        reason = shortened(f"{type(error).__name__}: {error}")
        raise CheckpointError(f"{file} is damaged ({reason})") from error
    if not isinstance(contents, dict):
        raise CheckpointError(f"{file} is no checkpoint of Lightning: it holds no dict")
    return contents


def _unwrapped(optimizer: Any) -> Optimizer:
    return optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer

"""transformers' `Trainer` with a sharded model: a mixin in front of any Trainer class.

    class Sharded(graphshard.hf.ShardedTrainer, trl.SFTTrainer): ...

The Trainer builds its model as ever (adapters, gradient checkpointing, a checkpoint's weights). It
is compiled when the optimizer is made, or before an evaluation that comes first. From then on
`trainer.model` is the sharded module, an instance of the model's class.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.api import compile as compile_module
from graphshard.errors import CheckpointError, PolicyError
from graphshard.hf.accelerators import (
    asks_for_fsdp,
    policy_of_accelerator,
    shard_models_of,
    with_first_weights,
)
from graphshard.module.sharded_module import ShardedModule
from graphshard.policy.base import Policy
from graphshard.policy.units import BlockPolicy
from graphshard.state.any_module import state_by_name

try:
    from transformers import Trainer
    from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME, TRAINING_ARGS_NAME
except ImportError as error:
    raise ImportError(
        "graphshard.hf.ShardedTrainer needs transformers; install graphshard[hf]"
    ) from error

STATE = "graphshard"
"""The folder in `checkpoint-N` with the shards of parameters and of the optimizer's states."""


class ShardedTrainer(Trainer):
    """Put before a Trainer class, it trains the model sharded.

    Logging, accumulation, clipping, evaluation, `load_best_model_at_end`, saving and resuming work
    as documented by transformers. `checkpoint-N` has the weights as `save_pretrained` writes them,
    and `graphshard/`, which any number of ranks resumes from. bf16 and fp16 of the arguments are
    autocast, as with DDP, unless the policy has `mixed_precision`. Every rank takes rank 0's
    weights and buffers, as with DDP.

    Args:
        args: of the Trainer class. The model may be a plain or a sharded one.
        policy: None: from the arguments' `fsdp` settings or Accelerate's configuration where there
            are any, else `BlockPolicy()`.
        compile_options: of `graphshard.compile`, such as {"backend": "inductor"}.
        kwargs: of the Trainer class.

    Raises:
        PolicyError: the arguments ask for what does not go together with sharding.
    """

    model: Any
    """The plain model, then the sharded module."""

    def __init__(
        self,
        *args: Any,
        policy: Policy | None = None,
        compile_options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._sharding = (policy, dict(compile_options or {}))
        for model in (*args[:1], kwargs.get("model")):
            if isinstance(model, ShardedModule):
                if policy is not None or compile_options:
                    raise PolicyError(
                        "ShardedTrainer: the model is compiled already, so that policy= and "
                        "compile_options= would have no effect; pass the plain model, or neither"
                    )
                vars(model)["_graphshard_in_trainer"] = True
        super().__init__(*args, **kwargs)

    # -- making it -----------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator, which takes a sharded module as it is."""
        super().create_accelerator_and_postprocess()
        policy, options = self._sharding
        if policy is None and not self.is_fsdp_enabled and not asks_for_fsdp():
            policy = BlockPolicy()
        if self.is_deepspeed_enabled:
            raise PolicyError("ShardedTrainer: the arguments ask for DeepSpeed; leave it out")
        if self.args.torch_compile:
            raise PolicyError(
                "ShardedTrainer: torch_compile=True cannot compile a sharded module; pass "
                'compile_options={"backend": "inductor"} in its place'
            )
        if policy is None:
            policy = policy_of_accelerator(self.accelerator)
        shard_models_of(self.accelerator, policy, **options)
        self._sharding = (policy, options)
        self.is_fsdp_enabled = False

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        if model is not self.model:  # whose shards go there when it is compiled
            super()._move_model_to_device(model, device)

    def _shard(self) -> None:
        if isinstance(self.model, ShardedModule):
            return
        policy, options = self._sharding
        assert policy is not None
        sharded = compile_module(
            self.model,
            with_first_weights(policy),
            **{"device": self.accelerator.device, **options},
        )
        self.model = self.model_wrapped = self.callback_handler.model = sharded

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """Compile the model, and make the optimizer of its shards.

        Raises:
            PolicyError: an optimizer was passed, of the parameters before they were sharded, or its
                class cannot step on shards.
        """
        if self.optimizer is not None and not isinstance(self.model, ShardedModule):
            raise PolicyError(
                "ShardedTrainer: optimizers=(...) holds an optimizer of the model's parameters "
                "before they are sharded; pass optimizer_cls_and_kwargs=(class, options)"
            )
        self._shard()
        optimizer = super().create_optimizer(*args, **kwargs)
        made = _torch_optimizer(optimizer)
        on_shards = any(isinstance(p, DTensor) for g in made.param_groups for p in g["params"])
        if type(made).__name__ in _OF_WHOLE_PARAMETERS and on_shards:
            raise PolicyError(
                f"ShardedTrainer: {type(made).__name__} (of optim= or optimizer_cls_and_kwargs=) "
                "computes with whole parameters and cannot step on shards; use one that updates "
                'element by element, such as optim="adamw_torch" or, for less memory, "sgd"'
            )
        return optimizer

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> Any:
        if model is not self.model and model is not self.model_wrapped:
            return super()._wrap_model(model, training, dataloader)
        self._shard()
        return self.model

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """Train; see `transformers.Trainer.train`."""
        with self._checkpointing_enabled_once():
            return super().train(*args, **kwargs)

    @contextmanager
    def _checkpointing_enabled_once(self) -> Iterator[None]:
        """A model that is compiled recomputes already what `gradient_checkpointing` asks for."""
        name = next(n for n in _CHECKPOINTING if hasattr(self.args, n))
        before = getattr(self.args, name)
        if isinstance(self.model, ShardedModule):
            setattr(self.args, name, False)
        try:
            yield
        finally:
            setattr(self.args, name, before)

    # -- steps ---------------------------------------------------------------------------------

    def _clip_grad_norm(self, model: nn.Module) -> Tensor:
        return self._norm(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return self._norm(float("inf")) if grad_norm is None else grad_norm

    def _norm(self, bound: float) -> Tensor:
        self.accelerator.unscale_gradients()
        return self.model.clip_grad_norm_(bound)

    # -- checkpoints ---------------------------------------------------------------------------

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        """Write the weights with all ranks, and the rest with the one that saves."""
        folder: Any = self.args.output_dir if output_dir is None else output_dir
        self._shard()
        self.model.save_pretrained(folder)
        if not self.args.should_save:
            return
        processor: Any = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if processor is not None:
            processor.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, TRAINING_ARGS_NAME))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.model.save_checkpoint(
            Path(output_dir, STATE), _torch_optimizer(self.optimizer), self.lr_scheduler
        )

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Load the weights, unless they come with the optimizer's states."""
        if Path(resume_from_checkpoint, STATE).is_dir():
            return
        if isinstance(self.model, ShardedModule):
            self._load_weights(resume_from_checkpoint)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load both from what `_save_optimizer_and_scheduler` wrote, or a Trainer without sharding.

        A checkpoint of weights alone (`save_only_model`) has neither.
        """
        if checkpoint is None:
            return
        optimizer, folder = _torch_optimizer(self.optimizer), Path(checkpoint)
        scheduler: Any = self.lr_scheduler
        if (folder / STATE).is_dir():
            self.model.load_checkpoint(folder / STATE, optimizer, scheduler)
            return
        agreement = self.model._graphshard.bindings.agreement
        with agreement.call(f"ShardedTrainer.train(resume_from_checkpoint={checkpoint!r})"):
            with agreement.part() as part:
                found = _plain_states(folder)
                state = None
                if found is not None:
                    state = state_by_name(
                        found[0],
                        optimizer,
                        self.model,
                        str(folder / OPTIMIZER_NAME),
                        ", or remove it to start from the weights alone",
                    )
                part.same += ["without optimizer.pt"] if found is None else []
            if found is None:
                return
            self.model.load_optimizer_state_dict(optimizer, state)
            with agreement.part():
                scheduler.load_state_dict(found[1])

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is None or not Path(best).is_dir():
            raise CheckpointError(
                f"the best checkpoint {best} is not there on rank {self.args.process_index}; all "
                "ranks need one folder that they share"
            )
        self._load_weights(best)

    def _load_weights(self, folder: str) -> None:
        """Take the weights that `_save` wrote: of a model of peft its adapters."""
        if "peft" in sys.modules:
            from graphshard.hf import adapters

            if adapters.has_adapters(self.model):
                adapters.load_adapters(self.model, folder)
                return
        self.model.load_safetensors(folder)


def _plain_states(folder: Path) -> tuple[Any, Any] | None:
    """The optimizer's and the scheduler's state that a plain Trainer wrote; None without both."""
    names = [each.name for each in folder.iterdir()] if folder.is_dir() else []
    for name in names:
        if name == "optimizer.bin" or name.startswith(("optimizer_", "global_step")):
            raise CheckpointError(
                f"{folder / name} holds optimizer states of FSDP or DeepSpeed, which are not "
                "resumed from; remove it to start from the weights alone"
            )
    here = [name for name in (OPTIMIZER_NAME, SCHEDULER_NAME) if name in names]
    if not here:
        return None
    if len(here) == 1:
        raise CheckpointError(
            f"{folder} has {here[0]} and lacks the other one of {OPTIMIZER_NAME} and "
            f"{SCHEDULER_NAME}; resume from a whole checkpoint, or remove it to start from the "
            "weights alone"
        )
    try:
        optimizer = torch.load(
            folder / OPTIMIZER_NAME, map_location="cpu", weights_only=True, mmap=True
        )
        with warnings.catch_warnings():  # that the optimizer's state is to be loaded, too
            warnings.simplefilter("ignore")
            scheduler = torch.load(folder / SCHEDULER_NAME, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"the states of optimizer and scheduler in {folder} cannot be read: {error}"
        ) from error
    return optimizer, scheduler


_CHECKPOINTING = ("activation_checkpointing", "gradient_checkpointing")
"""The argument, by its new and its old name."""


_OF_WHOLE_PARAMETERS = ("Adafactor", "LBFGS")
"""Classes of torch and transformers that raise in their first step on DTensors."""


def _torch_optimizer(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer in an `AcceleratedOptimizer`."""
    return getattr(optimizer, "optimizer", optimizer)

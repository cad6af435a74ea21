"""Accelerators and Trainers of transformers on ranks that a test has started."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import models
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import LlamaForCausalLM, Trainer, TrainingArguments

from graphshard.hf import ShardedTrainer


def accelerator(**options: Any) -> Accelerator:
    """A new accelerator, whose class otherwise keeps the settings of the first one."""
    os.environ |= {  # of a launcher; the process group is there already
        "RANK": str(dist.get_rank()),
        "LOCAL_RANK": str(dist.get_rank()),
        "WORLD_SIZE": str(dist.get_world_size()),
        "LOCAL_WORLD_SIZE": str(dist.get_world_size()),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "29500",
    }
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    return Accelerator(cpu=True, **options)


class Sharded(ShardedTrainer, Trainer):
    pass


def llama(dropout: float = 0.1) -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    return models.llama(
        **sizes, max_position_embeddings=64, attention_dropout=dropout, use_cache=False
    )


def texts() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(128, (64, 16), generator=generator)
    return [{"input_ids": ids, "labels": ids} for ids in drawn]


def arguments(folder: Path | str, **changes: Any) -> TrainingArguments:
    options: dict[str, Any] = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 6,
        "logging_steps": 1,
        "save_steps": 3,
        "learning_rate": 1e-3,
        "max_grad_norm": 0.5,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }
    return TrainingArguments(str(folder), **options | changes)

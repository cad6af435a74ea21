"""TRL's trainers with a sharded model: losses and norms of their runs by DDP."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from datasets import Dataset
from peft import LoraConfig
from ranks import on_ranks
from state_checks import shared_folder
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from trainers import accelerator, llama
from transformers import PreTrainedTokenizerFast, Trainer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

from graphshard.hf import ShardedTrainer
from graphshard.module.sharded_module import ShardedModule
from graphshard.program.program import RECOMPUTED

WORDS = [f"w{i}" for i in range(120)]
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")


class ShardedSFT(ShardedTrainer, SFTTrainer):
    pass


class ShardedDPO(ShardedTrainer, DPOTrainer):
    pass


def tokenizer() -> PreTrainedTokenizerFast:
    marks = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {word: index for index, word in enumerate([*marks.values(), *WORDS])}
    words: Any = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, **marks)


def text(drawn: random.Random, length: int) -> str:
    return " ".join(drawn.choices(WORDS, k=length))


def arguments(folder: Path) -> dict[str, Any]:
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "max_steps": 3,
        "max_length": 16,
        "logging_steps": 1,
        "save_steps": 3,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": [],
        "use_cpu": True,
        "disable_tqdm": True,
        "seed": 0,
    }


def fine_tuned(kind: type[Trainer], folder: Path) -> Trainer:
    """LoRA on texts of every length, packed into sequences of 16 tokens; evaluated, too."""
    drawn = random.Random(0)
    texts = Dataset.from_list([{"text": text(drawn, drawn.randint(3, 12))} for _ in range(64)])
    evaluated = {"eval_strategy": "steps", "eval_steps": 3, "eval_packing": True}
    args = SFTConfig(packing=True, packing_strategy="wrapped", **arguments(folder), **evaluated)
    trainer: Any = kind
    return trainer(
        llama(0.0),
        args=args,
        train_dataset=texts,
        eval_dataset=texts.select(range(32)),
        processing_class=tokenizer(),
        peft_config=LORA,
    )


def preferring(kind: type[Trainer], folder: Path, **changes: Any) -> Trainer:
    """LoRA by preferences, against the model with its adapters disabled."""
    drawn = random.Random(0)
    pairs = [
        {"prompt": text(drawn, 5), "chosen": text(drawn, 9), "rejected": text(drawn, 9)}
        for _ in range(32)
    ]
    args = DPOConfig(pad_to_multiple_of=16, **arguments(folder) | changes)
    trainer: Any = kind
    return trainer(
        llama(0.0),
        args=args,
        train_dataset=Dataset.from_list(pairs),
        processing_class=tokenizer(),
        peft_config=LORA,
    )


def logged(trainer: Trainer) -> list[dict[str, float]]:
    """What each step logged, but for times."""
    return [
        {key: value for key, value in entry.items() if not key.endswith(("time", "_per_second"))}
        for entry in trainer.state.log_history
        if "train_runtime" not in entry
    ]


def equal_those_of_ddp(
    make: Callable[[type[Trainer], Path], Trainer], theirs: type[Trainer], ours: type[Trainer]
) -> Any:
    trained = []
    folder = shared_folder()
    for kind in (theirs, ours):
        accelerator()  # forgets the settings of the last Trainer
        trained.append(make(kind, folder / kind.__name__))
        trained[-1].train()
    assert isinstance(trained[1].model, ShardedModule)
    expected, found = map(logged, trained)
    assert len(expected) >= 3
    for theirs_of_step, ours_of_step in zip(expected, found, strict=True):
        assert ours_of_step == pytest.approx(theirs_of_step, rel=1e-6, abs=1e-7)
    dist.barrier()
    return trained[1]


def supervised(rank: int) -> None:
    equal_those_of_ddp(fine_tuned, SFTTrainer, ShardedSFT)


def preferences_by_default(rank: int) -> None:
    """With gradient checkpointing, which TRL switches off for the reference and on again."""
    make = partial(preferring, gradient_checkpointing=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hooks on modules are captured")
        sharded = equal_those_of_ddp(make, DPOTrainer, ShardedDPO)
    assert sharded.model.is_gradient_checkpointing
    assert any(RECOMPUTED in node.meta for each in sharded.model.programs for node in each.nodes())
    kinds = {(program.grad, len([*program.nodes()])) for program in sharded.model.programs}
    assert len(sharded.model.programs) == len(kinds)  # none is captured again


test_on_two_ranks = pytest.mark.slow(on_ranks([supervised, preferences_by_default], 2, timeout=900))

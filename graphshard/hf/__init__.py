"""Hugging Face: sharded modules in Accelerate and in transformers' Trainer.

Needs the extra `hf`. `Accelerator.prepare` takes a sharded module as it is; `shard_models_of` makes
it compile plain models; `ShardedTrainer`, put before a Trainer class, does so for that Trainer.
"""

from graphshard.hf.accelerators import policy_of_accelerator, shard_models_of

__all__ = ["ShardedTrainer", "load_adapters", "policy_of_accelerator", "shard_models_of"]


def __getattr__(name: str) -> object:
    if name == "ShardedTrainer":  # imports transformers
        from graphshard.hf.trainer import ShardedTrainer

        return ShardedTrainer
    if name == "load_adapters":  # imports peft
        from graphshard.hf.adapters import load_adapters

        return load_adapters
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

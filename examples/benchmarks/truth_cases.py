"""The steps whose memory is checked: models x strategies x recompute x offload, and more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

import graphshard
from examples.benchmarks.benchmark_models import WEIGHED

STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "full": {},
    "full+root": {"reshard_root": True},
    "grad_op": {"strategy": "SHARD_GRAD_OP"},
    "zero1": {"strategy": "SHARD_OPTIMIZER"},
    "no_shard": {"strategy": "NO_SHARD"},
}
OF_FOUR: Mapping[str, Mapping[str, Any]] = {
    "hybrid": {"strategy": "HYBRID_SHARD"},
    "hybrid_zero2": {"strategy": "HYBRID_SHARD_ZERO2"},
    "parts": {"reshard_after_forward": 2},
}
RECOMPUTE: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "units": {"recompute": "units"},
    "classes": {"recompute": "classes"},  # the units' class names, filled in by model
    "selective": {"recompute": "selective"},
    "budget": {"recompute": "budget"},  # with a budget of nine tenths, filled in by model
}
OFFLOAD: Mapping[str, Mapping[str, Any]] = {
    "": {},
    "params": {"offload": ["params"]},
    "activations": {"offload": ["activations"]},
    "both": {"offload": ["params", "activations"]},
}
LOW = graphshard.MixedPrecision(torch.bfloat16)
LOW_FULL = graphshard.MixedPrecision(torch.bfloat16, reduce_dtype=torch.float32)


@dataclass(frozen=True)
class Case:
    """One kind of step.

    mode: "step"; "accumulate" (two micro-batches, one of them inside no_sync()); "eval" (forward
    alone, without gradients); "dynamic" (of any batch size; predicted for the one captured).
    """

    model: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    mode: str = "step"

    @property
    def hybrid(self) -> bool:
        """Whether it runs on a mesh of two dimensions."""
        return str(self.options.get("strategy", "")).startswith("HYBRID")


def every(ranks: int) -> Iterator[Case]:
    """All of them for a number of ranks, 2 or 4."""
    strategies = OF_FOUR if ranks == 4 else STRATEGIES
    for model in WEIGHED:
        for parts in product(strategies.items(), RECOMPUTE.items(), OFFLOAD.items()):
            options = {key: value for _, some in parts for key, value in some.items()}
            if options.get("recompute") == "budget" and "activations" in options.get("offload", ()):
                continue  # which a policy refuses
            yield Case(model, " ".join(name for name, _ in parts if name), options)
        for strategy, options in strategies.items():
            yield from _more(model, strategy, options)


def _more(model: str, strategy: str, options: Mapping[str, Any]) -> Iterator[Case]:
    yield Case(model, f"{strategy} bf16", {**options, "mixed_precision": LOW})
    yield Case(model, f"{strategy} bf16, fp32 reduce", {**options, "mixed_precision": LOW_FULL})
    for optimizer in ("adamw-fused", "sgd-momentum"):
        yield Case(model, f"{strategy} {optimizer}", options, optimizer)
    for mode in ("accumulate", "eval", "dynamic"):
        if model != "mixtral" or mode != "dynamic":  # whose sizes depend on its data
            yield Case(model, f"{strategy} {mode}", options, mode=mode)


def sample(ranks: int) -> list[Case]:
    """A few, in which every option and every model occurs."""
    if ranks == 4:
        return [Case("gpt", name, options) for name, options in OF_FOUR.items()]
    return [
        Case("gpt", "full"),
        Case("gpt", "full accumulate", mode="accumulate"),
        Case("gpt", "zero1", {"strategy": "SHARD_OPTIMIZER"}),
        Case("gpt", "full both", {"offload": ["params", "activations"]}),
        Case("llama", "grad_op units", {"strategy": "SHARD_GRAD_OP", "recompute": "units"}),
        Case("llama", "full eval", mode="eval"),
        Case("bert", "full selective", {"recompute": "selective"}, "sgd-momentum"),
        Case("t5", "full budget", {"recompute": "budget"}, "adamw-fused"),
        Case("regnet", "no_shard", {"strategy": "NO_SHARD"}),
        Case("mixtral", "full+root", {"reshard_root": True}),
        Case("lora", "full bf16", {"mixed_precision": LOW}),
    ]

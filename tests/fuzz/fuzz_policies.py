"""Policies of cases: how they are drawn, and how JSON's fields become a policy."""

from __future__ import annotations

from random import Random
from typing import Any

import torch
from fuzz_blocks import AGAIN, KINDS, Block
from torch import nn

import graphshard
from graphshard import MixedPrecision

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "SHARD_OPTIMIZER", "NO_SHARD")
HYBRID = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")

IGNORED = (r"blocks\.0", r"blocks\.0|.*\.bias", r"blocks\.0\..*|blocks\.0", r"blocks\.0|head")
"""Patterns that always match a module."""


def policy_of(fields: dict[str, Any]) -> graphshard.Policy:
    """The policy of a case's fields."""
    fields = {name: _value(name, value) for name, value in fields.items()}
    match fields.pop("kind"):
        case "block":
            return graphshard.BlockPolicy(Block, **fields)
        case "size":
            return graphshard.SizePolicy(**fields)
        case "lambda":
            least = fields.pop("least")
            return graphshard.LambdaPolicy(lambda module: _own(module) >= least, **fields)
        case "module":
            base = graphshard.BlockPolicy(Block) if fields.pop("based") else None
            return graphshard.ModulePolicy(base=base, **fields)
        case other:
            raise AssertionError(other)


def _own(module: nn.Module) -> int:
    """Elements of a module's own parameters."""
    return sum(param.numel() for param in module.parameters(recurse=False))


def _value(name: str, value: Any) -> Any:
    if name == "mixed_precision" and value is not None:
        return MixedPrecision(**dtypes_of(value))
    if name == "modules":
        return {key: {n: _value(n, v) for n, v in entry.items()} for key, entry in value.items()}
    if name == "recompute" and value not in (None, "units", "selective", "budget"):
        return [Block if each == "Block" else each for each in value]
    return tuple(value) if isinstance(value, list) else value


def dtypes_of(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a mixed precision with dtypes in place of their names."""
    return {k: getattr(torch, v) if k.endswith("dtype") and v else v for k, v in fields.items()}


def draw_policy(rng: Random, blocks: tuple[str, ...], *, mixed: bool) -> dict[str, Any]:
    """Fields that do not contradict each other, or hardly ever."""
    strategy = rng.choice((*STRATEGIES, *STRATEGIES, *HYBRID))
    fields = _draw_units(rng, blocks, strategy in HYBRID)
    if strategy != "FULL_SHARD" or rng.random() < 0.2:
        fields["strategy"] = strategy
    _draw_order(rng, fields, strategy)
    _draw_memory(rng, fields)
    if mixed:
        fields["mixed_precision"] = _draw_precision(rng)
    elif rng.random() < 0.1:
        fields["ignored"] = rng.choice(IGNORED)
    if strategy == "SHARD_OPTIMIZER":  # which computes in the parameters' own dtype
        fields.get("mixed_precision", {}).pop("param_dtype", None)
        if fields.get("offload") != "activations":
            fields.pop("offload", None)
    rare: tuple[tuple[str, Any, float], ...] = (
        ("cuda_graph", True, 0.05),
        ("sync_module_states", True, 0.1),
        ("check_finite", "warn", 0.1),  # a case may hold infinities of its own
        ("notes", ["drawn"], 0.05),
    )
    for name, value, share in rare:
        if rng.random() < share:
            fields[name] = value
    # `fully_shard`, the reference in mixed precision, gives None where this gives zeros.
    one_program = mixed or not fields.keys().isdisjoint({"schedule", "cuda_graph", "check_finite"})
    if rng.random() < 0.1 and not one_program:
        fields["gather_unused"] = True
    return fields


def _draw_order(rng: Random, fields: dict[str, Any], strategy: str) -> None:
    """When parameters are gathered and freed, and how gradients are reduced."""
    keeps = strategy not in ("FULL_SHARD", "HYBRID_SHARD")
    if rng.random() < 0.3:
        # One rank is a group of itself; two are the whole group.
        fields["reshard_after_forward"] = False if keeps else rng.choice([True, False, 1, 2])
    if rng.random() < 0.3:
        fields["schedule"] = "overlap"
        if rng.random() < 0.5:
            fields["hardware"] = rng.choice(["cpu-gloo", "h100-sxm"])
    else:
        if rng.random() < 0.3:
            fields["backward_prefetch"] = rng.choice([None, "post"])
        if rng.random() < 0.3:
            fields["forward_prefetch"] = rng.choice([1, 2, 3])
    if rng.random() < 0.4 and not keeps and fields.get("reshard_after_forward") is not False:
        fields["reshard_root"] = True
    if rng.random() < 0.5:
        fields["merge_below"] = rng.choice([0, 0, 100, 1000])


def _draw_units(rng: Random, blocks: tuple[str, ...], hybrid: bool) -> dict[str, Any]:
    kind = rng.choice(["block"] * 4 + ["size"] * 2 + ["lambda", "module"])
    if kind == "block":
        return {"kind": kind}
    if kind == "size":
        least = rng.choice([0, 1, 20, 50, 100, 1000])
        more = {"force_leaf": ()} if rng.random() < 0.2 else {}
        return {"kind": kind, "min_num_params": least, **more}
    if kind == "lambda":
        return {"kind": kind, "least": rng.choice([1, 10, 40])}
    modules: dict[str, Any] = {}
    for index, name in enumerate(blocks):
        if rng.random() < 0.6 and name != AGAIN:
            overrides: list[dict[str, Any]] = [
                {},
                {"reshard_after_forward": False},
                {"placement": "replicate"},
                {"placement": {"*weight": 1}},
            ]
            if not hybrid:  # whose mesh the others cannot use
                overrides += [{"strategy": "NO_SHARD"}, {"strategy": "SHARD_GRAD_OP"}]
            modules[f"blocks.{index}"] = rng.choice(overrides)
    return {"kind": kind, "modules": modules or {"blocks.0": {}}, "based": rng.random() < 0.5}


def _draw_memory(rng: Random, fields: dict[str, Any]) -> None:
    if rng.random() < 0.2:
        fields["offload"] = rng.choice(["params", "activations", ["params", "activations"]])
    if rng.random() < 0.3:
        recompute = rng.choice(["units", "selective", "budget", ["Block"], ["selective", "Block"]])
        if recompute == "budget" and fields.get("offload") in (None, "params"):
            fields["memory_budget"] = rng.choice([6_000, 12_000, 20_000, 60_000])
        if recompute != "budget" or "memory_budget" in fields:
            fields["recompute"] = recompute
    elif rng.random() < 0.1:
        fields["memory_budget"] = rng.choice([20_000, 60_000, 1 << 30])


def _draw_precision(rng: Random) -> dict[str, Any]:
    fields: dict[str, Any] = {"param_dtype": rng.choice(["bfloat16", "bfloat16", "float16"])}
    if rng.random() < 0.5:
        fields["reduce_dtype"] = rng.choice(["float32", "bfloat16"])
    if rng.random() < 0.2:
        del fields["param_dtype"]
        fields.setdefault("reduce_dtype", "bfloat16")
    if rng.random() < 0.2:
        fields["output_dtype"] = "float32"
    if rng.random() < 0.15:
        fields["cast_forward_inputs"] = False
    if rng.random() < 0.15:
        fields["buffer_dtype"] = "bfloat16"
    if rng.random() < 0.15 and "reduce_dtype" in fields:
        fields["keep_low_precision_grads"] = True
    return fields


MIXING = tuple(name for name, block in KINDS.items() if block.mixes)
"""Kinds that `fully_shard` computes in mixed precision by the same rules."""

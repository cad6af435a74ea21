"""The generator: a case from a seed."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

from fuzz_blocks import AGAIN, KINDS
from fuzz_case import Case
from fuzz_model import OUTPUTS, ROOTS
from fuzz_policies import HYBRID, MIXING, draw_policy
from fuzz_protocol import STEPS
from fuzz_sides import OPTIMIZERS

STARTS = ("real", "example", "meta")

COMPILES = ("batch_norm_view", "encoder_layer", "lstm", "lstm_two_ways", "gru", "rnn", "lstm_cell")
"""Kinds left out where Inductor compiles, since these take long; norms are back under autocast."""

NORMS = (
    "batch_norm",
    "batch_norm_view",
    "conv2d",
    "group_norm",
    "instance_norm",
    "tracked_instance_norm",
    "layer_norm",
    "norm_without_weights",
    "rms_norm",
    "weight_norm",
    "spectral_norm",
)
"""Kinds of which a case under autocast has one."""

AUTOCAST = 0.15
"""The share of autocast among cases without mixed precision."""


def draw(seed: int) -> Case:
    """The case of a seed."""
    case = _on_ranks(_draw(seed), seed)
    rng = Random(f"autocast {seed}")  # of its own, so that it changes no other case
    if case.mixed or rng.random() > AUTOCAST:
        return case
    blocks = (*case.blocks, rng.choice(NORMS))
    return replace(case, blocks=blocks, dtype="float32", autocast="bfloat16")


def _on_ranks(case: Case, seed: int) -> Case:
    """The case on three ranks for a fourth of the seeds, in runs, as processes are then started.

    On three, `fully_shard` adds up in another order, and mixed precision is compared with it.
    """
    rng = Random(f"ranks {seed}")
    case = replace(case, tight=rng.random() < 0.3, far=Random(f"far {seed}").random() < 0.4)
    if seed // 20 % 4 != 3 or case.mixed:
        return case
    mesh = tuple(3 if ranks == 2 else ranks for ranks in case.mesh)
    return replace(case, ranks=3, mesh=mesh, dim=rng.choice([case.dim, case.dim + 2]))


def _draw(seed: int) -> Case:
    rng = Random(seed)
    compiled = rng.random() < 1 / 3
    mixed = not compiled and rng.random() < 0.15
    names = MIXING if mixed else [n for n in KINDS if not (compiled and n in COMPILES)]
    blocks: list[str] = []
    for _ in range(rng.choice([1, 1, 2] if compiled else [1, 1, 2, 2, 3])):
        again = blocks and not mixed and rng.random() < 0.06
        blocks.append(AGAIN if again else rng.choice(names))
    if all(name in ("no_parameters", "all_frozen", AGAIN) for name in blocks):
        blocks.append("linear")  # something to train
    policy = draw_policy(rng, tuple(blocks), mixed=mixed)
    kept = policy.get("mixed_precision", {}).get("keep_low_precision_grads")
    dtype = "float32" if mixed or rng.random() < 0.15 else "float64"
    optimizers = [*OPTIMIZERS, "adamw_groups", "sgd_groups"]
    return Case(
        seed=seed,
        blocks=tuple(blocks),
        dim=rng.choice([4, 6, 8]),
        root="plain" if mixed and rng.random() < 0.5 else _root(rng, mixed=mixed),
        output=rng.choice(OUTPUTS),
        dtype=dtype,
        policy=policy,
        mesh=_mesh(rng, policy),
        start=rng.choice(STARTS[: 2 if "counter" in blocks else 3]),
        dynamic=not mixed and rng.random() < 0.08,
        check=rng.random() < 0.25,
        backend="inductor" if compiled else "eager",
        optimizer="sgd" if kept else _optimizer(rng, optimizers, mixed=mixed),
        on_dtensors=rng.random() < 0.2,
        steps=_steps(rng, 1 if compiled else 6, mixed=mixed, policy=policy),
    )


def _optimizer(rng: Random, names: list[str], *, mixed: bool) -> str:
    name = rng.choice(names)
    # Torch's fused kernel rounds the ends of a tensor otherwise, and shards of both sides differ.
    return "adamw" if mixed and name == "adamw_fused" else name


def _root(rng: Random, *, mixed: bool) -> str:
    roots = [root for root in ROOTS if not (mixed and root in ("tied", "norm"))]
    return rng.choice(roots)


def _mesh(rng: Random, policy: dict[str, Any]) -> tuple[int, ...]:
    if policy.get("strategy") in HYBRID:
        return rng.choice([(1, 2), (2, 1)])
    return (2,) if rng.random() < 0.2 else ()


def _steps(rng: Random, most: int, *, mixed: bool, policy: dict[str, Any]) -> tuple[str, ...]:
    """Up to `most` steps of any kind, which share captured programs, and one or two that train."""
    names = [name for name, step in STEPS.items() if step.mixes or not mixed]
    if policy.get("mixed_precision", {}).get("keep_low_precision_grads"):
        names.remove("accumulate")  # which adds in the low dtype, and the reference does not
    if policy.get("strategy") == "SHARD_OPTIMIZER":
        names = [name for name in names if STEPS[name].resident]
    drawn = [rng.choice(names) for _ in range(rng.randint(1, most))]
    if rng.random() < 0.5:
        drawn.insert(0, "train")  # so that optimizers have state
    return (*drawn, "train")

"""`graphshard tune`: its arguments and its search."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from graphshard.cli.machine import add_machine_options
from graphshard.cli.policy import fields_of, units_of
from graphshard.cost.memory import OPTIMIZERS
from graphshard.errors import PolicyError
from graphshard.hardware.hardware import preset_names
from graphshard.progress import Stages
from graphshard.tune.auto_policy import AutoPolicy
from graphshard.tune.request import AUTO, SEARCHED
from graphshard.tune.runs import RunRequest, Runs
from graphshard.tune.tuning import Tuning

_FIELDS = (
    "mixed_precision",
    "merge_below",
    "ignored",
    "cuda_graph",
    "check_finite",
    "sync_module_states",
    *SEARCHED,
)


def add_tune(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `graphshard tune` to `command`."""
    command.add_argument(
        "--hardware",
        default="h100-sxm",
        metavar="NAME|FILE",
        help=f"{', '.join(preset_names())}, or a file of Hardware.save",
    )
    command.add_argument("--gpus-per-node", type=int, metavar="N", help="as the hardware says")
    add_machine_options(command)
    command.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    command.add_argument(
        "--allocator", default="", metavar="SETTINGS", help="what PYTORCH_CUDA_ALLOC_CONF will be"
    )
    command.add_argument(
        "--seconds",
        type=float,
        default=120.0,
        metavar="S",
        help="end after this time with the best so far (default 120; 0: search to the end)",
    )
    command.add_argument(
        "--progress", metavar="FILE", help="write progress and the best so far there, line by line"
    )
    command.add_argument("--json", action="store_true", help="print what was found as JSON")
    runs = command.add_argument_group(
        "runs", "with a global batch, find the cheapest run: ranks, batch and micro-batches too"
    )
    size = runs.add_mutually_exclusive_group()
    size.add_argument(
        "--global-tokens", type=parse_count, metavar="N", help="tokens of a step, such as 2M"
    )
    size.add_argument("--global-batch", type=parse_count, metavar="N", help="samples instead")
    runs.add_argument(
        "--batches",
        type=parse_counts,
        metavar="N,N",
        help="samples of one call on a rank to try (default: powers of two)",
    )
    runs.add_argument("--price", type=float, metavar="P", help="of a GPU and hour")


_SUFFIXES = {"k": 10**3, "M": 10**6, "G": 10**9, "B": 10**9, "Ki": 1 << 10, "Mi": 1 << 20}


def parse_count(text: str) -> int:
    """Parse a whole number with an optional suffix, such as "512", "2M" or "2Mi"."""
    number = text.rstrip("kMGBi")
    try:
        count = float(number) * _SUFFIXES.get(text[len(number) :], 0 if text != number else 1)
    except ValueError:
        count = 0
    if count < 1 or not count.is_integer():
        raise argparse.ArgumentTypeError(
            f"{text!r} is no whole number, 1 or more; suffixes are {', '.join(_SUFFIXES)}"
        )
    return int(count)


def parse_counts(text: str) -> tuple[int, ...]:
    """Parse "8,24" as those numbers, and "8-64" as 8 and its doubles up to 64."""
    low, dash, high = text.partition("-")
    if not dash:
        return tuple(map(parse_count, text.split(",")))
    first, last = parse_count(low), parse_count(high)
    if first > last:
        raise argparse.ArgumentTypeError(f"{text!r} has no number: {first} is more than {last}")
    return tuple(first << power for power in range((last // first).bit_length()))


def wants_runs(options: argparse.Namespace) -> bool:
    """Whether `options` ask for runs of one global batch."""
    runs = options.global_tokens is not None or options.global_batch is not None
    for name in ("ranks", "batches", "price"):
        if not runs and getattr(options, name) is not None:
            raise PolicyError(
                f"--{name} is for comparing runs of one global batch; give --global-tokens or "
                "--global-batch as well"
            )
    if runs and options.mesh is not None:
        raise PolicyError(
            "runs of one global batch are searched on meshes of one dimension; give --ranks or "
            "--world-size instead of --mesh"
        )
    return runs


def search_runs(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: argparse.Namespace,
    progress: Stages,
) -> Runs:
    """Search for the cheapest run, as `options` ask."""
    request = RunRequest(
        options.ranks or (options.world_size,),
        global_batch=options.global_batch,
        global_tokens=options.global_tokens,
        batches=options.batches,
        price=options.price,
    )
    return auto_policy_of(options).tune_runs(
        model, request, example_inputs=args, example_kwargs=kwargs, progress=progress
    )


def auto_policy_of(options: argparse.Namespace) -> AutoPolicy:
    """Return the `AutoPolicy` in `options`; fields that are not given are searched."""
    fields, units = fields_of(options), units_of(options)
    fixed = {name: fields[name] for name in _FIELDS if name in fields}
    return AutoPolicy(
        memory_budget=fields.get("memory_budget"),
        hardware=options.hardware,
        gpus_per_node=options.gpus_per_node,
        optimizer=options.optimizer,
        allocator=options.allocator,
        units=AUTO if units is None else units,
        seconds=options.seconds or None,
        **fixed,
    )


def search_policy(
    model: nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: argparse.Namespace,
    progress: Stages,
) -> Tuning:
    """Search for the fastest policy that fits, as `options` ask."""
    return auto_policy_of(options).tune(
        model,
        example_inputs=args,
        example_kwargs=kwargs,
        world_size=options.world_size,
        mesh_shape=options.mesh,
        progress=progress,
    )

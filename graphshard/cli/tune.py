"""`graphshard tune`: its arguments and its search."""

from __future__ import annotations

import argparse
import json
from typing import Any

from graphshard.cli.model import ModelAndInputs, load_with_inputs
from graphshard.cli.policy import add_machine_options, fields_of, units_of
from graphshard.errors import PolicyError
from graphshard.progress import Progress, Stages
from graphshard.tune.auto_policy import AutoPolicy
from graphshard.tune.request import AUTO, SEARCHED
from graphshard.tune.runs import RunRequest, Runs
from graphshard.tune.tuning import Tuning

_FIELDS = (
    "mixed_precision",
    "merge_below",
    "gather_unused",
    "ignored",
    "cuda_graph",
    "check_finite",
    "sync_module_states",
    *SEARCHED,
)


def add_tune(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `graphshard tune` to `command`."""
    add_machine_options(command)
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
    command.set_defaults(run=run_tune)


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


def run_tune(options: argparse.Namespace, progress: Progress) -> str:
    """Return the policy or the runs that a search finds, and why others are not better."""
    runs = wants_runs(options)
    loaded = load_with_inputs(options, progress, "search")
    fields, units = fields_of(options), units_of(options)
    auto = auto_policy_with(
        options,
        memory_budget=fields.get("memory_budget"),
        units=AUTO if units is None else units,
        seconds=options.seconds or None,
        **{name: fields[name] for name in _FIELDS if name in fields},
    )
    search = _compared if runs else tuned
    found = search(auto, loaded, options, progress)
    return json.dumps(found.to_dict(), indent=2) if options.json else str(found)


def auto_policy_with(options: argparse.Namespace, **fields: Any) -> AutoPolicy:
    """The `AutoPolicy` for the machine in `options`; `fields` that are not given are searched."""
    return AutoPolicy(
        hardware=options.hardware,
        gpus_per_node=options.gpus_per_node,
        optimizer=options.optimizer,
        allocator=options.allocator,
        **fields,
    )


def tuned(
    auto: AutoPolicy, loaded: ModelAndInputs, options: argparse.Namespace, progress: Stages
) -> Tuning:
    """The fastest policy that fits, on the ranks in `options`."""
    return auto.tune(
        loaded.model,
        example_inputs=loaded.args,
        example_kwargs=loaded.kwargs,
        world_size=options.world_size,
        mesh_shape=options.mesh,
        progress=progress,
    )


def _compared(
    auto: AutoPolicy, loaded: ModelAndInputs, options: argparse.Namespace, progress: Stages
) -> Runs:
    request = RunRequest(
        options.ranks or (options.world_size,),
        global_batch=options.global_batch,
        global_tokens=options.global_tokens,
        batches=options.batches,
        price=options.price,
    )
    return auto.tune_runs(
        loaded.model,
        request,
        example_inputs=loaded.args,
        example_kwargs=loaded.kwargs,
        progress=progress,
    )

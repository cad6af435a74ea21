"""`graphshard tune`: its arguments and its search."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from graphshard.cli.policy import fields_of, units_of
from graphshard.cost.memory import OPTIMIZERS
from graphshard.hardware.hardware import preset_names
from graphshard.progress import Stages
from graphshard.tune.auto_policy import AutoPolicy
from graphshard.tune.request import AUTO, SEARCHED
from graphshard.tune.tuning import Tuning

_FIELDS = ("mixed_precision", "ignored", "cuda_graph", "sync_module_states", *SEARCHED)


def add_tune(command: argparse.ArgumentParser) -> None:
    """Add the arguments of `graphshard tune` to `command`."""
    command.add_argument(
        "--hardware",
        default="h100-sxm",
        metavar="NAME|FILE",
        help=f"{', '.join(preset_names())}, or a file of Hardware.save",
    )
    command.add_argument("--gpus-per-node", type=int, metavar="N", help="as the hardware says")
    command.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    command.add_argument("--json", action="store_true", help="print what was found as JSON")


def auto_policy_of(options: argparse.Namespace) -> AutoPolicy:
    """Return the `AutoPolicy` in `options`; fields that are not given are searched."""
    fields, units = fields_of(options), units_of(options)
    fixed = {name: fields[name] for name in _FIELDS if name in fields}
    return AutoPolicy(
        memory_budget=fields.get("memory_budget"),
        hardware=options.hardware,
        gpus_per_node=options.gpus_per_node,
        optimizer=options.optimizer,
        units=AUTO if units is None else units,
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

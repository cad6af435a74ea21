"""Policies as the command line writes them."""

from __future__ import annotations

import argparse
import shlex
from dataclasses import replace
from typing import Any

import torch

from graphshard.errors import PolicyError
from graphshard.format import bytes_in
from graphshard.hardware.hardware import preset_names
from graphshard.pipeline import BACKENDS
from graphshard.policy.accelerate import from_accelerate
from graphshard.policy.base import OFFLOADS, SCHEDULES
from graphshard.policy.by_module import ModulePolicy
from graphshard.policy.deepspeed import from_deepspeed
from graphshard.policy.precision import MixedPrecision
from graphshard.policy.units import BlockPolicy, Policy, SizePolicy, Strategy

POLICY_HELP = """\
POLICY is one of

    size:N            units of at least N parameters, e.g. size:1e8
    block             one unit per block class the model names (_no_split_modules)
    block:A,B         one unit per module of class A or B
    accelerate:FILE   what an Accelerate configuration asks for
    deepspeed:FILE    what a DeepSpeed configuration asks for
"""


_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parse_policy(text: str, **fields: Any) -> Policy:
    """The policy that `text` (see `POLICY_HELP`) and the fields of `Policy` describe.

    Raises:
        PolicyError: `text` is none of the forms, or a field has a value outside its range.
    """
    kind, colon, argument = text.partition(":")
    if kind in ("accelerate", "deepspeed") and argument:
        read = from_accelerate if kind == "accelerate" else from_deepspeed
        return replace(read(argument), **fields)
    if kind == "size" and colon:
        try:
            least = float(argument)
        except ValueError:
            least = float("nan")
        if not least.is_integer():
            raise PolicyError(f"size:N takes a whole number of parameters; got {argument!r}")
        return SizePolicy(min_num_params=int(least), **fields)
    if kind == "block":
        return BlockPolicy([c.strip() for c in argument.split(",") if c.strip()], **fields)
    raise PolicyError(
        "a policy is written size:N, block, block:ClassA,ClassB, accelerate:FILE or "
        f"deepspeed:FILE; got {text!r}"
    )


def parse_unit(text: str) -> tuple[str, dict[str, Any]]:
    """The entry of a `ModulePolicy` that "PATTERN" or "PATTERN:KEY=VALUE,..." describes."""
    pattern, _, rest = text.partition(":")
    wanted: dict[str, Any] = {}
    for part in filter(None, rest.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(
                f"{part!r} in {text!r} is no override: write KEY=VALUE, as in strategy=NO_SHARD"
            )
        plain = {"true": True, "false": False}.get(value.lower(), value)
        wanted[key.strip().replace("-", "_")] = int(value) if value.isdecimal() else plain
    return pattern, wanted


def parse_bytes(text: str) -> int:
    """Bytes in "1500000", "2GiB", "1.5 GB" and the like."""
    try:
        return bytes_in(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_mesh(text: str) -> tuple[int, ...]:
    """The mesh shape in "8" or "2x4"."""
    try:
        return tuple(int(size) for size in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a mesh: sizes as in 8 or 2x4") from None


def parse_reshard(text: str) -> bool | int:
    """What becomes of a unit after forward, in "true", "false" or a number of ranks."""
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not true, false or a number of ranks"
        ) from None


def add_policy_fields(command: argparse.ArgumentParser) -> None:
    """Add the arguments for the fields of a policy to `command`."""
    # Left out of the namespace unless given, so that the defaults are the policy's own.
    fields = command.add_argument_group("policy fields")
    unset: Any = argparse.SUPPRESS
    fields.add_argument("--strategy", choices=[s.value for s in Strategy], default=unset)
    fields.add_argument(
        "--unit",
        action="append",
        type=parse_unit,
        metavar="PATTERN[:KEY=VALUE,...]",
        default=unset,
        help="make units of the modules whose whole name matches the shell pattern, with a "
        "strategy, reshard_after_forward or placement of their own; may be repeated",
    )
    fields.add_argument("--backward-prefetch", choices=["pre", "post", "none"], default=unset)
    fields.add_argument("--forward-prefetch", type=int, metavar="N", default=unset)
    fields.add_argument(
        "--reshard-after-forward",
        type=parse_reshard,
        metavar="true|false|K",
        default=unset,
        help="free units after forward, keep them, or keep them in parts in groups of K ranks",
    )
    fields.add_argument("--schedule", choices=list(SCHEDULES), default=unset)
    fields.add_argument("--reshard-root", action="store_true", default=unset)
    fields.add_argument(
        "--recompute",
        metavar="WHAT",
        default=unset,
        help="units, selective, budget, or module classes: A,B or selective,A,B",
    )
    fields.add_argument("--cuda-graph", action="store_true", default=unset)
    fields.add_argument("--sync-module-states", action="store_true", default=unset)
    fields.add_argument(
        "--memory-budget",
        type=parse_bytes,
        metavar="BYTES",
        default=unset,
        help="what a step may hold at once on a rank besides its shards, e.g. 20GiB",
    )
    fields.add_argument(
        "--param-dtype",
        choices=list(_DTYPES),
        default=unset,
        help="gather and compute in it (mixed precision)",
    )
    fields.add_argument(
        "--reduce-dtype", choices=list(_DTYPES), default=unset, help="reduce gradients in it"
    )
    fields.add_argument(
        "--offload",
        action="append",
        choices=OFFLOADS,
        default=unset,
        help="keep it on the host; may be repeated",
    )
    fields.add_argument(
        "--ignored",
        action="append",
        metavar="REGEX",
        default=unset,
        help="leave alone what matches the whole name; may be repeated",
    )


def add_hardware(command: argparse.ArgumentParser) -> None:
    """Add the argument for what a schedule is timed on, where nothing else asks for hardware."""
    command.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        default=argparse.SUPPRESS,
        help=f"what --schedule overlap is timed on: {', '.join(preset_names())}, or a file",
    )


def add_backend(command: argparse.ArgumentParser) -> None:
    """Add the argument for what runs compute."""
    command.add_argument(
        "--backend",
        choices=list(BACKENDS),
        default=argparse.SUPPRESS,
        help="what runs compute: torch, operator by operator (the default), or Inductor, region by "
        "region",
    )


def backend_of(options: argparse.Namespace) -> str:
    """What `options` ask to run compute."""
    return str(getattr(options, "backend", BACKENDS[0]))


_POLICY_FIELDS = (
    "strategy",
    "backward_prefetch",
    "forward_prefetch",
    "reshard_after_forward",
    "reshard_root",
    "recompute",
    "cuda_graph",
    "sync_module_states",
    "memory_budget",
    "schedule",
    "offload",
    "ignored",
)


def fields_of(options: argparse.Namespace) -> dict[str, Any]:
    """The fields of a policy that the arguments `add_policy_fields` added give, by name."""
    given = vars(options)
    fields: dict[str, Any] = {name: given[name] for name in _POLICY_FIELDS if name in given}
    if fields.get("backward_prefetch") == "none":
        fields["backward_prefetch"] = None
    # `graphshard simulate`, `compare` and `tune` take it in any case: what they predict for.
    predicts = given.get("command") in ("simulate", "compare", "tune")
    for_policy = not predicts or fields.get("schedule") == "overlap"
    if "hardware" in given and for_policy:
        fields["hardware"] = given["hardware"]
    if "recompute" in fields:
        fields["recompute"] = fields["recompute"].split(",")
    param, reduced = (_DTYPES.get(given.get(f"{kind}_dtype", "")) for kind in ("param", "reduce"))
    if param or reduced:
        fields["mixed_precision"] = MixedPrecision(param_dtype=param, reduce_dtype=reduced)
    return fields


def units_of(options: argparse.Namespace) -> Policy | None:
    """The policy that chooses the units `options` ask for; None if they ask for none."""
    entries = getattr(options, "unit", None)
    base = None if options.policy is None else parse_policy(options.policy)
    return ModulePolicy(dict(entries), base=base) if entries else base


def policy_of(options: argparse.Namespace) -> Policy:
    """The policy that the arguments `add_policy_fields` added ask for."""
    fields = fields_of(options)
    entries = getattr(options, "unit", None)
    if not entries:
        return parse_policy(options.policy, **fields)
    return ModulePolicy(dict(entries), base=parse_policy(options.policy), **fields)


def policies_of(options: argparse.Namespace) -> list[tuple[Policy, str]]:
    """The policies in the texts of `options.policy`, each with fields of its own behind it, and
    with the backend that is to run it.

    "block:Block --recompute units" is the policy block:Block, computed again in backward; fields
    that `options` has besides are those of every policy that does not give them.
    """
    found = []
    for text in options.policy:
        parser = argparse.ArgumentParser(prog=f'--policy "{text}"', add_help=False)
        parser.add_argument("policy")
        add_policy_fields(parser)
        add_backend(parser)
        own = argparse.Namespace(**{k: v for k, v in vars(options).items() if k != "policy"})
        given = parser.parse_args(shlex.split(text), own)
        found.append((policy_of(given), backend_of(given)))
    return found

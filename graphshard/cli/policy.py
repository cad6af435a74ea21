"""Options that commands share: policies, and the machine; and the parser of a command."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Never

from graphshard.cost.estimate import Estimate
from graphshard.cost.memory import OPTIMIZERS
from graphshard.errors import CostError, PlanError, PolicyError
from graphshard.format import bytes_in, meant
from graphshard.hardware.curves import ATTENTION_KERNELS
from graphshard.hardware.hardware import Hardware, preset_names
from graphshard.planning.planner import BACKENDS, mesh_sizes
from graphshard.policy.accelerate import from_accelerate
from graphshard.policy.base import (
    OFFLOADS,
    ON_NON_FINITE,
    SCHEDULES,
)
from graphshard.policy.by_module import ModulePolicy
from graphshard.policy.deepspeed import from_deepspeed
from graphshard.policy.precision import DTYPES, MixedPrecision
from graphshard.policy.units import BlockPolicy, Policy, SizePolicy, Strategy

POLICY_HELP = """\
POLICY is one of

    size:N            units of at least N parameters, e.g. size:1e8
    block             one unit per block class the model names (_no_split_modules)
    block:A,B         one unit per module of class A or B
    accelerate:FILE   what an Accelerate configuration asks for
    deepspeed:FILE    what a DeepSpeed configuration asks for
"""


def parse_policy(text: str, **fields: Any) -> Policy:
    """Return the policy of `text` (see `POLICY_HELP`), with these fields of `Policy`."""
    kind, colon, argument = text.partition(":")
    if kind in ("accelerate", "deepspeed") and argument:
        read = from_accelerate if kind == "accelerate" else from_deepspeed
        return replace(read(argument), **fields)
    if kind == "size" and colon:
        try:
            min_num_params = float(argument)
        except ValueError:
            min_num_params = float("nan")
        if not min_num_params.is_integer():
            raise PolicyError(f"size:N takes a whole number of parameters; got {argument!r}")
        return SizePolicy(min_num_params=int(min_num_params), **fields)
    if kind == "block":
        return BlockPolicy([c.strip() for c in argument.split(",") if c.strip()], **fields)
    raise PolicyError(
        "a policy is written size:N, block, block:ClassA,ClassB, accelerate:FILE or "
        f"deepspeed:FILE; got {text!r}"
    )


def parse_unit(text: str) -> tuple[str, dict[str, Any]]:
    """Parse "PATTERN" or "PATTERN:KEY=VALUE,KEY=VALUE" as an entry of a `ModulePolicy`."""
    pattern, _, rest = text.partition(":")
    overrides: dict[str, Any] = {}
    for assignment in filter(None, rest.split(",")):
        key, equals, value = assignment.partition("=")
        if not equals:
            raise argparse.ArgumentTypeError(
                f"{assignment!r} in {text!r} is no override: write KEY=VALUE, as in "
                "strategy=NO_SHARD"
            )
        plain = {"true": True, "false": False}.get(value.lower(), value)
        overrides[key.strip().replace("-", "_")] = int(value) if value.isdecimal() else plain
    return pattern, overrides


def parse_bytes(text: str) -> int:
    """Parse a number of bytes, such as "1500000", "2GiB" or "1.5 GB"."""
    try:
        return bytes_in(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_mesh(text: str) -> tuple[int, ...]:
    """Parse a mesh shape, such as "8" or "2x4"."""
    try:
        return mesh_sizes(text)
    except PlanError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def parse_reshard(text: str) -> bool | int:
    """Parse `reshard_after_forward`: "true", "false" or a number of ranks."""
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
    # An argument that is not given is left out of the namespace, so the policy's default applies.
    fields = command.add_argument_group("policy fields")
    unset: Any = argparse.SUPPRESS
    strategies = [strategy.value for strategy in Strategy]
    fields.add_argument(
        "--strategy",
        type=str.upper,
        choices=strategies,
        metavar="NAME",
        default=unset,
        help=f"{', '.join(strategies)} (default FULL_SHARD)",
    )
    fields.add_argument(
        "--unit",
        action="append",
        type=parse_unit,
        metavar="PATTERN[:KEY=VALUE,...]",
        default=unset,
        help="make units of the modules whose whole name matches the shell pattern, with a "
        "strategy, reshard_after_forward or placement of their own; may be repeated",
    )
    fields.add_argument(
        "--backward-prefetch",
        choices=["pre", "post", "none"],
        default=unset,
        help="gather in backward before the compute of the unit that runs before (default), after "
        "it, or when needed",
    )
    fields.add_argument(
        "--forward-prefetch",
        type=int,
        metavar="N",
        default=unset,
        help="gather in forward N units ahead (default 1; 0 by Gloo on one host)",
    )
    fields.add_argument(
        "--merge-below",
        type=parse_bytes,
        metavar="BYTES",
        default=unset,
        help="gather and reduce neighbouring units together up to so many bytes of a rank; 0: none "
        "(default 1MiB, 512KiB by Gloo, 0 with a memory budget)",
    )
    fields.add_argument(
        "--reshard-after-forward",
        type=parse_reshard,
        metavar="true|false|K",
        default=unset,
        help="free units after forward, keep them, or keep them in parts in groups of K ranks "
        "(default: as the strategy says)",
    )
    fields.add_argument(
        "--schedule",
        choices=list(SCHEDULES),
        default=unset,
        help="place communication in FSDP's order (default), or by estimated times",
    )
    fields.add_argument(
        "--reshard-root", action="store_true", default=unset, help="free the root after forward"
    )
    fields.add_argument(
        "--gather-unused",
        action="store_true",
        default=unset,
        help="gather every unit in every program, so that ranks may use different ones",
    )
    fields.add_argument(
        "--recompute",
        metavar="WHAT",
        default=unset,
        help="units, selective, budget, or module classes: A,B or selective,A,B",
    )
    fields.add_argument(
        "--cuda-graph", action="store_true", default=unset, help="replay steps as CUDA graphs"
    )
    fields.add_argument(
        "--check-finite",
        choices=ON_NON_FINITE,
        default=unset,
        help="tell where NaN or infinity begins",
    )
    fields.add_argument(
        "--sync-module-states",
        action="store_true",
        default=unset,
        help="take rank 0's weights and buffers",
    )
    fields.add_argument(
        "--memory-budget",
        type=parse_bytes,
        metavar="BYTES",
        default=unset,
        help="what a step may hold at once on a rank besides its shards, e.g. 20GiB",
    )
    fields.add_argument(
        "--param-dtype",
        type=lambda text: text.removeprefix("torch."),
        choices=list(DTYPES),
        metavar="DTYPE",
        default=unset,
        help="gather and compute in it (mixed precision): bf16, fp16, fp32, or torch's names",
    )
    fields.add_argument(
        "--reduce-dtype",
        type=lambda text: text.removeprefix("torch."),
        choices=list(DTYPES),
        metavar="DTYPE",
        default=unset,
        help="reduce gradients in it (default: --param-dtype)",
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
    """Add the argument for the machine that a program is made for."""
    command.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        default=argparse.SUPPRESS,
        help="the machine that the program is for (h100-sxm), and that --schedule overlap is timed "
        f"on: {', '.join(preset_names())}, or a file",
    )


def add_machine_options(command: argparse.ArgumentParser, *, required: bool = False) -> None:
    """Add the arguments for the machine of an estimate, which is an H100 unless `required`."""
    names = f"{', '.join(preset_names())}, or a file of Hardware.save"
    command.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        required=required,
        default=None if required else "h100-sxm",
        help=names if required else f"{names} (default h100-sxm)",
    )
    command.add_argument(
        "--gpus-per-node", type=int, metavar="N", help="ranks on a node; as the hardware says"
    )
    command.add_argument(
        "--power-limit", type=float, metavar="WATTS", help="of each device; as the hardware says"
    )
    command.add_argument(
        "--attention",
        choices=ATTENTION_KERNELS,
        help="the kernel of fused attention; as the installed torch takes by default",
    )
    command.add_argument(
        "--optimizer",
        choices=list(OPTIMIZERS),
        default="adamw",
        help="whose states and step are counted (default adamw)",
    )
    command.add_argument(
        "--allocator",
        default="",
        metavar="SETTINGS",
        help="what PYTORCH_CUDA_ALLOC_CONF will be, such as expandable_segments:True",
    )


def check_attention(options: argparse.Namespace, estimates: Iterable[Estimate]) -> None:
    """Raise CostError if `--attention` names a kernel by which none of `estimates` is priced."""
    kernel = getattr(options, "attention", None)
    if kernel is None or any(kernel in estimate.attention_kernels for estimate in estimates):
        return
    raise CostError(
        f"--attention has no effect: no operator of the step is priced by {kernel}, which is for "
        "attention in 16 bits, fused, and without a mask but for cudnn and fa1, on hardware "
        "without measured curves of it; leave it out, or say --param-dtype bf16"
    )


def set_machine(options: argparse.Namespace) -> None:
    """Replace `options.hardware` by the machine that the other options change it to."""
    changes = {
        name: getattr(options, option)
        for name, option in (("power_limit", "power_limit"), ("attention_kernel", "attention"))
        if getattr(options, option, None) is not None
    }
    if changes:
        options.hardware = Hardware.load(options.hardware).with_(**changes)


def add_backend(command: argparse.ArgumentParser) -> None:
    """Add the argument for the backend that runs compute."""
    command.add_argument(
        "--backend",
        choices=list(BACKENDS),
        default=argparse.SUPPRESS,
        help="what runs compute: torch, operator by operator (the default), or Inductor, region by "
        "region",
    )


def backend_of(options: argparse.Namespace) -> str:
    """Return the backend in `options`, or the default one."""
    return str(getattr(options, "backend", BACKENDS[0]))


_POLICY_FIELDS = (
    "strategy",
    "backward_prefetch",
    "forward_prefetch",
    "merge_below",
    "reshard_after_forward",
    "reshard_root",
    "gather_unused",
    "recompute",
    "cuda_graph",
    "check_finite",
    "sync_module_states",
    "memory_budget",
    "schedule",
    "offload",
    "ignored",
)


def fields_of(options: argparse.Namespace) -> dict[str, Any]:
    """Return the policy fields in `options`, which `add_policy_fields` defines, by name."""
    values = vars(options)
    fields: dict[str, Any] = {name: values[name] for name in _POLICY_FIELDS if name in values}
    if fields.get("backward_prefetch") == "none":
        fields["backward_prefetch"] = None
    if "hardware" in values and fields.get("schedule") == "overlap":
        fields["hardware"] = values["hardware"]
    if "recompute" in fields:
        fields["recompute"] = fields["recompute"].split(",")
    dtypes = {name: values[name] for name in ("param_dtype", "reduce_dtype") if name in values}
    if dtypes:
        fields["mixed_precision"] = MixedPrecision(**dtypes)
    return fields


def units_of(options: argparse.Namespace) -> Policy | None:
    """Return the policy that chooses the units in `options`; None if they name no units."""
    if options.policy is None and not getattr(options, "unit", None):
        return None
    return _policy_with(options, {})


def policy_of(options: argparse.Namespace) -> Policy:
    """Return the policy in `options`, with the fields that `add_policy_fields` defines."""
    return _policy_with(options, fields_of(options))


def _policy_with(options: argparse.Namespace, fields: dict[str, Any]) -> Policy:
    entries = getattr(options, "unit", None)
    if not entries:
        return parse_policy(options.policy, **fields)
    base = None if options.policy is None else parse_policy(options.policy)
    return ModulePolicy(dict(entries), base=base, **fields)


def policies_of(options: argparse.Namespace) -> list[tuple[Policy, str]]:
    """Return the policies in the texts of `options.policy`, each with its backend.

    A text may have fields after the policy, as in "block:Block --recompute units". Other fields in
    `options` apply to every policy that does not set them.
    """
    policies = []
    for text in options.policy:
        parser = CommandParser(prog=f'--policy "{text}"', add_help=False)
        parser.add_argument("policy")
        add_policy_fields(parser)
        add_backend(parser)
        shared = argparse.Namespace(**{k: v for k, v in vars(options).items() if k != "policy"})
        merged = parser.parse_args(shlex.split(text), shared)
        policies.append((policy_of(merged), backend_of(merged)))
    return policies


# -- the parser ------------------------------------------------------------------------------------


class CommandParser(argparse.ArgumentParser):
    """argparse alone would say which required option is missing if that one is misspelt."""

    arguments: Sequence[str] = ()
    others: Mapping[str, argparse.ArgumentParser] = {}
    """The parsers of all commands by name, whose options may be meant for this one."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: D102
        self.arguments = tuple(args or ())
        found, unknown = super().parse_known_args(args, namespace)
        if unknown := self._noted(unknown):
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def _noted(self, unknown: Sequence[str]) -> list[str]:
        """`unknown` without options of other commands, of which a line on stderr tells."""
        left, rest = [], deque(unknown)
        while rest:
            argument = rest.popleft()
            name = argument.partition("=")[0]
            takers = self._takers(name)
            if not takers:
                left.append(argument)
                continue
            option = self.others[takers[0]]._option_string_actions[name]
            takes_next = option.nargs != 0 and "=" not in argument
            if takes_next and rest and not rest[0].startswith("-"):
                rest.popleft()
            said = f"{self.prog}: {name} has no effect here; it is one of {', '.join(takers)}"
            print(said, file=sys.stderr)
        return left

    def _takers(self, name: str) -> list[str]:
        """The other commands with the option `name`."""
        return [of for of, other in self.others.items() if name in other._option_string_actions]

    def error(self, message: str) -> Never:  # noqa: D102
        options = [option for option in self._option_string_actions if option.startswith("--")]
        for argument in self.arguments:
            name = argument.partition("=")[0]
            is_known = any(option.startswith(name) for option in options) or self._takers(name)
            if name.startswith("--") and not is_known and (like := meant(name, options)):
                message = f"there is no option {name}{like}"
        super().error(message)

"""The options that change a machine: its power limit, and its attention kernel."""

from __future__ import annotations

import argparse
from collections.abc import Iterable

from graphshard.cost.estimate import Estimate
from graphshard.errors import CostError
from graphshard.hardware.curves import ATTENTION_KERNELS
from graphshard.hardware.hardware import Hardware


def add_machine_options(command: argparse.ArgumentParser) -> None:
    """Add the arguments that change the machine of `--hardware` to `command`."""
    command.add_argument(
        "--power-limit", type=float, metavar="WATTS", help="of each device; as the hardware says"
    )
    command.add_argument(
        "--attention",
        choices=ATTENTION_KERNELS,
        help="the kernel of fused attention; as the installed torch takes by default",
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

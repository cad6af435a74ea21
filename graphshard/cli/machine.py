"""The options that change a machine: its power limit, and its attention kernel."""

from __future__ import annotations

import argparse

from graphshard.hardware.attention import ATTENTION_KERNELS
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


def set_machine(options: argparse.Namespace) -> None:
    """Replace `options.hardware` by the machine that the other options change it to.

    Raises:
        CostError: there is no such hardware, or it has no figures for an option.
    """
    changes = {
        name: getattr(options, option)
        for name, option in (("power_limit", "power_limit"), ("attention_kernel", "attention"))
        if getattr(options, option, None) is not None
    }
    if changes:
        options.hardware = Hardware.load(options.hardware).with_(**changes)

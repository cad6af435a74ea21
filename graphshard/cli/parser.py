"""The parser of a command, whose errors name the option that a misspelt one was meant to be."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any, Never

from graphshard.format import meant


class CommandParser(argparse.ArgumentParser):
    """argparse alone would say which required option is missing if that one is misspelt."""

    arguments: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # noqa: D102
        self.arguments = tuple(args or ())
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown

    def error(self, message: str) -> Never:  # noqa: D102
        options = re.findall(r"--[a-z-]+", self.format_help().replace(self.prog, ""))
        for argument in self.arguments:
            name = argument.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in options):
                like = meant(name, options)
                message = f"there is no option {name}{like}" if like else message
        super().error(message)

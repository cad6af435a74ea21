"""The command line."""

from graphshard.cli.main import main

__all__ = ["main"]

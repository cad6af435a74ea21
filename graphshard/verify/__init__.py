"""The rules that a program must keep after each pass."""

from graphshard.verify.rules import verify

__all__ = ["verify"]

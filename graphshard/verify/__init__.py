"""What must hold of a program after each pass."""

from graphshard.verify.rules import verify

__all__ = ["verify"]

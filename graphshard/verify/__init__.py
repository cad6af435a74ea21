"""What must hold of a program after each pass."""

from graphshard.verify.verify import verify

__all__ = ["verify"]

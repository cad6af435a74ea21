"""Every error graphshard raises on purpose.

Each message states the rule that was broken, names what broke it (a parameter, a module, a source
line, a pass) and says what to do.
"""

from __future__ import annotations


class GraphshardError(Exception):
    """Base class of all errors raised by graphshard."""


class PolicyError(GraphshardError):
    """A policy asks for something the model or the mesh cannot give, or contradicts itself."""


class PlanError(GraphshardError):
    """The model cannot be planned: its parameters or the world size break a rule of sharding."""


class CaptureError(GraphshardError):
    """The model cannot be captured as one graph. Names the user's source line if there is one."""


class FixedSizeError(CaptureError):
    """The model fixes a size that was asked to be dynamic. `size` is the name it was given."""

    def __init__(self, message: str, size: str) -> None:
        super().__init__(message)
        self.size = size

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (str(self), self.size)


class PassError(GraphshardError):
    """A pass met a program it cannot rewrite. Names the pass and the node."""


class VerifyError(GraphshardError):
    """A program breaks a rule all programs must keep. Names the pass, the rule, node and unit."""


class RuntimeStateError(GraphshardError):
    """A sharded module was used in an order or a state that is not allowed."""


class CollectiveError(GraphshardError):
    """A collective failed: a rank died, timed out, or runs another sequence of collectives."""


class FingerprintError(CollectiveError):
    """The ranks were about to run different sequences of collectives. Says what differs."""


class CheckpointError(GraphshardError):
    """A state dict does not fit the model. Names the first offending key."""


class UnsupportedTorchError(GraphshardError):
    """The installed torch lacks a private API graphshard needs. Names the versions that have it."""


class CostError(GraphshardError):
    """A cost cannot be told: the hardware is not described, or the question makes no sense."""

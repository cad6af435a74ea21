"""What the user asks for: frozen dataclasses that check themselves and hold no model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from torch import nn

from graphshard.errors import PolicyError


class Strategy(str, Enum):
    """Which state is sharded, in torch's names."""

    FULL_SHARD = "FULL_SHARD"  # parameters are freed after forward and gathered again (ZeRO-3)
    SHARD_GRAD_OP = "SHARD_GRAD_OP"  # gathered once, kept until their backward is done (ZeRO-2)
    NO_SHARD = "NO_SHARD"  # a full copy per rank, gradients all-reduced (DDP)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The fields all policies share.

    Args:
        strategy: a `Strategy` or its name.
        backward_prefetch: where a unit's gather in backward is issued: "pre", before the compute of
            the unit that runs before it; "post", after that compute and before its gradients are
            reduced; None, only when the unit itself needs it.
        forward_prefetch: how many units ahead of its use a gather is issued in forward.
        reshard_root: free the root unit after forward and gather it again for backward.
        memory_budget: the most bytes of unsharded parameters that may live at once on a rank;
            a program that passes it is a `VerifyError`. None: no bound.
        sync_module_states: take rank 0's parameters and buffers on every rank.

    Raises:
        PolicyError: a field has a value outside its range.
    """

    strategy: Strategy | str = Strategy.FULL_SHARD
    backward_prefetch: str | None = "pre"
    forward_prefetch: int = 0
    reshard_root: bool = False
    memory_budget: int | None = None
    sync_module_states: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "strategy", Strategy(self.strategy))
        except ValueError:
            names = ", ".join(s.value for s in Strategy)
            raise PolicyError(f"strategy must be one of {names}; got {self.strategy!r}") from None
        if self.backward_prefetch not in ("pre", "post", None):
            raise PolicyError(
                f'backward_prefetch must be "pre", "post" or None; got {self.backward_prefetch!r}'
            )
        if isinstance(self.forward_prefetch, bool) or not isinstance(self.forward_prefetch, int):
            raise PolicyError(f"forward_prefetch must be an int; got {self.forward_prefetch!r}")
        if self.forward_prefetch < 0:
            raise PolicyError(f"forward_prefetch must be 0 or more; got {self.forward_prefetch}")
        if self.memory_budget is not None and self.memory_budget <= 0:
            raise PolicyError(f"memory_budget must be positive bytes or None; got {self.memory_budget}")

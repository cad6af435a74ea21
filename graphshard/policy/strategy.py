"""The sharding strategies: which state is sharded over the ranks, and when it is gathered."""

from __future__ import annotations

import re
from enum import StrEnum


class Strategy(StrEnum):
    """The state that is sharded, in torch's names; torch's FSDPs have no SHARD_OPTIMIZER.

    SHARD_OPTIMIZER and SHARD_GRAD_OP both shard gradients and optimizer states and have the same
    peak. Between steps a rank keeps all P bytes of parameters under SHARD_OPTIMIZER, and P/W under
    SHARD_GRAD_OP on W ranks. In return, SHARD_OPTIMIZER gathers once after each change of the
    parameters, into the copies it keeps, so without new memory, and not again for further forwards
    (micro-batches, an eval loop).

    The HYBRID strategies shard over the last dimension of a two-dimensional mesh (replicate, shard)
    and keep equal shards along the first.
    """

    FULL_SHARD = "FULL_SHARD"  # parameters are freed after forward and gathered again (ZeRO-3)
    SHARD_GRAD_OP = "SHARD_GRAD_OP"  # gathered once, kept until their backward is done (ZeRO-2)
    SHARD_OPTIMIZER = "SHARD_OPTIMIZER"  # a full copy per rank stays; only its update is split
    NO_SHARD = "NO_SHARD"  # a full copy per rank, gradients all-reduced (DDP)
    HYBRID_SHARD = "HYBRID_SHARD"  # FULL_SHARD in a group, replicated over groups (ZeRO++ hpZ)
    HYBRID_SHARD_ZERO2 = "HYBRID_SHARD_ZERO2"  # SHARD_GRAD_OP in a group, replicated over groups

    @property
    def hybrid(self) -> bool:
        """Whether it needs a mesh of two dimensions."""
        return self in (Strategy.HYBRID_SHARD, Strategy.HYBRID_SHARD_ZERO2)

    @property
    def frees_after_forward(self) -> bool:
        """Whether a unit's unsharded parameters are freed between forward and backward."""
        return self in (Strategy.FULL_SHARD, Strategy.HYBRID_SHARD)

    @classmethod
    def _missing_(cls, value: object) -> Strategy | None:
        """Resolve other names: ZERO0 to ZERO3 ("ZeRO-3", "zero_3"), DDP, torch's own enum."""
        name = getattr(value, "name", value)
        if not isinstance(name, str):
            return None
        plain = re.sub(r"[^A-Z0-9]", "", name.upper())
        return _BY_NAME.get(plain)


_BY_NAME = {
    **{re.sub("_", "", member.value): member for member in Strategy},
    "ZERO0": Strategy.NO_SHARD,
    "DDP": Strategy.NO_SHARD,
    "ZERO1": Strategy.SHARD_OPTIMIZER,
    "ZERO2": Strategy.SHARD_GRAD_OP,
    "ZERO3": Strategy.FULL_SHARD,
}

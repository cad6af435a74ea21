"""NCCL's registration of buffers in CUDA graphs, which graphshard turns off.

With it NCCL exchanges handles between the ranks' hosts in the midst of a capture, without a limit
of time, and its graphs break if the allocator's segments are expandable.
"""

from __future__ import annotations

import os

from graphshard.errors import PolicyError
from graphshard.runtime.group import Group
from graphshard.torch_private.communicators import allocator_settings

VARIABLE = "NCCL_GRAPH_REGISTER"


def registration(group: Group, *, cuda_graph: bool) -> str:
    """The value of NCCL's variable, "0" unless the user set another one; "" where it is of no use.

    To be called before the first communicator, if possible: NCCL looks at the variable once.
    """
    if not cuda_graph or group.size == 1 or "nccl" not in group.backend:
        return ""
    value = os.environ.setdefault(VARIABLE, "0")
    settings = allocator_settings().replace(" ", "").lower()
    if value != "0" and "expandable_segments:true" in settings:
        raise PolicyError(
            f"cuda_graph=True with {VARIABLE}={value} and the allocator's expandable_segments:True "
            f"ends in illegal memory accesses; leave {VARIABLE} unset, or use other segments"
        )
    return value

"""What a process takes of a GPU's memory beside torch's tensors, in bytes.

A hardware file may state its own figures, as `overhead = {"context": ..., ...}`.
"""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.cost.collective_cost import ranks_of
from graphshard.hardware.hardware import Hardware
from graphshard.program import ops
from graphshard.program.program import Program

MIB = 1 << 20

CONTEXT = 500 * MIB
"""The CUDA context with the kernels that a training step loads.

A context alone takes 287 MB with lazy loading (pytorch/pytorch pull 86509), 426 MiB with CUDA 13
(unslothai/unsloth-zoo pull 1053); cuBLAS, attention and NCCL add their kernels. An estimate.
"""

COMMUNICATOR = 560 * MIB
"""NCCL's buffers of one communicator within a node.

8 H100 hold 1.06 GB outside torch once they have communicated (NVIDIA/nccl issue 1685), context
included. By NCCL's sources a connection has 4 MiB for Simple, 4.7 for LL128 and 0.5 for LL, in
pages of 2 MiB 10, and 24 channels have a ring's and a tree's connections. An estimate: connections
over a network, NVLS and NCCL_BUFFSIZE change it, and 1.6 GB were seen (NVIDIA/nccl issue 864).
"""

WORKSPACE = 8_519_680
"""cuBLAS's workspace for one handle and stream, which torch takes of its own allocator.

The default of torch, :4096:2:16:8, is 8,519,680 bytes (seen in discuss.pytorch.org 178671); on
Hopper and later 32 MiB (pytorch/pytorch pull 120925).
"""

HANDLES = 2
"""The threads that call cuBLAS: forward's and autograd's, each with a handle of its own."""

DRIVER = 0.011
"""The part of the datasheet's memory that the driver keeps: of 80 GiB torch finds 79.1 or 79.25."""


@dataclass(frozen=True)
class Overheads:
    """Bytes on a GPU beside tensors.

    context: of CUDA. communicators: NCCL's buffers, of all communicators of the program.
    workspaces: of cuBLAS, one for each handle; these are part of what torch reserves. driver: what
    the driver keeps of the device's memory.
    """

    context: int
    communicators: int
    workspaces: tuple[int, ...]
    driver: int

    @property
    def outside(self) -> int:
        """Bytes that torch's allocator does not count."""
        return self.context + self.communicators

    @classmethod
    def of(cls, program: Program, hardware: Hardware) -> Overheads:
        """The overheads of a rank that runs `program`."""
        groups = {
            ops.group_of(node)
            for node in program.nodes()
            if ops.is_collective(node) and ranks_of(node, program) > 1
        }
        return _overheads(hardware, len(groups))


def usable_bytes(hardware: Hardware, communicators: int) -> int:
    """Bytes of a device that torch can reserve, with so many communicators; on hosts all."""
    if hardware.is_host:
        return hardware.memory_bytes
    overheads = _overheads(hardware, communicators)
    return hardware.memory_bytes - overheads.driver - overheads.outside


def _overheads(hardware: Hardware, communicators: int) -> Overheads:
    given = hardware.overhead
    workspace = int(given.get("workspace", WORKSPACE))
    return Overheads(
        int(given.get("context", CONTEXT)),
        int(given.get("communicator", COMMUNICATOR)) * communicators,
        (workspace,) * HANDLES if workspace else (),
        int(given.get("driver", DRIVER * hardware.memory_bytes)),
    )

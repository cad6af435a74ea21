"""Optimizer state that a checkpoint has one of: it must be the same on every rank.

A tensor with its parameter's shape is laid out as the parameter, and each rank's part is saved. Of
all else ("step", statistics of rows) rank 0's is. An optimizer that steps on a rank's part of a
tensor may keep numbers of that part, such as the scales of an 8-bit state: of these a checkpoint
would give those of rank 0 to every rank, and no error would tell.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

from graphshard.errors import CheckpointError
from graphshard.format import some_of
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.group import Group
from graphshard.state.replicas import checksum


def copies_of_state(
    group: Group, state_by_param: Iterator[tuple[Tensor, str, Mapping[str, Any]]]
) -> dict[str, str]:
    """What of an optimizer's state must be the same on every rank: its text, or a checksum.

    Args:
        group: the ranks.
        state_by_param: the parameters, with their names and their state. Those that are plain
            tensors (ignored ones) are each rank's own.
    """
    copies: dict[str, str] = {}
    if group.size == 1 or group.backend == "fake":
        return copies
    sums: dict[torch.device, dict[str, Tensor]] = {}
    for param, name, state in state_by_param:
        if not isinstance(param, DTensor):
            continue
        for key, value in state.items():
            for place, leaf in enumerate(pytree.tree_leaves(value)):
                label = f"{key!r} of {name!r}" + (f" ({place})" if place else "")
                if isinstance(leaf, Tensor) and not isinstance(leaf, DTensor):
                    sums.setdefault(leaf.device, {})[label] = checksum(leaf)
                elif isinstance(leaf, int | float | complex | str):
                    copies[label] = repr(leaf)
    for by_label in sums.values():
        values = torch.stack(list(by_label.values())).tolist()
        copies |= {label: f"#{value}" for label, value in zip(by_label, values, strict=True)}
    return copies


def require_same_copies(group: Group, agreement: Agreement, copies: Mapping[str, str]) -> None:
    """Check that no rank has another value; one exchange of 8 bytes, if all have the same.

    Args:
        group: the ranks.
        agreement: between them.
        copies: of this rank; see `copies_of_state`.
    """
    if group.size == 1 or group.backend == "fake":
        return
    digest = hashlib.sha256(repr(sorted(copies.items())).encode()).digest()
    sent = torch.tensor([int.from_bytes(digest[:7], "big")], device=group.device)
    if len(set(group.gather_tensor(sent).flatten().tolist())) == 1:
        return
    found: dict[str, dict[str, list[int]]] = {}  # by label and value, the ranks
    for rank, theirs in enumerate(group.all_gather_object(dict(copies))):
        for label, value in theirs.items():
            found.setdefault(label, {}).setdefault(value, []).append(rank)
    differing = sorted(label for label, by_value in found.items() if len(by_value) > 1)
    with agreement.part():
        if differing:
            ranks = list(found[differing[0]].values())
            raise CheckpointError(
                f"the optimizer's state {some_of(differing)} is not laid out as the parameter and "
                f"differs between ranks (rank {ranks[0][0]} and rank {ranks[1][0]}): a checkpoint "
                "has one of it, which a load would give to every rank; keep it in tensors of the "
                'parameter\'s shape, or save optimizer_state_dict(optim, kind="local") on each '
                "rank, which fits as many ranks"
            )

"""Copies of one tensor on several ranks, compared by checksums in one exchange.

Copies are those of replicated and ignored parameters and of buffers on all ranks, of resident
parameters (SHARD_OPTIMIZER) once their rows are gathered, and of shards on the replicas of a mesh
of two dimensions.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import CollectiveError, PolicyError, ReplicaError
from graphshard.format import some_of
from graphshard.runtime.calls import require_names
from graphshard.runtime.lower import Bindings
from graphshard.runtime.resident import ResidentShard, words_of
from graphshard.runtime.shards import distinct

_CHUNK = 1 << 20
"""Words that are multiplied at once, so that a checksum needs 8 MiB of memory."""


_STALE = -1
"""In place of a checksum: the rows of other ranks are to be gathered, and are no copies."""


_MISSING = -2
"""In place of the checksum of what this rank alone does not have, such as a buffer that is None."""


@dataclass(frozen=True)
class Copy:
    """This rank's copy of a parameter, ignored parameter or buffer that other ranks have as well.

    of_shard: other ranks have it only if they have the same place in their shard group. must_be:
    a `tensor` that is None differs from a copy, as a buffer that is None does. Else that is not
    compared: rows that are to be gathered, or a tensor without values.
    """

    what: str
    name: str
    tensor: Tensor | None
    of_shard: bool = False
    must_be: bool = False


@dataclass(frozen=True)
class Difference:
    """A tensor whose copies on `ranks` differ from those of most ranks, the `others`.

    Those are the lowest ranks, if two kinds are equally many.
    """

    what: str
    name: str
    ranks: tuple[int, ...]
    others: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.what} {self.name!r} on {_ranks(self.ranks)} and on {_ranks(self.others)}"


def checksum(tensor: Tensor) -> Tensor:
    """A checksum of the bits of `tensor`, its shape and its dtype: int64 `()` on its device.

    A sum of words times odd random numbers, modulo 2^64: a difference in one word always shows,
    and one in several words is missed once in 2^62.
    """
    (words,) = words_of(tensor.detach().contiguous())
    seed = zlib.crc32(f"{tensor.dtype} {tuple(tensor.shape)}".encode())
    total = torch.full((), seed, dtype=torch.int64, device=tensor.device)
    factors = _factors(tensor.device)
    for chunk in words.split(_CHUNK):
        part, odd = chunk.to(torch.int64), factors[: chunk.numel()]
        # CUDA has no integer dot product, which on the CPU takes half the time of the two.
        part = (part * odd).sum() if part.is_cuda else torch.dot(part, odd)
        total = total * 0x5851F42D4C957F2D + part
    return total


@cache
def _factors(device: torch.device) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randint(-(2**63), 2**63 - 1, (_CHUNK,), generator=generator, device="cpu")
    return (drawn | 1).to(device)


def copies_of(bindings: Bindings) -> Iterator[Copy]:
    """This rank's copies, in an order that all ranks have."""
    replicated_mesh = len(bindings.group.mesh_shape) > 1
    for shard in distinct(bindings.shards):
        layout = shard.layout
        if layout.ignored:
            yield Copy("ignored parameter", layout.fqn, shard.current())
        elif isinstance(shard, ResidentShard):
            stale = shard.stale
            yield Copy("parameter", layout.fqn, None if stale else shard.full)
        elif not layout.sharded:
            yield Copy("parameter", layout.fqn, shard.current())
        elif replicated_mesh:
            shard.current()
            yield Copy("parameter", layout.fqn, shard.local, of_shard=True)
    for name in bindings.buffers:
        yield Copy("buffer", name, bindings.buffer(name), must_be=True)


def differences(
    bindings: Bindings, leave_out: Collection[str] = (), given: Iterable[Copy] | None = None
) -> list[Difference]:
    """The tensors whose copies differ, on every rank the same list; one exchange.

    Those named in `leave_out`, the same on every rank, may differ. `given` are this rank's copies,
    of the same names on each; None: all of `copies_of`.
    """
    group = bindings.group
    if group.size == 1 or group.backend == "fake":
        return []
    with bindings.agreement.part() as part, torch.no_grad():
        here = copies_of(bindings) if given is None else given
        copies = [copy for copy in here if copy.name not in leave_out]
        part.same += [copy.name for copy in copies]
        sums = [torch.tensor(group.shard.rank, device="cpu"), *map(_sum_of, copies)]
        sent = torch.stack([each.to(group.device) for each in sums])
    if not copies:
        return []
    try:
        by_rank = group.gather_tensor(sent).tolist()
    except RuntimeError as error:
        raise CollectiveError(
            f"rank {group.rank} of {group.size} compares copies of parameters and buffers, but "
            "another rank died, raised an error, or did not get here within "
            f"{group.timeout.total_seconds():g} s ({error})"
        ) from error
    found = []
    for index, copy in enumerate(copies, start=1):
        alike: dict[int, dict[int, int]] = {}  # by place in the shard group, then by rank
        for rank, row in enumerate(by_rank):
            alike.setdefault(row[0] if copy.of_shard else 0, {})[rank] = row[index]
        for sums_by_rank in alike.values():
            found += _differing(copy, sums_by_rank)
    return found


def _sum_of(copy: Copy) -> Tensor:
    if copy.tensor is None:
        return torch.tensor(_MISSING if copy.must_be else _STALE, device="cpu")
    return checksum(copy.tensor)


def _differing(copy: Copy, sums: dict[int, int]) -> list[Difference]:
    """The difference between the copies of some ranks, by their checksums; [] if there is none."""
    if len(set(sums.values())) == 1 or _STALE in sums.values():
        return []
    kinds: dict[int, list[int]] = {}
    for rank, total in sums.items():
        kinds.setdefault(total, []).append(rank)
    others = max(kinds.values(), key=len)  # the first of equally many
    ranks = tuple(rank for rank in sums if rank not in others)
    return [Difference(copy.what, copy.name, ranks, tuple(others))]


_DIFFER = "copies of one tensor differ between ranks"


_MEND = (
    "something changed them on some ranks only, such as a write by rank, another seed, or "
    "gradients that were not averaged; load a checkpoint, or broadcast the right copy"
)


def message_of(found: list[Difference], what: str = _DIFFER, advice: str = _MEND) -> str:
    """What an error or a warning says of differences."""
    return f"{what}: {some_of([str(one) for one in found], ', ')}; {advice}"


def require_equal(
    bindings: Bindings,
    leave_out: Collection[str] = (),
    given: Iterable[Copy] | None = None,
    what: str = _DIFFER,
    advice: str = _MEND,
) -> None:
    """Check that there are no `differences`."""
    if found := differences(bindings, leave_out, given):
        ranks = {one.name: one.ranks for one in found}
        with bindings.agreement.part():  # in which all ranks see that all raise it
            raise ReplicaError(message_of(found, what, advice), ranks)


def require_one_model(bindings: Bindings, model: nn.Module) -> None:
    """Check that all ranks came with the same weights, of which each keeps its shard.

    Not compared are ignored parameters, which are each rank's own, and tensors that a rank has on
    meta. One exchange.
    """
    params = dict(model.named_parameters(remove_duplicate=False))
    names = [shard.layout.fqn for shard in distinct(bindings.shards) if not shard.layout.ignored]
    whole: list[tuple[str, str, Tensor]] = [("parameter", name, params[name]) for name in names]
    whole += [("buffer", name, buffer) for name, buffer in model.named_buffers()]
    copies = [Copy(what, name, None if value.is_meta else value) for what, name, value in whole]
    require_equal(
        bindings,
        given=copies,
        what="the ranks came with different weights",
        advice="each would train its shard of another model. Pass sync_module_states=True in the "
        "policy to take rank 0's, or build the model from one seed or checkpoint on all ranks "
        "(write buffers that shall differ after graphshard.compile)",
    )


def require_one_source(bindings: Bindings, values: Mapping[str, Tensor | None]) -> None:
    """Check that all ranks load the same whole parameters, of which each keeps its shard.

    Buffers and ignored parameters may differ: each rank has its own. A DTensor is not compared; a
    parameter without an entry in `values` keeps its own.
    """
    copies = []
    for shard in distinct(bindings.shards):
        value = values.get(shard.layout.fqn)
        if not shard.layout.ignored:
            own = isinstance(value, DTensor)
            copies.append(
                Copy("parameter", shard.layout.fqn, None if own else value, must_be=not own)
            )
    require_equal(
        bindings,
        given=copies,
        what="the ranks load different weights",
        advice="each would keep its shard of another model. Pass one state dict on all ranks, or "
        "rank 0's alone: load_full_state_dict(state_dict if rank == 0 else None)",
    )


def names_matching(bindings: Bindings, leave_out: Any) -> frozenset[str]:
    """The parameters and buffers whose whole name a regular expression of `leave_out` matches."""
    expressions = require_names("leave_out", leave_out, "a regular expression")
    names = [shard.layout.fqn for shard in distinct(bindings.shards)] + [*bindings.buffers]
    matching: set[str] = set()
    for expression in expressions:
        try:
            fitting = {name for name in names if re.fullmatch(expression, name)}
        except re.error as error:
            raise PolicyError(
                f"leave_out={expression!r} is no regular expression ({error})"
            ) from None
        if not fitting:
            raise PolicyError(f"leave_out={expression!r} matches no parameter and no buffer")
        matching |= fitting
    return frozenset(matching)


def _ranks(ranks: tuple[int, ...]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {some_of([str(rank) for rank in ranks], ', ')}"

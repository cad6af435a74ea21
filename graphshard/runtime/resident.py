"""SHARD_OPTIMIZER: every rank keeps all rows of a parameter and updates its own; see README.md.

A parameter that is not split along dim 0 keeps the rank's part behind the whole.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import PlanError
from graphshard.planning.layout import ParamLayout
from graphshard.planning.slabs import pack
from graphshard.runtime.agreement import UNCHANGED, Agreement
from graphshard.runtime.group import Group
from graphshard.runtime.shards import Shard
from graphshard.torch_private import compat as torch_compat


def host_memory(sizes: Sequence[int], *, pinned: bool) -> list[Tensor]:
    """Uninitialised uint8 `(bytes,)` of these sizes, in slabs (see `graphshard.planning.slabs`).

    Each has a storage of its own, so that saving or copying one does not take its slab with it. A
    slab lives as long as one of them.
    """
    slabs = pack(sizes)
    kind: Any = {"dtype": torch.uint8, "device": "cpu"}
    blocks = [torch.empty(size, pin_memory=pinned, **kind) for size in slabs.sizes]
    return [
        _piece(blocks[slab], start, size) if size else torch.empty(0, **kind)
        for size, (slab, start) in zip(sizes, slabs.places, strict=True)
    ]


def _piece(block: Tensor, start: int, size: int) -> Tensor:
    memory: Any = (ctypes.c_ubyte * size).from_address(block.data_ptr() + start)
    memory.block = block  # torch keeps `memory` as long as the storage
    return torch.frombuffer(memory, dtype=torch.uint8)


_KEPT_FOR = 2
"""Gathers after a call without a sign at which a copy is made: its own, and the next step's."""


class ResidentShard(Shard):
    """A parameter that this rank stores whole, of which it updates its own rows.

    full: the parameter and its padding, `(W * ceil(d0/W), ...)`, in which `storage` and `local` are
        views of this rank's rows; or the parameter, with `storage` behind it in the same memory.
    """

    def __init__(self, layout: ParamLayout, group: Group, model_param: nn.Parameter) -> None:
        self.full = torch.empty(0, device="cpu")
        self._gathered_versions: tuple[int, ...] | None = None  # when all rows were current
        self._grad: weakref.ref[Tensor] | None = None  # the `.grad` that backward left
        self._gathered_rows: Tensor | None = None  # a copy of this rank's rows at the last gather
        self._gathers = _KEPT_FOR  # since a call that found no sign of a change
        super().__init__(layout, group, model_param)

    @property
    def stale(self) -> bool:
        """Whether there is a sign that rows changed since they were gathered."""
        if self.layout.world_size == 1:
            return False
        self.current()  # adopts a parameter that the user put in place of ours
        grad = None if self._grad is None else self._grad()
        return self._gathered_versions != self._versions() or self.param.grad is not grad

    def program_input(self, stale: Collection[str]) -> Tensor:
        """This rank's padded rows if the parameter is in `stale`, else the whole `(d0, ...)`."""
        rows = self.current()
        return rows if self.layout.fqn in stale else self.full.narrow(0, 0, self.layout.shape[0])

    def note_gathered(self) -> None:
        """Note that all rows are current now, and copy this rank's rows if that may save a gather.

        It may if a call found no sign of a change in the time of the last few gathers.
        """
        self._gathered_versions = self._versions()
        self._note_grad()
        self._gathers += 1
        if self._gathers > _KEPT_FOR:
            self._gathered_rows = None
        elif self._gathered_rows is None:
            # Or no later call could write it outside of that mode.
            with torch.inference_mode(False):
                self._gathered_rows = self.storage.clone()
        else:
            self._gathered_rows.copy_(self.storage)

    def rows_to_compare(self) -> tuple[Tensor, Tensor] | None:
        """This rank's padded rows now and at the last gather; None if no copy of these was kept.

        Called where no sign of a change was seen. So the next gather keeps a copy.
        """
        self._gathers = 0
        return None if self._gathered_rows is None else (self.storage, self._gathered_rows)

    def forget_gathers(self) -> None:
        """Forget what is known of rows that were gathered, as at the beginning."""
        self._gathered_versions = self._gathered_rows = None
        self._gathers = _KEPT_FOR

    def note_changed(self) -> None:
        """Note that some rank's rows may have changed."""
        self._gathered_versions = None

    def hand_out(self, value: DTensor) -> None:
        """Let writes into `value`, which a state dict holds, be seen.

        A detached DTensor has a local tensor with a version counter of its own. One that is
        detached from `local` shares its counter, as do all views of it, however long they live.
        """
        shown, local = self.local_of(value), self.local
        if shown is not local and shown.device == local.device and shown.is_set_to(local):
            torch_compat.set_local_tensor(value, self.local.detach())

    def note_values(self) -> None:
        """See `Shard.note_values`; the other ranks' rows are stale, since they got values too."""
        super().note_values()
        self.note_changed()

    def add_to_grad(self, reduced: Tensor) -> None:
        """See `Shard.add_to_grad`; a gradient by itself does not make rows stale."""
        unchanged = self.param.grad is (None if self._grad is None else self._grad())
        super().add_to_grad(reduced)
        if unchanged:
            self._note_grad()

    def _note_grad(self) -> None:
        grad = self.param.grad
        self._grad = None if grad is None else weakref.ref(grad)

    def _versions(self) -> tuple[int, ...]:
        """Counts that change with every write to this rank's rows that can be noticed."""
        return (*self.changes(), self.local._version)

    # -- layout -------------------------------------------------------------------------------

    def _new_storage(self, memory: Tensor | None = None) -> Tensor:
        layout, elements = self.layout, self.layout.shard_numel
        size = layout.shard_bytes // layout.dtype.itemsize
        whole = torch.zeros(size, dtype=layout.dtype, device=self.group.device)
        start = self.rank * elements if layout.is_prefix else layout.numel
        shape = layout.gathered_shape if layout.is_prefix else layout.shape
        self.full = whole[: prod(shape)].view(shape)
        return whole[start : start + elements].view(layout.shard_shape)

    def _is_storage(self, local: Tensor) -> bool:
        return False  # only a view of the buffer is

    def _adopt(self, param: nn.Parameter) -> None:
        super()._adopt(param)
        self.note_changed()


def watch_state_dicts(module: nn.Module, shards: Mapping[str, Shard]) -> None:
    """Let resident shards watch the tensors that `module.state_dict()` returns.

    A checkpoint may be read straight into these, which does not change the parameter's version.
    """
    resident = {name: s for name, s in shards.items() if isinstance(s, ResidentShard)}
    if not resident:
        return

    def watch_values(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
        for name, shard in resident.items():
            value = state.get(prefix + name)
            if isinstance(value, DTensor):
                shard.hand_out(value)

    module.register_state_dict_post_hook(watch_values)


class IgnoredParameter(Shard):
    """An ignored parameter: the model's `nn.Parameter` object, whole, with unreduced gradients.

    One on the meta device is replaced by a plain parameter on the group's device, which gets its
    values as sharded parameters do.
    """

    def __init__(self, layout: ParamLayout, group: Group, model_param: nn.Parameter) -> None:
        single = Group(None, 0, 1, group.device, check=group.check)
        if model_param.device.type == "meta":
            super().__init__(layout, single, model_param)
            return
        if model_param.device != group.device:
            raise PlanError(
                f"the ignored parameter {layout.fqn!r} lies on {model_param.device}, where the "
                f"policy leaves it, and the model runs on {group.device}; move it there first"
            )
        self.layout = layout
        self.group = single
        self.device = group.device
        self.holders = []
        self.ready = True
        self.rank = 0
        self.part_shape = layout.shape
        self.whole = True
        self.param = model_param
        self.local = self.storage = model_param.detach()

    def add_to_grad(self, reduced: Tensor) -> None:
        """See `Shard.add_to_grad`; adds a copy, since the gradient may be a value of backward."""
        super().add_to_grad(reduced.clone(memory_format=torch.contiguous_format))


def make_shards(
    layouts: Mapping[str, ParamLayout],
    group: Group,
    model_params: Mapping[str, nn.Parameter],
    *,
    on_host: bool = False,
) -> dict[str, Shard]:
    """One `Shard` per parameter, by each of its names.

    All names of a tied parameter have one layout. `on_host` stores shards in the host's memory, but
    for ignored parameters, which stay where they are.
    """
    by_fqn: dict[str, Shard] = {}
    memory = _memory_on_host(layouts, group) if on_host else {}
    for layout in layouts.values():
        if layout.fqn not in by_fqn:
            param = model_params[layout.fqn]
            if layout.ignored:
                by_fqn[layout.fqn] = IgnoredParameter(layout, group, param)
            elif layout.resident:
                by_fqn[layout.fqn] = ResidentShard(layout, group, param)
            else:
                by_fqn[layout.fqn] = Shard(layout, group, param, host_memory=memory.get(layout.fqn))
    return {name: by_fqn[layout.fqn] for name, layout in layouts.items()}


def _memory_on_host(layouts: Mapping[str, ParamLayout], group: Group) -> dict[str, Tensor]:
    """By the first name of a parameter that is sharded or replicated each step."""
    sizes = {
        layout.fqn: layout.shard_bytes
        for layout in layouts.values()
        if not layout.ignored and not layout.resident
    }
    pieces = host_memory(list(sizes.values()), pinned=group.device.type == "cuda")
    return dict(zip(sizes, pieces, strict=True))


class ResidentRows:
    """The resident parameters of a module that several ranks share: whether rows changed.

    Signs such as version counters tell of most writes, but not of one through `param.data`, and of
    none that torch did not make. So rows that show no sign are compared with a copy, and the ranks
    agree.

    shards: these parameters, each once.
    stale: whether each one has to be gathered before a program reads it, as of the last look.
    """

    def __init__(self, shards: Iterable[Shard], agreement: Agreement) -> None:
        self.shards = [
            s for s in shards if isinstance(s, ResidentShard) and s.layout.world_size > 1
        ]
        self.stale: tuple[bool, ...] = ()
        self._agreement = agreement
        self._failures = agreement.failures

    def look_for_signs(self) -> None:
        """Set `stale` by signs alone, which costs no reading of rows."""
        self.stale = tuple([shard.stale for shard in self.shards])

    def compare(self) -> None:
        """Set `stale` for a call that is about to run.

        A parameter that shows no sign is gathered nevertheless if no copy of its rows was kept, or
        if any rank finds a difference between such rows and their copies.
        """
        if self._failures != self._agreement.failures:
            # Some ranks may have looked for signs in a call that failed, and others did not.
            self._failures = self._agreement.failures
            for shard in self.shards:
                shard.forget_gathers()
        self.look_for_signs()
        if all(self.stale):
            return
        held = [s for s, stale in zip(self.shards, self.stale, strict=True) if not stale]
        pairs = []
        for shard in held:
            pair = shard.rows_to_compare()
            if pair is None:
                shard.note_changed()
            else:
                pairs.append(pair)
        if pairs and self._agreement.any_rank(_differ(pairs), UNCHANGED):
            for shard in held:
                shard.note_changed()
        self.look_for_signs()


def _differ(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether two tensors of a pair, equal in shape and dtype, differ in any bit."""
    words = [words_of(mine, other) for mine, other in pairs]
    if words[0][0].device.type == "cpu":
        return not all(torch.equal(mine, other) for mine, other in words)
    # The host waits once for all of them.
    return bool(torch.stack([torch.ne(mine, other).any() for mine, other in words]).any())


def words_of(*pair: Tensor) -> list[Tensor]:
    """The bits of contiguous tensors of one shape, as the widest integers that fit them all.

    A view of rows may begin where no wide integer does, and its copy elsewhere.
    """
    size = pair[0].element_size()
    flat = [tensor.view(-1).view(_INTEGERS.get(size, torch.int64)) for tensor in pair]
    wider = 8 // size if size < 8 else 1
    if any(words.numel() % wider or words.storage_offset() % wider for words in flat):
        return flat
    return [words.view(torch.int64) for words in flat]


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}

"""The methods of a sharded module that read and write its values."""

from __future__ import annotations

import os
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from graphshard.errors import RuntimeStateError
from graphshard.module.meta_init import initialize
from graphshard.state import load, save
from graphshard.state.checkpoints import background_group, load_checkpoint, save_checkpoint
from graphshard.state.matching import KeyRules
from graphshard.state.optim import optimizer_state_dict
from graphshard.state.optim_load import prepare_load

if TYPE_CHECKING:
    from graphshard.module.internals import _State


class StateMethods(nn.Module):
    """State dicts, optimizer state and files of a sharded module.

    Every method is called on all ranks alike, and an error on one is an error on all. A checkpoint
    is checked on all ranks before the first value is written: one that does not fit names its first
    wrong key or file and changes nothing.
    """

    _graphshard: _State

    # -- initial values -------------------------------------------------------------------------

    def init_weights(self, seed: int = 0) -> None:
        """Give a model that was on meta its initial values, unit by unit.

        Every module's own `reset_parameters` runs (for transformers models, `_init_weights`) in
        module order after `torch.manual_seed(seed)`, on full-size tensors of one unit at a time, of
        which each rank keeps its shard; ranks need not communicate. The random state of the caller
        is as before when it returns.

        Raises:
            RuntimeStateError: a module has parameters or buffers and no way to initialise them.
        """
        state = self._graphshard
        if not state.on_meta:
            raise RuntimeStateError(
                "init_weights is for models built on the meta device; this one came with weights"
            )
        initialize(state.programs.meta_model, state.bindings, state.on_meta, seed)

    # -- the model's state ----------------------------------------------------------------------

    def full_state_dict(self, *, rank0_only: bool = True, cpu: bool = True) -> dict[str, Tensor]:
        """The whole model's state dict: plain tensors under the model's names, copies of its own.

        Gathered tensor by tensor, so that a rank which does not keep it holds one at a time. A
        tied parameter is one tensor under each of its names.

        Args:
            rank0_only: rank 0 gets it, all others get {}. (FSDP1 gives it to all by default.)
            cpu: on the CPU. (FSDP1 leaves it on the device by default.)
        """
        state = self._graphshard
        return save.full_state_dict(self, state.bindings, rank0_only=rank0_only, cpu=cpu)

    def local_state_dict(self) -> dict[str, Tensor]:
        """This rank's shards and buffers as plain tensors under the model's names; not copied.

        A sharded parameter gives its shard, without padding; an empty one where this rank has no
        part of it. Fits only a group of the same size and plan.
        """
        return save.local_state_dict(self, self._graphshard.bindings)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As `nn.Module.load_state_dict`; values may be DTensors or full tensors.

        One name of a tied parameter is enough. Values are cast to the model's dtypes, floating
        point to floating point and integers to integers.

        Raises:
            CheckpointError: a key is missing or unexpected (if `strict`), or a shape or the kind
                of a dtype is not the model's; nothing was changed.
        """
        state = self._graphshard
        local_values = load.load_state_dict(self, state.bindings, state_dict, strict=strict)
        result = super().load_state_dict(local_values, strict=strict, assign=assign)
        for shard in state.shards:
            shard.current()
        return result

    def load_full_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Take values from a plain state dict of the whole model.

        Args:
            state_dict: full tensors on any device, under the model's names, on every rank; or on
                rank 0 only, with None or {} on the others, to which it is sent piece by piece.

        Raises:
            CheckpointError: a name, a shape or the kind of a dtype does not fit; nothing was
                changed.
        """
        state = self._graphshard
        load.load(
            self, state.bindings, lambda: load.state_dict_source(state_dict) if state_dict else None
        )
        state.fill_buffers()

    def load_local_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the result of `local_state_dict` of as many ranks with the same plan.

        Raises:
            CheckpointError: a name, shape or dtype is not this rank's; nothing was changed.
        """
        save.load_local_state_dict(self, self._graphshard.bindings, dict(state_dict))

    # -- optimizer state ------------------------------------------------------------------------

    def optimizer_state_dict(
        self,
        optim: torch.optim.Optimizer,
        *,
        kind: str = "sharded",
        rank0_only: bool = True,
        cpu: bool = True,
    ) -> dict[str, Any]:
        """The state of `optim` by parameter names, as torch.distributed.checkpoint has it.

        `{"state": {name: {"exp_avg": ..., "step": ...}}, "param_groups": [{"params": [names],
        ...}]}`. A tied parameter has its first name.

        Args:
            optim: made from `parameters()` of this module.
            kind: "sharded": DTensors, not copied. "full": whole tensors, gathered one by one.
                "local": this rank's parts as plain tensors, not copied.
            rank0_only: of "full": rank 0 gets it, all others get {}.
            cpu: of "full": on the CPU.

        Raises:
            CheckpointError: `optim` holds a parameter that is not this module's.
        """
        bindings = self._graphshard.bindings
        return optimizer_state_dict(
            self, bindings, optim, form=kind, rank0_only=rank0_only, cpu=cpu
        )

    def load_optimizer_state_dict(
        self,
        optim: torch.optim.Optimizer,
        state_dict: Mapping[str, Any] | None,
        *,
        kind: str | None = None,
    ) -> None:
        """Put state by parameter names into `optim`, which need not have stepped yet.

        A group of `optim` takes its settings from the group of the checkpoint that has its
        parameters, in whatever order groups and parameters stand.

        Args:
            optim: made from `parameters()` of this module.
            state_dict: of DTensors or whole tensors; whole ones also on rank 0 only, with None or
                {} on the others.
            kind: "local" if it holds local tensors; else it tells by itself.

        Raises:
            CheckpointError: a parameter is missing or unknown, or a tensor has another shape or
                kind of dtype than its parameter; nothing was changed.
        """
        prepare_load(self, self._graphshard.bindings, optim, state_dict, form=kind)()

    # -- checkpoints ----------------------------------------------------------------------------

    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        optim: torch.optim.Optimizer | None = None,
        *,
        background: bool = False,
    ) -> Future[Any] | None:
        """Write model, optimizer and random state with torch.distributed.checkpoint.

        Every rank writes its shards into directory `path`, which any number of ranks, and
        `fully_shard`, can read: {"model": state dict, "optim": state by names, "rng": {rank: ...}}.

        Args:
            path: a directory all ranks share.
            optim: made from `parameters()` of this module; or None.
            background: write from copies on the CPU while training goes on. Wait for the result
                before the next save, and at the end.

        Returns:
            In the background, what to wait for.

        Raises:
            CheckpointError: a rank cannot write.
        """
        bindings = self._graphshard.bindings
        group = None
        if background:
            # One of its own: two threads may not share a group.
            attributes = vars(self)
            if "_graphshard_background" not in attributes:
                attributes["_graphshard_background"] = background_group(bindings.group)
            group = attributes["_graphshard_background"]
        return save_checkpoint(self, bindings, path, optim, background=group)

    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        optim: torch.optim.Optimizer | None = None,
        *,
        strict: bool = True,
    ) -> tuple[list[str], list[str]]:
        """Take model, optimizer and random state from a checkpoint of torch.distributed.

        Written by `save_checkpoint`, or by any program that saved a model's state dict (by itself
        or under a key) and optimizer state by names, on any number of ranks. Each rank reads its
        part into memory of its own first (of the size of its shards, on the CPU), and takes it
        over once all ranks have read all. Random states are restored on as many ranks as wrote
        them, and otherwise left, with a warning. Metadata and what is no tensor are pickles: load
        only checkpoints you trust.

        Args:
            path: the directory.
            optim: to be given its state, too; it need not have stepped yet.
            strict: refuse missing and unexpected keys of the model.

        Returns:
            Names the checkpoint lacks, and keys the model lacks; both empty if `strict`.

        Raises:
            CheckpointError: a file is missing, cut off or damaged, or a key, shape or kind of dtype
                does not fit; nothing was changed.
        """
        state = self._graphshard
        matching = load_checkpoint(self, state.bindings, path, optim, strict=strict)
        state.fill_buffers()
        return matching.missing, matching.unexpected

    # -- safetensors ----------------------------------------------------------------------------

    def load_safetensors(
        self, path: str | os.PathLike[str], *, strict: bool = True, read: str = "each"
    ) -> tuple[list[str], list[str]]:
        """Take values from a safetensors checkpoint without ever holding the model.

        A rank reads its own part of each tensor, 32 MiB at a time. The model may be on meta:
        buffers that no checkpoint has are then computed by the modules' own initialisers. Names
        with and without the base model's prefix ("model.", as transformers has them) find each
        other, one name of a tied parameter is enough, and values are cast as by `load_state_dict`.

        Args:
            path: a .safetensors file, an index (.json), or a directory that holds one or the other.
            strict: refuse missing and unexpected keys.
            read: "each": every rank reads the files. "first": rank 0 reads and sends, for files
                that only it has; `path` does not matter on the others.

        Returns:
            Names the checkpoint lacks, and keys the model lacks; both empty if `strict`.

        Raises:
            CheckpointError: a file is missing, cut off or damaged; a key is missing or unexpected
                (if `strict`); a shape or the kind of a dtype does not fit. Nothing was changed.
        """
        state = self._graphshard
        if read not in ("each", "first"):
            raise RuntimeStateError(f'read must be "each" or "first"; got {read!r}')
        reads = read == "each" or state.bindings.group.rank == 0
        rules = KeyRules.of(state.programs.meta_model)
        matching = load.load(
            self,
            state.bindings,
            lambda: load.files_source(path) if reads else None,
            strict=strict,
            rules=rules,
        )
        state.fill_buffers()
        return matching.missing, matching.unexpected

    def save_safetensors(
        self,
        path: str | os.PathLike[str],
        *,
        max_shard_bytes: int | None = None,
        dtype: torch.dtype | None = None,
    ) -> list[Path]:
        """Write the whole model as safetensors; rank 0 holds one tensor at a time.

        Args:
            path: a .safetensors file, or a directory, which gets `model.safetensors`, or several
                files and their index as transformers names them.
            max_shard_bytes: of one file, unless a single tensor takes more. None: one file.
            dtype: of floating point values in the files. None: the model's own.

        Returns:
            The files written, on rank 0.

        Raises:
            CheckpointError: rank 0 cannot write, or a dtype is not known to the format.
        """
        bindings = self._graphshard.bindings
        return save.save_safetensors(
            self, bindings, path, max_shard_bytes=max_shard_bytes, dtype=dtype
        )

    def save_pretrained(
        self,
        path: str | os.PathLike[str],
        *,
        max_shard_bytes: int | None = 5 * 10**9,
        dtype: torch.dtype | None = None,
    ) -> list[Path]:
        """Write a directory that transformers' `from_pretrained` reads; see `save_safetensors`.

        Weights keep the model's own names, also where transformers has other ones on disk.

        Raises:
            CheckpointError: the model has no configuration, or rank 0 cannot write.
        """
        state = self._graphshard
        return save.save_pretrained(
            self,
            state.bindings,
            state.programs.meta_model,
            path,
            max_shard_bytes=max_shard_bytes,
            dtype=dtype,
        )

"""The methods of a sharded module that read and write its values."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

import graphshard.state as states
from graphshard.errors import CheckpointError, ReplicaWarning, RuntimeStateError
from graphshard.module.internals import _State
from graphshard.module.meta_model import initialize
from graphshard.module.on_all_ranks import on_all_ranks
from graphshard.runtime.calls import listed


class StateMethods(nn.Module):
    """State dicts, optimizer state and files of a sharded module.

    Every method is called on all ranks alike, and an error on one is an error on all. A checkpoint
    is checked and read on all ranks before the first value is written: one that does not fit names
    its first wrong key or file and changes nothing. Ranks that make different calls, or give other
    arguments, get a `FingerprintError` that names both.
    """

    _graphshard: _State

    # -- initial values -------------------------------------------------------------------------

    def init_weights(self, seed: int = 0) -> None:
        """Give a model that was on meta its initial values, unit by unit.

        Every module's own `reset_parameters` runs (for transformers models, `_init_weights`) in
        module order after `torch.manual_seed(seed)`, on full-size tensors of one unit at a time, of
        which each rank keeps its shard; ranks need not communicate. The random state of the caller
        is as before when it returns. A method of this name that the model itself has is not called.

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

    @on_all_ranks("rank0_only", "cpu")
    def full_state_dict(self, *, rank0_only: bool = True, cpu: bool = True) -> dict[str, Tensor]:
        """The whole model's state dict: plain tensors under the model's names, copies of its own.

        Gathered tensor by tensor, so that a rank which does not keep it holds one at a time. A
        tied parameter is one tensor under each of its names.

        Args:
            rank0_only: rank 0 gets it, all others get {}. (FSDP1 gives it to all by default.)
            cpu: on the CPU. (FSDP1 leaves it on the device by default.)
        """
        bindings = self._graphshard.bindings
        return states.save.full_state_dict(self, bindings, rank0_only=rank0_only, cpu=cpu)

    @on_all_ranks("max_bytes", "dtype")
    def iter_full(
        self, *, max_bytes: int | None = None, dtype: torch.dtype | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Every name of `full_state_dict()` with its tensor, one after another, on every rank.

        For whoever takes weights in pieces, such as an inference engine:
        `engine.load_weights(sharded.iter_full())`. Tensors are copies on the module's device, each
        in memory of its own. A tied parameter comes under each of its names. Neighbours that fit
        are gathered in one message. All ranks must iterate alike, to the end or to the same tensor:
        a rank that stops earlier and calls something else is an error on all.

        Args:
            max_bytes: the most bytes in use besides the shards: messages, and the tensor handed out
                before, which a `for` loop holds until it has the next one. If that one and the next
                do not fit together, it counts as yours: `del` it at the end of the loop's body.
                None: as much as the largest tensors need.
            dtype: of floating point values, cast before they are sent. None: the model's own.

        Raises:
            CheckpointError: a tensor takes more than `max_bytes`; names it.
            CollectiveError: from the iterator, too: a rank stopped, or died.
        """
        return states.save.iter_full(
            self, self._graphshard.bindings, max_bytes=max_bytes, dtype=dtype
        )

    def local_state_dict(self) -> dict[str, Tensor]:
        """This rank's shards and buffers as plain tensors under the model's names; not copied.

        A sharded parameter gives its shard, without padding; an empty one where this rank has no
        part of it. Fits only a group of the same size and plan.
        """
        return states.save.local_state_dict(self, self._graphshard.bindings)

    @on_all_ranks("strict", "assign")
    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """As `nn.Module.load_state_dict`; values may be DTensors or full tensors.

        One name of a tied parameter is enough, and it stays tied: the last name counts, as where
        values are copied. Values are cast to the model's dtypes, floating
        point to floating point and integers to integers.

        Raises:
            CheckpointError: a key is missing or unexpected (if `strict`), or a shape or the kind
                of a dtype is not the model's; nothing was changed.
        """
        state = self._graphshard
        local_values = states.load.load_state_dict(self, state.bindings, state_dict, strict=strict)
        with state.bindings.agreement.part():
            result = super().load_state_dict(local_values, strict=strict, assign=assign)
            for shard in state.shards:
                shard.tie()  # `assign` makes a parameter for each name
                shard.current()
        return result

    @on_all_ranks()
    def load_full_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        """Take values from a plain state dict of the whole model.

        Args:
            state_dict: full tensors on any device, under the model's names, on every rank; or on
                rank 0 only, with None or {} on the others, to which it is sent piece by piece.

        Raises:
            CheckpointError: a name, a shape or the kind of a dtype does not fit; nothing was
                changed.
        """
        states.load.load(
            self,
            self._graphshard.bindings,
            lambda: states.load.state_dict_source(state_dict) if state_dict else None,
        )
        self._graphshard.fill_buffers()

    @on_all_ranks()
    def load_local_state_dict(self, state_dict: Mapping[str, Tensor]) -> None:
        """Load the result of `local_state_dict` of as many ranks with the same plan.

        Raises:
            CheckpointError: a name, shape or dtype is not this rank's; nothing was changed.
        """
        states.save.load_local_state_dict(self, self._graphshard.bindings, dict(state_dict))

    # -- optimizer state ------------------------------------------------------------------------

    @on_all_ranks("optim", "kind", "rank0_only", "cpu")
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
        return states.optim.optimizer_state_dict(
            self, bindings, optim, form=kind, rank0_only=rank0_only, cpu=cpu
        )

    @on_all_ranks("optim", "kind")
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
        states.optim.prepare_load(self, self._graphshard.bindings, optim, state_dict, form=kind)()

    # -- copies ---------------------------------------------------------------------------------

    @on_all_ranks(leave_out=listed)
    def check_replicas(self, *, leave_out: str | Iterable[str] | None = None) -> None:
        """Check that what several ranks have a copy of is equal on them, bit for bit.

        Compared are buffers, parameters that the plan or `ignored` leaves whole on every rank, the
        whole copies of SHARD_OPTIMIZER (unless the next call gathers them anyway), and the shards
        of HYBRID replicas. A rank reads its copies once; the ranks exchange 8 bytes for each.

        Args:
            leave_out: regular expressions; what one matches by its whole name may differ, as
                BatchNorm's running statistics do: r".*running_(mean|var)".

        Raises:
            ReplicaError: copies differ; names the tensors and the ranks, on every rank.
            PolicyError: an expression matches nothing, or is none.
            RuntimeStateError: a parameter has no values yet, or is unsharded.
            CollectiveError: another rank died, or did not get here.
        """
        state = self._graphshard
        with state.bindings.agreement.part():
            if state.unsharded.open:
                raise RuntimeStateError(
                    f"parameter {min(state.unsharded.open)!r} is unsharded; leave the "
                    "unsharded() context before check_replicas()"
                )
            state.require_values(self)
            names = states.replicas.names_matching(state.bindings, leave_out)
        states.replicas.require_equal(state.bindings, names)

    def _compare_before_save(self, replicas: str | None) -> None:
        """Compare copies ahead of a save, without buffers that programs write on each rank."""
        state = self._graphshard
        if replicas not in ("warn", "error", None):
            with state.bindings.agreement.part():  # in which other ranks are that got another value
                raise RuntimeStateError(
                    f'replicas must be "warn", "error" or None; got {replicas!r}'
                )
        if replicas is None or state.unsharded.open:
            return
        leave_out = state.unfilled_buffers() | state.programs.written_buffers()
        if replicas == "error":
            states.replicas.require_equal(state.bindings, leave_out)
        elif found := states.replicas.differences(state.bindings, leave_out):
            # The caller of `save_checkpoint`, which `on_all_ranks` calls.
            warnings.warn(states.replicas.message_of(found), ReplicaWarning, stacklevel=4)

    # -- checkpoints ----------------------------------------------------------------------------

    @on_all_ranks("path", "optim", "scheduler", "scaler", "keep", "background", "replicas")
    def save_checkpoint(
        self,
        path: str | os.PathLike[str],
        optim: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        *,
        extra: Mapping[str, Any] | None = None,
        keep: int | None = None,
        background: bool = False,
        replicas: Literal["warn", "error"] | None = "warn",
    ) -> Future[None] | None:
        """Write a training state with torch.distributed.checkpoint: all that a restart needs.

        Every rank writes its shards into directory `path`, which any number of ranks, and
        `fully_shard`, can read: {"model": state dict, "optim": state by names, "scheduler": state,
        "scaler": state, "extra": {name: value}, "rng": {rank: random states}}. Random states are
        those of torch, Python's `random` and numpy's global generator, on every rank. A checkpoint
        that is there already stays whole until the files of all ranks are on disk. One rename then
        replaces it. A save that fails or is killed leaves the old one.

        Args:
            path: a directory all ranks share.
            optim: made from `parameters()` of this module; or None.
            scheduler: a learning-rate scheduler, or another object with `state_dict` and
                `load_state_dict`; or None.
            scaler: a `torch.amp.GradScaler`, or another such object; or None.
            extra: more of the state by name, such as {"step": 100, "loader": loader}: such objects,
                tensors, and plain data (numbers, strings, lists, tuples and dicts of them). Rank
                0's values are kept; of DTensors every rank's part, and of names that rank 0 has
                not, the first rank's that has them.
            keep: after the save, remove all but this many of the checkpoints beside `path` whose
                names differ from its name in the last number only, as "step-1000" and "step-2000".
                None: keep all.
            background: write from copies on the CPU while training goes on. The next save or load
                waits for the end of this one and raises its error, unless you had it from the
                result; wait for the last one yourself.
            replicas: what to do if copies of one tensor differ between ranks, of which the
                checkpoint gets one; see `check_replicas`. "warn" saves nevertheless, "error" raises
                before anything is written, None does not look. Buffers that the model's forward
                writes, such as BatchNorm's statistics, may differ.

        Returns:
            In the background, what to wait for; its `result()` raises `CheckpointError` if a rank
            could not write.

        Raises:
            CheckpointError: a rank cannot write, an object of another kind stands in `extra` or in
                a state, or the last save in the background failed.
            ReplicaError: copies differ, and `replicas` is "error".
        """
        self._compare_before_save(replicas)
        saving = states.checkpoints.save_checkpoint(
            self,
            self._graphshard.bindings,
            path,
            optim,
            scheduler,
            scaler,
            extra,
            keep=keep,
            background=self._background_group if background else None,
            last=vars(self).pop("_graphshard_saving", None),
        )
        if saving is not None:
            vars(self)["_graphshard_saving"] = saving
        return saving

    def _background_group(self) -> Any:
        """The process group of saves in the background: two threads may not share one."""
        attributes = vars(self)
        if "_graphshard_background" not in attributes:
            attributes["_graphshard_background"] = states.checkpoints.background_group(
                self._graphshard.bindings.group
            )
        return attributes["_graphshard_background"]

    @on_all_ranks("path", "optim", "scheduler", "scaler", "strict", "trust")
    def load_checkpoint(
        self,
        path: str | os.PathLike[str],
        optim: torch.optim.Optimizer | None = None,
        scheduler: Any = None,
        scaler: Any = None,
        *,
        extra: MutableMapping[str, Any] | None = None,
        strict: bool = True,
        trust: bool = False,
    ) -> tuple[list[str], list[str]]:
        """Take a training state from a checkpoint of torch.distributed.

        Written by `save_checkpoint`, or by any program that saved a model's state dict (by itself
        or under a key) and optimizer state by names, on any number of ranks. Each rank reads its
        part into memory of its own first (of the size of its shards, on the CPU), and takes it
        over once all ranks have read all. The files of `save_checkpoint` have checksums, which are
        compared before. What is passed must be in the checkpoint; what is not passed is not loaded.

        A rank takes the random states that the rank of its number saved. On more ranks than saved,
        the others are seeded from the states of rank 0 and their own number. Either change of the
        number of ranks is told by a warning on rank 0.

        Args:
            path: the directory.
            optim: to be given its state, too; it need not have stepped yet.
            scheduler: to be restored in place by `load_state_dict`; or None.
            scaler: the same.
            extra: filled in place. An object with `load_state_dict` is restored by it, a tensor is
                written where it lies, and another value is replaced. An empty dict gets every value
                the checkpoint has, objects as their state dicts.
            strict: refuse missing and unexpected keys of the model, names of the checkpoint's
                `extra` that no rank passes, and the state of another class of scheduler or scaler.
            trust: accept pickles of more than tensors and plain data, which may run code of whoever
                wrote the checkpoint.

        Returns:
            Names the checkpoint lacks, and keys the model lacks; both empty if `strict`.

        Raises:
            CheckpointError: a file is missing, cut off, damaged or of another save, or a key, shape
                or kind of dtype does not fit, a state is missing or its object refuses it, or a
                pickle needs `trust`; nothing was changed.
        """
        matching = states.checkpoints.load_checkpoint(
            self,
            self._graphshard.bindings,
            path,
            optim,
            scheduler,
            scaler,
            extra,
            strict=strict,
            trust=trust,
            last=vars(self).pop("_graphshard_saving", None),
        )
        self._graphshard.fill_buffers()
        return matching.missing, matching.unexpected

    # -- safetensors ----------------------------------------------------------------------------

    @on_all_ranks("strict", "read")
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

        def source() -> states.load.TensorSource | None:
            if read not in ("each", "first"):
                raise RuntimeStateError(f'read must be "each" or "first"; got {read!r}')
            reads = read == "each" or state.bindings.group.rank == 0
            return states.load.files_source(path) if reads else None

        rules = states.load.KeyRules.of(state.programs.meta_model)
        matching = states.load.load(self, state.bindings, source, strict=strict, rules=rules)
        state.fill_buffers()
        return matching.missing, matching.unexpected

    @on_all_ranks("path", "max_shard_bytes", "dtype")
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
        return states.save.save_safetensors(
            self, bindings, path, max_shard_bytes=max_shard_bytes, dtype=dtype
        )

    @on_all_ranks("path", "max_shard_bytes", "dtype", "merge", "max_shard_size")
    def save_pretrained(
        self,
        path: str | os.PathLike[str],
        *,
        max_shard_bytes: int | None = 5 * 10**9,
        dtype: torch.dtype | None = None,
        merge: bool = False,
        max_shard_size: int | str | None = None,
        state_dict: Mapping[str, Any] | None = None,
        is_main_process: bool = True,
        save_function: Any = None,
        safe_serialization: bool = True,
        **others: Any,
    ) -> list[Path]:
        """Write a directory that transformers' `from_pretrained` reads; see `save_safetensors`.

        Weights keep the model's own names, also where transformers has other ones on disk. Of a
        model of peft the adapters are written, for `PeftModel.from_pretrained`. All ranks call
        this, and rank 0 writes.

        Args:
            path: the directory.
            max_shard_bytes: as of `save_safetensors`; adapters are one file.
            dtype: likewise.
            merge: of a model of peft, write the base model with the active adapters merged into
                its weights, for transformers' `from_pretrained`. This module keeps its adapters.
            max_shard_size: in place of `max_shard_bytes`, as in transformers: "5GB", or bytes.
            state_dict: on rank 0, whole tensors to write in place of the module's, such as
                `accelerator.get_state_dict(model)`; elsewhere what that call gives there, {}.
            is_main_process: True on rank 0, as in scripts for Accelerate.
            save_function: none but Accelerate's and torch's, which are for pickles and not called.
            safe_serialization: True.
            **others: keywords of transformers' and peft's methods that ask for nothing.

        Raises:
            CheckpointError: the model has no configuration, peft cannot save or merge its
                adapters, a keyword of transformers could have no effect, or rank 0 cannot write.
        """
        state = self._graphshard
        model, agreement = state.programs.meta_model, state.bindings.agreement
        given = states.save.given_weights(
            agreement,
            state_dict,
            is_main_process=is_main_process,
            save_function=save_function,
            safe_serialization=safe_serialization,
            others=others,
        )
        with agreement.part():
            if max_shard_size is not None:
                max_shard_bytes = states.save.checked_size(max_shard_size)
            if given is not None and (merge or dtype is not None):
                raise CheckpointError(
                    "save_pretrained: state_dict is written as it is, so that merge= and "
                    "dtype= have no effect with it; leave one or the other out"
                )
        if "peft" in sys.modules:
            from graphshard.hf import adapters

            module: Any = self
            if adapters.has_adapters(module):
                if merge:
                    return adapters.save_merged(
                        module, path, max_shard_bytes=max_shard_bytes, dtype=dtype
                    )
                return adapters.save_adapters(module, path, dtype=dtype, given=given)
        return states.save.save_pretrained(
            self,
            state.bindings,
            model,
            path,
            max_shard_bytes=max_shard_bytes,
            dtype=dtype,
            merge=merge,
            given=given,
        )

"""Save a sharded module: state dicts of full or local tensors, and safetensors files.

Also its whole tensors one after another, for whoever takes the weights of a model in pieces.
"""

from __future__ import annotations

import copy
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from graphshard.errors import CheckpointError
from graphshard.format import bytes_in, human_bytes
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.lower import Bindings
from graphshard.runtime.whole import Packed, Wanted, padded
from graphshard.state.files import Shapes, Target, TargetFiles
from graphshard.state.state_tensors import (
    Keeper,
    StateTensor,
    by_name,
    gather_full,
    gathered_line,
    state_tensors_of,
)


def full_state_dict(
    module: nn.Module, bindings: Bindings, *, rank0_only: bool, cpu: bool
) -> dict[str, Tensor]:
    """See `ShardedModule.full_state_dict`."""
    group, agreement = bindings.group, bindings.agreement
    keep = group.rank == 0 or not rank0_only
    with agreement.part() as part:
        state_tensors = by_name(state_tensors_of(module, bindings))
        by_key = {name: state_tensors[name] for name in module.state_dict(keep_vars=True)}
        part.same += [gathered_line(name, each.tensor) for name, each in by_key.items()]
    full_tensors: dict[str, Any] = {}
    state: dict[str, Tensor] = {}
    keeper = Keeper()
    for name, state_tensor in by_key.items():
        if state_tensor.name not in full_tensors:
            full = gather_full(state_tensor.tensor, group)
            # A tied parameter is one tensor under all its names.
            make = full.cpu if cpu else full.detach
            full_tensors[state_tensor.name] = keeper.keep(make) if keep else None
        state[name] = full_tensors[state_tensor.name]
    keeper.end(agreement)
    return state if keep else {}


def local_state_dict(module: nn.Module, bindings: Bindings) -> dict[str, Tensor]:
    """See `ShardedModule.local_state_dict`."""
    state_tensors = by_name(state_tensors_of(module, bindings))
    return {name: state_tensors[name].local.detach() for name in module.state_dict(keep_vars=True)}


def load_local_state_dict(
    module: nn.Module, bindings: Bindings, state_dict: dict[str, Tensor]
) -> None:
    """See `ShardedModule.load_local_state_dict`."""
    with bindings.agreement.part():
        state_tensors = [
            state_tensor
            for state_tensor in state_tensors_of(module, bindings)
            if state_tensor.persistent
        ]
        for state_tensor in state_tensors:
            value = state_dict.get(state_tensor.name)
            if not isinstance(value, Tensor):
                raise CheckpointError(f"the local state dict has no tensor {state_tensor.name!r}")
            if value.shape != state_tensor.local.shape or value.dtype != state_tensor.dtype:
                raise CheckpointError(
                    f"{state_tensor.name!r} is {value.dtype} {list(value.shape)} in the local "
                    f"state dict and {state_tensor.dtype} {list(state_tensor.local.shape)} on this "
                    "rank; load local state on as many ranks as saved it, or use state_dict() for "
                    "any number"
                )
        names = by_name(state_tensors)
        unexpected = next((name for name in state_dict if name not in names), None)
        if unexpected is not None:
            raise CheckpointError(
                f"the local state dict has {unexpected!r}, which the model does not have"
            )
    for state_tensor in state_tensors:
        state_tensor.take(state_dict[state_tensor.name])


def save_safetensors(
    module: nn.Module,
    bindings: Bindings,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int | None = None,
    dtype: torch.dtype | None = None,
    before_commit: Callable[[], None] | None = None,
) -> list[Path]:
    """See `ShardedModule.save_safetensors`.

    `before_commit` is what rank 0 does once all tensors are written, before files get their names.
    """
    group = bindings.group
    with bindings.agreement.part() as part:
        state_tensors = {
            state_tensor.name: state_tensor
            for state_tensor in state_tensors_of(module, bindings)
            if state_tensor.persistent
        }
        order = [name for name in module.state_dict(keep_vars=True) if name in state_tensors]
        tensors = {
            name: (state_tensors[name].shape, saved_dtype(state_tensors[name], dtype))
            for name in order
        }
        part.same += [gathered_line(name, state_tensors[name].tensor) for name in order]
    values = (
        (name, partial(gather_full(state_tensors[name].tensor, group).to, tensors[name][1]))
        for name in order
    )
    return write_values(
        bindings,
        path,
        tensors,
        values,
        max_shard_bytes=max_shard_bytes,
        before_commit=before_commit,
    )


def write_values(
    bindings: Bindings,
    path: str | os.PathLike[str],
    tensors: Shapes,
    values: Iterable[tuple[str, Callable[[], Tensor]]],
    *,
    max_shard_bytes: int | None,
    before_commit: Callable[[], None] | None,
) -> list[Path]:
    """Write safetensors files from rank 0, tensor by tensor; all ranks call this.

    `tensors` stand in the order to write; `values` has each name with a function that makes its
    tensor, called on rank 0. Iterating may move data between ranks; it must not fail.
    """
    group, agreement = bindings.group, bindings.agreement
    files = TargetFiles(Target(Path(path), max_shard_bytes), tensors)
    keeper = Keeper()
    if group.rank == 0:
        keeper.keep(writing(path, files.open))
    for name, make in values:  # rank 0 takes part in every gather, too, after a failure
        if group.rank == 0:
            keeper.keep(writing(path, partial(_write, files, name, make)))
        del make
    if before_commit is not None and group.rank == 0:
        keeper.keep(writing(path, before_commit))
    written: list[Path] = []
    try:
        keeper.end(agreement)
        with agreement.part():
            if group.rank == 0:
                written = writing(path, files.commit)()
    except BaseException:
        files.abandon()
        raise
    return written


def _write(files: TargetFiles, name: str, make: Callable[[], Tensor]) -> None:
    files.write(name, make())


def writing(path: str | os.PathLike[str], write: Callable[[], Any]) -> Callable[[], Any]:
    """`write`, with a `CheckpointError` in place of an `OSError`."""

    def call() -> Any:
        try:
            return write()
        except OSError as error:
            raise CheckpointError(f"writing {path} failed: {error}") from error

    return call


def saved_dtype(state_tensor: StateTensor, dtype: torch.dtype | None) -> torch.dtype:
    """The dtype of a tensor in a file that is to have floating point values of `dtype`."""
    own = state_tensor.dtype
    return dtype if dtype is not None and own.is_floating_point else own


def save_pretrained(
    module: nn.Module,
    bindings: Bindings,
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    max_shard_bytes: int | None,
    dtype: torch.dtype | None,
    merge: bool,
    given: Mapping[str, Tensor] | None = None,
) -> list[Path]:
    """See `ShardedModule.save_pretrained`; `model` is the model of transformers on meta.

    With `given`, the tensors in it on rank 0 are written in place of the module's.
    """
    with bindings.agreement.part():
        if merge or getattr(model, "_hf_peft_config_loaded", False):
            raise CheckpointError(
                "save_pretrained: adapters are saved, and merge=True merges them, where the model "
                f"is a PeftModel; {type(model).__name__} is not: wrap it by peft.get_peft_model or "
                "PeftModel.from_pretrained before compiling it"
            )
        if not callable(getattr(getattr(model, "config", None), "save_pretrained", None)):
            raise CheckpointError(
                f"save_pretrained is for models of transformers, which have a config; "
                f"{type(model).__name__} has none; use save_safetensors"
            )

    def configure() -> None:
        save_config(model, Path(path), dtype)

    if given is not None:
        tensors = without_copies(given)
        return write_values(
            bindings,
            path,
            {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()},
            ((name, partial(tensor.to, "cpu")) for name, tensor in tensors.items()),
            max_shard_bytes=max_shard_bytes,
            before_commit=configure,
        )
    return save_safetensors(
        module,
        bindings,
        path,
        max_shard_bytes=max_shard_bytes,
        dtype=dtype,
        before_commit=configure,
    )


def save_config(model: Any, folder: Path, dtype: torch.dtype | None) -> None:
    """Write the configurations of a transformers `model`, whose weights are saved in `dtype`."""
    config = copy.deepcopy(model.config)
    config.architectures = [type(model).__name__]
    config.dtype = str(dtype or getattr(model, "dtype", torch.float32)).removeprefix("torch.")
    generation = getattr(model, "generation_config", None)
    with renamed_at_the_end(folder) as unfinished:
        config.save_pretrained(unfinished)
        if generation is not None and model.can_generate():
            generation.save_pretrained(unfinished)


@contextmanager
def renamed_at_the_end(folder: Path) -> Iterator[Path]:
    """A folder whose files, also those in folders below, move into `folder` if nothing failed."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        unfinished = Path(name)
        yield unfinished
        for file in sorted(each for each in unfinished.rglob("*") if each.is_file()):
            target = folder / file.relative_to(unfinished)
            target.parent.mkdir(exist_ok=True)
            file.replace(target)


# -- keywords of transformers' save_pretrained ----------------------------------------------------


_WHY = {
    "push_to_hub": "write a folder first and upload it",
    "variant": "rename the files",
    "save_peft_format": "adapters are written as peft writes them",
    "save_original_format": "weights keep the model's own names",
    "distributed_checkpoint": "save_checkpoint() writes with every rank",
    "selected_adapters": "all adapters are written",
    "save_embedding_layers": "peft decides by itself",
}
"""What to do, or what is done, in place of keywords that are refused."""


_ASKS_NOTHING = {"save_peft_format": True, "save_embedding_layers": "auto"}
"""Values of such keywords, besides None and what else is false, that ask for nothing."""


def checked_size(max_shard_size: int | str) -> int:
    """The bytes of a `max_shard_size` of transformers or Accelerate, such as "5GB"."""
    try:
        return bytes_in(str(max_shard_size))
    except ValueError as error:
        raise CheckpointError(f"max_shard_size: {error}") from None


def given_weights(
    agreement: Agreement,
    state_dict: Mapping[str, Any] | None,
    *,
    is_main_process: bool = True,
    save_function: Any = None,
    safe_serialization: bool = True,
    others: Mapping[str, Any],
) -> Mapping[str, Tensor] | None:
    """The weights to write in place of the module's; None if no rank passed any.

    Scripts for Accelerate pass these keywords of transformers. Rank 0 writes in any case; what
    would ask for something else is refused by name, as are `others`. The `state_dict` holds whole
    tensors on rank 0; anywhere else it only says that rank 0 has them.
    """
    rank = agreement.group.rank
    with agreement.part() as part:
        if rank == 0 and not is_main_process:
            raise CheckpointError(
                "save_pretrained: is_main_process=False on rank 0, which is the one that writes a "
                "sharded module; pass accelerator.is_main_process, or leave it out"
            )
        if not safe_serialization:
            raise CheckpointError(
                "save_pretrained: safe_serialization=False asks for pickles, and only safetensors "
                "are written; leave it out, or torch.save(sharded.full_state_dict(), file)"
            )
        maker = getattr(save_function, "__module__", "") or ""
        if save_function is not None and maker.partition(".")[0] not in ("accelerate", "torch"):
            raise CheckpointError(
                f"save_pretrained: save_function={save_function!r} would never be called, since "
                "rank 0 writes the files one tensor at a time; leave it out"
            )
        for name, value in others.items():
            if value and value != _ASKS_NOTHING.get(name):
                raise CheckpointError(
                    f"save_pretrained of a sharded module has no {name}= (got {value!r}); "
                    f"{_WHY.get(name, 'leave it out')}"
                )
        for name, value in ((state_dict or {}) if rank == 0 else {}).items():
            if isinstance(value, DTensor) or not isinstance(value, Tensor):
                raise CheckpointError(
                    f"save_pretrained: state_dict has a {type(value).__name__} for {name!r}; pass "
                    "whole tensors, such as accelerator.get_state_dict(model) or "
                    "sharded.full_state_dict() gives, or leave state_dict out"
                )
        part.flag = state_dict is not None
    if not any(part.flags):
        return None
    with agreement.part():
        if rank == 0 and not state_dict:
            raise CheckpointError(
                "save_pretrained: state_dict is missing or empty on rank 0, which writes it; call "
                "accelerator.get_state_dict(model) on all ranks and pass what it returns"
            )
    return state_dict or {}


def without_copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weights` with one name for each tensor, since a file of safetensors holds each once."""
    seen: set[Any] = set()
    kept = {}
    for name, value in weights.items():
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() == 0 or place not in seen:
            kept[name] = value.detach()
        seen.add(place)
    return kept


# -- whole tensors one after another --------------------------------------------------------------


@dataclass(frozen=True)
class _Entry:
    """A tensor to hand out under `name` in `dtype`."""

    name: str
    source: StateTensor
    dtype: torch.dtype

    @property
    def wanted(self) -> Wanted | None:
        """What to gather; None for a buffer."""
        return None if self.source.shard is None else Wanted(self.source.shard, self.dtype)

    @property
    def nbytes(self) -> int:
        wanted = self.wanted
        return self.source.tensor.numel() * self.dtype.itemsize if wanted is None else wanted.nbytes

    @property
    def peak(self) -> int:
        """The most bytes that it takes by itself."""
        wanted = self.wanted
        return self.nbytes if wanted is None else wanted.peak

    def value(self) -> Tensor:
        wanted = self.wanted
        if wanted is not None:
            return wanted.gather()
        return self.source.tensor.detach().to(self.dtype, copy=True)


def iter_full(
    module: nn.Module,
    bindings: Bindings,
    *,
    max_bytes: int | None,
    dtype: torch.dtype | None,
) -> Iterator[tuple[str, Tensor]]:
    """Check the call on all ranks; return the iterator of `ShardedModule.iter_full`.

    An inference engine copies each tensor into its own layout. So no more is gathered than the next
    tensors for which there is room, and each message between ranks brings as many as fit.
    """
    with bindings.agreement.part() as part:
        tensors = by_name(state_tensors_of(module, bindings))
        entries = []
        for name in module.state_dict(keep_vars=True):
            entries.append(_Entry(name, tensors[name], saved_dtype(tensors[name], dtype)))
        batches = _batches(entries, max_bytes)
        part.same += [gathered_line(each.name, each.source.tensor) for each in entries]
    return _hand_out(batches, bindings, bindings.agreement.text)


def _hand_out(
    batches: Sequence[Sequence[_Entry]], bindings: Bindings, text: str
) -> Iterator[tuple[str, Tensor]]:
    agreement = bindings.agreement
    for number, batch in enumerate(batches, 1):
        what = f"{text}, batch {number} of {len(batches)}, from {batch[0].name!r} on"
        packed = None
        with agreement.call(what), torch.no_grad(), torch.inference_mode(False):
            with agreement.part() as part:
                for entry in batch:
                    if entry.source.shard is not None:
                        entry.source.shard.current()
                part.same.append(batch[-1].name)
            if len(batch) > 1:
                packed = Packed([each.wanted for each in batch if each.wanted is not None])
        for index, entry in enumerate(batch):
            # No name here refers to a tensor that was handed out.
            yield entry.name, _value(entry, packed, index, agreement, what)


def _value(
    entry: _Entry, packed: Packed | None, index: int, agreement: Agreement, what: str
) -> Tensor:
    with agreement.call(what), torch.no_grad(), torch.inference_mode(False):
        return entry.value() if packed is None else packed.whole(index)


def _batches(entries: Sequence[_Entry], max_bytes: int | None) -> list[list[_Entry]]:
    """Neighbours to gather together, all within `max_bytes`.

    Counted is the tensor that was handed out before, too, which a `for` loop holds until it has the
    next one. Where only that would be too much, it is left to the caller to drop it.
    """
    if max_bytes is None:
        before = [0, *(each.nbytes for each in entries)]
        max_bytes = max(
            (held + each.peak for held, each in zip(before, entries, strict=False)), default=0
        )
    batches: list[list[_Entry]] = []
    held = 0  # bytes of the last tensor of the batch before
    for entry in entries:
        if entry.peak > max_bytes:
            raise CheckpointError(
                f"gathering {entry.name!r} takes {entry.peak} bytes ({human_bytes(entry.peak)}), "
                f"more than max_bytes={max_bytes}; pass at least that much"
            )
        if batches and _packed_peak([*batches[-1], entry], held) <= max_bytes:
            batches[-1].append(entry)
        else:
            held = batches[-1][-1].nbytes if batches else 0
            batches.append([entry])
    return batches


def _packed_peak(batch: Sequence[_Entry], held: int) -> float:
    """The most bytes in use while `batch` is gathered in one message and handed out."""
    wanted: list[Any] = [each.wanted for each in batch]
    if any(each is None or not each.is_split for each in wanted):
        return float("inf")
    sent = sum(padded(each.sent_bytes) for each in wanted)
    received = sent * wanted[0].shard.layout.world_size
    cast = max(each.sent_bytes for each in wanted)
    copies = max(each.copied_bytes for each in wanted) + max(held, *(e.nbytes for e in wanted))
    return max(held + sent + received + cast, received + copies)

"""Read directories of torch.distributed.checkpoint (DCP); see README.md."""

from __future__ import annotations

import io
import os
import pickle
import traceback
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePath
from typing import IO, Any, ClassVar

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import metadata as descriptions
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.futures import Future

from graphshard.errors import CheckpointError
from graphshard.plain_data import shown
from graphshard.runtime.calls import first_line
from graphshard.state.archive import ArchiveError, ForeignError, load_part
from graphshard.state.files import is_inside
from graphshard.state.manifest import METADATA, Manifest, manifest_of
from graphshard.torch_private.compat import private


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint directory whose files are all complete.

    paths: the path of each entry in the nested dict that was saved, by the entry's key. manifest:
    the records of the files; None if graphshard did not write them. trust: whether entries that are
    no tensors may be pickles that run code.
    """

    folder: Path
    metadata: Metadata
    paths: Mapping[str, tuple[str, ...]]
    manifest: Manifest | None = None
    trust: bool = False

    @property
    def save_id(self) -> str:
        """The id of the save; "" if graphshard did not write it."""
        return "" if self.manifest is None else self.manifest.save_id

    def verify(self, rank: int = 0, ranks: int = 1) -> None:
        """Compare the files with their records; each of `ranks` ranks takes its part of them."""
        if self.manifest is not None:
            self.manifest.verify(self.folder, sorted(self.manifest.files)[rank::ranks])

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """The metadata (with shape and dtype) of an entry; None if it is no tensor."""
        entry = self.metadata.state_dict_metadata[key]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def below(self, prefix: tuple[str, ...]) -> dict[str, str]:
        """Keys of the tensors in the dict at `prefix`, by their dotted names in that dict."""
        keys: dict[str, str] = {}
        for key, path in self.paths.items():
            if path[: len(prefix)] == prefix and self.tensor(key) is not None:
                name = ".".join(path[len(prefix) :])
                if name in keys:
                    raise CheckpointError(
                        f"{self.folder} has two tensors named {shown(name)}: {shown(keys[name])} "
                        f"and {shown(key)}"
                    )
                keys[name] = key
        return keys

    def infos(self, keys: Mapping[str, str]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each tensor of `keys`, by its name there."""
        tensors = {name: self.tensor(key) for name, key in keys.items()}
        return {
            name: (tuple(entry.size), entry.properties.dtype)
            for name, entry in tensors.items()
            if entry is not None
        }

    def prefixes(self) -> list[tuple[str, ...]]:
        """The prefixes that may hold a model: (), and each top-level key of a dict."""
        return [(), *dict.fromkeys(path[:1] for path in self.paths.values() if len(path) > 1)]

    def prefix_of(self, names: Collection[str]) -> tuple[str, ...]:
        """The prefix whose dict has the most of `names`; "model" wins ties."""
        name_set = set(names)
        prefixes = sorted(self.prefixes(), key=lambda prefix: prefix != ("model",))
        found = dict.fromkeys(prefixes, 0)
        for key, path in self.paths.items():
            for depth in (0, 1) if self.tensor(key) is not None else ():
                if path[:depth] in found and ".".join(path[depth:]) in name_set:
                    found[path[:depth]] += 1
        return max(prefixes, key=lambda prefix: found[prefix])


def open_checkpoint(path: str | os.PathLike[str], *, trust: bool = False) -> StoredCheckpoint:
    """Open the checkpoint in directory `path`: read its metadata and the sizes of its files.

    `trust` unpickles whatever it holds, which may run code of its author. Otherwise the metadata
    may name torch's own descriptions of a checkpoint only, and entries plain data only.
    """
    folder = Path(path)
    file = folder / METADATA
    if not file.is_file():
        raise CheckpointError(f"{folder} is no checkpoint of torch.distributed ({_hint(folder)})")
    metadata = read_metadata(file, trust=trust)
    try:
        paths = _paths(metadata)
        files = check_metadata(folder, metadata, paths, trust=trust)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error})") from error
    return StoredCheckpoint(folder, metadata, paths, manifest_of(folder, files), trust)


def _hint(folder: Path) -> str:
    """The likely reason why `folder` is no checkpoint."""
    if folder.is_file():
        return (
            "it is a file; load one of torch.save by load_full_state_dict(torch.load(file)), one "
            "of safetensors by load_safetensors(file)"
        )
    if not folder.is_dir():
        return "it does not exist"
    if any(folder.glob("*.safetensors")):
        return "it holds safetensors: use load_safetensors"
    if any(folder.glob(f"*/{METADATA}")):
        return "it holds several: use graphshard.latest_checkpoint"
    return f"no {folder / METADATA}"


def _paths(metadata: Metadata) -> dict[str, tuple[str, ...]]:
    """The path of each entry; its key alone where dicts were not flattened."""
    nested = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    keys = metadata.state_dict_metadata
    lacking = next((key for key in keys if key not in nested), None)
    if nested and lacking is not None:
        raise ValueError(f"{shown(lacking)} has no path")
    return {key: tuple(map(str, nested.get(key, (key,)))) for key in keys}


def read_entries(stored: StoredCheckpoint, into: dict[str, Any], group: Any = None) -> None:
    """Read the entries with the keys of `into`: into its tensors, or as new values if no tensors.

    Its values stand by key or in nested dicts; ranks may have other keys. `group` is the process
    group of the ranks that call this; None: this process alone.
    """
    try:
        with quiet():
            load(
                into,
                storage_reader=_Reader(stored),
                process_group=coordinating(group),
                planner=_Planner(),
                no_dist=group is None,
            )
    except (Exception, CheckpointException) as error:  # torch wraps the errors of all ranks
        forget_frames(error)
        raise CheckpointError(f"{stored.folder} cannot be read: {cause_of(error)}") from error


def coordinating(group: Any) -> Any:
    """The `process_group` to give to torch for `group`: None for the default one, or one alone."""
    return None if group is None or group.size() == dist.get_world_size() else group


class _Reader(FileSystemReader):
    """A reader that reuses metadata that was already read, and runs no pickle."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        super().__init__(stored.folder)
        self._stored = stored

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = self._stored.metadata
        if metadata.storage_meta is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        if self._stored.trust:
            return super().read_data(plan, planner)
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            name = self._stored.metadata.storage_data[item.storage_index].relative_path
            by_file.setdefault(name, []).append(item)
        for name, items in by_file.items():
            with (self._stored.folder / name).open("rb") as stream:
                for item in items:
                    self._read(item, stream, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, item: ReadItem, stream: IO[bytes], planner: LoadPlanner) -> None:
        metadata, index = self._stored.metadata, item.storage_index
        place = metadata.storage_data[index]
        entry = metadata.state_dict_metadata[index.fqn]
        try:
            saved = load_part(stream, place.offset, place.length)
        except ForeignError as error:
            raise CheckpointError(
                f"entry {shown(index.fqn)} is a pickle of more than tensors and plain data "
                f"({error}), which may run code; pass trust=True if you trust whoever wrote it"
            ) from error
        except ArchiveError as error:
            raise CheckpointError(
                f"entry {shown(index.fqn)} in {place.relative_path} is damaged: {error}"
            ) from error
        if not isinstance(entry, TensorStorageMetadata):
            planner.load_bytes(item, _saved(saved))
            return
        assert index.index is not None  # the number of the chunk
        sizes, dtype = tuple(entry.chunks[index.index].sizes), entry.properties.dtype
        if not isinstance(saved, torch.Tensor) or (tuple(saved.shape), saved.dtype) != (
            sizes,
            dtype,
        ):
            raise CheckpointError(
                f"entry {shown(index.fqn)} in {place.relative_path} is damaged: it holds "
                f"{_kind(saved)}, and a tensor of {dtype} {list(sizes)} is said to lie there"
            )
        region = zip(item.storage_offsets, item.lengths, strict=True)
        part = saved[tuple(slice(start, start + length) for start, length in region)]
        target = planner.resolve_tensor(item).detach()
        target.copy_(part)
        planner.commit_tensor(item, target)


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return f"a {type(value).__name__}"
    return f"a tensor of {value.dtype} {list(value.shape)}"


def _saved(value: Any) -> io.BytesIO:
    """`value`, which is plain data, as the planner of torch wants it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


class _Planner(DefaultLoadPlanner):
    """Reads tensors into tensors only, and other entries as values only."""

    def create_local_plan(self) -> LoadPlan:
        assert self.metadata is not None
        for key, value in self.state_dict.items():
            entry = self.metadata.state_dict_metadata.get(key)
            is_tensor = isinstance(value, torch.Tensor)
            if entry is not None and is_tensor != isinstance(entry, TensorStorageMetadata):
                kinds = ("no tensor", "a tensor")
                raise CheckpointError(
                    f"entry {shown(key)} is {kinds[not is_tensor]} in the checkpoint, and "
                    f"{kinds[is_tensor]} is to be loaded"
                )
        return super().create_local_plan()


def cause_of(error: BaseException) -> str:
    """Return the error of the first rank that failed, in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = sorted(failures.items())[0]
        return f"{first_line(cause)} (on rank {rank})"
    return first_line(error)


def forget_frames(error: BaseException) -> None:
    """Clear the variables of torch's functions that `error` came through.

    They hold the errors that they collect of all ranks, so these refer to themselves, and would
    keep the module and its caller's variables until the garbage collector runs.
    """
    failures = getattr(error, "failures", None) or {}
    for each in (error, *(cause for cause, _ in failures.values())):
        traceback.clear_frames(each.__traceback__)


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out torch's warnings of what is intended: a single process, entries of one rank."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        warnings.filterwarnings("ignore", message="Detected mismatched keys in state dict")
        yield


def nested(entries: Mapping[str, Any], paths: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """Return `entries` as a nested dict, each at its path in `paths`."""
    root: dict[str, Any] = {}
    for key, value in entries.items():
        *parents, last = paths[key]
        parent = root
        for name in parents:
            parent = parent.setdefault(name, {})
        parent[last] = value
    return root


def empty_like(entry: TensorStorageMetadata) -> torch.Tensor:
    """Return an uninitialized CPU tensor of an entry's shape and dtype."""
    return torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")


# -- .metadata ------------------------------------------------------------------------------------


_STATEFUL = (
    descriptions.BytesStorageMetadata,
    descriptions.ChunkStorageMetadata,
    descriptions.Metadata,
    descriptions.MetadataIndex,
    descriptions.StorageMeta,
    descriptions.TensorProperties,
    descriptions.TensorStorageMetadata,
    private("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
)


_ALLOWED: dict[tuple[str, str], Any] = {
    **{(kind.__module__, kind.__name__): kind for kind in _STATEFUL},
    **{
        name: private(*name)
        for name in (
            (descriptions.__name__, "_MEM_FORMAT_ENCODING"),
            ("torch.serialization", "_get_layout"),
        )
    },
    ("torch", "Size"): torch.Size,
    # Where the checkpoint was written; by its name since Python 3.13, too.
    ("pathlib", "PosixPath"): PurePath,
    ("pathlib._local", "PosixPath"): PurePath,
}


class _UnknownClassError(Exception):
    """The pickle names something else."""


_InPython: Any = pickle._Unpickler  # whose instructions can be replaced


class _Unpickler(_InPython):
    dispatch: ClassVar[dict[int, Any]] = dict(_InPython.dispatch)

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        dtype = vars(torch).get(name) if module == "torch" else None
        if not isinstance(dtype, torch.dtype):
            raise _UnknownClassError(f"{module}.{name}"[:200])
        return dtype

    def load_build(self) -> None:
        """Give an object its state; a class or function would keep it for the whole process."""
        target = self.stack[-2]
        if not isinstance(target, _STATEFUL):
            raise pickle.UnpicklingError("it gives a state to what is no description")
        if isinstance(target, TensorProperties):
            # Torch 2.15 writes strides, too, which older versions cannot take; the dtype counts.
            target.dtype = self.stack.pop()[0]
        else:
            super().load_build()

    dispatch[pickle.BUILD[0]] = load_build


def read_metadata(file: Path, *, trust: bool) -> Metadata:
    """Read the metadata in `file`, a pickle; see `open_checkpoint` for `trust`."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    try:
        metadata = pickle.loads(raw) if trust else _Unpickler(io.BytesIO(raw)).load()
    except _UnknownClassError as error:
        raise CheckpointError(
            f"{file} names {error}, which the description of a checkpoint does not need and which "
            "may run code; pass trust=True if you trust whoever wrote it"
        ) from None
    except Exception as error:  # whatever unpickling damaged bytes raises
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error})") from error
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"{file} is damaged (it holds a {type(metadata).__name__})")
    return metadata


def check_metadata(
    folder: Path, metadata: Metadata, paths: Mapping[str, tuple[str, ...]], *, trust: bool
) -> list[str]:
    """Return the names of the data files; check what torch's own load would take for wrong values.

    The chunks of each tensor must fill it once, and lie in files of `folder`. `trust` allows files
    that were transformed, such as compressed ones.
    """
    sizes: dict[str, int] = {}
    for index, place in metadata.storage_data.items():
        key, name = index.fqn, place.relative_path
        if name not in sizes:
            sizes[name] = _size_within(folder, name, key)
        end = place.offset + place.length
        if place.offset < 0 or place.length < 0 or end > sizes[name]:
            raise CheckpointError(
                f"{folder / name} is cut off: {shown(key)} ends at byte {end} and the file at "
                f"{sizes[name]}"
            )
        if not trust and getattr(place, "transform_descriptors", None):
            raise CheckpointError(
                f"{folder / name} is compressed or transformed, so its size says nothing on that "
                f"of {shown(key)}; pass trust=True if you trust whoever wrote it"
            )
    for key, entry in metadata.state_dict_metadata.items():
        if ".".join(paths[key]) != key:
            raise _damaged(folder, f"{shown(key)} has the path {shown('.'.join(paths[key]))}")
        held = _held(folder, metadata, key, entry)
        if isinstance(entry, TensorStorageMetadata) and not trust:
            size = prod(entry.size) * entry.properties.dtype.itemsize
            if size > held:  # memory for it would be taken before the bytes are read
                raise _damaged(folder, f"{shown(key)} has {size} bytes and lies in {held}")
    return list(sizes)


def _held(folder: Path, metadata: Metadata, key: str, entry: Any) -> int:
    """Bytes of the files in which the entry `key` lies."""
    indices = [MetadataIndex(key)]
    if isinstance(entry, TensorStorageMetadata):
        _check_chunks(folder, key, entry)
        indices = [MetadataIndex(key, c.offsets) for c in entry.chunks if prod(c.sizes)]
    for index in indices:
        if index not in metadata.storage_data:
            where = f" at {list(index.offset)}" if index.offset else ""
            raise _damaged(folder, f"{shown(key)}{where} lies in no file")
    return sum(metadata.storage_data[index].length for index in indices)


def _damaged(folder: Path, fault: str) -> CheckpointError:
    return CheckpointError(f"{folder / '.metadata'} is damaged: {fault}; load another checkpoint")


def _size_within(folder: Path, name: str, key: str) -> int:
    """Bytes of the file `name` of `folder`, in which the entry `key` lies."""
    if not is_inside(folder, name):
        raise CheckpointError(
            f"{folder / '.metadata'} places {shown(key)} in {shown(name).strip(chr(39))}, outside "
            "the directory; a checkpoint holds all its files"
        )
    file = folder / name
    try:
        if file.is_file():
            return file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error}") from error
    raise CheckpointError(f"{file} is missing; {shown(key)} lies in it")


def _check_chunks(folder: Path, key: str, entry: TensorStorageMetadata) -> None:
    """Check that the chunks fill the tensor once: memory that none fills would keep any values."""
    shape = tuple(entry.size)
    if not isinstance(entry.properties.dtype, torch.dtype):
        raise _damaged(folder, f"{shown(key)} has no dtype")
    for chunk in entry.chunks:
        dims = zip(chunk.offsets, chunk.sizes, shape, strict=True)
        if any(start < 0 or size < 0 or start + size > whole for start, size, whole in dims):
            raise _damaged(
                folder,
                f"rows of {shown(key)} at {list(chunk.offsets)} of shape {list(chunk.sizes)} lie "
                f"outside of {list(shape)}",
            )
    chunks = [chunk for chunk in entry.chunks if prod(chunk.sizes)]
    if sum(prod(chunk.sizes) for chunk in chunks) != prod(shape) or _overlap(chunks):
        raise _damaged(folder, f"the chunks of {shown(key)} do not fill {list(shape)} once")


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Whether two of the chunks share an element."""
    if len(chunks) < 2:
        return False
    dims = range(len(chunks[0].sizes))
    along = max(dims, key=lambda dim: len({chunk.offsets[dim] for chunk in chunks}))
    before: list[ChunkStorageMetadata] = []  # those that reach to where the next one starts
    for chunk in sorted(chunks, key=lambda chunk: chunk.offsets[along]):
        start = chunk.offsets[along]
        before = [each for each in before if each.offsets[along] + each.sizes[along] > start]
        for other in before:
            boxes = zip(chunk.offsets, chunk.sizes, other.offsets, other.sizes, strict=True)
            if all(max(a, b) < min(a + n, b + m) for a, n, b, m in boxes):
                return True
        before.append(chunk)
    return False

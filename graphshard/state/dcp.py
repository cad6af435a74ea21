"""Read directories of torch.distributed.checkpoint (DCP).

Such a directory holds a `.distcp` file per rank that wrote it, and `.metadata`, a pickle with the
tensors and the file and byte range of each of their chunks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItemType
from torch.distributed.checkpoint.state_dict_loader import load

from graphshard.errors import CheckpointError

METADATA = ".metadata"


class RankZeroFirst(DefaultSavePlanner):
    """A save planner that takes plain tensors, which every rank has, from rank 0.

    Buffers and ignored parameters may differ between ranks. torch takes each from the rank with the
    least to write, so its checkpoints would mix the statistics of several ranks.
    """

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign items to ranks; called on the coordinator with every rank's items."""
        first = {item.index for item in all_plans[0].items if item.type is WriteItemType.TENSOR}
        rest = [
            replace(plan, items=[item for item in plan.items if item.index not in first])
            for plan in all_plans[1:]
        ]
        return super().create_global_plan([all_plans[0], *rest])


@dataclass(frozen=True)
class StoredCheckpoint:
    """A checkpoint directory whose files are all complete.

    paths: the path of each entry in the nested dict that was saved, by the entry's key.
    """

    folder: Path
    metadata: Metadata
    paths: Mapping[str, tuple[str, ...]]

    def tensor(self, key: str) -> TensorStorageMetadata | None:
        """The metadata (with shape and dtype) of an entry; None if it is no tensor."""
        entry = self.metadata.state_dict_metadata[key]
        return entry if isinstance(entry, TensorStorageMetadata) else None

    def below(self, prefix: tuple[str, ...]) -> dict[str, str]:
        """Keys of the tensors in the dict at `prefix`, by their dotted names in that dict."""
        return {
            ".".join(path[len(prefix) :]): key
            for key, path in self.paths.items()
            if path[: len(prefix)] == prefix and self.tensor(key) is not None
        }

    def prefixes(self) -> list[tuple[str, ...]]:
        """The prefixes that may hold a model: (), and each top-level key of a dict."""
        return [(), *dict.fromkeys(path[:1] for path in self.paths.values() if len(path) > 1)]

    def prefix_of(self, names: Collection[str]) -> tuple[str, ...]:
        """The prefix whose dict has the most of `names`; "model" wins ties."""
        name_set = set(names)
        prefixes = sorted(self.prefixes(), key=lambda prefix: prefix != ("model",))
        return max(prefixes, key=lambda prefix: len(name_set & set(self.below(prefix))))


def open_checkpoint(path: str | os.PathLike[str]) -> StoredCheckpoint:
    """Open the checkpoint in directory `path`: read its metadata and the sizes of its files.

    The metadata is unpickled, as torch does: open only checkpoints you trust.

    Raises:
        CheckpointError: there is no checkpoint, or a file is damaged, missing or cut off; names
            the file.
    """
    folder = Path(path)
    file = folder / METADATA
    if not file.is_file():
        hint = "it does not exist"
        if folder.is_dir():
            safe = any(folder.glob("*.safetensors"))
            hint = "it holds safetensors: use load_safetensors" if safe else f"no {file}"
        raise CheckpointError(f"{folder} is no checkpoint of torch.distributed ({hint})")
    try:
        metadata = FileSystemReader(folder).read_metadata()
        if not isinstance(metadata, Metadata):
            raise TypeError(f"it holds a {type(metadata).__name__}")
        paths = _paths(metadata)
        storage = list(metadata.storage_data.items())
    except Exception as error:  # whatever unpickling damaged bytes raises
        raise CheckpointError(f"{file} is damaged ({type(error).__name__}: {error})") from error
    sizes: dict[str, int] = {}
    for index, info in storage:
        if info.relative_path not in sizes:
            data_file = folder / info.relative_path
            if not data_file.is_file():
                raise CheckpointError(f"{data_file} is missing; {index.fqn!r} lies in it")
            sizes[info.relative_path] = data_file.stat().st_size
        if info.offset + info.length > sizes[info.relative_path]:
            raise CheckpointError(
                f"{folder / info.relative_path} is cut off: {index.fqn!r} ends at byte "
                f"{info.offset + info.length} and the file at {sizes[info.relative_path]}"
            )
    return StoredCheckpoint(folder, metadata, paths)


def _paths(metadata: Metadata) -> dict[str, tuple[str, ...]]:
    nested = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
    keys = metadata.state_dict_metadata
    return {key: tuple(map(str, nested.get(key, (key,)))) for key in keys}


def read_entries(stored: StoredCheckpoint, into: dict[str, Any], group: Any = None) -> None:
    """Read the entries with the keys of `into`: into its tensors, or as new values if no tensors.

    Args:
        stored: the checkpoint.
        into: tensors or None, by key; the same keys on every rank.
        group: the process group of the ranks that call this. None: this process alone.

    Raises:
        CheckpointError: an entry cannot be read.
    """
    try:
        with _quiet():
            reader = _Reader(stored)
            alone = group is None
            group = None if alone or group.size() == dist.get_world_size() else group
            load(into, storage_reader=reader, process_group=group, no_dist=alone)
    except (Exception, CheckpointException) as error:  # torch wraps the errors of all ranks
        raise CheckpointError(f"{stored.folder} cannot be read: {cause_of(error)}") from error


class _Reader(FileSystemReader):
    """A reader that reuses metadata that was already read."""

    def __init__(self, stored: StoredCheckpoint) -> None:
        super().__init__(stored.folder)
        self._stored = stored

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of the open checkpoint."""
        metadata = self._stored.metadata
        if metadata.storage_meta is not None:
            metadata.storage_meta.load_id = self.load_id
        return metadata


def cause_of(error: BaseException) -> str:
    """Return the error of the first rank that failed, in one line."""
    failures = getattr(error, "failures", None)
    if failures:
        rank, (cause, _) = sorted(failures.items())[0]
        return f"{_first_line(cause)} (on rank {rank})"
    return _first_line(error)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        # Loading in a single process is intended.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
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
    return torch.empty(entry.size, dtype=entry.properties.dtype)

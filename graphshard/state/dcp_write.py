"""Write directories of torch.distributed.checkpoint (DCP): a save commits or never was."""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future
from torch.utils.serialization import config as serialization

from graphshard.errors import CheckpointError
from graphshard.state.dcp import cause_of, forget_frames, quiet
from graphshard.state.manifest import (
    FileRecord,
    commit,
    data_prefix,
    discard,
    new_id,
    remove_earlier,
    remove_replaced,
)
from graphshard.state.training_state import PARTS, flatten, key_of


class RankZeroFirst(DefaultSavePlanner):
    """A save planner that takes what is no DTensor, and every rank has, from rank 0.

    Buffers and ignored parameters may differ between ranks. torch takes each from the rank with the
    least to write, so its checkpoints would mix the statistics of several ranks.
    """

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        storage_meta: Any = None,
        is_coordinator: bool = False,
    ) -> None:
        """Take the nested dict apart; called on every rank."""
        rest = {name: value for name, value in state_dict.items() if name not in PARTS}
        super().set_up_planner(rest, storage_meta, is_coordinator)
        for name in PARTS:
            if name in state_dict:
                for path, value in flatten(state_dict[name], (name,)):
                    self.state_dict[key_of(path)] = value
                    self.mappings[key_of(path)] = path

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Assign items to ranks; called on the coordinator with every rank's items."""
        first = {i.index for i in all_plans[0].items if i.type is not WriteItemType.SHARD}
        rest = [
            replace(plan, items=[item for item in plan.items if item.index not in first])
            for plan in all_plans[1:]
        ]
        return super().create_global_plan([all_plans[0], *rest])


_LARGE = 1 << 20
"""Bytes from which a checksum is worth a thread of its own beside the write."""


class _ChecksummedFile(io.BufferedWriter):
    """A new file that takes the CRC-32 of its bytes as they are written, in their order."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"), buffer_size=_LARGE)
        self.record = FileRecord(0, 0)
        self._thread = ThreadPoolExecutor(1)

    def write(self, data: Any) -> int:
        """Write all of `data`, an object with a buffer of bytes."""
        size = memoryview(data).nbytes
        before = self.record
        if size < _LARGE:
            crc = zlib.crc32(data, before.crc32)
            written = super().write(data)
        else:  # neither holds the interpreter's lock
            checksum = self._thread.submit(zlib.crc32, data, before.crc32)
            try:
                written = super().write(data)
            finally:
                crc = checksum.result()
        self.record = FileRecord(before.bytes + size, crc)
        return written

    def close(self) -> None:
        self._thread.shutdown()
        super().close()


class _ChecksummedFiles(FileSystem):
    """The file system, which remembers a record of each file written."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with _ChecksummedFile(Path(path)) as file:
            yield file
        self.records[Path(path).name] = file.record


@dataclass(frozen=True)
class _Names:
    """The names of a rank's files: `prefix`, a number, ".distcp"; and the ranks that save."""

    prefix: str
    save_id: str
    rank: int
    ranks: int


_RECORDS = MetadataIndex("graphshard: records of the files")
"""Stands among the results of a rank for the records of its files, which are no entry."""


class CommittingWriter(FileSystemWriter):
    """A writer whose checkpoint replaces the last one in its directory at once, or not at all.

    Args:
        path: the directory, on a file system that all ranks share.
        ranks: how many ranks save.
        keep: the checkpoints of the run that this rank leaves; None to remove no earlier one.
    """

    def __init__(self, path: str | os.PathLike[str], ranks: int, keep: int | None = None) -> None:
        super().__init__(path)
        self._ranks, self._keep = ranks, keep
        self.fs: _ChecksummedFiles = _ChecksummedFiles()
        self._coordinates = False
        self._finishing = False
        self._names: _Names | None = None

    @property
    def _folder(self) -> Path:
        return Path(self.path)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make the directory; called on every rank."""
        self.fs.mkdir(self.path)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Name the files of every rank; called on the coordinator."""
        if len(plans) != self._ranks:
            raise CheckpointError(
                f"{len(plans)} of {self._ranks} ranks take part, since the process group was "
                "destroyed before the save began; wait for the save (its result()) before "
                "destroy_process_group()"
            )
        self._coordinates = True
        self.save_id = save_id = new_id()
        return [
            replace(
                plan, storage_data=_Names(data_prefix(rank, save_id), save_id, rank, len(plans))
            )
            for rank, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's files, and wait until they are on disk; called on every rank."""
        self._names = names = plan.storage_data
        self.fs.records.clear()
        try:
            # torch.load does not compare the CRC-32 of a record.
            with serialization.patch("save.compute_crc32", False):  # type: ignore[attr-defined]
                results = super().write_data(plan, planner).wait()
        except BaseException:
            discard(self._folder, names.save_id, names.rank)
            raise
        written: Future[list[WriteResult]] = Future()
        written.set_result([*results, WriteResult(_RECORDS, 0, dict(self.fs.records))])
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit; called on the coordinator once every rank's files are on disk."""
        files: dict[str, FileRecord] = {}
        storage = {}
        for result in (result for of_rank in results for result in of_rank):
            if result.index == _RECORDS:
                files |= result.storage_data
            else:
                storage[result.index] = result.storage_data
        metadata.storage_data = storage
        metadata.storage_meta = self.storage_meta()
        metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)
        self._finishing = True
        commit(self._folder, self.save_id, pickle.dumps(metadata), files)

    def save(self, state: dict[str, Any], process_group: Any, *, alone: bool = False) -> None:
        """Write `state` with all ranks of `process_group` (None: of the default one)."""
        try:
            with quiet():
                save(
                    state,
                    storage_writer=self,
                    process_group=process_group,
                    no_dist=alone,
                    planner=RankZeroFirst(),
                )
        except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
            # Other ranks cannot tell whether the coordinator commits; the next save removes it all.
            if self._coordinates and not self._finishing:
                discard(self._folder, self.save_id)
            forget_frames(error)
            raise CheckpointError(
                f"writing {self.path} failed: {cause_of(error)}; the checkpoint there, if there "
                "was one, is as before"
            ) from error

    def end(self) -> None:
        """Remove what need not be kept after a save that committed; called on every rank."""
        names = self._names
        assert names is not None
        remove_replaced(self._folder, names.save_id, names.rank, names.ranks)
        if self._keep is not None:
            remove_earlier(self._folder, self._keep)

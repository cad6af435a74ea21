"""A checkpoint is the old one or the new one, whole; a damaged or foreign one is refused."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from paths import ROOT
from ranks import run_ranks
from state_checks import Stranger, assert_same
from strangers import module_and_optimizer
from torch import Tensor, nn
from torch.distributed import checkpoint

import graphshard
from graphshard.errors import CheckpointError
from graphshard.module.sharded_module import ShardedModule
from graphshard.state import dcp_write, manifest

stepped = cache(module_and_optimizer)
"""A model and its AdamW after a step: the same ones for all tests of a process."""


def sharded_of(value: float) -> tuple[ShardedModule, torch.optim.Optimizer]:
    """That model and optimizer, whose parameters and moments are all `value` now."""
    fill(*stepped(), value)
    return stepped()


def tensors_of(module: nn.Module, optim: torch.optim.Optimizer) -> list[Tensor]:
    states = [s[key] for s in optim.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return [t.to_local() if hasattr(t, "to_local") else t for t in (*module.parameters(), *states)]


def fill(module: nn.Module, optim: torch.optim.Optimizer, value: float) -> None:
    with torch.no_grad():
        for tensor in tensors_of(module, optim):
            tensor.fill_(value)


def values_of(module: nn.Module, optim: torch.optim.Optimizer) -> set[float]:
    return {value for tensor in tensors_of(module, optim) for value in tensor.unique().tolist()}


def loaded(path: Path) -> set[float]:
    module, optim = sharded_of(9.0)
    module.load_checkpoint(path, optim)
    return values_of(module, optim)


def refuses(path: Path, match: str, **options: Any) -> None:
    """Check that a load is refused and changes nothing."""
    module, optim = sharded_of(9.0)
    with pytest.raises(CheckpointError, match=match):
        module.load_checkpoint(path, optim, **options)
    assert values_of(module, optim) == {9.0}


def saved(path: Path, value: float) -> Path:
    sharded, optim = sharded_of(value)
    sharded.save_checkpoint(path, optim)
    return path


# -- commits --------------------------------------------------------------------------------------


def test_a_save_replaces_the_last_one_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1.0)
    first = {file.name for file in (tmp_path / "c").iterdir()}
    saved(tmp_path / "c", 2.0)
    second = {file.name for file in (tmp_path / "c").iterdir()}
    assert loaded(tmp_path / "c") == {2.0}
    assert first & second == {".metadata"}
    assert len(second) == 3, "a data file, the manifest and the metadata"


def test_a_save_over_one_of_torch_replaces_it(tmp_path: Path) -> None:
    sharded, _ = sharded_of(1.0)
    checkpoint.save({"model": sharded.state_dict()}, checkpoint_id=tmp_path / "c", no_dist=True)
    assert (tmp_path / "c" / "__0_0.distcp").is_file()
    saved(tmp_path / "c", 2.0)
    assert loaded(tmp_path / "c") == {2.0}
    assert not (tmp_path / "c" / "__0_0.distcp").exists()


def test_ranks_share_the_removal_of_a_checkpoint_of_more_ranks(tmp_path: Path) -> None:
    old, new = "a" * 16, "b" * 16
    names = [f"__{rank}_{old}_0.distcp" for rank in range(4)] + ["__3_1.distcp"]
    kept = [f"__0_{new}_0.distcp", f"graphshard.{new}.json", ".metadata", "notes.txt"]
    for name in [*names, f"graphshard.{old}.json", *kept]:
        (tmp_path / name).write_bytes(b"")

    def left() -> set[str]:
        return {file.name for file in tmp_path.iterdir()} - {*kept}

    manifest.remove_replaced(tmp_path, new, 1, 2)
    assert left() == {names[0], names[2], f"graphshard.{old}.json"}
    manifest.remove_replaced(tmp_path, new, 0, 2)
    assert left() == set()
    assert all((tmp_path / name).exists() for name in kept)


def fail(*args: Any, **kwargs: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (manifest, "_write"),
        (manifest, "sync_folder"),
        (dcp_write._ChecksummedFile, "write"),
        (Path, "replace"),
    ],
)
def test_a_save_that_fails_leaves_the_last_one(
    owner: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path / "c", 1.0)
    before = {file.name: file.read_bytes() for file in (tmp_path / "c").iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        with pytest.raises(CheckpointError, match=r"No space left on device.*is as before"):
            saved(tmp_path / "c", 2.0)
    assert {file.name: file.read_bytes() for file in (tmp_path / "c").iterdir()} == before
    assert loaded(tmp_path / "c") == {1.0}


def test_what_a_killed_save_left_is_removed_by_the_next(tmp_path: Path) -> None:
    saved(tmp_path / "c", 1.0)
    left = [f"__0_{'a' * 16}_0.distcp", f"graphshard.{'a' * 16}.json", f".metadata.{'a' * 16}.tmp"]
    for name in left:
        (tmp_path / "c" / name).write_bytes(b"cut")
    mine = tmp_path / "c" / "notes.txt"
    mine.write_text("kept")
    assert loaded(tmp_path / "c") == {1.0}
    saved(tmp_path / "c", 2.0)
    assert loaded(tmp_path / "c") == {2.0}
    assert not any((tmp_path / "c" / name).exists() for name in left)
    assert mine.read_text() == "kept"


# -- several --------------------------------------------------------------------------------------


def test_the_last_checkpoints_of_a_run_are_kept(tmp_path: Path) -> None:
    saved(tmp_path / "other-1", 7.0)
    sharded, optim = sharded_of(1.0)
    for number in (1, 2, 10, 3):
        sharded.save_checkpoint(tmp_path / f"step-{number}", optim, keep=2)
    left = sorted(folder.name for folder in tmp_path.iterdir())
    assert left == ["other-1", "step-10", "step-3"], "by the time of the save"
    assert graphshard.latest_checkpoint(tmp_path) == tmp_path / "step-3"
    (tmp_path / "step-3" / ".metadata").unlink()
    assert graphshard.latest_checkpoint(tmp_path) == tmp_path / "step-10"
    next((tmp_path / "step-10").glob("*.distcp")).write_bytes(b"cut")
    assert graphshard.latest_checkpoint(tmp_path) == tmp_path / "other-1"
    assert graphshard.latest_checkpoint(tmp_path / "none") is None
    refuses(tmp_path, "it holds several: use graphshard.latest_checkpoint")


def test_what_keep_cannot_mean_is_refused(tmp_path: Path) -> None:
    sharded, optim = sharded_of(1.0)
    with pytest.raises(CheckpointError, match="keep must be 1 or more"):
        sharded.save_checkpoint(tmp_path / "step-1", optim, keep=0)
    with pytest.raises(CheckpointError, match="last number of their name; there is none"):
        sharded.save_checkpoint(tmp_path / "last", optim, keep=1)
    assert not list(tmp_path.iterdir())


# -- damage ---------------------------------------------------------------------------------------


def flipped(path: Path, chance: random.Random) -> str:
    """Flip one bit of one file; returns a description."""
    files = sorted(path.iterdir())
    file = chance.choice(files)
    data = bytearray(file.read_bytes())
    bit = chance.randrange(8 * len(data))
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)
    return f"bit {bit} of {file.name}"


def is_refused(module: ShardedModule, optim: torch.optim.Optimizer, path: Path) -> bool:
    try:
        module.load_checkpoint(path, optim)
    except CheckpointError:
        return True
    return False


@pytest.mark.parametrize("flips", [100, pytest.param(2000, marks=pytest.mark.slow)])
def test_no_bit_flip_is_accepted(flips: int, tmp_path: Path) -> None:
    good = saved(tmp_path / "good", 1.0)
    module, optim = sharded_of(9.0)
    chance = random.Random(flips)
    for _ in range(flips):
        shutil.rmtree(tmp_path / "bad", ignore_errors=True)
        shutil.copytree(good, tmp_path / "bad")
        described = flipped(tmp_path / "bad", chance)
        assert is_refused(module, optim, tmp_path / "bad"), described
        assert values_of(module, optim) == {9.0}, described


def test_a_mixture_of_two_saves_is_refused(tmp_path: Path) -> None:
    old, new = saved(tmp_path / "old", 1.0), saved(tmp_path / "new", 2.0)
    (name,) = (file.name for file in old.glob("*.distcp"))
    (other,) = (file.name for file in new.glob("*.distcp"))
    shutil.copy(new / other, old / name)
    refuses(old, f"{name} is damaged")
    shutil.copy(old / ".metadata", new / ".metadata")
    refuses(new, f"{name} is missing")


def test_a_checkpoint_without_its_manifest_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", 1.0)
    next(path.glob("graphshard.*.json")).unlink()
    refuses(path, "is missing or damaged")


# -- strangers ------------------------------------------------------------------------------------


def test_an_entry_that_runs_code_is_refused_unless_trusted(tmp_path: Path) -> None:
    sharded, _ = sharded_of(1.0)
    whole = {name: value.clone() for name, value in sharded.full_state_dict().items()}
    state = {"state": {}, "param_groups": [{"params": ["0.weight"], "x": Stranger(tmp_path / "y")}]}
    state = {"model": sharded.state_dict(), "optim": state}
    checkpoint.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    refuses(tmp_path / "c", "is a pickle of more than tensors and plain data")
    assert not (tmp_path / "y").exists()
    module, _ = sharded_of(9.0)
    module.load_checkpoint(tmp_path / "c", trust=True)
    assert_same(module.full_state_dict(), whole)


# -- two ranks ------------------------------------------------------------------------------------


def fails_on_one_rank_and_in_the_background(rank: int, folder: Path) -> None:
    module, optim = sharded_of(1.0)
    module.save_checkpoint(folder / "c", optim)
    fill(module, optim, 2.0)
    write = dcp_write.CommittingWriter.write_data
    if rank == 1:
        dcp_write.CommittingWriter.write_data = fail
    with pytest.raises(CheckpointError, match=r"No space left on device \(on rank 1\)"):
        module.save_checkpoint(folder / "c", optim)
    module.save_checkpoint(folder / "c", optim, background=True)
    with pytest.raises(CheckpointError, match=r"No space left"):
        module.save_checkpoint(folder / "d", optim)  # tells of the one in the background
    assert not (folder / "d").exists()
    saving = module.save_checkpoint(folder / "c", optim, background=True)
    with pytest.raises(CheckpointError, match=r"No space left"):
        saving.result()
    dist.barrier()
    if rank == 1:
        dcp_write.CommittingWriter.write_data = write
    module.save_checkpoint(folder / "d", optim)  # has been told
    assert values_of(module, optim) == {2.0}
    module.load_checkpoint(folder / "d", optim)
    assert len(list((folder / "c").iterdir())) == 4
    module.load_checkpoint(folder / "c", optim)
    assert values_of(module, optim) == {1.0}
    fill(module, optim, 3.0)
    module.save_checkpoint(folder / "c", optim, background=True)
    fill(module, optim, 4.0)
    module.load_checkpoint(folder / "c", optim)  # waits for it
    assert values_of(module, optim) == {3.0}


def test_a_save_that_fails_on_one_rank_is_an_error_on_both(tmp_path: Path) -> None:
    run_ranks(fails_on_one_rank_and_in_the_background, 2, tmp_path)


def destroys_the_group_while_it_saves(rank: int, folder: Path) -> None:
    module, optim = sharded_of(1.0)
    module.save_checkpoint(folder / "step-1", optim, keep=1)
    fill(module, optim, 2.0)
    module.save_checkpoint(folder / "step-2", optim, keep=1, background=True)
    dist.destroy_process_group()


def test_the_end_of_the_group_waits_for_a_save(tmp_path: Path) -> None:
    run_ranks(destroys_the_group_while_it_saves, 2, tmp_path)
    assert [folder.name for folder in tmp_path.iterdir()] == ["step-2"]
    assert loaded(tmp_path / "step-2") == {2.0}


def loses_the_group_before_it_saves(rank: int, folder: Path) -> None:
    module, optim = sharded_of(1.0)
    module.save_checkpoint(folder / "c", optim)
    fill(module, optim, 2.0)
    go = threading.Event()
    write = dcp_write.CommittingWriter.save

    def waits(*args: Any, **options: Any) -> None:
        go.wait()
        write(*args, **options)

    dcp_write.CommittingWriter.save = waits  # type: ignore[method-assign]
    saving = module.save_checkpoint(folder / "c", optim, background=True)
    is_initialized, dist.is_initialized = dist.is_initialized, lambda: False
    go.set()
    with pytest.raises(CheckpointError, match=r"1 of 2 ranks take part.*is as before"):
        saving.result()
    dist.is_initialized = is_initialized
    dist.barrier()


def test_a_save_without_the_other_ranks_commits_nothing(tmp_path: Path) -> None:
    run_ranks(loses_the_group_before_it_saves, 2, tmp_path)
    assert len(list((tmp_path / "c").iterdir())) == 4
    assert loaded(tmp_path / "c") == {1.0}


@pytest.mark.slow
def test_killed_saves_leave_a_whole_checkpoint() -> None:
    script = ROOT / "examples" / "benchmarks" / "killed_saves.py"
    # In a process without threads, as its ranks are forks of it.
    arguments = [sys.executable, script, "--trials", "8", "--seed", "1", "--longest", "0.4"]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

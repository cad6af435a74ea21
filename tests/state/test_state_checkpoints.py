"""Checkpoints of torch.distributed: written on 2 ranks, read on 1, 3 and 4, and by fully_shard."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full
from models import Block, Odd, TiedGPT, tokens_of
from ranks import run_ranks
from safetensors.torch import load_file
from state_checks import assert_same, full_state, on_meta, refuses, seeded
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.cli.main import main
from graphshard.errors import CheckpointError
from graphshard.module.sharded_module import ShardedModule

BLOCK = graphshard.BlockPolicy({Block})


def gpt() -> nn.Module:
    return TiedGPT(1)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def step(module: nn.Module, optim: torch.optim.Optimizer, number: int) -> None:
    module(*tokens_of(dist.get_rank() if dist.is_initialized() else 0, number)).backward()
    optim.step()
    optim.zero_grad()


def values_of(module: nn.Module, optim: torch.optim.Optimizer) -> dict[str, Tensor]:
    names = {param: name for name, param in module.named_parameters()}
    moments = {
        f"{names[param]}/{key}": full(value).clone()
        for param, entries in optim.state.items()
        for key, value in entries.items()
    }
    return {**full_state(module), **moments}


def empty() -> ShardedModule:
    return graphshard.compile(on_meta(gpt), BLOCK)


# -- two ranks write ------------------------------------------------------------------------------


def writes(rank: int, folder: Path) -> None:
    sharded = graphshard.compile(seeded(gpt), BLOCK)
    optim = adamw(sharded)
    step(sharded, optim, 0)
    step(sharded, optim, 1)
    expected = values_of(sharded, optim)
    assert sharded.save_checkpoint(folder / "ours", optim) is None
    waiting = sharded.save_checkpoint(folder / "background", optim, background=True)
    random = torch.get_rng_state()
    step(sharded, optim, 2)  # meanwhile
    waiting.result()
    after = values_of(sharded, optim)

    # Resumed training goes on as if it had not stopped: moments, step and dropout.
    again = empty()
    other = adamw(again)
    for name in ("ours", "background"):
        torch.manual_seed(rank + 100)
        again.load_checkpoint(folder / name, other)
        assert_same(values_of(again, other), expected)
        assert torch.equal(torch.get_rng_state(), random)
        step(again, other, 2)
        assert_same(values_of(again, other), after)
    again.load_checkpoint(folder / "ours", other)

    # By torch's own functions, unchanged.
    model, state = get_state_dict(again, other)
    checkpoint.save({"model": model, "optim": state}, checkpoint_id=folder / "torch")
    saving = checkpoint.async_save({"model": model, "optim": state}, checkpoint_id=folder / "async")
    saving.result()

    theirs = seeded(gpt, 1)
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    their_optim = adamw(theirs)
    model, state = get_state_dict(theirs, their_optim)
    entries = {"model": model, "optim": state}
    checkpoint.load(entries, checkpoint_id=folder / "ours")
    set_state_dict(theirs, their_optim, model_state_dict=model, optim_state_dict=state)
    assert_same(values_of(theirs, their_optim), expected)
    model, state = get_state_dict(theirs, their_optim)
    checkpoint.save({"model": model, "optim": state}, checkpoint_id=folder / "theirs")
    if rank == 0:
        torch.save(expected, folder / "expected.pt")


def options_of_torch(rank: int, folder: Path) -> None:
    sharded = graphshard.compile(seeded(Odd), BLOCK)
    expected = full_state(sharded)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_model_state_dict(sharded, options=options)
    assert_same(whole, expected if rank == 0 else {})
    trained = get_model_state_dict(sharded, options=StateDictOptions(ignore_frozen_params=True))
    assert set(expected) - set(trained) == {n for n in expected if n.startswith("frozen.")}
    again = graphshard.compile(seeded(Odd, 7), BLOCK)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(again, whole, options=options)
    assert_same(full_state(again), expected)


def data_file(folder: Path, rank: int) -> Path:
    """The file that `rank` wrote."""
    (file,) = folder.glob(f"__{rank}_*.distcp")
    return file


def refuses_bad_ones(rank: int, folder: Path) -> None:
    sharded = graphshard.compile(seeded(gpt, 5), BLOCK)
    optim = adamw(sharded)
    step(sharded, optim, 0)
    source = folder / "ours"
    bad = {name: folder / f"bad_{name}" for name in ("cut", "gone", "noise", "meta", "odd", "none")}
    if rank == 0:
        for name in ("cut", "gone", "noise", "meta"):
            shutil.copytree(source, bad[name])
        part = data_file(bad["cut"], 1)
        part.write_bytes(part.read_bytes()[:-100])
        data_file(bad["gone"], 0).unlink()
        noise = data_file(bad["noise"], 1)
        noise.write_bytes(bytes(noise.stat().st_size))
        (bad["meta"] / ".metadata").write_bytes((source / ".metadata").read_bytes()[:200])
    odd = graphshard.compile(seeded(Odd), BLOCK)
    odd.save_checkpoint(bad["odd"])
    other = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded.save_checkpoint(folder / "sgd", other)
    wide = graphshard.compile(nn.Sequential(Block(8)), BLOCK)
    wide.save_checkpoint(folder / "wide")

    def moments() -> dict[str, Tensor]:
        state = sharded.optimizer_state_dict(optim, kind="local")["state"]
        return {f"{n}/{k}": v.clone() for n, e in state.items() for k, v in e.items()}

    cases = {
        bad["cut"]: r"__1_\w+_0\.distcp is cut off: '",
        bad["gone"]: r"__0_\w+_0\.distcp is missing; '",
        bad["noise"]: r"__1_\w+_0\.distcp is damaged: it has \d+ bytes with CRC-32",
        bad["meta"]: r"\.metadata is damaged",
        bad["none"]: "is no checkpoint of torch.distributed",
        bad["odd"]: "the checkpoint has no 'embed.weight'.*lacks .*is it another model's",
    }
    for path, message in cases.items():
        refuses(sharded, lambda p=path: sharded.load_checkpoint(p, optim), message, moments)
    narrow = graphshard.compile(nn.Sequential(Block(16)), BLOCK)
    refuses(narrow, lambda: narrow.load_checkpoint(folder / "wide"), r"'0.norm.weight' has shape")
    only = torch.optim.AdamW([sharded.get_parameter("embed.weight")])
    message = "which this optimizer does not train"
    refuses(sharded, lambda: sharded.load_checkpoint(source, only), message)
    refuses(odd, lambda: odd.load_checkpoint(bad["odd"], adamw(odd)), "no optimizer state by names")


# -- other numbers of ranks read ------------------------------------------------------------------


def reads(rank: int, folder: Path) -> None:
    expected = torch.load(folder / "expected.pt")
    for name in ("ours", "torch", "async", "theirs"):
        sharded = empty()
        optim = adamw(sharded)
        if name == "ours" and rank == 0:
            with pytest.warns(UserWarning, match="was written by 2 ranks: random states"):
                sharded.load_checkpoint(folder / name, optim)
        else:
            sharded.load_checkpoint(folder / name, optim)
        assert_same(values_of(sharded, optim), expected)
    step(sharded, optim, 2)
    # The same by torch's own functions.
    sharded = graphshard.compile(seeded(gpt, 3), BLOCK)
    optim = adamw(sharded)
    model, state = get_state_dict(sharded, optim)
    entries: dict[str, Any] = {"model": model, "optim": state}
    checkpoint.load(entries, checkpoint_id=folder / "theirs")
    set_state_dict(
        sharded, optim, model_state_dict=entries["model"], optim_state_dict=entries["optim"]
    )
    assert_same(values_of(sharded, optim), expected)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoints")
    run_ranks(everything_on_two, 2, path, timeout=300)
    return path


def what_differs_between_ranks_is_rank_zero_s(rank: int, folder: Path) -> None:
    """Not some buffers of one rank and some of another."""
    sharded = graphshard.compile(nn.BatchNorm1d(3), graphshard.SizePolicy(), check=True)
    sharded(torch.full((4, 3), rank + 1.0) * torch.arange(4.0)[:, None])
    sharded.save_checkpoint(folder / "differs")
    expected = [None, None]
    dist.all_gather_object(expected, {k: v.clone() for k, v in sharded.named_buffers()})
    sharded.load_checkpoint(folder / "differs")
    for name, buffer in sharded.named_buffers():
        assert torch.equal(buffer, expected[0][name]), name


def everything_on_two(rank: int, folder: Path) -> None:
    what_differs_between_ranks_is_rank_zero_s(rank, folder)
    for check in (writes, options_of_torch, refuses_bad_ones):
        check(rank, folder)
        dist.barrier()


def test_written_resumed_and_refused_on_two_ranks(folder: Path) -> None:
    assert (folder / "ours" / ".metadata").is_file()


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [4, 3])
def test_read_on_other_numbers_of_ranks(folder: Path, world_size: int) -> None:
    run_ranks(reads, world_size, folder, timeout=300)


def test_read_on_one_rank_without_a_group(folder: Path) -> None:
    reads(0, folder)


# -- merged ---------------------------------------------------------------------------------------


def test_consolidate_makes_one_file(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = torch.load(folder / "expected.pt")
    weights = {name: value for name, value in expected.items() if "/" not in name}
    for source in ("ours", "theirs"):
        out = tmp_path / f"{source}.safetensors"
        assert main(["consolidate", str(folder / source), str(out)]) == 0
        assert capsys.readouterr().out.splitlines() == [str(out)]
        assert_same(load_file(out), weights)
    sharded = empty()
    sharded.load_safetensors(out)
    assert_same(full_state(sharded), weights)


def test_consolidate_splits_and_casts(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = str(folder / "ours")
    arguments = ["--max-shard-size", "2KB", "--dtype", "bfloat16", "--key", "model"]
    assert main(["consolidate", source, str(out), *arguments]) == 0
    assert len(list(out.glob("model-*-of-*.safetensors"))) > 1
    sharded = empty()
    sharded.load_safetensors(out)
    expected = torch.load(folder / "expected.pt")
    for name, value in full_state(sharded).items():
        assert torch.equal(value, expected[name].bfloat16().float())


def test_consolidate_says_what_is_wrong(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ours = folder / "ours"
    cases = [
        ([tmp_path / "no", tmp_path / "x.safetensors"], "is no checkpoint of torch.distributed"),
        ([folder / "bad_cut", tmp_path / "x.safetensors"], "_0.distcp is cut off"),
        ([folder / "bad_noise", tmp_path / "x.safetensors"], "_0.distcp is damaged"),
        ([ours, tmp_path / "x.safetensors", "--key", "ema"], "its keys are: 'model', 'optim'"),
        ([ours, tmp_path / "x.bin"], "must be a .safetensors file or a directory"),
        ([ours, tmp_path / "x.safetensors", "--max-shard-size", "1KB"], "names one file"),
        ([ours, Path("/proc/nothing/x.safetensors")], "writing /proc/nothing/x"),
    ]
    for arguments, message in cases:
        assert main(["consolidate", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_background_needs_a_group() -> None:
    with pytest.raises(CheckpointError, match="needs a process group"):
        graphshard.compile(gpt(), BLOCK).save_checkpoint("nowhere", background=True)

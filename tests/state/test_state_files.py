"""Safetensors and transformers checkpoints, into shards and out of them, piece by piece."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from models import Block, Normed, Odd, TiedGPT, features_of, tokens_of
from ranks import checks_of, on_two_or_four_ranks
from safetensors.torch import load_file, save_file
from state_checks import assert_same, full_state, on_meta, refuses, seeded, shared_folder
from torch import nn

import graphshard
from graphshard.errors import CheckpointError, RuntimeStateError
from graphshard.state import state_tensors
from graphshard.state.files import Writer, open_files, read_header

BLOCK = graphshard.BlockPolicy({Block})
LINEAR = graphshard.BlockPolicy({nn.Linear})


def once(state: dict) -> dict:
    """A tied parameter under its first name only."""
    return {name: value for name, value in state.items() if name != "head.weight"}


# -- the format -----------------------------------------------------------------------------------


def test_reads_any_part_of_what_safetensors_wrote(tmp_path: Path) -> None:
    tensors = {
        "cube": torch.randn(5, 4, 3),
        "half": torch.randn(7, 2).bfloat16(),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "flags": torch.tensor([True, False, True]),
        "eight": torch.randn(4, 4).to(torch.float8_e4m3fn),
    }
    save_file(tensors, tmp_path / "a.safetensors")
    entries = read_header(tmp_path / "a.safetensors")
    for name, tensor in tensors.items():
        whole = entries[name].read(tuple(slice(0, size) for size in tensor.shape))
        assert whole.dtype == tensor.dtype
        assert torch.equal(whole.float(), tensor.float())
    for region in (
        (slice(1, 4), slice(0, 4), slice(0, 3)),
        (slice(0, 5), slice(1, 3), slice(0, 3)),
        (slice(2, 5), slice(0, 4), slice(2, 3)),
        (slice(5, 5), slice(0, 4), slice(0, 3)),
    ):
        assert torch.equal(entries["cube"].read(region), tensors["cube"][region])


def test_safetensors_reads_what_is_written(tmp_path: Path) -> None:
    tensors = {"a": torch.randn(3, 2), "b": torch.arange(4), "c": torch.randn(5).bfloat16()}
    writer = Writer(tmp_path / "x.safetensors", {n: (t.shape, t.dtype) for n, t in tensors.items()})
    writer.write(tensors["a"][:1])
    assert not (tmp_path / "x.safetensors").exists()
    for part in (tensors["a"][1:], tensors["b"], tensors["c"]):
        writer.write(part)
    writer.close()
    assert_same(load_file(tmp_path / "x.safetensors"), tensors)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file({"a": torch.randn(30), "b": torch.randn(30)}, file)
    whole = file.read_bytes()
    cases = {
        "is cut off: 'b' ends at byte": whole[:-8],
        "no complete safetensors file": whole[:20],
        "cannot be read as a safetensors file": b"\x08" + bytes(7) + b"not json" + whole,
        "malformed": b"\x02" + bytes(7) + b"[]",
        "do not agree": whole.replace(b"[30]", b"[31]"),
        "unknown to torch": whole.replace(b'"F32"', b'"F99"'),
    }
    for message, content in cases.items():
        file.write_bytes(content)
        with pytest.raises(CheckpointError, match=message) as caught:
            open_files(tmp_path)
        assert "model.safetensors" in str(caught.value)


def test_what_is_no_checkpoint_is_said(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        open_files(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"holds no \.safetensors file$"):
        open_files(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(CheckpointError, match="holds pickled tensors"):
        open_files(tmp_path)
    for name in ("a", "b"):
        save_file({name: torch.ones(1)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(CheckpointError, match=r"holds 2 .safetensors files and no index"):
        open_files(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}))
    assert list(open_files(tmp_path)) == ["a", "b"]
    index.write_text(json.dumps({"weight_map": {"c": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"'c' is in a.safetensors, which lacks it"):
        open_files(tmp_path)
    index.write_text(json.dumps({"weight_map": {"c": "gone.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"gone.safetensors"):
        open_files(tmp_path)
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="lacks a weight_map"):
        open_files(tmp_path)


# -- on ranks -------------------------------------------------------------------------------------


def saves_and_loads_files(rank: int) -> None:
    folder = shared_folder()
    for kind, policy in ((TiedGPT, BLOCK), (Odd, BLOCK), (Normed, LINEAR)):
        model = seeded(kind, 3)
        sharded = graphshard.compile(model, policy)
        expected = full_state(model)
        file = folder / f"{kind.__name__}.safetensors"
        many = folder / kind.__name__
        written = sharded.save_safetensors(file)
        assert written == ([file] if rank == 0 else [])
        written = sharded.save_safetensors(many, max_shard_bytes=500)
        if rank == 0:
            assert_same(load_file(file), once(expected))
            assert written[-1].name == "model.safetensors.index.json"
            parts = [load_file(p) for p in written[:-1]]
            for part in parts:
                assert len(part) == 1 or sum(t.nbytes for t in part.values()) <= 500
            assert_same({k: v for part in parts for k, v in part.items()}, once(expected))
        torch.distributed.barrier()
        for path in (file, many):
            for read in ("each", "first"):
                again = graphshard.compile(on_meta(kind), policy)
                here = path if read == "each" or rank == 0 else "nowhere"
                assert again.load_safetensors(here, read=read) == ([], [])
                assert_same(full_state(again), expected)
    with pytest.raises(RuntimeStateError, match="read must be"):
        sharded.load_safetensors(file, read="all")
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(folder)


def takes_pieces(rank: int) -> None:
    """Tensors larger than a piece, of either way to read."""
    folder = shared_folder()
    model = seeded(TiedGPT, 3)
    sharded = graphshard.compile(model, BLOCK)
    sharded.save_safetensors(folder / "x.safetensors")
    torch.distributed.barrier()
    size, state_tensors.PIECE_BYTES = state_tensors.PIECE_BYTES, 300
    try:
        for way in ("each", "first"):
            again = graphshard.compile(on_meta(TiedGPT), BLOCK)
            again.load_safetensors(folder, read=way)
            assert_same(full_state(again), full_state(model))
    finally:
        state_tensors.PIECE_BYTES = size


def casts_and_renames(rank: int) -> None:
    folder = shared_folder()
    expected = full_state(seeded(TiedGPT, 3))
    if rank == 0:
        halves = {name: value.bfloat16() for name, value in expected.items()}
        del halves["embed.weight"]  # head.weight is the same parameter
        save_file(halves, folder / "half.safetensors")
        save_file(
            {f"base.{n}": v.clone() for n, v in expected.items()}, folder / "more.safetensors"
        )
        save_file(
            {n: v for n, v in once(expected).items() if "blocks.1" not in n}
            | {"new": torch.ones(1)},
            folder / "less.safetensors",
        )
    torch.distributed.barrier()
    sharded = graphshard.compile(on_meta(TiedGPT), BLOCK)
    sharded.load_safetensors(folder / "half.safetensors")
    assert_same(full_state(sharded), {n: v.bfloat16().float() for n, v in expected.items()})
    model = on_meta(TiedGPT)
    model.base_model_prefix = "base"
    sharded = graphshard.compile(model, BLOCK)
    sharded.load_safetensors(folder / "more.safetensors")
    assert_same(full_state(sharded), expected)
    sharded = graphshard.compile(on_meta(TiedGPT), BLOCK)
    missing, unexpected = sharded.load_safetensors(folder / "less.safetensors", strict=False)
    assert unexpected == ["new"]
    assert missing[0] == "blocks.1.norm.weight"
    with pytest.raises(RuntimeStateError, match=r"'blocks.1.norm.weight' has no values yet"):
        sharded(*tokens_of(rank, 0))


def refuses_files_that_do_not_fit(rank: int) -> None:
    folder = shared_folder()
    good = full_state(seeded(Normed, 1))
    cases = {
        "lacking": ({k: v for k, v in good.items() if k != "body.3.bias"}, "has no 'body.3.bias'"),
        "extra": ({**good, "extra": torch.ones(1)}, "has 'extra', which the model does not have"),
        "shape": ({**good, "body.0.bias": torch.ones(3)}, r"'body.0.bias' has shape \[3\]"),
        "kind": ({**good, "body.0.bias": torch.arange(12)}, r"'body.0.bias' is torch.int64"),
        "other": ({"foo": torch.ones(1)}, "lacks 9 of 9; its first key is 'foo'"),
    }
    if rank == 0:
        for name, (state, _) in cases.items():
            save_file(state, folder / f"{name}.safetensors")
        whole = folder / "whole.safetensors"
        save_file(good, whole)
        (folder / "cut.safetensors").write_bytes(whole.read_bytes()[:-4])
    torch.distributed.barrier()
    sharded = graphshard.compile(seeded(Normed, 0), LINEAR)
    more = [(name, message) for name, (_, message) in cases.items()]
    more += [("cut", "cut.safetensors is cut off: 'body.3.weight'"), ("gone", "no checkpoint at")]
    for name, message in more:
        for read in ("each", "first"):
            file = folder / f"{name}.safetensors"
            refuses(sharded, lambda f=file, r=read: sharded.load_safetensors(f, read=r), message)
    # One rank's trouble is every rank's error, and names the rank.
    file = folder / ("whole.safetensors" if rank == 0 else "extra.safetensors")
    refuses(sharded, lambda: sharded.load_safetensors(file), "'extra'.*on rank 1")
    refuses(sharded, lambda: sharded.save_safetensors("/proc/nothing/x.safetensors"), "/proc")
    sharded(*features_of(rank, 0, 8)).backward()
    torch.distributed.barrier()
    if rank == 0:
        shutil.rmtree(folder)


def gives_full_and_local_state(rank: int) -> None:
    for kind in (TiedGPT, Odd, Normed):
        model = seeded(kind, 2)
        policy = LINEAR if kind is Normed else BLOCK
        sharded = graphshard.compile(model, policy)
        expected = full_state(model)
        state = sharded.full_state_dict()
        assert_same(state, expected if rank == 0 else {})
        assert_same(sharded.full_state_dict(rank0_only=False, cpu=False), expected)
        if kind is TiedGPT and rank == 0:
            assert state["head.weight"] is state["embed.weight"]
        again = graphshard.compile(on_meta(kind), policy)
        again.load_full_state_dict(state)
        assert_same(full_state(again), expected)
        local = sharded.local_state_dict()
        assert list(local) == list(expected)
        with torch.no_grad():
            for param in again.parameters():
                param.zero_()
        again.load_local_state_dict(local)
        assert_same(full_state(again), expected)
    for name, value in local.items():
        held = sharded.state_dict()[name]
        part = held.to_local() if hasattr(held, "to_local") else held
        assert value.data_ptr() == part.data_ptr()
    first = next(iter(local))
    wrong = {**local, first: torch.ones(1)} if rank else local
    refuses(again, lambda: again.load_local_state_dict(wrong), f"{first}.*on rank")
    short = {name: value for name, value in local.items() if name != first}
    refuses(again, lambda: again.load_local_state_dict(short), f"no tensor '{first}'")
    more = {**local, "more": torch.ones(1)}
    refuses(again, lambda: again.load_local_state_dict(more), "has 'more'")


def refuses_state_dicts_that_do_not_fit(rank: int) -> None:
    sharded = graphshard.compile(seeded(Normed, 0), LINEAR)
    good = full_state(seeded(Normed, 1))
    cases = [
        ({k: v for k, v in good.items() if k != "body.3.bias"}, "no 'body.3.bias'"),
        ({**good, "extra": torch.ones(1)}, "has 'extra', which the model does not have"),
        ({**good, "body.3.bias": torch.ones(3)}, r"'body.3.bias' has shape \[3\]"),
        ({**good, "body.3.bias": torch.ones(5, dtype=torch.bool)}, "'body.3.bias' is torch.bool"),
        ({**good, "body.3.bias": 3}, "'body.3.bias' is a int"),
    ]
    for state, message in cases:
        refuses(sharded, lambda s=state: sharded.load_state_dict(s), message)
        refuses(sharded, lambda s=state: sharded.load_full_state_dict(s), message)
        mine = state if rank == 1 else good
        refuses(sharded, lambda s=mine: sharded.load_state_dict(s), f"{message}.*on rank 1")
    less = {k: v for k, v in good.items() if k != "body.3.bias"}
    result = sharded.load_state_dict({**less, "extra": torch.ones(1)}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["body.3.bias"], ["extra"])
    got = full_state(sharded)
    assert_same({**got, "body.3.bias": good["body.3.bias"]}, good)


test_on_ranks = on_two_or_four_ranks(checks_of(globals()), timeout=300)

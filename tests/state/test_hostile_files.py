"""Files written by somebody who means harm: none runs code, takes memory or reads elsewhere."""

from __future__ import annotations

import io
import json
import os
import pickle
import shutil
import struct
import zipfile
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from state_checks import Stranger
from strangers import module_and_optimizer, write_ours, write_torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorProperties

from graphshard.cli.consolidate import plan_consolidation
from graphshard.cli.main import main
from graphshard.errors import CheckpointError
from graphshard.state.archive import ArchiveError, load_part
from graphshard.state.dcp import open_checkpoint, read_metadata
from graphshard.state.files import open_files
from graphshard.state.manifest import latest_checkpoint

# -- safetensors ----------------------------------------------------------------------------------


def header(**tensors: Any) -> bytes:
    text = json.dumps(tensors).encode()
    return len(text).to_bytes(8, "little") + text


def entry(start: Any, stop: Any, shape: Any = None, dtype: Any = "U8") -> dict[str, Any]:
    shape = [stop - start] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (header(a=entry(0, 4), b=entry(2, 6)) + bytes(6), "'b' overlaps 'a'"),
        (header(a=entry(0, 4), b=entry(5, 6)) + bytes(6), "'b' leaves a gap after 'a'"),
        (header(a=entry(1, 4)) + bytes(4), "'a' leaves a gap after the header"),
        (header(a=entry(0, 4)) + bytes(5), "tensors end at byte 72 and the file at 73"),
        (header(a=entry(0, 4, [-4])) + bytes(4), r"'a' has shape \[-4\]"),
        (header(a=entry(0, 4, [2.0, 2])) + bytes(4), "'a' has shape"),
        (header(a=entry(0, 4, [True, 4])) + bytes(4), "'a' has shape"),
        (header(a=entry(0, 4, "4")) + bytes(4), "'a' has shape '4'"),
        (header(a=entry(0, 4, [1] * 65)) + bytes(4), "'a' has shape"),
        (header(a=entry(0, 0, [0, 1 << 62, 1 << 62])), "'a' has shape"),
        (header(a=entry(4, 0, [4])) + bytes(4), "-4 bytes, which do not agree"),
        (header(a=entry(-4, 0, [4])) + bytes(4), "'a' has data_offsets"),
        (header(a=entry(0, 1 << 62, [1 << 62])) + bytes(4), "is cut off: 'a' ends at byte"),
        (header(a=entry(0, 4, [1], ["F32"])) + bytes(4), "dtype .'F32'., unknown to torch"),
        (header(a=[0, 4]) + bytes(4), "'a' has a dtype, a shape and data_offsets"),
        (header(a=entry(0, 1), __metadata__={"a": 3}) + bytes(1), "__metadata__ maps texts"),
        (b" " + header(a=entry(0, 1))[1:] + bytes(1), "safetensors file"),
        (b"\xff" * 8 + b"{}", "its header should take 18446744073709551615 bytes"),
        (b"\x14" + bytes(7) + b'{"a": [1], "a": [2]}', "the key 'a' twice"),
        (b"\x03" + bytes(7) + b" {}", r"begins with \{"),
        ((4000).to_bytes(8, "little") + b"[" * 2000 + b"]" * 2000, "nests deeper than 32"),
    ],
)
def test_a_safetensors_header_is_checked_before_a_byte_is_used(
    content: bytes, said: str, tmp_path: Path
) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=said) as caught:
        open_files(file)
    assert str(file) in str(caught.value)


def test_a_bool_is_0_or_1(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(header(a=entry(0, 2, [2], "BOOL")) + b"\x01\x02")
    with pytest.raises(CheckpointError, match="a bool whose byte is neither 0 nor 1"):
        open_files(file)["a"].read((slice(0, 2),))


def write_indexed(folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    index = {"weight_map": {"a": name}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def test_an_index_names_files_inside_of_its_folder(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "other.safetensors")
    folder = tmp_path / "model"
    (tmp_path / "model").mkdir()
    (folder / "link.safetensors").symlink_to(tmp_path / "other.safetensors")
    (folder / "round").symlink_to(folder / "round")
    os.mkfifo(folder / "pipe")
    outside = ["../other.safetensors", str(tmp_path / "other.safetensors"), "x/../../other"]
    for name in (*outside, "link.safetensors", "round", "", ".", "a\0b"):
        write_indexed(folder, name)
        with pytest.raises(CheckpointError, match="which is not inside of"):
            open_files(folder)
    for name in ("pipe", "n" * 5000):
        write_indexed(folder, name)
        with pytest.raises(CheckpointError, match=r"missing|cannot be read"):
            open_files(folder)
    save_file({"a": torch.ones(1)}, folder / "part.safetensors")
    (folder / "link").symlink_to(folder / "part.safetensors")
    write_indexed(folder, "link")
    assert list(open_files(folder)) == ["a"]


def test_links_of_the_cache_of_hugging_face_are_followed(tmp_path: Path) -> None:
    repository = tmp_path / "models--a--b"
    (repository / "blobs").mkdir(parents=True)
    save_file({"a": torch.ones(1)}, repository / "blobs" / "0123")
    snapshot = repository / "snapshots" / "4567"
    write_indexed(snapshot, "part.safetensors")
    (snapshot / "part.safetensors").symlink_to("../../blobs/0123")
    assert open_files(snapshot)["a"].read((slice(0, 1),)).tolist() == [1.0]
    (snapshot / "part.safetensors").unlink()
    (tmp_path / "blobs").mkdir()
    save_file({"a": torch.ones(1)}, tmp_path / "blobs" / "0123")
    (snapshot / "part.safetensors").symlink_to("../../../blobs/0123")
    with pytest.raises(CheckpointError, match="which is not inside of"):
        open_files(snapshot)


@pytest.mark.parametrize("text", ["[]", '{"weight_map": []}', '{"weight_map": {"a": 3}}', "\xff"])
def test_an_index_maps_names_to_names(text: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_bytes(text.encode("latin1"))
    with pytest.raises(CheckpointError, match=r"weight_map|cannot be parsed"):
        open_files(tmp_path)


# -- pickles --------------------------------------------------------------------------------------


def test_a_pickle_changes_no_class(tmp_path: Path) -> None:
    """BUILD on a class would set attributes of torch's own class, for the whole process."""
    state = pickle.dumps((None, {"planner_data": 3}), protocol=2)[2:-1]
    name = b"ctorch.distributed.checkpoint.metadata\nMetadata\n"
    file = tmp_path / ".metadata"
    file.write_bytes(b"\x80\x02" + name + state + b"b.")
    with pytest.raises(CheckpointError, match="damaged"):
        read_metadata(file, trust=False)
    assert Metadata.__dataclass_fields__["planner_data"].default is None
    assert Metadata({}).planner_data is None
    assert Metadata.planner_data is None


def changed_metadata(folder: Path, change: Callable[[Metadata], object]) -> None:
    file = folder / ".metadata"
    metadata = pickle.loads(file.read_bytes())
    change(metadata)
    file.write_bytes(pickle.dumps(metadata))


WEIGHT = "model.0.weight"


def place(metadata: Metadata, key: str = WEIGHT) -> Any:
    return next(p for index, p in metadata.storage_data.items() if index.fqn == key)


def chunk(metadata: Metadata) -> Any:
    return metadata.state_dict_metadata[WEIGHT].chunks[0]


def grow(metadata: Metadata) -> None:
    """A tensor of 4 TiB, all of it said to lie in the bytes of a few."""
    rows = 1 << 38
    metadata.state_dict_metadata[WEIGHT].size = torch.Size([rows, 4])
    chunk(metadata).sizes = torch.Size([rows, 4])


def share(metadata: Metadata) -> None:
    place(metadata, "model.0.bias").offset = place(metadata).offset


def nest(metadata: Metadata) -> None:
    metadata.state_dict_metadata["model.0"] = BytesStorageMetadata()
    metadata.planner_data |= {"model.0": ("model", "0"), "model.0.bias": ("model", "0", "bias")}


CHANGES: dict[str, Callable[[Metadata], object]] = {
    "has 4398046511104 bytes and lies in": grow,
    "is damaged: it holds a tensor of": share,
    "lie outside of": lambda m: setattr(chunk(m), "offsets", torch.Size([1, 0])),
    "do not fill": lambda m: setattr(chunk(m), "sizes", torch.Size([1, 3])),
    "once": lambda m: m.state_dict_metadata[WEIGHT].chunks.append(chunk(m)),
    "lie outside of ": lambda m: setattr(chunk(m), "sizes", torch.Size([-1, 3])),
    "ends at byte": lambda m: setattr(place(m), "length", 1 << 40),
    "cut off": lambda m: setattr(place(m), "offset", -1),
    "outside the directory": lambda m: setattr(place(m), "relative_path", "/etc/passwd"),
    "is missing": lambda m: setattr(place(m), "relative_path", "x"),
    "in no file": lambda m: m.storage_data.pop(next(iter(m.storage_data))),
    "has the path": lambda m: m.planner_data.update({"model.0.bias": ("model", "0.weight")}),
    "has no path": lambda m: m.planner_data.pop("model.0.bias"),
    "lies in no file": nest,
    "pass trust=True": lambda m: setattr(place(m), "transform_descriptors", ["stream.zstd"]),
    "holds a tensor of torch.float32": lambda m: setattr(
        m.state_dict_metadata[WEIGHT].properties, "dtype", torch.int32
    ),
}


@pytest.mark.parametrize("said", CHANGES)
def test_the_metadata_of_a_checkpoint_fit_each_other_and_the_files(
    said: str, tmp_path: Path
) -> None:
    write_torch(tmp_path)
    changed_metadata(tmp_path / "c", CHANGES[said])
    with pytest.raises(CheckpointError, match=said):
        plan_consolidation(tmp_path / "c", tmp_path / "out").run()
    module, optim = module_and_optimizer()
    with pytest.raises(CheckpointError, match=said if said[:5] != "holds" else "torch.int32"):
        module.load_checkpoint(tmp_path / "c", optim)


def test_descriptions_of_tensors_may_hold_strides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch 2.15 writes them; what is read lies as the chunks say."""
    write_torch(tmp_path)
    written = read_metadata(tmp_path / "c" / ".metadata", trust=False)
    state = TensorProperties.__getstate__

    def rewritten(strides: object) -> Path:
        with monkeypatch.context() as patch:
            patch.setattr(TensorProperties, "__getstate__", lambda p: (*state(p)[:5], strides))
            patch.setattr(TensorProperties, "__setstate__", lambda p, s: setattr(p, "dtype", s[0]))
            changed_metadata(tmp_path / "c", lambda m: None)
        return tmp_path / "c" / ".metadata"

    for strides in (None, (3, 1)):
        assert read_metadata(rewritten(strides), trust=False) == written
    module, optim = module_and_optimizer()
    module.load_checkpoint(tmp_path / "c", optim)


def test_consolidate_runs_no_code_unless_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_torch(tmp_path)
    ran = tmp_path / "ran"
    changed_metadata(
        tmp_path / "c", lambda m: setattr(place(m), "transform_descriptors", Stranger(ran))
    )
    arguments = ["consolidate", str(tmp_path / "c"), str(tmp_path / "out")]
    assert main(arguments) == 2
    assert "which may run code; pass trust=True" in capsys.readouterr().err.replace("\n", " ")
    assert not ran.exists()
    assert main([*arguments, "--trust"]) == 0
    assert ran.exists()


def test_values_of_the_optimizer_are_checked_before_anything_changes(tmp_path: Path) -> None:
    module, optim = module_and_optimizer()
    before = {name: value.clone() for name, value in module.full_state_dict().items()}
    state = module.optimizer_state_dict(optim)
    for wrong in (
        {**state, "param_groups": [{"params": [["0.weight"]]}]},
        {**state, "param_groups": [{"params": 3}]},
        {**state, "param_groups": [3]},
        {**state, "param_groups": 3},
        {"state": {"0.weight": 3}, "param_groups": state["param_groups"]},
    ):
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        values = {name: value + 1 for name, value in before.items()}
        torch.distributed.checkpoint.save(
            {"model": values, "optim": wrong}, checkpoint_id=tmp_path / "c", no_dist=True
        )
        with pytest.raises(CheckpointError):
            module.load_checkpoint(tmp_path / "c", optim)
        assert all(torch.equal(v, before[n]) for n, v in module.full_state_dict().items())


def test_a_random_state_is_checked_before_anything_changes(tmp_path: Path) -> None:
    module, _ = module_and_optimizer()
    before = {name: value.clone() for name, value in module.full_state_dict().items()}
    values = {name: value + 1 for name, value in before.items()}
    state = {"model": values, "rng": {"0": {"cpu": torch.zeros(16, dtype=torch.uint8)}}}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    with pytest.raises(CheckpointError, match="a random state for rank 0 is no state of"):
        module.load_checkpoint(tmp_path / "c")
    assert all(torch.equal(v, before[n]) for n, v in module.full_state_dict().items())


def test_numbers_of_ranks_are_numbers(tmp_path: Path) -> None:
    module, _ = module_and_optimizer()
    state = {"model": module.full_state_dict(), "rng": {"9" * 5000: {"cpu": torch.zeros(1)}}}
    torch.distributed.checkpoint.save(state, checkpoint_id=tmp_path / "c", no_dist=True)
    module.load_checkpoint(tmp_path / "c")


def test_a_manifest_names_files_of_its_save_only(tmp_path: Path) -> None:
    write_ours(tmp_path)
    (file,) = (tmp_path / "c").glob("graphshard.*.json")
    from graphshard.state.manifest import FileRecord, Manifest

    manifest = Manifest.read(file)
    for name in ("../x", "/dev/zero", "x"):
        files = {**manifest.files, name: FileRecord(1, 1)}
        file.write_bytes(Manifest(manifest.save_id, manifest.written, files).to_bytes())
        with pytest.raises(CheckpointError, match="it names the file"):
            open_checkpoint(tmp_path / "c")
    text = Manifest(manifest.save_id, "now", manifest.files).to_bytes()  # type: ignore[arg-type]
    file.write_bytes(text)
    assert latest_checkpoint(tmp_path) is None


# -- archives -------------------------------------------------------------------------------------


def loaded(stream: io.BytesIO) -> Any:
    return load_part(stream, 0, len(stream.getvalue()))


def changed(change: Callable[[bytes], bytes], method: int = zipfile.ZIP_STORED) -> Any:
    """The archive of a tensor of three numbers, its pickle changed and then read."""
    stream = io.BytesIO()
    torch.save(torch.arange(3.0), stream)
    out = io.BytesIO()
    with zipfile.ZipFile(stream) as old, zipfile.ZipFile(out, "w", method) as new:
        for name in old.namelist():
            raw = old.read(name)
            new.writestr(name, change(raw) if name.endswith("data.pkl") else raw)
    return loaded(out)


def test_a_tensor_lies_inside_of_its_record() -> None:
    assert changed(lambda raw: raw).tolist() == [0, 1, 2]
    size = b"K\x03\x85"
    for old, new in (
        (size, b"K\x04\x85"),
        (b"K\x01\x85", b"K\x02\x85"),  # stride
        (b"K\x01\x85", b"J\xff\xff\xff\xff\x85"),
        (size, b"\x8a\x08" + b"\xff" * 7 + b"\x3f\x85"),
        (b"K\x03tq", b"J\xff\xff\xff\x7ftq"),  # elements of the storage
        (b"FloatStorage", b"DoubleStorage"),
        (b"FloatStorage", b"SetStorage"),
        (b"_rebuild_tensor_v2", b"_rebuild_qtensor"),
    ):

        def change(raw: bytes, old: bytes = old, new: bytes = new) -> bytes:
            assert old in raw, (old, raw)
            return raw.replace(old, new)

        with pytest.raises(ArchiveError):
            changed(change)
    with pytest.raises(ArchiveError, match="compressed"):
        changed(lambda raw: raw, zipfile.ZIP_DEFLATED)


def test_a_changed_record_is_noticed() -> None:
    stream = io.BytesIO()
    torch.save({"a": torch.arange(3.0)}, stream)
    raw = bytearray(stream.getvalue())
    at = raw.index(struct.pack("<f", 2.0))
    raw[at] ^= 1
    with pytest.raises(ArchiveError, match="CRC-32"):
        loaded(io.BytesIO(raw))


def test_what_the_user_lets_torch_load_stays_so() -> None:
    stream = io.BytesIO()
    torch.save(frozenset({1}), stream)
    with torch.serialization.safe_globals([frozenset]):
        assert loaded(stream) == {1}
        assert frozenset in torch.serialization.get_safe_globals()
    assert loaded(stream) == {1}
    assert frozenset not in torch.serialization.get_safe_globals()


def test_plain_data_come_back_as_they_were_saved() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    shared = torch.ones(2)
    value = {
        "numbers": [1, -(2**40), 2.5, float("inf"), 3 + 4j, True, None],
        "texts": ("ü", b"bytes", "", bytearray(b"ab")),
        "sets": [{1, "a"}, frozenset({2}), Counter({30: 1}), OrderedDict(b=1, a=2)],
        "torch": [torch.float16, torch.Size([1, 2]), torch.device("cpu")],
        "tensors": [tensor.t(), tensor[1:, ::2], torch.tensor(3), torch.zeros(0, 3), shared],
        "more": [torch.zeros(2, dtype=torch.float8_e4m3fn), torch.nn.Parameter(shared)],
        5: torch.nn.Linear(2, 2).state_dict(),
    }
    stream = io.BytesIO()
    torch.save(value, stream)
    got = loaded(stream)
    stream.seek(0)
    expected = torch.load(stream, weights_only=False)
    assert got.keys() == expected.keys()
    for key in ("numbers", "texts", "sets", "torch"):
        assert got[key] == expected[key]
    for key in ("tensors", "more"):
        for ours, theirs in zip(got[key], expected[key], strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(ours.float(), theirs.float())
    assert all(torch.equal(v, expected[5][n]) for n, v in got[5].items())

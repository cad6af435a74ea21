"""Replacing attributes of other libraries: listed, checked, restored."""

from __future__ import annotations

import gc
import re
from pathlib import Path
from queue import SimpleQueue
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphshard.capture.entry import capture
from graphshard.errors import RuntimeStateError, UnsupportedTorchError
from graphshard.torch_private.patches import active_patches, patched, patched_for_good

ROOT = Path(__file__).parent.parent


class Library:
    """Stands for a class of another library."""

    number = 1

    @staticmethod
    def double(x: int) -> int:
        return 2 * x


class Child(Library):
    """Inherits all it has."""


@pytest.fixture(autouse=True)
def _nothing_is_left() -> Any:
    before = active_patches()
    yield
    assert active_patches() == before
    assert Library.number == 1
    assert Library.double(2) == 4


def listed() -> list[str]:
    """The patches of this file's classes, without the path of the module."""
    return [where.removeprefix(f"{__name__}.") for where in active_patches()]


def test_an_attribute_is_replaced_listed_and_restored():
    with patched(Library, "number", 2) as original:
        assert (Library.number, original) == (2, 1)
        assert listed()[-1] == "Library.number"
    with patched(Library, "double", staticmethod(lambda x: 0)):
        assert Library.double(2) == 0
    assert isinstance(vars(Library)["double"], staticmethod)


def test_an_inherited_attribute_is_inherited_again():
    with patched(Child, "number", 2):
        assert (Child.number, Library.number) == (2, 1)
    assert "number" not in vars(Child)


def test_the_path_of_a_module_an_entry_of_a_dict_and_a_member_of_a_set():
    with patched("json.decoder", "NaN", 0.0):
        assert active_patches()[-1] == "json.decoder.NaN"
    table = {"a": 1}
    with patched(table, "a", 2, where="the table"):
        assert table == {"a": 2}
        assert active_patches()[-1] == "the table"
    assert table == {"a": 1}
    members = {1}
    for member in (1, 2):
        with patched(members, member, member, where="the members"):
            assert member in members
        assert members == {1}


def test_contexts_nest_and_exceptions_restore():
    def fail_inside() -> None:
        with patched(Library, "number", 2):
            with patched(Library, "number", 3):
                assert Library.number == 3
                assert listed()[-2:] == ["Library.number"] * 2
            assert Library.number == 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_inside()


def test_contexts_of_several_threads_may_overlap():
    first, second = patched(Library, "number", 2), patched(Library, "number", 3)
    first.__enter__()
    assert second.__enter__() == 2
    first.__exit__(None, None, None)
    assert Library.number == 3
    second.__exit__(None, None, None)
    assert Library.number == 1


def test_what_others_replace_meanwhile_is_an_error_and_the_original_is_back():
    def interfere(error: type[Exception] | None = None) -> None:
        with patched(Library, "number", 2):
            Library.number = 4
            if error is not None:
                raise error

    with pytest.raises(RuntimeStateError, match=r"Library.number was replaced by other code"):
        interfere()
    assert Library.number == 1
    with pytest.raises(ZeroDivisionError):
        interfere(ZeroDivisionError)


def test_what_is_missing_is_named():
    versions = f"torch {re.escape(torch.__version__)} comes with no .*; use torch 2"
    for owner, name in ((Library, "other"), ("json.other", "x"), ({}, "key"), ("json", "other")):
        with pytest.raises(UnsupportedTorchError, match=versions), patched(owner, name, 1):
            pass


def test_one_for_good_is_listed_as_long_as_its_owner_lives():
    owner = ModuleType("somewhere")
    owner.number = 1  # type: ignore[attr-defined]
    patched_for_good(owner, "number", 2)
    assert owner.number == 2
    assert active_patches()[-1] == "somewhere.number"
    del owner
    gc.collect()
    assert "somewhere.number" not in active_patches()


def test_a_class_is_one_more_attribute():
    owner = Library()
    patched_for_good(owner, "__class__", Child)
    assert type(owner) is Child
    assert listed()[-1] == "Library.__class__"
    del owner


def test_a_trace_lists_what_it_replaces_and_leaves_nothing():
    seen = SimpleQueue()  # a trace undoes what a forward adds to a list or set

    class Net(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.put(active_patches())
            return super().forward(x)

    capture(Net(2, 2), (torch.ones(1, 2),))
    assert {
        "torch.fx.experimental.proxy_tensor._extract_tensor_metadata",
        "torch._decomp.decompositions._rnn_helper",
        "torch.utils.checkpoint.CheckpointFunction",
        "torch.autograd.graph.saved_tensors_hooks.__enter__",
        "torch.fx.node._side_effectful_functions",
        "torch._library.effects.EffectHolder._effect",
        "torch.ops.aten.upsample_nearest2d.vec.py_kernels",
    } <= set(seen.get())


def test_no_file_of_the_product_patches_in_another_way():
    files = [*(ROOT / "graphshard").rglob("*.py"), *(ROOT / "passes").glob("*.py")]
    for file in files:
        text = file.read_text()
        assert "unittest" not in text, file
        assert "__class__ = " not in text or file.name == "patches.py", file

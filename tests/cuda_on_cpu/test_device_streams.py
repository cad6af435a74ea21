"""The rules of memory, draws and errors that other tests rely on; on GPUs they hold as well."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch
from ranks import is_made_up

pytestmark = pytest.mark.cuda


LONG = 200_000_000
"""Cycles: 0.1 s or more."""


MISSING_WAIT = """
import os, torch
slow = torch.cuda.Stream()
x = torch.ones(1000, device="cuda")
torch.cuda.synchronize()
with torch.cuda.stream(slow):
    x.fill_(2.0)
y = x + 0
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print(error, flush=True)
os._exit(0)
"""


def test_a_missing_wait_is_reported_with_both_lines() -> None:
    if not is_made_up():
        pytest.skip("a GPU says nothing")
    command = [sys.executable, "-c", MISSING_WAIT]
    said = subprocess.run(command, capture_output=True, text=True).stdout
    assert re.search(
        r"stream \d+ reads 4000 bytes in aten.add.Tensor at <string>:8 that stream \d+ writes in "
        r"aten.fill_.Scalar at <string>:7, and has not waited for it: that is launch 1, and it "
        r"waited for launch 0",
        said,
    )


def test_new_memory_is_poisoned() -> None:
    if not is_made_up():
        pytest.skip("a GPU's memory holds what was there before")
    torch.cuda.empty_cache()
    assert torch.empty(1 << 20, device="cuda").isnan().all()


def test_memory_has_an_end() -> None:
    _, total = torch.cuda.mem_get_info()
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(total + 1, dtype=torch.uint8, device="cuda")


def test_a_pinned_copy_is_asynchronous_and_a_pageable_one_reads_at_once() -> None:
    for pinned in (True, False):
        source = torch.ones(1000, pin_memory=pinned)
        x = torch.zeros(1000, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(LONG)
        x.copy_(source, non_blocking=True)
        source.fill_(2.0)
        torch.cuda.synchronize()
        assert x.eq(2.0 if pinned else 1.0).all()


def test_draws_are_those_of_seed_and_offset() -> None:
    torch.cuda.manual_seed(5)
    first, state = torch.rand(8, device="cuda"), torch.cuda.get_rng_state()
    dropped = torch.nn.functional.dropout(torch.ones(100, device="cuda"), 0.5)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(100, device="cuda"), 0.5), dropped)
    assert 20 < int(dropped.count_nonzero()) < 80
    assert not torch.equal(torch.rand(8, device="cuda"), first)
    host = torch.get_rng_state()
    torch.cuda.manual_seed(5)
    assert torch.equal(torch.rand(8, device="cuda"), first)
    assert torch.equal(torch.get_rng_state(), host)


FAILS = """
import torch
x = torch.ones(4, device="cuda")
y = x[torch.tensor([9], device="cuda")]
try:
    torch.cuda.synchronize()
except RuntimeError as error:
    print("first", type(error).__name__)
try:
    torch.ones(4, device="cuda")
    torch.cuda.synchronize()
except RuntimeError as error:
    print("again", type(error).__name__)
import os; os._exit(0)
"""


def test_an_error_on_the_device_stays() -> None:
    ended = subprocess.run([sys.executable, "-c", FAILS], capture_output=True, text=True)
    assert ended.stdout.split("\n")[:2] == ["first AcceleratorError", "again AcceleratorError"]


def test_what_is_not_built_names_itself() -> None:
    if not is_made_up():
        pytest.skip("a GPU has it")
    x = torch.ones(4, device="cuda")
    with pytest.raises(RuntimeError, match="cudaIpcGetMemHandle is not built"):
        x.untyped_storage()._share_cuda_()
    with pytest.raises(RuntimeError, match="aten::_cudnn_rnn has no CPU kernel"):
        torch._cudnn_rnn(x, [x], 1, None, x, None, 0, 4, 0, 1, True, 0.0, True, False, [], None)
    torch.cuda.synchronize()

"""Every call that communicates, where ranks differ in it: an error on all of them, nothing changed.

A table of calls, each made with other arguments on one rank, in another order, while it fails on
one rank, and by one rank alone.
"""

from __future__ import annotations

import contextlib
import copy
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from ranks import checks_of, error_of, on_ranks, run_ranks
from state_checks import shared_folder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.errors import (
    CaptureError,
    CheckpointError,
    CollectiveError,
    FingerprintError,
    GraphshardError,
    PolicyError,
)
from graphshard.errors import RuntimeStateError as StateError
from graphshard.module import training
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.group import find_group
from graphshard.state import dcp_write, files, manifest, optim

TIMEOUT = 5.0  # seconds
LINEAR = graphshard.BlockPolicy({nn.Linear})
X = torch.ones(2, 4)


class Config:
    """A configuration as transformers models have one."""

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "config.json").write_text(json.dumps({"new": True}))


class Model(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.config = Config()
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale


class Setup:
    """A sharded module with gradients, its optimizer with state, and files of other values."""

    def __init__(self, rank: int, mesh: DeviceMesh | None = None) -> None:
        self.rank = rank
        self.mesh = mesh
        self.models = Model(), Model(5)
        self.folder = shared_folder()
        self.module = graphshard.compile(Model(), LINEAR, mesh=mesh)
        self.optim = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        for folder in ("old", "pretrained"):
            self.step()
            self.module.save_checkpoint(self.folder / folder, self.optim)
        self.module.save_safetensors(self.folder / "old.safetensors")
        self.step()
        self.step(update=False)

    def step(self, *, update: bool = True) -> None:
        self.module.zero_grad()
        self.module(X).sum().backward()
        if update:
            self.optim.step()

    def snapshot(self) -> dict[str, Any]:
        """All that a call could change."""
        tensors: dict[str, Any] = dict(self.module.local_state_dict())
        for name, param in self.module.named_parameters():
            tensors[f"grad of {name}"] = param.grad.to_local()
            assert self.module.get_parameter(name) is param
        for index, state in enumerate(self.optim.state.values()):
            for key, value in state.items():
                local = value.to_local() if hasattr(value, "to_local") else value
                tensors[f"{key} of {index}"] = local
        files = {str(f): f.read_bytes() for f in sorted(self.folder.rglob("*")) if f.is_file()}
        return {name: t.clone() for name, t in tensors.items()} | {
            "files": files,
            "random": torch.get_rng_state(),
        }

    def require_unchanged(self, before: dict[str, Any]) -> None:
        after = self.snapshot()
        assert before.keys() == after.keys()
        for name, value in before.items():
            if name == "files":
                assert {*value} == {*after[name]}
                assert value == after[name]
            else:
                assert torch.equal(value, after[name]), name


Entry = Callable[[Setup, bool], Any]


def _save(setup: Setup, other: bool, **options: Any) -> Any:
    path = setup.folder / ("other" if other else "new")
    saving = setup.module.save_checkpoint(path, setup.optim, **options)
    return saving.result() if isinstance(saving, Future) else None


def _unsharded(setup: Setup, other: bool) -> None:
    with setup.module.unsharded(with_grads=other) as params, torch.no_grad():
        params["first.weight"] += 1
        if "fails in the body" in vars(setup):
            raise ValueError("on purpose")


def _compile(setup: Setup, other: bool) -> None:
    policy = graphshard.BlockPolicy({nn.Linear}, strategy="SHARD_GRAD_OP" if other else "NO_SHARD")
    inputs = torch.ones(2, 5 if "takes no such input" in vars(setup) else 4)
    graphshard.compile(setup.models[0], policy, mesh=setup.mesh, example_inputs=(inputs,))


ENTRIES: dict[str, Entry] = {
    "clip_grad_norm_": lambda s, other: s.module.clip_grad_norm_(2.0 if other else 1.0),
    "full_state_dict": lambda s, other: s.module.full_state_dict(rank0_only=not other),
    "optimizer_state_dict": lambda s, other: s.module.optimizer_state_dict(
        s.optim, kind="full", rank0_only=not other
    ),
    "save_checkpoint": _save,
    "save_checkpoint, background": lambda s, other: _save(s, other, background=True),
    "load_checkpoint": lambda s, other: s.module.load_checkpoint(
        s.folder / ("pretrained" if other else "old"), s.optim
    ),
    "save_safetensors": lambda s, other: s.module.save_safetensors(
        s.folder / "new.safetensors", dtype=torch.float64 if other else None
    ),
    "save_pretrained": lambda s, other: s.module.save_pretrained(
        s.folder / "pretrained", max_shard_bytes=100 if other else 60
    ),
    "load_safetensors": lambda s, other: s.module.load_safetensors(
        s.folder / "old.safetensors", strict=not other
    ),
    "load_full_state_dict": lambda s, other: s.module.load_full_state_dict(
        s.models[other].state_dict()
    ),
    "load_optimizer_state_dict": lambda s, other: s.module.load_optimizer_state_dict(
        s.optim, s.optim_state, kind="local" if other else None
    ),
    "unsharded": _unsharded,
    "compile": _compile,
}
"""Each with `other` arguments than those that are the same on all ranks."""


def prepared(rank: int, mesh: DeviceMesh | None = None) -> Setup:
    setup = Setup(rank, mesh)
    setup.optim_state = setup.module.optimizer_state_dict(setup.optim)
    return setup


# -- other arguments, another order -------------------------------------------------------------


def still_works(setup: Setup, entry: Entry) -> None:
    """The module runs, and so does the call if all make it alike."""
    entry(setup, False)
    assert setup.module(X).isfinite().all()
    setup.step(update=False)


def other_arguments(rank: int) -> None:
    setup = prepared(rank)
    for name, entry in ENTRIES.items():
        before = setup.snapshot()
        kind: Any = CheckpointError if name == "load_full_state_dict" else FingerprintError
        message = error_of(lambda e=entry: e(setup, rank == 1), kind)
        method = name.partition(",")[0]
        if name == "compile":
            assert "rank 0: policy strategy=NO_SHARD\n  rank 1: policy strategy=SHARD" in message
        elif kind is CheckpointError:
            assert message.startswith("'first.weight' has shape [5, 4]")
            assert message.endswith("(on rank 1)")
        else:
            assert f"different calls: rank 0 calls {method}(" in message, message
            assert f", rank 1 calls {method}(" in message, message
        setup.require_unchanged(before)
        still_works(setup, entry)


def another_order(rank: int) -> None:
    """Each with the next one of the table, and with a forward and a backward."""
    setup = prepared(rank)
    loss = setup.module(X).sum()
    names = [*ENTRIES]
    for name, following in zip(names, [*names[1:], names[0]], strict=True):
        before = setup.snapshot()
        mine = ENTRIES[name if rank == 0 else following]
        message = error_of(lambda m=mine: m(setup, False), FingerprintError)
        texts = [n.partition(",")[0] for n in (name, following)]
        if texts[0] != texts[1]:
            assert f"rank 0 calls {texts[0].replace('compile', 'graphshard.compile')}(" in message
            assert f"rank 1 calls {texts[1].replace('compile', 'graphshard.compile')}(" in message
        call = (lambda m=mine: m(setup, False)) if rank == 0 else (lambda: setup.module(X))
        message = error_of(call, FingerprintError)
        assert f"rank 0 calls {texts[0].replace('compile', 'graphshard.compile')}(" in message
        assert "rank 1 is about to begin 'forward all_gather of first over 2 ranks'" in message
        setup.require_unchanged(before)
    before = setup.snapshot()
    call = loss.backward if rank == 0 else (lambda: setup.module.clip_grad_norm_(1.0))
    message = error_of(call, FingerprintError)
    assert "rank 0 is about to begin 'backward" in message
    assert "rank 1 calls clip_grad_norm_(max_norm=1.0)" in message
    setup.require_unchanged(before)
    still_works(setup, ENTRIES["clip_grad_norm_"])


# -- failures on one rank -------------------------------------------------------------------------


def _raise(error: BaseException) -> Callable[..., Any]:
    def call(*_: Any, **__: Any) -> Any:
        raise error

    return call


@contextlib.contextmanager
def hooked(setup: Setup) -> Iterator[None]:
    """Its state dict cannot be made."""
    handle = setup.module.register_state_dict_post_hook(_raise(ValueError("on purpose")))
    yield
    handle.remove()


@contextlib.contextmanager
def load_hooked(setup: Setup) -> Iterator[None]:
    """Its optimizer takes no state."""
    handle = setup.optim.register_load_state_dict_post_hook(_raise(ValueError("on purpose")))
    yield
    handle.remove()


@contextlib.contextmanager
def call_fails(owner: Any, name: str, number: int = 3) -> Iterator[None]:
    """One of the calls of a method fails."""
    original, calls = getattr(owner, name), []

    def call(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == number:
            raise OSError("on purpose")
        return original(*args, **kwargs)

    with mock.patch.object(owner, name, call):
        yield


@contextlib.contextmanager
def says(setup: Setup, what: str) -> Iterator[None]:
    vars(setup)[what] = True
    yield
    del vars(setup)[what]


def patched(owner: Any, name: str) -> Any:
    return mock.patch.object(owner, name, _raise(ValueError("on purpose")))


Failure = tuple[str, int, Callable[[Setup], Any], type[GraphshardError]]

FAILURES: list[Failure] = [
    ("clip_grad_norm_", 1, lambda s: patched(training, "_local"), CollectiveError),
    ("full_state_dict", 1, hooked, CollectiveError),
    ("full_state_dict", 0, lambda s: call_fails(Tensor, "cpu", 1), CollectiveError),
    (
        "optimizer_state_dict",
        1,
        lambda s: patched(optim, "state_tensors_of_optimizer"),
        CollectiveError,
    ),
    ("optimizer_state_dict", 0, lambda s: call_fails(Tensor, "cpu", 1), CollectiveError),
    ("save_checkpoint", 1, hooked, CollectiveError),
    ("save_checkpoint", 1, lambda s: patched(dcp_write._ChecksummedFile, "write"), CheckpointError),
    ("save_checkpoint", 0, lambda s: patched(manifest, "_write"), CheckpointError),
    ("save_checkpoint, background", 1, hooked, CollectiveError),
    (
        "save_checkpoint, background",
        1,
        lambda s: patched(dcp_write._ChecksummedFile, "write"),
        CheckpointError,
    ),
    ("load_checkpoint", 1, load_hooked, CollectiveError),
    ("load_checkpoint", 1, lambda s: call_fails(torch, "set_rng_state", 1), CollectiveError),
    ("save_safetensors", 1, hooked, CollectiveError),
    ("save_safetensors", 0, lambda s: call_fails(files.Writer, "write"), CheckpointError),
    ("save_pretrained", 0, lambda s: patched(Config, "save_pretrained"), CollectiveError),
    ("save_pretrained", 0, lambda s: call_fails(files.Writer, "write"), CheckpointError),
    ("load_safetensors", 1, lambda s: call_fails(files.StoredTensor, "read"), CheckpointError),
    ("load_optimizer_state_dict", 1, load_hooked, CollectiveError),
    ("compile", 1, lambda s: says(s, "takes no such input"), CaptureError),
    ("compile", 1, lambda s: patched(graphshard.BlockPolicy, "select"), CollectiveError),
]
"""Call, the rank on which it fails, what makes it fail there, and the error on all ranks."""


def failures_on_one_rank(rank: int) -> None:
    fail_on_one_rank(rank, FAILURES[::5])


def all_failures_on_one_rank(rank: int) -> None:
    fail_on_one_rank(rank, FAILURES)


def fail_on_one_rank(rank: int, failures: list[Failure]) -> None:
    setup = prepared(rank)
    for name, failing, failure, kind in failures:
        before = setup.snapshot()
        with failure(setup) if rank == failing else contextlib.nullcontext():
            message = error_of(lambda n=name: ENTRIES[n](setup, False), kind)
        assert f"(on rank {failing})" in message, message
        assert "on purpose" in message or kind is CaptureError, message
        dist.barrier()
        setup.require_unchanged(before)
        still_works(setup, ENTRIES[name])


def a_body_that_fails_on_one_rank(rank: int) -> None:
    """That rank gets its own error, others one of ours, and what was written is gone."""
    setup = prepared(rank)
    before = setup.snapshot()
    with says(setup, "fails in the body") if rank == 1 else contextlib.nullcontext():
        kind: Any = ValueError if rank == 1 else CollectiveError
        with pytest.raises(kind, match="on purpose") as caught:
            ENTRIES["unsharded"](setup, True)
    if rank == 0:
        assert "unsharded(with_grads=True) failed: ValueError" in str(caught.value)
        assert "(on rank 1)" in str(caught.value)
    setup.require_unchanged(before)
    still_works(setup, ENTRIES["unsharded"])
    after = setup.module.local_state_dict()["first.weight"]
    assert torch.allclose(after, before["first.weight"] + 1), "the body that did not fail"


def gradients_on_one_rank(rank: int) -> None:
    setup = prepared(rank)
    if rank == 1:
        setup.module.zero_grad()
    message = error_of(lambda: setup.module.clip_grad_norm_(1.0), FingerprintError)
    assert "rank 0: 4 gradients" in message
    assert "rank 1: 0 gradients" in message
    assert all((param.grad is None) == (rank == 1) for param in setup.module.parameters())


def an_optimizer_that_stepped_on_one_rank(rank: int) -> None:
    setup = prepared(rank)
    optimizer = torch.optim.AdamW(setup.module.parameters())
    if rank == 0:
        optimizer.step()
    for call in (
        lambda: setup.module.optimizer_state_dict(optimizer, kind="full"),
        lambda: setup.module.save_checkpoint(setup.folder / "new", optimizer),
    ):
        message = error_of(call, FingerprintError)
        assert "rank 0: exp_avg of first.weight [4, 4] float32" in message
        assert "rank 1: nothing more" in message
    assert not (setup.folder / "new").exists()


def through_the_store(rank: int) -> None:
    """As with NCCL: calls that wait compare each time, others at their first time only."""
    group = replace(find_group(None, None), backend="nccl", timeout=timedelta(seconds=2))
    agreement = Agreement(group)
    agreement.join()

    def call(text: str, *, fails: bool = False, waits: bool = True) -> None:
        with agreement.call(text), agreement.part(waits=waits):
            if fails:
                raise ValueError("on purpose")

    for _ in range(3):
        call("a()")
    message = error_of(lambda: call(("a()", "b()")[rank]), FingerprintError)
    assert "different calls: rank 0 calls a(), rank 1 calls b(); every rank must" in message
    message = error_of(lambda: call("a()", fails=rank == 1), CollectiveError)
    assert message == "a() failed: ValueError: on purpose (on rank 1)"
    call("c(1)", waits=False)
    call("c(2)", waits=False)
    message = error_of(lambda: call(f"d({rank})", waits=False), FingerprintError)
    assert "rank 0 calls d(0), rank 1 calls d(1)" in message
    if rank == 0:
        with pytest.raises(CollectiveError, match=r"rank 0 of 2 calls f\(\), but rank 1 died"):
            call("f()")


REFUSED: list[tuple[str, Callable[[Any, Any], object], Any, type[GraphshardError]]] = [
    ("replicas must be", lambda m, v: m.save_checkpoint("never", replicas=v), "x", StateError),
    ("modules must be the name", lambda m, v: entered(m.unsharded(v)), 5, PolicyError),
    ("modules must be the name", lambda m, v: entered(m.unsharded(v)), [nn.ReLU()], PolicyError),
    ("leave_out must be", lambda m, v: m.check_replicas(leave_out=v), 3, PolicyError),
    ("leave_out must be", lambda m, v: m.check_replicas(leave_out=[3]), 3, PolicyError),
    ("no regular expression", lambda m, v: m.check_replicas(leave_out=v), "(", PolicyError),
    ("mesh must be a DeviceMesh", lambda m, v: m.rebind(v), "x", PolicyError),
]
"""What an error says, a call with an argument, a value that it refuses, and the error's class."""


def entered(context: Any) -> None:
    with context:
        pass


def arguments_that_are_refused(rank: int) -> None:
    """On all ranks, or on one rank where others are in a call of another name."""
    setup = prepared(rank)
    for match, call, value, kind in REFUSED:
        assert match in error_of(lambda c=call, v=value: c(setup.module, v), kind)
        with pytest.raises(GraphshardError) as caught:
            call(setup.module, value) if rank == 1 else setup.module.full_state_dict()
        assert isinstance(caught.value, (kind, FingerprintError))
        setup.module.check_replicas()
    with setup.module.unsharded(name for name in ["first"]) as params:
        assert set(params) == {"first.weight", "first.bias"}


def a_copy_without_the_group(rank: int) -> None:
    module = prepared(rank).module
    dist.destroy_process_group()
    with pytest.raises(StateError, match=r"needs the process group .* which is gone"):
        copy.deepcopy(module)


test_on_two_ranks = on_ranks(
    checks_of(globals(), but=[all_failures_on_one_rank, a_copy_without_the_group]), 2
)


def test_a_copy_without_the_group() -> None:
    run_ranks(a_copy_without_the_group, 2)


# -- one rank alone -------------------------------------------------------------------------------


def mesh_of_its_own() -> DeviceMesh:
    """A mesh of all ranks whose group gives up soon, and does not break that of others."""
    group = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT))
    return DeviceMesh.from_group(group, "cpu")


def errors_in_threads(calls: list[Callable[[], Any]]) -> list[BaseException | None]:
    """The errors of calls that wait at the same time."""
    with ThreadPoolExecutor(len(calls)) as threads:
        return [future.exception() for future in [threads.submit(call) for call in calls]]


def one_rank_alone(rank: int) -> None:
    setups = {name: prepared(rank, mesh_of_its_own()) for name in ENTRIES}
    before = {name: setup.snapshot() for name, setup in setups.items()}
    dist.barrier()
    begin = time.monotonic()
    if rank == 0:
        errors = errors_in_threads(
            [lambda n=name, s=setup: ENTRIES[n](s, False) for name, setup in setups.items()]
        )
        assert time.monotonic() - begin < 4 * TIMEOUT
        for name, error in zip(ENTRIES, errors, strict=True):
            assert isinstance(error, CollectiveError), (name, error)
            method = name.partition(",")[0].replace("compile", "graphshard.compile")
            assert f"rank 0 of 2 calls {method}(" in str(error)
            assert f"rank 1 died, raised an error, or did not get here within {TIMEOUT:g} s" in str(
                error
            )
    dist.barrier()
    for name, setup in setups.items():
        setup.require_unchanged(before[name])
    if rank == 1:  # and what it calls next tells what rank 0 waited in
        errors = errors_in_threads(
            [lambda s=setup: s.module.clip_grad_norm_(2.0) for setup in setups.values()]
        )
        for name, error in zip(ENTRIES, errors, strict=True):
            assert isinstance(error, CollectiveError), (name, error)
            method = name.partition(",")[0].replace("compile", "graphshard.compile")
            assert "rank 1 of 2 calls clip_grad_norm_(max_norm=2.0)" in str(error)
            assert f", rank 0 calls {method}(" in str(error), error
    dist.barrier()
    for name, setup in setups.items():
        setup.require_unchanged(before[name])


def lost_in_the_middle(rank: int) -> None:
    """A collective that fails inside of a call names the call, and what the other rank did."""
    setup = prepared(rank, mesh_of_its_own())
    before = setup.snapshot()
    dist.barrier()
    if rank == 1:
        from graphshard.state import save

        with (
            mock.patch.object(save, "gather_full", _raise(MemoryError("on purpose"))),
            pytest.raises(CollectiveError, match=r"full_state_dict\(\), which failed with Memory"),
        ):
            setup.module.full_state_dict()
    else:
        with pytest.raises(CollectiveError) as caught:
            setup.module.full_state_dict()
        assert "rank 0 of 2 calls full_state_dict()" in str(caught.value)
        assert "rank 1 calls full_state_dict(), which failed with MemoryError" in str(caught.value)
    setup.require_unchanged(before)
    dist.barrier()  # rank 0 comes later by the timeout, which ends the groups that follow as well


SLOW = [lost_in_the_middle, one_rank_alone, all_failures_on_one_rank]

test_slow_on_two_ranks = pytest.mark.slow(on_ranks(SLOW, 2))

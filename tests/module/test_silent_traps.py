"""Mistakes that trained nothing, hung, or spoke of torch alone: each is told as ours."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
import warnings
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import checks_of, error_of, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

import graphshard
from graphshard.errors import (
    CaptureError,
    CheckpointError,
    PlanError,
    PolicyError,
    RuntimeStateError,
)
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.calls import Fingerprint
from graphshard.runtime.group import find_group

X = torch.ones(4, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).relu()


class Net(nn.Module):
    """`bad_rank` multiplies shapes that do not fit."""

    def __init__(self, bad_rank: int | None = None) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.bad_rank = bad_rank

    def forward(self, x: Tensor) -> Tensor:
        if self.bad_rank is not None and self.bad_rank == dist.get_rank():
            x = x @ x
        return self.blocks(x).sum()


def compiled(model: nn.Module, **arguments: Any) -> graphshard.ShardedModule:
    return graphshard.compile(model, graphshard.BlockPolicy({Block}), **arguments)


# -- optimizers of the wrong parameters -----------------------------------------------------------


@pytest.mark.parametrize("before", [True, False])
def test_an_optimizer_of_the_original_model_does_not_step(before: bool) -> None:
    model = Net()
    optim = torch.optim.SGD(model.parameters(), lr=0.1) if before else None
    sharded = compiled(model)
    optim = optim or torch.optim.SGD(model.parameters(), lr=0.1)
    optim.step()  # without gradients anywhere it is no mistake yet
    sharded(X).backward()
    with pytest.raises(RuntimeStateError, match=r"holds 'blocks\.0\.fc\.weight' of the model that"):
        optim.step()


def test_a_step_without_the_reduce_of_what_no_sync_accumulated_is_refused() -> None:
    sharded = compiled(Net())
    optim = torch.optim.SGD(sharded.parameters(), lr=0.1)
    with sharded.no_sync():
        sharded(X).backward()
    with pytest.raises(RuntimeStateError, match=r"would change nothing.*accumulated by no_sync"):
        optim.step()
    other = torch.optim.SGD([nn.Parameter(torch.ones(2))])
    other.step()
    sharded(X).backward()
    optim.step()
    with sharded.no_sync():
        sharded(X).backward()
    optim.step()  # with gradients of the backward before
    sharded.zero_grad()
    optim.step()


def test_arguments_that_torch_s_functions_take_are_told() -> None:
    sharded = compiled(Net())
    with pytest.raises(PolicyError, match=r"max_norm must be a number; got generator.*own"):
        sharded.clip_grad_norm_(sharded.parameters(), 1.0)  # type: ignore[arg-type]
    for given in (sharded.parameters(), [{"params": list(sharded.parameters())}]):
        with pytest.raises(PolicyError, match="got parameters, which are the module's own"):
            sharded.optimizer(torch.optim.SGD, given, lr=0.1)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", ["state", {"step": 1}, nn.Linear(1, 1)])
def test_what_is_no_optimizer_is_not_saved_as_one(given: Any, tmp_path: Any) -> None:
    sharded = compiled(Net())
    with pytest.raises(CheckpointError, match=r"optim must be an optimizer.*got a.*extra= takes"):
        sharded.save_checkpoint(tmp_path / "saved", given)


def test_the_original_model_may_be_trained_beside() -> None:
    model = Net()
    sharded = compiled(model)
    optims = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, sharded)]
    for _ in range(2):
        losses = [each(X) for each in (model, sharded)]
        assert losses[0].item() == losses[1].item()
        for loss, optim in zip(losses, optims, strict=True):
            loss.backward()
            optim.step()
            optim.zero_grad()


# -- models that something else has wrapped --------------------------------------------------------


def test_data_parallel_is_refused_on_one_rank_too() -> None:
    with pytest.raises(PlanError, match=r"DataParallel\) reduces gradients.*pass its \.module"):
        compiled(nn.DataParallel(Net()))


def test_torch_compile_of_the_whole_model_is_taken_off_with_a_warning() -> None:
    model = Net()
    with pytest.warns(UserWarning, match=r'torch\.compile has no effect.*backend="inductor"'):
        sharded = compiled(torch.compile(model))
    assert [n for n, _ in sharded.named_parameters()] == [n for n, _ in model.named_parameters()]


def test_torch_compile_of_a_sharded_module_runs_it_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", said.append)
    sharded = compiled(Net())
    expected = sharded(X)
    loss = torch.compile(sharded)(X)
    loss.backward()
    gc.collect()
    assert torch.equal(loss, expected)
    assert all(param.grad is not None for param in sharded.parameters())
    assert said == []


def test_torch_compile_of_parts_is_told_by_name() -> None:
    model = Net()
    model.blocks[0] = torch.compile(model.blocks[0])
    model.blocks[1].compile()
    with pytest.warns(UserWarning, match=r"compile of blocks\.1, blocks\.0 .*_orig_mod' in them"):
        compiled(model)


# -- meshes, devices, inputs ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"mesh": 2}, r"mesh must be a DeviceMesh, .* or None for .*; got 2"),
        ({"device": "cuda:99"}, r"device='cuda:99' is not there: torch .* on this machine"),
        ({"device": "gpu"}, r"device must be a torch\.device or its name.*got 'gpu'"),
        ({"device": "meta"}, r"meta device have no values"),
    ],
)
def test_meshes_and_devices_that_are_none(arguments: Any, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        compiled(Net(), **arguments)


def test_inputs_on_meta_are_refused_where_they_would_be_computed_with() -> None:
    sharded = compiled(Net(), example_inputs=(X.to("meta"),))
    with pytest.raises(CaptureError, match=r"args\[0\] is on the meta device"):
        sharded(X.to("meta"))


# -- torch's log ----------------------------------------------------------------------------------


def test_torch_logs_no_pages_before_our_error(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharded = compiled(Net())
    for shown in (False, True):
        caplog.clear()
        if shown:
            monkeypatch.setenv("TORCH_LOGS", "+fake_tensor")
        with pytest.raises(CaptureError, match=r"must have same reduction dim.*\n  at .*self\.fc"):
            sharded(torch.ones(4, 9))
        assert any(r.levelname == "ERROR" for r in caplog.records) == shown


# -- on ranks -------------------------------------------------------------------------------------


def wrapped_by_others(rank: int) -> None:
    model = Net()
    fully_shard(model.blocks[0])
    message = error_of(lambda: compiled(model), PlanError)
    assert message.startswith("blocks.0 (FSDPBlock) is sharded by fully_shard already")
    ddp = nn.parallel.DistributedDataParallel(Net())
    assert "pass its .module" in error_of(lambda: compiled(ddp), PlanError)


def wrapped_after_compile(rank: int) -> None:
    sharded = compiled(Net())
    wrap = nn.parallel.DistributedDataParallel
    message = error_of(lambda: wrap(sharded), RuntimeStateError)
    assert message.startswith("DistributedDataParallel cannot wrap a sharded module")
    for part in (sharded.blocks[0], sharded):
        message = error_of(lambda part=part: fully_shard(part), RuntimeStateError)
        assert message.startswith("fully_shard cannot be applied to a sharded module")
    sharded(X).backward()


def a_rank_outside_of_its_mesh(rank: int) -> None:
    mesh = DeviceMesh("cpu", [0])
    refused = pytest.raises(PolicyError, match=r"the mesh has ranks \[0\], and this is rank 1")
    with refused if rank else contextlib.nullcontext():
        graphshard.compile(Net(), graphshard.BlockPolicy({Block}), mesh=mesh)


def one_rank_fails_to_compile(rank: int) -> None:
    mesh: Any = 2 if rank == 1 else None
    assert error_of(lambda: compiled(Net(), mesh=mesh), PolicyError).endswith("(on rank 1)")
    device = "gpu" if rank == 0 else "cpu"
    assert error_of(lambda: compiled(Net(), device=device), PolicyError).endswith("(on rank 0)")
    capture = error_of(lambda: compiled(Net(bad_rank=0), example_inputs=(X,)), CaptureError)
    assert capture.endswith("(on rank 0)")


def one_rank_fails_to_call(rank: int) -> None:
    """At the first call and later, with and without gradients; the module goes on after it."""
    sharded = compiled(Net(bad_rank=1))
    assert error_of(lambda: sharded(X), CaptureError).endswith("(on rank 1)")
    sharded = compiled(Net())
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            value = sharded(X)
            wrong = torch.ones(4, 9) if rank == 0 else X
            assert "reduction dim" in error_of(lambda wrong=wrong: sharded(wrong), CaptureError)
            assert torch.equal(sharded(X), value)
    # An error of another class is that rank's own; the others are told of it.
    with pytest.raises(Exception, match="nothing_like_it") as caught:
        sharded(X, nothing_like_it=1) if rank == 0 else sharded(X)
    assert isinstance(caught.value, graphshard.GraphshardError) or rank == 0


def one_rank_fails_where_ranks_meet_in_the_store(rank: int) -> None:
    """As over NCCL: told as long as no program is known to all ranks, and not after that."""
    group = replace(find_group(None, None), backend="nccl", timeout=timedelta(seconds=5))
    agreement = Agreement(group)
    agreement.join()
    call = Fingerprint(("all_gather of block",))

    def begin() -> None:
        if rank == 1:
            agreement.give_up(CaptureError("it cannot be one graph"))
        agreement.require(call)

    assert error_of(begin, CaptureError) == "it cannot be one graph (on rank 1)"
    agreement.require(call)
    agreement.give_up(CaptureError("of this rank alone"))  # returns at once


def all_ranks_fail_alike(rank: int) -> None:
    with pytest.raises(CaptureError) as caught:
        compiled(Net())(torch.ones(4, 9))
    assert "on rank" not in str(caught.value)


def weights_that_backward_reads_by_a_view_alone(rank: int) -> None:
    """A change between forward and backward is refused, unless backward does not read it."""
    for strategy in ("FULL_SHARD", "NO_SHARD", "SHARD_OPTIMIZER"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
        again = True if strategy == "FULL_SHARD" else None
        policy = graphshard.BlockPolicy({nn.Linear}, strategy=strategy, reshard_after_forward=again)
        sharded = graphshard.compile(model, policy)
        for name, refused in (("2.bias", False), ("2.weight", True)):
            loss = sharded(torch.ones(3, 4)).sum()
            with torch.no_grad():
                sharded.get_parameter(name).add_(1.0)
            if refused:
                with pytest.raises(RuntimeStateError, match=r"'2\.weight' was changed between"):
                    loss.backward()
            else:
                loss.backward()


def data_given_to_a_parameter(rank: int) -> None:
    """torch gives it to the outside of a DTensor, where nothing reads it."""
    other = torch.ones(8)
    for strategy in ("FULL_SHARD", "SHARD_OPTIMIZER"):
        for value in (lambda _: other, torch.ones_like):
            sharded = graphshard.compile(Net(), graphshard.BlockPolicy({Block}, strategy=strategy))
            sharded(X)
            bias = sharded.get_parameter("blocks.0.fc.bias")
            with torch.no_grad():
                bias.data.mul_(2)
            bias.data = bias.data  # as `sharded.float()` does
            sharded(X)
            bias.data = value(bias)
            said = error_of(lambda sharded=sharded: sharded(X), RuntimeStateError)
            assert "'blocks.0.fc.bias' was given other data by `.data = ...`" in said


def test_a_backward_that_names_parameters_is_refused() -> None:
    sharded, x = compiled(Net()), X.clone().requires_grad_()
    params = list(sharded.parameters())
    for inputs in (params[0], sharded.parameters(), [x, params[1]]):
        with pytest.raises(RuntimeStateError, match=r"names parameter 'blocks\.0\.fc\..*plain"):
            sharded(x).backward(inputs=inputs)
    sharded(x).backward(inputs=[x])
    assert x.grad is not None
    sharded(x).backward(inputs=torch.autograd.graph.get_gradient_edge(x))
    assert params[0].grad is None
    params[0].sum().backward(inputs=params[:1])  # a graph of the user's own
    assert torch.equal(params[0].grad, torch.ones(8, 8))


def nothing_to_load(rank: int) -> None:
    sharded = compiled(Net())
    full = sharded.full_state_dict()
    assert bool(full) == (rank == 0)
    for load, state in (
        (sharded.load_state_dict, full),  # {} on rank 1
        (sharded.load_state_dict, {}),
        (sharded.load_full_state_dict, {}),
        (sharded.load_full_state_dict, Net().state_dict() if rank else {}),
    ):
        error_of(lambda load=load, state=state: load(state), CheckpointError)
    sharded.load_full_state_dict(full)


def a_launched_rank_joins_the_others(rank: int) -> None:
    """As torchrun starts it, without init_process_group."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        ports: list[Any] = [None, None]
        dist.all_gather_object(ports, free.getsockname()[1])
    dist.destroy_process_group()
    with pytest.raises(PolicyError, match=r"WORLD_SIZE is 2 .*MASTER_ADDR and MASTER_PORT are not"):
        compiled(Net())
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(ports[0]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded = compiled(Net())
    assert sharded.plan.world_size == dist.get_world_size() == 2


test_on_two_ranks = on_ranks(checks_of(globals()), 2, timeout=100, group_timeout=20)

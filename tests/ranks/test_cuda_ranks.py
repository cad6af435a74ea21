"""Two ranks over NCCL train as one process on the CPU does.

On the CUDA runtime made of CPU threads they do so bit for bit, and with every stream delayed at
random; on GPUs within the rounding of other kernels.
"""

from __future__ import annotations

import contextlib
import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from loops import OneProcess
from ranks import is_made_up, run_ranks
from torch import Tensor, nn

import graphshard
from examples.gpt import GPT, Block, GPTConfig
from graphshard.runtime.calls import Fingerprint
from graphshard.torch_private.dtensors import full_tensor

pytestmark = pytest.mark.cuda

STEPS, VOCAB = 4, 67  # the third call makes a CUDA graph, the fourth replays it

POLICIES: dict[str, dict[str, Any]] = {
    "FULL_SHARD": {},
    "SHARD_GRAD_OP": {"strategy": "SHARD_GRAD_OP"},
    "SHARD_OPTIMIZER": {"strategy": "SHARD_OPTIMIZER"},
    "NO_SHARD": {"strategy": "NO_SHARD"},
    "overlap": {"schedule": "overlap"},
    "offload": {"offload": ("params", "activations")},
    "overlap, offload": {"schedule": "overlap", "offload": ("params", "activations")},
    "recompute": {"recompute": "units"},
    "CUDA graphs": {"cuda_graph": True},
}
MICRO = {"FULL_SHARD": 2, "overlap": 2}
"""Batches of a step under no_sync, but for the last."""


def model() -> GPT:
    torch.manual_seed(0)
    with torch.device("cpu"):
        return GPT(GPTConfig(vocab=VOCAB, layers=2, heads=2, width=32))


def batch(step: int, rank: int, micro: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator("cpu").manual_seed(1000 * step + 10 * rank + micro)
    ids = torch.randint(VOCAB, (2, 17), generator=generator, device="cpu")
    return ids[:, :-1].contiguous(), ids[:, 1:].contiguous()


def by_one_process(world_size: int, micro: int) -> tuple[list[float], dict[str, Tensor]]:
    """Rank 0's losses and the weights, all ranks' batches in this process on the CPU."""

    def on_rank(step: int, rank: int, replica: nn.Module) -> list[float]:
        losses = []
        for number in range(micro):
            loss = replica(*batch(step, rank, number))
            loss.backward()
            losses.append(loss.item())
        return losses

    one = OneProcess(model(), world_size, lambda m: torch.optim.AdamW(m.parameters(), lr=1e-2))
    losses: list[float] = []
    for step in range(STEPS):
        losses += one.average(partial(on_rank, step))[0]
        one.step()
    return losses, one.model.state_dict()


def by_ranks(rank: int, micro: int, fields: dict[str, Any]) -> tuple[list[float], Any]:
    device = torch.device("cuda", torch.cuda.current_device())
    sharded = graphshard.compile(model(), graphshard.BlockPolicy({Block}, **fields))
    assert sharded.plan.process_group_backend == "nccl"
    optim = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    losses = []
    for step in range(STEPS):
        for number in range(micro):
            last = number == micro - 1
            with contextlib.nullcontext() if last else sharded.no_sync():
                loss = sharded(*(ids.to(device) for ids in batch(step, rank, number)))
                loss.backward()
            losses.append(loss.item())
        optim.step()
        optim.zero_grad()
    graphs = str(sharded.program.cuda_graphs)
    assert graphs.startswith("one for") is fields.get("cuda_graph", False), graphs
    return losses, {name: value.cpu() for name, value in sharded.full_state_dict().items()}


def on_the_default_device(rank: int) -> None:
    """`torch.set_default_device("cuda")`, as training scripts call it, changes no number."""
    torch.set_default_device("cuda")
    for name in ("overlap", "offload"):
        losses, weights = by_ranks(rank, 1, POLICIES[name])
        torch.set_default_device("cpu")
        expected, state = by_one_process(dist.get_world_size(), 1)
        torch.set_default_device("cuda")
        if rank == 0:
            bar = 0.0 if is_made_up() else 2e-4
            torch.testing.assert_close(losses, expected, rtol=0, atol=bar)
            torch.testing.assert_close(weights, dict(state), rtol=0, atol=bar)


def test_with_gpus_as_the_default_device() -> None:
    run_ranks(on_the_default_device, 2, device="cuda", timeout=200.0)


def scaled(rank: int, world_size: int, fused: bool) -> None:
    """Gradients on the host are unscaled by a scale that has arrived there; 8 rounds nothing."""
    device = torch.device("cuda", torch.cuda.current_device())
    sharded = graphshard.compile(model(), graphshard.BlockPolicy({Block}, offload="params"))
    optim = torch.optim.AdamW(sharded.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=1)
    losses = []
    for step in range(STEPS):
        loss = sharded(*(ids.to(device) for ids in batch(step, rank, 0)))
        scaler.scale(loss).backward()
        scaler.step(optim)
        scaler.update()
        optim.zero_grad()
        losses.append(loss.item())
    weights = {name: value.cpu() for name, value in sharded.full_state_dict().items()}
    expected, state = by_one_process(world_size, 1)
    assert scaler.get_scale() == 8.0 * 2**STEPS
    assert {float(each["step"]) for each in optim.state.values()} == {float(STEPS)}
    if rank == 0:
        exact = 3e-5 if fused else 0.0  # the fused kernel rounds otherwise; see also its steps
        bar = exact if is_made_up() else 2e-4
        torch.testing.assert_close(losses, expected, rtol=0, atol=bar)
        torch.testing.assert_close(weights, dict(state), rtol=0, atol=bar)


@pytest.mark.parametrize(("world_size", "fused"), [(1, False), (2, False), (2, True)])
def test_a_scaler_of_offloaded_gradients(world_size: int, fused: bool) -> None:
    run_ranks(scaled, world_size, world_size, fused, device="cuda", timeout=200.0)


def goes_on(rank: int, folder: Path) -> None:
    """Training that goes on from a checkpoint has the bits of training that never stopped."""
    device = torch.device("cuda", torch.cuda.current_device())

    def clipped_step(sharded: Any, optim: torch.optim.Optimizer, step: int) -> float:
        sharded(*(ids.to(device) for ids in batch(step, rank, 0))).backward()
        grads = [full_tensor(p.grad).norm() for p in sharded.parameters()]
        norm = sharded.clip_grad_norm_(0.1)
        torch.testing.assert_close(norm, torch.stack(grads).norm())
        optim.step()
        optim.zero_grad()
        return float(norm)

    def made() -> tuple[Any, torch.optim.Optimizer]:
        sharded = graphshard.compile(model(), graphshard.BlockPolicy({Block}))
        return sharded, torch.optim.AdamW(sharded.parameters(), lr=1e-2)

    one, optim = made()
    clipped_step(one, optim, 0)
    one.save_checkpoint(folder, optim)
    expected = [clipped_step(one, optim, step) for step in (1, 2)]
    other, optim = made()
    other.load_checkpoint(folder, optim)
    assert [clipped_step(other, optim, step) for step in (1, 2)] == expected
    for mine, there in zip(other.parameters(), one.parameters(), strict=True):
        assert torch.equal(mine.to_local(), there.to_local())


def test_a_checkpoint_of_clipped_steps(tmp_path: Path) -> None:
    run_ranks(goes_on, 2, tmp_path / "saved", device="cuda", timeout=200.0)


def parts(rank: int) -> None:
    """No program runs behind the first, only the comparison of what ranks begin."""
    device = torch.device("cuda", torch.cuda.current_device())
    sharded = graphshard.compile(model(), graphshard.BlockPolicy({Block}))
    sharded(*(ids.to(device) for ids in batch(0, rank, 0))).backward()
    agreement = sharded._graphshard.bindings.agreement
    programs = [Fingerprint((f"forward of program {number}",)) for number in (0, 1)]
    for program in (*programs, *programs):
        agreement.require(program)
    agreement.require(programs[rank])
    torch.cuda.synchronize()  # the device knows by now
    with pytest.raises(graphshard.FingerprintError, match="different collectives"):
        agreement.require(programs[0])


def test_ranks_that_part_are_told() -> None:
    run_ranks(parts, 2, device="cuda", timeout=200.0)


class Decides(nn.Module):
    """Goes one of two ways by what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.layers
        x = self.drop(first(x))
        x = (x * 3).sin() if x[0, 0] > 0 else x.cos()
        for layer in others:  # whose gathers a wrong guess must not leave out
            x = self.drop(layer(x)).tanh()
        return x.square().sum()


def answers_differ(rank: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(0)
    plain = Decides().to(device)
    sharded = graphshard.compile(copy.deepcopy(plain), graphshard.BlockPolicy({nn.Linear}))
    for seed in range(8):
        losses = []
        for each in (plain, sharded):
            torch.manual_seed(10 * seed + rank)
            loss = each(torch.randn(4, 8, device=device))
            loss.backward()
            losses.append(loss.detach())
        assert torch.equal(*losses)
    assert len(sharded.programs) == 2
    grads = {name: full_tensor(param.grad) for name, param in sharded.named_parameters()}
    for name, param in plain.named_parameters():
        assert param.grad is not None
        dist.all_reduce(param.grad)
        torch.testing.assert_close(grads[name], param.grad / 2)


def test_ranks_that_guess_wrong_run_again() -> None:
    run_ranks(answers_differ, 2, device="cuda", timeout=200.0)


def waits_for_nothing(rank: int) -> None:
    """From the third step on, a forward or a backward in which the host waits is an error."""
    device = torch.device("cuda", torch.cuda.current_device())
    policy = graphshard.BlockPolicy({Block}, offload="activations")
    sharded = graphshard.compile(model(), policy)
    ids = [ids.to(device) for ids in batch(0, rank, 0)]
    for _ in range(2):
        sharded(*ids).backward()
        sharded.zero_grad()
    torch.cuda.set_sync_debug_mode("error")
    sharded(*ids).backward()
    torch.cuda.set_sync_debug_mode("default")


def test_the_host_does_not_wait() -> None:
    run_ranks(waits_for_nothing, 2, device="cuda", timeout=200.0)


def compare(rank: int, names: list[str]) -> dict[str, float]:
    """By policy, the largest difference of a loss or a weight from one process."""
    found = {}
    for name in names:
        for micro in sorted({1, MICRO.get(name, 1)}):
            losses, weights = by_ranks(rank, micro, POLICIES[name])
            expected, state = by_one_process(dist.get_world_size(), micro)
            gaps = [abs(a - b) for a, b in zip(losses, expected, strict=True) if rank == 0]
            gaps += [float((weights[n] - w).abs().max()) for n, w in state.items() if weights]
            found[name if micro == 1 else f"{name}, no_sync"] = max(gaps, default=0.0)
    return found


@pytest.mark.parametrize("seed", [None, 1, 2], ids=["at once", "delays 1", "delays 2"])
def test_two_ranks_train_as_one_process(seed: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if seed is not None:
        if not is_made_up():
            pytest.skip("streams can be delayed on the made-up device alone")
        monkeypatch.setenv("CUDA_ON_CPU_DELAY_US", "300")
        monkeypatch.setenv("CUDA_ON_CPU_SEED", str(seed))
    names = [*POLICIES] if seed is None else ["FULL_SHARD", "overlap", "overlap, offload"]
    found = run_ranks(compare, 2, names, device="cuda", timeout=200.0)
    bar = 0.0 if is_made_up() else 2e-4
    for gaps in found:
        assert all(gap <= bar for gap in gaps.values()), gaps

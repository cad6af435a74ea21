"""Code that is no graph runs on gathered parameters as in the plain model; nothing is lost."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist
from ranks import checks_of, error_of, on_ranks, run_ranks
from resident import growth, map_each_above, require_proc
from torch import Tensor, nn

import graphshard
from graphshard.errors import CollectiveError, FingerprintError, PolicyError, RuntimeStateError
from graphshard.policy.precision import MixedPrecision

BLOCKS = graphshard.BlockPolicy({"Block"})


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.drop = nn.Dropout(0.3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.norm(self.linear(x)).relu())


class Net(nn.Module):
    """Its methods loop until a value tells them to stop."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(3, 6)
        self.blocks = nn.ModuleList([Block(6) for _ in range(3)])
        self.register_buffer("calls", torch.zeros(2))
        self.register_buffer("scale", torch.tensor([1.5]))
        self.rounds = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x) * self.scale
        for block in self.blocks:
            x = block(x)
        return x

    def until(self, x: Tensor, bound: float) -> tuple[Tensor, int]:
        rounds = 0
        while x.abs().sum() < bound:
            x = x + self(x)[:, :3].abs()
            rounds += 1
            self.calls += 1
        self.scale = self.scale * 2
        self.rounds = rounds
        return x, rounds

    def to_eval(self, x: Tensor) -> Tensor:
        self.blocks[1].eval()
        return self(x)

    def write(self) -> None:
        with torch.no_grad():
            self.blocks[2].linear.weight.add_(1)

    def replace(self) -> None:
        self.up.weight = nn.Parameter(torch.zeros(6, 3))

    def grow(self) -> None:
        self.extra = nn.Linear(2, 2)

    def resize(self) -> None:
        self.calls = torch.zeros(5)

    def learn(self, x: Tensor) -> None:
        self(x).sum().backward()

    def fail(self, when: bool) -> None:
        if when:
            raise ValueError("as asked")


def pair(policy: graphshard.BlockPolicy = BLOCKS) -> tuple[Net, graphshard.ShardedModule]:
    return Net(), graphshard.compile(Net(), policy)


def batch(rank: int) -> Tensor:
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(rank))


@torch.no_grad()
def equals_the_plain_model(rank: int) -> None:
    model, sharded = pair()
    for bound in (30.0 + 100 * rank, 60.0):  # ranks loop differently often
        torch.manual_seed(rank)
        expected = model.until(batch(rank), bound)
        torch.manual_seed(rank)
        found = sharded.run_eagerly("until", batch(rank), bound=bound)
        assert torch.equal(found[0], expected[0])
        assert found[1] == expected[1] == sharded.rounds == model.rounds
    for (name, mine), theirs in zip(sharded.named_buffers(), model.buffers(), strict=True):
        assert torch.equal(mine, theirs), name
    assert sharded.calls[0] > 0
    last: list[Tensor] = []
    for module in (model, sharded):
        torch.manual_seed(1)
        x = batch(rank)
        last.append(module.to_eval(x) if module is model else module.run_eagerly("to_eval", x))
        assert [block.training for block in module.blocks] == [True, False, True]
        module.eval()
    assert torch.equal(*last)
    assert torch.equal(sharded(x), sharded.run_eagerly("forward", x))
    part = sharded.run_eagerly("blocks.0.forward", torch.ones(2, 6))
    assert torch.equal(part, model.blocks[0](torch.ones(2, 6)))


@torch.no_grad()
def the_policy_acts(rank: int) -> None:
    """A forward gives what the captured program gives."""
    policies = [
        graphshard.BlockPolicy(
            {"Block"}, mixed_precision=MixedPrecision(torch.bfloat16, buffer_dtype=torch.float16)
        ),
        graphshard.BlockPolicy({"Block"}, strategy="NO_SHARD"),
        graphshard.BlockPolicy({"Block"}, strategy="SHARD_OPTIMIZER"),
        graphshard.BlockPolicy({"Block"}, offload="params"),
        graphshard.BlockPolicy({"Block"}, ignored=[r"up\.bias"]),
    ]
    for policy in policies:
        sharded = graphshard.compile(Net(), policy).eval()
        expected = sharded(batch(rank))
        found = sharded.run_eagerly("forward", batch(rank))
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)
        kinds = {name: (b.dtype, b.clone()) for name, b in sharded.named_buffers()}
        sharded.train().run_eagerly("forward", batch(rank))  # which changes BatchNorm's buffers
        for name, buffer in sharded.named_buffers():
            assert buffer.dtype == kinds[name][0]
        assert not torch.equal(
            sharded.blocks[0].norm.running_mean, kinds["blocks.0.norm.running_mean"][1]
        )


def what_would_be_lost_is_refused(rank: int) -> None:
    _, sharded = pair()
    before = sharded.full_state_dict(rank0_only=False)
    for name, args, text in (
        ("write", (), "wrote to parameter 'blocks.2.linear.weight'"),
        ("replace", (), "put another tensor in place of parameter 'up.weight'"),
        ("grow", (), "added, removed or replaced extra"),
        ("resize", (), "something of another shape into buffer 'calls'"),
        ("learn", (torch.ones(4, 3),), "backward reached parameter"),
        ("forward", (torch.ones(4, 3),), "requires gradients, which would be lost"),
    ):
        assert text in error_of(
            lambda n=name, a=args: sharded.run_eagerly(n, *a), RuntimeStateError
        )
    after = sharded.full_state_dict(rank0_only=False)
    for name, value in before.items():
        assert torch.equal(after[name], value) or "norm" in name, name
    loss = sharded(torch.ones(4, 3)).sum()  # trains on
    loss.backward()
    assert all(p.grad is not None for p in sharded.parameters())
    assert not hasattr(sharded, "extra")


def a_wrong_call_is_an_error_on_all(rank: int) -> None:
    _, sharded = pair()
    text = error_of(lambda: sharded.run_eagerly("nothing"), PolicyError)
    assert "the model has no method 'nothing'" in text
    with pytest.raises(ValueError if rank else CollectiveError, match="as asked"):
        sharded.run_eagerly("fail", rank == 1)
    text = error_of(
        lambda: sharded.run_eagerly("fail", False) if rank else sharded.full_state_dict(),
        FingerprintError,
    )
    assert "run_eagerly('fail')" in text
    with sharded.gathered() as model, torch.no_grad():
        assert isinstance(model, Net)
        with pytest.raises(RuntimeStateError, match=r"gathered for gathered\(\) or run_eagerly"):
            sharded(batch(rank))
        text = error_of(lambda: sharded.unsharded().__enter__(), RuntimeStateError)
        assert "gathered for gathered() or run_eagerly" in text
    with sharded.unsharded(writeback=False):
        text = error_of(lambda: sharded.gathered().__enter__(), RuntimeStateError)
        assert "is unsharded, so the module has no shards" in text
    with pytest.raises(PolicyError, match="must be a number of bytes"):
        sharded.gathered(max_bytes="1GB").__enter__()


@torch.no_grad()
def units_come_and_go(rank: int) -> None:
    model, sharded = pair()
    root, *blocks = sharded.plan.units
    bound = root.unsharded_bytes + blocks[0].unsharded_bytes
    text = error_of(lambda: sharded.gathered(max_bytes=bound - 1).__enter__(), PolicyError)
    assert f"the root and the largest unit take {bound} bytes" in text
    alive: list[int] = []

    def zero(module: nn.Linear, *_: object) -> None:
        module.weight.zero_()

    def look(*_: object) -> None:
        alive.append(sum(p.nbytes for p in plain.parameters() if p.device.type != "meta"))

    with sharded.gathered(max_bytes=bound) as plain:
        hooks = [block.linear.register_forward_hook(look) for block in plain.blocks]
        for step in range(2):
            torch.manual_seed(step)
            found = plain(batch(rank))
            torch.manual_seed(step)
            assert torch.equal(found, model(batch(rank)))
        for hook in hooks:
            hook.remove()
        with pytest.raises(RuntimeError, match="meta") as caught:
            float(plain.blocks[0].linear.weight.sum())
    del caught
    assert len(alive) == 6
    assert max(alive) <= bound

    def zero_one() -> None:
        with sharded.gathered(max_bytes=bound) as plain:
            hook = plain.blocks[0].linear.register_forward_hook(zero)
            plain(batch(rank))
            hook.remove()

    text = error_of(zero_one, RuntimeStateError)
    assert "wrote to parameter 'blocks.0.linear.weight'" in text


@torch.no_grad()
def ranks_that_part_are_told(rank: int) -> None:
    _, sharded = pair()
    root, *blocks = sharded.plan.units

    def parts() -> None:
        with sharded.gathered(max_bytes=root.unsharded_bytes + blocks[0].unsharded_bytes) as model:
            for _ in range(1 + rank):
                model(batch(rank))

    began = time.monotonic()
    text = error_of(parts, FingerprintError)
    assert time.monotonic() - began < 20
    assert "gathers blocks.0" in text
    sharded.eval()(batch(rank))


test_on_two_ranks = on_ranks(
    checks_of(globals(), but=[the_policy_acts]),
    2,
    timeout=300,
)
test_policies_on_two_ranks = pytest.mark.slow(on_ranks([the_policy_acts], 2, timeout=300))


MATRIX = 1024 * 1024 * 4
"""Bytes."""


@torch.no_grad()
def measured(rank: int) -> dict[str, float]:
    """Peak MB of a forward above the shards, by `max_bytes`."""
    map_each_above(1 << 16)
    layers = [nn.Linear(1024, 1024, bias=False) for _ in range(12)]
    sharded = graphshard.compile(nn.Sequential(*layers), graphshard.BlockPolicy({nn.Linear}))
    del layers
    peaks: dict[str, float] = {}
    for max_bytes in (None, None, 4 * MATRIX, MATRIX):  # once to warm up
        with growth(peaks, str(max_bytes)), sharded.gathered(max_bytes=max_bytes) as model:
            for _ in range(2):
                model(torch.ones(1, 1024))
    dist.barrier()
    return peaks


@pytest.mark.slow
def test_memory_is_bounded() -> None:
    require_proc()
    for rank, peaks in enumerate(run_ranks(measured, 2, timeout=200)):
        for max_bytes, peak in peaks.items():
            print(f"rank {rank}: {peak:.1f} MB with max_bytes={max_bytes}")
            bound = 12 * MATRIX if max_bytes == "None" else int(max_bytes)
            assert peak <= bound / 1e6 + 3.0


@torch.no_grad()
def test_on_one_rank() -> None:
    model, sharded = pair()
    torch.manual_seed(0)
    expected, _ = model.until(batch(0), 50.0)
    torch.manual_seed(0)
    found, _ = sharded.run_eagerly("until", batch(0), 50.0)
    assert torch.equal(found, expected)
    assert torch.equal(sharded.calls, model.calls)
    with pytest.raises(RuntimeStateError, match="wrote to parameter"):
        sharded.run_eagerly("write")

"""Options that meet: each policy trains as the plainest one of equal arithmetic, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from full_tensors import full
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard import BlockPolicy, MixedPrecision, ModulePolicy
from graphshard.errors import RuntimeStateError

pytestmark = pytest.mark.slow  # each of its ranks starts and compiles for tens of seconds

HALF = MixedPrecision(torch.bfloat16, torch.float32)
ALL_HALF = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
REDUCED_HALF = MixedPrecision(reduce_dtype=torch.bfloat16)
OFFLOAD = ("params", "activations")


class Block(nn.Module):
    """Two matrices, of which two ranks divide no first dim evenly, a norm and a dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 13)
        self.down = nn.Linear(13, 8)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    """Tied embedding and head around three blocks; the middle one is skipped where asked."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor, skip: bool = False) -> Tensor:
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            if not (skip and index == 1):
                x = block(x)
        return nn.functional.cross_entropy(self.head(x).float().transpose(1, 2), ids)


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def batch(step: int, rank: int) -> Tensor:
    torch.manual_seed(100 * step + rank)
    return torch.randint(11, (2, 6))


def optimizer(sharded: Any) -> torch.optim.Optimizer:
    """AdamW, or SGD where gradients stay in a dtype that AdamW does not take."""
    precision = sharded.plan.policy.mixed_precision
    if precision is not None and precision.keep_low_precision_grads:
        return torch.optim.SGD(sharded.parameters(), lr=0.1)
    return torch.optim.AdamW(sharded.parameters(), lr=0.01)


def train(
    sharded: Any, optim: Any = None, *, steps: int = 2, micro: str = "", clip: bool = True
) -> list[dict[str, Tensor]]:
    """Clipped gradients of each step, then the parameters; `micro`: how the first batch is kept."""
    rank = dist.get_rank()
    optim = optimizer(sharded) if optim is None else optim
    found = []
    for step in range(steps):
        if micro:
            with sharded.no_sync(all_reduce_only=micro == "shard"):
                sharded(batch(10 + step, rank)).backward()
        sharded(batch(step, rank), skip=bool(micro)).backward()
        if clip:
            sharded.clip_grad_norm_(0.1)
        named = sharded.named_parameters()
        found.append(
            {name: full(p.grad).float().clone() for name, p in named if p.grad is not None}
        )
        optim.step()
        optim.zero_grad()
    return [*found, {name: full(p).clone() for name, p in sharded.named_parameters()}]


def compiled(
    mesh: tuple[int, ...] | None = None,
    dynamic: Any = None,
    modules: Mapping[Any, Any] | None = None,
    **fields: Any,
) -> Any:
    policy: Any = BlockPolicy({Block}, **fields)
    if modules is not None:
        policy = ModulePolicy(modules, base=BlockPolicy({Block}), **fields)
    on = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=("r", "s"))
    return graphshard.compile(net(), policy, mesh=on, dynamic=dynamic, check=True)


def require_equal(found: list[dict[str, Tensor]], expected: list[dict[str, Tensor]]) -> None:
    exact = dist.get_world_size() == 2
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, value in theirs.items():
            if exact:
                assert torch.equal(ours[name], value), (step, name)
            else:
                torch.testing.assert_close(
                    ours[name], value, rtol=2e-2, atol=3e-3, msg=lambda m, n=name: f"{n}: {m}"
                )


_references: dict[Any, list[dict[str, Tensor]]] = {}


def reference(precision: MixedPrecision | None, micro: str, clip: bool) -> list[dict[str, Tensor]]:
    """FULL_SHARD with the same arithmetic and nothing else."""
    key = (precision, bool(micro), clip)
    if key not in _references:
        _references[key] = train(
            compiled(mixed_precision=precision), micro="gradient" if micro else "", clip=clip
        )
    return _references[key]


class Variant:
    """A check that a policy of these `fields` trains as without all that moves no rounding.

    Gradients are clipped where both sum up equal parts.
    """

    def __init__(self, name: str, micro: str = "", **fields: Any) -> None:
        self.__name__, self.micro, self.fields = name, micro, fields

    def __call__(self, rank: int) -> None:
        fields = self.fields
        whole = fields.get("strategy") == "NO_SHARD"
        clip = "mesh" not in fields and "modules" not in fields and not whole
        found = train(compiled(**fields), micro=self.micro, clip=clip)
        require_equal(found, reference(fields.get("mixed_precision"), self.micro, clip))


OVERRIDES = {
    "blocks.0": {"strategy": "SHARD_GRAD_OP"},
    "blocks.1": {"strategy": "NO_SHARD"},
    "blocks.2": {"reshard_after_forward": 1, "placement": {"up.weight": 1}},
}
DYNAMIC = {"ids": {0: "batch", 1: "length"}}

TRAINED = [
    Variant("half_kept_on_replicas", "shard", mixed_precision=HALF, mesh=(2, 1),
            strategy="HYBRID_SHARD"),
    Variant("half_kept_and_offloaded", "gradient", mixed_precision=HALF, offload=OFFLOAD),
    Variant("kept_shards_offloaded", "shard", mesh=(2, 1), strategy="HYBRID_SHARD_ZERO2",
            offload=OFFLOAD),
    Variant("overrides_offloaded_recomputed", "gradient", modules=OVERRIDES, offload=OFFLOAD,
            recompute="units"),
    Variant("overrides_half", modules=OVERRIDES, mixed_precision=ALL_HALF, recompute="selective"),
    Variant("half_parts_offloaded", "gradient", mixed_precision=HALF, offload=OFFLOAD,
            reshard_after_forward=1),
    Variant("half_with_symbols", "gradient", mixed_precision=HALF, dynamic=DYNAMIC,
            offload=OFFLOAD, recompute="units"),
    Variant("zero1_reduced_half", "gradient", mixed_precision=REDUCED_HALF,
            strategy="SHARD_OPTIMIZER"),
    Variant("zero1_with_symbols", "gradient", strategy="SHARD_OPTIMIZER", dynamic=DYNAMIC,
            recompute="selective", offload="activations"),
    Variant("zero1_on_a_column", strategy="SHARD_OPTIMIZER", memory_budget=1 << 20),
    Variant("copies_all_half_offloaded", "gradient", mixed_precision=ALL_HALF, strategy="NO_SHARD",
            offload=OFFLOAD),
    Variant("all_half_recomputed_on_replicas", "shard", mixed_precision=ALL_HALF, mesh=(2, 1),
            strategy="HYBRID_SHARD", recompute="units", offload=OFFLOAD),
    Variant("budget_half", mixed_precision=HALF, recompute="budget", memory_budget=40_000),
    Variant("budget_kept", "gradient", recompute="budget", memory_budget=60_000,
            offload="params"),
]  # fmt: skip


def full_gradients_of_low_precision(rank: int) -> None:
    """unsharded(with_grads=True) over gradients of another dtype than the parameter's."""
    for fields in ({}, {"offload": OFFLOAD}, {"strategy": "NO_SHARD"}):
        sharded = compiled(mixed_precision=ALL_HALF, **fields)
        sharded(batch(0, rank)).backward()
        before = {name: full(p.grad).clone() for name, p in sharded.named_parameters()}
        with sharded.unsharded(with_grads=True) as params:
            for name in before:
                param = params[name]
                assert torch.equal(param.grad, before[name])
                assert param.grad.dtype == torch.bfloat16
                param.grad.mul_(2)
            with pytest.raises(RuntimeStateError, match="clip before it"):
                sharded.clip_grad_norm_(1.0)
        for name, param in sharded.named_parameters():
            assert torch.equal(full(param.grad), before[name] * 2)
        sharded.zero_grad()
        with sharded.unsharded(with_grads=True) as params:
            for param in params.values():
                param.grad = torch.ones_like(param, dtype=torch.bfloat16)
        sharded.clip_grad_norm_(1.0)


def whole_matrices_of_offloaded(rank: int) -> None:
    """An optimizer of full parameters under offload and kept gradients."""
    runs = []
    for fields in (
        {},
        {"offload": OFFLOAD, "mixed_precision": REDUCED_HALF},
        {"strategy": "SHARD_OPTIMIZER"},
    ):
        sharded = compiled(**fields)
        optim = torch.optim.SGD(sharded.full_parameters().values(), lr=0.1)
        for step in range(2):
            with sharded.no_sync():
                sharded(batch(5 + step, rank)).backward()
            sharded(batch(step, rank), skip=True).backward()
            with sharded.unsharded(with_grads=True):
                optim.step()
            sharded.zero_grad()
        runs.append({name: full(p).clone() for name, p in sharded.named_parameters()})
    for name, value in runs[0].items():
        torch.testing.assert_close(runs[1][name], value, atol=2e-3, rtol=1e-2)
        assert torch.equal(runs[2][name], value)


def state_goes_on_under_another_policy(rank: int) -> None:
    """Model and optimizer state of one policy, taken over by the next."""
    policies: list[dict[str, Any]] = [
        {"offload": OFFLOAD, "mixed_precision": HALF},
        {"strategy": "SHARD_OPTIMIZER"},
        {"strategy": "HYBRID_SHARD", "mesh": (2, 1), "offload": OFFLOAD},
        {"modules": OVERRIDES, "offload": OFFLOAD},
        {"strategy": "NO_SHARD", "offload": OFFLOAD},
    ]
    taken: Any = None

    def state() -> tuple[Any, Any]:
        return (
            sharded.full_state_dict(rank0_only=False),
            sharded.optimizer_state_dict(optim, kind="full", rank0_only=False),
        )

    for fields in policies:
        sharded = compiled(**fields)
        optim = torch.optim.AdamW(sharded.parameters(), lr=0.01)
        if taken is not None:
            sharded.load_full_state_dict(taken[0])
            sharded.load_optimizer_state_dict(optim, taken[1])
            now = state()
            torch.testing.assert_close(now[0], taken[0], rtol=0, atol=0)
            torch.testing.assert_close(now[1]["state"], taken[1]["state"], rtol=0, atol=0)
        train(sharded, optim, steps=1, micro="gradient")
        taken = state()


def ignored_on_replicas(rank: int) -> None:
    """Ignored parameters under HYBRID_SHARD, sync_module_states, offload and mixed precision."""
    for fields in (
        {"mesh": (2, 1), "strategy": "HYBRID_SHARD"},
        {"offload": OFFLOAD},
        {"mixed_precision": REDUCED_HALF, "strategy": "SHARD_OPTIMIZER"},
    ):
        torch.manual_seed(rank)  # other weights on each rank
        model = Net()
        mesh = fields.pop("mesh", None)
        on = None if mesh is None else init_device_mesh("cpu", mesh, mesh_dim_names=("r", "s"))
        policy = BlockPolicy(
            {Block}, ignored=r"blocks\.\d\.norm", sync_module_states=True, **fields
        )
        sharded = graphshard.compile(model, policy, mesh=on, check=True)
        values: list[Any] = [None, None]
        dist.all_gather_object(values, {n: full(p) for n, p in sharded.named_parameters()})
        assert all(torch.equal(v, values[1][n]) for n, v in values[0].items()), fields
        optim = torch.optim.AdamW(sharded.parameters(), lr=0.01)
        with sharded.no_sync():
            sharded(batch(3, rank)).backward()
        sharded(batch(4, rank)).backward()
        sharded.clip_grad_norm_(0.1)
        optim.step()
        optim.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(sharded(batch(5, rank))).backward()
        if rank == 0:  # of its own, so the other learns of it from the scaler alone
            sharded.blocks[0].norm.weight.grad.fill_(float("inf"))
        scaler.step(optim)
        scaler.update()
        assert scaler.get_scale() == 2.0


OTHERS = [
    full_gradients_of_low_precision,
    whole_matrices_of_offloaded,
    state_goes_on_under_another_policy,
    ignored_on_replicas,
]


TWO = [*TRAINED[:2], TRAINED[3], full_gradients_of_low_precision]
MORE = [check for check in (*TRAINED, *OTHERS) if check not in TWO]
FOUR = [
    Variant("half_parts_of_two_offloaded", "gradient", mixed_precision=HALF, offload=OFFLOAD,
            reshard_after_forward=2, recompute="units"),
    Variant("all_half_kept_shards_on_replicas", "shard", mixed_precision=ALL_HALF, mesh=(2, 2),
            strategy="HYBRID_SHARD", offload=OFFLOAD, dynamic=DYNAMIC),
    Variant("zero1_kept", "gradient", strategy="SHARD_OPTIMIZER", recompute="selective"),
]  # fmt: skip


test_on_two_ranks = on_ranks(TWO, 2, timeout=300)
test_more_on_two_ranks = pytest.mark.slow(on_ranks(MORE, 2, timeout=580))


test_on_four_ranks = pytest.mark.slow(on_ranks(FOUR, 4, timeout=580))

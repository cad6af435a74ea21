"""Offload on ranks: bit-equal training, and what lies on the device meanwhile."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from counted_bytes import settles
from models import CASES, VOCAB
from ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

import graphshard
from examples.benchmarks.live_bytes import LiveBytes
from examples.gpt import Block
from graphshard.runtime import host_copies

pytestmark = pytest.mark.slow  # each of its ranks starts and compiles for tens of seconds

WIDTH, BATCH, LAYERS = 64, 128, 8
BOTH = ("params", "activations")
LAYER, ACTIVATION = WIDTH * WIDTH * 4, BATCH * WIDTH * 4


class DeviceBytes(LiveBytes):
    """Counts what would be on the device: all but what copies to the host have made."""

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.sent = 0
        self._making = False

    def _count(self, storage: torch.UntypedStorage) -> None:
        if not self._making and storage._cdata not in self.host:
            super()._count(storage)

    def __enter__(self) -> DeviceBytes:
        self._new_host = host_copies.new_host
        host_copies.new_host = self._marked
        return super().__enter__()

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        host_copies.new_host = self._new_host

    def lies_on_host(self, tensors: Iterable[Tensor]) -> None:
        """Do not count these tensors, which lie on the host."""
        for tensor in tensors:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            self._not_counted(local.untyped_storage())

    def _not_counted(self, storage: torch.UntypedStorage) -> None:
        address = storage._cdata
        self.host[address] = weakref.ref(storage, lambda _: self.host.pop(address, None))

    def _marked(self, like: Tensor) -> Tensor:
        self._making = True
        made = self._new_host(like)
        self._making = False
        self.sent += made.nbytes
        self._not_counted(made.untyped_storage())
        return made


class Stack(nn.Module):
    """Layers as large as each other: bytes can be counted on fingers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.sum()


def activations_are_not_on_the_device(rank: int) -> None:
    peaks = {}
    for offload in (None, "activations"):
        torch.manual_seed(0)
        policy = graphshard.BlockPolicy({nn.Linear}, offload=offload)
        sharded = graphshard.compile(Stack(), policy)
        x = torch.randn(BATCH, WIDTH)
        sharded(x).backward()  # captures, agrees and allocates what stays
        sharded.zero_grad()
        live = DeviceBytes()
        live.add([*sharded.parameters(), x])
        base = live.current
        with live:
            loss = sharded(x)
            settles(live, base + 4 + (0 if offload else LAYERS * ACTIVATION))
            forward, live.peak = live.peak - base, live.current
            loss.backward()
            settles(live, base + 4 + LAYERS * LAYER // 2)
        peaks[offload] = (forward, live.peak - base)
        assert live.sent == (LAYERS * ACTIVATION if offload else 0)
    # In forward: a layer's input, product and output, and a copy that has not arrived yet.
    assert peaks["activations"][0] <= 4 * ACTIVATION + LAYER + 4
    assert peaks[None][0] >= LAYERS * ACTIVATION
    # In backward: this step's, the next one's, and a gradient or two.
    assert peaks["activations"][1] <= 5 * ACTIVATION + (LAYERS // 2 + 3) * LAYER
    assert peaks[None][1] >= LAYERS * ACTIVATION


def parameters_and_gradients_are_not_on_the_device(rank: int) -> None:
    torch.manual_seed(0)
    policy = graphshard.BlockPolicy({nn.Linear}, offload=BOTH)
    sharded = graphshard.compile(Stack(), policy)
    x = torch.randn(BATCH, WIDTH)
    sharded(x).backward()
    sharded.zero_grad()
    live = DeviceBytes()
    live.lies_on_host(sharded.parameters())
    live.add([x])
    base = live.current
    with live:
        loss = sharded(x)
        settles(live, base + 4)
        live.peak = live.current
        loss.backward()
        settles(live, base + 4)
    # A layer and the next one, their full gradients, and shards on their way.
    assert live.peak - base <= 5 * ACTIVATION + 6 * LAYER
    for param in sharded.parameters():
        assert isinstance(param.grad, DTensor)
        assert param.grad.to_local().shape == param.to_local().shape


# -- the same training with and without offload, bit for bit ------------------------------------

STEPS = 2
MICRO_BATCHES = 2

Step = tuple[float, dict[str, Tensor]]


def sharded_gpt(**fields: Any) -> graphshard.ShardedModule:
    """The GPT, sharded over a mesh of 2 x 2 if the strategy needs one of two dimensions."""
    hybrid = str(fields.get("strategy", "")).startswith("HYBRID")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "fsdp")) if hybrid else None
    return graphshard.compile(
        CASES["gpt"].model(), graphshard.BlockPolicy({Block}, **fields), mesh=mesh
    )


def train(model: nn.Module, rank: int, *, sync: bool = True) -> list[Step]:
    """Loss and this rank's gradients of each AdamW step, of two micro-batches; then the weights.

    sync: reduce each micro-batch's gradients, not their sum.
    """
    optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
    history = []
    for step in range(STEPS):
        total = 0.0
        for micro in range(MICRO_BATCHES):
            torch.manual_seed(100 * step + 10 * micro + rank)
            ids = torch.randint(VOCAB, (2, 18))
            last = micro == MICRO_BATCHES - 1
            with nullcontext() if sync or last else model.no_sync():  # type: ignore[operator]
                loss = model(ids[:, :-1], ids[:, 1:])
                loss.backward()
            total += loss.item()
        grads = ((name, param.grad) for name, param in model.named_parameters())
        history.append((total, own_parts(grads)))
        optim.step()
        optim.zero_grad()
    history.append((0.0, own_parts(model.named_parameters())))
    return history


def own_parts(named: Iterable[tuple[str, Tensor | None]]) -> dict[str, Tensor]:
    return {name: _own(t.detach()).clone() for name, t in named if t is not None}


def _own(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def require_equal(history: list[Step], expected: list[Step], what: Any) -> None:
    for index, ((loss, tensors), (wanted, theirs)) in enumerate(
        zip(history, expected, strict=True)
    ):
        assert loss == wanted, (what, index)
        assert tensors.keys() == theirs.keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, theirs[name]), (what, index, name)


def trains_the_same(rank: int, *offloads: Any, sync: bool = True, **fields: Any) -> None:
    """With each of `offloads` and without, under a policy with these fields."""
    expected = train(sharded_gpt(**fields), rank, sync=sync)
    for offload in offloads:
        history = train(sharded_gpt(**fields, offload=offload), rank, sync=sync)
        require_equal(history, expected, offload)


def full_shard(rank: int) -> None:
    trains_the_same(rank, "activations", "params", BOTH)


def other_schedules(rank: int) -> None:
    fields = {"backward_prefetch": "post", "forward_prefetch": 1, "reshard_root": True}
    trains_the_same(rank, BOTH, sync=False, **fields)


def kept_and_recomputed(rank: int) -> None:
    trains_the_same(rank, BOTH, strategy="SHARD_GRAD_OP", recompute="units")


def replicated(rank: int) -> None:
    trains_the_same(rank, BOTH, sync=False, strategy="NO_SHARD", backward_prefetch=None)


def hybrid(rank: int) -> None:
    trains_the_same(rank, BOTH, strategy="HYBRID_SHARD")


def as_fully_shard_offloads(rank: int) -> None:
    theirs = CASES["gpt"].model()
    policy = CPUOffloadPolicy(pin_memory=False)
    for module in theirs.modules():
        if isinstance(module, Block):
            fully_shard(module, offload_policy=policy)
    fully_shard(theirs, offload_policy=policy)
    expected = train(theirs, rank)
    require_equal(train(sharded_gpt(offload="params"), rank), expected, "fully_shard")


def parameters_are_loaded_and_read_where_they_lie(rank: int) -> None:
    sharded = sharded_gpt(offload="params")
    before = {name: tensor.full_tensor() for name, tensor in sharded.state_dict().items()}
    doubled = {name: 2 * tensor for name, tensor in before.items()}
    sharded.load_full_state_dict(doubled)
    sharded.load_state_dict({name: 2 * t for name, t in sharded.state_dict().items()})
    for name, tensor in sharded.state_dict().items():
        assert torch.equal(tensor.full_tensor(), 4 * before[name])
    ids = torch.zeros(2, 18, dtype=torch.int64)
    with torch.no_grad():
        assert sharded(ids[:, :-1], ids[:, 1:]).isfinite()


ON_TWO = [
    activations_are_not_on_the_device,
    parameters_and_gradients_are_not_on_the_device,
    full_shard,
    as_fully_shard_offloads,
    parameters_are_loaded_and_read_where_they_lie,
]
MORE_ON_TWO = [
    other_schedules,
    kept_and_recomputed,
    replicated,
]
ON_FOUR = [full_shard, hybrid]

test_on_two_ranks = on_ranks(ON_TWO, 2, timeout=240)
test_more_on_two_ranks = pytest.mark.slow(on_ranks(MORE_ON_TWO, 2, timeout=240))


test_on_four_ranks = pytest.mark.slow(on_ranks(ON_FOUR, 4, timeout=240))

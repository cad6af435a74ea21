"""Options that meet: a table in which any two of them do, each row against the unsharded model.

A row is a policy, a mesh and a way to train. It must equal one process that computes the batches of
all ranks, to the bit where a sum over ranks has one order. In mixed precision, where the unsharded
model has no reduce to round, it must equal FULL_SHARD with the same dtypes and nothing else, which
test_precision_ranks.py compares with FSDP2.
"""

from __future__ import annotations

import os
import random
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import combinations, product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import uneven
from full_tensors import full, full_grads
from loops import OneProcess
from ranks import checks_of, on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard
from torch.nn import functional as F
from uneven import VOCAB, WIDTH, Fourier, device

from graphshard import MixedPrecision, pipeline
from graphshard.errors import RuntimeStateError
from graphshard.passes import split_ends
from graphshard.passes.merge_gathers import MergeGathers
from graphshard.passes.overlap import Overlap
from graphshard.passes.set_budget import SetBudget
from graphshard.passes.split_gathers import SplitGathers
from graphshard.passes.split_reduces import SplitReduces
from graphshard.torch_private import inductor as torch_inductor

HALF = MixedPrecision(torch.bfloat16, torch.float32)
KEPT_HALF = MixedPrecision(torch.bfloat16, keep_low_precision_grads=True)
REDUCED_HALF = MixedPrecision(reduce_dtype=torch.bfloat16)
OFFLOAD = ("params", "activations")

PASSES = (
    *(SetBudget(), SplitGathers(), SplitReduces()),
    *(MergeGathers(2_500), Overlap()),
)
OVERRIDES = {
    "mix": {"strategy": "NO_SHARD"},
    "blocks.0": {"strategy": "SHARD_GRAD_OP"},
    "blocks.1": {"reshard_after_forward": 1, "placement": {"up.weight": 1}},
}
ALONG_0, ALONG_1, ALONG_2 = ({"*": {"placement": dim, "unit": False}} for dim in range(3))

AXES: dict[str, dict[str, dict[str, Any]]] = {
    "sharding": {
        "full": {},
        "zero2": {"strategy": "SHARD_GRAD_OP"},
        "zero1": {"strategy": "SHARD_OPTIMIZER"},
        "whole": {"strategy": "NO_SHARD"},
        "replicas": {"strategy": "HYBRID_SHARD", "mesh": (2, 1)},
        "one replica": {"strategy": "HYBRID_SHARD_ZERO2", "mesh": (1, 2)},
        "parts": {"reshard_after_forward": 1, "reshard_root": True},
        "overrides": {"modules": OVERRIDES},
        "along 1": {"modules": ALONG_1},
    },
    "precision": {
        "": {},
        "half": {"mixed_precision": HALF},
        "kept half": {"mixed_precision": KEPT_HALF},
        "reduced half": {"mixed_precision": REDUCED_HALF},
    },
    "offload": {
        "": {},
        "params": {"offload": "params"},
        "activations": {"offload": "activations"},
        "both": {"offload": OFFLOAD},
    },
    "recompute": {
        "": {},
        "units": {"recompute": "units"},
        "selective": {"recompute": "selective"},
        "budget": {"recompute": "budget", "memory_budget": 110_000},
    },
    "order": {
        "": {},
        "at need": {"backward_prefetch": None},
        "post": {"backward_prefetch": "post", "forward_prefetch": 2},
        "by cost": {"schedule": "overlap", "hardware": "h100-sxm"},
        "two hosts": {"hosts": 2},
        "moved": {"passes": PASSES, "merge_below": 0},
    },
    "kept": {"": {}, "gradients": {"micro": "gradient"}, "shards": {"micro": "shard"}},
    "small": {
        "": {},
        "checked": {"check_finite": "error"},
        "apart": {"merge_below": 0},
        "in pairs": {"merge_below": 6_000},
        "in parts": {"merge_below": 200},
        "other units": {"gather_unused": True},
    },
    "backend": {"": {}, "regions": {"backend": "inductor"}},
    "sizes": {"": {}, "symbols": {"dynamic": {"ids": {0: "batch", 1: "length"}}}},
}  # fmt: skip

REFUSED = (
    # Shards are kept of gradients that are averaged over replicas later.
    *(("shards", name) for name in AXES["sharding"] if name != "replicas"),
    # Whole parameters lie on the device, and forward computes in their own dtype.
    *(("zero1", name) for name in ("params", "both", "half", "kept half")),
    # Passes that look at what a program uses.
    *(("other units", name) for name in ("by cost", "moved")),
    ("moved", "checked"),  # passes of one's own come behind those that insert the checks
    *(("budget", name) for name in ("activations", "both")),
    ("budget", "zero1"),  # whose parameters alone take more
    *(
        ("budget", name) for name in ("apart", "in pairs", "in parts")
    ),  # under which units stay apart
)
"""Values of two axes that a policy refuses together, or that are one with others."""

Row = dict[str, str]


def allowed(row: Row) -> bool:
    values = set(row.values())
    return not any(values >= set(pair) for pair in REFUSED)


def covering() -> list[Row]:
    """Rows in which any two values of different axes meet; what is most in the first ones."""
    chance = random.Random(0)
    pairs = {
        frozenset([(a, one), (b, other)])
        for a, b in combinations(AXES, 2)
        for one, other in product(AXES[a], AXES[b])
        if (one, other) not in REFUSED and (other, one) not in REFUSED
    }
    rows: list[Row] = []
    while pairs:
        start = min(pairs, key=sorted)
        drawn = (
            {name: chance.choice(list(values)) for name, values in AXES.items()} | dict(start)
            for _ in range(400)
        )
        # Symbols take longest to capture.
        row = max(
            filter(allowed, drawn),
            key=lambda row: len(met(row) & pairs) / (3 if "symbols" in row.values() else 1),
        )
        pairs -= met(row)
        rows.append(row)
    return rows


def met(row: Row) -> set[frozenset[tuple[str, str]]]:
    return set(map(frozenset, combinations(row.items(), 2)))


# -- the model, sharded and not -------------------------------------------------------------------


class Block(uneven.Block):
    """Its dropout draws more than a generator's state takes, so recomputing draws it again."""

    def __init__(self) -> None:
        super().__init__()
        self.spectrum = nn.Parameter(torch.randn(WIDTH // 2 + 1, dtype=torch.cfloat) / 50)

    def reset_parameters(self) -> None:
        super().reset_parameters()
        nn.init.normal_(self.spectrum)

    def forward(self, x: Tensor) -> Tensor:
        many = super().forward(x).expand(48, *x.shape)
        y = F.dropout(many, 0.1).mean(0)
        filtered = torch.fft.rfft(y.float(), norm="ortho") * self.spectrum.conj()
        return y + torch.fft.irfft(filtered, n=WIDTH, norm="ortho").to(y.dtype)


class Net(uneven.Net):
    """No dim is even; some parameters are complex, have no elements, no dims or no use."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.fourier = Fourier()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.wide = nn.Parameter(torch.ones(3, 0))
        self.unused = nn.Linear(3, 3)

    def reset_parameters(self) -> None:
        for param in (self.scale, self.wide):
            nn.init.ones_(param)

    def forward(self, ids: Tensor, skip: bool = False) -> Tensor:
        x = self.mix(self.embed(ids).transpose(1, 2)).transpose(1, 2)
        for index, block in enumerate(self.blocks):
            if not (skip and index == 1):
                x = block(x)
        logits = self.head(self.fourier(x) * self.scale).float()
        return F.cross_entropy(logits.transpose(1, 2), ids) + self.wide.sum()


def net(seed: int = 5) -> Net:
    """Without training what has no dims on more ranks, where its sum has another order."""
    torch.manual_seed(seed)
    model = Net()
    for param in (model.scale, model.fourier.turn):
        param.requires_grad_(dist.get_world_size() == 2)
    return model


Step = dict[str, Tensor]
"""The loss of this rank, and the whole gradients; last of all the whole parameters."""


def batch(step: int, rank: int, sizes: tuple[int, int] = (2, 5)) -> Tensor:
    """The ids; the dropout of a step that takes them is that of this rank, too."""
    torch.manual_seed(100 * step + rank)
    return torch.randint(VOCAB, sizes).to(device())


def backward(
    model: Any, step: int, rank: int, *, dynamic: bool = False, skip: bool = False
) -> Tensor:
    loss = model(batch(step, rank, (2 + step, 5 + 2 * step) if dynamic else (2, 5)), skip=skip)
    loss.backward()
    # What is drawn next tells how much forward and backward drew.
    return torch.stack([loss.detach(), torch.rand((), device=device())])


def optimizer(model: nn.Module, precision: MixedPrecision | None) -> torch.optim.Optimizer:
    """AdamW, or SGD where gradients stay in a dtype that AdamW does not take."""
    if precision is not None and precision.keep_low_precision_grads:
        return torch.optim.SGD(model.parameters(), lr=0.1)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def batches(step: int, kept: bool, odd: bool = False) -> Iterator[tuple[int, bool]]:
    """The batches of a step, and whether they skip a block: the second one does, of two.

    Those of an `odd` rank do where the others do not.
    """
    yield from [(step, odd), (step + 2, not odd)] if kept else [(step, odd)]


def by_one_process(rank: int, *, kept: bool, dynamic: bool, others: bool = False) -> list[Step]:
    """With `others`, ranks skip other blocks, and what no rank uses has gradients of zeros."""

    def on_rank(step: int, other: int, replica: nn.Module) -> Tensor:
        """The loss of the rank's last batch."""
        for number, skip in batches(step, kept, others and other % 2 == 1):
            loss = backward(replica, number, other, dynamic=dynamic, skip=skip)
        return loss

    plain = net().to(device())
    one = OneProcess(plain, dist.get_world_size(), partial(optimizer, precision=None))
    found: list[Step] = []
    for step in range(2):
        losses = one.average(partial(on_rank, step))
        for param in one.model.parameters():
            if others and param.requires_grad and param.grad is None:
                param.grad = torch.zeros_like(param)
        found.append({"loss": losses[rank], **full_grads(one.model)})
        one.step()
    return [*found, {name: p.detach().clone() for name, p in one.model.named_parameters()}]


def by_ranks(rank: int, **fields: Any) -> list[Step]:
    micro = fields.pop("micro", "")
    with surroundings(rank, fields) as sharded:
        return trained(sharded, rank, micro, dynamic=fields.get("dynamic") is not None)


def trained(sharded: Any, rank: int, micro: str = "", *, dynamic: bool = False) -> list[Step]:
    policy = sharded.plan.policy
    optim = optimizer(sharded, policy.mixed_precision)
    odd = policy.gather_unused and rank % 2 == 1
    found: list[Step] = []
    for step in range(2):
        *kept, (number, skip) = batches(step, bool(micro), odd)
        for first, skip_first in kept:
            with sharded.no_sync(all_reduce_only=micro == "shard"):
                backward(sharded, first, rank, dynamic=dynamic, skip=skip_first)
        loss = backward(sharded, number, rank, dynamic=dynamic, skip=skip)
        found.append({"loss": loss, **full_grads(sharded)})
        optim.step()
        optim.zero_grad()
    return [*found, {name: full(param).clone() for name, param in sharded.named_parameters()}]


def as_it_is(graph: Any, *_: Any) -> Any:
    return graph.forward


@contextmanager
def surroundings(rank: int, fields: dict[str, Any]) -> Iterator[Any]:
    """A sharded module, while regions are "compiled" to their operators and hosts are made up."""
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch_inductor, "compile_graph", as_it_is))
        if fields.get("hosts"):
            host = {"NCCL_HOSTID": f"host{rank}"}
            stack.enter_context(mock.patch.dict(os.environ, host))
            stack.enter_context(mock.patch.object(pipeline, "APART", 0))
            stack.enter_context(mock.patch.object(split_ends, "PARTS", 16))
        yield compiled(**{name: value for name, value in fields.items() if name != "hosts"})


def compiled(*, seed: int = 5, **fields: Any) -> Any:
    return uneven.compiled(make=partial(net, seed), blocks=(Block, Fourier), **fields)


def require_equal(found: list[Step], expected: list[Step], *, within: float = 0.0) -> None:
    """To the bit; or the first step, when weights are equal, by a part of the largest values."""
    largest = max(value.abs().max().item() for value in expected[0].values() if value.numel())
    for step, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        assert ours.keys() == theirs.keys(), (step, ours.keys() ^ theirs.keys())
        for name, value in theirs.items():
            mine = ours[name].to(value.device)  # of offloaded parameters, from the host
            if not within:
                assert torch.equal(mine, value), (step, name)
            elif step == 0 and value.numel():
                bound = within * max(value.abs().max().item(), 1e-3 * largest)
                assert (mine - value).abs().max().item() <= bound, name


_references: dict[Any, list[Step]] = {}


def reference(rank: int, fields: Mapping[str, Any]) -> list[Step]:
    kept, dynamic = bool(fields.get("micro")), fields.get("dynamic")
    precision, others = fields.get("mixed_precision"), fields.get("gather_unused", False)
    key = (precision, kept, bool(dynamic), others)
    if key not in _references:
        if precision is None:
            _references[key] = by_one_process(
                rank, kept=kept, dynamic=dynamic is not None, others=others
            )
        else:
            plain = {"mixed_precision": precision, "dynamic": dynamic, "gather_unused": others}
            _references[key] = by_ranks(rank, micro="gradient" if kept else "", **plain)
    return _references[key]


class Trains:
    """A check that a module of these `fields` trains as the unsharded one."""

    def __init__(self, name: str, *, exact: bool = True, **fields: Any) -> None:
        self.__name__, self.fields = name, fields
        rounding = 2e-2 if "mixed_precision" in fields else 1e-5
        self.within = 0.0 if exact else rounding

    def __call__(self, rank: int) -> None:
        expected = reference(rank, self.fields)
        require_equal(by_ranks(rank, **self.fields), expected, within=self.within)


def check_of(row: Row) -> Trains:
    fields = {k: v for name, value in row.items() for k, v in AXES[name][value].items()}
    if "dynamic" in fields and "memory_budget" in fields:
        fields["memory_budget"] = 240_000  # for larger batches
    # With shards kept, what has no dims is averaged over all ranks in each batch: another sum.
    exact = row["kept"] != "shards"
    return Trains(", ".join(filter(None, row.values())), exact=exact, **fields)


ROWS = [check_of(row) for row in covering()]


# -- what else options do to each other -----------------------------------------------------------


def full_gradients_of_low_precision(rank: int) -> None:
    """unsharded(with_grads=True) over gradients of another dtype than the parameter's."""
    for fields in ({}, {"offload": OFFLOAD}, {"strategy": "NO_SHARD"}):
        sharded = compiled(mixed_precision=KEPT_HALF, **fields)
        backward(sharded, 0, rank)
        before = full_grads(sharded)
        with sharded.unsharded(with_grads=True) as params:
            for name, grad in before.items():
                assert torch.equal(params[name].grad, grad)
                kept = params[name].dtype if params[name].is_complex() else torch.bfloat16
                assert params[name].grad.dtype == kept
                params[name].grad.mul_(2)
            with pytest.raises(RuntimeStateError, match="clip before it"):
                sharded.clip_grad_norm_(1.0)
        for name, grad in full_grads(sharded).items():
            assert torch.equal(grad, before[name] * 2)
        sharded.zero_grad()
        with sharded.unsharded(with_grads=True) as params:
            for name in before:
                params[name].grad = torch.ones_like(params[name], dtype=before[name].dtype)
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
                backward(sharded, 5 + step, rank)
            backward(sharded, step, rank, skip=True)
            with sharded.unsharded(with_grads=True):
                optim.step()
            sharded.zero_grad()
        runs.append({name: full(p).clone() for name, p in sharded.named_parameters()})
    for name, value in runs[0].items():
        torch.testing.assert_close(runs[1][name], value, atol=2e-3, rtol=1e-2)
        assert torch.equal(runs[2][name], value)


def state_goes_on_under_another_policy(rank: int) -> None:
    """Model and optimizer state of one policy, whole and sharded, taken over by the next."""
    taken: Any = None

    def state() -> tuple[Any, Any]:
        return (
            sharded.full_state_dict(rank0_only=False),
            sharded.optimizer_state_dict(optim, kind="full", rank0_only=False),
        )

    for fields in (
        {"offload": OFFLOAD, "mixed_precision": HALF},
        {"strategy": "SHARD_OPTIMIZER"},
        {"strategy": "HYBRID_SHARD", "mesh": (2, 1), "offload": OFFLOAD},
        {"modules": OVERRIDES, "offload": OFFLOAD},
        {"strategy": "NO_SHARD", "offload": OFFLOAD},
        {"modules": ALONG_1},
    ):
        sharded = compiled(**fields)
        optim = torch.optim.AdamW(sharded.parameters(), lr=0.01)
        if taken is not None:
            sharded.load_full_state_dict(taken[0])
            sharded.load_optimizer_state_dict(optim, taken[1])
            sharded.load_state_dict({n: 2 * v for n, v in sharded.state_dict().items()})
            sharded.load_state_dict({n: v / 2 for n, v in sharded.state_dict().items()})
            now = state()
            torch.testing.assert_close(now[0], taken[0], rtol=0, atol=0)
            torch.testing.assert_close(now[1]["state"], taken[1]["state"], rtol=0, atol=0)
        backward(sharded, 0, rank)
        optim.step()
        taken = state()


def ignored_on_replicas(rank: int) -> None:
    """Ignored parameters under HYBRID_SHARD, sync_module_states, offload and mixed precision."""
    for fields in (
        {"mesh": (2, 1), "strategy": "HYBRID_SHARD"},
        {"offload": OFFLOAD},
        {"mixed_precision": REDUCED_HALF, "strategy": "SHARD_OPTIMIZER"},
    ):
        ignored = r"blocks\.\d\.norm"
        sharded = compiled(ignored=ignored, sync_module_states=True, seed=rank, **fields)
        values: list[Any] = [None, None]
        dist.all_gather_object(values, {n: full(p) for n, p in sharded.named_parameters()})
        assert all(torch.equal(v, values[1][n]) for n, v in values[0].items()), fields
        optim = torch.optim.AdamW(sharded.parameters(), lr=0.01)
        with sharded.no_sync():
            backward(sharded, 3, rank)
        backward(sharded, 4, rank)
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


def masks_are_drawn_again(rank: int) -> None:
    sharded = compiled(recompute="units")
    backward(sharded, 0, rank)
    events = [event.op for event in sharded.program.schedule()]
    assert events.count("save_random_state") == 2
    assert "set_random_state" in events


# -- numbers of ranks that divide no dim ----------------------------------------------------------


def every_kind_of_split_is_there(rank: int) -> None:
    """Of six ranks, whose grids are 3 x 2 and 2 x 3."""
    sharded = compiled()
    placements = {p.placements for p in sharded.parameters()}
    assert (Shard(0),) in placements
    assert {len(each) for each in placements} == {1, 2}, placements
    # torch's own clipping takes them together, and returns what ours does.
    backward(sharded, 0, rank)
    ours = sharded.clip_grad_norm_(0.1)
    sharded.zero_grad()
    backward(sharded, 0, rank)
    theirs = torch.nn.utils.clip_grad_norm_(sharded.parameters(), 0.1)
    torch.testing.assert_close(full(theirs), full(ours))
    scaler, optim = torch.amp.GradScaler("cpu"), torch.optim.SGD(sharded.parameters(), lr=0.1)
    before = [full(p).clone() for p in sharded.parameters() if p.requires_grad]
    for infinite in (True, False):
        optim.zero_grad()
        scaler.scale(sharded(batch(0, rank))).backward()
        if infinite and rank == 4:
            local = next(p for p in sharded.parameters() if len(p.placements) == 2).grad
            local.to_local().fill_(torch.inf)
        scaler.step(optim)
        scaler.update()
        after = [full(p) for p in sharded.parameters() if p.requires_grad]
        assert all(map(torch.equal, before, after)) is infinite


def initial_values_do_not_depend_on_the_split(rank: int) -> None:
    values = []
    for modules in (None, ALONG_0, ALONG_1):
        sharded = compiled(modules=modules, meta=True)
        sharded.init_weights(seed=3)
        values.append({name: full(param).clone() for name, param in sharded.named_parameters()})
    for other in values[1:]:
        assert all(torch.equal(value, values[0][name]) for name, value in other.items())


def the_ends_of_a_step_go_in_parts(rank: int) -> None:
    with surroundings(rank, {"hosts": 2, "merge_below": 200}) as sharded:
        backward(sharded, 0, rank)
        text = str(sharded.plan)
    assert re.search(r"apart: blocks.0 is gathered in \d parts", text), text
    assert re.search(r"apart: blocks.0 is reduced in \d parts", text), text


def grids_are_rebound(rank: int) -> None:
    sharded = compiled()
    grid = next(p for p in sharded.parameters() if len(p.placements) == 2)
    before = [grid.device_mesh.get_group(dim) for dim in (0, 1)]
    whole = full(grid).clone()
    sharded.rebind(DeviceMesh.from_group(dist.new_group(), "cpu"))
    assert all(grid.device_mesh.get_group(dim) is not before[dim] for dim in (0, 1))
    assert torch.equal(full(grid), whole)
    require_equal(trained(sharded, rank), reference(rank, {}))


ALONE_ON_SIX = [
    every_kind_of_split_is_there,
    initial_values_do_not_depend_on_the_split,
    grids_are_rebound,
]

# -- launches -------------------------------------------------------------------------------------

QUICK = [row for row in ROWS if not row.fields.get("dynamic")][:3:2]  # the second is slow
OTHERS = checks_of(globals(), but=ALONE_ON_SIX)
ZERO1 = {"strategy": "SHARD_OPTIMIZER"}
REPLICAS = {"strategy": "HYBRID_SHARD", "mesh": (2, 2)}
ON_FOUR = [
    Trains("parts", reshard_after_forward=2, offload=OFFLOAD, recompute="units", micro="gradient"),
    Trains("parts by cost", reshard_after_forward=2, schedule="overlap", hardware="h100-sxm"),
    Trains("zero1", **ZERO1, micro="gradient", recompute="selective"),
    Trains("half", mixed_precision=HALF, reshard_after_forward=2, offload=OFFLOAD, exact=False),
    Trains("whole", strategy="NO_SHARD", exact=False),
    Trains("zero1 in parts", **ZERO1, hosts=2, merge_below=200),
    Trains("replicas in parts", **REPLICAS, exact=False, hosts=2, merge_below=200),
    Trains("replicas", **REPLICAS, exact=False, micro="shard", offload=OFFLOAD,
           check_finite="warn"),
    Trains("replicas moved", **REPLICAS, exact=False, micro="gradient", passes=PASSES),
    Trains("replicas by cost", **REPLICAS, exact=False, schedule="overlap", hardware="h100-sxm",
           recompute="units"),
    Trains("kept replicas", mesh=(2, 2), strategy="HYBRID_SHARD_ZERO2", exact=False,
           mixed_precision=KEPT_HALF, micro="shard"),
    Trains("one replica in parts", mesh=(1, 4), strategy="HYBRID_SHARD", reshard_after_forward=2,
           reshard_root=True),
]  # fmt: skip
UNEVEN = [
    Trains("chosen", strategy="SHARD_GRAD_OP"),
    Trains("along dim 2", modules=ALONG_2),
    Trains("zero1 along dim 1", modules=ALONG_1, **ZERO1),
]
ON_SIX = [
    Trains("order", forward_prefetch=1, recompute="units", offload=OFFLOAD, micro="gradient"),
    Trains("half", mixed_precision=HALF, exact=False),
    Trains("regions in parts", reshard_after_forward=3, backend="inductor"),
    Trains("replicas", mesh=(2, 3), strategy="HYBRID_SHARD_ZERO2", modules=ALONG_1, exact=False),
    *ALONE_ON_SIX,
]

BESIDE = {"blocks.1": {"strategy": "FULL_SHARD"}, "": {"strategy": "SHARD_GRAD_OP"}}
QUICK_ZERO1 = [Trains("zero1 alone", **ZERO1), Trains("zero1 beside", modules=BESIDE, **ZERO1)]

test_pairs_on_two_ranks = on_ranks([*QUICK, *QUICK_ZERO1], 2, timeout=300)
BUDGET = {"recompute": "budget", "memory_budget": 220_000}
REST = [*(row for row in ROWS if row not in QUICK), Trains("zero1", **ZERO1, **BUDGET)]
test_other_pairs_on_two_ranks = pytest.mark.slow(on_ranks(REST[::4], 2, timeout=595))
test_more_pairs_on_two_ranks = pytest.mark.slow(on_ranks(REST[1::4], 2, timeout=595))
test_third_pairs_on_two_ranks = pytest.mark.slow(on_ranks(REST[2::4], 2, timeout=595))
test_last_pairs_on_two_ranks = pytest.mark.slow(on_ranks(REST[3::4], 2, timeout=595))
test_others_on_two_ranks = pytest.mark.slow(on_ranks(OTHERS, 2, timeout=500))
test_on_four_ranks = pytest.mark.slow(on_ranks(ON_FOUR, 4, timeout=500))
test_on_three_ranks = pytest.mark.slow(on_ranks(UNEVEN, 3, timeout=500))
test_on_six_ranks = pytest.mark.slow(on_ranks([*UNEVEN, *ON_SIX], 6, timeout=595))
test_on_seven_ranks = pytest.mark.slow(on_ranks(UNEVEN, 7, timeout=500))

NCCL = {"device": "cuda", "timeout": 595}
test_pairs_on_nccl = pytest.mark.cuda(on_ranks(QUICK, 2, **NCCL))
test_other_pairs_on_nccl = pytest.mark.cuda(pytest.mark.slow(on_ranks(REST, 2, **NCCL)))
test_on_four_nccl_ranks = pytest.mark.cuda(pytest.mark.slow(on_ranks(ON_FOUR, 4, **NCCL)))

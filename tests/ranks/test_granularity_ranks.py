"""Two ranks train alike, bit for bit, however gathers and reduces are split, merged and kept."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from models import CASES, VOCAB, Case
from ranks import on_ranks, run_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import graphshard
from examples.benchmarks.live_bytes import LiveBytes
from examples.gpt import GPT, GPTConfig
from graphshard import MixedPrecision, pipeline
from graphshard.passes.merge_gathers import MergeGathers
from graphshard.passes.overlap import Overlap
from graphshard.passes.set_budget import SetBudget
from graphshard.passes.skip_reshard import SkipReshard
from graphshard.passes.split_gathers import SplitGathers
from graphshard.passes.split_reduces import SplitReduces
from graphshard.program import ops
from graphshard.program.pass_protocol import Pass

SPLIT = (SplitGathers(again=True, apart=0.0, alone=0), SplitReduces(apart=0.0))
PRECISION = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def untied() -> nn.Module:
    """A GPT with a head of its own."""
    return GPT(GPTConfig(vocab=VOCAB, layers=2, heads=2, width=24, dropout=0.1, tied=False))


def frozen() -> nn.Module:
    model = untied()
    model.get_parameter("tokens.weight").requires_grad_(False)
    return model


MODELS = {
    "gpt": CASES["gpt"],
    "untied": Case("untied", untied, ("Block",), CASES["gpt"].batch),
    "frozen": Case("frozen", frozen, ("Block",), CASES["gpt"].batch),
    "llama": CASES["llama"],
    "t5": CASES["t5"],
}
Run = list[tuple[Tensor, dict[str, Tensor]]]


def trained(case: Case, rank: int, passes: Sequence[Pass], micro: int = 0, **fields: Any) -> Any:
    """(loss and full gradients of two steps of AdamW, the sharded model)."""
    mesh = fields.pop("mesh", None)
    model = graphshard.compile(
        case.model(),
        graphshard.BlockPolicy(case.blocks, **fields),
        example_kwargs=case.inputs(0),
        mesh=mesh,
        passes=(SetBudget(), *passes, Overlap()) if passes else (),
        check=True,
    )
    optim = torch.optim.AdamW(model.parameters(), lr=1e-3)
    history: Run = []
    for step in range(2):
        for part in range(micro):
            with model.no_sync():
                _backward(model, case, 1000 * step + 100 * part + rank)
        loss = _backward(model, case, 50 + 10 * step + rank)
        grads = {
            name: _full(param.grad).clone()
            for name, param in model.named_parameters()
            if param.grad is not None
        }
        history.append((loss, grads))
        optim.step()
        optim.zero_grad()
    return history, model


def _backward(model: nn.Module, case: Case, seed: int) -> Tensor:
    inputs = case.inputs(seed)
    torch.manual_seed(seed)
    output = model(**inputs)
    loss = output if isinstance(output, Tensor) else output.loss
    loss.backward()
    return loss.detach()


def _full(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def require_same(case: Case, rank: int, *rows: Sequence[Pass], **fields: Any) -> list[Any]:
    """The model trained as FSDP does, and after each row of passes, all alike."""
    expected, plain = trained(case, rank, (), **fields)
    models = [plain]
    for passes in rows:
        found, model = trained(case, rank, passes, **fields)
        models.append(model)
        _require_equal(found, expected, f"{case.name} after {[step.name for step in passes]}")
    return models


def _require_equal(found: Run, expected: Run, what: str) -> None:
    for (wanted, grads), (loss, now) in zip(expected, found, strict=True):
        assert torch.equal(wanted, loss), what
        assert grads.keys() == now.keys(), what
        for name, grad in grads.items():
            assert torch.equal(grad, now[name]), (what, name)


def collectives(model: Any) -> int:
    return sum(ops.is_collective(node) for node in model.program.nodes())


def finer_and_coarser(rank: int) -> None:
    kept = SkipReshard(("blocks.1",))
    plain, finer, coarser = require_same(
        MODELS["untied"], rank, (*SPLIT, kept), (MergeGathers(1 << 20),)
    )
    assert collectives(coarser) < collectives(plain) < collectives(finer)


def micro_batches_keep(rank: int) -> None:
    row = (*SPLIT, MergeGathers(30_000))
    require_same(MODELS["untied"], rank, row, micro=1)


def mixed_precision(rank: int) -> None:
    row = (*SPLIT, MergeGathers(20_000))
    require_same(MODELS["untied"], rank, row, mixed_precision=PRECISION)


def by_cost(rank: int) -> None:
    expected, _ = trained(MODELS["gpt"], rank, ())
    found, _ = trained(MODELS["gpt"], rank, (), schedule="overlap")
    _require_equal(found, expected, "tied")


def by_default_between_hosts(rank: int) -> None:
    """Each rank says that it is a host of its own; parts of any size are moved apart."""
    host = {"NCCL_HOSTID": f"host{rank}"}
    for fields in (
        {},
        {"micro": 1, "reshard_root": True},
        {"strategy": "SHARD_GRAD_OP", "mixed_precision": PRECISION},
        {"strategy": "SHARD_OPTIMIZER"},
        {"offload": "params"},
        {"schedule": "overlap"},
    ):
        expected, near = trained(MODELS["untied"], rank, (), **fields)
        with mock.patch.dict(os.environ, host), mock.patch.object(pipeline, "APART", 0):
            found, far = trained(MODELS["untied"], rank, (), **fields)
        _require_equal(found, expected, str(fields))
        assert far.plan.hosts == 2
        # ZeRO-1 gathers nothing in a step, and by cost small parts are gathered together again.
        if "schedule" not in fields and fields.get("strategy") != "SHARD_OPTIMIZER":
            assert collectives(far) > collectives(near), fields


WIDE = GPTConfig(vocab=4001, layers=2, heads=2, width=32, dropout=0.0, tied=False)


def held_bytes(rank: int) -> None:
    """The most bytes alive while a step of a model runs that is embedding and head, mostly."""
    table = WIDE.vocab * WIDE.width * 4
    peaks = []
    for passes in ((), (SetBudget(), *SPLIT)):
        torch.manual_seed(0)
        model = graphshard.compile(
            GPT(WIDE), graphshard.BlockPolicy({"Block"}), passes=passes, check=False
        )
        ids = torch.randint(WIDE.vocab, (1, 5))
        with LiveBytes() as live:
            model(ids[:, :-1], ids[:, 1:]).backward()
            peaks.append(live.peak)
            del live
        del model
    # Not there any more: the embedding when the head's gradient is made, and that one when the
    # embedding's is.
    assert peaks[0] - peaks[1] > 0.8 * table, (peaks, table)


CHECKS = [
    finer_and_coarser,
    micro_batches_keep,
    mixed_precision,
    by_cost,
    by_default_between_hosts,
    held_bytes,
]

test_on_two_ranks = pytest.mark.slow(on_ranks(CHECKS, 2, timeout=300))


def every_model(rank: int) -> None:
    for name in ("gpt", "frozen", "llama", "t5"):
        plain, finer = require_same(MODELS[name], rank, SPLIT)
        assert collectives(finer) > collectives(plain), name
    require_same(MODELS["llama"], rank, SPLIT, mixed_precision=PRECISION)


def every_strategy(rank: int) -> None:
    row = SPLIT
    require_same(MODELS["untied"], rank, row, strategy="SHARD_GRAD_OP")
    require_same(MODELS["untied"], rank, row, strategy="SHARD_OPTIMIZER")
    require_same(MODELS["untied"], rank, row, reshard_root=True, recompute="units")
    require_same(MODELS["untied"], rank, row, offload="params")


@pytest.mark.slow
@pytest.mark.parametrize("check", [every_model, every_strategy], ids=lambda check: check.__name__)
def test_more_on_two_ranks(check: Callable[[int], None]) -> None:
    run_ranks(check, 2, timeout=400)


def on_a_mesh(rank: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    fields = {"mesh": mesh, "strategy": "HYBRID_SHARD"}
    rows = (SPLIT, (*SPLIT, MergeGathers(30_000)), (MergeGathers(1 << 20),))
    require_same(MODELS["untied"], rank, *rows, **fields)
    require_same(MODELS["untied"], rank, rows[1], micro=1, **fields)
    require_same(MODELS["gpt"], rank, SPLIT, mixed_precision=PRECISION, **fields)


@pytest.mark.slow
def test_on_a_mesh_of_four_ranks() -> None:
    run_ranks(on_a_mesh, 4, timeout=400)

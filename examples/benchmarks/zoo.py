"""Losses and all gradients of forty architectures on two ranks, against eager mode.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/benchmarks/zoo.py [--only NAME ...]

The reference is the plain model on each rank's batch, with gradients averaged over the ranks.
`fully_shard` on the same units stands beside. Needs the extra `zoo`.
"""

from __future__ import annotations

import gc
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks.harness import parser, started_by_torchrun, worst_rank
from examples.benchmarks.zoo_models import ZOO, Specimen

CPU = torch.device("cpu")

Run = tuple[Tensor, dict[str, Tensor]]

Gap = list[float]
"""How far the loss is off, absolute, and the largest |dg| / |g| of a parameter, on any rank."""


def loss_of(output: Any) -> Tensor:
    """The loss that a model returned, or else a mean square over its floating-point outputs."""
    loss = output.get("loss") if hasattr(output, "get") else None
    if loss is not None:
        return loss
    leaves = pytree.tree_leaves(output)
    return sum((t.float() - 0.1).square().mean() for t in leaves if t.is_floating_point())


def run(model: nn.Module, specimen: Specimen, rank: int) -> Run:
    """(loss, whole gradients) of one step."""
    batch = specimen.inputs(100 + rank)
    torch.manual_seed(7 + rank)
    loss = loss_of(model(**batch))
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return loss.detach(), {n: g.full_tensor() if isinstance(g, DTensor) else g
                           for n, g in grads.items()}  # fmt: skip


def by_eager(specimen: Specimen, rank: int) -> Run:
    loss, grads = run(specimen.model(), specimen, rank)
    for grad in grads.values():
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return loss, grads


def by_fully_shard(specimen: Specimen, rank: int, units: list[str]) -> Run:
    model = specimen.model()
    for fqn in sorted(units, key=lambda fqn: -(fqn.count(".") + bool(fqn))):
        fully_shard(model.get_submodule(fqn))
    return run(model, specimen, rank)


def gap(mine: Run, expected: Run) -> Gap:
    """The difference on any rank; an AssertionError if other parameters have a gradient."""
    (loss, grads), (loss_there, grads_there) = mine, expected
    assert grads.keys() == grads_there.keys(), grads.keys() ^ grads_there.keys()
    largest = max(float(g.norm()) for g in grads_there.values())
    shares = [0.0]
    for name, there in grads_there.items():
        norm = float(there.norm())
        # A gradient that is zero but for rounding has no digits to compare.
        scale = norm if norm > 1e-6 * largest else largest
        shares.append(float((grads[name] - there).norm()) / scale)
    return worst_rank([abs(float(loss - loss_there)), max(shares)], CPU)


def compare(specimen: Specimen, rank: int) -> tuple[Gap | str, Gap | str, int]:
    """(graphshard's gap or error, `fully_shard`'s, the number of units)."""
    expected = by_eager(specimen, rank)
    policy = graphshard.BlockPolicy(specimen.blocks or None)
    units = [unit.fqn for unit in graphshard.plan(specimen.model(), policy, world_size=2).units]
    try:
        sharded = graphshard.compile(specimen.model(), policy)
        ours: Gap | str = gap(run(sharded, specimen, rank), expected)
    except (graphshard.GraphshardError, AssertionError) as error:
        ours = f"{type(error).__name__}: {error}"
    try:
        theirs: Gap | str = gap(by_fully_shard(specimen, rank, units), expected)
    except (RuntimeError, ValueError, AssertionError, AttributeError) as error:
        theirs = f"{type(error).__name__}: {error}"
    return ours, theirs, len(units)


def row(specimen: Specimen, ours: Gap | str, theirs: Gap | str, units: int) -> str:
    """A line of the table."""
    mine = ["fails"] * 2 if isinstance(ours, str) else map(said, ours)
    other = "fails" if isinstance(theirs, str) else said(theirs[1])
    cells = (specimen.name, specimen.library, str(units), *mine, other)
    return f"| {' | '.join(cells)} |"


def said(number: float) -> str:
    return "equal" if number == 0 else f"{number:.0e}"


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="*", help="names of architectures")
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    with started_by_torchrun():
        rank = dist.get_rank()
        if rank == 0:
            print("| model | library | units | loss | gradients | gradients, fully_shard |")
            print("|---|---|---|---|---|---|", flush=True)
        for specimen in ZOO:
            if arguments.only and specimen.name not in arguments.only:
                continue
            ours, theirs, units = compare(specimen, rank)
            if rank == 0:
                print(row(specimen, ours, theirs, units), flush=True)
                for who, outcome in (("graphshard", ours), ("fully_shard", theirs)):
                    if isinstance(outcome, str):
                        print(f"{who}: {outcome[:600]}", file=sys.stderr, flush=True)
            gc.collect()
        dist.barrier()


if __name__ == "__main__":
    main()

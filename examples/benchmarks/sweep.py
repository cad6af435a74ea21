"""One step of every architecture of transformers, and of other libraries' models, on two ranks.

    OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 examples/benchmarks/sweep.py [--only NAME ...]

Loss and gradients are compared with the plain model on each rank's batch, gradients averaged over
the ranks; `fully_shard` on the same units stands beside. Architectures are made small by rule (see
sweep_models.py); those that do not run in eager mode like that are left out, and listed with
--verbose. Needs the extra `sweep`.
"""

from __future__ import annotations

import gc
import logging
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks.harness import parser, started_by_torchrun, worst_rank
from examples.benchmarks.sweep_models import (
    LIBRARIES,
    Specimen,
    architectures,
    loss_of,
    of_transformers,
)

CPU = torch.device("cpu")

ROUNDING = 1e-5

Run = tuple[Tensor, dict[str, Tensor]]

WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "default": ({}, {}),
    "overlap": ({"schedule": "overlap", "hardware": "cpu-gloo"}, {}),
    "recompute": ({"recompute": "units"}, {}),
    "inductor": ({}, {"backend": "inductor"}),
    "sizes": ({}, {}),
}
"""Ways to run it: options of the policy, and of `compile`; "sizes" captures a larger batch, too."""


def run(model: nn.Module, specimen: Specimen, rank: int) -> Run:
    """The loss and the whole gradients of one step."""
    loss = loss_of(specimen.call(model, 100 + rank))
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    whole = {n: g.full_tensor() if isinstance(g, DTensor) else g for n, g in grads.items()}
    return loss.detach(), whole


def by_eager(specimen: Specimen, rank: int) -> tuple[Run, list[set[str]]]:
    """What a rank should get, and which parameters have a gradient on each rank by itself."""
    loss, grads = run(specimen.model(), specimen, rank)
    names: list[dict[str, Any]] = [{}] * dist.get_world_size()
    dist.all_gather_object(names, {name: (g.shape, g.dtype) for name, g in grads.items()})
    for name, (shape, dtype) in sorted({n: s for each in names for n, s in each.items()}.items()):
        grad = grads.setdefault(name, torch.zeros(shape, dtype=dtype))
        dist.all_reduce(grad)
        grad /= dist.get_world_size()
    return (loss, grads), [set(each) for each in names]


def by_fully_shard(specimen: Specimen, rank: int, units: list[str], trained: list[set[str]]) -> Run:
    if trained.count(trained[0]) < len(trained):
        raise ValueError("ranks have gradients of other parameters; Gloo aborts in the reduce")
    model = specimen.model()
    for fqn in sorted(units, key=lambda fqn: -(fqn.count(".") + bool(fqn))):
        fully_shard(model.get_submodule(fqn))
    return run(model, specimen, rank)


def gap(mine: Run, expected: Run) -> str:
    """The difference on any rank, loss's and the largest |dg| / |g| of a parameter's."""
    (loss, grads), (loss_there, grads_there) = mine, expected
    largest = max(float(g.norm()) for g in grads_there.values())
    # Other gradients count as infinitely far off: all ranks come to the collective below.
    shares = [0.0 if grads.keys() == grads_there.keys() else float("inf")]
    for name, there in grads_there.items():
        norm = float(there.norm())
        # A gradient that is zero but for rounding has no digits to compare.
        scale = norm if norm > 1e-6 * largest else largest
        share = float((grads.get(name, there) - there).norm()) / scale
        shares.append(share if share == share else float("inf"))
    worst = worst_rank([abs(float(loss - loss_there)), max(shares)], CPU)
    return "equal" if not any(worst) else f"{worst[0]:.0e}, {worst[1]:.0e}"


def compare(specimen: Specimen, rank: int, ways: list[str]) -> dict[str, str]:
    """How far each way is off, or its error; `fully_shard`'s last."""
    expected, trained = by_eager(specimen, rank)
    found: dict[str, str] = {}
    units: list[str] = []
    for way in ways:
        options, how = WAYS[way]
        try:
            model = specimen.model()
            first = larger(specimen) if way == "sizes" else {}
            sharded = graphshard.compile(model, policy_of(model, options), **how, **first)
            units = [unit.fqn for unit in sharded.plan.units]
            found[way] = gap(run(sharded, specimen, rank), expected)
        except Exception as error:
            found[way] = f"{type(error).__name__}: {error}"
            if not isinstance(error, graphshard.GraphshardError):
                found[way] = f"CRASH {found[way]}"
    try:
        found["fully_shard"] = gap(by_fully_shard(specimen, rank, units or [""], trained), expected)
    except Exception as error:
        found["fully_shard"] = f"{type(error).__name__}: {error}"
    return found


def larger(specimen: Specimen) -> dict[str, Any]:
    """The example of `compile` with twice as many samples as a batch, which are two."""
    tensors = torch.utils._pytree.tree_map_only(
        Tensor, lambda t: torch.cat([t, t]) if t.shape[:1] == (2,) else t, specimen.batch()
    )
    is_named = isinstance(tensors, dict)
    return {"example_kwargs": tensors} if is_named else {"example_inputs": tensors}


def policy_of(model: nn.Module, options: dict[str, Any]) -> graphshard.Policy:
    """Units by the model's own blocks, or else by size."""
    names = getattr(model, "_no_split_modules", None)
    kinds = {type(module).__name__ for module in model.modules()}
    if names and kinds & set(names):
        return graphshard.BlockPolicy(**options)
    params = sum(p.numel() for p in model.parameters())
    return graphshard.SizePolicy(min_num_params=max(1, params // 6), **options)


def specimens(only: list[str] | None, part: str, left_out: dict[str, str]) -> Iterator[Specimen]:
    """Those to run; adds the architectures that do not run in eager mode to `left_out`."""
    index, parts = map(int, part.split("/"))
    everything: list[str | Specimen] = [*architectures(), *LIBRARIES]
    wanted = [each for each in everything if only is None or getattr(each, "name", each) in only]
    for each in wanted[index::parts]:
        specimen, why = (each, "") if isinstance(each, Specimen) else of_transformers(each)
        if specimen is None:
            left_out[str(each)] = why
        else:
            yield specimen


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--only", nargs="*", help="names of architectures")
    options.add_argument("--ways", nargs="*", default=["default"], choices=WAYS)
    options.add_argument("--part", default="0/1", help="one part of several: 0/4 to 3/4")
    options.add_argument("--verbose", action="store_true", help="list what is left out, and why")
    arguments = options.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    counts: dict[str, Counter[str]] = {}
    left_out: dict[str, str] = {}
    with started_by_torchrun():
        rank = dist.get_rank()
        say = print if rank == 0 else lambda *_, **__: None
        columns = [*arguments.ways, "fully_shard"]
        say(f"| model | library | {' | '.join(columns)} |\n|{'---|' * (2 + len(columns))}")
        for specimen in specimens(arguments.only, arguments.part, left_out):
            found = compare(specimen, rank, arguments.ways)
            cells = [" ".join(found[way].replace("|", "/").split())[:200] for way in columns]
            say(f"| {specimen.name} | {specimen.library} | {' | '.join(cells)} |", flush=True)
            for way in columns:
                counts.setdefault(way, Counter())[_kind(found[way])] += 1
            gc.collect()
        for way, kinds in counts.items():
            say(f"{way}: {', '.join(f'{n} {kind}' for kind, n in kinds.most_common())}")
        say(f"{len(left_out)} architectures do not run in eager mode as they are made here")
        if arguments.verbose:
            say("\n".join(f"  {name}: {why[:160]!r}" for name, why in left_out.items()))
        dist.barrier()


def _kind(outcome: str) -> str:
    if outcome == "equal":
        return "equal"
    numbers = outcome.split(", ")
    if all(number[:1].isdigit() for number in numbers):
        return "by rounding" if max(map(float, numbers)) <= ROUNDING else "differ"
    return "fail"


if __name__ == "__main__":
    main()

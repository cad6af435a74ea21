"""The time of a save against torch.distributed.checkpoint's, on the same state, in paired runs.

    torchrun --nproc-per-node 2 examples/benchmarks/save_time.py --pairs 10

Each pair saves model and AdamW state once by `save_checkpoint` and once by torch's `save` over the
same directory each, in alternating order; then both in the background, where the time counts until
training may go on. It prints the median ratio and its range.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import get_state_dict

import graphshard


def seconds_of(save: Callable[[], Any]) -> float:
    """Seconds of a save on the slowest rank; one in the background is awaited after."""
    dist.barrier()
    start = time.perf_counter()
    saving = save()
    elapsed = torch.tensor(time.perf_counter() - start)
    if saving is not None:
        saving.result()
    dist.all_reduce(elapsed, dist.ReduceOp.MAX)
    return elapsed.item()


def ratios(ours: Callable[[], Any], theirs: Callable[[], Any], pairs: int) -> list[float]:
    """Our seconds by torch's, for each pair, after one pair that does not count."""
    measured = []
    for number in range(pairs + 1):
        first, second = (ours, theirs) if number % 2 else (theirs, ours)
        times = {first: seconds_of(first), second: seconds_of(second)}
        measured.append(times[ours] / times[theirs])
    return measured[1:]


def main() -> None:
    """Parse the arguments, measure, print on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=4)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [nn.Linear(options.width, options.width) for _ in range(options.layers)]
    sharded = graphshard.compile(nn.Sequential(*layers), graphshard.BlockPolicy({nn.Linear}))
    optimizer = torch.optim.AdamW(sharded.parameters())
    sharded(torch.randn(2, options.width)).sum().backward()
    optimizer.step()
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    folder = Path(folders[0])

    def state() -> dict[str, Any]:
        model, optim = get_state_dict(sharded, optimizer)
        return {"model": model, "optim": optim}

    foreground = ratios(
        lambda: sharded.save_checkpoint(folder / "ours", optimizer),
        lambda: checkpoint.save(state(), checkpoint_id=folder / "theirs") and None,
        options.pairs,
    )
    group = dist.new_group(backend="gloo")
    background = ratios(
        lambda: sharded.save_checkpoint(folder / "ours", optimizer, background=True),
        lambda: checkpoint.async_save(
            state(), checkpoint_id=folder / "theirs", process_group=group
        ),
        options.pairs,
    )
    if dist.get_rank() == 0:
        size = sum(file.stat().st_size for file in (folder / "ours").iterdir())
        print(f"{size / 2**20:.0f} MiB on {dist.get_world_size()} ranks, {options.pairs} pairs")
        for name, values in (("save", foreground), ("stall of a background save", background)):
            spread = f"{min(values):.3f} to {max(values):.3f}"
            print(f"{name}: {median(values):.3f} of torch's ({spread})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

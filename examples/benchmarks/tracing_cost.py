"""The time that names for profilers, and the note of where a rank is, cost while nobody asks.

    python examples/benchmarks/tracing_cost.py

The model, the groups and the clock are those of `host_cost.py`: tiny operators, CPU seconds of the
thread that trains. First a forward and backward as it is and without both, in turns: the median of
the ratios over pairs, with its 95 % interval. Then what was added, by itself: one question at each
forward and backward, and two stores at each wait. Calls with and without take turns, thousands of
times, and the fastest turn of each counts. The sum is set beside the time of a step.

Ends with status 1 if the sum is over 1 % of a step.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import sys
import tempfile
import textwrap
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from host_cost import Block, Work, batch, compare, cpu_seconds, forward_backward, report, tiny

import graphshard
from graphshard.runtime import collectives
from graphshard.runtime.collectives import BoundCollective, Pending

BAR = 0.01  # of a forward and backward

_CALLS = 2000  # in a turn
Wait = Callable[[BoundCollective, Pending], list[torch.Tensor]]


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--warmup", type=int, default=5, help="pairs that are not timed")
    parser.add_argument("--layers", type=int, default=12)
    return parser.parse_args()


def without_notes() -> Wait:
    """`BoundCollective.wait` without the lines that note where the rank is.

    Raises:
        RuntimeError: it has no such lines.
    """
    lines = textwrap.dedent(inspect.getsource(BoundCollective.wait)).splitlines()
    kept = [line for line in lines if not line.strip().startswith(("here = ", "here.at = "))]
    if len(lines) - len(kept) != 3:
        raise RuntimeError("BoundCollective.wait has other lines; adapt this script to them")
    scope: dict[str, Any] = dict(vars(collectives))
    exec("\n".join(kept), scope)
    wait: Wait = scope["wait"]
    return wait


def graphs_of(model: graphshard.ShardedModule) -> list[Any]:
    steps = model._graphshard.programs.steps.values()
    return [graph for step in steps for graph in step.lowered_graphs]


def compiled(layers: int) -> graphshard.ShardedModule:
    policy = graphshard.BlockPolicy({Block})
    return graphshard.compile(tiny(layers), policy, example_inputs=batch())


def without_both(model: graphshard.ShardedModule) -> None:
    """Take both out of the code of `model`."""
    wait = without_notes()
    for graph in graphs_of(model):
        code: Any = type(graph.module).forward
        assert code.__globals__["graphshard_wait"] is collectives.wait
        code.__globals__["graphshard_wait"] = lambda p: wait(p.collective, p)
        graph.run = graph._run


def seconds_more(call: Work, without: Work, turns: int = 300) -> float:
    """Seconds by which one call takes longer: the fastest of many turns of each."""

    def turn(work: Work) -> float:
        return cpu_seconds(lambda: [work() for _ in range(_CALLS)]) / _CALLS

    pairs = [(turn(call), turn(without)) for _ in range(turns)]
    return min(a for a, _ in pairs) - min(b for _, b in pairs)


def added(model: graphshard.ShardedModule) -> float:
    """Seconds that both add to a forward and backward of `model`."""
    graphs = graphs_of(model)
    graph = graphs[0]
    graph._run = lambda args: None
    question = seconds_more(lambda: graph.run([]), lambda: graph._run([]))
    waits = [n for g in graphs for n in g.module.graph.nodes if n.target is collectives.wait]
    collective = next(n.target for n in graph.module.graph.nodes if _is_collective(n.target))
    collective.results = lambda pending: []
    pending, plain = Pending(collective, [], []), without_notes()
    wait = BoundCollective.wait
    note = seconds_more(lambda: wait(collective, pending), lambda: plain(collective, pending))
    print(
        f"  a question takes {question * 1e9:.0f} ns, a note {note * 1e9:.0f} ns; "
        f"{len(graphs)} questions and {len(waits)} notes a step"
    )
    return len(graphs) * question + len(waits) * note


def _is_collective(target: Any) -> bool:
    return isinstance(target, BoundCollective)


def measure(args: argparse.Namespace, ranks: str) -> bool:
    """All comparisons on the present process group; whether the bar is kept."""
    plain, model = compiled(args.layers), compiled(args.layers)
    works = {"without both": forward_backward(plain), "as it is": forward_backward(model)}
    for work in works.values():
        work()
    without_both(plain)
    times = compare(works, args)
    report(f"forward and backward, {args.layers} blocks, {ranks}", times)
    if dist.get_rank():
        return True
    more, step = added(model), median(times["as it is"])
    print(f"  together {more * 1e6:.1f} us, {more / step:.2%} of {step * 1e3:.2f} ms")
    return more <= BAR * step


def on_gloo(rank: int, args: argparse.Namespace, folder: str) -> bool:
    """One of two ranks; whether the bar is kept."""
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    kept = measure(args, "2 ranks of Gloo")
    gc.collect()  # nothing refers to the group any more
    dist.destroy_process_group()
    return kept


def on_fake(args: argparse.Namespace) -> bool:
    """One of 8 ranks whose collectives do nothing; whether the bar is kept."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    kept = measure(args, "fake group of 8")
    dist.destroy_process_group()
    return kept


def main() -> int:
    args = parse_args()
    torch.set_num_threads(1)
    kept = on_fake(args)
    with tempfile.TemporaryDirectory() as folder:
        other = mp.get_context("spawn").Process(target=on_gloo, args=(1, args, folder))
        other.start()
        kept &= on_gloo(0, args, folder)
        other.join()
    print(f"\nat most {BAR:.0%} of a step: {'yes' if kept else 'NO'}")
    return int(not kept)


if __name__ == "__main__":
    sys.exit(main())

"""The time of a simulation: CPU seconds of one process, after capture and planning.

    python examples/benchmarks/simulate_speed.py            # minutes, most of them for captures
    python examples/benchmarks/simulate_speed.py --layers 8 # the same models, fewer layers

"first" is the first simulation of a freshly made plan, "again" that of a copy of its program, as a
search over schedules makes many. Ends with status 1 if Llama-70B takes a second or more, the GPT of
10^12 parameters three seconds, or 16,384 ranks more than twice what 8 take.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import graphshard
from examples.benchmarks.scaling import llama
from examples.gpt import GPT, GPTConfig


def llama_70b(layers: int) -> tuple[nn.Module, tuple[str, ...], dict[str, Any]]:
    """Llama-3-70B in bf16 on one sequence of 4096 tokens, nothing of it allocated."""
    model, units, call = llama(layers, 8192)
    return model.to(torch.bfloat16), units, call


def gpt_1t(layers: int) -> tuple[nn.Module, tuple[str, ...], dict[str, Any]]:
    """A GPT 25,600 wide, of 10^12 parameters in 128 layers, on one sequence of 2048 tokens."""
    with torch.device("meta"):
        ids = torch.zeros(1, 2048, dtype=torch.long)
        model = GPT(GPTConfig(vocab=51_200, layers=layers, heads=160, width=25_600))
        model = model.to(torch.bfloat16)
    return model, ("Block",), {"idx": ids, "targets": ids}


def seconds_of(work: Callable[[], object]) -> float:
    """CPU seconds of this process, without collecting the garbage of what came before."""
    gc.collect()
    gc.freeze()  # a graph of 20,000 nodes is walked by each full collection otherwise
    start = time.process_time()
    work()
    return time.process_time() - start


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, help="of each model, instead of 80 and 128")
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        ("Llama-70B", llama_70b, args.layers or 80, 8, 1.0),
        ("Llama-70B", llama_70b, args.layers or 80, 16_384, 1.0),
        ("GPT of 1 T", gpt_1t, args.layers or 128, 1024, 3.0),
    ]
    print(
        f"{'model':12} {'layers':>6} {'ranks':>7} {'nodes':>7} {'plan s':>7} {'first s':>8} again s"
    )
    first, failed = {}, False
    for name, build, layers, ranks, most in rows:
        model, units, call = build(layers)
        start = time.process_time()
        plan = graphshard.plan(
            model, graphshard.BlockPolicy(units), world_size=ranks, example_kwargs=call
        )
        planning = time.process_time() - start
        assert plan.program is not None
        took = seconds_of(lambda plan=plan: graphshard.simulate(plan, hardware="h100-sxm"))
        copied = replace(plan, program=plan.program.copy())
        again = seconds_of(lambda plan=copied: graphshard.simulate(plan, hardware="h100-sxm"))
        nodes = len(plan.program.graph.nodes)
        print(
            f"{name:12} {layers:6} {ranks:7,} {nodes:7,} {planning:7.1f} {took:8.2f} {again:7.2f}",
            flush=True,
        )
        first[name, ranks] = took
        failed |= took >= most
    failed |= first["Llama-70B", 16_384] > 2 * first["Llama-70B", 8]
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())

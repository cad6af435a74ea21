"""Plan a 7-billion-parameter GPT for eight ranks on a laptop: no ranks, no parameter memory.

    python examples/inspect_plan.py
    python examples/inspect_plan.py --policy size:5e8 --world-size 64 --dump out

Prints the sharding plan, then what other policies would change, each captured, rewritten and
verified like the real thing.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import torch
from gpt import GPT, GPTConfig

import graphshard
from graphshard.cli.policy import parse_policy
from graphshard.inspect.dump import dump_program
from graphshard.planning.plan import ShardingPlan
from graphshard.program.storages import live_unsharded
from graphshard.progress import Progress

SEVEN_BILLION = GPTConfig(vocab=32_000, layers=32, heads=32, width=4096, tied=False)
OTHERS = (
    ("block:Block", {"strategy": "SHARD_GRAD_OP"}),
    ("block:Block", {"strategy": "NO_SHARD"}),
    ("block:Block", {"backward_prefetch": None, "forward_prefetch": 0}),
    ("block:Attention", {}),
    ("size:1e9", {}),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", default="block:Block", help="block:Class or size:N")
    parser.add_argument("--world-size", type=int, default=8)
    parser.add_argument("--layers", type=int, default=SEVEN_BILLION.layers)
    parser.add_argument("--dump", metavar="DIR", help="write the rewritten program there")
    args = parser.parse_args()

    with torch.device("meta"):
        model = GPT(replace(SEVEN_BILLION, layers=args.layers))
        tokens = torch.zeros(1, 2048, dtype=torch.int64)

    def planned(policy: str, **fields: object) -> ShardingPlan:
        return graphshard.plan(
            model,
            parse_policy(policy, **fields),
            world_size=args.world_size,
            example_inputs=(tokens, tokens),
            progress=Progress(),
        )

    plan = planned(args.policy)
    print(plan)
    if args.dump:
        dump_program(plan.program, plan, args.dump)
        print(f"\nthe rewritten program is in {args.dump}")

    print("\nWhat other policies would change:\n")
    print(f"{'GiB of parameters on a rank':52}  units  all_gathers  between steps  at the peak")
    for policy, fields in ((args.policy, {}), *OTHERS):
        name = " ".join([policy, *(f"{key}={value}" for key, value in fields.items())])
        print(f"{name:52}  {summary(planned(policy, **fields))}")


def summary(plan: ShardingPlan) -> str:
    gathers = sum(event.op == "all_gather" for event in plan.program.schedule())
    rest = sum(unit.sharded_bytes for unit in plan.units)
    peak = rest + max(live for _, live in live_unsharded(plan.program))
    return f"{len(plan.units):5}  {gathers:11}  {rest / 2**30:13.2f}  {peak / 2**30:11.2f}"


if __name__ == "__main__":
    main()

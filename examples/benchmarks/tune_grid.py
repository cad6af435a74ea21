"""AutoPolicy against grids: all policies of a grid are simulated, and AutoPolicy searches.

    python examples/benchmarks/tune_grid.py                    # three models; an hour of CPU
    python examples/benchmarks/tune_grid.py small --every 10   # one model, a tenth of the policies

A grid is units x sharding x recomputation x schedule (FSDP's order with four ways to prefetch, and
"overlap") x offload, and for each of three memory budgets recompute="budget" over 16 budgets x
units x strategies x schedules. Policies that plan the same are simulated once. The table says, for
each model and budget, the fastest policy of the grid that fits and what AutoPolicy found, with the
CPU seconds of both. Ends with status 1 where AutoPolicy is slower than the grid by more than 0.1 %.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from examples.benchmarks import harness
from examples.gpt import GPT, GPTConfig
from graphshard import AutoPolicy, BlockPolicy, MixedPrecision, SizePolicy
from graphshard.errors import GraphshardError
from graphshard.format import human_bytes
from graphshard.pipeline import passes_of
from graphshard.policy.base import Policy
from graphshard.policy.tree import ModuleTree
from graphshard.torch_private.gc_pause import collect_only_new
from graphshard.tune.blocks import Blocks
from graphshard.tune.captures import Captures
from graphshard.tune.simulator import Simulator
from graphshard.tune.space import Space
from graphshard.tune.tuning import CandidateResult

TOLERANCE = 1e-3
"""AutoPolicy may be slower than the best of a grid by this share."""


PARTS = (0.1, 0.4, 1.0)
"""Budgets, between the least and the most that a policy of the grid needs without offload."""


@dataclass(frozen=True)
class Case:
    model: nn.Module
    inputs: tuple[Tensor, ...]
    auto: AutoPolicy
    ranks: int = 8


def gpt_case(width: int, tokens: int, vocab: int, **fields: Any) -> Case:
    """A GPT of four blocks on eight A100s, in bf16, with `tokens` tokens a rank."""
    with torch.device("meta"):
        heads = max(1, width // 128)
        model = GPT(GPTConfig(vocab=vocab, layers=4, heads=heads, width=width, **fields))
        idx = torch.zeros(max(1, tokens // 1024), min(tokens, 1024), dtype=torch.int64)
    precision = MixedPrecision(param_dtype=torch.bfloat16)
    return Case(model, (idx, idx), AutoPolicy(hardware="a100-40gb", mixed_precision=precision))


CASES: dict[str, Callable[[], Case]] = {
    "small": lambda: gpt_case(1024, 2048, 256),
    "large": lambda: gpt_case(2048, 8192, 256),
    "vocabulary": lambda: gpt_case(768, 4096, 50_304, tied=False),
}


@dataclass
class Grid:
    """The policies of a grid for one case, each simulated once.

    results: seconds and reserved bytes of each policy, by its code; None if it cannot be planned.
    """

    case: Case
    results: dict[str, tuple[float, int] | None] = field(default_factory=dict)
    cpu_seconds: float = 0.0

    def __post_init__(self) -> None:
        case = self.case
        blocks = Blocks(ModuleTree(case.model))
        space = Space(case.auto, blocks, (case.ranks,), case.auto.described())
        captures = Captures(case.model, case.inputs, {}, space.hardware.program_device)
        self.simulator = Simulator(case.model, captures, space)
        self._by_plan: dict[Any, tuple[float, int] | None] = {}

    def policies(self) -> Iterator[Policy]:
        blocks = self.simulator.space.blocks
        whole = frozenset(blocks.classes)
        shardings: list[dict[str, Any]] = [
            {"strategy": "FULL_SHARD"},
            {"strategy": "FULL_SHARD", "reshard_root": True},
            {"strategy": "SHARD_GRAD_OP"},
            {"strategy": "NO_SHARD"},
        ]
        if self.case.auto.mixed_precision is None:
            shardings.append({"strategy": "SHARD_OPTIMIZER"})
        recomputes = [None, {"selective", *whole}, *({part} for part in blocks.parts), whole]
        for units, sharding, recompute in product(self.units(), shardings, recomputes):
            for issue in _ISSUES:
                yield self._policy(units, recompute=recompute, **sharding, **issue)
            if sharding == shardings[0] and not self.simulator.space.hardware.is_host:
                for offload in ("params", "activations"):
                    yield self._policy(units, recompute=recompute, offload=offload, **sharding)

    def budgeted(self, budget: int, steps: int = 16) -> Iterator[Policy]:
        """Policies that recompute within budgets from half of `budget` bytes to all of it."""
        classes = frozenset({"budget", *self.simulator.space.blocks.classes})
        for step, units, strategy, issue in product(
            range(steps), self.units()[:2], ("FULL_SHARD", "SHARD_GRAD_OP"), _SCHEDULES
        ):
            bytes_held = budget // 2 + budget * (step + 1) // (2 * steps)
            yield self._policy(
                units, strategy=strategy, recompute=classes, memory_budget=bytes_held, **issue
            )

    def units(self) -> list[Policy]:
        """Blocks, blocks and their parts, single layers, and modules by size."""
        blocks = self.simulator.space.blocks
        biggest = max(blocks.numel[fqn] for fqn in blocks.fqns)
        layer = {type(m).__name__ for m in blocks.tree.modules.values()} & {"Linear"}
        return [
            BlockPolicy(blocks.classes),
            *([BlockPolicy({*blocks.classes, *blocks.parts})] if blocks.parts else []),
            BlockPolicy(layer),
            *(SizePolicy(biggest * share // 8) for share in (1, 3, 8)),
        ]

    def _policy(self, units: Policy, **fields: Any) -> Policy:
        precision = self.case.auto.mixed_precision
        if fields.get("schedule") == "overlap":
            fields["hardware"] = self.simulator.space.hardware
        return replace(units, mixed_precision=precision, **fields)

    def simulate(self, policies: Iterable[Policy]) -> None:
        """Simulate policies that were not yet."""
        begin = time.process_time()
        with collect_only_new():
            for policy in policies:
                code = repr(policy)
                if code not in self.results:
                    self.results[code] = self._result(policy)
        self.cpu_seconds += time.process_time() - begin

    def _result(self, policy: Policy) -> tuple[float, int] | None:
        """Seconds and bytes; policies with the same units, captured program and passes share."""
        try:
            plan = self.simulator.plan_of(policy)
            captured = self.simulator.captures.of(plan)
            passes = passes_of(plan)
            units = plan.units, plan.recomputed, plan.ignored
            key = (id(captured), units, passes, policy.memory_budget)
            if key not in self._by_plan:
                self._by_plan[key] = None
                estimate = self.simulator.estimate(plan, captured, passes)
                result = CandidateResult.of(None, estimate)
                if policy.memory_budget is None or result.step_bytes <= policy.memory_budget:
                    self._by_plan[key] = result.seconds, result.peak
        except GraphshardError:
            return None
        return self._by_plan[key]

    def best(self, budget: int) -> tuple[str, tuple[float, int]] | None:
        """The fastest policy that fits in `budget` bytes, with its seconds and bytes."""
        found = [(code, result) for code, result in self.results.items() if result]
        fitting = [item for item in found if item[1][1] <= budget]
        return min(fitting, key=lambda item: item[1], default=None)

    def memory(self, policies: Iterable[Policy], parts: Sequence[float] = PARTS) -> list[int]:
        """Budgets at these parts of the way from the least to the most bytes without offload."""
        found = [self.results.get(repr(policy)) for policy in policies if not policy.offload]
        peaks = [result[1] for result in found if result]
        return [int(min(peaks) + part * (max(peaks) - min(peaks))) for part in parts]


_ISSUES: tuple[dict[str, Any], ...] = (
    {"forward_prefetch": 1},
    {"forward_prefetch": 2},
    {"backward_prefetch": "post", "forward_prefetch": 1},
    {"backward_prefetch": None, "forward_prefetch": 0},
    {"schedule": "overlap"},
)


_SCHEDULES = ({"forward_prefetch": 1}, {"forward_prefetch": 2}, {"schedule": "overlap"})


COLUMNS = (
    "case, budget | policies | best of the grid | AutoPolicy | slower by | grid, CPU s | "
    "search, CPU s | simulations"
)


def sample(policies: Iterable[Policy], every: int) -> list[Policy]:
    """One in so many policies, at random but always the same."""
    everything = list(policies)
    return random.Random(0).sample(everything, -(-len(everything) // every))


def compare(name: str, every: int, steps: int) -> Iterator[float]:
    """Simulate the grid of a case, then search within each budget; prints a row for each.

    Yields the share by which AutoPolicy is slower than the grid's best; negative if faster.
    """
    case = CASES[name]()
    grid = Grid(case)
    policies = sample(grid.policies(), every)
    grid.simulate(policies)
    for budget in grid.memory(policies):
        grid.simulate(sample(grid.budgeted(budget, steps), every))
        best = grid.best(budget)
        assert best is not None
        code, (seconds, peak) = best
        begin = time.process_time()
        auto = replace(case.auto, memory_budget=budget)
        tuning = auto.tune(case.model, example_inputs=case.inputs, world_size=case.ranks)
        cpu = time.process_time() - begin
        found = tuning.estimate
        slower = found.step_seconds / seconds - 1
        print(
            f"| {name}, {human_bytes(budget)} | {len(grid.results):,} | "
            f"{seconds * 1e3:.3f} ms, {human_bytes(peak)} | "
            f"{found.step_seconds * 1e3:.3f} ms, {human_bytes(found.reserved_bytes)} | "
            f"{slower:+.2%} | {grid.cpu_seconds:.0f} | {cpu:.0f} | {tuning.simulations:,} |",
            flush=True,
        )
        print(f"  grid: {code}\n  found: {tuning.code}", file=sys.stderr)
        yield slower


def main() -> int:
    parser = harness.parser(__doc__)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="each N-th policy")
    parser.add_argument("--steps", type=int, default=16, metavar="N", help="budgets in a grid")
    options = parser.parse_args()
    if set(options.cases) - set(CASES) or options.every < 1 or options.steps < 1:
        parser.error(f"cases are {', '.join(CASES)}; --every and --steps are 1 or more")
    print(f"| {COLUMNS} |\n{'|---' * 8}|", flush=True)
    slower = [
        each
        for name in options.cases or CASES
        for each in compare(name, options.every, options.steps)
    ]
    return int(max(slower) > TOLERANCE)


if __name__ == "__main__":
    raise SystemExit(main())

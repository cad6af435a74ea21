"""Play drawn cases for some time: `python tests/fuzz/fuzz.py --seconds 600`.

Each failure is printed with the command that plays it again; the last lines count the outcomes.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from fuzz_case import Case
from fuzz_draw import draw
from fuzz_minimise import minimise
from fuzz_pair import HUNG, Pair
from fuzz_play import EQUAL, FAILURES, MISMATCH, SKIPPED, Outcome

ON_GLOO_ONLY = ("leave",)
"""Steps left out on NCCL, where ranks do not wait for one that leaves."""

NOT_ON_CPU_THREADS = {
    "gru",
    "instance_norm",
    "lstm",
    "lstm_cell",
    "lstm_two_ways",
    "rms_norm",
    "tracked_instance_norm",
}
"""Blocks of CUDA kernels that the CUDA runtime made of CPU threads has nothing for."""


def verdict(outcomes: list[Outcome]) -> Outcome:
    """The outcome of the ranks together: the worst one; a mismatch is worse than a crash.

    A rank that hangs may wait for one that has failed, so that one alone counts.
    """
    ended = [each for each in outcomes if not each.what.startswith(HUNG)]
    if any(outcome.kind != EQUAL for outcome in ended):
        outcomes = ended
    order = {MISMATCH: 0, **{kind: 1 for kind in FAILURES if kind != MISMATCH}}
    worst = min(outcomes, key=lambda outcome: order.get(outcome.kind, 2))
    if worst.kind in FAILURES or len({outcome.kind for outcome in outcomes}) == 1:
        exact = all(outcome.exact for outcome in outcomes)
        return Outcome(worst.kind, worst.where, worst.what, exact)
    return Outcome("crash", "the end", f"ranks differ: {'; '.join(map(str, outcomes))}")


def judged(pair: Pair, case: Case) -> Outcome:
    """Play a case. A mismatch where rounding alone would lead to one is no failure."""
    outcome = verdict(pair.play(case))
    if outcome.kind != MISMATCH or case.mixed:  # mixed precision must be equal to the bit
        return outcome
    alone = verdict(pair.play(case, eager=True))
    if alone.kind == MISMATCH and step_of(alone) <= step_of(outcome):
        return Outcome(SKIPPED, outcome.where, f"rounding grows in eager training: {alone.what}")
    return outcome


def step_of(outcome: Outcome) -> int:
    """The number of the step at which a case ended."""
    return int(outcome.where.split()[1])


def fails(outcome: Outcome) -> bool:
    return outcome.kind in FAILURES


def fitted(case: Case, arguments: argparse.Namespace) -> Case:
    """The case on as many ranks, and without steps that NCCL's ranks cannot take."""
    if arguments.ranks:
        mesh = tuple(size if size == 1 else arguments.ranks for size in case.mesh)
        case = replace(case, ranks=arguments.ranks, mesh=mesh)
    if arguments.device == "cuda":
        steps = tuple(each for each in case.steps if each not in ON_GLOO_ONLY)
        case = replace(case, steps=steps)
    return case


def again(seed: int, arguments: argparse.Namespace) -> str:
    """The command that plays a seed again."""
    if arguments.device != "cuda" and not arguments.ranks:
        return f"make fuzz SEED={seed}"
    options = f"--seed {seed}" + (f" --ranks {arguments.ranks}" if arguments.ranks else "")
    return f"make {'fuzz-cuda' if arguments.device == 'cuda' else 'fuzz'} ARGS='{options}'"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0, help="stop after this time")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, help="stop after this many seeds")
    parser.add_argument("--backend", help="play the cases of this backend alone")
    parser.add_argument("--block", default="", help="play cases with blocks named so, or so begun")
    parser.add_argument("--autocast", action="store_true", help="play cases under autocast alone")
    parser.add_argument("--device", default="cpu", help="cuda: the ranks are NCCL's")
    parser.add_argument("--ranks", type=int, help="play every case on so many ranks")
    parser.add_argument("--seed", type=int, help="play the case of this seed alone")
    parser.add_argument("--case", help="play this case alone")
    parser.add_argument("--minimise", action="store_true", help="make failing cases smaller")
    parser.add_argument("--verbose", action="store_true", help="print every case")
    arguments = parser.parse_args()
    os.environ["FUZZ_DEVICE"] = arguments.device  # of the processes that Pair starts
    pair = Pair()
    if arguments.case or arguments.seed is not None:
        case = Case.parse(arguments.case) if arguments.case else draw(arguments.seed)
        case = fitted(case, arguments)
        return _one(pair, case, arguments.minimise)
    return _many(pair, arguments)


def _one(pair: Pair, case: Case, smaller: bool) -> int:
    print(case, flush=True)
    outcome = judged(pair, case)
    print(outcome, "to the bit" if outcome.exact else "")
    if fails(outcome) and smaller:
        case, outcome = minimise(case, outcome, lambda each: judged(pair, each))
        print(f"smallest:\n{case}\n{outcome}")
    pair.stop()
    return int(fails(outcome))


def _many(pair: Pair, arguments: argparse.Namespace) -> int:
    counts: Counter[str] = Counter()
    begin = time.monotonic()
    seed = arguments.first
    while time.monotonic() - begin < arguments.seconds:
        if arguments.count is not None and seed >= arguments.first + arguments.count:
            break
        case = fitted(draw(seed), arguments)
        wanted = any(name.startswith(arguments.block) for name in case.blocks)
        wanted &= bool(case.autocast) >= arguments.autocast
        wanted &= arguments.device != "cuda" or not set(case.blocks) & NOT_ON_CPU_THREADS
        if arguments.backend not in (None, case.backend) or not wanted:
            seed += 1
            continue
        started = time.monotonic()
        outcome = judged(pair, case)
        counts[outcome.kind] += 1
        counts["to the bit"] += outcome.exact
        if arguments.verbose:
            print(f"{time.monotonic() - started:5.1f} s", case, flush=True)
        if outcome.kind != EQUAL:
            print(f"{again(seed, arguments)}    {str(outcome).splitlines()[0][:400]}", flush=True)
        if fails(outcome) and arguments.minimise:
            case, outcome = minimise(case, outcome, lambda each: judged(pair, each))
            print(f"    make fuzz CASE='{case}'", flush=True)
        seed += 1
    pair.stop()
    print(f"seeds {arguments.first} to {seed - 1}:", dict(counts))
    return int(any(counts[kind] for kind in FAILURES))


if __name__ == "__main__":
    sys.exit(main())

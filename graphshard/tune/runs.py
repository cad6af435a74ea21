"""Searching whole runs: ranks, the batch of a rank, and micro-batches, for one global batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from time import monotonic
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from graphshard.errors import PolicyError
from graphshard.format import human_bytes, human_seconds
from graphshard.plain_data import is_number
from graphshard.policy.fields import is_int
from graphshard.progress import Progress, Stages
from graphshard.tune.request import PolicyRequest
from graphshard.tune.search import NotFasterError
from graphshard.tune.simulator import Captures
from graphshard.tune.tuner import tune
from graphshard.tune.tuning import Tuning

APART = 0.05
"""A run's global batch may differ from the one asked for by this share."""


@dataclass(frozen=True)
class Run:
    """A way to run a training: so many ranks, samples a rank and call, and micro-batches a step.

    tuning: the policy found for it. tokens: in a step of all ranks; None if they cannot be counted.
    price: of a device and hour, in any currency; None if it was not given.
    """

    ranks: int
    batch: int
    micro_batches: int
    tuning: Tuning
    tokens: int | None
    price: float | None

    @property
    def samples(self) -> int:
        """Samples in a step of all ranks."""
        return self.ranks * self.batch * self.micro_batches

    @property
    def step_seconds(self) -> float:
        """Predicted seconds of a step."""
        return self.tuning.step_seconds

    @property
    def rate(self) -> float:
        """Tokens a second, or samples where tokens cannot be counted."""
        return (self.samples if self.tokens is None else self.tokens) / self.step_seconds

    @property
    def price_of_million(self) -> float | None:
        """The price of a million tokens (samples, where tokens cannot be counted)."""
        if self.price is None:
            return None
        return self.price * self.ranks / 3600 / self.rate * 1e6

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        return {
            "ranks": self.ranks,
            "batch": self.batch,
            "micro_batches": self.micro_batches,
            "samples": self.samples,
            "tokens": self.tokens,
            "step_seconds": self.step_seconds,
            "per_second": self.rate,
            "per_second_and_gpu": self.rate / self.ranks,
            "price_of_million": self.price_of_million,
            "bytes": self.tuning.bytes,
            "code": self.tuning.code,
            "stopped_after": self.tuning.stopped_after,
        }


@dataclass(frozen=True)
class Runs:
    """The best run found for each number of ranks.

    runs: by ranks. without: for each number of ranks without a run, why. tried: pairs of ranks and
    batch that were searched; untried: those that there was no time for.
    """

    runs: tuple[Run, ...]
    without: Mapping[int, str]
    tried: tuple[tuple[int, int], ...]
    untried: tuple[tuple[int, int], ...] = ()

    @property
    def frontier(self) -> tuple[Run, ...]:
        """The runs that no other beats in both speed and device-hours, the cheapest first."""
        ordered = sorted(self.runs, key=lambda run: (run.ranks / run.rate, -run.rate))
        frontier: list[Run] = []
        for run in ordered:
            if not frontier or run.rate > frontier[-1].rate:
                frontier.append(run)
        return tuple(frontier)

    @property
    def cheapest(self) -> Run:
        """The run that takes the fewest device-hours for its work."""
        return self.frontier[0]

    def to_dict(self) -> dict[str, Any]:
        """As plain data, ready for JSON."""
        return {
            "runs": [run.to_dict() for run in self.runs],
            "frontier": [run.ranks for run in self.frontier],
            "cheapest": self.cheapest.ranks,
            "without": {str(ranks): why for ranks, why in self.without.items()},
            "tried": [list(pair) for pair in self.tried],
            "untried": [list(pair) for pair in self.untried],
        }

    def __str__(self) -> str:
        counted = "tokens" if self.runs[0].tokens is not None else "samples"
        head = ["ranks", "batch", "micro-batches", f"{counted}/step", "step", "memory"]
        head += [f"{counted}/s", f"{counted}/s/GPU"]
        if self.runs[0].price is not None:
            head.append(f"price/1M {counted}")
        rows = [head, *(_cells(run) for run in self.runs)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        best = {id(run) for run in self.frontier}
        lines = []
        for index, row in enumerate(rows):
            text = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            run = self.runs[index - 1] if index else None
            mark = "" if run is None or id(run) not in best else "  frontier"
            lines.append(text + ("  cheapest" if run is self.cheapest else mark))
        lines += [f"{ranks:,} ranks: {why}" for ranks, why in self.without.items()]
        if self.untried:
            pairs = ", ".join(f"{ranks} x {batch}" for ranks, batch in self.untried)
            lines.append(f"no time for (ranks x batch): {pairs}")
        lines += ["", f"the cheapest, on {self.cheapest.ranks:,} ranks:", str(self.cheapest.tuning)]
        return "\n".join(lines)


def _cells(run: Run) -> list[str]:
    counted = run.samples if run.tokens is None else run.tokens
    cells = [f"{run.ranks:,}", f"{run.batch:,}", f"{run.micro_batches:,}", f"{counted:,}"]
    cells += [human_seconds(run.step_seconds), human_bytes(run.tuning.bytes)]
    cells += [f"{run.rate:,.0f}", f"{run.rate / run.ranks:,.0f}"]
    price = run.price_of_million
    return cells if price is None else [*cells, f"{price:,.4f}"]


@dataclass(frozen=True)
class RunRequest:
    """What runs to compare.

    Args:
        ranks: the numbers of ranks.
        global_batch: samples in a step of all ranks.
        global_tokens: tokens instead; those of a sample are the second size of the first tensor of
            integers among the example inputs.
        batches: samples of one call on a rank. None: powers of two.
        price: of a device and hour, in any currency.

    Raises:
        PolicyError: a value is invalid, or both or none of the global sizes are given.
    """

    ranks: Sequence[int]
    global_batch: int | None = None
    global_tokens: int | None = None
    batches: Sequence[int] | None = None
    price: float | None = None

    def __post_init__(self) -> None:
        if (self.global_batch is None) == (self.global_tokens is None):
            raise PolicyError(
                "runs are compared for one global batch; give either global_batch, in samples, or "
                "global_tokens"
            )
        for name, numbers in (
            ("ranks", self.ranks),
            ("batches", (1,) if self.batches is None else self.batches),
        ):
            if not numbers or not all(is_int(number) and number >= 1 for number in numbers):
                raise PolicyError(f"{name} must be 1 or more; got {numbers!r}")
        for name in ("global_batch", "global_tokens"):
            value = getattr(self, name)
            if value is not None and (not is_int(value) or value < 1):
                raise PolicyError(f"{name} must be 1 or more; got {value!r}")
        price: Any = self.price
        if price is not None and not (is_number(price) and price > 0):
            raise PolicyError(f"price must be a positive number for a device and hour; got {price}")

    def samples(self, per_sample: int | None) -> float:
        """Samples in a step of all ranks, each of so many tokens.

        Raises:
            PolicyError: they are given in tokens, and tokens cannot be counted.
        """
        if self.global_batch is not None:
            return float(self.global_batch)
        assert self.global_tokens is not None
        if per_sample is None:
            raise PolicyError(
                "global_tokens needs a tensor of integers (batch, length) among the example "
                "inputs to count tokens by; give global_batch, in samples"
            )
        return self.global_tokens / per_sample

    def pairs(self, ranks: int, samples: float) -> list[tuple[int, int]]:
        """Batches and micro-batches whose product on `ranks` ranks is nearly `samples`.

        The largest batch first, since it uses the device best.
        """
        most = int(samples * (1 + APART) // ranks)
        batches = self.batches or [1 << power for power in range(most.bit_length())]
        pairs = []
        for batch in sorted(set(batches), reverse=True):
            micro_batches = max(1, round(samples / (ranks * batch)))
            if abs(ranks * batch * micro_batches - samples) <= APART * samples:
                pairs.append((batch, micro_batches))
        return pairs


def tune_runs(
    auto: PolicyRequest,
    request: RunRequest,
    model: nn.Module,
    example_inputs: Sequence[Any] | None,
    example_kwargs: Mapping[str, Any] | None,
    *,
    device: torch.device | str | None = None,
    progress: Stages | None = None,
) -> Runs:
    """Find the fastest policy for each number of ranks, batch and micro-batches of `request`.

    See `AutoPolicy.tune_runs`.
    """
    inputs = (tuple(example_inputs or ()), dict(example_kwargs or {}))
    before, per_sample = _sizes(inputs)
    device = device or auto.described().program_device
    comparison = _Comparison(auto, request, model, inputs, before, per_sample, device)
    samples = request.samples(per_sample)
    work = [
        (ranks, batch, micro_batches)
        for ranks in sorted(set(request.ranks))
        for batch, micro_batches in request.pairs(ranks, samples)
    ]
    progress = progress or Progress()
    with progress.stage("tune runs", len(work)):
        for index, (ranks, batch, micro_batches) in enumerate(work):
            comparison.search(ranks, batch, micro_batches, len(work) - index, progress)
            progress.advance()
    return comparison.result(samples)


@dataclass
class _Comparison:
    """The searches of all runs, one after the other.

    inputs: the example inputs, of `before` samples, each of `per_sample` tokens. best: by ranks.
    failed: by ranks, why nothing was found for a batch.
    """

    auto: PolicyRequest
    request: RunRequest
    model: nn.Module
    inputs: tuple[tuple[Any, ...], dict[str, Any]]
    before: int
    per_sample: int | None
    device: torch.device | str
    best: dict[int, Run] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    tried: list[tuple[int, int]] = field(default_factory=list)
    untried: list[tuple[int, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.captures: dict[int, Captures] = {}
        self.begin = monotonic()

    def search(
        self, ranks: int, batch: int, micro_batches: int, left: int, progress: Stages
    ) -> None:
        """Search one run, in its share of the time that `left` searches have."""
        auto = replace(self.auto, micro_batches=micro_batches)
        if auto.seconds is not None:
            seconds = auto.seconds - (monotonic() - self.begin)
            if seconds <= 0 and self.best:
                self.untried.append((ranks, batch))
                return
            auto = replace(auto, seconds=max(seconds, 1e-3) / left)
        self.tried.append((ranks, batch))
        samples = ranks * batch * micro_batches
        best = self.best.get(ranks)
        limit = None if best is None else samples * best.step_seconds / best.samples
        captures = self._captures(batch)
        try:
            tuning = tune(
                auto,
                self.model,
                captures.args,
                captures.kwargs,
                world_size=ranks,
                device=self.device,
                progress=progress,
                captures=captures,
                faster_than=limit,
            )
        except NotFasterError:
            return
        except PolicyError as error:
            self.failed.setdefault(ranks, f"batch {batch}: {str(error).splitlines()[0]}")
            return
        tokens = None if self.per_sample is None else samples * self.per_sample
        self.best[ranks] = Run(ranks, batch, micro_batches, tuning, tokens, self.request.price)

    def _captures(self, batch: int) -> Captures:
        if batch not in self.captures:
            args, kwargs = _resized(self.inputs, self.before, batch)
            self.captures[batch] = Captures(self.model, args, kwargs, self.device)
        return self.captures[batch]

    def result(self, samples: float) -> Runs:
        no_batch = f"no batch makes a step of {samples:,.0f} samples, give or take {APART:.0%}"
        timed_out = {ranks for ranks, _ in self.untried}
        without = {
            ranks: self.failed.get(ranks, no_batch)
            for ranks in sorted(set(self.request.ranks))
            if ranks not in self.best and ranks not in timed_out
        }
        if not self.best:
            why = "; ".join(f"{ranks:,} ranks: {text}" for ranks, text in without.items())
            raise PolicyError(f"no run was found; {why}. Give other ranks, batches or more time")
        return Runs(tuple(self.best.values()), without, tuple(self.tried), tuple(self.untried))


def _tensors(inputs: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor) and leaf.dim())


def _sizes(inputs: Any) -> tuple[int, int | None]:
    """The batch of the example inputs, and the tokens of a sample; None if they have none."""
    tensors = list(_tensors(inputs))
    if not tensors:
        raise PolicyError("runs of several batches need tensors with a batch among example inputs")
    ids = [t for t in tensors if t.dim() >= 2 and not t.is_floating_point() and not t.is_complex()]
    first = next(chain(ids, tensors))
    return int(first.shape[0]), int(ids[0].shape[1]) if ids else None


def _resized(inputs: Any, before: int, batch: int) -> Any:
    """`inputs` with tensors on meta of `batch` samples for all that have `before`."""

    def resize(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.dim() or leaf.shape[0] != before:
            return leaf
        return torch.empty(
            (batch, *leaf.shape[1:]),
            dtype=leaf.dtype,
            device="meta",
            requires_grad=leaf.requires_grad,
        )

    return tree_map(resize, inputs)

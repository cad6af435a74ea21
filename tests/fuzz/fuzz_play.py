"""Playing a case on one rank: both sides take each step, and all values are compared."""

from __future__ import annotations

import traceback
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from full_tensors import full
from fuzz_case import Case
from fuzz_model import DEVICE, random_states
from fuzz_protocol import STEPS, Loop
from fuzz_sides import (
    Eager,
    Fsdp2,
    NothingToTrain,
    Sharded,
    Side,
    perturbed,
    reference,
    zero_gradients,
)
from torch import Tensor

from graphshard.errors import (
    CollectiveError,
    FingerprintError,
    GraphshardError,
    PassError,
    VerifyError,
)

EQUAL, REFUSED, MISMATCH, CRASH, SKIPPED = "equal", "refused", "mismatch", "crash", "skipped"

FAILURES = (MISMATCH, CRASH)


@dataclass(frozen=True)
class Outcome:
    """How a case ended on a rank.

    where: the step, by number and name, or "build". what: the first difference or the error.
    exact: every value that was compared is bit-equal.
    """

    kind: str
    where: str = ""
    what: str = ""
    exact: bool = False

    def __str__(self) -> str:
        return f"{self.kind} at {self.where}: {self.what}" if self.where else self.kind


class Difference(Exception):  # noqa: N818  # no error of the program's
    """Two values that must be equal are not."""


class Tolerance:
    """How far values may be apart, as a share of the largest value nearby.

    Float64 in eager mode leaves room for sums in another order, and no more. In mixed precision
    `fully_shard` runs the same kernels, so values are equal to the bit.
    """

    def __init__(self, case: Case) -> None:
        self.share = 1e-10
        if case.dtype == "float32":
            self.share = 1e-4 if case.backend == "inductor" else 1e-5
        if "two_dtypes" in case.blocks or "cast" in case.blocks:
            self.share = max(self.share, 1e-4 if case.backend == "inductor" else 1e-5)
        if case.autocast:  # compiled code rounds to 16 bits less often
            self.share = 0.05
        if case.mixed:
            self.share = 0.0
        self.zeros = zero_gradients(case) if case.autocast else {}
        self.exact = True

    def check_gradient(self, name: str, mine: Any, theirs: Any, scale: float) -> None:
        """Compare the gradient of a parameter.

        What may be rounding alone may be apart by as much as rounding of the largest gradient.
        """
        zero = self.zeros.get(name)
        if zero is not None and isinstance(mine, Tensor) and isinstance(theirs, Tensor):
            gap = _largest(mine[zero] - theirs[zero])
            if not gap <= self.share * scale:
                raise Difference(f"grads of {name}: differ by {gap:.1e} where they are rounding")
            mine, theirs = (grad.masked_fill(zero, 0.0) for grad in (mine, theirs))
        self.check(f"grads of {name}", mine, theirs, scale)

    def check(self, name: str, mine: Any, theirs: Any, scale: float = 0.0) -> None:
        """Compare two tensors, or two plain values.

        Args:
            name: of the value, for the error.
            mine: the sharded module's.
            theirs: the reference's.
            scale: of values that this one was computed with.
        """
        if not (isinstance(mine, Tensor) and isinstance(theirs, Tensor)):
            if type(mine) is not type(theirs) or mine != theirs:
                raise Difference(f"{name}: {_said(mine)} for {_said(theirs)}")
            return
        if mine.shape != theirs.shape or mine.dtype != theirs.dtype:
            raise Difference(f"{name}: {_said(mine)} for {_said(theirs)}")
        if torch.equal(mine, theirs):
            return
        self.exact = False
        finite = theirs.isfinite()
        if not torch.equal(mine.isfinite(), finite):
            raise Difference(f"{name}: {int(finite.sum())} finite values in the reference alone")
        mine, theirs = mine[finite], theirs[finite]  # a training may diverge, on both sides alike
        if not (mine.is_floating_point() or mine.is_complex()):
            raise Difference(f"{name}: {mine.flatten()[:8]} for {theirs.flatten()[:8]}")
        bound = self.share * max(_largest(theirs), 0.1 * scale)
        gap = _largest(mine - theirs)
        if not gap <= bound:
            raise Difference(f"{name}: differs by {gap:.1e}, largest {_largest(theirs):.1e}")


def play(case: Case, *, eager: bool = False) -> Outcome:
    """Run a case on this rank.

    Args:
        case: what to run.
        eager: compare the reference with itself from parameters that differ in their last places,
            a hundred times as strictly. A mismatch says that the case magnifies rounding so much
            that the sharded module may be apart from the reference, too.
    """
    where = "build"
    tolerance = Tolerance(case)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if eager:
                tolerance.share /= 2 if case.autocast else 100
                mine = Loop(case, perturbed(Eager(case), case))
                theirs = Loop(case, Eager(case))
            else:
                sharded = Sharded(case)
                mine, theirs = Loop(case, sharded), Loop(case, reference(case, sharded))
            for number, name in enumerate(case.steps):
                where = f"step {number} ({name})"
                _step(mine, theirs, number, tolerance)
    except Difference as difference:
        return Outcome(MISMATCH, where, str(difference))
    except (PassError, VerifyError) as error:
        known = "memory_budget" in str(error)
        return Outcome(REFUSED if known else CRASH, where, _text(error, not known))
    except (FingerprintError, CollectiveError) as error:  # the ranks make the same calls
        return Outcome(CRASH, where, _text(error, True))
    except GraphshardError as error:
        return Outcome(REFUSED, where, _text(error))
    except (ReferenceFails, NothingToTrain) as error:
        return Outcome(SKIPPED, where, str(error))
    except Exception as error:
        return Outcome(CRASH, where, _text(error, True))
    return Outcome(EQUAL, exact=tolerance.exact)


class ReferenceFails(Exception):  # noqa: N818  # no error of the program's
    """The reference cannot run the step, so there is nothing to compare with."""


def _step(mine: Loop, theirs: Loop, number: int, tolerance: Tolerance) -> None:
    name = mine.case.steps[number]
    theirs.begin(number)
    try:
        STEPS[name].run(theirs)
        if DEVICE.type == "cuda":  # which tells errors late
            torch.cuda.synchronize()
    except Exception as error:
        raise ReferenceFails(f"{type(theirs.side).__name__}: {_text(error)}") from error
    drawn = random_states()
    mine.begin(number)
    STEPS[name].run(mine)
    _same_seen(mine, theirs, tolerance)
    if not all(map(torch.equal, random_states(), drawn)):
        raise Difference("the state of the generator of random numbers")
    _same_state(mine.side, theirs.side, tolerance)


def _same_seen(mine: Loop, theirs: Loop, tolerance: Tolerance) -> None:
    if len(mine.seen) != len(theirs.seen):
        raise Difference(f"{len(mine.seen)} values noted for {len(theirs.seen)}")
    for (label, (tree, ours)), (_, (other, expected)) in zip(mine.seen, theirs.seen, strict=True):
        if tree != other:
            raise Difference(f"{label}: structure {tree} for {other}")
        scale = max((_largest(t) for t in expected if isinstance(t, Tensor)), default=0.0)
        paths = [torch.utils._pytree.keystr(p) for p in _paths(tree)]
        for path, a, b in zip(paths, ours, expected, strict=True):
            if label == "grads":
                tolerance.check_gradient(path[2:-2], a, b, scale)
            else:
                tolerance.check(f"{label}{path}", a, b, scale)


def _same_state(mine: Side, theirs: Side, tolerance: Tolerance) -> None:
    for label, ours, expected in (
        ("parameter", mine.params(), theirs.params()),
        ("buffer", dict(mine.module.named_buffers()), dict(theirs.module.named_buffers())),
    ):
        if list(ours) != list(expected):
            raise Difference(f"names of {label}s: {list(ours)} for {list(expected)}")
        for name, value in expected.items():
            theirs_now, mine_now = full(value), full(ours[name])
            if label == "buffer" and isinstance(theirs, Fsdp2):
                theirs_now = theirs_now.to(mine_now.dtype)
                if mine_now.dtype.is_floating_point:
                    mine_now = mine_now.to(value.dtype).to(mine_now.dtype)
            tolerance.check(f"{label} {name}", mine_now, theirs_now, 1.0)


def _paths(tree: Any) -> list[Any]:
    leaves = torch.utils._pytree.tree_unflatten([0] * tree.num_leaves, tree)
    return [path for path, _ in torch.utils._pytree.tree_flatten_with_path(leaves)[0]]


def _largest(tensor: Tensor) -> float:
    if not tensor.numel() or tensor.dtype == torch.bool:
        return 0.0
    return float(tensor.abs().max())


def _said(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return repr(value)


def _text(error: BaseException, whole: bool = False) -> str:
    text = f"{type(error).__name__}: {error}"
    return text + "\n" + traceback.format_exc() if whole else text

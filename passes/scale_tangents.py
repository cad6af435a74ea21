"""scale_tangents: average by sums, as backward starts from tangents divided by the ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, fx

from graphshard.errors import PassError, PolicyError
from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import Collective
from graphshard.program.edit import insert_node
from graphshard.program.gradient_scales import GradientScales, NotScaledError
from graphshard.program.pass_protocol import Pass, Stage
from graphshard.program.program import BACKWARD, SCALE, Program
from graphshard.program.sizes import is_contiguous

aten = torch.ops.aten

_INSTEAD = 'use reduce_op="avg"'


@dataclass(frozen=True)
class ScaleTangents(Pass):
    """Let every reduce add up, and divide the tangents by the ranks instead.

    Backward is linear in the tangents, the gradients of the outputs, so each rank's gradients come
    out as their share of the average. A division by a power of two rounds nothing, so on as many
    ranks the bits are those of averages, if no number is too small for its dtype. Gradients that no
    reduce adds up, of inputs and of ignored parameters, are multiplied back.
    """

    establishes: ClassVar[Stage] = Stage.SUMMED

    def apply(self, program: Program, plan: ShardingPlan) -> None:
        """See `Pass.apply`.

        Raises:
            PolicyError: backward is not linear in the tangents, or the division would round
                gradients that averages do not, or let them underflow.
            PassError: the tangents are scaled already.
        """
        ranks = plan.summed_ranks
        reduces = [node for node in program.nodes(BACKWARD) if node.target in ops.REDUCES]
        if ranks == 1 or not reduces:
            return
        if any(SCALE in node.meta for node in program.nodes()):
            raise PassError(f"pass {self.name}: tangents are scaled already; run the pass once")
        for reduce in reduces:
            arguments = Collective.of(reduce)
            if arguments.group != ops.REPLICATE or not plan.replica_all_reduce:
                reduce.kwargs = replace(arguments, reduce_op=ops.SUM).kwargs
        exact = ranks & (ranks - 1) == 0
        for entry in program.outputs:
            if entry.tangent is not None:
                _require_exact(entry.tangent, ranks, exact)
                _divide(program, entry.tangent, ranks)
        scales = _scales(program, plan)
        _require_range(scales.of, ranks)
        self._multiply_back(program, scales, ranks, exact)
        program.notes += (f"reduces add up gradients of tangents that are divided by {ranks}",)

    def _multiply_back(
        self, program: Program, scales: GradientScales, ranks: int, exact: bool
    ) -> None:
        """Give the gradients that are returned without a reduce their captured values."""
        results = program.results()
        returned: dict[fx.Node, fx.Node] = {}
        for entries, grads in (
            (program.params, results.grads),
            (program.inputs, results.input_grads),
        ):
            for index, (entry, grad) in enumerate(zip(entries, grads, strict=True)):
                if grad is None or scales.factor(grad) in (None, 1):
                    continue
                name = getattr(entry, "fqn", None) or getattr(entry, "path", "")
                if ops.is_reduced(grad) or scales.factor(grad) != Fraction(1, ranks):
                    raise PolicyError(
                        f'reduce_op="sum": the gradient of {name!r} comes out multiplied by '
                        f"{scales.factor(grad)}, as it does not depend on the gradients of the "
                        f"outputs alone; {_INSTEAD}"
                    )
                if not exact:
                    raise PolicyError(
                        f'reduce_op="sum" divides gradients by {ranks} ranks, and the gradient of '
                        f"{name!r}, which no rank reduces, would not be itself when multiplied "
                        f"back: {ranks} is no power of two; {_INSTEAD}"
                    )
                if grad not in returned:
                    returned[grad] = _insert(program, grad, Fraction(ranks), grad.next, "unscaled")
                grads[index] = returned[grad]
        program.set_results(results)


def _scales(program: Program, plan: ShardingPlan) -> GradientScales:
    try:
        return GradientScales.find(program, plan)
    except NotScaledError as error:
        node = error.node
        raise PolicyError(
            'reduce_op="sum" needs a backward that is linear in the gradients of the outputs, and '
            f"at %{node.name} {error.text}; {_INSTEAD}"
        ) from None


def _divide(program: Program, tangent: fx.Node, ranks: int) -> None:
    """Let the readers of `tangent` read its quotient; where it is returned it stays as it is."""
    readers = sorted(user for user in tangent.users if user.op != "output")
    if not readers:
        return
    scaled = _insert(program, tangent, Fraction(1, ranks), readers[0], "scaled")
    for reader in readers:
        reader.replace_input_with(tangent, scaled)


def _insert(
    program: Program, source: fx.Node, factor: Fraction, before: fx.Node, word: str
) -> fx.Node:
    """Insert `source` times `factor` before a node, as compute of its reader, or of its maker."""
    near = before if factor < 1 else source
    target, number = aten.mul.Tensor, factor.numerator
    if factor < 1:
        target, number = aten.div.Tensor, factor.denominator
    val: Tensor = source.meta["val"]
    if not is_contiguous(val):
        with val.fake_mode:  # type: ignore[attr-defined]
            val = target(val, number)
    with program.graph.inserting_before(before):
        node = insert_node(
            program,
            target,
            (source, number),
            {},
            name=f"{source.name}_{word}",
            unit=near.meta.get("unit", ""),
            phase=BACKWARD,
            val=val,
        )
    node.meta.update({"fqn": near.meta.get("fqn", ""), SCALE: factor})
    return node


def _require_exact(tangent: fx.Node, ranks: int, exact: bool) -> None:
    """Check that the quotients of a tangent are rounded little.

    Raises:
        PolicyError: its dtype has fewer bits than float32, and `ranks` is no power of two.
    """
    dtype = tangent.meta["val"].dtype
    if not exact and torch.finfo(dtype).eps > torch.finfo(torch.float32).eps:
        raise PolicyError(
            f'reduce_op="sum" would round the gradient of an output in {dtype} as it divides it by '
            f"{ranks} ranks, which are no power of two, and every gradient with it; {_INSTEAD}"
        )


def _require_range(grads: Iterable[fx.Node], ranks: int) -> None:
    """Check that no gradient has a dtype with the few exponents of float16.

    Raises:
        PolicyError: one has.
    """
    for node in grads:
        val: Any = node.meta.get("val")
        if isinstance(val, Tensor) and torch.finfo(val.dtype).smallest_normal > 1e-30:
            raise PolicyError(
                f'reduce_op="sum" divides gradients by {ranks} ranks before backward, where those '
                f"in {val.dtype} underflow, as %{node.name} may; reduces of float16 add up in any "
                f"case, divided before and after; {_INSTEAD}"
            )

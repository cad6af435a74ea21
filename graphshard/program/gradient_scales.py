"""The factor by which each gradient of a program differs from the captured one.

A program whose reduces add up starts backward from tangents divided by the number of ranks. Where
backward is linear in the tangents, each value is multiplied by the factor of its operands, up to
the reduce that multiplies it by the ranks. One walk finds the factors, and every node that is not
known to be linear.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import torch
from torch import fx

from graphshard.planning.plan import ShardingPlan
from graphshard.program import ops
from graphshard.program.collective import Collective, OneTensor, operands_of
from graphshard.program.program import SCALE, Program

aten = torch.ops.aten


def _packets(names: str) -> frozenset[Any]:
    return frozenset(getattr(aten, name) for name in names.split())


_OF_FIRST = _packets(
    "_conj _fft_c2c _fft_c2r _fft_r2c _reshape_alias _to_copy _unsafe_view alias as_strided "
    "clone conj_physical constant_pad_nd cumsum detach diagonal div expand flip gather imag "
    "index index_select mean neg permute pixel_shuffle pixel_unshuffle real repeat reshape roll "
    "select slice split split_with_sizes squeeze sum t trace transpose tril triu unbind unfold "
    "unsqueeze view view_as_complex view_as_real"
) | {torch.ops.prims.convert_element_type}
"""Linear in the first operand, with others fixed."""

_NOT_LINEAR = frozenset({aten.view.dtype, aten.div.Tensor_mode, aten.div.Scalar_mode})

_PRODUCTS = _packets("_grouped_mm _trilinear bmm dot ger mm mul mv outer")
"""Linear in each of the first operands, two or three."""

_SUMS = _packets(
    "add as_strided_scatter cat diagonal_scatter index_add index_copy index_put masked_fill "
    "masked_scatter rsub scatter scatter_add select_scatter slice_scatter stack sub where"
)
"""Each element of the result is one of an operand, or a sum of some."""

_SUMS_OF_PRODUCTS = _packets("addbmm addcmul addmm addmv addr baddbmm")
"""The first operand plus a product of the second and third."""

_ONLY_SHAPE = _packets(
    "empty_like full_like new_empty new_empty_strided new_full new_ones new_zeros ones_like "
    "sym_numel sym_size sym_storage_offset sym_stride zeros_like"
)
"""Use the shape of an operand alone."""

_ZEROS = _packets("new_zeros zeros zeros_like")

_FILLED = _packets("full full_like new_full scalar_tensor")

_SUMMANDS = ("other", "self", "value")
"""The names of arguments of `_SUMS` that may be numbers; other numbers are sizes or factors."""


class NotScaledError(Exception):
    """A node whose value is not its captured value times one factor: the node, and the reason."""

    def __init__(self, node: fx.Node, text: str) -> None:
        super().__init__(text)
        self.node, self.text = node, text


def scaled_by_mark(node: fx.Node) -> fx.Node | None:
    """The gradient that `node` multiplies by the number it is marked with; None if it does not."""
    factor = node.meta.get(SCALE)
    if not isinstance(factor, Fraction) or len(node.args) != 2 or node.kwargs:
        return None
    source, number = node.args
    factors: dict[Any, Fraction] = {aten.div.Tensor: 1 / factor, aten.mul.Tensor: factor}
    if type(number) is not int or factors.get(node.target) != number:
        return None
    return source if isinstance(source, fx.Node) else None


@dataclass
class GradientScales:
    """The factors of a program's values.

    Attributes:
        of: by value that depends on a tangent, its factor.
        zero: the values that are zero, and so have any factor.
    """

    plan: ShardingPlan
    of: dict[fx.Node, Fraction] = field(default_factory=dict)
    zero: set[fx.Node] = field(default_factory=set)

    @classmethod
    def find(cls, program: Program, plan: ShardingPlan) -> GradientScales:
        """Walk over `program`.

        Raises:
            NotScaledError: a node is not known to be linear in the tangents, adds values of
                different factors, or is marked as a scale and is none.
        """
        scales = cls(plan)
        for entry in program.outputs:
            if entry.tangent is not None:
                scales.of[entry.tangent] = Fraction(1)
        for node in program.nodes():
            scales._visit(node)
        return scales

    def factor(self, grad: fx.Node) -> Fraction | None:
        """The factor of a gradient; None if it is zero. One that needs no tangent has factor 1."""
        return None if grad in self.zero else self.of.get(grad, Fraction(1))

    def _visit(self, node: fx.Node) -> None:
        if SCALE in node.meta:
            self._scale(node)
        elif ops.is_unpack(node):
            self._unpack(node)
        elif ops.is_transfer(node) or node.target is ops.accumulate_grad:
            self._carry(node)
        elif node.target is ops.all_gather or node.target is ops.reshard:
            scaled = [value for value in node.all_input_nodes if value in self.of]
            if scaled:
                raise NotScaledError(node, f"it takes %{scaled[0].name}, a gradient")
        elif ops.is_compute(node):
            self._compute(node)

    def _scale(self, node: fx.Node) -> None:
        factor, source = node.meta[SCALE], scaled_by_mark(node)
        if source is None:
            raise NotScaledError(node, f"it is marked to multiply by {factor}, and does not")
        if source not in self.of and source not in self.zero:
            raise NotScaledError(node, f"it scales %{source.name}, which is no gradient")
        self._set(node, source, factor)

    def _set(self, node: fx.Node, source: fx.Node, times: Fraction | int = 1) -> None:
        """Give `node` the factor of `source`, `times` a number."""
        if source in self.zero:
            self.zero.add(node)
        elif source in self.of:
            self.of[node] = self.of[source] * times

    def _unpack(self, node: fx.Node) -> None:
        collective = ops.collective_of(node)
        if collective.target not in ops.REDUCES:
            return
        index: Any = node.args[1]
        operand = operands_of(collective)[index]
        arguments = Collective.of(collective)
        if arguments.reduce_op == ops.SUM:
            # A gradient without a tangent counts too: a sum multiplies it all the same.
            self.of.setdefault(operand, Fraction(1))
        self._set(node, operand, ranks_summed(arguments, self.plan))

    def _carry(self, node: fx.Node) -> None:
        """Follow a transfer, or a gradient that is accumulated or that one is added to."""
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        if node.target not in (ops.accumulate_grad, ops.add_accumulated):
            self._set(node, source)
            return
        kept = scale_of_accumulated(self.plan, str(OneTensor.of(node).accumulated_as))
        factor = self.factor(source)
        if factor not in (None, kept):
            raise NotScaledError(
                node, f"%{source.name} is scaled by {factor}, and accumulated gradients by {kept}"
            )
        self.of[node] = kept

    def _compute(self, node: fx.Node) -> None:
        packet = getattr(node.target, "overloadpacket", None)
        if packet in _ZEROS or (packet in _FILLED and _fill(node) == 0):
            self.zero.add(node)
            return
        inputs = [value for value in node.all_input_nodes if value in self.of or value in self.zero]
        scaled = [value for value in inputs if value in self.of]
        if not inputs or packet in _ONLY_SHAPE or not _has_tensors(node.meta.get("val")):
            return
        terms = self._terms(node, packet)
        if terms and self.zero.issuperset(terms):
            self.zero.add(node)
        elif scaled:
            self.of[node] = self._common(node, terms, scaled[0])

    def _common(self, node: fx.Node, terms: list[fx.Node] | None, grad: fx.Node) -> Fraction:
        """The factor that all `terms` of `node` have, of which `grad` is one.

        Raises:
            NotScaledError: there is none.
        """
        if not terms or ops.writes(node) or not _is_floating(node.meta["val"]):
            raise NotScaledError(
                node,
                f"{node.target} in {node.meta.get('fqn') or 'the root'} is not known to be linear "
                f"in the gradient %{grad.name}",
            )
        factors: dict[Fraction, fx.Node] = {}
        for term in terms:
            factor = self.factor(term)
            if factor is not None:
                factors.setdefault(factor, term)
        if len(factors) > 1:
            (one, first), (other, second) = list(factors.items())[:2]
            raise NotScaledError(
                node,
                f"it adds %{first.name}, scaled by {one}, and %{second.name}, scaled by {other}",
            )
        return next(iter(factors))

    def _terms(self, node: fx.Node, packet: Any) -> list[fx.Node] | None:
        """The operands whose factor the result has, if all have one; None for no known operator.

        A product of a gradient and another value has the gradient alone, and one with zero the
        zero. Other operands than these may be no gradients.
        """
        args: Any = node.args
        if packet is aten.copy:
            return [args[1]]
        if packet in _PRODUCTS:
            return self._product(args[:3])
        if packet in _SUMS_OF_PRODUCTS:
            product = self._product(args[1:3])
            return [args[0], *product] if product else None
        terms: list[fx.Node]
        if node.target is operator.getitem:
            terms = [args[0]]
        elif packet in _OF_FIRST and node.target not in _NOT_LINEAR:
            if packet is aten.constant_pad_nd and any(args[2:]):
                return None
            terms = [args[0]]
        elif packet in _SUMS:
            terms = _summands(node)
        elif str(packet).startswith("aten.") and "backward" in str(packet):
            named = _named(node)
            terms = [v for name, v in named if name.startswith("grad") and isinstance(v, fx.Node)]
        else:
            return None
        others = set(node.all_input_nodes).difference(terms)
        return None if any(value in self.of for value in others) else terms

    def _product(self, operands: Any) -> list[fx.Node]:
        """The operand of a product that is zero, or else the one gradient; none for two of them."""
        zeros = [value for value in operands if value in self.zero]
        grads = [value for value in operands if value in self.of]
        return zeros[:1] or (grads if len(grads) == 1 else [])


def ranks_summed(reduce: Collective, plan: ShardingPlan) -> int:
    """The ranks over which a reduce adds up; 1 if it averages."""
    if reduce.reduce_op == ops.AVG:
        return 1
    sizes = {ops.SHARD: plan.shard_size, ops.REPLICATE: plan.replicas, ops.ALL: plan.world_size}
    return sizes[reduce.group]


def scale_of_accumulated(plan: ShardingPlan, form: str) -> Fraction:
    """The factor of accumulated gradients, full ones ("gradient") or shards ("shard")."""
    if form == "shard" and plan.summed_ranks > 1:
        return Fraction(plan.shard_size, plan.summed_ranks)
    return Fraction(1, plan.summed_ranks)


def _named(node: fx.Node) -> Iterator[tuple[str, Any]]:
    """The arguments of an operator by name, those in lists one by one."""
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = zip((a.name for a in arguments), node.args, strict=False)
    for name, value in (*given, *node.kwargs.items()):
        for each in value if isinstance(value, (tuple, list)) else (value,):
            yield name, each


def _summands(node: fx.Node) -> list[fx.Node]:
    """The floating-point operands of an operator of `_SUMS`; none if it adds a number but 0."""
    terms: list[fx.Node] = []
    for name, value in _named(node):
        if isinstance(value, fx.Node):
            if _is_floating(value.meta.get("val")):
                terms.append(value)
        elif name in _SUMMANDS and value:
            return []
    return terms


def _fill(node: fx.Node) -> Any:
    """The number that an operator of `_FILLED` fills its result with."""
    return next((v for name, v in _named(node) if name in ("fill_value", "s")), None)


def _has_tensors(val: Any) -> bool:
    if isinstance(val, (tuple, list)):
        return any(map(_has_tensors, val))
    return isinstance(val, torch.Tensor)


def _is_floating(val: Any) -> bool:
    if isinstance(val, (tuple, list)):
        return all(_is_floating(each) for each in val if each is not None)
    return isinstance(val, torch.Tensor) and (val.is_floating_point() or val.is_complex())

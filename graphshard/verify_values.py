"""Rule on meaning: a rewritten program computes what the captured one computes.

Every value gets a number, equal for two values exactly when they are found to be the same: the same
operator on the same arguments, down to the ends of the program. This is global value numbering
(Alpern, Wegman and Zadeck, "Detecting Equality of Variables in Programs", 1988) by hash-consing, in
one walk. What passes may do follows from a few equations:

    a shard or kept part, and what a gather of it returns      the parameter
    clone(x), x on another device                              x
    a cast of x, by whichever operator                         cast(x, dtype); x, if that is its own
    dropout(x, p) in training                                  x * mask * scale (see `Recompute`)
    what a reduce returns                                      its operand, reduced (once more)
    a gradient to which a kept one is added (see `Accumulate`) that gradient; 0, if there was none
    what is kept                                               the operand of the reduce left out
    columns of an embedding's gradient                         see `graphshard.column_values`

One difference is let through, and only where the plan asks for it: one cast before the reduce of a
gradient and one after, as it is rounded elsewhere then (see `graphshard.passes.precision`); to
which dtypes, `graphshard.verify_precision` checks.

So a view, a cast or a whole region that is computed again has the number of the original. What
draws random numbers or writes into its operands cannot be computed again, left out, or moved past
another such: these are the captured program's, in its order.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import fx

from graphshard import ops
from graphshard.column_values import REDUCED as _REDUCED
from graphshard.column_values import of_columns
from graphshard.passes.accumulate import Accumulate
from graphshard.passes.precision import Precision
from graphshard.program import Program
from graphshard.remat import dropped
from graphshard.sizes import SYMBOLIC
from graphshard.value_memo import Known, is_plain
from graphshard.views import cast_dtype

if TYPE_CHECKING:
    from graphshard.verify_facts import Facts

_aten = torch.ops.aten
_WITH_KEPT = "with kept"

Key = tuple[Any, ...]
Number = Any  # an int for a node's value, a tuple for a constant


@dataclass
class Values:
    """The number of every value of a program.

    `keys` and `by_key` grow with each program numbered from the same capture, so that its numbers
    can be compared with the captured ones. So does `known`: what passes left alone is not put
    together again.
    """

    keys: list[Key] = field(default_factory=list)
    by_key: dict[Key, int] = field(default_factory=dict)
    of_node: dict[fx.Node, int] = field(default_factory=dict)
    name: dict[int, str] = field(default_factory=dict)  # of the first node of each number
    effects: list[fx.Node] = field(default_factory=list)
    kept: dict[str, tuple[str, int]] = field(default_factory=dict)  # by parameter: what of it
    ends: dict[str, list[Number]] = field(default_factory=dict)  # by list of the output node
    known: dict[fx.Node, Known] = field(default_factory=dict)

    @classmethod
    def of(cls, program: Program, captured: Values | None = None) -> Values:
        """Number the values of `program`, which keeps the rules on its graph and collectives."""
        values = cls() if captured is None else cls._like(captured)
        values._enter_tables(program)
        for node in program.nodes():
            known = values.known.get(node)
            if known is not None and known.plain and known.is_of(node, values.of_node):
                values._take(node, known)
            elif ops.op_name(node) is None or ops.is_transfer(node) or node.target is ops.reshard:
                values._visit(node)
            elif node.target is ops.keep:
                number = values.of_node[node.args[0]]  # type: ignore[index]
                values.kept[str(node.kwargs["param"])] = (str(node.kwargs["of"]), number)
        for name, ends in vars(program.results()).items():
            values.ends[name] = [values.number(end) for end in ends]
        return values

    def _enter_tables(self, program: Program) -> None:
        for entry in program.params:
            self._enter(entry.node, ("param", entry.fqn))
        for buffer in program.buffers:
            self._enter(buffer.node, ("buffer", buffer.fqn))
        for given in program.inputs:
            self._enter(given.node, ("input", given.path))
        for index, output in enumerate(program.outputs):
            if output.tangent is not None:
                self._enter(output.tangent, ("tangent", index))

    @classmethod
    def _like(cls, captured: Values) -> Values:
        return cls(captured.keys, captured.by_key, known=captured.known)

    def number(self, value: Any) -> Number:
        """The number of an argument: a node's, or a constant with its type, as 1 is not 1.0."""
        if isinstance(value, fx.Node):
            return self.of_node[value]
        if isinstance(value, (list, tuple)):
            return tuple(map(self.number, value))
        if isinstance(value, dict):
            return tuple((self.number(key), self.number(value[key])) for key in sorted(value))
        if isinstance(value, slice):
            return tuple(map(self.number, (value.start, value.stop, value.step)))
        if isinstance(value, (float, *SYMBOLIC)):
            return (type(value), repr(value))  # tells 0.0 from -0.0, and asks a symbol nothing
        return (type(value), value)

    def reductions(self, number: Number) -> list[Number]:
        """The numbers of what `number` is once reduced, and reduced again: as far as it is."""
        found = []
        while (number := self.by_key.get((_REDUCED, number))) is not None:
            found.append(number)
        return found

    def explains(
        self, param: str, now: Number, was: Number, *, settled: bool, recast: bool
    ) -> bool:
        """Whether the gradient `was` may have become `now`: reduced, kept, or with a kept one.

        `settled`: zeros were only made to add a kept gradient to. `recast`: it may be cast to be
        reduced otherwise than it was cast when captured.
        """
        if param in self.kept:
            of, kept = self.kept[param]
            plain = self._without_kept(kept)
            if recast:
                operand, reduces = self._behind_reduces(plain)
                return reduces == (of == "shard") and self._is_recast(operand, was)
            operand = self._before_reduce(was)
            return plain == (operand if of == "gradient" else self.by_key.get((_REDUCED, operand)))
        plain = self._without_kept(now)
        if plain == was or plain in self.reductions(was):
            return True
        if recast:
            operand, reduces = self._behind_reduces(self._uncast(plain))
            if reduces and self._is_recast(operand, was):
                return True
        made = was == self.number(None) and self._is_zeros(self._before_reduce(plain))
        return made and (plain != now or not settled)

    def _behind_reduces(self, number: Number) -> tuple[Number, int]:
        """What was reduced to `number`, with nothing in between, and how often."""
        reduces = 0
        while isinstance(number, int) and self.keys[number][0] == _REDUCED:
            number = self.keys[number][1]
            reduces += 1
        return number, reduces

    def _is_recast(self, operand: Number, was: Number) -> bool:
        """Whether what is reduced is `was`, or what that was cast from, or one cast of either.

        In which dtypes, `check_precision` says.
        """
        return bool({operand, self._uncast(operand)} & {was, self._uncast(was)})

    def _uncast(self, number: Number) -> Number:
        """What `number` was cast from, or itself."""
        if isinstance(number, int) and self.keys[number][0] is ops.cast:
            return self.keys[number][1][0]
        return number

    def _before_reduce(self, number: Number) -> Number:
        """The operand of the first reduce behind a gradient; it, if nothing is reduced."""
        found, current = number, number
        while isinstance(current, int) and self.keys[current][0] in (_REDUCED, ops.cast):
            kind, inner = self.keys[current][:2]
            current = inner[0] if kind is ops.cast else inner
            if kind == _REDUCED:
                found = current
        return found

    def _without_kept(self, number: Number) -> Number:
        if not isinstance(number, int):
            return number
        key = self.keys[number]
        if key[0] == _WITH_KEPT:
            return self._without_kept(key[1])
        if key[0] == _REDUCED:
            return self.intern((_REDUCED, self._without_kept(key[1])))
        if key[0] is ops.cast:
            source, dtype = key[1]
            return self.intern((ops.cast, (self._without_kept(source), dtype), ()))
        return number

    def _is_zeros(self, number: Number) -> bool:
        while isinstance(number, int) and self.keys[number][0] is ops.cast:
            number = self.keys[number][1][0]
        return isinstance(number, int) and self.keys[number][0] is _aten.zeros.default

    def _visit(self, node: fx.Node) -> None:
        if is_plain(node.target):
            self._compute(node)
        elif (number := of_columns(self, node)) is not None:
            self._set(node, number)
        elif ops.is_unpack(node):
            self._unpack(node)
        elif node.target is ops.add_kept:
            self._enter(node, (_WITH_KEPT, self.number(node.args[0])))
        elif node.target in (*ops.COPIES, ops.arrive, ops.reshard):
            self._set(node, self.number(node.args[0]))
        elif (dtype := cast_dtype(node)) is not None:
            source: fx.Node = node.args[0]  # type: ignore[assignment]
            if source.meta["val"].dtype == dtype:
                self._set(node, self.number(source))
            else:
                self._enter(node, (ops.cast, (self.number(source), self.number(dtype)), ()))
        elif node.target is _aten.clone.default and len(node.args) == 1 and not node.kwargs:
            self._set(node, self.number(node.args[0]))
        elif (dropout := dropped(node)) is not None:
            value, p, _ = dropout.args
            scale = 0.0 if p == 1 else 1.0 / (1.0 - p)  # type: ignore[operator]
            mask = self.intern((operator.getitem, (self.of_node[dropout], self.number(1)), ()))
            args = (self.number(value), mask, self.number(scale))
            self._enter(node, (_aten.native_dropout_backward.default, args, ()))
        else:
            self._compute(node)

    def _compute(self, node: fx.Node) -> None:
        """Number `node` by its operator and arguments."""
        of_node = self.of_node
        known = self.known.get(node)
        if known is None or not known.is_of(node, of_node):
            known = self.known[node] = self._put_together(node)
        self._take(node, known)

    def _take(self, node: fx.Node, known: Known) -> None:
        if known.effect:
            self.effects.append(node)
        self._set(node, known.number)

    def _put_together(self, node: fx.Node) -> Known:
        key: Key = (node.target, self.number(node.args), self.number(node.kwargs))
        effect = ops.has_effect(node)
        if effect:
            key = (*key, node)
        inputs = node.all_input_nodes
        numbers = [self.of_node[value] for value in inputs]
        number = self.intern(key)
        plain = is_plain(node.target)
        return Known(node.target, node.args, node.kwargs, inputs, numbers, number, effect, plain)

    def _unpack(self, node: fx.Node) -> None:
        collective = ops.collective_of(node)
        operands: Sequence[fx.Node] = collective.args[0]  # type: ignore[assignment]
        operand = self.of_node[operands[node.args[1]]]  # type: ignore[index]
        if collective.target in ops.REDUCES:
            self._enter(node, (_REDUCED, operand))
        else:
            self._set(node, operand)

    def _enter(self, node: fx.Node, key: Key) -> None:
        self._set(node, self.intern(key))

    def intern(self, key: Key) -> int:
        """The number of the value that `key` stands for."""
        number = self.by_key.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        return number

    def _set(self, node: fx.Node, number: int) -> None:
        self.of_node[node] = number
        self.name.setdefault(number, node.name)

    def text(self, number: Number) -> str:
        """A value as an error shows it: "%name", "reduced %name", a constant, a list."""
        if isinstance(number, int):
            kind, *operands = self.keys[number]
            if kind == _REDUCED:
                return f"reduced {self.text(operands[0])}"
            if kind == _WITH_KEPT:
                return f"{self.text(operands[0])} with what was kept"
            return f"%{self.name[number]}"
        if len(number) == 2 and isinstance(number[0], type):
            return str(number[1])
        return f"[{', '.join(map(self.text, number))}]"


def check_values(facts: Facts) -> None:
    """The step returns the values it returned when captured; gradients may be reduced since."""
    captured = None if facts.reference is None else facts.reference.values
    if captured is None:
        return
    values = Values.of(facts.program, captured)
    _check_effects(facts, captured, values)
    program, results = facts.program, facts.program.results()
    settled = Accumulate in facts.done
    for kind, ends, names in (
        ("output", results.outputs, [entry.path for entry in program.outputs]),
        ("mutation", results.mutations, [entry.name for entry in program.mutations]),
        ("grad", results.grads, [entry.fqn for entry in program.params]),
        ("input_grad", results.input_grads, [entry.path for entry in program.inputs]),
    ):
        for name, end, now, was in zip(
            names, ends, values.ends[f"{kind}s"], captured.ends[f"{kind}s"], strict=True
        ):
            recast = kind == "grad" and _may_be_recast(facts, name)
            if now != was and (
                kind != "grad"
                or not values.explains(name, now, was, settled=settled, recast=recast)
            ):
                _blame(facts, captured, values, f"{kind} {name!r}", end, (now, was))


def _may_be_recast(facts: Facts, param: str) -> bool:
    """Whether the plan lets a gradient differ by the rounding of another dtype to reduce it in."""
    return Precision in facts.done and facts.plan.layouts[param].precision is not None


def _check_effects(facts: Facts, captured: Values, values: Values) -> None:
    for now, was in zip_longest(values.effects, captured.effects):
        if now is not was:
            found = "nothing" if now is None else f"%{now.name}"
            wanted = "nothing" if was is None else f"%{was.name}"
            facts.fail(
                "same values",
                now or facts.program.output_node,
                f"{found} stands where {wanted} did when captured among what draws random numbers "
                "or writes into its operands, which a pass may not add, drop or reorder",
            )


def _blame(
    facts: Facts, captured: Values, values: Values, what: str, end: Any, numbers: tuple[Any, Any]
) -> NoReturn:
    """Name the first node behind `end` that computes what the captured program does not."""
    known = set(captured.of_node.values())
    for node in _behind(end, facts):
        if not ops.is_compute(node):
            continue
        number = values.of_node[node]
        if number in known or values.name[number] != node.name:
            continue
        facts.fail(
            "same values",
            node,
            f"{what} is not what was captured, as this node computes something new: "
            f"{_difference(node, captured, values)}",
        )
    now, was = numbers
    node = end if isinstance(end, fx.Node) else facts.program.output_node
    facts.fail(
        "same values",
        node,
        f"{what} is {values.text(now)}, and was {captured.text(was)} when captured",
    )


def _behind(end: Any, facts: Facts) -> list[fx.Node]:
    """Every node that `end` is computed from, and itself, in order."""
    found = {end} if isinstance(end, fx.Node) else set()
    stack = list(found)
    while stack:
        for value in stack.pop().all_input_nodes:
            if value not in found:
                found.add(value)
                stack.append(value)
    return sorted(found, key=facts.place.__getitem__)


def _difference(node: fx.Node, captured: Values, values: Values) -> str:
    was = captured.of_node.get(node)
    if was is None:
        return "the captured program has no such node"
    old, new = captured.keys[was], values.keys[values.of_node[node]]
    if old[0] is not new[0]:
        return "it is another operator"
    for index, (before, now) in enumerate(zip_longest(old[1], new[1], fillvalue=())):
        if before != now:
            return f"its operand {index} is {values.text(now)}, and was {captured.text(before)}"
    return "its keyword arguments differ"

"""Value numbers, by which a rewritten program is compared with the captured one.

Two values have one number if they are the same operator on arguments with the same numbers, down to
the inputs of the program. This is global value numbering (Alpern, Wegman and Zadeck, "Detecting
Equality of Variables in Programs", 1988) by hash-consing, in one walk. A few equations say which
rewrites keep a number:

    a shard or kept part, and what a gather of it returns      the parameter
    clone(x), x on another device                              x
    a cast of x, by whichever operator                         cast(x, dtype); x, if that is its own
    dropout(x, p) in training                                  x * mask * scale
    a result of a reduce                                       its operand, reduced (once more)
    a gradient to which a kept one is added                    that gradient; 0, if there was none
    a kept gradient                                            the operand of the reduce left out
    columns of an embedding's gradient                         see `of_columns`

One difference is allowed, and only where the plan asks for it: a gradient may be cast before its
reduce and once more behind it, so that it is rounded at other places. `check_precision` checks the
dtypes.

So a view, a cast or a whole region that is computed again has the number of the original. Nodes
that draw random numbers or write into their operands are the captured ones in the captured order:
no pass may repeat, drop or reorder them.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import fx

from graphshard.program import ops
from graphshard.program.aliases import cast_dtype
from graphshard.program.collective import OneTensor
from graphshard.program.program import Program
from graphshard.recompute.regions import dropout_of
from graphshard.torch_private.compat import SYMBOLIC

_aten = torch.ops.aten


REDUCED = "reduced"


COLUMNS = "columns"
"""The first item in keys of values that no operator of the program computes."""


def of_columns(values: Values, node: fx.Node) -> Number | None:
    """The number of some columns of a gradient, or of a whole one made of columns."""
    if node.target is _aten.embedding_dense_backward.default:
        return _of_embedding(values, node)
    if node.target is ops.cast and (part := _columns(values, values.number(node.args[0]))):
        dtype = values.number(OneTensor.of(node).dtype)
        return values.intern((COLUMNS, values.intern((ops.cast, (part[0], dtype), ())), *part[1:]))
    if node.target is _aten.add.Tensor:
        return _of_sum(values, node)
    pieces = ops.joined(node)
    if not pieces or node.args[1] != node.meta["val"].dim() - 1:
        return None
    wholes: set[Number] = set()
    end = 0
    for piece in pieces:
        columns = _columns(values, values.keys[values.of_node[piece]][1])
        if columns is None or columns[1] != end:
            return None
        wholes.add(columns[0])
        end = columns[2]
    return values.intern((REDUCED, wholes.pop())) if len(wholes) == 1 else None


def _of_embedding(values: Values, node: fx.Node) -> Number | None:
    """The number of an embedding's gradient that is computed from columns of its operand."""
    columns: Any = node.args[0]
    if columns.target is not _aten.slice.Tensor or len(columns.args) != 4:
        return None
    source, dim, start, stop = columns.args
    if dim != columns.meta["val"].dim() - 1:
        return None
    args = (values.number(source), *map(values.number, node.args[1:]))
    whole = values.intern((node.target, args, values.number(node.kwargs)))
    values.name.setdefault(whole, node.name)
    return values.intern((COLUMNS, whole, start, stop))


def _of_sum(values: Values, node: fx.Node) -> Number | None:
    """The number of a sum of the same columns of two values, one of them an embedding's."""
    parts = [_columns(values, values.number(value)) for value in node.args]
    if len(parts) != 2 or node.kwargs or parts.count(None) != 1:
        return None
    known = parts[0] or parts[1]
    other: Any = node.args[parts.index(None)]
    assert known is not None
    wanted = [other.meta["val"].dim() - 1, *known[1:]] if isinstance(other, fx.Node) else []
    if not wanted or other.target is not _aten.slice.Tensor or list(other.args[1:]) != wanted:
        return None
    whole = values.number(other.args[0])
    args = (known[0], whole) if parts[0] else (whole, known[0])
    total = values.intern((node.target, args, ()))
    return values.intern((COLUMNS, total, *known[1:]))


def _columns(values: Values, number: Number) -> tuple[Number, int, int] | None:
    """The value that `number` is columns of, the first column, and the one behind the last."""
    key = values.keys[number] if isinstance(number, int) else ()
    return (key[1], key[2], key[3]) if key[:1] == (COLUMNS,) else None


# Operators that one of the equations is about.
_WITH_EQUATIONS = frozenset(
    {
        _aten._to_copy.default,
        _aten.add.Tensor,
        _aten.cat.default,
        _aten.clone.default,
        _aten.embedding_dense_backward.default,
        torch.ops.prims.convert_element_type.default,
    }
)


_Operator = type(_aten.add.Tensor)


@cache
def is_plain(target: Any) -> bool:
    """Whether no equation but that of equal operators on equal arguments holds for `target`."""
    return isinstance(target, _Operator) and target not in _WITH_EQUATIONS


@dataclass(frozen=True, slots=True)
class Known:
    """The arguments that a node was numbered from: nodes get new arguments, never changed ones.

    Attributes:
        plain: no equation is about the operator, so equal arguments give an equal number.
    """

    target: Any
    args: Any
    kwargs: Any
    inputs: list[fx.Node]
    numbers: list[Any]
    number: int
    effect: bool
    plain: bool

    def is_of(self, node: fx.Node, numbers: Mapping[fx.Node, Any]) -> bool:
        """Whether `node` has the same operator and arguments, and these the same `numbers`."""
        same = node.args is self.args and node.kwargs is self.kwargs and node.target is self.target
        return same and [numbers[value] for value in self.inputs] == self.numbers


_WITH_KEPT = "with kept"


Key = tuple[Any, ...]


Number = Any  # an int for a node's value, a tuple for a constant


@dataclass
class Values:
    """The number of every value of a program.

    `keys`, `by_key` and `known` are shared by all programs numbered from the same capture. So their
    numbers can be compared with the captured ones, and nodes that passes left alone are not
    numbered again.
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
                kept = OneTensor.of(node)
                values.kept[str(kept.param)] = (str(kept.kept_as), number)
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
        """The numbers of the value `number` reduced once, twice and so on, if there are any."""
        reduced = []
        while (number := self.by_key.get((REDUCED, number))) is not None:
            reduced.append(number)
        return reduced

    def explains(
        self, param: str, now: Number, was: Number, *, settled: bool, recast: bool
    ) -> bool:
        """Whether the gradient `was` may have become `now`: reduced, kept, or with a kept one.

        Args:
            param: FQN of its parameter.
            now: its number in the rewritten program.
            was: its number in the captured program.
            settled: zeros may stand in for a missing gradient only to add a kept one to them.
            recast: the plan lets it be cast for its reduce.
        """
        if param in self.kept:
            of, kept = self.kept[param]
            plain = self._without_kept(kept)
            if recast:
                operand, reduces = self._behind_reduces(plain)
                return reduces == (of == "shard") and self._is_recast(operand, was)
            operand = self._before_reduce(was)
            return plain == (operand if of == "gradient" else self.by_key.get((REDUCED, operand)))
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
        """The operand of the consecutive reduces that end in `number`, and how many they are."""
        reduces = 0
        while isinstance(number, int) and self.keys[number][0] == REDUCED:
            number = self.keys[number][1]
            reduces += 1
        return number, reduces

    def _is_recast(self, operand: Number, was: Number) -> bool:
        """Whether `operand` and `was` are equal but for one cast of each; see `check_precision`."""
        return bool({operand, self._uncast(operand)} & {was, self._uncast(was)})

    def _uncast(self, number: Number) -> Number:
        """The operand of the cast that `number` is; `number` itself, if it is none."""
        if isinstance(number, int) and self.keys[number][0] is ops.cast:
            return self.keys[number][1][0]
        return number

    def _before_reduce(self, number: Number) -> Number:
        """The operand of the first reduce behind a gradient; `number`, if nothing is reduced."""
        operand, current = number, number
        while isinstance(current, int) and self.keys[current][0] in (REDUCED, ops.cast):
            kind, inner = self.keys[current][:2]
            current = inner[0] if kind is ops.cast else inner
            if kind == REDUCED:
                operand = current
        return operand

    def _without_kept(self, number: Number) -> Number:
        if not isinstance(number, int):
            return number
        key = self.keys[number]
        if key[0] == _WITH_KEPT:
            return self._without_kept(key[1])
        if key[0] == REDUCED:
            return self.intern((REDUCED, self._without_kept(key[1])))
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
        elif (dropout := dropout_of(node)) is not None:
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
            self._enter(node, (REDUCED, operand))
        else:
            self._set(node, operand)

    def _enter(self, node: fx.Node, key: Key) -> None:
        self._set(node, self.intern(key))

    def intern(self, key: Key) -> int:
        """The number of the value with the key `key`, a new one if it has none yet."""
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
            if kind == REDUCED:
                return f"reduced {self.text(operands[0])}"
            if kind == _WITH_KEPT:
                return f"{self.text(operands[0])} with what was kept"
            return f"%{self.name[number]}"
        if len(number) == 2 and isinstance(number[0], type):
            return str(number[1])
        return f"[{', '.join(map(self.text, number))}]"

"""Value numbers, by which a rewritten program is compared with the captured one.

Two values have the same number if the same operator computes them from arguments with the same
numbers, down to the inputs of the program (global value numbering; see README.md). These equations
say which rewrites preserve a number:

    a shard, its resharded part, and a gather of either        the parameter
    clone(x), x on another device                              x
    a cast of x, by any operator                               cast(x, dtype), or x if no change
    dropout(x, p) in training                                  x * mask * scale
    its mask, and other random numbers            by their operator, arguments and random state
    a random state                                by what was drawn since the step began
    a result of a reduce                                       reduced(operand)
    a gradient plus an accumulated one                         that gradient, or 0 if it was missing
    an accumulated gradient                                    the operand of the dropped reduce

One difference is allowed where the plan asks for it: a gradient may be cast before its reduce and
behind it, and so be rounded at other places. `check_precision` checks the dtypes.

So a view, a cast or a region that is computed again has the number of the original. Nodes that draw
random numbers or write into their operands must be the captured ones in the captured order, but for
draws that backward repeats: these must have the random state that the repeated ones had.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.program import ops
from graphshard.program.aliases import COPYING_OPS, cast_dtype
from graphshard.program.collective import OneTensor, device_of, generator_of
from graphshard.program.program import Program, argument_key, signature
from graphshard.recompute.regions import is_dropout, mask_needs_no_operand
from graphshard.torch_private.compat import SYMBOLIC

_aten = torch.ops.aten


REDUCED = "reduced"

"""The first item of the key of a result of a reduce, which no operator of the program computes."""


_Operator = type(_aten.add.Tensor)


@cache
def is_plain(target: Any) -> bool:
    """Whether `target` is an ordinary operator, which appears in no equation."""
    return isinstance(target, _Operator) and target not in COPYING_OPS


@dataclass(frozen=True, slots=True)
class Numbered:
    """A node's number with the operator and arguments that it follows from, for reuse.

    An edit replaces a node's arguments and never changes them in place, so comparing identities is
    enough. `numbers` are those of `inputs`, the nodes among the arguments; `effect` says whether
    the node draws random numbers or writes; `plain`, whether the operator is ordinary: equal
    arguments then give an equal number.
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
        """Whether `node` has this operator and these arguments, and they have the same numbers."""
        same = node.args is self.args and node.kwargs is self.kwargs and node.target is self.target
        return same and [numbers[value] for value in self.inputs] == self.numbers


_PLUS_ACCUMULATED = "plus accumulated"


_STATE = "random state"


_DRAWN = "drawn"


Key = tuple[Any, ...]


Number = Any  # an int for a node's value, a tuple for a constant


@dataclass
class Values:
    """The number of every value of a program.

    All programs numbered from the same capture share `keys`, `by_key` and `memo`. So their numbers
    can be compared, and unchanged nodes are not numbered again.

    Attributes:
        keys: the key of each number: operator and numbers of arguments.
        name: for each number, the name of its first node.
        effects: nodes that draw random numbers or write, in order, but for draws done again.
        states: the present random state, by type of device.
        drawn: by the name of a draw, the number of what it draws.
        repeated: nodes that draw random numbers again.
        replaying: the types of devices whose generator is in a state of forward.
        accumulated: by parameter, "gradient" or "shard", and the number that is accumulated.
        ends: the numbers of the values in each list of the output node.
        memo: the numbers of ordinary operators, by node.
    """

    keys: list[Key] = field(default_factory=list)
    by_key: dict[Key, int] = field(default_factory=dict)
    of_node: dict[fx.Node, int] = field(default_factory=dict)
    name: dict[int, str] = field(default_factory=dict)
    effects: list[fx.Node] = field(default_factory=list)
    states: dict[str, Number] = field(default_factory=dict)
    drawn: dict[str, Number] = field(default_factory=dict)
    repeated: list[fx.Node] = field(default_factory=list)
    replaying: set[str] = field(default_factory=set)
    accumulated: dict[str, tuple[str, int]] = field(default_factory=dict)
    ends: dict[str, list[Number]] = field(default_factory=dict)
    memo: dict[fx.Node, Numbered] = field(default_factory=dict)
    constants: tuple[Constant, ...] = ()

    @classmethod
    def of(cls, program: Program, captured: Values | None = None) -> Values:
        """Number the values of `program`, which must keep the rules on its graph and collectives.

        The numbers of the `captured` program are reused.
        """
        values = cls() if captured is None else cls._like(captured)
        values._enter_tables(program)
        for node in program.nodes():
            numbered = values.memo.get(node)
            if numbered is not None and numbered.plain and numbered.is_of(node, values.of_node):
                values._reuse(node, numbered)
            elif ops.is_random(node):
                values._draw(node, generator_of(program, node))
            elif ops.op_name(node) is None or ops.is_transfer(node) or node.target is ops.reshard:
                values._visit(node)
            elif node.target in ops.RANDOM_STATES:
                device = device_of(node)
                values._set(node, values._state(device))
                if node.target is ops.set_random_state:
                    values.states[device] = values.number(node.args[0])
                    values.replaying ^= {device}
            elif node.target is ops.accumulate_grad:
                number = values.of_node[node.args[0]]  # type: ignore[index]
                arguments = OneTensor.of(node)
                values.accumulated[str(arguments.param)] = (str(arguments.accumulated_as), number)
        for name, ends in vars(program.results()).items():
            values.ends[name] = [values.number(end) for end in ends]
        return values

    def _enter_tables(self, program: Program) -> None:
        self.constants = constants_of(program)
        for entry in program.params:
            self._enter(entry.node, ("param", entry.fqn))
        for buffer in program.buffers:
            self._enter(buffer.node, ("buffer", buffer.fqn))
        for source in program.inputs:
            self._enter(source.node, ("input", source.path))
        for index, output in enumerate(program.outputs):
            if output.tangent is not None:
                self._enter(output.tangent, ("tangent", index))

    @classmethod
    def _like(cls, captured: Values) -> Values:
        return cls(captured.keys, captured.by_key, memo=captured.memo)

    def number(self, value: Any) -> Number:
        """The number of a node, or a constant argument with its type, as 1 and 1.0 differ."""
        if isinstance(value, fx.Node):
            return self.of_node[value]
        return argument_key(value, self._number_of_leaf)

    def _number_of_leaf(self, value: Any) -> Number:
        if isinstance(value, fx.Node):
            return self.of_node[value]
        # Comparing symbolic numbers would add guards; their texts do not.
        return type(value), repr(value) if isinstance(value, SYMBOLIC) else value

    def reductions(self, number: Number) -> list[Number]:
        """The numbers of the value `number` reduced once, twice and so on, as far as they exist."""
        reduced = []
        while (number := self.by_key.get((REDUCED, number))) is not None:
            reduced.append(number)
        return reduced

    def explains(
        self, param: str, now: Number, was: Number, *, zeros_need_sum: bool, recast: bool
    ) -> bool:
        """Whether passes may rewrite the gradient `was` to `now`: reduced, accumulated, or cast.

        `zeros_need_sum`: zeros may replace a missing gradient only where an accumulated one is
        added to them. `recast`: the plan lets it be cast for its reduce.
        """
        if param in self.accumulated:
            form, number = self.accumulated[param]
            plain = self._without_accumulated(param, number)
            if recast:
                operand, reduces = self._behind_reduces(plain)
                return reduces == (form == "shard") and self._is_recast(operand, was)
            operand = self._before_reduce(was)
            return plain == (operand if form == "gradient" else self.by_key.get((REDUCED, operand)))
        plain = self._without_accumulated(param, now)
        if plain == was or plain in self.reductions(was):
            return True
        if recast:
            operand, reduces = self._behind_reduces(self._uncast(plain))
            if reduces and self._is_recast(operand, was):
                return True
        replaces_missing = was == self.number(None) and self._is_zeros(self._before_reduce(plain))
        return replaces_missing and (plain != now or not zeros_need_sum)

    def _behind_reduces(self, number: Number) -> tuple[Number, int]:
        """The operand of the consecutive reduces that end in `number`, and their count."""
        reduces = 0
        while isinstance(number, int) and self.keys[number][0] == REDUCED:
            number = self.keys[number][1]
            reduces += 1
        return number, reduces

    def _is_recast(self, operand: Number, was: Number) -> bool:
        """Whether `operand` and `was` are equal up to one cast of each; see `check_precision`."""
        return bool({operand, self._uncast(operand)} & {was, self._uncast(was)})

    def _uncast(self, number: Number) -> Number:
        """The operand of a cast, or `number` itself if it is no cast."""
        if isinstance(number, int) and self.keys[number][0] is ops.cast:
            return self.keys[number][1][0]
        return number

    def _before_reduce(self, number: Number) -> Number:
        """The operand of the first reduce of a gradient, or `number` itself if there is none."""
        operand, current = number, number
        while isinstance(current, int) and self.keys[current][0] in (REDUCED, ops.cast):
            kind, inner = self.keys[current][:2]
            current = inner[0] if kind is ops.cast else inner
            if kind == REDUCED:
                operand = current
        return operand

    def _without_accumulated(self, param: str, number: Number) -> Number:
        """`number` before the accumulated gradient of `param` was added."""
        if not isinstance(number, int):
            return number
        key = self.keys[number]
        if key[0] == _PLUS_ACCUMULATED and key[2] == param:
            return self._without_accumulated(param, key[1])
        if key[0] == REDUCED:
            return self.intern((REDUCED, self._without_accumulated(param, key[1])))
        if key[0] is ops.cast:
            source, dtype = key[1]
            return self.intern((ops.cast, (self._without_accumulated(param, source), dtype), ()))
        return number

    def _is_zeros(self, number: Number) -> bool:
        while isinstance(number, int) and self.keys[number][0] is ops.cast:
            number = self.keys[number][1][0]
        return isinstance(number, int) and self.keys[number][0] is _aten.zeros.default

    def _visit(self, node: fx.Node) -> None:
        if is_plain(node.target):
            self._compute(node)
        elif ops.is_unpack(node):
            self._unpack(node)
        elif node.target is ops.add_accumulated:
            key = _PLUS_ACCUMULATED, self.number(node.args[0]), OneTensor.of(node).param
            self._enter(node, key)
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
        elif node.target is operator.getitem and is_dropout(node.all_input_nodes[0]):
            self._of_dropout(node, node.all_input_nodes[0])
        else:
            self._compute(node)

    def _of_dropout(self, node: fx.Node, dropout: fx.Node) -> None:
        """Number the output or the mask of a dropout."""
        mask = self.drawn[dropout.name]
        if node.args[1] == 1:
            self._set(node, mask)
            return
        value, p, _ = dropout.args
        scale = 0.0 if p == 1 else 1.0 / (1.0 - p)  # type: ignore[operator]
        args = (self.number(value), mask, self.number(scale))
        self._enter(node, (_aten.native_dropout_backward.default, args, ()))

    def _draw(self, node: fx.Node, device: str) -> None:
        """Number an operator by its arguments and the state of the generator it draws from."""
        state = self._state(device)
        key = (node.target, self.number(node.args), self.number(node.kwargs), state)
        number = drawn = self.intern(key)
        if is_dropout(node) and mask_needs_no_operand(node):
            value: Any = node.args[0]
            val = value.meta["val"]
            like = (signature(val), tuple(map(str, val.stride())), str(val.device))
            drawn = self.intern((_DRAWN, node.target, like, self.number(node.args[1]), state))
        self.drawn[node.name] = drawn
        self.states[device] = self.intern((_STATE, drawn))
        (self.repeated if device in self.replaying else self.effects).append(node)
        self._set(node, number)
        self.name.setdefault(drawn, node.name)

    def _state(self, device: str) -> Number:
        """The present state of the generator of the device type."""
        if device not in self.states:
            self.states[device] = self.intern((_STATE, device))
        return self.states[device]

    def _compute(self, node: fx.Node) -> None:
        """Number `node` by its operator and arguments, from the memo if possible."""
        of_node = self.of_node
        numbered = self.memo.get(node)
        if numbered is None or not numbered.is_of(node, of_node):
            numbered = self.memo[node] = self._numbered(node)
        self._reuse(node, numbered)

    def _reuse(self, node: fx.Node, numbered: Numbered) -> None:
        if numbered.effect:
            self.effects.append(node)
        self._set(node, numbered.number)

    def _numbered(self, node: fx.Node) -> Numbered:
        key: Key = (node.target, self.number(node.args), self.number(node.kwargs))
        effect = ops.has_effect(node)
        if effect:
            key = (*key, node)
        inputs = node.all_input_nodes
        numbers = [self.of_node[value] for value in inputs]
        number = self.intern(key)
        plain = is_plain(node.target)
        return Numbered(node.target, node.args, node.kwargs, inputs, numbers, number, effect, plain)

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
        """The number of the value with this key, a new one for a new key."""
        number = self.by_key.setdefault(key, len(self.keys))
        if number == len(self.keys):
            self.keys.append(key)
        return number

    def _set(self, node: fx.Node, number: int) -> None:
        self.of_node[node] = number
        self.name.setdefault(number, node.name)

    def text(self, number: Number) -> str:
        """A value as errors show it: "%name", "reduced %name", a constant, a list."""
        if isinstance(number, int):
            kind, *operands = self.keys[number]
            if kind == REDUCED:
                return f"reduced {self.text(operands[0])}"
            if kind == _PLUS_ACCUMULATED:
                return f"{self.text(operands[0])} plus the accumulated gradient of {operands[1]!r}"
            return f"%{self.name[number]}"
        if len(number) == 2 and isinstance(number[0], type):
            return str(number[1])
        return f"[{', '.join(map(self.text, number))}]"


# -- captured constants ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Constant:
    """A constant as it was when the values of a program were numbered.

    `value` is the tensor itself; it may be large, so nothing is copied. `version` is torch's count
    of the writes into it; None for an inference tensor, which has none.
    """

    fqn: str
    value: Tensor | None
    version: int | None


def constants_of(program: Program) -> tuple[Constant, ...]:
    """The constants of `program`, in the order of its buffers."""
    constants = []
    for entry in program.buffers:
        if entry.constant:
            counted = entry.value is not None and not entry.value.is_inference()
            version = entry.value._version if counted else None  # type: ignore[union-attr]
            constants.append(Constant(entry.fqn, entry.value, version))
    return tuple(constants)

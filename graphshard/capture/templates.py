"""Copies of a traced block's nodes, in the places of the calls that repeat it.

A template is what the joint graph has between the borders of a kind's first call, in forward and in
backward. It is taken only if the last call's nodes are the same, one by one, and if its values are
read inside of it alone.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import getitem
from typing import Any

import torch
from torch import Tensor, fx

from graphshard.capture.alike import Form
from graphshard.capture.annotation import CALLS, FQN, KEEP, LINE, REGION
from graphshard.capture.borders import (
    BORDER,
    ENTER,
    ENTER_BACKWARD,
    EXIT,
    EXIT_BACKWARD,
    LEFT_OUT,
    Kind,
    RepetitionError,
)
from graphshard.capture.repetition import Repetition
from graphshard.program.sizes import is_size
from graphshard.torch_private.compat import size_expression

Notes = Mapping[str, Any]


class _Half:
    """What is between two borders: the nodes in order, what comes in and what goes out.

    Symbolic sizes belong to no block: each is computed once in a program, wherever it is read off.
    """

    def __init__(self, enter: fx.Node, leave: fx.Node) -> None:
        self.enter, self.leave = enter, leave
        self.inputs = {node.args[1]: node for node in enter.users}
        self.nodes: list[fx.Node] = []
        node = enter.next
        while node is not leave:
            if node not in enter.users and not is_size(node):
                self.nodes.append(node)
            node = node.next

    @property
    def results(self) -> list[Any]:
        return list(self.leave.args[0])  # type: ignore[arg-type]


class Template:
    """One call between its borders; `backward` is None if no gradient comes in."""

    def __init__(
        self, joint: fx.GraphModule, borders: Mapping[tuple[int, int], fx.Node], call: int
    ) -> None:
        self._joint = joint
        try:
            self.forward = _Half(borders[call, ENTER], borders[call, EXIT])
            self.backward = None
            if (call, EXIT_BACKWARD) in borders:
                self.backward = _Half(borders[call, EXIT_BACKWARD], borders[call, ENTER_BACKWARD])
        except KeyError:
            raise RepetitionError("a border is missing") from None
        self.halves = [half for half in (self.forward, self.backward) if half is not None]

    def require_closed(self) -> None:
        """Raise if its nodes read other values than the inputs, or others read theirs."""
        known: set[fx.Node] = set()
        calls = notes_of(self.forward.enter)[CALLS]
        for half in self.halves:
            known.update(half.inputs.values())
            for node in half.nodes:
                known.add(node)
                inside = notes_of(node).get(CALLS, calls)[: len(calls)] == calls
                if not inside or not known.issuperset(_tensors(node.all_input_nodes)):
                    raise RepetitionError(f"{node} in a block reads a value from outside")
            if not known.issuperset(_tensors(half.leave.all_input_nodes)):
                raise RepetitionError("a block returns a value from outside")
        ends = {half.leave for half in self.halves}
        if any(not (known | ends).issuperset(_tensors(node.users)) for node in known):
            raise RepetitionError("a value of a block is read outside")

    def require_same(self, other: Template, rename: Callable[[str], str]) -> None:
        """Raise if `other` has other nodes; `rename` makes this one's FQNs the other's."""
        image: dict[fx.Node, Any] = {}
        if len(self.halves) != len(other.halves):
            raise RepetitionError("one block has a backward, and another has none")
        for mine, theirs in zip(self.halves, other.halves, strict=True):
            if mine.inputs.keys() != theirs.inputs.keys() or len(mine.nodes) != len(theirs.nodes):
                raise RepetitionError("two blocks differ in the number of nodes")
            image |= {node: theirs.inputs[place] for place, node in mine.inputs.items()}
            pairs = [*zip(mine.nodes, theirs.nodes, strict=True), (mine.leave, theirs.leave)]
            for node, its in pairs:
                args, kwargs = _map_args(node, image.__getitem__)
                if node is mine.leave:
                    same = args[0] == its.args[0]
                elif node.op == its.op == "get_attr":
                    constants = (getattr(self._joint, str(each.target)) for each in (node, its))
                    same = torch.equal(*constants)
                else:
                    same = (node.target, (args, kwargs)) == (
                        its.target,
                        _map_args(its, lambda n: n),
                    )
                if not (same and _alike(node, its, rename)):
                    raise RepetitionError(f"two blocks differ at {node}")
                image[node] = its


def _tensors(nodes: Iterable[fx.Node]) -> Iterator[fx.Node]:
    return (node for node in nodes if not is_size(node))


def _map_args(node: fx.Node, image: Callable[[fx.Node], Any]) -> Any:
    """The arguments of `node`: sizes as expressions, others as their images."""

    def mapped(each: fx.Node) -> Any:
        return size_expression(each.meta["val"]) if is_size(each) else image(each)

    return fx.map_arg((node.args, node.kwargs), mapped)


def _alike(node: fx.Node, other: fx.Node, rename: Callable[[str], str]) -> bool:
    mine, theirs = node.meta.get("val"), other.meta.get("val")
    if isinstance(mine, Tensor) and not (
        isinstance(theirs, Tensor)
        and mine.dtype == theirs.dtype
        and Form.of(mine).sizes == Form.of(theirs).sizes
    ):
        return False
    a, b = notes_of(node), notes_of(other)
    return (
        a.get(KEEP) == b.get(KEEP)
        and len(a.get(REGION, ())) == len(b.get(REGION, ()))
        and [rename(fqn) for fqn, _ in a.get(CALLS, ())] == [fqn for fqn, _ in b.get(CALLS, ())]
    )


def notes_of(node: fx.Node) -> Notes:
    """What `graphshard.capture.annotation` noted of a node of the joint graph."""
    return node.meta.get("custom") or {}


class Copies:
    """What the calls that were left out of a joint graph stand for."""

    def __init__(self, joint: fx.GraphModule, repetition: Repetition) -> None:
        self._templates: dict[int, Template] = {}
        self._values: dict[int, dict[fx.Node, Any]] = {}  # by call: of template's nodes
        self._fresh = itertools.count(-1, -1)  # numbers of calls, all others being positive
        self._numbers: dict[tuple[int, int], int] = {}
        self._names: dict[int, dict[Any, Any]] = defaultdict(dict)  # by call: new for old ones
        self._results: list[fx.Node] = []
        self._forward: dict[int, fx.Node] = {}  # by call: the node that is left out
        borders: dict[tuple[int, int], fx.Node] = {}
        left_out: dict[int, list[fx.Node]] = defaultdict(list)
        for node in joint.graph.nodes:
            arguments: Any = node.args
            if node.target is BORDER:
                borders[arguments[1], arguments[2]] = node
            elif node.target is LEFT_OUT and not arguments[3]:
                left_out[arguments[2]].append(node)
        for index, kind in enumerate(repetition.kinds):
            if kind.repeats:
                try:
                    self._templates[index] = _template(joint, kind, borders)
                    starts = [borders[call, ENTER] for call in kind.ends]
                    for node in (*starts, *left_out[index]):
                        _require_one_use(node, kind)
                except RepetitionError as error:
                    raise RepetitionError(str(error), kind) from None

    def of(
        self,
        node: fx.Node,
        new: Mapping[fx.Node, Any],
        add: Callable[[fx.Node, Mapping[fx.Node, Any], Notes], fx.Node],
    ) -> Any:
        """What stands for a border, a call that was left out, or a value of them in `new`.

        That of a call are values of a copy of its template, to which `add` adds nodes, each given
        with the values for its arguments and its annotations. None: `node` is none of these.
        """
        arguments: Any = node.args
        if node.target in (BORDER, LEFT_OUT):
            if node.target is BORDER:
                results = [new[each] for each in arguments[0]]
            else:
                results = self._copy(arguments, node, new, add)
            self._results += results
            return results
        values = new.get(arguments[0]) if node.target is getitem else None
        return values[arguments[1]] if isinstance(values, list) else None

    def erase_unused(self, also: Iterable[fx.Node]) -> None:
        """Erase nodes whose values nobody uses, as a trace without borders does.

        `also` are nodes of which others than the copies may have lost their last use.
        """
        reached = [*also, *self._results[::-1]]
        erased: set[fx.Node] = set()
        for node in reached:
            if not node.users and not node.is_impure() and node not in erased:
                erased.add(node)
                reached += node.all_input_nodes
                node.graph.erase_node(node)

    def _copy(
        self, arguments: Any, node: fx.Node, new: Mapping[fx.Node, Any], add: Any
    ) -> list[Any]:
        given, call, index, backward = arguments
        template = self._templates.get(index)
        if template is None:
            raise RepetitionError("a block was left out in the only run of the forward")
        if backward:
            half, values = template.backward, self._values.pop(call)
        else:
            half, values = template.forward, self._values.setdefault(call, {})
            self._forward[call] = node
        assert half is not None
        values |= {each: new[given[place]] for place, each in half.inputs.items()}
        for each in half.nodes:
            if each.op == "get_attr":  # a constant
                values[each] = new[each]
            else:
                values[each] = add(each, values, self._renamed(template, call, notes_of(each)))
        self._results += [values[each] for each in half.nodes]
        return [values[each] for each in half.results]

    def _renamed(self, template: Template, call: int, old: Notes) -> Notes:
        """The annotations of a copy, as a whole trace of that call would make them."""
        if not old:
            return old
        renamed = self._names[call]
        start, here = notes_of(template.forward.enter), notes_of(self._forward[call])
        new = dict(old)
        for key in (FQN, CALLS, REGION):
            if key in old:
                value = (key, old[key])
                if value not in renamed:
                    renamed[value] = self._moved(key, call, old[key], start, here)
                new[key] = renamed[value]
        if LINE in old and old[LINE] == start.get(LINE):
            new[LINE] = here[LINE]
        return new

    def _moved(self, key: str, call: int, value: Any, start: Notes, here: Notes) -> Any:
        rename = renaming(start[FQN], here[FQN])
        if key == FQN:
            return rename(value)
        inside = value[len(start.get(key, ())) :]
        if key == REGION:
            return (*here.get(key, ()), *(self._number(call, number) for number in inside))
        return (*here[key], *((rename(fqn), self._number(call, number)) for fqn, number in inside))

    def _number(self, call: int, number: int) -> int:
        if (call, number) not in self._numbers:
            self._numbers[call, number] = next(self._fresh)
        return self._numbers[call, number]


def _template(
    joint: fx.GraphModule, kind: Kind, borders: Mapping[tuple[int, int], fx.Node]
) -> Template:
    first, last = (Template(joint, borders, call) for call in kind.ends)
    first.require_closed()
    last.require_closed()
    fqns = [notes_of(each.forward.enter)[FQN] for each in (first, last)]
    first.require_same(last, renaming(*fqns))
    return first


def _require_one_use(call: fx.Node, kind: Kind) -> None:
    """Raise if an input of `call` to which its backward gives a gradient has another use.

    Autograd adds the gradients of all uses in turn, which rounds otherwise than a sum of sums.
    """
    inputs: Any = call.args[0]
    for value, form in zip(inputs, kind.gradients, strict=kind.gradients != ()):
        uses = [user for user in _tensors(value.users) if not is_backward(user)]
        if form is not None and len(uses) > 1:
            raise RepetitionError(f"{value} is used inside and outside of a block")


def is_backward(node: fx.Node) -> bool:
    """Whether autograd made this node of the joint graph."""
    return bool(node.meta.get("partitioner_tag") == "is_backward")


def renaming(old: str, new: str) -> Callable[[str], str]:
    """A function that puts the FQN `new` in the place of the module `old`, where it begins one."""

    def rename(fqn: str) -> str:
        if fqn == old or fqn.startswith(f"{old}."):
            return new + fqn[len(old) :]
        return fqn

    return rename

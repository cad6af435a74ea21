"""The sizes of a module's calls that are symbols: named by the user, or learned from the calls.

A dimension that differed between two calls gets a name; dimensions whose sizes were equal in every
call share one. A call that shows two of them to differ gives them names of their own.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from torch import Tensor, nn

from graphshard.capture.dynamic import AUTO, Arguments, Dynamic, Names, drop_names
from graphshard.capture.structure import Structure
from graphshard.capture.traced_module import MAIN_ENTRY, EntryPoint
from graphshard.errors import FixedSizeError, GraphshardError
from graphshard.policy.base import Policy

GIVE_UP = 2
"""A dimension that the model fixed at this many sizes is taken to be fixed."""


_Place = tuple[str, int, int]
"""The label of a tensor, its number of dimensions, and one of these."""


class ChangingSizes:
    """The sizes in the calls of one entry point so far, and names for the dimensions that change.

    A call's tensors are known by their labels, so that calls of several structures learn from
    each other.
    """

    def __init__(self) -> None:
        self._calls: set[tuple[tuple[str, tuple[int, ...]], ...]] = set()
        self._sizes: dict[_Place, dict[int, int]] = {}  # by number of the call
        self._fixed: dict[_Place, set[int]] = {}  # sizes at which the model fixed it
        self._names: dict[_Place, str] = {}
        self._resolved: dict[Structure, tuple[Mapping[int, Names], ...]] = {}

    def meet(self, tensors: Sequence[Tensor], labels: Sequence[str]) -> None:
        """Learn from the shapes of a call."""
        call = tuple((label, tuple(t.shape)) for t, label in zip(tensors, labels, strict=True))
        if call in self._calls:
            return
        for label, shape in call:
            for dim, size in enumerate(shape):
                self._sizes.setdefault((label, len(shape), dim), {})[len(self._calls)] = size
        self._calls.add(call)
        self._name()

    def names(
        self, tensors: Sequence[Tensor], labels: Sequence[str], structure: Structure
    ) -> tuple[Names, ...] | None:
        """The dimensions of a call that change; None if there are none.

        A call in which two sizes of one name differ is learned from first.
        """
        if not self._names:
            return None
        names = self._of_call(tensors, labels, structure)
        sizes: dict[str, int] = {}
        for tensor, dims in zip(tensors, names, strict=True):
            shape = tensor.shape
            for dim, name in dims.items():
                if sizes.setdefault(name, shape[dim]) != shape[dim]:
                    self.meet(tensors, labels)
                    return self._of_call(tensors, labels, structure)
        return names if sizes else None

    def _of_call(
        self, tensors: Sequence[Tensor], labels: Sequence[str], structure: Structure
    ) -> tuple[Names, ...]:
        resolved = self._resolved.get(structure)
        if resolved is None:
            resolved = self._resolved[structure] = tuple(map(self._by_ndim, labels))
        return tuple(
            [of.get(tensor.ndim, {}) for of, tensor in zip(resolved, tensors, strict=True)]
        )

    def _by_ndim(self, label: str) -> Mapping[int, Names]:
        by_ndim: dict[int, dict[int, str]] = {}
        for (owner, ndim, dim), name in self._names.items():
            if owner == label:
                by_ndim.setdefault(ndim, {})[dim] = name
        return by_ndim

    def fix(
        self, tensors: Sequence[Tensor], labels: Sequence[str], names: Sequence[Names],
        unwanted: Collection[str],
    ) -> None:  # fmt: skip
        """Record that no program could be made for any size of the dimensions named `unwanted`."""
        for tensor, label, dims in zip(tensors, labels, names, strict=True):
            for dim, name in dims.items():
                if name in unwanted:
                    place = label, tensor.ndim, dim
                    self._fixed.setdefault(place, set()).add(tensor.shape[dim])
        self._name()

    # -- names --------------------------------------------------------------------------------

    def _name(self) -> None:
        self._resolved.clear()
        self._names = {}
        taken: set[str] = set()
        groups = list(self._groups())
        for group in groups:
            name = next(name for name in _candidates(group) if name not in taken)
            taken.add(name)
            self._names.update(dict.fromkeys(group, name))
        order = {place: index for index, place in enumerate(self._sizes)}
        self._names = dict(sorted(self._names.items(), key=lambda item: order[item[0]]))

    def _groups(self) -> Sequence[list[_Place]]:
        groups: list[list[_Place]] = []
        for place, sizes in self._sizes.items():
            if len(set(sizes.values())) == 1 or len(self._fixed.get(place, ())) >= GIVE_UP:
                continue
            for group in groups:
                if all(self._always_equal(place, other) for other in group):
                    group.append(place)
                    break
            else:
                groups.append([place])
        return groups

    def _always_equal(self, place: _Place, other: _Place) -> bool:
        """Whether two dimensions, of two tensors, had the same size in all calls with both."""
        sizes, others = self._sizes[place], self._sizes[other]
        both = sizes.keys() & others.keys()
        return (
            place[0] != other[0]
            and bool(both)
            and all(sizes[call] == others[call] for call in both)
        )


def _candidates(group: Sequence[_Place]) -> Iterator[str]:
    """Names for dimensions of equal size, the best first."""
    dims = {dim for _, _, dim in group}
    if dims == {0}:
        yield "batch"
    if dims == {1} and group[0][1] < 4:  # dim 1 of images holds channels
        yield "length"
    label, _, dim = group[0]
    words = re.sub(r"\W+", "_", label).strip("_")
    name = f"{words}_{dim}" if words.isidentifier() else f"size_{dim}"
    yield name
    yield from (f"{name}_{number}" for number in itertools.count(2))


class Call(NamedTuple):
    """A call, taken apart. `names` has its dimensions that are symbols; None if there are none."""

    tensors: Sequence[Tensor]
    structure: Structure
    entry: EntryPoint
    names: Sequence[Names] | None = None

    def without(self, unwanted: Collection[str]) -> Call:
        """The call with fixed sizes in place of the symbols `unwanted`."""
        return self._replace(names=drop_names(self.names or (), unwanted))


class CallSizes:
    """Tells which dimensions of a call are symbols.

    dynamic: the user's choice.
    learns: whether those are that change. None is under a policy whose choices hold for one shape:
        a CUDA graph, or what fits in a byte budget.
    """

    def __init__(
        self, model: nn.Module, dynamic: Dynamic | Literal["auto"] | None, policy: Policy
    ) -> None:
        self.dynamic = dynamic
        of_one_shape = policy.cuda_graph or policy.memory_budget is not None
        self.learns = dynamic == AUTO and not of_one_shape
        self._arguments = Arguments.of(model)
        self._changing: dict[EntryPoint, ChangingSizes] = {}

    def names(self, call: Call) -> tuple[Names, ...] | None:
        """The dimensions of a call that are symbols; None if there are none."""
        if isinstance(self.dynamic, Dynamic):
            is_main = call.entry == MAIN_ENTRY
            return self.dynamic.names(call.tensors, call.structure) if is_main else None
        changing = self._changing.get(call.entry)
        if changing is None:
            return None
        return changing.names(call.tensors, self._labels(call), call.structure)

    def meet(self, call: Call) -> None:
        """Learn from a call that no program fits."""
        if self.learns:
            changing = self._changing.setdefault(call.entry, ChangingSizes())
            changing.meet(call.tensors, self._labels(call))

    def fix(self, error: GraphshardError, call: Call, *, captured: bool) -> set[str]:
        """The names of sizes to fix for a call that got no program; none: it cannot be helped.

        `captured`: another capture with the symbols of this call succeeded.
        """
        names = call.names or ()
        if isinstance(error, FixedSizeError):
            # The model may take any size in general, and handle this one in another way.
            unwanted = {error.size} if self.learns or captured else set()
        else:
            unwanted = {n for dims in names for n in dims.values()} if self.learns else set()
        if self.learns and unwanted:
            changing = self._changing[call.entry]
            changing.fix(call.tensors, self._labels(call), names, unwanted)
        return unwanted

    def _labels(self, call: Call) -> tuple[str, ...]:
        structure = call.structure
        is_main = call.entry == MAIN_ENTRY
        return self._arguments.labels(structure) if is_main else structure.paths

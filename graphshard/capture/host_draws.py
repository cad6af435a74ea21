"""Random numbers that a forward draws on the host, from Python's `random` or `numpy.random`.

A graph holds no such draw. A program takes the numbers as inputs, behind those of the call, and
each call draws them first: by the functions and arguments that eager calls, in eager's order, so
that the generators are left as eager leaves them. What is drawn otherwise would be the same in each
call, and is refused, but for numbers from a generator that the forward seeds itself.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from graphshard.capture.code_walk import in_library
from graphshard.errors import GraphshardError
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.compat import SYMBOLIC
from graphshard.torch_private.patches import patched

_FUNCTIONS: Mapping[str, Sequence[str]] = {
    "random": (
        *("random", "uniform", "randint", "randrange", "choice", "triangular", "gauss"),
        *("normalvariate", "betavariate", "expovariate", "sample", "choices", "shuffle"),
    ),
    "numpy.random": (
        *("rand", "random", "random_sample", "uniform", "randint", "choice", "randn", "normal"),
        *("standard_normal", "beta", "binomial", "exponential", "permutation"),
    ),
}
"""Functions of each module whose results may be inputs: numbers, arrays and lists of numbers."""

_SEED, _FRESH = "seed", "default_rng"
_BY_PLACE = {"choice", "sample", "choices", "shuffle"}
"""Functions of `random` that draw from a sequence, of which they only need the length."""

_OF_TORCH = {getattr(torch, name): name for name in ("rand", "randn", "randint", "randperm")}
"""Functions of torch that may be drawn before a call, where a question is about what they give."""

_FEW = 16
"""How many numbers such a draw may give; more are noise, which no code asks about."""


class DrawsError(GraphshardError):
    """A forward draws other numbers than its trace expected; users never see this error.

    draws: those that it draws.
    """

    def __init__(self, draws: Sequence[Draw]) -> None:
        super().__init__("the forward draws random numbers on the host")
        self.draws = tuple(draws)


@dataclass(frozen=True)
class Draw:
    """A call of a function that draws a number from the generator of its module, or a tensor."""

    module: str
    name: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...] = ()

    def result(self) -> Any:
        """Draw: a number, a list, an array or a tensor."""
        function = getattr(sys.modules[self.module], self.name)
        if self.name == "shuffle":
            (numbers,) = map(list, self.args)
            function(numbers)
            return numbers
        return function(*self.args, **dict(self.kwargs))

    def make(self) -> Tensor:
        """Draw; what is drawn on the host as a tensor on the CPU, a number as one of no dims."""
        result = self.result()
        if isinstance(result, Tensor):
            return result
        dtype = torch.float64 if isinstance(result, float) else None
        return torch.tensor(result, dtype=dtype, device="cpu")

    def result_of(self, tensor: Tensor) -> Any:
        """What the function gives in a trace where `tensor` is what it drew."""
        if self.module == "torch":
            return tensor.clone()
        if self.gives_array(tensor):
            return torch_trace.array_of(tensor.clone())
        return [each.item() for each in tensor.unbind()] if tensor.dim() else tensor.item()

    def gives_array(self, tensor: Tensor) -> bool:
        """Whether `tensor` stands for an array of numpy."""
        return self.module == "numpy.random" and tensor.dim() > 0

    def __str__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs)]
        return f"{self.module}.{self.name}({', '.join(given)})"


@dataclass(frozen=True)
class Expected:
    """The draws of a forward that are inputs of a trace.

    known: these, in their order.
    of_torch: whether they may be torch's.
    """

    known: tuple[Draw, ...] = ()
    of_torch: bool = False


class HostDraws(TorchFunctionMode):
    """The draws `made` in one run of a forward, in which `tensors` are given for those expected.

    `others` names what else it drew from, and `seeded` the modules whose generators it seeded.

    Raises:
        DrawsError: on leaving, if there were others than expected, also if the run ended by a
            question.
    """

    def __init__(self, expected: Expected, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._expected = expected
        self._tensors = tensors
        self.made: list[Draw] = []
        self.others: list[str] = []
        self.seeded: set[str] = set()
        self._states: dict[str, Any] = {}

    @contextlib.contextmanager
    def watching(self, modules: Iterable[str]) -> Iterator[None]:
        """Let the functions give what is expected in a run, or what they would.

        modules: those of the model's code.
        """
        self._states = _states()
        with contextlib.ExitStack() as stack:
            for owner, name, draw, module, function in _places(modules):
                act = {_SEED: self._seed, _FRESH: self._begin}.get(function, self._give)
                stack.enter_context(patched(owner, name, partial(act, module, function, draw)))
            arrays = any(map(Draw.gives_array, self._expected.known, self._tensors))
            if arrays:
                stack.enter_context(patched(torch, "from_numpy", _from_numpy))
            if arrays or self._expected.of_torch:
                stack.enter_context(self)
            try:
                yield
            except torch_trace.untraceable_errors()[0] as error:
                if self._expected.of_torch and len(self.made) > len(self._tensors):
                    raise DrawsError(self.made) from error  # the question may be about the last
                raise
        if len(self.made) != len(self._tensors):
            raise DrawsError(self.made)
        self.others += [each for each in _changed(self._states) if each not in self.seeded]

    def _seed(self, module: str, _: str, seed: Callable[..., None], *args: Any, **kw: Any) -> None:
        """Seed; what follows is the same in each call, unless something was drawn before."""
        given = any(each is not None for each in (*args, *kw.values()))
        if given and not self.made and module not in _changed(self._states):
            self.seeded.add(module)
        seed(*args, **kw)

    def _begin(
        self, module: str, name: str, begin: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Make a generator, whose numbers are the same in each call if it has a seed."""
        if all(each is None for each in (*args, *kwargs.values())):
            self.others.append(f"{module}.{name}() without a seed")
        return begin(*args, **kwargs)

    def _give(
        self, module: str, name: str, draw: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        """Give what is expected, or draw and note it if it may be an input."""
        if in_library(sys._getframe(1).f_globals.get("__name__")) or module in self.seeded:
            return draw(*args, **kwargs)
        if "population" in kwargs:
            args = (kwargs.pop("population"), *args)
        items: Any = None
        places = args
        if module == "random" and name in _BY_PLACE and hasattr(args[0], "__getitem__"):
            items, places = args[0], (range(len(args[0])), *args[1:])
        made = Draw(module, name, _hashable(places), _hashable((*kwargs.items(),)))
        if not _is_plain((made.args, *dict(made.kwargs).values())):
            return draw(*args, **kwargs)  # by a number that is not known
        found = self._given(made)
        if items is None:
            return found
        if name == "choice":
            return items[found]
        chosen = [items[place] for place in found]
        if name != "shuffle":
            return chosen
        items[:] = chosen
        return None

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, or give the tensor expected in place of a small one that it draws."""
        kwargs = kwargs or {}
        draws = self._expected.of_torch and func in _OF_TORCH
        if draws and not any(map(_is_traced, tree_leaves((args, kwargs)))):
            return self._given(Draw("torch", _OF_TORCH[func], args, tuple(kwargs.items())))
        args, kwargs = tree_map(torch_trace.without_array, (args, kwargs))
        return func(*args, **kwargs)

    def _given(self, made: Draw) -> Any:
        at = len(self.made)
        if at < len(self._tensors) and self._expected.known[at] == made:
            self.made.append(made)
            return made.result_of(self._tensors[at])
        result = made.result()
        if result.numel() <= _FEW if isinstance(result, Tensor) else _are_numbers(result):
            self.made.append(made)
            if at < len(self._tensors):
                raise DrawsError(self.made)
        return result


def _places(modules: Iterable[str]) -> Iterator[tuple[Any, str, Callable[..., Any], str, str]]:
    """Where the functions are: in their module, and in those of `modules` that import them by name.

    Gives this module, the name there, the function, its own module and its name.
    """
    functions = {
        id(getattr(module, function)): (name, function)
        for name, names in _FUNCTIONS.items()
        if (module := sys.modules.get(name)) is not None
        for function in (*names, _SEED, _FRESH)
        if hasattr(module, function)
    }
    for owner in filter(None, map(sys.modules.get, {*_FUNCTIONS, *modules})):
        for name, value in [*vars(owner).items()]:
            if found := functions.get(id(value)):
                yield owner, name, value, *found


def _hashable(value: Any) -> Any:
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, Real | range)


def _are_numbers(result: Any) -> bool:
    if dtype := getattr(result, "dtype", None):
        return dtype.kind in "bif"
    return isinstance(result, Real | list)


def _from_numpy(array: Any) -> Tensor:
    tensor = torch_trace.without_array(array)
    return tensor if isinstance(tensor, Tensor) else torch.as_tensor(array)


def _is_traced(value: Any) -> bool:
    return isinstance(value, (Tensor, torch.Generator, *SYMBOLIC))


# -- the states of the generators -----------------------------------------------------------------


def _states() -> dict[str, Any]:
    """The states of the generators of `random` and `numpy.random`, by module."""
    numpy = sys.modules.get("numpy")
    states: dict[str, Any] = {"random": random.getstate()}
    return states | ({"numpy.random": numpy.random.get_state()} if numpy else {})


def _changed(before: Mapping[str, Any]) -> list[str]:
    """The modules whose states are no longer those of `before`."""
    now = _states()
    return [name for name in before if pickle.dumps(before[name]) != pickle.dumps(now[name])]


@contextlib.contextmanager
def restore_random_state() -> Iterator[None]:
    """Restore the random states of Python and numpy."""
    before = _states()
    try:
        yield
    finally:
        _put_back(before)


def _put_back(states: Mapping[str, Any]) -> None:
    random.setstate(states["random"])
    if "numpy.random" in states:
        sys.modules["numpy"].random.set_state(states["numpy.random"])


def random_states_kept() -> Callable[[], None]:
    """A function that puts the random states of Python, numpy and torch back to what they are."""
    before, of_cpu = _states(), torch.get_rng_state()
    of_cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None

    def put_back() -> None:
        _put_back(before)
        torch.set_rng_state(of_cpu)
        if of_cuda is not None:
            torch.cuda.set_rng_state(of_cuda)

    return put_back


def draw_ahead(draws: Sequence[Draw]) -> list[Tensor]:
    """What `draws` will give; the generators are left as they are."""
    if not draws:
        return []
    put_back = random_states_kept()
    try:
        return [draw.make() for draw in draws]
    finally:
        put_back()

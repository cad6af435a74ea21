"""Random numbers that a forward draws on the host, from Python's `random` or `numpy.random`.

A graph holds no such draw. A program takes the numbers as inputs, behind those of the call, and
each call draws them first: by the functions and arguments that eager calls, in eager's order, so
that the generators are left as eager leaves them.
"""

from __future__ import annotations

import contextlib
import pickle
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from graphshard.capture.code_walk import in_library
from graphshard.errors import GraphshardError
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.compat import SYMBOLIC
from graphshard.torch_private.patches import patched

_FUNCTIONS: Mapping[str, Sequence[str]] = {
    "random": (
        *("random", "uniform", "randint", "randrange", "choice", "triangular", "gauss"),
        *("normalvariate", "betavariate", "expovariate"),
    ),
    "numpy.random": (
        *("rand", "random", "random_sample", "uniform", "randint", "choice", "randn", "normal"),
        *("standard_normal", "beta", "binomial", "exponential"),
    ),
}
"""Functions of each module that give one number, if they are not asked for more."""


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

    def make(self) -> Tensor:
        """Draw; a number as a tensor of one element on the CPU, of float64 or int64."""
        function = getattr(sys.modules[self.module], self.name)
        result = function(*self.args, **dict(self.kwargs))
        if isinstance(result, Tensor):
            return result
        dtype = torch.int64 if isinstance(result, Integral) else torch.float64
        return torch.tensor(result, dtype=dtype, device="cpu")

    def __str__(self) -> str:
        given = [*map(repr, self.args), *(f"{name}={value!r}" for name, value in self.kwargs)]
        return f"{self.module}.{self.name}({', '.join(given)})"


@dataclass(frozen=True)
class Expected:
    """The draws of a forward that are inputs of a trace.

    known: these, in their order.
    of_torch: whether they may be torch's.
    baked_in: a trace keeps the numbers that it saw; there are none known.
    """

    known: tuple[Draw, ...] = ()
    of_torch: bool = False
    baked_in: bool = False


class HostDraws(TorchFunctionMode):
    """The draws `made` in one run of a forward, in which `tensors` are given for those expected.

    Raises:
        DrawsError: on leaving, if there were others, also if the run ended by a question.
    """

    def __init__(self, expected: Expected, tensors: Sequence[Tensor] = ()) -> None:
        super().__init__()
        self._expected = expected
        self._tensors = tensors
        self.made: list[Draw] = []

    @contextlib.contextmanager
    def watching(self, modules: Iterable[str]) -> Iterator[None]:
        """Let the functions give what is expected in a run, or what they would.

        modules: those of the model's code.
        """
        if self._expected.baked_in:
            yield
            return
        with contextlib.ExitStack() as stack:
            for owner, name, draw, module, function in _places(modules):
                give = partial(self._give, module, function, draw)
                stack.enter_context(patched(owner, name, give))
            if self._expected.of_torch:
                stack.enter_context(self)
            try:
                yield
            except torch_trace.untraceable_errors()[0] as error:
                if self._expected.of_torch and len(self.made) > len(self._tensors):
                    raise DrawsError(self.made) from error  # the question may be about the last
                raise
        if len(self.made) != len(self._tensors):
            raise DrawsError(self.made)

    def _give(
        self, module: str, name: str, draw: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        if in_library(sys._getframe(1).f_globals.get("__name__")):
            return draw(*args, **kwargs)
        if (module, name) == ("random", "choice") and len(args) == 1 and len(args[0]):
            return args[0][self._given(Draw(module, name, (range(len(args[0])),)), draw)]
        if not all(isinstance(each, Real) for each in (*args, *kwargs.values())):
            return draw(*args, **kwargs)  # several numbers, or by a number that is not known
        return self._given(Draw(module, name, args, tuple(kwargs.items())), draw)

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call `func`, or give the tensor expected in place of a small one that it draws."""
        kwargs = kwargs or {}
        if func in _OF_TORCH and not any(map(_is_traced, tree_leaves((args, kwargs)))):
            return self._given(Draw("torch", _OF_TORCH[func], args, tuple(kwargs.items())), func)
        return func(*args, **kwargs)

    def _given(self, made: Draw, draw: Callable[..., Any]) -> Any:
        at = len(self.made)
        if at < len(self._tensors) and self._expected.known[at] == made:
            self.made.append(made)
            tensor = self._tensors[at]
            return tensor.clone() if made.module == "torch" else tensor.item()
        result = draw(*made.args, **dict(made.kwargs))
        is_tensor = isinstance(result, Tensor)
        if result.numel() <= _FEW if is_tensor else isinstance(result, Real):
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
        for function in names
    }
    for owner in filter(None, map(sys.modules.get, {*_FUNCTIONS, *modules})):
        for name, value in [*vars(owner).items()]:
            if found := functions.get(id(value)):
                yield owner, name, value, *found


def _is_traced(value: Any) -> bool:
    return isinstance(value, (Tensor, torch.Generator, *SYMBOLIC))


# -- the states of the generators -----------------------------------------------------------------


@contextlib.contextmanager
def restore_random_state() -> Iterator[list[str]]:
    """Restore the random states of Python and numpy; the list then names those that were used."""
    numpy = sys.modules.get("numpy")
    python_state = random.getstate()
    numpy_state = numpy.random.get_state() if numpy else None
    used: list[str] = []
    try:
        yield used
    finally:
        if random.getstate() != python_state:
            used.append("random")
            random.setstate(python_state)
        if numpy and pickle.dumps(numpy.random.get_state()) != pickle.dumps(numpy_state):
            used.append("numpy.random")
            numpy.random.set_state(numpy_state)


def draw_ahead(draws: Sequence[Draw]) -> list[Tensor]:
    """What `draws` will give; the generators are left as they are."""
    if not draws:
        return []
    devices = [torch.cuda.current_device()] if torch.cuda.is_initialized() else []
    with restore_random_state(), torch.random.fork_rng(devices):
        return [draw.make() for draw in draws]

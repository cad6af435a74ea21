"""Annotations of traced nodes: the module, the line and the checkpoint region they came from."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from torch import nn

from graphshard.errors import is_library
from graphshard.progress import Stages
from graphshard.torch_private import trace as torch_trace

FQN = "fqn"


CALLS = "calls"


REGION = "recompute_region"
"""The checkpointed calls around a node, the outermost first, as a tuple of numbers."""


KEEP = "recompute_keep"
"""Whether the model's own selective checkpoint wants a node's result saved."""


LINE = "line"
"""The user's line that called a node's operator: (file, number, function)."""


@contextlib.contextmanager
def note_lines(*outermost: str) -> Iterator[None]:
    """Annotate traced nodes of forward with their lines; their backward gets them by annotation.

    `outermost` are the files of the functions around the model's forward and around the trace,
    where the search for a line of the user ends.
    """
    libraries: dict[str, bool] = {}  # by file

    def note(node: Any) -> None:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename not in outermost:
            file = frame.f_code.co_filename
            if file not in libraries:
                libraries[file] = is_library(file)
            if not libraries[file]:
                line = file, frame.f_lineno, frame.f_code.co_name
                node.meta["custom"] = {**node.meta.get("custom", {}), LINE: line}
                return
            frame = frame.f_back

    with torch_trace.note_nodes(note):
        yield


class RunProgress:
    """Runs of a forward as stages whose steps are the modules of `model`."""

    def __init__(self, model: nn.Module, stages: Stages) -> None:
        self._stages = stages
        self._inside: dict[str, list[str]] = {"": []}  # the modules in each, itself among them
        self._done: set[str] = set()
        for fqn, _ in model.named_modules():
            parts = fqn.split(".") if fqn else []
            for depth in range(len(parts) + 1):
                self._inside.setdefault(".".join(parts[:depth]), []).append(fqn)

    @contextlib.contextmanager
    def run(self) -> Iterator[None]:
        """A context around one run."""
        self._done = set()
        with self._stages.stage("forward", len(self._inside[""])):
            yield

    def left(self, fqn: str) -> None:
        """Count the module as done, and those in it, whose calls may have been left out."""
        before = len(self._done)
        self._done.update(self._inside[fqn])
        self._stages.advance(len(self._done) - before)


@contextlib.contextmanager
def annotate_nodes(model: nn.Module, left: Callable[[str], None]) -> Iterator[None]:
    """Annotate traced nodes with the FQN of the module that made them, and the calls around it.

    "calls" is a tuple of (module FQN, call number) from the root inwards: a module that is used
    twice has two numbers. `left` is told the FQN of each module whose call ends.
    """
    annotate = torch_trace.annotate()
    open_contexts: list[tuple[nn.Module, Any]] = []
    calls: list[tuple[str, int]] = []
    numbers = itertools.count()
    removable = []

    def enter(fqn: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.append((fqn, next(numbers)))
            context = annotate({FQN: fqn, CALLS: tuple(calls)})
            context.__enter__()
            open_contexts.append((module, context))

        return hook

    def leave(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        # A module that raised inside left its context open; close it with its caller's.
        while open_contexts:
            opened_by, context = open_contexts.pop()
            left(calls.pop()[0])
            context.__exit__(None, None, None)
            if opened_by is module:
                return

    for fqn, module in model.named_modules():
        removable.append(
            module.register_forward_pre_hook(enter(fqn), prepend=True, with_kwargs=True)
        )
        removable.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for hook in removable:
            hook.remove()
        while open_contexts:
            # A trace that was cut short has put back what it had noted already.
            with contextlib.suppress(KeyError):
                open_contexts.pop()[1].__exit__(None, None, None)

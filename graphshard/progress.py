"""Show the progress of long work as bars on a terminal, and record the time of each stage."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.progress import Progress as Bars
    from rich.progress import TaskID


class Stages(Protocol):
    """Receives the progress of work; see `Progress`."""

    def stage(self, name: str, total: int | None = None) -> AbstractContextManager[None]:
        """Enter a stage of the work with `total` steps, if their number is known."""
        ...

    def advance(self, steps: int = 1) -> None:
        """Count `steps` of the innermost stage as done."""
        ...


_LINE_SECONDS = 2.0
"""The least time between two lines that count steps."""


@dataclass
class StageTime:
    """The seconds of one stage; `depth` is the number of stages around it."""

    name: str
    depth: int
    seconds: float


class Progress:
    """Nested stages of work: shows a bar for each while it runs, and records its seconds.

    Args:
        visible: show bars on stderr. None: only if stderr is a terminal, and only on rank 0.
        lines: where stderr is no terminal (a file, a pipe), write plain lines there, one for each
            stage as it begins and for its steps every few seconds.
        file: write these lines to this file, too, whatever stderr is.
    """

    def __init__(
        self,
        visible: bool | None = None,
        *,
        lines: bool = False,
        file: str | os.PathLike[str] | None = None,
    ) -> None:
        if visible is None:
            visible = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
        self._writes = lines and not visible and not sys.stderr.isatty()
        self._file = None if file is None else Path(file)
        if self._file is not None:
            self._file.write_text("")
        self._begin = self._written = time.perf_counter()
        self._counts: list[tuple[str, int, int | None]] = []
        self.times: list[StageTime] = []
        self._visible = visible
        self._bars: Bars | None = None
        self._open: list[TaskID] = []
        self._depth = 0

    @contextmanager
    def stage(self, name: str, total: int | None = None) -> Iterator[None]:
        """Run a stage of the work with `total` steps, if their number is known (see `advance`)."""
        entry = StageTime(name, self._depth, 0.0)
        self.times.append(entry)
        self._depth += 1
        self._show(name, total)
        self._counts.append((name, 0, total))
        self._write(f"{'  ' * entry.depth}{name}")
        start = time.perf_counter()
        try:
            yield
        finally:
            entry.seconds = time.perf_counter() - start
            self._depth -= 1
            self._counts.pop()
            self._hide()

    def advance(self, steps: int = 1) -> None:
        """Count `steps` of the innermost stage as done."""
        if not self._counts:
            return
        name, done, total = self._counts[-1]
        done += steps
        self._counts[-1] = name, done, total
        if time.perf_counter() - self._written >= _LINE_SECONDS:
            self._write(f"{'  ' * (self._depth - 1)}{name} {done}/{total or '?'}")
        if self._bars is not None:
            self._bars.update(self._open[-1], advance=steps, steps=_steps(done, total))
            if done == total:  # until then the bars draw themselves ten times a second
                self._bars.refresh()

    def tell(self, text: str) -> None:
        """Show lines of text above the bars, or among the lines."""
        if self._bars is not None:
            self._bars.console.print(text, markup=False, highlight=False)
        for line in text.splitlines():
            self._write(f"{'  ' * self._depth}{line}")

    def _write(self, text: str) -> None:
        if not self._writes and self._file is None:
            return
        self._written = time.perf_counter()
        line = f"{self._written - self._begin:7.1f} s  {text}\n"
        if self._writes:
            sys.stderr.write(line)
            sys.stderr.flush()
        if self._file is not None:
            with self._file.open("a") as file:
                file.write(line)

    def report(self) -> str:
        """Return the times as text: a line per stage, seconds first."""
        return "\n".join(f"{t.seconds:8.2f} s  {'  ' * t.depth}{t.name}" for t in self.times)

    def _show(self, name: str, total: int | None) -> None:
        if not self._visible:
            return
        if self._bars is None:
            from rich import progress  # which takes long to load, and many runs show no bar
            from rich.console import Console

            self._bars = progress.Progress(
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.TextColumn("{task.fields[steps]}"),
                progress.TimeElapsedColumn(),
                console=Console(stderr=True),
                transient=True,  # leave nothing among the program's own output
                redirect_stdout=False,  # rich would send stdout to stderr
            )
            self._bars.start()
        name = "  " * len(self._open) + name
        self._open.append(self._bars.add_task(name, total=total, steps=_steps(0, total)))

    def _hide(self) -> None:
        if self._bars is None:
            return
        self._bars.remove_task(self._open.pop())
        if not self._open:
            self._bars.stop()
            self._bars = None


def _steps(done: int, total: int | None) -> str:
    """The number of steps done of all, if that is known."""
    return "" if total is None else f"{done}/{total}"

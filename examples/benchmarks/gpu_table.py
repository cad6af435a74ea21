"""Checks that run one by one, each in a process of its own with a time limit, and their table."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Row:
    """One line of the table. `ok`: whether `found` keeps `bar`; None where there is nothing to."""

    section: str
    check: str
    found: str
    bar: str = ""
    ok: bool | None = None

    @property
    def verdict(self) -> str:
        return "" if self.ok is None else "ok" if self.ok else "FAILED"


@dataclass(frozen=True)
class Place:
    """Where checks run. `small`: toy sizes; `folder`: what sections leave for later ones."""

    device: torch.device
    small: bool
    folder: Path

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def synchronize(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def retries(self, section: str) -> Row:
        """The number of times the allocator gave memory back to the device to get any."""
        if not self.cuda:
            return Row(section, "num_alloc_retries", "not counted on a CPU")
        count = torch.cuda.memory_stats().get("num_alloc_retries", 0)
        return Row(section, "num_alloc_retries", str(count), "0", count == 0)


PATIENCE = 8


def patience(kind: str) -> int:
    """How many times as long as on a GPU things may take on this `kind` of device.

    Where CPU threads stand in for a GPU (tests/cuda_on_cpu), as long as on a CPU.
    """
    real = kind == "cuda" and "CPU threads" not in torch.cuda.get_device_name()
    return 1 if real else PATIENCE


Check = Callable[[Place], Iterator[Row]]


@dataclass(frozen=True)
class Section:
    """Checks that run in one process, for at most `limit` seconds."""

    name: str
    about: str
    limit: float
    check: Check


HEAD = ("section", "check", "found", "bar", "")


def table(rows: Iterable[Row]) -> str:
    """The rows in columns, each section's name once."""
    lines, last = [HEAD], ""
    for row in rows:
        lines.append(
            (row.section if row.section != last else "", row.check, row.found, row.bar, row.verdict)
        )
        last = row.section
    widths = [max(len(line[i]) for line in lines) for i in range(len(HEAD))]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) for line in lines]
    return "\n".join(line.rstrip() for line in [text[0], "-" * len(text[0].rstrip()), *text[1:]])


def run_here(section: Section, place: Place, out: Path) -> None:
    """Run a section in this process, writing each row when it is known."""
    with out.open("a") as file:

        def write(row: Row) -> None:
            file.write(json.dumps(asdict(row)) + "\n")
            file.flush()

        try:
            for row in section.check(place):
                write(row)
        except Exception as error:
            traceback.print_exc()
            said = f"{type(error).__name__}: {error}".splitlines()[0]
            write(Row(section.name, "the whole section", said[:160], "no error", False))


def run_apart(section: Section, command: Sequence[str], out: Path, limit: float) -> list[Row]:
    """The rows of a section, run by `command` in another process for at most `limit` seconds.

    Whatever happens to that process is a row.
    """
    begin = time.perf_counter()
    ended: int | None
    process = subprocess.Popen(command, start_new_session=True)
    try:
        ended = process.wait(timeout=limit)
    except subprocess.TimeoutExpired:
        ended = None
    # What it started must not hold the device in the sections behind it.
    kill_session(process.pid)
    process.wait()
    rows = read_rows(out)
    took = time.perf_counter() - begin
    if ended is None:
        said = f"stopped after {limit:.0f} s"
        rows.append(Row(section.name, "the whole section", said, "ends in time", False))
    elif ended:
        said = f"ended with code {ended}"
        rows.append(Row(section.name, "the whole section", said, "code 0", False))
    elif not rows:
        rows.append(Row(section.name, "the whole section", "no result", "a row or more", False))
    rows.append(Row(section.name, "took", f"{took:.0f} s", f"{limit:.0f} s"))
    return rows


def read_rows(out: Path) -> list[Row]:
    """The lines that a section wrote; one that was cut off is left out."""
    rows = []
    for line in out.read_text().splitlines() if out.exists() else ():
        try:
            rows.append(Row(**json.loads(line)))
        except ValueError:
            break
    return rows


def kill_session(leader: int) -> None:
    """End a process that leads a session of its own, and whatever it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, 9)


def script(*arguments: str) -> list[str]:
    """The command that runs `gpu.py` with these arguments."""
    return [sys.executable, str(Path(__file__).parent / "gpu.py"), *arguments]

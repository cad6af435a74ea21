"""Checks that run one by one, each in a process of its own with a time limit, and their results."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import subprocess
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
    """How many times as long as on a GPU things may take on this `kind` of device."""
    return 1 if kind == "cuda" and is_gpu() else PATIENCE


def is_gpu() -> bool:
    """Whether CUDA has a GPU, and not CPU threads that stand in for it (tests/cuda_on_cpu)."""
    return "CPU threads" not in torch.cuda.get_device_name()


Check = Callable[[Place], Iterator[Row]]


@dataclass(frozen=True)
class Section:
    """Checks that run in one process, for at most `limit` seconds."""

    name: str
    about: str
    limit: float
    check: Check


def table(rows: Iterable[Row]) -> str:
    """The rows as a table in Markdown, each section's name once."""
    lines, last = ["| section | check | found | bar | |", "|---|---|---|---|---|"], ""
    for row in rows:
        name = "" if row.section == last else row.section
        cells = (name, row.check.strip(), row.found, row.bar, row.verdict)
        lines.append("| " + " | ".join(map(_cell, cells)) + " |")
        last = row.section
    return "\n".join(lines)


def _cell(text: str) -> str:
    line = " ".join(text.split())  # an error's text may have several
    return line.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


# -- a section in a process of its own -------------------------------------------------------------


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
    with contextlib.suppress(ProcessLookupError):
        # What it started must not hold the device in the sections behind it.
        os.killpg(process.pid, 9)
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


# -- the README's table ----------------------------------------------------------------------------

BEGIN, END = "<!-- results of gpu.py -->", "<!-- end of the results of gpu.py -->"


def machine(device: str) -> str:
    """The device, and the versions of all that runs on it."""
    said = {"device": "CPU", "torch": torch.__version__, "Python": platform.python_version()}
    if device == "cuda":
        said["device"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            told = subprocess.run(query, capture_output=True, text=True, timeout=30, check=True)
            said["driver"] = told.stdout.split()[0]
        said["CUDA"] = str(torch.version.cuda)
        said["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return ", ".join(f"{name} {version}" for name, version in said.items())


def included(readme: str, results: str) -> str:
    """The text of a README with these results in their place."""
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{results}\n{END}{rest.split(END)[1]}"

"""Results of `gpu.py` that are kept: one JSON file, one Markdown table, and the README's copy."""

from __future__ import annotations

import json
import platform
import shutil
import subprocess
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from examples.benchmarks.gpu_table import Row

BEGIN, END = "<!-- results of gpu.py -->", "<!-- end of the results of gpu.py -->"
NOT_RUN = "Not run on a GPU: no line of this table has been measured yet."

Results = dict[str, Any]


def machine(device: str) -> dict[str, str]:
    """The device, and the versions of all that runs on it."""
    said = {"device": "CPU", "torch": torch.__version__, "Python": platform.python_version()}
    if device == "cuda":
        said["device"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
        said["driver"] = driver()
        said["CUDA"] = str(torch.version.cuda)
        said["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return said


def driver(program: str = "nvidia-smi") -> str:
    """The version of the driver, "unknown" where `nvidia-smi` does not tell."""
    if shutil.which(program) is None:
        return "unknown"
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        told = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    lines = told.stdout.split()
    return lines[0] if told.returncode == 0 and lines else "unknown"


def heading(of: dict[str, str]) -> str:
    """The machine in one line."""
    rest = ", ".join(f"{name} {version}" for name, version in of.items() if name != "device")
    return f"{of['device']}, {rest}"


def results_in(file: Path, of: dict[str, str]) -> Results:
    """What `file` has of the same machine; else nothing."""
    if file.is_file():
        kept: Results = json.loads(file.read_text())
        if kept["machine"] == of:
            return kept
    return {"machine": of, "sections": {}}


def add(results: Results, section: str, rows: Sequence[Row], seconds: float) -> None:
    """Put the rows of a section in the place of earlier ones."""
    results["sections"][section] = {
        "date": time.strftime("%Y-%m-%d"),
        "seconds": round(seconds, 1),
        "rows": [asdict(row) for row in rows],
    }


def rows_of(results: Results) -> list[Row]:
    """The rows of all sections."""
    return [Row(**row) for section in results["sections"].values() for row in section["rows"]]


def markdown(results: Results) -> str:
    """The table, under the machine, and the date and time of each section."""
    rows = rows_of(results)
    failed = sum(row.ok is False for row in rows)
    sections = results["sections"]
    told = [f"{name} {of['date']} ({of['seconds']:.0f} s)" for name, of in sections.items()]
    lines = [
        f"{heading(results['machine'])}. {failed} of {sum(row.ok is not None for row in rows)} "
        f"checks failed. Sections: {', '.join(told)}.",
        "",
        "| section | check | found | bar | |",
        "|---|---|---|---|---|",
    ]
    for name in sections:
        for number, row in enumerate(row for row in rows if row.section == name):
            cells = ("" if number else name, row.check.strip(), row.found, row.bar, row.verdict)
            lines.append("| " + " | ".join(map(_cell, cells)) + " |")
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;")


def write(file: Path, results: Results) -> None:
    """Write the JSON, each file whole or not at all, and the Markdown table beside it."""
    for path, text in (
        (file, json.dumps(results, indent=1) + "\n"),
        (file.with_suffix(".md"), markdown(results)),
    ):
        part = path.with_name(f"{path.name}.part")
        part.write_text(text)
        part.replace(path)


def included(readme: str, file: Path) -> str:
    """The text of a README with the table of `file`, or with the sentence that there is none.

    Raises:
        ValueError: the README has no place for it, or the results are not of a GPU.
    """
    text = f"{NOT_RUN}\n"
    if file.exists():
        results = json.loads(file.read_text())
        if "driver" not in results["machine"]:
            raise ValueError(f"{file} was not measured on a GPU")
        text = markdown(results)
    if readme.count(BEGIN) != 1 or readme.count(END) != 1:
        raise ValueError(f"the README must have {BEGIN} and {END} once each")
    before, rest = readme.split(BEGIN)
    return f"{before}{BEGIN}\n{text}{END}{rest.split(END)[1]}"

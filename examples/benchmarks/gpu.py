"""Every check there is for GPUs: one command, one table, under nine minutes.

    python examples/benchmarks/gpu.py                       # on a machine with one GPU or more
    python examples/benchmarks/gpu.py --list
    python examples/benchmarks/gpu.py --only parity,stress
    python examples/benchmarks/gpu.py --save table.txt      # kept there after each section, and raw
    python examples/benchmarks/gpu.py --device cpu --small  # what of it a CPU can run, at toy sizes

Each section runs in a process of its own within a time limit; one that fails is a line of the table
and does not stop the others. Ends with code 1 if any line failed.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

# Before CUDA starts: the same bits in every run, and errors of NCCL in words.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from examples.benchmarks import gpu_checks, gpu_ranks, gpu_rivals
from examples.benchmarks.gpu_table import Place, Row, Section, run_apart, run_here, script, table

BUDGET = 530.0
"""Seconds for all of it on a GPU. On a CPU every limit is `PATIENCE` times as long."""

PATIENCE = 8

SECTIONS = (
    Section("parity", "one rank against the plain model, each option", 70, gpu_checks.parity),
    Section("ranks", "several ranks against one process and FSDP2", 80, gpu_ranks.ranks),
    Section("graph", "whole-step CUDA graphs", 45, gpu_checks.graph),
    Section("stress", "delays on every stream, poisoned frees", 80, gpu_checks.stress),
    Section("fsdp2", "memory and time of a rank of 8, a Llama of 8B shape", 200, gpu_rivals.rivals),
    Section("calibrate", "graphshard calibrate --quick", 60, gpu_checks.calibrated),
    Section("predict", "predicted against measured memory and time", 60, gpu_checks.predict),
    Section("overlap", "communication hidden, modelled and measured", 70, gpu_checks.overlap),
)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="name the sections and do nothing")
    parser.add_argument("--only", default="", metavar="NAMES", help="sections, by commas")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    parser.add_argument(
        "--save",
        type=Path,
        metavar="FILE",
        help="write the table there, too, after each section, and its lines as JSON to FILE.jsonl",
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)  # of a process this script started
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def heading(device: str) -> str:
    """Date, device and versions."""
    said = [
        time.strftime("%Y-%m-%d"),
        f"torch {torch.__version__}",
        f"Python {platform.python_version()}",
    ]
    if device == "cuda":
        count = torch.cuda.device_count()
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
        said[1:1] = [f"{count} x {torch.cuda.get_device_name(0)}", f"CUDA {torch.version.cuda}"]
        said.append(f"NCCL {nccl}")
    else:
        said.insert(1, "CPU")
    return ", ".join(said)


def chosen(only: str) -> list[Section]:
    """The sections of these names, separated by commas; all if there is none.

    Raises:
        SystemExit: there is no such section.
    """
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {section.name for section in SECTIONS}
    if unknown:
        known = ", ".join(section.name for section in SECTIONS)
        raise SystemExit(f"there is no section {', '.join(sorted(unknown))}; there are {known}")
    return [section for section in SECTIONS if not names or section.name in names]


def main() -> int:
    args = parse_args()
    if args.list:
        for section in SECTIONS:
            print(f"{section.name:10} {section.limit:4.0f} s  {section.about}")
        return 0
    if args.section:
        (section,) = chosen(args.section)
        device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
        if args.device == "cuda":
            torch.cuda.set_device(device)
        else:
            torch.set_num_threads(1)
        place = Place(device, args.small, args.folder)
        run_here(section, place, args.folder / f"{section.name}.jsonl")
        sys.stdout.flush()
        os._exit(0)  # with no wait for what a process group left behind
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU here; --device cpu --small runs what a CPU can", file=sys.stderr)
        return 2
    begin = time.perf_counter()
    patience = 1 if args.device == "cuda" else PATIENCE
    said = heading(args.device)
    print(said, flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for section in chosen(args.only):
            left = BUDGET * patience - (time.perf_counter() - begin)
            if left < 10:
                found = [Row(section.name, "the whole section", "no time left", "", False)]
            else:
                command = script(
                    "--section", section.name, "--folder", folder, "--device", args.device
                )
                command += ["--small"] if args.small else []
                out = Path(folder, f"{section.name}.jsonl")
                found = run_apart(section, command, out, min(section.limit * patience, left))
            rows += found
            # What is known is told at once: whoever runs this may be stopped.
            print(table(found), flush=True)
            text = report(said, rows, time.perf_counter() - begin)
            if args.save is not None:
                save(args.save, text, rows)
    print(f"\n{text}")
    return int(any(row.ok is False for row in rows))


def report(said: str, rows: list[Row], seconds: float) -> str:
    """The heading, the table, and how long it took."""
    failed = sum(row.ok is False for row in rows)
    return f"{said}\n\n{table(rows)}\n\n{seconds:.0f} s, {failed} failed"


def save(file: Path, text: str, rows: list[Row]) -> None:
    """Write the table to `file`, and its lines as JSON beside it."""
    file.write_text(text + "\n")
    lines = [json.dumps(asdict(row)) for row in rows]
    file.with_name(f"{file.name}.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())

"""Every check there is for GPUs: one command for each of two parts, one table.

    python examples/benchmarks/gpu.py --part 1 --save gpu.json     # each under ten minutes, on a
    python examples/benchmarks/gpu.py --part 2 --save gpu.json     # machine with one GPU or more
    python examples/benchmarks/gpu.py --list
    python examples/benchmarks/gpu.py --only parity,stress
    python examples/benchmarks/gpu.py --device cpu --small  # what of it a CPU can run, at toy sizes

Each section runs in a process of its own within a time limit; one that fails is a line of the table
and does not stop the others. `--save FILE.json` writes the results after each section; sections of
an earlier call on the same machine stay. `--include README.md` puts the saved results into that
file, as a table. Ends with code 1 if any line failed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

# Before CUDA starts: the same bits in every run, and errors of NCCL in words.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch

from examples.benchmarks import gpu_checks, gpu_ranks, gpu_rates, gpu_rivals, gpu_table, harness
from examples.benchmarks.gpu_table import Place, Row, Section, patience, run_apart, run_here, table
from graphshard.passes import offload_activations

PARTS = {
    "1": (
        Section("parity", "one rank against the plain model, each option", 60, gpu_checks.parity),
        Section("ranks", "four ranks against one process", 200, gpu_ranks.ranks),
        Section("graph", "whole-step CUDA graphs", 45, gpu_checks.graph),
        Section("stress", "delays on every stream, poisoned frees", 90, gpu_checks.stress),
        Section("rates", "a preset's rates of products and attention", 60, gpu_rates.rates),
    ),
    "2": (
        Section("calibrate", "graphshard calibrate --quick", 90, gpu_checks.calibrated),
        Section("predict", "predicted against measured memory and time", 60, gpu_checks.predict),
        Section("overlap", "communication hidden, modelled and measured", 70, gpu_checks.overlap),
        Section("fsdp2", "memory and time of a rank of 8, a GPT 4096 wide", 340, gpu_rivals.rivals),
    ),
}

SECTIONS = tuple(section for part in PARTS.values() for section in part)


def parse_args() -> argparse.Namespace:
    parser = harness.parser(__doc__)
    parser.add_argument("--list", action="store_true", help="name the sections and do nothing")
    parser.add_argument("--part", choices=sorted(PARTS), help="a part of the sections")
    parser.add_argument("--only", default="", metavar="NAMES", help="sections, by commas")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    parser.add_argument("--budget", type=float, default=560.0, help="seconds for all, on a GPU")
    parser.add_argument("--save", type=Path, metavar="FILE.json", help="keep the results there")
    parser.add_argument(
        "--include", type=Path, metavar="README", help="put the table of --save there, run nothing"
    )
    parser.add_argument("--section", help=argparse.SUPPRESS)  # of a process this script started
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen(only: str, part: str | None = None) -> list[Section]:
    """The sections of these names, separated by commas, or of a part; all if there is neither."""
    names = [name for name in only.split(",") if name]
    unknown = set(names) - {section.name for section in SECTIONS}
    if unknown:
        known = ", ".join(section.name for section in SECTIONS)
        raise SystemExit(f"there is no section {', '.join(sorted(unknown))}; there are {known}")
    sections = SECTIONS if part is None else PARTS[part]
    return [section for section in sections if not names or section.name in names]


def main() -> int:
    args = parse_args()
    if args.list:
        for number, part in PARTS.items():
            for section in part:
                print(f"{section.name:19} {section.limit:4.0f} s  part {number}  {section.about}")
        return 0
    if args.include is not None:
        if args.save is None:
            raise SystemExit("--include needs the results, by --save FILE.json")
        args.include.write_text(gpu_table.included(args.include.read_text(), args.save))
        return 0
    if args.section:
        run_section(args)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("torch finds no GPU here; --device cpu --small runs what a CPU can", file=sys.stderr)
        return 2
    return run_sections(args)


def run_section(args: argparse.Namespace) -> None:
    (section,) = chosen(args.section)
    device = torch.device("cuda", 0) if args.device == "cuda" else torch.device("cpu")
    if args.device == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)
    if args.small:
        offload_activations.ON_CUDA = offload_activations.ELSEWHERE  # toys have none as large
    place = Place(device, args.small, args.folder)
    run_here(section, place, args.folder / f"{section.name}.jsonl")
    sys.stdout.flush()
    os._exit(0)  # with no wait for what a process group left behind


def run_sections(args: argparse.Namespace) -> int:
    """Run each chosen section in a process of its own; 1 if any line failed."""
    begin = time.perf_counter()
    longer = patience(args.device)
    machine = gpu_table.machine(args.device)
    print(f"{time.strftime('%Y-%m-%d')}, {machine}", flush=True)
    results = gpu_table.results_in(args.save, machine)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for section in chosen(args.only, args.part):
            started = time.perf_counter()
            left = args.budget * longer - (started - begin)
            if left < 10:
                found = [Row(section.name, "the whole section", "no time left", "", False)]
            else:
                command = [sys.executable, __file__, "--section", section.name]
                command += ["--folder", folder, "--device", args.device]
                command += ["--small"] if args.small else []
                out = Path(folder, f"{section.name}.jsonl")
                found = run_apart(section, command, out, min(section.limit * longer, left))
            rows += found
            # What is known is told at once: whoever runs this may be stopped.
            print(table(found), flush=True)
            if args.save is not None:
                gpu_table.write(args.save, results, section.name, found)
    failed = sum(row.ok is False for row in rows)
    print(f"\n{table(rows)}\n\n{time.perf_counter() - begin:.0f} s, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

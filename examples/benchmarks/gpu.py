"""What a GPU shows: losses, time and memory beside FSDP2 and DDP, and whether predictions hold.

    python examples/benchmarks/gpu.py --include examples/benchmarks/README.md   # ten minutes
    python examples/benchmarks/gpu.py --only predict,overlap
    python examples/benchmarks/gpu.py --device cpu --small  # what of it a CPU can run, at toy sizes

For a machine with one GPU or more. Each section runs in a process of its own within a time limit;
one that fails is a line of the table and does not stop the others. `--include README.md` puts the
table into that file. Ends with code 1 if any line failed. Options, streams and ranks over NCCL are
left to `pytest -m cuda`.
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

from examples.benchmarks import gpu_checks, gpu_rivals, harness
from examples.benchmarks.gpu_table import (
    Place,
    Row,
    Section,
    included,
    machine,
    patience,
    run_apart,
    run_here,
    table,
)

SECTIONS = (
    Section("systems", "beside FSDP2 and DDP, on the GPUs there are", 70, gpu_rivals.side_by_side),
    Section("calibrate", "graphshard calibrate --quick", 90, gpu_checks.calibrated),
    Section("predict", "predicted against measured memory and time", 60, gpu_checks.predict),
    Section("overlap", "communication hidden, modelled and measured", 70, gpu_checks.overlap),
    Section("fsdp2", "memory and time of a rank of 8, a GPT 4096 wide", 300, gpu_rivals.rivals),
)


def parse_args() -> argparse.Namespace:
    parser = harness.parser(__doc__ + "".join(f"\n{s.name:10} {s.about}" for s in SECTIONS))
    parser.add_argument("--only", default="", metavar="NAMES", help="sections, by commas")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--small", action="store_true", help="toy sizes")
    parser.add_argument("--include", type=Path, metavar="README", help="put the table there")
    parser.add_argument("--section", help=argparse.SUPPRESS)  # of a process this script started
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args()


def chosen(only: str) -> list[Section]:
    """The sections of these names, separated by commas; all if there are none."""
    names = only.split(",") if only else [section.name for section in SECTIONS]
    unknown = set(names) - {section.name for section in SECTIONS}
    if unknown:
        raise SystemExit(f"there is no section {', '.join(sorted(unknown))}")
    return [section for section in SECTIONS if section.name in names]


def main() -> int:
    args = parse_args()
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
    place = Place(device, args.small, args.folder)
    run_here(section, place, args.folder / f"{section.name}.jsonl")
    sys.stdout.flush()
    os._exit(0)  # with no wait for what a process group left behind


def run_sections(args: argparse.Namespace) -> int:
    """Run each chosen section in a process of its own; 1 if any line failed."""
    begin = time.perf_counter()
    head = f"{time.strftime('%Y-%m-%d')}, {machine(args.device)}"
    print(head, flush=True)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for section in chosen(args.only):
            command = [sys.executable, __file__, "--section", section.name]
            command += ["--folder", folder, "--device", args.device]
            command += ["--small"] if args.small else []
            out = Path(folder, f"{section.name}.jsonl")
            found = run_apart(section, command, out, section.limit * patience(args.device))
            rows += found
            # What is known is told at once: whoever runs this may be stopped.
            print(table(found), flush=True)
            if args.include is not None:
                results = f"{head}\n\n{table(rows)}"
                args.include.write_text(included(args.include.read_text(), results))
    failed = sum(row.ok is False for row in rows)
    print(f"\n{table(rows)}\n\n{time.perf_counter() - begin:.0f} s, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

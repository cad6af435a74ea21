"""`graphshard calibrate`: its arguments, the ranks it starts, and its output."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from graphshard.calibrate.run import Calibration, Row, calibrate, require_unmeasured
from graphshard.calibrate.steps import joined
from graphshard.errors import CostError
from graphshard.hardware.hardware import Hardware
from graphshard.progress import Progress
from graphshard.runtime.links import QUICK, Effort

_DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


HELP = """\
Alone it measures one device. Started by torchrun, or with --ranks N, it measures all ranks at once,
and the collectives between them, as steps issue them: over NCCL on CUDA devices, over Gloo on CPUs.
The file is read by every --hardware option and by Hardware.load.
"""


_QUICK_SHARE = 0.7


_LINKS = {
    "gpus_per_node": "N",
    "intra_bandwidth": "BYTES",
    "intra_latency": "SECONDS",
    "inter_bandwidth": "BYTES",
    "inter_latency": "SECONDS",
}
"""The figures of a network that the command takes, and what stands for their values."""


def add_calibrate(commands: Any) -> None:
    """Add the command to the parser of all commands."""
    summary = "measure this machine and its ranks, for a hardware file"
    command: argparse.ArgumentParser = commands.add_parser(
        "calibrate",
        usage="%(prog)s [OPTIONS]",
        help=summary,
        description=summary,
        epilog=HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("--out", type=Path, metavar="FILE", help="write the hardware file here")
    command.add_argument(
        "--ranks", type=int, metavar="N", help="start N ranks on this machine and measure them"
    )
    command.add_argument(
        "--device", choices=["cpu", "cuda"], help="default: cuda where there is one"
    )
    command.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="of a CPU rank (default: its part of the cores)",
    )
    command.add_argument(
        "--dtypes",
        default="bfloat16",
        help=f"besides float32, of {', '.join(_DTYPES)}; separated by commas, or none",
    )
    command.add_argument("--like", metavar="PRESET", help="whose figures stand for the unmeasured")
    command.add_argument("--name", help="of the hardware (default: the device and the backend)")
    links = command.add_argument_group(
        "links",
        "the network of the machines to predict, where it is not measured; bytes per second in one "
        "direction and per device, and seconds (default: of --like)",
    )
    for name, metavar in _LINKS.items():
        kind = int if name == "gpus_per_node" else float
        links.add_argument(f"--{name.replace('_', '-')}", type=kind, metavar=metavar)
    command.add_argument(
        "--quick", action="store_true", help="fewer rounds, and on a CPU fewer sizes"
    )
    command.add_argument("--times", action="store_true", help="say how long each stage took")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(run=run_calibrate)


def run_calibrate(options: argparse.Namespace, progress: Progress) -> str:
    """Calibrate and return the measurements as a table; "" on ranks other than 0."""
    dtypes = [_dtype(name) for name in options.dtypes.split(",") if name not in ("", "none")]
    if options.out is not None:
        _require_writable(options.out)
    links = _links(options)
    Hardware.load(options.like or "cpu-gloo").with_(**links)
    if options.ranks is not None:
        return _with_ranks(options)
    device = _device(options.device)
    if device.type == "cpu":
        ranks = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1")
        torch.set_num_threads(_threads(options.threads, int(ranks)))
    with joined(device) as group:
        calibration = calibrate(
            group,
            effort=QUICK if options.quick else Effort(),
            dtypes=dtypes,
            like=options.like,
            name=options.name,
            share=_QUICK_SHARE if options.quick and device.type == "cpu" else 1.0,
            progress=progress,
            links=links,
        )
    if int(os.environ.get("RANK", "0")):
        return ""
    if options.out is None:
        return report(calibration)
    calibration.hardware.save(options.out)
    return f"{report(calibration)}\n{options.out}"


def _links(options: argparse.Namespace) -> dict[str, float]:
    given = {name: getattr(options, name) for name in _LINKS}
    return {name: value for name, value in given.items() if value is not None}


def _dtype(name: str) -> torch.dtype:
    if name not in _DTYPES:
        raise CostError(f"--dtypes takes {', '.join(_DTYPES)} or none; got {name!r}")
    return _DTYPES[name]


def _device(requested: str | None) -> torch.device:
    if requested == "cuda" and not torch.cuda.is_available():
        raise CostError("there is no CUDA device here; measure the CPU with --device cpu")
    if (requested or ("cuda" if torch.cuda.is_available() else "cpu")) == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    return device


def _threads(requested: int | None, ranks: int) -> int:
    if requested is not None and requested < 1:
        raise CostError(f"--threads must be 1 or more; got {requested}")
    return requested or max(1, (os.cpu_count() or 1) // ranks)


def _require_writable(path: Path) -> None:
    """Raise before measuring if `path` cannot be written; an existing file is not changed."""
    existed = path.exists()
    with path.open("a"):
        pass
    if not existed:
        path.unlink()


def _with_ranks(options: argparse.Namespace) -> str:
    """Start the ranks by torchrun with these arguments; they print the output."""
    if options.ranks < 1:
        raise CostError(f"--ranks must be 1 or more; got {options.ranks}")
    if "RANK" in os.environ:
        raise CostError("--ranks starts ranks, and this is one; leave it out under torchrun")
    if options.ranks > 1:
        require_unmeasured(_links(options), {"intra_bandwidth", "intra_latency"})
    device = _device(options.device)
    if device.type == "cuda" and options.ranks > torch.cuda.device_count():
        raise CostError(
            f"--ranks {options.ranks} needs as many CUDA devices; there are "
            f"{torch.cuda.device_count()}"
        )
    threads = str(_threads(options.threads, options.ranks))
    arguments = ["--device", device.type, "--threads", threads, "--dtypes", options.dtypes]
    for name in ("out", "like", "name", *_LINKS):
        if getattr(options, name) is not None:
            arguments += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    arguments += [f"--{name}" for name in ("quick", "times", "debug") if getattr(options, name)]
    launcher = ["-m", "torch.distributed.run", "--standalone"]
    command = [f"--nproc-per-node={options.ranks}", "-m", "graphshard", "calibrate", *arguments]
    sys.stdout.flush()
    completed = subprocess.run(
        [sys.executable, *launcher, *command], env={**os.environ, "OMP_NUM_THREADS": threads}
    )
    if completed.returncode:
        raise CostError("a rank failed while measuring; its error is above")
    return ""


def report(calibration: Calibration) -> str:
    """Return a table of each operator, collective and optimizer, and the hardware's figures."""
    return "\n".join(_lines(calibration))


def _lines(calibration: Calibration) -> Iterator[str]:
    hardware = calibration.hardware
    yield f"hardware    {hardware}"
    yield f"source      {hardware.source}"
    for note in calibration.notes:
        yield f"measured    {note}"
    yield ""
    head = f"{'measured':37}  {'sizes':>5}  {'smallest':>9}  {'largest':>9}  {'rate':>14}  spread"
    yield head
    yield "-" * len(head)
    by_name: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in calibration.rows:
        by_name[row.group, row.name].append(row)
    for (group, name), rows in by_name.items():
        yield _line(group, name, rows)
    yield ""
    for name, (call, tensor, byte) in sorted(hardware.lines.items()):
        rate = f"{1 / byte / 1e9:.2f} GB/s" if byte else "any rate"
        yield f"{name:22}  {_time(call)} a call + {_time(tensor)} a tensor + bytes at {rate}"
    if hardware.contention:
        yield f"communication takes {hardware.contention:.0%} of compute's speed while under way"
    yield f"a step takes {_time(hardware.step_overhead)} besides its operators"
    yield f"operators take {hardware.in_step:.3f} times as long within a step as one by one"
    yield (
        "rate: at the largest size, FLOPs counted for products, bytes for the rest; spread: median "
        "over sizes of the interquartile range, as a part of the median"
    )


def _line(group: str, name: str, rows: Sequence[Row]) -> str:
    ordered = sorted(rows, key=lambda row: row.amount)
    first, last = ordered[0], ordered[-1]
    spread = median(row.spread for row in rows)
    rate = _rate(last) if group != "overhead" else ""
    return (
        f"{name:37}  {len({row.amount for row in rows}):5}  {_time(first.seconds):>9}  "
        f"{_time(last.seconds):>9}  {rate:>14}  {spread:6.1%}"
    )


_PRODUCTS = ("matmul", "bmm", "grouped_mm", "attention", "convolution")


def _rate(row: Row) -> str:
    if row.group == "warm-up" or (row.group == "operators" and row.name.startswith(_PRODUCTS)):
        return f"{row.rate / 1e9:.1f} GFLOP/s"
    return f"{row.rate / 1e9:.2f} GB/s"


def _time(seconds: float) -> str:
    """Return seconds as text with a unit, to three digits."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if seconds * factor >= 1:
            return f"{seconds * factor:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"

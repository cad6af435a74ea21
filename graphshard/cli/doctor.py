"""`graphshard doctor`: versions, devices and backends, and what of each works here."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import platform
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import graphshard
from graphshard.format import human_bytes
from graphshard.progress import Progress

PACKAGES = {
    "networkx": "core",
    "rich": "core",
    "transformers": "graphshard[hf]: Trainer",
    "accelerate": "graphshard[hf]: Accelerator",
    "peft": "adapters of graphshard.hf",
    "trl": "trainers for graphshard.hf.ShardedTrainer",
    "lightning": "graphshard[lightning]: Lightning's strategy",
    "matplotlib": "graphshard[plot]: plots of a step",
    "bokeh": "graphshard[report]: a page to look at",
    "pyyaml": "graphshard[yaml]: policies from YAML",
    "triton": 'backend="inductor" on CUDA',
}
"""Packages beside torch, and what each serves."""

Row = tuple[str, str, str]


def add_doctor(commands: Any) -> None:
    """Add the command to the parser of all commands."""
    summary = "print versions, devices and backends, and try what works on this machine"
    command: argparse.ArgumentParser = commands.add_parser(
        "doctor", help=summary, description=summary
    )
    command.add_argument("--times", action="store_true", help="say how long each stage took")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(run=run_doctor)


def run_doctor(options: argparse.Namespace, progress: Progress) -> str:
    """Run `graphshard doctor`; return its three lists."""
    parts = [("Versions", [*_versions()]), ("Devices and backends", [*_devices()])]
    with progress.stage("try"):
        parts.append(("Tried here", [*_tried()]))
    widths = [max(len(row[column]) for _, rows in parts for row in rows) for column in (0, 1)]
    lines = []
    for heading, rows in parts:
        lines += ["", heading]
        lines += [
            f"  {name:{widths[0]}}  {value:{widths[1]}}  {note}".rstrip()
            for name, value, note in rows
        ]
    return "\n".join(lines[1:])


def _versions() -> Iterator[Row]:
    yield "graphshard", version_of("graphshard"), str(Path(graphshard.__path__[0]))
    yield "Python", platform.python_version(), platform.platform()
    yield "torch", torch.__version__, f"CUDA {torch.version.cuda or 'none'}"
    for name, serves in PACKAGES.items():
        yield name, version_of(name), serves


def version_of(package: str) -> str:
    """The installed version of `package`, or "not installed"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _devices() -> Iterator[Row]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS")
    limit = f"OMP_NUM_THREADS={threads}" if threads else "OMP_NUM_THREADS is not set"
    yield "CPU", f"{cores} cores", f"{torch.get_num_threads()} threads of torch ({limit})"
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        capability = f"compute capability {found.major}.{found.minor}"
        memory = human_bytes(found.total_memory)
        yield f"cuda:{index}", found.name, f"{memory}, {capability}"
    if not torch.cuda.device_count():
        built = "torch is built with CUDA, but finds no device" if torch.version.cuda else ""
        yield "CUDA", "none", built or "torch is built without CUDA"
    yield "Gloo", *_available("gloo", "ranks on CPUs")
    yield "NCCL", *_available("nccl", "ranks on CUDA devices")


def _available(backend: str, serves: str) -> tuple[str, str]:
    if not dist.is_available() or not dist.is_backend_available(backend):
        return "no", f"{serves}: torch is built without it"
    if backend == "nccl":
        if not torch.cuda.is_available():
            return "no", f"{serves}: there is no device"
        return ".".join(map(str, torch.cuda.nccl.version())), serves
    return "yes", serves


# -- trying ----------------------------------------------------------------------------------------


def _tried() -> Iterator[Row]:
    yield _try("plan, dump, simulate", _plans)
    yield _try("training on a CPU rank", lambda: _trains("cpu", "eager"))
    yield _try('backend="inductor" on a CPU rank', lambda: _trains("cpu", "inductor"))
    if torch.cuda.is_available():
        yield _try("training on a CUDA rank", lambda: _trains("cuda", "eager"))
        yield _try('backend="inductor" on a CUDA rank', lambda: _trains("cuda", "inductor"))
    else:
        yield "training on a CUDA rank", "not tried", "there is no CUDA device"


def _try(what: str, attempt: Callable[[], str]) -> Row:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return what, "works", attempt()
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        return what, "FAILS", f"{type(error).__name__}: {lines[0]}"


def _model() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 1))


def _plans() -> str:
    with torch.device("meta"):
        model = _model()
    plan = graphshard.plan(
        model,
        graphshard.BlockPolicy({nn.Linear}),
        world_size=8,
        example_inputs=(torch.empty(4, 16, device="meta"),),
    )
    return f"{len(plan.units)} units on 8 ranks"


def _trains(device: str, backend: Any) -> str:
    torch.manual_seed(0)
    model = _model().to(device)
    batch = torch.randn(4, 16, device=device)
    expected = model(batch).mean()
    expected.backward()
    with _one_rank("nccl" if device == "cuda" else "gloo"):
        policy = graphshard.BlockPolicy({nn.Linear})
        sharded = graphshard.compile(model, policy, backend=backend)
        loss = sharded(batch).mean()
        loss.backward()
        torch.testing.assert_close(loss, expected)
        shards: dict[str, Any] = dict(sharded.named_parameters())
        for name, param in model.named_parameters():
            torch.testing.assert_close(shards[name].grad.full_tensor(), param.grad)
    return f"a step on {device} equals the model's own"


@contextmanager
def _one_rank(backend: str) -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    with tempfile.TemporaryDirectory() as folder:
        address = Path(folder, "store").as_uri()
        dist.init_process_group(backend, init_method=address, rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()

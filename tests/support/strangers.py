"""Files that somebody changed, read by graphshard: refused, or read as what they say.

`PYTHONPATH=. python tests/support/strangers.py --count 500` reads 500 changed files of each kind
and prints the outcomes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import yaml
from mutations import mutate
from paths import ROOT
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.optim.lr_scheduler import StepLR
from torch.serialization import set_crc32_options

import graphshard
from graphshard.cost.against_trace import read_trace
from graphshard.errors import CheckpointError, CostError, GraphshardError, PolicyError
from graphshard.hardware.hardware import Hardware
from graphshard.state.consolidate import plan_consolidation
from graphshard.state.files import open_files

SECONDS = 20
"""A read that takes longer hangs."""


MORE_BYTES = 400 << 20
"""The most by which all reads of a kind may raise the peak of memory."""


class HungError(BaseException):
    """A read took too long."""


class BrokenPromiseError(AssertionError):
    """A changed file was read as what it does not say, or ended in an error of another class."""


@dataclass(frozen=True)
class Kind:
    """One kind of file.

    write: makes good files in an empty folder.
    read: the value of a folder, comparable by `same`.
    error: the class of the errors that `read` may raise.
    says: what another reader finds in a folder; raises ValueError if it finds nothing. None: any
        change must be noticed, unless it changes no value.
    """

    write: Callable[[Path], None]
    read: Callable[[Path], Any]
    error: type[GraphshardError]
    says: Callable[[Path], Any] | None = None


# -- tensors --------------------------------------------------------------------------------------


def tensors() -> dict[str, Tensor]:
    chance = torch.Generator().manual_seed(3)
    return {
        "a.weight": torch.randn(4, 3, generator=chance),
        "b.half": torch.randn(5, generator=chance).bfloat16(),
        "c.flags": torch.tensor([True, False, True]),
        "d.empty": torch.zeros(0, 2),
        "e.count": torch.tensor(7),
    }


def plain(state: dict[str, Any]) -> dict[str, Any]:
    """Tensors as their dtype, shape and bytes, so that NaN equals itself."""
    return {name: _plain(value) for name, value in state.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        whole = value.detach().contiguous()
        raw = whole.reshape(-1).view(torch.uint8).tolist() if whole.numel() else []
        return str(whole.dtype), tuple(whole.shape), bytes(raw)
    if isinstance(value, dict):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return [_plain(inner) for inner in value] if isinstance(value, list | tuple) else value


def write_safetensors(folder: Path) -> None:
    save_file(tensors(), folder / "model.safetensors", {"format": "pt"})


def write_index(folder: Path) -> None:
    whole = tensors()
    files = {"x.safetensors": ["a.weight", "c.flags"], "y.safetensors": ["b.half", "e.count"]}
    for file, names in files.items():
        save_file({name: whole[name] for name in names}, folder / file)
    weight_map = {name: file for file, names in files.items() for name in names}
    index = {"metadata": {"total_size": 69}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))


def read_tensors(folder: Path) -> Any:
    entries = open_files(folder)
    return plain(
        {
            name: entry.read(tuple(slice(0, size) for size in entry.shape))
            for name, entry in entries.items()
        }
    )


def tensors_by_library(folder: Path) -> Any:
    """The same by safetensors' own reader."""
    index = folder / "model.safetensors.index.json"
    try:
        if not index.exists():
            return plain(load_file(folder / "model.safetensors"))
        weight_map = json.loads(index.read_bytes())["weight_map"]
        files = {file: load_file(folder / file) for file in set(weight_map.values())}
        return plain({name: files[file][name] for name, file in weight_map.items()})
    except (SafetensorError, OSError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


# -- checkpoints ----------------------------------------------------------------------------------


@cache
def module_and_optimizer() -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(0)
    policy = graphshard.BlockPolicy({nn.Linear})
    module = graphshard.compile(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), policy)
    optim = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.ones(2, 3)).sum().backward()
    optim.step()
    return module, optim


EXTRA = {"step": 7, "shares": [0.5, None], "order": torch.arange(5)}


def write_ours(folder: Path) -> None:
    module, optim = module_and_optimizer()
    module.save_checkpoint(folder / "c", optim, StepLR(optim, 30), extra=EXTRA)


def write_torch(folder: Path) -> None:
    module, optim = module_and_optimizer()
    state = {"model": module.state_dict(), "optim": module.optimizer_state_dict(optim)}
    state |= {"scheduler": StepLR(optim, 30).state_dict(), "extra": EXTRA}
    checkpoint.save(state, checkpoint_id=folder / "c", no_dist=True)


def write_torch_without_checksums(folder: Path) -> None:
    set_crc32_options(False)
    try:
        write_torch(folder)
    finally:
        set_crc32_options(True)


def read_checkpoint(folder: Path) -> Any:
    module, optim = module_and_optimizer()
    with torch.no_grad():
        for param in module.parameters():
            param.zero_()
    scheduler, extra = StepLR(optim, 7), dict.fromkeys(EXTRA)
    module.load_checkpoint(folder / "c", optim, scheduler, extra=extra)
    states = {"optim": module.optimizer_state_dict(optim), "scheduler": scheduler.state_dict()}
    return plain({**module.state_dict(), **states, "extra": extra})


def read_consolidated(folder: Path) -> Any:
    out = folder / "out"
    shutil.rmtree(out, ignore_errors=True)
    plan_consolidation(folder / "c", out).run()
    return plain(load_file(out / "model.safetensors"))


def write_lightning(folder: Path) -> None:
    state = {"epoch": 3, "state_dict": tensors(), "loops": {"a": [1, 2.5, None, "x"]}}
    torch.save(state, folder / "last.ckpt")


def read_lightning(folder: Path) -> Any:
    from graphshard import lightning

    return plain(lightning.read_file(folder / "last.ckpt", trust=False))


# -- configurations -------------------------------------------------------------------------------


DEEPSPEED = {
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "overlap_comm": True,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": 20000000,
    },
    "bf16": {"enabled": True},
    "fp16": {"enabled": "auto", "loss_scale": 0},
    "communication_data_type": "fp32",
    "gradient_clipping": 1.0,
}

ACCELERATE = """\
compute_environment: LOCAL_MACHINE
debug: false
distributed_type: FSDP
downcast_bf16: 'no'
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch_policy: BACKWARD_PRE
  fsdp_forward_prefetch: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_ignored_modules: '.*norm'
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: BertLayer
machine_rank: 0
mixed_precision: bf16
num_machines: 1
num_processes: 2
tpu_env: []
use_cpu: false
"""


def write_deepspeed(folder: Path) -> None:
    (folder / "ds.json").write_text(json.dumps(DEEPSPEED, indent=1))


def write_accelerate(folder: Path) -> None:
    (folder / "config.yaml").write_text(ACCELERATE)


def read_deepspeed(folder: Path) -> Any:
    return repr(graphshard.from_deepspeed(folder / "ds.json"))


def read_accelerate(folder: Path) -> Any:
    return repr(graphshard.from_accelerate(folder / "config.yaml"))


def deepspeed_by_json(folder: Path) -> Any:
    return repr(graphshard.from_deepspeed(json.loads((folder / "ds.json").read_bytes())))


def accelerate_by_yaml(folder: Path) -> Any:
    try:
        return repr(
            graphshard.from_accelerate(yaml.safe_load((folder / "config.yaml").read_text()))
        )
    except Exception as error:
        raise ValueError(str(error)) from error


def write_hardware(folder: Path) -> None:
    Hardware.load("cpu-gloo").save(folder / "mine.json")


def read_hardware(folder: Path) -> Any:
    return json.loads(json.dumps(Hardware.load(folder / "mine.json").to_dict()))


def hardware_by_json(folder: Path) -> Any:
    """The figures in the file; those it leaves out, from `Hardware` itself."""
    data = json.loads((folder / "mine.json").read_bytes())
    return json.loads(json.dumps(Hardware(**{"name": "mine", **data}).to_dict()))


# -- traces ---------------------------------------------------------------------------------------


def write_trace(folder: Path) -> None:
    """Two halves on threads of their own, with kernels that they launch on one stream."""

    def event(name: str, kind: str, tid: int, begin: float, end: float, **args: int) -> Any:
        times = {"ts": begin, "dur": end - begin}
        return {"ph": "X", "name": name, "cat": kind, "pid": 5, "tid": tid, "args": args, **times}

    events: list[Any] = [{"ph": "M", "name": "process_name", "pid": 5, "args": {"name": "python"}}]
    for tid, phase in enumerate(("forward", "backward")):
        begin = 100.0 * tid
        events.append(event(f"graphshard {phase}", "cpu_op", tid, begin, begin + 50))
        for place, what in enumerate(("all_gather blocks.0", "compute blocks.0", "compute")):
            at, number = begin + 10 * place + 1, 3 * tid + place
            events.append(event(f"{what} {phase}", "user_annotation", tid, at, at + 5))
            events.append(event("launch", "cuda_runtime", tid, at + 1, at + 2, correlation=number))
            kernel = {"correlation": number, "device": 0, "stream": 7}
            events.append(event("kernel", "kernel", 7, at + 3, at + 9, **kernel))
    data = {"distributedInfo": {"rank": 1}, "traceEvents": events}
    (folder / "trace.json").write_text(json.dumps(data, indent=1))


def read_profile(folder: Path) -> Any:
    run = read_trace(folder / "trace.json")
    halves: list[Any] = []
    for half in run.halves:
        inside = [
            (each.name, each.begin, each.end, *((k.stream, k.begin, k.end) for k in each.kernels))
            for each in half.events
        ]
        halves.append((half.phase, half.begin, half.end, *inside))
    return run.rank, halves


def profile_by_json(folder: Path) -> Any:
    """The same by looking through all events for each half and for each of its events."""
    data = json.loads((folder / "trace.json").read_bytes())
    events, rank = (
        (data["traceEvents"], data.get("distributedInfo")) if type(data) is dict else (data, 0)
    )
    rank = rank.get("rank") if isinstance(rank, dict) else None
    rows = []
    for event in events:
        if not isinstance(event, dict) or event.get("ph") != "X":
            continue
        times = event.get("ts"), event.get("dur", 0)
        if not isinstance(event.get("name"), str) or any(
            type(time) not in (int, float) or not abs(time) < 2**63 for time in times
        ):
            continue
        args = event.get("args") if isinstance(event.get("args"), dict) else {}
        link = args.get("correlation") if type(args.get("correlation")) is int else None
        thread = str(event.get("pid")), str(event.get("tid"))
        begin, end = times[0] * 1e-6, sum(times) * 1e-6
        stream = f"{args.get('device')}/{args.get('stream')}"
        rows.append((event["name"], str(event.get("cat", "")), thread, begin, end, link, stream))
    device = ("kernel", "gpu_memcpy", "gpu_memset")
    halves = []
    host = [r for r in rows if r[1] not in (*device, "cuda_runtime", "cuda_driver")]
    host = [r for r in host if not r[1].startswith("gpu_")]
    names = {f"graphshard {phase}": phase for phase in ("forward", "backward")}
    for name, _, thread, begin, end, _, _ in host:
        if name not in names:
            continue
        phase, inside = names[name], []
        for other, _, where, start, stop, _, _ in sorted(host, key=lambda r: r[3]):
            fits = where == thread and begin <= start and stop <= end and start <= end
            if not fits or other in names or not other.endswith(f" {phase}"):
                continue
            launches = [r for r in rows if r[1].startswith("cuda_") and r[2] == thread]
            launches = [r for r in launches if r[1] in ("cuda_runtime", "cuda_driver")]
            launches = [r for r in launches if start <= r[3] <= stop]
            kernels = [
                (r[6], r[3], r[4])
                for launch in sorted(launches, key=lambda r: r[3])
                for r in rows
                if r[1] in device and r[5] == launch[5]
            ]
            inside.append((other, start, stop, *kernels))
        halves.append((phase, begin, end, *inside))
    return (rank if type(rank) is int else None), sorted(halves, key=lambda half: half[1])


KINDS = {
    "safetensors": Kind(write_safetensors, read_tensors, CheckpointError, tensors_by_library),
    "index": Kind(write_index, read_tensors, CheckpointError, tensors_by_library),
    "checkpoint": Kind(write_ours, read_checkpoint, CheckpointError),
    "torch": Kind(write_torch, read_checkpoint, CheckpointError),
    "torch-unsummed": Kind(write_torch_without_checksums, read_checkpoint, CheckpointError),
    "consolidate": Kind(write_torch, read_consolidated, CheckpointError),
    "lightning": Kind(write_lightning, read_lightning, CheckpointError),
    "deepspeed": Kind(write_deepspeed, read_deepspeed, PolicyError, deepspeed_by_json),
    "accelerate": Kind(write_accelerate, read_accelerate, PolicyError, accelerate_by_yaml),
    "hardware": Kind(write_hardware, read_hardware, CostError, hardware_by_json),
    "trace": Kind(write_trace, read_profile, CostError, profile_by_json),
}


WITHOUT_CHECKSUMS = frozenset({"torch-unsummed"})
"""Kinds in which a changed byte may be read as another value of the same shape."""


# -- playing --------------------------------------------------------------------------------------


@contextmanager
def limited() -> Iterator[None]:
    """Raise `HungError` where the body takes too long."""

    def hung(*_: Any) -> None:
        raise HungError

    before = signal.signal(signal.SIGALRM, hung)
    signal.setitimer(signal.ITIMER_REAL, SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Player:
    """Changes and reads files of one kind in a folder."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.kind = name, KINDS[name]
        self.good, self.bad = folder / "good", folder / "bad"
        self.good.mkdir(parents=True)
        self.kind.write(self.good)
        self.value = self.kind.read(self.good)
        self.files = [f.relative_to(self.good) for f in sorted(self.good.rglob("*")) if f.is_file()]

    def play(self, seed: int) -> str:
        """Change one file and read: "refused", "same" (as before) or "as it says"."""
        chance = random.Random(f"{self.name} {seed}")
        shutil.rmtree(self.bad, ignore_errors=True)
        shutil.copytree(self.good, self.bad)
        file = chance.choice([f for f in self.files if "out" not in f.parts])
        change = mutate(self.bad / file, chance)
        told = f"{self.name} {seed}: {change} in {file}"
        try:
            with limited():
                value = self.kind.read(self.bad)
        except self.kind.error as error:
            if not str(error) or len(str(error)) > 2000:
                raise BrokenPromiseError(f"{told}: {len(str(error))} characters") from error
            return "refused"
        except (HungError, Exception) as error:
            raise BrokenPromiseError(f"{told}: {type(error).__name__}: {error}") from error
        if value == self.value:
            return "same"
        return self._judged(value, told, file)

    def _judged(self, value: Any, told: str, file: Path) -> str:
        if self.name in WITHOUT_CHECKSUMS:
            before, after = (folder.joinpath(file).read_bytes() for folder in (self.good, self.bad))
            changed = sum(a != b for a, b in zip(before, after, strict=False))
            if len(before) == len(after) and 0 < _changed_bytes(self.value, value) <= changed:
                return "as it says"
            raise BrokenPromiseError(f"{told}: more changed than in the file")
        if self.kind.says is None:
            raise BrokenPromiseError(f"{told}: another value in silence")
        try:
            says = self.kind.says(self.bad)
        except (ValueError, TypeError, GraphshardError) as error:
            raise BrokenPromiseError(f"{told}: another reader refuses it: {error}") from error
        if says != value:
            raise BrokenPromiseError(f"{told}: another reader finds another value")
        return "as it says"


def _changed_bytes(old: Any, new: Any) -> int:
    """The bytes of tensors, and the other values, that differ; -1 if names or shapes do."""
    if isinstance(old, dict) and isinstance(new, dict) and old.keys() == new.keys():
        counts = [_changed_bytes(old[key], new[key]) for key in old]
        return -1 if -1 in counts else sum(counts)
    if isinstance(old, tuple) and isinstance(new, tuple) and old[:2] == new[:2]:
        return sum(a != b for a, b in zip(old[2], new[2], strict=True))
    if isinstance(old, dict | tuple) or isinstance(new, dict | tuple):
        return -1
    return int(old != new)


def run(name: str, first: int, count: int) -> Counter[str]:
    """Play `count` seeds of a kind in this process; outcomes by their number."""
    with tempfile.TemporaryDirectory() as folder:
        player = Player(name, Path(folder))
        player.play(first)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        outcomes = Counter(player.play(seed) for seed in range(first, first + count))
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    if grown > MORE_BYTES:
        raise BrokenPromiseError(f"{name}: memory grew by {grown} bytes")
    return outcomes


def run_apart(name: str, first: int, count: int) -> dict[str, int]:
    """As `run`, in a process of its own, so that its death is an error."""
    command = [sys.executable, __file__, "--kind", name, "--first", str(first)]
    done = subprocess.run(
        [*command, "--count", str(count)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    if done.returncode:
        raise BrokenPromiseError(f"{name} ended with {done.returncode}: {done.stderr[-3000:]}")
    outcomes: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return outcomes


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=500)
    options = parser.parse_args()
    if options.kind:
        print(json.dumps(run(options.kind, options.first, options.count)))
        return
    for name in KINDS:
        print(name, run_apart(name, options.first, options.count), flush=True)


if __name__ == "__main__":
    main()

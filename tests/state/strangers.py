"""Files that somebody changed, read by graphshard: refused, or read as what they say.

`PYTHONPATH=. python tests/state/strangers.py --count 500` reads 500 changed files of each kind
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
from mutations import mutate
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed import checkpoint
from torch.optim.lr_scheduler import StepLR
from torch.serialization import set_crc32_options

import graphshard
from graphshard.cli.consolidate import plan_consolidation
from graphshard.errors import CheckpointError, GraphshardError
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
    says: what another reader finds in a folder; raises ValueError if it finds nothing. None: any
        change must be noticed, unless it changes no value.
    """

    write: Callable[[Path], None]
    read: Callable[[Path], Any]
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


KINDS = {
    "safetensors": Kind(write_safetensors, read_tensors, tensors_by_library),
    "index": Kind(write_index, read_tensors, tensors_by_library),
    "checkpoint": Kind(write_ours, read_checkpoint),
    "torch": Kind(write_torch, read_checkpoint),
    "torch-unsummed": Kind(write_torch_without_checksums, read_checkpoint),
    "consolidate": Kind(write_torch, read_consolidated),
    "lightning": Kind(write_lightning, read_lightning),
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
        except CheckpointError as error:
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
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
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

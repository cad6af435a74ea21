"""Runs a script of which one rank kills itself in the midst of what it does.

    torchrun ... tests/support/killed_script.py examples/train_restartable.py ARGUMENTS

KILLS, in the environment, is a JSON list of kills: {"rank": 1, "in": "forward", "call": 3, "after":
20} is a SIGKILL of rank 1 in its third call of forward, at the 20th operator. Each writes a line to
the file KILLED before, and the next start of the ranks by torchrun takes the next one; a start that
failed otherwise, as where a port was taken, is made up for. The ranks also draw from Python's and
numpy's random numbers in every forward, so that their states change, and wait PAUSE seconds.
"""

from __future__ import annotations

import json
import os
import random
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import graphshard
from graphshard.state.state_tensors import StateTensor


class Killer:
    """Kills this process at the `after`-th event within the `call`-th call of a function."""

    def __init__(self, kill: dict[str, Any]) -> None:
        self.kill = kill
        self.calls = self.events = 0
        self.active = False

    def event(self, what: str) -> None:
        if not self.active:
            return
        self.events += 1
        if self.events == self.kill["after"]:
            with Path(os.environ["KILLED"]).open("a") as file:
                file.write(f"rank {os.environ['RANK']} in {self.kill['in']}: {what}\n")
            os.kill(os.getpid(), signal.SIGKILL)

    def around(self, function: Callable[..., Any], *, operators: bool) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls != self.kill["call"]:
                return function(*args, **kwargs)
            self.active = True
            try:
                if not operators:
                    return function(*args, **kwargs)
                with Operators(self):
                    return function(*args, **kwargs)
            finally:
                self.active = False

        return inner

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def inner(*args: Any, **kwargs: Any) -> Any:
            self.event(function.__name__)
            return function(*args, **kwargs)

        return inner


class Operators(TorchDispatchMode):
    """Each operator is an event."""

    def __init__(self, killer: Killer) -> None:
        super().__init__()
        self.killer = killer

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.killer.event(str(function))
        return function(*args, **(kwargs or {}))


PLACES: dict[str, tuple[Any, str, bool]] = {
    "forward": (graphshard.ShardedModule, "forward", True),
    "backward": (torch.Tensor, "backward", True),
    "optimizer": (torch.optim.AdamW, "step", True),
    "save": (graphshard.ShardedModule, "save_checkpoint", False),
    "load": (graphshard.ShardedModule, "load_checkpoint", False),
}


def drawing(forward: Callable[..., Any]) -> Callable[..., Any]:
    def inner(*args: Any, **kwargs: Any) -> Any:
        random.random()
        numpy.random.random()
        time.sleep(float(os.environ.get("PAUSE", "0")))
        return forward(*args, **kwargs)

    return inner


def main() -> None:
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    kills = json.loads(os.environ.get("KILLS", "[]"))
    seed = 1000 * int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) + int(os.environ["RANK"])
    random.seed(seed)
    numpy.random.seed(seed)
    told = Path(os.environ["KILLED"])
    kills = kills[len(told.read_text().splitlines()) if told.exists() else 0 :]
    kill = kills[0] if kills else None
    module = graphshard.ShardedModule
    with patch.object(module, "forward", drawing(module.forward)):
        if kill is None or kill["rank"] != int(os.environ["RANK"]):
            runpy.run_path(sys.argv[0], run_name="__main__")
            return
        killer = Killer(kill)
        owner, name, operators = PLACES[kill["in"]]
        around = killer.around(getattr(owner, name), operators=operators)
        with (
            patch.object(owner, name, around),
            patch("os.fsync", killer.before(os.fsync)),
            patch.object(StateTensor, "write", killer.before(StateTensor.write)),
        ):
            runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()

"""A sharded module in the middle of training, and a table of its calls that communicate."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from state_checks import shared_folder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard

LINEAR = graphshard.BlockPolicy({nn.Linear})
X = torch.ones(2, 4)


class Config:
    """A configuration as transformers models have one."""

    def save_pretrained(self, folder: Path) -> None:
        (Path(folder) / "config.json").write_text(json.dumps({"new": True}))


class Model(nn.Module):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.config = Config()
        self.first = nn.Linear(4, width)
        self.second = nn.Linear(width, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x)) * self.scale


class Setup:
    """A sharded module with gradients, its optimizer with state, and files of other values."""

    def __init__(self, rank: int, mesh: DeviceMesh | None = None) -> None:
        self.rank = rank
        self.mesh = mesh
        self.models = Model(), Model(5)
        self.folder = shared_folder()
        self.module = graphshard.compile(Model(), LINEAR, mesh=mesh)
        self.optim = torch.optim.AdamW(self.module.parameters(), lr=0.1)
        for folder in ("old", "pretrained"):
            self.step()
            self.module.save_checkpoint(self.folder / folder, self.optim)
        self.module.save_safetensors(self.folder / "old.safetensors")
        self.step()
        self.step(update=False)

    def step(self, *, update: bool = True) -> None:
        self.module.zero_grad()
        self.module(X).sum().backward()
        if update:
            self.optim.step()

    def snapshot(self) -> dict[str, Any]:
        """All that a call could change."""
        tensors: dict[str, Any] = dict(self.module.local_state_dict())
        for name, param in self.module.named_parameters():
            tensors[f"grad of {name}"] = param.grad.to_local()
            assert self.module.get_parameter(name) is param
        for index, state in enumerate(self.optim.state.values()):
            for key, value in state.items():
                local = value.to_local() if hasattr(value, "to_local") else value
                tensors[f"{key} of {index}"] = local
        files = {str(f): f.read_bytes() for f in sorted(self.folder.rglob("*")) if f.is_file()}
        return {name: t.clone() for name, t in tensors.items()} | {
            "files": files,
            "random": torch.get_rng_state(),
        }

    def require_unchanged(self, before: dict[str, Any]) -> None:
        after = self.snapshot()
        assert before.keys() == after.keys()
        for name, value in before.items():
            if name == "files":
                assert {*value} == {*after[name]}
                assert value == after[name]
            else:
                assert torch.equal(value, after[name]), name


Entry = Callable[[Setup, bool], Any]


def _save(setup: Setup, other: bool, **options: Any) -> Any:
    path = setup.folder / ("other" if other else "new")
    saving = setup.module.save_checkpoint(path, setup.optim, **options)
    return saving.result() if isinstance(saving, Future) else None


def _unsharded(setup: Setup, other: bool) -> None:
    with setup.module.unsharded(with_grads=other) as params, torch.no_grad():
        params["first.weight"] += 1
        if "fails in the body" in vars(setup):
            raise ValueError("on purpose")


def _compile(setup: Setup, other: bool) -> None:
    policy = graphshard.BlockPolicy({nn.Linear}, strategy="SHARD_GRAD_OP" if other else "NO_SHARD")
    inputs = torch.ones(2, 5 if "takes no such input" in vars(setup) else 4)
    graphshard.compile(setup.models[0], policy, mesh=setup.mesh, example_inputs=(inputs,))


ENTRIES: dict[str, Entry] = {
    "clip_grad_norm_": lambda s, other: s.module.clip_grad_norm_(2.0 if other else 1.0),
    "full_state_dict": lambda s, other: s.module.full_state_dict(rank0_only=not other),
    "optimizer_state_dict": lambda s, other: s.module.optimizer_state_dict(
        s.optim, kind="full", rank0_only=not other
    ),
    "save_checkpoint": _save,
    "save_checkpoint, background": lambda s, other: _save(s, other, background=True),
    "load_checkpoint": lambda s, other: s.module.load_checkpoint(
        s.folder / ("pretrained" if other else "old"), s.optim
    ),
    "save_safetensors": lambda s, other: s.module.save_safetensors(
        s.folder / "new.safetensors", dtype=torch.float64 if other else None
    ),
    "save_pretrained": lambda s, other: s.module.save_pretrained(
        s.folder / "pretrained", max_shard_bytes=100 if other else 60
    ),
    "load_safetensors": lambda s, other: s.module.load_safetensors(
        s.folder / "old.safetensors", strict=not other
    ),
    "load_full_state_dict": lambda s, other: s.module.load_full_state_dict(
        s.models[other].state_dict()
    ),
    "load_optimizer_state_dict": lambda s, other: s.module.load_optimizer_state_dict(
        s.optim, s.optim_state, kind="local" if other else None
    ),
    "unsharded": _unsharded,
    "compile": _compile,
}
"""Each with `other` arguments than those that are the same on all ranks."""


def prepared(rank: int, mesh: DeviceMesh | None = None) -> Setup:
    setup = Setup(rank, mesh)
    setup.optim_state = setup.module.optimizer_state_dict(setup.optim)
    return setup

"""One case of the fuzzer: a model, a policy, a protocol of training, as plain data on one line."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class Case:
    """What both sides build and do; JSON holds it, without the fields that have their defaults.

    seed: of weights and batches.
    blocks: kinds of blocks (`fuzz_blocks.KINDS`), in the order in which the model calls them.
    dim: width of the activations. root: what the model has besides blocks. output: what it returns.
    dtype: of parameters and inputs. autocast: the dtype of forwards under `torch.autocast`, or "".
    policy: fields of the policy as JSON can hold them, with "kind" and the kind's own fields.
    ranks: number of them. tight: parameters are not padded where another split can help. far: each
    rank says that it is a host of its own, and what is used far apart is moved apart at any size.
    mesh: shape of the mesh; empty for the default one.
    start: where the weights come from. dynamic: sizes are symbols. check: poison freed memory.
    optimizer: name of the optimizer. on_dtensors: whether it steps on DTensors.
    steps: the protocol (`fuzz_protocol.STEPS`), in order.
    """

    seed: int
    blocks: tuple[str, ...] = ("linear",)
    dim: int = 6
    root: str = "plain"
    output: str = "loss"
    dtype: str = "float64"
    autocast: str = ""
    policy: dict[str, Any] = field(default_factory=lambda: {"kind": "block"})
    ranks: int = 2
    tight: bool = False
    far: bool = False
    mesh: tuple[int, ...] = ()
    start: str = "real"
    dynamic: bool = False
    check: bool = False
    backend: str = "eager"
    optimizer: str = "sgd"
    on_dtensors: bool = False
    steps: tuple[str, ...] = ("train",)

    def __str__(self) -> str:
        plain = Case(seed=self.seed)
        values = {
            name: value
            for name, value in asdict(self).items()
            if name == "seed" or value != getattr(plain, name)
        }
        return json.dumps(values)

    @classmethod
    def parse(cls, text: str) -> Case:
        """The case that `text` is the string of."""
        values = json.loads(text)
        known = {each.name for each in fields(cls)}
        if unknown := set(values) - known:
            raise ValueError(f"a case has no {', '.join(sorted(unknown))}; it has {sorted(known)}")
        return cls(
            **{
                name: tuple(value) if isinstance(value, list) else value
                for name, value in values.items()
            }
        )

    @property
    def mixed(self) -> bool:
        """Whether it computes or reduces in another dtype than the parameters'."""
        return "mixed_precision" in self.policy

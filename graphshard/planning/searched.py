"""`PolicySearch`: what stands for a policy that is not found yet."""

from __future__ import annotations

import os
import pickle
from abc import ABC, abstractmethod
from dataclasses import replace
from typing import Any, Self

import torch
from torch import nn

from graphshard.errors import PolicyError
from graphshard.hardware.hardware import Hardware
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.base import Policy
from graphshard.policy.strategy import Strategy


class PolicySearch(ABC):
    """A search that a policy is the result of: `graphshard.AutoPolicy`, whose fields these are.

    Whoever plans knows this class alone, so that the search is loaded by those who make one.
    """

    hardware: Hardware | str | os.PathLike[str] | None
    strategy: str
    seconds: float | None

    @abstractmethod
    def on(self, device: torch.device) -> Self:
        """This search with the hardware set for a model that runs on `device`."""

    @abstractmethod
    def plan(self, model: nn.Module, **arguments: Any) -> ShardingPlan:
        """Search, and return the plan with its program; a note in its policy says so.

        The arguments are those of `AutoPolicy.tune`.
        """


def needs_groups(policy: Policy | PolicySearch) -> bool:
    """Whether `policy` needs a mesh of two dimensions."""
    return policy.strategy != "auto" and Strategy(policy.strategy).hybrid


def asks_for_hardware(policy: Policy | PolicySearch) -> bool:
    """Whether steps are timed for `policy`, and it does not say on which hardware."""
    timed = isinstance(policy, PolicySearch) or policy.schedule == "overlap"
    return timed and policy.hardware is None


def sendable(policy: Policy) -> bytes:
    """`policy` for another rank, which has the objects in `ignored` itself."""
    try:
        return pickle.dumps(replace(policy, ignored=None))
    except Exception as error:  # whatever the user's objects raise
        raise PolicyError(
            "a search with seconds= is that of rank 0, whose policy cannot be sent "
            f"({error}); name classes of units by strings, or leave seconds out"
        ) from error


def received(sent: bytes, own: Policy) -> Policy:
    """The policy that `sendable` made of another rank's, with what `own` ignores."""
    policy: Policy = pickle.loads(sent)
    return replace(policy, ignored=own.ignored)

"""The experts of transformers: their loop over the experts that were chosen, as one over all.

Which experts a batch chooses depends on values, and a graph cannot loop over them. The code for an
expert that no token chose computes on no rows and adds nothing, so a loop over all gives the same
numbers.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private import unbacked
from graphshard.torch_private.patches import patched

_CHOSEN = "expert_hit"
"""The name that transformers gives the numbers of the chosen experts, of shape (chosen, 1)."""


@contextlib.contextmanager
def all_experts() -> Iterator[None]:
    """Let a loop of transformers over the chosen experts run over all."""
    iterate: Callable[[Tensor], Iterator[Tensor]] = Tensor.__iter__

    def over_all(self: Tensor) -> Iterator[Tensor]:
        frame = sys._getframe(1)
        module = frame.f_globals.get("__name__", "")
        if not module.startswith("transformers.") or frame.f_locals.get(_CHOSEN) is not self:
            return iterate(self)
        count = self.shape[0]
        if not unbacked.depends_on_values(count):
            return iterate(self)
        most = torch_compat.size_hint(count)
        return (torch.full((1,), number, device=self.device) for number in range(most))

    with patched(Tensor, "__iter__", over_all):
        yield

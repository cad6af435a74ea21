"""The state of a sharded module besides its parameters and buffers."""

from __future__ import annotations

import contextlib

from torch import nn

from graphshard.capture.traced_module import EntryPoint
from graphshard.errors import RuntimeStateError
from graphshard.module.meta_init import initialize
from graphshard.module.programs import Programs
from graphshard.module.unsharded import Unsharded
from graphshard.runtime.lowered import Bindings
from graphshard.runtime.shards import distinct


class _State:
    """Shards, programs and flags, under one attribute so as not to clash with the model's names."""

    def __init__(
        self,
        bindings: Bindings,
        programs: Programs,
        on_meta: frozenset[str],
    ) -> None:
        self.bindings = bindings
        self.programs = programs
        self.shards = distinct(bindings.shards)
        named = programs.meta_model.named_parameters()
        self.in_model_order = [bindings.shards[name] for name, _ in named]
        self.unsharded = Unsharded(self.shards)
        self.on_meta = on_meta
        self.ready = False
        self.lent = False  # whole parameters, to the model's own code
        self.computing: set[EntryPoint] = set()  # methods that are programs, and set no state alone
        # Whoever loads a buffer writes it in place or replaces it.
        self.empty_buffers = {
            name: (bindings.buffer(name), bindings.buffer(name)._version)
            for name in on_meta
            if name in bindings.buffers
        }

    def fill_buffers(self) -> None:
        """Compute the buffers that a checkpoint left without values, as `init_weights` would."""
        empty = self.unfilled_buffers()
        if empty:
            # One that nothing computes is named when the module is called.
            with contextlib.suppress(RuntimeStateError):
                initialize(self.programs.meta_model, self.bindings, empty, seed=0)

    def unfilled_buffers(self) -> frozenset[str]:
        """The buffers that have no values yet; the same ones on every rank."""
        return frozenset(name for name in self.empty_buffers if self._is_empty(name))

    def _is_empty(self, name: str) -> bool:
        buffer, version = self.empty_buffers[name]
        return self.bindings.buffer(name) is buffer and buffer._version == version

    def refuse_lent(self) -> None:
        """Raise inside of `gathered()` and `run_eagerly()`."""
        if self.lent:
            raise RuntimeStateError(
                "the parameters are gathered for gathered() or run_eagerly(), so that the sharded "
                "module cannot be called; call the model that gathered() gives, or leave it first"
            )

    def require_values(self, module: nn.Module) -> None:
        """Check that every parameter and buffer got a value after the model left meta."""
        for shard in self.shards:
            if not shard.has_values():
                raise RuntimeStateError(
                    f"parameter {shard.layout.fqn!r} has no values yet, since the model was on the "
                    "meta device; call init_weights(), load_full_state_dict(...), or load a "
                    "checkpoint first"
                )
        for name in self.empty_buffers:
            if self._is_empty(name):
                raise RuntimeStateError(
                    f"buffer {name!r} has no values yet, since the model was on the meta device; "
                    "call init_weights() first (before loading, if it is in no checkpoint)"
                )
        self.ready = True

"""`ShardedModule`: what the user trains, one per rank."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx, nn

from graphshard.dynamic import Dynamic
from graphshard.errors import RuntimeStateError
from graphshard.pipeline import Pass, Stages
from graphshard.plan import ShardingPlan
from graphshard.program import Program
from graphshard.runtime.blueprint import blueprint_of
from graphshard.runtime.fingerprint import Agreement
from graphshard.runtime.group import Group
from graphshard.runtime.half import Bindings
from graphshard.runtime.meta_init import initialize
from graphshard.runtime.own_parameter import make_shards
from graphshard.runtime.programs import Programs
from graphshard.runtime.scaler import let_scalers_agree
from graphshard.runtime.shards import distinct
from graphshard.runtime.skeleton import Modes, build_skeleton
from graphshard.runtime.standing import watch_state_dicts
from graphshard.runtime.training_methods import TrainingMethods
from graphshard.runtime.unshard import Unsharded
from graphshard.state.load import take_over
from graphshard.state.methods import StateMethods
from graphshard.tracing import MAIN


class ShardedModule(StateMethods, TrainingMethods):
    """A model whose parameters lie in shards on the ranks of a group.

    Parameters, buffers and submodules have the model's own names; a parameter is a DTensor (a plain
    one on a single rank without a process group). Calling it runs a captured program; its outputs
    have the model's own structure, and `backward` leaves averaged gradients on the shards. Any
    torch optimizer works on `parameters()`. Made by `graphshard.compile`.

    Args:
        model: taken over by value; stays as it is.
        plan: made for `model` and the size of `group`.
        group: the ranks.
        passes: applied to each captured program.
        dynamic: the sizes that are symbols in a captured program.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        group: Group,
        passes: Sequence[Pass],
        dynamic: Dynamic | None = None,
    ) -> None:
        modes = Modes()
        super().__init__(model, modes)
        named = dict(model.named_parameters(remove_duplicate=False))
        if group.mesh is not None:
            let_scalers_agree()
        shards = make_shards(plan.layouts, group, named, on_host=plan.policy.offloads("params"))
        build_skeleton(self, model, shards, group.device, modes)
        bindings = Bindings(plan, group, shards, _buffer_homes(self), Agreement(group))
        on_meta = take_over(self, model, bindings, from_first=plan.policy.sync_module_states)
        watch_state_dicts(self, shards)
        programs = Programs(blueprint_of(model), self, modes, bindings, passes, dynamic)
        self._graphshard = _State(bindings, programs, on_meta)

    # -- running --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's batch; captures a program if the call is of a new kind.

        Raises:
            CaptureError: the model cannot be captured for this call.
            RuntimeStateError: parameters have no values yet.
            CollectiveError: another rank failed, or the ranks disagree.
        """
        return self._run(MAIN, args, kwargs)

    # -- looking --------------------------------------------------------------------------------

    @property
    def plan(self) -> ShardingPlan:
        """The sharding plan; `plan.program` is the first program captured."""
        return self._graphshard.programs.plan

    @property
    def program(self) -> Program:
        """The program captured last, rewritten.

        Raises:
            RuntimeStateError: nothing was captured yet.
        """
        if not self.programs:
            raise RuntimeStateError(
                "no program was captured yet; pass example_inputs to graphshard.compile or call "
                "the module once"
            )
        return self.programs[-1]

    @property
    def programs(self) -> tuple[Program, ...]:
        """All programs, in the order they were captured."""
        return tuple(step.program for step in self._graphshard.programs.steps.values())

    @property
    def lowered(self) -> tuple[fx.GraphModule, ...]:
        """The Python that runs for `program`: forward, then each kind of backward met so far."""
        steps = list(self._graphshard.programs.steps.values())
        return tuple(half.module for half in steps[-1].halves) if steps else ()

    def dump(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write programs and plan into `directory`; see `graphshard.inspect.dump`.

        Raises:
            RuntimeStateError: nothing was captured yet.
        """
        from graphshard.inspect.dump import dump_module

        return dump_module(self, directory)

    def capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], progress: Stages | None = None
    ) -> Program:
        """Capture and rewrite the program for calls like this one; tensors may be meta or fake."""
        state = self._graphshard
        return state.programs.capture_example(args, kwargs, progress).program

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        raise RuntimeStateError(
            "a sharded module cannot be copied; compile a copy of the model and load this one's "
            "state_dict() into it"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeStateError(
            "a sharded module cannot be pickled, since it belongs to a process group; save its "
            "state_dict() with torch.distributed.checkpoint"
        )


class _State:
    """What a sharded module knows besides its parameters, apart from the model's own names."""

    def __init__(
        self,
        bindings: Bindings,
        programs: Programs,
        on_meta: frozenset[str],
    ) -> None:
        self.bindings = bindings
        self.programs = programs
        self.shards = distinct(bindings.shards)
        self.unsharded = Unsharded(self.shards)
        self.on_meta = on_meta
        self.ready = False
        # Whoever loads a buffer writes it in place or replaces it.
        self.empty_buffers = {
            name: (bindings.buffer(name), bindings.buffer(name)._version)
            for name in on_meta
            if name in bindings.buffers
        }

    def fill_buffers(self) -> None:
        """Compute the buffers that a checkpoint left without values, as `init_weights` would."""
        empty = frozenset(name for name in self.empty_buffers if self._is_empty(name))
        if empty:
            # One that nothing computes is named when the module is called.
            with contextlib.suppress(RuntimeStateError):
                initialize(self.programs.blueprint, self.bindings, empty, seed=0)

    def _is_empty(self, name: str) -> bool:
        buffer, version = self.empty_buffers[name]
        return self.bindings.buffer(name) is buffer and buffer._version == version

    def require_values(self, module: nn.Module) -> None:
        """Check that every parameter and buffer got a value since the model left the meta device.

        Raises:
            RuntimeStateError: one did not; names it.
        """
        for shard in self.shards:
            if not shard.written():
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


def _buffer_homes(root: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    homes = {}
    for name, _ in root.named_buffers(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        homes[name] = (root.get_submodule(path)._buffers, leaf)
    return homes

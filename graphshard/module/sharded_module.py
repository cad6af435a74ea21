"""`ShardedModule`: what the user trains, one per rank."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import fx, nn

from graphshard.capture.dynamic import Dynamic
from graphshard.capture.traced_module import MAIN_ENTRY
from graphshard.errors import RuntimeStateError
from graphshard.inspect.dump import dump_programs
from graphshard.module.internals import _State
from graphshard.module.meta_model import meta_model_of
from graphshard.module.programs import Programs
from graphshard.module.sharded_tree import Modes, build_sharded_tree
from graphshard.module.state import StateMethods
from graphshard.module.training import TrainingMethods
from graphshard.planning.plan import ShardingPlan
from graphshard.program.pass_protocol import PassLike
from graphshard.program.program import Program
from graphshard.progress import Stages
from graphshard.runtime.fingerprint import Agreement
from graphshard.runtime.group import Group
from graphshard.runtime.lowered import Bindings
from graphshard.runtime.resident import make_shards, watch_state_dicts
from graphshard.state.load import take_model_values
from graphshard.training.scaler import let_scalers_agree


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
        passes: Sequence[PassLike],
        dynamic: Dynamic | None = None,
    ) -> None:
        modes = Modes()
        super().__init__(model, modes)
        named = dict(model.named_parameters(remove_duplicate=False))
        if group.mesh is not None:
            let_scalers_agree()
        shards = make_shards(plan.layouts, group, named, on_host=plan.policy.offloads("params"))
        build_sharded_tree(self, model, shards, group.device, modes)
        bindings = Bindings(plan, group, shards, _buffer_homes(self), Agreement(group))
        on_meta = take_model_values(
            self, model, bindings, from_first=plan.policy.sync_module_states
        )
        watch_state_dicts(self, shards)
        programs = Programs(meta_model_of(model), self, modes, bindings, passes, dynamic)
        self._graphshard = _State(bindings, programs, on_meta)

    # -- running --------------------------------------------------------------------------------

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model on this rank's batch; captures a program if the call is of a new kind.

        Raises:
            CaptureError: the model cannot be captured for this call.
            RuntimeStateError: parameters have no values yet.
            CollectiveError: another rank failed, or the ranks disagree.
        """
        return self._run(MAIN_ENTRY, args, kwargs)

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
        return tuple(graph.module for graph in steps[-1].lowered_graphs) if steps else ()

    def dump(self, directory: str | os.PathLike[str]) -> list[Path]:
        """Write programs and plan into `directory`; see `graphshard.inspect.dump`.

        Raises:
            RuntimeStateError: nothing was captured yet.
        """
        return dump_programs(self.programs, self.plan, directory)

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


def _buffer_homes(root: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    homes = {}
    for name, _ in root.named_buffers(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        homes[name] = (root.get_submodule(path)._buffers, leaf)
    return homes

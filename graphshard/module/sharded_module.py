"""`ShardedModule`: what the user trains, one per rank."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import fx, nn

import graphshard.state as states
from graphshard.capture.dynamic import Dynamic
from graphshard.capture.traced_module import MAIN_ENTRY, ORIGINALS
from graphshard.errors import RuntimeStateError
from graphshard.module.calls import CallMethods
from graphshard.module.internals import _State
from graphshard.module.meta_model import meta_model_of
from graphshard.module.optimizers import let_scalers_agree, let_scales_arrive, watch_originals
from graphshard.module.programs import Programs
from graphshard.module.sharded_tree import (
    Changes,
    TreeModule,
    build_sharded_tree,
    link,
    warn_of_lost_methods,
)
from graphshard.module.state import StateMethods
from graphshard.module.training import TrainingMethods
from graphshard.planning.plan import ShardingPlan
from graphshard.program.pass_protocol import PassLike
from graphshard.program.program import Program
from graphshard.progress import Stages
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.group import Group, groups_like, meeting_group
from graphshard.runtime.lower import Bindings
from graphshard.runtime.resident import make_shards, watch_state_dicts
from graphshard.torch_private.trace import load_dynamo


class ModelSignature:
    """A `forward` whose signature, read from a sharded module, is that of the model's forward."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__doc__ = function.__doc__

    def __get__(self, module: TreeModule | None, owner: type) -> Callable[..., Any]:
        return self.function if module is None else _BoundForward(self.function, module)


class _BoundForward(functools.partial[Any]):
    @property
    def __signature__(self) -> inspect.Signature:
        twin = self.args[0]._graphshard_twin
        return inspect.signature(self.func if twin is None else twin.forward)


class ShardedModule(StateMethods, TrainingMethods, CallMethods):
    """A model whose parameters lie in shards on the ranks of a group.

    Parameters, buffers and submodules have the model's own names; a parameter is a DTensor (a plain
    one on a single rank without a process group). Calling it runs a captured program; its outputs
    have the model's own structure, and `backward` leaves averaged gradients on the shards. Torch's
    optimizers work on `parameters()`, but for Adafactor, which raises on DTensors.
    Made by `graphshard.compile`, of a model that stays as it is.
    """

    _known_to_accelerate: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        plan: ShardingPlan,
        group: Group,
        passes: Sequence[PassLike],
        dynamic: Dynamic | Literal["auto"] | None,
        agreement: Agreement | None = None,
    ) -> None:
        if agreement is None:  # the ranks have not met to make this module
            agreement = Agreement(group)
            agreement.join()
        load_dynamo()  # which a capture would do in a frame that holds this module
        _keep_out_of_torch_compile()
        changes = Changes()
        super().__init__(model, changes)
        named = dict(model.named_parameters(remove_duplicate=False))
        if group.mesh is not None:
            let_scalers_agree()
        if plan.policy.offloads("params"):
            let_scales_arrive()
        shards = make_shards(plan.layouts, group, named, on_host=plan.policy.offloads("params"))
        build_sharded_tree(self, model, shards, group.device, changes)
        bindings = Bindings(plan, group, shards, _buffer_homes(self), agreement)
        on_meta = states.load.take_model_values(
            self, model, bindings, from_first=plan.policy.sync_module_states
        )
        watch_state_dicts(self, shards)
        warn_of_lost_methods(model)
        meta_model = meta_model_of(model)
        programs = Programs(meta_model, self, changes, bindings, passes, dynamic)
        self._graphshard = _State(bindings, programs, on_meta)
        link(self, meta_model)
        changes.root = weakref.ref(self)
        watch_originals(model, self)

    # -- running --------------------------------------------------------------------------------

    @ModelSignature
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
        from graphshard.inspect.dump import dump_programs

        return dump_programs(self.programs, self.plan, directory)

    def capture(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], progress: Stages | None = None
    ) -> Program:
        """Capture and rewrite the program for calls like this one; tensors may be meta or fake."""
        state = self._graphshard
        return state.programs.capture_example(args, kwargs, progress).program

    @property
    def _is_accelerate_prepared(self) -> bool:
        """Read by `Accelerator.prepare`, which wraps a model in DDP that it does not know."""
        if not self._known_to_accelerate:
            raise RuntimeStateError(
                "Accelerate does not know sharded modules yet; import graphshard.hf before "
                "Accelerator.prepare, and for transformers' Trainer put "
                "graphshard.hf.ShardedTrainer before its class"
            )
        return vars(self).get("_graphshard_prepared", False)

    @_is_accelerate_prepared.setter
    def _is_accelerate_prepared(self, value: bool) -> None:
        vars(self)["_graphshard_prepared"] = value

    @property
    def _ddp_params_and_buffers_to_ignore(self) -> Any:
        """Read first by DistributedDataParallel, which would reduce gradients once more."""
        raise RuntimeStateError(
            "DistributedDataParallel cannot wrap a sharded module, whose backward has reduced the "
            'gradients already; leave it out (strategy="NO_SHARD" trains as DDP does)'
        )

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """Read by transformers' Trainer, whose checkpoints one rank would write alone."""
        if not vars(self).get("_graphshard_in_trainer"):
            raise RuntimeStateError(
                "transformers' Trainer saves and resumes a model as one rank's own, which a "
                "sharded module is not; put graphshard.hf.ShardedTrainer before the class of the "
                "trainer: class MyTrainer(graphshard.hf.ShardedTrainer, Trainer)"
            )
        return False

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModule:
        """A sharded module of its own with the values of this one; every rank must copy it.

        It has the same plan, mesh and passes, the flags `training` and `requires_grad`, and hooks
        of the whole module, and captures programs when it is called. As in any copy by torch,
        parameters have no gradients and no hooks.
        """
        state = self._graphshard
        old, plan = state.bindings.group, state.bindings.plan
        try:
            found = meeting_group(old.mesh, old.device)
        except (RuntimeError, ValueError) as error:  # of torch, where it knows no such group
            raise RuntimeStateError(
                "copy.deepcopy() of a sharded module needs the process group that it was compiled "
                f"on, which is gone ({error}); copy it before destroy_process_group(), or call "
                "sharded.rebind() on a new group first"
            ) from error
        agreement = Agreement(found)
        agreement.made_by = "copy.deepcopy() of a sharded module"
        with agreement.call(agreement.made_by):
            with agreement.part() as part:
                state.refuse_lent()
                state.require_values(self)
                part.same += plan.lines()
            agreement.join()
            agreement.group = group = groups_like(old, agreement.group)
            with agreement.part():
                programs = state.programs
                passes, dynamic = programs.passes, programs.sizes.dynamic
                model = model_like(self, memo)
                twin = ShardedModule(model, plan, group, passes, dynamic, agreement)
                take_over(twin, self)
                remember(memo, twin, self)
        return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise RuntimeStateError(
            "a sharded module cannot be pickled, since it belongs to a process group; save its "
            "state_dict() with torch.distributed.checkpoint"
        )


@functools.cache
def _keep_out_of_torch_compile() -> None:
    """Let `torch.compile(sharded)` call programs as they are, instead of tracing graphshard."""
    ShardedModule._run = torch.compiler.disable(ShardedModule._run)  # type: ignore[method-assign]


def _buffer_homes(root: nn.Module) -> dict[str, tuple[dict[str, Any], str]]:
    homes = {}
    for name, _ in root.named_buffers(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        homes[name] = (root.get_submodule(path)._buffers, leaf)
    return homes


_HOOKS = (
    "_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks",
    "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_backward_pre_hooks",
    "_backward_hooks",
)  # fmt: skip


def model_like(sharded: ShardedModule, memo: dict[int, Any]) -> nn.Module:
    """A model to compile anew: the code and Python state of `sharded`, its weights on meta.

    Ignored parameters, which stay whole and in place, have values of their own. By the `memo` of
    `copy.deepcopy` what else is copied shares objects with the model.
    """
    state = sharded._graphshard
    model = meta_model_of(state.programs.meta_model, memo)
    for layout in state.bindings.plan.ignored:
        param = copy.deepcopy(sharded.get_parameter(layout.fqn))
        for name in layout.names:
            path, _, leaf = name.rpartition(".")
            model.get_submodule(path)._parameters[leaf] = param
    return model


def take_over(twin: ShardedModule, sharded: ShardedModule) -> None:
    """Give `twin`, compiled of `model_like(sharded)`, the values and flags of `sharded`."""
    mine, theirs = twin._graphshard, sharded._graphshard
    tensors_of = states.state_tensors.state_tensors_of
    to, of = tensors_of(twin, mine.bindings), tensors_of(sharded, theirs.bindings)
    for tensor, original in zip(to, of, strict=True):
        tensor.take(original.local)
    mine.on_meta = theirs.on_meta
    for param, other in zip(twin.parameters(), sharded.parameters(), strict=True):
        param.requires_grad_(other.requires_grad)
    for part, other_part in zip(twin.modules(), sharded.modules(), strict=True):
        part.training = other_part.training
    # Code of the model may still reach the weights that it was compiled of.
    vars(mine.programs.meta_model)[ORIGINALS] = vars(theirs.programs.meta_model)[ORIGINALS]


def remember(memo: dict[int, Any], twin: nn.Module, sharded: nn.Module) -> None:
    """Note in the memo of `copy.deepcopy` what stands for what; copy the hooks of the root."""
    memo[id(sharded)] = twin
    for get in (nn.Module.modules, nn.Module.parameters, nn.Module.buffers):
        pairs = zip(get(sharded), get(twin), strict=True)
        memo.update((id(original), copied) for original, copied in pairs)
    for name in _HOOKS:
        vars(twin)[name] = copy.deepcopy(vars(sharded)[name], memo)

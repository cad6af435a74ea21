"""The methods of a sharded module that a training loop calls between steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from graphshard.errors import RuntimeStateError
from graphshard.module.clip import GradNorm
from graphshard.module.on_all_ranks import on_all_ranks
from graphshard.module.originals import require_shards
from graphshard.module.param_groups import Rule, parameter_groups
from graphshard.module.sharded_tree import TreeModule
from graphshard.passes.accumulate import GRADIENT, SHARD
from graphshard.runtime.agreement import listed
from graphshard.runtime.rebind import rebind
from graphshard.state.local_steps import AnyOptimizer, require_elementwise, step_locally

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from graphshard.module.internals import _State


class TrainingMethods(TreeModule):
    """Clipping, parameter groups and full parameters; thin, over the modules that do the work."""

    _graphshard: _State

    def release_graphs(self) -> None:
        """Give back the CUDA graphs of all programs (`cuda_graph=True`), and their memory.

        The next call of each program captures it again. Every rank must call this at the same
        point, between steps: a backward whose forward was replayed before raises a
        `RuntimeStateError`. `destroy_process_group` and the end of Python do it by themselves,
        since NCCL never ends a communicator that a graph has recorded.
        """
        for step in self._graphshard.programs.steps.values():
            if step.cuda_graphs is not None:
                step.cuda_graphs.release()

    @on_all_ranks("max_norm", "norm_type", "error_if_nonfinite")
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale all gradients so that their joint norm, over all ranks, is at most `max_norm`.

        As `torch.nn.utils.clip_grad_norm_` on one process that holds every gradient whole, for any
        p and for inf, and to the bits of that function on the DTensors of `fully_shard` (which
        takes norms of bfloat16 gradients in bfloat16; here they are taken in float32). Every rank
        must call it; it costs one all_reduce of a number for each gradient (one per set of mesh
        dimensions, where parameters differ in that). Gradients of ignored parameters count by
        their mean over the ranks.

        Returns:
            The norm before clipping: a plain tensor without dimensions, the same on all ranks.

        Raises:
            PolicyError: `norm_type` is not above 0.
            RuntimeStateError: the norm is not finite, if `error_if_nonfinite`; gradients are
                accumulated by `no_sync()`, or full inside of `unsharded(with_grads=True)`.
            CollectiveError: a rank makes another call, or none within the group's timeout. Nothing
                was changed, as after every error.
        """
        # With error_if_nonfinite the host waits for the norm anyway.
        with self._graphshard.bindings.agreement.part(waits=error_if_nonfinite) as part:
            norm = self._grad_norm(norm_type, foreach)
            part.same.append(norm.text)
        return norm.clip(max_norm, error_if_nonfinite=error_if_nonfinite)

    def _grad_norm(self, norm_type: float, foreach: bool | None) -> GradNorm:
        state = self._graphshard
        if state.unsharded.with_grads:
            raise RuntimeStateError(
                f"the gradient of {min(state.unsharded.with_grads)!r} is full inside of "
                "unsharded(with_grads=True), and leaving the context puts it in place of what "
                "would be clipped; clip before it, or call torch.nn.utils.clip_grad_norm_ on the "
                "parameters inside"
            )
        if state.bindings.accumulated.tensors:
            _, name = min(state.bindings.accumulated.tensors)
            raise RuntimeStateError(
                f"the gradient of {name!r} is accumulated by no_sync() and not reduced yet, so "
                "the norm would miss it; clip after a backward outside of no_sync(), or call "
                "zero_grad() on the module to drop accumulated gradients"
            )
        group = state.bindings.group
        shards = state.in_model_order  # as in `parameters()`, by which sums are rounded
        ignored = [shard.param for shard in shards if shard.layout.ignored]
        return GradNorm(
            [shard.param for shard in shards if not shard.layout.ignored],
            ignored,
            norm_type,
            foreach=foreach,
            groups=(group.process_group,) if ignored and group.size > 1 else (),
            device=group.device,
        )

    @contextmanager
    def no_sync(self, *, all_reduce_only: bool = False) -> Iterator[None]:
        """Accumulate gradients of calls inside on this rank; the next call outside reduces them.

        A call belongs to the context in which its forward runs; its backward may run anywhere. The
        backward of the first call outside adds the accumulated gradients to its own and reduces the
        sum. Until then `.grad` does not have them. Without this context each backward reduces into
        the shard, with more communication and less memory; `plan` has the bytes of both.
        Accumulated gradients are whole `(d0, ...)`, in the dtype they are reduced in. Calls inside
        and outside run different programs. `sharded.zero_grad()` drops accumulated gradients; an
        optimizer's own `zero_grad()` does not.

        Args:
            all_reduce_only: reduce inside the rank's shard group all the same and accumulate
                shards: only the all_reduce over the replicas of a HYBRID strategy is put off.

        Raises:
            PassError: from a call inside, with `all_reduce_only` where there are no replicas.
            RuntimeStateError: from a backward outside, if the backward of an earlier call inside
                has not run, so that the reduce would miss its gradients.
        """
        with self._graphshard.bindings.accumulated.no_sync(SHARD if all_reduce_only else GRADIENT):
            yield

    def rebind(self, mesh: DeviceMesh | None = None) -> None:
        """Go on with process groups that were made anew, after a rank died or a group was aborted.

        Parameters, optimizer states and captured programs stay as they are, and so do the shards of
        this rank; a rank that is new gets its own from a checkpoint or from its replica. All old
        ranks call this while new ones call `graphshard.compile` as the old ones did, module by
        module in the same order. Gradients of the step that failed are to be cleared.

        Args:
            mesh: of the same ranks, shape and names as the old one, over the new groups. None: it
                is made over the default process group.

        Raises:
            PolicyError: the mesh is another one, or its backend; nothing was changed.
            RuntimeStateError: there is no process group, or the policy has `cuda_graph`.
            FingerprintError: a rank compiles another module; nothing was changed.
        """
        rebind(self._graphshard.bindings, mesh)
        vars(self).pop("_graphshard_background", None)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As `nn.Module.zero_grad`; also drops gradients accumulated by `no_sync()`."""
        if set_to_none:  # without a walk over all modules
            for shard in self._graphshard.shards:
                for holder, name in shard.holders:
                    param = holder.get(name)
                    if param is not None:
                        param.grad = None
        else:
            super().zero_grad(set_to_none)
        self._graphshard.bindings.accumulated.clear()

    def parameter_groups(self, rule: Rule | None = None) -> list[dict[str, Any]]:
        """The trainable parameters in groups that any torch optimizer can take.

        Parameters of one group have the same options and are of one kind (DTensors of one mesh, or
        plain tensors), since foreach and fused optimizers fail where kinds mix.

        Args:
            rule: `rule(name, parameter)` gives the options of a parameter as a dict, or None; or
                pairs of a regular expression, searched for in names, and options, of which the
                first that matches counts: `[(r"bias|norm", {"weight_decay": 0.0})]`.

        Returns:
            Dicts with "params", "names" (aligned with it) and the options.

        Raises:
            PolicyError: the rule gives no options, or an expression matches nothing.
        """
        return parameter_groups(self.named_parameters(), rule)

    def optimizer(
        self,
        kind: Callable[..., AnyOptimizer],
        rule: Rule | None = None,
        *,
        elementwise: bool | None = None,
        **options: Any,
    ) -> AnyOptimizer:
        """An optimizer of the trainable parameters that steps on this rank's plain tensors.

        `kind(sharded.parameter_groups(rule), **options)` in every respect, its values to the bit,
        but for the time of a step: an operator on a DTensor costs tens of microseconds of the host,
        and inside of `step` there is none. Groups and `state_dict()` hold DTensors; in
        `optimizer.state` are this rank's parts of them. See `graphshard.state.local_steps`.

            optim = sharded.optimizer(torch.optim.AdamW, lr=3e-4, fused=True)

        Args:
            kind: a class of torch.optim that updates each element by itself (all but Adafactor,
                LBFGS, Muon and SparseAdam do).
            rule: the options of a parameter by its name; see `parameter_groups`.
            elementwise: whether it does, if it is no class of torch.optim.
            options: of the optimizer.

        Raises:
            PolicyError: `kind` looks at whole tensors, or whether it does is not known; or the rule
                is wrong.
        """
        if isinstance(kind, type):
            require_elementwise(kind, elementwise)
        optimizer = kind(self.parameter_groups(rule), **options)
        return self.step_locally(optimizer, elementwise=elementwise)

    def step_locally(
        self, optimizer: AnyOptimizer, *, elementwise: bool | None = None
    ) -> AnyOptimizer:
        """`optimizer`, made of `parameters()` by somebody else, as `optimizer()` would make it.

        The same object. To be called before a learning rate scheduler is made of it.

        Raises:
            PolicyError: as `optimizer()`; or its `step` is wrapped already, or it holds parameters
                of the model that was compiled, not of this module.
        """
        require_shards(optimizer)
        return step_locally(optimizer, elementwise)

    @contextmanager
    @on_all_ranks("writeback", "with_grads", "rank0_only", modules=listed)
    def unsharded(
        self,
        modules: str | Iterable[str] | None = None,
        *,
        writeback: bool = True,
        with_grads: bool = False,
        rank0_only: bool = False,
    ) -> Iterator[Mapping[str, nn.Parameter]]:
        """Full parameters inside the context, as FSDP1's `summon_full_params`.

        Inside, this module's parameters are plain `nn.Parameter`s of the full shape, the same
        objects every time, yielded by name; a tied one is met once and found by each of its names.
        `full_parameters()` gives them outside. On leaving, each rank keeps its part of what they
        hold then, unless code inside failed on a rank: then parameters are as before on all, and
        the other ranks raise a `CollectiveError`. Every rank must enter. Costs the bytes of the
        full parameters (twice that with gradients) on every rank meanwhile, and one all_gather for
        each of them. The module cannot be called inside.

        Args:
            modules: FQNs of the modules (units or others) whose parameters are wanted. None: all.
            writeback: keep what was changed, gradients too if `with_grads`.
            with_grads: each parameter has its full gradient as `.grad`.
            rank0_only: only rank 0 gets them; the others keep shards. Needs `writeback=False`.

        Raises:
            PolicyError: no module has such a name, or `rank0_only` with `writeback`.
            RuntimeStateError: a parameter has no values yet, or is unsharded already.
            CollectiveError: a rank makes another call, or code inside failed on another rank.
        """
        state = self._graphshard
        agreement = state.bindings.agreement
        with agreement.part() as part:
            state.refuse_lent()
            shards = state.unsharded.select(modules)
            state.require_values(self)
            part.same += state.unsharded.check(
                shards, writeback=writeback, with_grads=with_grads, rank0_only=rank0_only
            )
        state.ready = False
        try:
            yield from state.unsharded.context(
                shards,
                agreement.part,
                writeback=writeback,
                with_grads=with_grads,
                rank0_only=rank0_only,
            )
        finally:
            state.ready = not state.unsharded.open

    def full_parameters(self) -> dict[str, nn.Parameter]:
        """The parameters that `unsharded()` fills, by name, for an optimizer to hold.

        Outside of that context they have the full shape and no storage. An optimizer made of them
        keeps its state over steps, full size on every rank:

            optim = torch.optim.Adafactor(sharded.full_parameters().values())
            ...
            with sharded.unsharded(with_grads=True):
                optim.step()
            sharded.zero_grad()
        """
        state = self._graphshard
        return {s.layout.fqn: state.unsharded.twin(s) for s in state.unsharded.shards}

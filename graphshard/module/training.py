"""The methods of a sharded module that a training loop calls between steps."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from graphshard.errors import PolicyError, RuntimeStateError
from graphshard.module.internals import _State
from graphshard.module.on_all_ranks import on_all_ranks
from graphshard.module.optimizers import declare_elementwise, require_elementwise
from graphshard.module.sharded_tree import TreeModule
from graphshard.program.collective import GRADIENT, SHARD
from graphshard.runtime.agreement import Agreement
from graphshard.runtime.calls import listed
from graphshard.runtime.group import Group, groups_like, meeting_group, number_of_hosts
from graphshard.runtime.lower import Bindings
from graphshard.torch_private import compat as torch_compat

AnyOptimizer = TypeVar("AnyOptimizer", bound=torch.optim.Optimizer)


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
        if not isinstance(max_norm, Real | Tensor):
            raise PolicyError(
                f"max_norm must be a number; got {type(max_norm).__name__}; the parameters are the "
                "module's own, so write clip_grad_norm_(max_norm)"
            )
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
        """An optimizer of the trainable parameters: `kind(sharded.parameter_groups(rule), ...)`.

        Inside of `step` an optimizer that updates each element by itself sees this rank's plain
        tensors, since an operator on a DTensor costs tens of microseconds of the host; its groups
        and state hold DTensors. That is so for the classes of torch.optim (but for Adafactor,
        LBFGS, Muon and SparseAdam), whoever makes them; this call says it of others.

            optim = sharded.optimizer(torch.optim.AdamW, lr=3e-4, fused=True)

        Args:
            kind: a class that updates each element by itself.
            rule: the options of a parameter by its name; see `parameter_groups`.
            elementwise: whether it does, if it is no class of torch.optim.
            options: of the optimizer.

        Raises:
            PolicyError: `kind` looks at whole tensors, or whether it does is not known, or is an
                optimizer itself; or the rule is wrong.
        """
        if isinstance(kind, torch.optim.Optimizer):
            name = type(kind).__name__
            raise PolicyError(
                f"optimizer takes a class and its options, as in optimizer({name}, lr=...); got an "
                f"{name} that is made already, which needs no call: it steps as it is"
            )
        if isinstance(kind, type):
            require_elementwise(kind, elementwise)
        optimizer = kind(self.parameter_groups(rule), **options)
        require_elementwise(type(optimizer), elementwise)
        declare_elementwise(optimizer)
        return optimizer

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
                agreement,
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


Options = Mapping[str, Any]


Rule = Callable[[str, nn.Parameter], Options | None] | Sequence[tuple[str, Options]]


def parameter_groups(
    named: Iterable[tuple[str, nn.Parameter]], rule: Rule | None
) -> list[dict[str, Any]]:
    """See `ShardedModule.parameter_groups`; `named` are pairs of a name and a parameter."""
    named = [(name, param) for name, param in named if param.requires_grad]
    options_of: Callable[[str, nn.Parameter], Any] = _as_function(rule, [name for name, _ in named])
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for name, param in named:
        options = options_of(name, param)
        options = {} if options is None else options
        if not isinstance(options, Mapping) or {"params", "names"} & options.keys():
            raise PolicyError(
                "the rule must give a dict of an optimizer's options (other than params and "
                f"names), or None; it gave {options!r} for {name!r}"
            )
        # repr: options need not be hashable (betas in a list).
        key = (*_kind(param), *sorted((k, repr(v)) for k, v in options.items()))
        group = groups.setdefault(key, {"params": [], "names": [], **options})
        group["params"].append(param)
        group["names"].append(name)
    return list(groups.values())


def _as_function(
    rule: Rule | None, names: Sequence[str]
) -> Callable[[str, nn.Parameter], Options | None]:
    if rule is None:
        return lambda name, param: None
    if callable(rule):
        return rule
    pairs = []
    rules: Sequence[Any] = rule
    for pair in rules:
        if not isinstance(pair, tuple) or len(pair) != 2 or not isinstance(pair[0], str):
            got = f"got {pair!r}"
            if isinstance(pair, Tensor | Mapping):
                got = "got parameters, which are the module's own and need not be given"
            raise PolicyError(
                "rule must be a function of (name, parameter), or hold pairs of a regular "
                f"expression and a dict of options; {got}"
            )
        expression = re.compile(pair[0])
        if not any(map(expression.search, names)):
            raise PolicyError(f"the expression {pair[0]!r} matches no trainable parameter")
        pairs.append((expression, pair[1]))
    return lambda name, param: next((o for e, o in pairs if e.search(name)), None)


def _kind(param: Tensor) -> tuple[Any, ...]:
    mesh = param.device_mesh if isinstance(param, DTensor) else None
    return (mesh, param.dtype, param.device)


class GradNorm:
    """The joint norm of gradients, of which this rank's part is computed and nothing sent yet.

    Norms are taken in float32 (float64 where gradients are), and added up on `device`. The ranks
    share the gradients of `params`; those of `unreduced` are each rank's own, and averaged over
    `groups`.
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        unreduced: Iterable[Tensor],
        norm_type: float,
        *,
        foreach: bool | None,
        groups: Sequence[Any],
        device: torch.device,
    ) -> None:
        self.p = float(norm_type)
        if not self.p > 0:
            raise PolicyError(f"norm_type must be above 0, or inf; got {self.p!r}")
        shared = [param.grad for param in params if param.grad is not None]
        own = [param.grad for param in unreduced if param.grad is not None]
        self.shared = len(shared)
        self.grads = [_local(grad) for grad in (*shared, *own)]
        is_double = any(g.dtype.to_real() == torch.float64 for g in self.grads)
        self.dtype = torch.float64 if is_double else torch.float32
        self.foreach = foreach
        self.device = device
        by_meshes: dict[tuple[Any, ...], list[int]] = {}
        for place, grad in enumerate(shared):
            by_meshes.setdefault(_sharded_over(grad), []).append(place)
        self._places = [place for places in by_meshes.values() for place in places]
        self._parts: list[tuple[Tensor, Sequence[Any], bool]] = [
            (self._of_each([self.grads[place] for place in places]), groups_of, False)
            for groups_of, places in by_meshes.items()
        ]
        if own or groups:
            # Every rank takes part, since any may hold gradients that others do not.
            joint = self._of(self._of_each(self.grads[self.shared :]))
            self._parts.append((joint.reshape(1), groups, True))
            self._places.append(self.shared)

    @property
    def text(self) -> str:
        """What must be the same on all ranks."""
        sizes = [dist.get_world_size(g) for _, groups, _ in self._parts for g in groups]
        return f"{self.shared} gradients, sums over {sizes} ranks in {self.dtype}"

    def clip(self, max_norm: float, *, error_if_nonfinite: bool) -> Tensor:
        """See `ShardedModule.clip_grad_norm_`."""
        parts = [self._over(local, groups, mean=mean) for local, groups, mean in self._parts]
        if len(parts) > 1:  # in the order of the gradients, by which sums are rounded
            joined = torch.cat(parts)
            order = torch.tensor(self._places, device=self.device)
            parts = [torch.empty_like(joined).index_copy_(0, order, joined)]
        total = self._of(parts[0] if parts else self._of_each(()))
        if error_if_nonfinite and not bool(total.isfinite()):
            raise RuntimeStateError(
                f"the {self.p:g}-norm of the gradients is {total.item()}, so they cannot "
                "be clipped; look for an overflow, or pass error_if_nonfinite=False"
            )
        _scale(self.grads, (max_norm / (total + 1e-6)).clamp(max=1.0), self.foreach)
        return total

    def _of(self, tensor: Tensor) -> Tensor:
        return torch.linalg.vector_norm(tensor, self.p)

    def _of_each(self, grads: Sequence[Tensor]) -> Tensor:
        """The norm of each of these tensors, `(len(grads),)` on `device`."""
        norms = [torch.zeros((), dtype=self.dtype, device=self.device)] * len(grads)
        by_kind: dict[Any, list[int]] = {}
        for place, grad in enumerate(grads):
            if grad.numel():
                by_kind.setdefault((grad.device, grad.dtype), []).append(place)
        for places in by_kind.values():
            alike = [grads[place] for place in places]
            dtype = self.dtype.to_complex() if alike[0].is_complex() else self.dtype
            if self.foreach is False:
                found = [torch.linalg.vector_norm(g, self.p, dtype=dtype) for g in alike]
            else:
                found = torch_compat.foreach_norm(alike, self.p, dtype)
            for place, norm in zip(places, found, strict=True):
                norms[place] = norm.to(self.device, self.dtype)
        if not norms:
            return torch.zeros(1, dtype=self.dtype, device=self.device)
        return torch.stack(norms)

    def _over(self, local: Tensor, groups: Sequence[Any], *, mean: bool) -> Tensor:
        """The norms of every rank's tensors in `groups`; of their mean powers, if `mean`."""
        if not groups:
            return local
        infinite = math.isinf(self.p)
        power = local.clone() if infinite else local**self.p
        for group in groups:
            dist.all_reduce(
                power, op=dist.ReduceOp.MAX if infinite else dist.ReduceOp.SUM, group=group
            )
            if mean and not infinite:
                power /= dist.get_world_size(group)
        return power if infinite else power ** (1.0 / self.p)


def _sharded_over(grad: Tensor) -> tuple[Any, ...]:
    """The process groups whose ranks hold different parts of `grad`."""
    if not isinstance(grad, DTensor):
        return ()
    return tuple(
        grad.device_mesh.get_group(dim)
        for dim, placement in enumerate(grad.placements)
        if not placement.is_replicate() and grad.device_mesh.size(dim) > 1
    )


def _local(grad: Tensor) -> Tensor:
    return torch_compat.local_tensor(grad) if isinstance(grad, DTensor) else grad


def _scale(grads: Iterable[Tensor], factor: Tensor, foreach: bool | None) -> None:
    by_kind: dict[Any, list[Tensor]] = {}
    for grad in grads:
        by_kind.setdefault((grad.device, grad.dtype), []).append(grad)
    with torch.no_grad():
        for alike in by_kind.values():
            by = factor.to(alike[0].device)
            if foreach is False:
                for grad in alike:
                    grad.mul_(by)
            else:
                torch_compat.foreach_multiply(alike, by)


# -- process groups made anew, after the old ones failed or were aborted ---------------------------

# Lowered programs hold `Group` objects, and parameters, gradients and optimizer states the mesh.
# Both stay the same objects and get the new process groups: nothing is planned or captured again.


def rebind(bindings: Bindings, mesh: DeviceMesh | None) -> None:
    """Give a module's groups and mesh the process groups of `mesh`, which equals the old one.

    None: of a mesh made over the default process group.
    """
    group, plan = bindings.group, bindings.plan
    if group.mesh is None:
        raise RuntimeStateError(
            "this module runs on a single rank without a process group, so there is none to "
            "replace; compile it again to run on several"
        )
    is_mesh = mesh is None or isinstance(mesh, DeviceMesh)
    agreement = Agreement(meeting_group(mesh if is_mesh else None, group.device))
    agreement.made_by = bindings.agreement.made_by
    # The meetings of graphshard.compile, so that new ranks may be in it.
    with agreement.call(agreement.made_by):
        with agreement.part():
            if not is_mesh:
                raise PolicyError(
                    f"mesh must be a DeviceMesh or None; got {mesh!r}; make one of the old ranks, "
                    "shape and names by torch.distributed.device_mesh.init_device_mesh, or leave "
                    "it out to use the default process group"
                )
            if plan.policy.cuda_graph:
                raise RuntimeStateError(
                    "CUDA graphs have recorded collectives of the old process groups; compile the "
                    "module again, or use a policy with cuda_graph=False"
                )
        agreement.join()
        agreement.group.hosts = number_of_hosts(agreement.group)
        with agreement.part() as part:
            _require_same_ranks(group, agreement.group, mesh)
            part.same += plan.lines()
        new = groups_like(group, agreement.group)
        grids = {shape: new.grid(shape) for shape in plan.grids}
        with agreement.part() as part:
            part.flag = False  # this rank goes on with the model it has; others make theirs
        with agreement.part():
            _take(group, new)
            torch_compat.move_mesh(group.mesh, new.mesh)
            for shape, grid in grids.items():
                torch_compat.move_mesh(group.grid(shape), grid)
    agreement.group = group
    agreement.watch()
    # The same object, which others hold, begins again on the new Store.
    vars(bindings.agreement).update(vars(agreement))


def _require_same_ranks(old: Group, new: Group, mesh: DeviceMesh | None) -> None:
    """Check that the new group has the ranks and the backend of the old one."""
    if mesh is not None and mesh != old.mesh:
        raise PolicyError(
            f"the module is sharded over {old.mesh}; got {mesh}; pass a mesh of the same ranks, "
            "shape and names, or compile again and load a checkpoint"
        )
    if (new.size, new.rank) != (old.size, old.rank):
        raise PolicyError(
            f"this was rank {old.rank} of {old.size} of the module and is rank {new.rank} of "
            f"{new.size} now; keep ranks as they were, or compile again and load a checkpoint"
        )
    if new.backend != old.backend:
        raise PolicyError(
            f"the programs were made for the backend {old.backend!r}; the new groups have "
            f"{new.backend!r}; make them with the old backend, or compile again"
        )
    if (new.hosts > 1) != (old.hosts > 1):
        raise PolicyError(
            f"the programs were made for ranks of {old.hosts} host(s), now they are on "
            f"{new.hosts}; between hosts gathers are issued ahead, so compile again"
        )


def _take(group: Group, new: Group) -> None:
    """Give `group` and the groups in it the process groups of `new`."""
    for name in ("process_group", "rank", "size", "timeout", "pairwise"):
        setattr(group, name, getattr(new, name))
    for name, subgroup in group.subgroups.items():
        _take(subgroup, new.subgroups[name])

"""`AutoPolicy`: let a search by simulation choose a policy's fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from graphshard.errors import PlanError
from graphshard.format import human_bytes, human_seconds
from graphshard.planning.plan import ShardingPlan
from graphshard.policy.fields import named_arguments
from graphshard.progress import Stages
from graphshard.tune.request import PolicyRequest
from graphshard.tune.runs import RunRequest, Runs, tune_runs
from graphshard.tune.tuner import tune
from graphshard.tune.tuning import Tuning, taken


@named_arguments
@dataclass(frozen=True)
class AutoPolicy(PolicyRequest):
    """A request for the policy with the fastest simulated step that fits in memory.

    `tune` searches for it; `graphshard.compile` and `graphshard.plan` do so when their policy is an
    `AutoPolicy`. The result is an ordinary, explicit policy, which prints as code. The same model,
    inputs, mesh and hardware always give the same policy, unless `seconds` limits the search.

    Args:
        memory_budget: the most bytes that torch may reserve on a rank's GPU, or that may be alive
            on a host (`Estimate.reserved_bytes`): a number, or a text such as "70GiB". None: the
            hardware's memory, less what CUDA, NCCL and the driver take under the policy.
        hardware: a preset's name, a hardware file, or a `graphshard.Hardware`. None: as for a
            policy, measured links where ranks run.
        gpus_per_node: ranks on a node. None: as in the hardware.
        optimizer: the optimizer whose states count: "adamw", "adamw-fused", "sgd", "sgd-momentum"
            or "none".
        allocator: what PYTORCH_CUDA_ALLOC_CONF will be, such as "expandable_segments:True"; "none"
            counts live bytes, as without a cache.
        mixed_precision: as in a policy. It changes the numbers, so it is never searched.
        units: a policy that chooses the units and sets nothing else, to fix them.
        strategy, reshard_after_forward, reshard_root, backward_prefetch, forward_prefetch,
            recompute, offload, schedule: as in a policy, to fix them; "auto" searches each.
        merge_below, gather_unused, ignored, cuda_graph, check_finite, sync_module_states, notes: as
            in a policy.
        seconds: the time that the search may take; then it ends with the best so far, and says what
            it did not try. Such a search depends on the machine it runs on, so `compile` takes what
            rank 0 found. None: it takes the time it needs.
        micro_batches: calls of forward and backward in a step, each of which reduces its gradients.
            More of them make the optimizer's share of a step smaller, and hold gradients longer.

    Raises:
        PolicyError: a field has an invalid value.
        CostError: the hardware is unknown.
    """

    def tune(
        self,
        model: nn.Module,
        *,
        example_inputs: Sequence[Any] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        world_size: int | None = None,
        mesh_shape: Sequence[int] | str | None = None,
        device: torch.device | str | None = None,
        progress: Stages | None = None,
    ) -> Tuning:
        """Search, with no process group and no memory for parameters.

        Args:
            model: on meta or with real weights; it is not changed.
            example_inputs: positional arguments of a call: real, meta or fake.
            example_kwargs: keyword arguments of that call.
            world_size: number of ranks. None: that of `mesh_shape`.
            mesh_shape: as for `graphshard.plan`.
                None: `(world_size,)`.
            device: the device that the model will run on. None: that of the hardware.
            progress: shows each stage. None: a bar on stderr, if that is a terminal.

        Raises:
            PolicyError: no policy fits in memory (the message says what would), or there are no
                example inputs, or no number of ranks.
            PlanError, CaptureError: the model cannot be planned or captured.
        """
        return tune(
            self,
            model,
            example_inputs,
            example_kwargs,
            world_size=world_size,
            mesh_shape=mesh_shape,
            device=device,
            progress=progress,
        )

    def plan(self, model: nn.Module, **arguments: Any) -> ShardingPlan:
        """See `PolicySearch`."""
        if not model.training or not torch.is_grad_enabled():
            raise PlanError(
                "AutoPolicy looks for the fastest training step; call model.train() first, and not "
                "in torch.no_grad(), or give an explicit policy"
            )
        tuning = self.tune(model, **arguments)
        policy = replace(tuning.policy, notes=(*tuning.policy.notes, _note(tuning)))
        return replace(tuning.plan, policy=policy)

    def tune_runs(
        self,
        model: nn.Module,
        request: RunRequest,
        *,
        example_inputs: Sequence[Any] | None = None,
        example_kwargs: Mapping[str, Any] | None = None,
        device: torch.device | str | None = None,
        progress: Stages | None = None,
    ) -> Runs:
        """Search numbers of ranks, batches and micro-batches for one global batch, as `tune` does.

        Each pair of ranks and batch is a search; it ends early where its bounds are above the best
        of that number of ranks. `seconds` is for all of them.

        Args:
            model: as of `tune`.
            request: the global batch, the ranks, and optionally batches and a price.
            example_inputs: as of `tune`. Tensors whose first size is that of the first tensor of
                integers (or of the first tensor) get the batch that is tried.
            example_kwargs: likewise.
            device: as of `tune`.
            progress: as of `tune`.

        Raises:
            PolicyError: no run was found, or the global batch cannot be counted.
            PlanError, CaptureError: the model cannot be planned or captured.
        """
        return tune_runs(
            self, request, model, example_inputs, example_kwargs, device=device, progress=progress
        )


def _note(tuning: Tuning) -> str:
    estimate = tuning.estimate
    return (
        f"tuned for {human_bytes(tuning.memory_budget)} on {estimate.hardware.name}: "
        f"{human_seconds(estimate.step_seconds)} a step, "
        f"{human_bytes(estimate.reserved_bytes)} {taken(estimate)}"
    )

"""The keywords of transformers' `save_pretrained` that a sharded module takes, checked.

Scripts for Accelerate pass `is_main_process`, `save_function` and `state_dict`. Rank 0 writes in
any case; what would ask for something else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor

from graphshard.errors import CheckpointError
from graphshard.format import bytes_in
from graphshard.runtime.agreement import Agreement

_WHY = {
    "push_to_hub": "write a folder first and upload it",
    "variant": "rename the files",
    "save_peft_format": "adapters are written as peft writes them",
    "save_original_format": "weights keep the model's own names",
    "distributed_checkpoint": "save_checkpoint() writes with every rank",
    "selected_adapters": "all adapters are written",
    "save_embedding_layers": "peft decides by itself",
}
"""What to do, or what is done, in place of keywords that are refused."""


_ASKS_NOTHING = {"save_peft_format": True, "save_embedding_layers": "auto"}
"""Values of such keywords, besides None and what else is false, that ask for nothing."""


def checked_size(max_shard_size: int | str) -> int:
    """The bytes of a `max_shard_size` of transformers or Accelerate, such as "5GB"."""
    try:
        return bytes_in(str(max_shard_size))
    except ValueError as error:
        raise CheckpointError(f"max_shard_size: {error}") from None


def given_weights(
    agreement: Agreement,
    state_dict: Mapping[str, Any] | None,
    *,
    is_main_process: bool = True,
    save_function: Any = None,
    safe_serialization: bool = True,
    others: Mapping[str, Any],
) -> Mapping[str, Tensor] | None:
    """The weights to write in place of the module's; None if no rank passed any.

    Args:
        agreement: between the ranks, which all call this.
        state_dict: on rank 0 whole tensors; anywhere else it only says that rank 0 has them.
        is_main_process: as in transformers.
        save_function: likewise; one of Accelerate or torch.
        safe_serialization: likewise.
        others: keywords that no method of graphshard has.
    """
    rank = agreement.group.rank
    with agreement.part() as part:
        if rank == 0 and not is_main_process:
            raise CheckpointError(
                "save_pretrained: is_main_process=False on rank 0, which is the one that writes a "
                "sharded module; pass accelerator.is_main_process, or leave it out"
            )
        if not safe_serialization:
            raise CheckpointError(
                "save_pretrained: safe_serialization=False asks for pickles, and only safetensors "
                "are written; leave it out, or torch.save(sharded.full_state_dict(), file)"
            )
        maker = getattr(save_function, "__module__", "") or ""
        if save_function is not None and maker.partition(".")[0] not in ("accelerate", "torch"):
            raise CheckpointError(
                f"save_pretrained: save_function={save_function!r} would never be called, since "
                "rank 0 writes the files one tensor at a time; leave it out"
            )
        for name, value in others.items():
            if value and value != _ASKS_NOTHING.get(name):
                raise CheckpointError(
                    f"save_pretrained of a sharded module has no {name}= (got {value!r}); "
                    f"{_WHY.get(name, 'leave it out')}"
                )
        for name, value in ((state_dict or {}) if rank == 0 else {}).items():
            if isinstance(value, DTensor) or not isinstance(value, Tensor):
                raise CheckpointError(
                    f"save_pretrained: state_dict has a {type(value).__name__} for {name!r}; pass "
                    "whole tensors, such as accelerator.get_state_dict(model) or "
                    "sharded.full_state_dict() gives, or leave state_dict out"
                )
        part.flag = state_dict is not None
    if not any(part.flags):
        return None
    with agreement.part():
        if rank == 0 and not state_dict:
            raise CheckpointError(
                "save_pretrained: state_dict is missing or empty on rank 0, which writes it; call "
                "accelerator.get_state_dict(model) on all ranks and pass what it returns"
            )
    return state_dict or {}


def without_copies(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`weights` with one name for each tensor, since a file of safetensors holds each once."""
    seen: set[Any] = set()
    kept = {}
    for name, value in weights.items():
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype)
        if value.numel() == 0 or place not in seen:
            kept[name] = value.detach()
        seen.add(place)
    return kept

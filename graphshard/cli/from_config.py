"""A language model of transformers by its configuration: no weights, no network, no factory."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import nn

from graphshard.errors import PlanError
from graphshard.runtime.calls import first_line

PREFIX = "hf:"
_TOKENS = 2048


def model_of_config(spec: str) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model of `spec`, "hf:CONFIG[@BATCHxTOKENS]", and the inputs of a training step.

    CONFIG is a config.json, the folder of one, or the id of a model in the local cache; the batch
    is one sequence of 2,048 tokens, or as many as the model takes, unless `spec` says. The model is
    of the class that the configuration names, or else for causal language modelling, in float32, as
    weights to train are; it keeps no cache of keys and values, and lies where torch's default
    device says; the inputs are on meta.

    Raises:
        PlanError: transformers is missing, or has no such model, or it is none of language.
    """
    try:
        import transformers
    except ImportError:
        raise PlanError(
            f"{spec} is a model of transformers; install graphshard[hf], or give a factory"
        ) from None
    place, _, sizes = spec.removeprefix(PREFIX).partition("@")
    if sizes and not re.fullmatch(r"[1-9]\d*x[1-9]\d*", sizes):
        raise PlanError(f"{spec}: behind @ stands BATCHxTOKENS, such as 4x2048; got {sizes!r}")
    try:
        config = transformers.AutoConfig.from_pretrained(
            place, local_files_only=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise PlanError(
            f"transformers finds no configuration at {place!r}, a config.json, its folder, or the "
            f"id of a model in its cache ({first_line(error)})"
        ) from error
    named = [*map(str, config.architectures or ())]
    made = next(
        (getattr(transformers, name) for name in named if hasattr(transformers, name)), None
    )
    if made is not None and not _of_language(made):
        raise PlanError(
            f"{place} is of {made.__name__}, whose step is not made of tokens and labels alone; "
            "give a factory that returns the model and example inputs"
        )
    config.use_cache = False
    longest = min(_TOKENS, getattr(config, "max_position_embeddings", None) or _TOKENS)
    batch, tokens = map(int, sizes.split("x")) if sizes else (1, longest)
    ids = torch.zeros(batch, tokens, dtype=torch.int64, device="meta")
    try:
        by_config = transformers.AutoModelForCausalLM.from_config
        model: nn.Module = (
            by_config(config, dtype=torch.float32, trust_remote_code=False)
            if made is None
            else made(config)
        )
    except ValueError as error:
        raise PlanError(
            f"{place} names no class that transformers has ({', '.join(named) or 'none'}), and is "
            f"none of a causal language model ({first_line(error):.100}); give a factory "
            "that returns the model and example inputs"
        ) from error
    return model, {"input_ids": ids, "labels": ids}


def _of_language(made: Any) -> bool:
    """Whether labels are tokens, and the model takes nothing but text."""
    kinds = ("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration")
    taken = {"input_ids", "labels"} <= {*inspect.signature(made.forward).parameters}
    text = made.main_input_name == "input_ids" and not hasattr(made.config_class, "vision_config")
    return taken and text and made.__name__.endswith(kinds)

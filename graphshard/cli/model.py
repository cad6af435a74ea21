"""The model that a command is about, and its plan: of a factory, or of transformers by a config.

A language model of transformers needs its configuration: no weights, no network, no factory.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import os
import re
import sys
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import nn

import graphshard
from graphshard.cli.policy import backend_of, policy_of
from graphshard.errors import PlanError
from graphshard.format import meant
from graphshard.hardware.hardware import Hardware
from graphshard.planning.plan import ShardingPlan
from graphshard.planning.searched import needs_groups
from graphshard.policy.base import Policy
from graphshard.progress import Progress
from graphshard.runtime.calls import first_line

FACTORY_HELP = """\
FACTORY is pkg.module:function, importable from the current directory. It is called without
arguments and on the meta device, so a model of any size costs no memory, and returns

    model                     planned without being captured ("plan" only)
    (model, args)             args: a tuple of example inputs
    (model, args, kwargs)     kwargs: a dict of example keyword inputs

hf:CONFIG[@BATCHxTOKENS] in its place is a language model of transformers: CONFIG is a config.json,
its folder, or the id of a model in the local cache; a step trains on one sequence of 2,048 tokens,
or of as many as the model takes, unless @BATCHxTOKENS says how many.

Example inputs need shapes and dtypes only. With them the step is also captured, rewritten and
verified.
"""


class ModelCodeError(Exception):
    """The user's factory raised; `__cause__` is its exception."""


@dataclass(frozen=True)
class ModelAndInputs:
    """The result of a factory: a model on the meta device, and example inputs or None."""

    model: nn.Module
    args: tuple[Any, ...] | None = None
    kwargs: dict[str, Any] = field(default_factory=dict)


def load_model(spec: str) -> ModelAndInputs:
    """The model of `spec`: of a factory or of transformers (see `FACTORY_HELP`)."""
    if spec.startswith(PREFIX):
        with torch.device("meta"):
            model, inputs = model_of_config(spec)
        return ModelAndInputs(model, (), inputs)
    module_name, colon, attribute = spec.partition(":")
    if not (module_name and colon and attribute) or module_name.endswith(".py"):
        like = f"; did you mean {PREFIX}{spec}?" if spec.endswith(".json") else ""
        raise PlanError(
            f"a factory is written pkg.module:function, without .py; got {spec!r}{like}"
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise ModelCodeError(f"importing {module_name} failed") from error
        raise PlanError(
            f"no module named {error.name!r} in {os.getcwd()} or the installed packages; "
            "run from the directory that holds it"
        ) from None
    except Exception as error:
        raise ModelCodeError(f"importing {module_name} failed") from error
    factory = getattr(module, attribute, None)
    if not callable(factory):
        like = meant(attribute, vars(module))
        raise PlanError(f"{module_name} has no function named {attribute!r}{like}")
    try:
        with torch.device("meta"):
            result = factory()
    except Exception as error:
        raise ModelCodeError(f"{spec} failed when called on the meta device") from error
    return _model_and_inputs(spec, result)


def _model_and_inputs(spec: str, result: object) -> ModelAndInputs:
    if isinstance(result, nn.Module):
        return ModelAndInputs(result)
    match result:
        case (nn.Module() as model, (tuple() | list()) as args):
            return ModelAndInputs(model, tuple(args))
        case (nn.Module() as model, (tuple() | list()) as args, dict() as kwargs):
            return ModelAndInputs(model, tuple(args), kwargs)
    raise PlanError(
        f"{spec} must return a model, (model, args) or (model, args, kwargs), args a tuple and "
        f"kwargs a dict; it returned {_describe(result)}"
    )


def _describe(result: object) -> str:
    if isinstance(result, tuple):
        return f"({', '.join(type(item).__name__ for item in result)})"
    return type(result).__name__


def load_with_inputs(
    options: argparse.Namespace, progress: Progress, purpose: str
) -> ModelAndInputs:
    """The model of `options.factory` with its example inputs, which `purpose` needs."""
    with progress.stage("build the model"):
        loaded = load_model(options.factory)
    if loaded.args is None:
        raise PlanError(
            f"a {purpose} needs example inputs: let {options.factory} return (model, args) or "
            "(model, args, kwargs)"
        )
    return loaded


def plan_of(
    options: argparse.Namespace,
    loaded: ModelAndInputs,
    progress: Progress,
    policy_and_backend: tuple[Policy, str] | None = None,
) -> ShardingPlan:
    """The plan that `options` ask for, or that of another policy and backend."""
    policy, backend = policy_and_backend or (policy_of(options), backend_of(options))
    mesh = options.mesh
    if mesh and policy_and_backend and not needs_groups(policy):
        mesh = (prod(mesh),)  # of two policies, one may have groups
    machine = Hardware.load(getattr(options, "hardware", "h100-sxm"))
    ranks = prod(options.mesh) if options.mesh else options.world_size or 1
    by_gloo = machine.process_group_backend == "gloo"
    return graphshard.plan(
        loaded.model,
        policy,
        backend=backend,
        device=machine.program_device,
        process_group_backend=machine.process_group_backend,
        hosts=machine.nodes(ranks) if by_gloo else 1,
        world_size=options.world_size,
        mesh_shape=mesh,
        example_inputs=loaded.args,
        example_kwargs=loaded.kwargs or None,
        progress=progress,
    )


# -- models of transformers ------------------------------------------------------------------------

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
            f"{place} is not of a causal language model, and names "
            f"{' and '.join(named) or 'no architecture'}, which transformers has not; let it name "
            "one of a language model, or give a factory that returns model and example inputs"
        ) from error
    return model, {"input_ids": ids, "labels": ids}


def _of_language(made: Any) -> bool:
    """Whether labels are tokens, and the model takes nothing but text."""
    kinds = ("CausalLM", "LMHeadModel", "MaskedLM", "ConditionalGeneration")
    taken = {"input_ids", "labels"} <= {*inspect.signature(made.forward).parameters}
    text = made.main_input_name == "input_ids" and not hasattr(made.config_class, "vision_config")
    return taken and text and made.__name__.endswith(kinds)

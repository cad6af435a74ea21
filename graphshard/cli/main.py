"""The command line: plan, dump, simulate and tune a model for any world size, without ranks.

Exit codes: 0 done; 1 the model's own code or a file failed; 2 a GraphshardError or wrong arguments;
130 interrupted.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.text import Text
from torch import nn

import graphshard
from graphshard.cli.calibrate import add_calibrate
from graphshard.cli.compare_trace import add_compare_trace, trace_text
from graphshard.cli.consolidate import add_consolidate
from graphshard.cli.doctor import add_doctor, version_of
from graphshard.cli.from_config import PREFIX, model_of_config
from graphshard.cli.machine import set_machine
from graphshard.cli.parser import CommandParser
from graphshard.cli.policy import (
    POLICY_HELP,
    add_backend,
    add_hardware,
    add_policy_fields,
    backend_of,
    parse_bytes,
    parse_mesh,
    policies_of,
    policy_of,
)
from graphshard.cli.report import add_report, write_report
from graphshard.cli.simulate import add_compare, add_simulate, comparison_text, estimate_text
from graphshard.cli.tune import add_tune, parse_counts, search_policy, search_runs, wants_runs
from graphshard.errors import GraphshardError, PlanError, PolicyError
from graphshard.hardware.hardware import Hardware
from graphshard.inspect.dump import dump_program
from graphshard.planning.plan import ShardingPlan
from graphshard.planning.searched import needs_groups
from graphshard.policy.base import Policy
from graphshard.progress import Progress

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
        raise PlanError(f"a factory is written pkg.module:function, without .py; got {spec!r}")
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
        raise PlanError(f"{module_name} has no function named {attribute!r}")
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


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = CommandParser(
        prog="graphshard", description="Plan and inspect sharded training steps, without ranks."
    )
    version = f"graphshard {version_of('graphshard')}, torch {torch.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    plan = _add_command(commands, "plan", "print the sharding plan of a model")
    plan.add_argument("--unfold", action="store_true", help="one line per unit, alike or not")
    add_hardware(plan)
    plan.add_argument("--json", action="store_true", help="print the plan as JSON")
    plan.set_defaults(run=run_plan)

    dump = _add_command(
        commands, "dump", "write the plan and the rewritten program to files", "--out DIR"
    )
    dump.add_argument("--out", required=True, type=Path, metavar="DIR", help="where to write them")
    add_hardware(dump)
    dump.set_defaults(run=run_dump)

    simulate = _add_command(
        commands, "simulate", "predict time and memory of a training step", "--hardware NAME|FILE"
    )
    add_simulate(simulate)
    simulate.set_defaults(run=run_simulate)

    compare = _add_command(
        commands,
        "compare",
        "predict a training step under two policies",
        "--policy 'POLICY [FIELDS]' --hardware NAME|FILE",
        several=True,
    )
    add_compare(compare)
    compare.set_defaults(run=run_compare)

    against = _add_command(
        commands,
        "compare-trace",
        "set a trace of torch.profiler beside the predicted step",
        "--trace FILE --hardware NAME|FILE",
    )
    add_compare_trace(against)
    against.set_defaults(run=run_compare_trace)

    report = _add_command(
        commands,
        "report",
        "write a page to look at: plan, timeline, memory",
        "--out FILE --hardware NAME|FILE",
    )
    add_report(report)
    report.set_defaults(run=run_report)

    tune = _add_command(
        commands, "tune", "search for the fastest policy that fits", any_policy=True
    )
    add_tune(tune)
    tune.set_defaults(run=run_tune)

    add_calibrate(commands)
    add_consolidate(commands, parse_bytes)
    add_doctor(commands)
    return parser


def _add_command(
    commands: Any,
    name: str,
    summary: str,
    required: str = "",
    *,
    several: bool = False,
    any_policy: bool = False,
) -> argparse.ArgumentParser:
    """Add a command on a model; `required` are options without which it does not run."""
    policy = "" if any_policy else "--policy 'POLICY [FIELDS]' " if several else "--policy POLICY "
    sizes = "(--world-size W | --mesh AxB" + (" | --ranks N-N)" if any_policy else ")")
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        usage=" ".join(f"%(prog)s FACTORY {policy}{sizes} {required} [OPTIONS]".split()),
        help=summary,
        description=summary,
        epilog=f"{FACTORY_HELP}\n{POLICY_HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_argument("factory", metavar="FACTORY", help="pkg.module:function (see below)")
    forms = "size:N, block or block:A,B (see below)"
    if several:
        command.add_argument(
            "--policy",
            required=True,
            action="append",
            metavar="'POLICY [FIELDS]'",
            help=f"given twice: {forms}, and in the same quotes what is only its own, as in "
            "'block --recompute units'",
        )
    else:
        forms = f"the units, if they are not to be searched: {forms}" if any_policy else forms
        command.add_argument("--policy", required=not any_policy, help=forms)
    ranks = command.add_mutually_exclusive_group(required=True)
    ranks.add_argument("--world-size", type=int, metavar="W", help="number of ranks")
    ranks.add_argument("--mesh", type=parse_mesh, metavar="AxB", help="shape of the mesh of ranks")
    if any_policy:
        ranks.add_argument(
            "--ranks", type=parse_counts, metavar="N-N", help="to compare: 8,24 or 8-64 (doubling)"
        )

    add_policy_fields(command)
    if not any_policy:
        add_backend(command)
    command.add_argument("--times", action="store_true", help="say how long each stage took")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return command


def _plan(
    options: argparse.Namespace,
    loaded: ModelAndInputs,
    progress: Progress,
    policy_and_backend: tuple[Policy, str] | None = None,
) -> ShardingPlan:
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


def run_plan(options: argparse.Namespace, progress: Progress) -> RenderableType:
    """Run `graphshard plan`; return the plan as text, table or JSON."""
    with progress.stage("build the model"):
        loaded = load_model(options.factory)
    plan = _plan(options, loaded, progress)
    if options.json:
        return json.dumps(plan.to_dict(), indent=2)
    if sys.stdout.isatty():
        return plan.table(unfold=options.unfold)
    return plan.text(unfold=options.unfold)


def _load_with_inputs(
    options: argparse.Namespace, progress: Progress, purpose: str
) -> ModelAndInputs:
    with progress.stage("build the model"):
        loaded = load_model(options.factory)
    if loaded.args is None:
        raise PlanError(
            f"a {purpose} needs example inputs: let {options.factory} return (model, args) or "
            "(model, args, kwargs)"
        )
    return loaded


def run_simulate(options: argparse.Namespace, progress: Progress) -> str:
    """Run `graphshard simulate`; write the requested files and return the estimate."""
    plan = _plan(options, _load_with_inputs(options, progress, "simulation"), progress)
    with progress.stage("simulate"):
        return estimate_text(plan, options)


def run_compare(options: argparse.Namespace, progress: Progress) -> str:
    """Run `graphshard compare`; return the estimates of two policies side by side."""
    if len(options.policy) != 2:
        raise PolicyError(f"two policies are compared; --policy was given {len(options.policy)}x")
    policies = policies_of(options)
    loaded = _load_with_inputs(options, progress, "comparison")
    plans = [
        _plan(options, loaded, progress, policy_and_backend) for policy_and_backend in policies
    ]
    with progress.stage("simulate"):
        return comparison_text(plans, options.policy, options)


def run_compare_trace(options: argparse.Namespace, progress: Progress) -> str:
    """Run `graphshard compare-trace`; return the measured step beside the predicted one."""
    plan = _plan(options, _load_with_inputs(options, progress, "comparison"), progress)
    with progress.stage("simulate"):
        return trace_text(plan, options)


def run_report(options: argparse.Namespace, progress: Progress) -> str:
    """Run `graphshard report`; return the path of the written page."""
    loaded = _load_with_inputs(options, progress, "report")

    def plan_under(policy: Policy | None) -> ShardingPlan:
        chosen = None if policy is None else (policy, backend_of(options))
        return _plan(options, loaded, progress, chosen)

    return write_report(loaded, options, progress, plan_under)


def run_tune(options: argparse.Namespace, progress: Progress) -> RenderableType:
    """Run `graphshard tune`; return the policy, and why others are not better."""
    search = search_runs if wants_runs(options) else search_policy
    loaded = _load_with_inputs(options, progress, "search")
    found = search(loaded.model, loaded.args or (), loaded.kwargs, options, progress)
    return json.dumps(found.to_dict(), indent=2) if options.json else str(found)


def run_dump(options: argparse.Namespace, progress: Progress) -> str:
    """Run `graphshard dump`; return the paths of the written files, one per line."""
    plan = _plan(options, _load_with_inputs(options, progress, "dump"), progress)
    assert plan.program is not None  # since there are example inputs
    with progress.stage("write the files"):
        return "\n".join(map(str, dump_program(plan.program, plan, options.out)))


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: that of the process) and return the exit code."""
    options = build_parser().parse_args(argv)
    progress = Progress()
    try:
        if options.run is run_tune:
            progress = Progress(lines=True, file=options.progress)
        set_machine(options)
        with progress.stage("total"):
            result = options.run(options, progress)
        if isinstance(result, str):
            if result:  # empty on ranks other than 0 of a calibration
                print(result)
        else:
            Console().print(result)
        sys.stdout.flush()
    except GraphshardError as error:
        return _fail(str(error), 2, debug=options.debug)
    except ModelCodeError as error:
        cause = error.__cause__
        message = f"{error}: {type(cause).__name__}: {cause}\nRun with --debug for its traceback."
        return _fail(message, 1, debug=options.debug)
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader closed the pipe, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except OSError as error:
        return _fail(f"a file cannot be read or written: {error}", 1, debug=options.debug)
    if options.times:
        print(progress.report(), file=sys.stderr)
    return 0


def _fail(message: str, code: int, *, debug: bool) -> int:
    if debug:
        traceback.print_exc()
    else:
        Console(stderr=True).print(Text(message, style="red"), soft_wrap=True)
    return code

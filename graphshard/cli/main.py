"""The command line: plan, dump, simulate and tune a model for any world size, without ranks.

Exit codes: 0 done; 1 the model's own code or a file failed; 2 a GraphshardError or wrong arguments;
130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.text import Text

from graphshard.cli.calibrate import add_calibrate
from graphshard.cli.consolidate import add_consolidate
from graphshard.cli.doctor import add_doctor, version_of
from graphshard.cli.model import (
    FACTORY_HELP,
    ModelCodeError,
    load_model,
    load_with_inputs,
    plan_of,
)
from graphshard.cli.policy import (
    POLICY_HELP,
    CommandParser,
    add_backend,
    add_hardware,
    add_policy_fields,
    parse_mesh,
    set_machine,
)
from graphshard.cli.simulate import add_compare, add_compare_trace, add_report, add_simulate
from graphshard.cli.tune import add_tune, parse_counts, run_tune
from graphshard.errors import GraphshardError
from graphshard.inspect.dump import dump_program
from graphshard.progress import Progress


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

    add_simulate(_add_command(commands, "simulate", "predict time and memory of a training step"))
    add_compare(
        _add_command(
            commands,
            "compare",
            "predict a training step under two policies",
            "--policy 'POLICY [FIELDS]'",
            several=True,
        )
    )
    add_compare_trace(
        _add_command(
            commands,
            "compare-trace",
            "set a trace of torch.profiler beside the predicted step",
            "--trace FILE --hardware NAME|FILE",
        )
    )
    add_report(
        _add_command(
            commands,
            "report",
            "write a page to look at: plan, timeline, memory",
            "--out FILE",
        )
    )
    summary = "search for the fastest policy that fits"
    add_tune(_add_command(commands, "tune", summary, any_policy=True))
    add_calibrate(commands)
    add_consolidate(commands)
    add_doctor(commands)
    for command in commands.choices.values():
        command.others = commands.choices
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
    command.add_argument(
        "factory", metavar="FACTORY", help="pkg.module:function or hf:CONFIG (see below)"
    )
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


def run_plan(options: argparse.Namespace, progress: Progress) -> RenderableType:
    """Run `graphshard plan`; return the plan as text, table or JSON."""
    with progress.stage("build the model"):
        loaded = load_model(options.factory)
    plan = plan_of(options, loaded, progress)
    if options.json:
        return json.dumps(plan.to_dict(), indent=2)
    if sys.stdout.isatty():
        return plan.table(unfold=options.unfold)
    return plan.text(unfold=options.unfold)


def run_dump(options: argparse.Namespace, progress: Progress) -> str:
    """Run `graphshard dump`; return the paths of the written files, one per line."""
    plan = plan_of(options, load_with_inputs(options, progress, "dump"), progress)
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

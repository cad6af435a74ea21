"""Write files for debugging: the plan, the rewritten program, and the Python that ranks run."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from torch import fx

from graphshard.errors import RuntimeStateError
from graphshard.inspect.code import graph_source
from graphshard.inspect.dot import dot_text, schedule_graph
from graphshard.planning.plan import ShardingPlan
from graphshard.program.cut import cut
from graphshard.program.program import ParamEntry, Program
from graphshard.program.text import full_text, schedule_text, value_text

_FORWARD_RETURNS = """\
Returns [outputs, mutations, tensors kept for backward, other values kept for backward]."""


_BACKWARD_RETURNS = """\
Returns [gradients of parameters, gradients of inputs], None where there is none."""


_BINDINGS = """\
The functions imported from graphshard.ops name the communication and cannot be called as they
are: on a rank the runtime puts the collectives of the unit in their place. To run this file by
itself, set these names to functions of your own; see graphshard.ops for what each has to do."""


def dump_program(
    program: Program, plan: ShardingPlan, directory: str | os.PathLike[str]
) -> list[Path]:
    """Write `program` and `plan` as files into `directory`, which is created if needed.

    schedule.txt   events, compute collapsed per unit
    program.txt    every node
    forward.py     a rank's forward as Python
    backward.py    a rank's backward as Python (not for a forward-only program)
    plan.json      `plan.to_dict()`
    schedule.dot   `schedule_graph(program)` for Graphviz

    The same program and plan give the same bytes. Files are written atomically, so all ranks may
    write to one directory.

    Returns:
        The paths of the files, in the order above.
    """
    phases = cut(program)
    meanings = dict(_meanings(program, plan))
    files = {
        "schedule.txt": schedule_text(program),
        "program.txt": full_text(program),
        "forward.py": _source("forward", phases.forward, meanings, plan.world_size),
    }
    if phases.backward is not None:
        files["backward.py"] = _source("backward", phases.backward, meanings, plan.world_size)
    files["plan.json"] = json.dumps(plan.to_dict(), indent=2) + "\n"
    files["schedule.dot"] = dot_text(schedule_graph(program))
    return _write(Path(directory), files)


def dump_programs(
    programs: Sequence[Program], plan: ShardingPlan, directory: str | os.PathLike[str]
) -> list[Path]:
    """Call `dump_program` for each of `programs`, in the order of capture.

    The first is written into `directory`, the others into program_1, program_2 and so on below it.

    Returns:
        The paths of all files.
    """
    if not programs:
        raise RuntimeStateError(
            "there is no program to dump before one is captured; pass example_inputs to "
            "graphshard.compile or call the module once"
        )
    paths = []
    for index, program in enumerate(programs):
        folder = Path(directory) / f"program_{index}" if index else Path(directory)
        paths += dump_program(program, plan, folder)
    return paths


def _source(phase: str, graph: fx.Graph, meanings: Mapping[str, str], world_size: int) -> str:
    placeholders = graph.find_nodes(op="placeholder")
    rows = [
        (node.name, _type(node.meta.get("val")), meanings.get(node.name, "kept from forward"))
        for node in placeholders
    ]
    names, types = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    parameters = [f"    {name:<{names}}  {type_:<{types}}  {what}" for name, type_, what in rows]
    explanation = "\n".join(
        [
            f"The {phase} of one step, the same on each rank of {world_size}.",
            "",
            f"{phase}() takes, in order:",
            "",
            *parameters,
            "",
            _FORWARD_RETURNS if phase == "forward" else _BACKWARD_RETURNS,
            "",
            _BINDINGS,
            "",
        ]
    )
    return graph_source(graph, phase, explanation)


def _meanings(program: Program, plan: ShardingPlan) -> Iterator[tuple[str, str]]:
    """Yield the name and the meaning of each placeholder of the program."""
    for param in program.params:
        shard = ", this rank's shard" if _is_shard(param, program, plan) else ""
        host = ", on the host" if plan.policy.offloads("params") and not param.ignored else ""
        yield param.node.name, f"parameter {' = '.join(param.names)}{shard}{host}"
    for buffer in program.buffers:
        yield buffer.node.name, f"{'constant' if buffer.constant else 'buffer'} {buffer.fqn}"
    for entry in program.inputs:
        yield entry.node.name, f"input {entry.path}"
    for output in program.outputs:
        if output.tangent is not None:
            yield output.tangent.name, f"gradient of output {output.path}"


def _is_shard(param: ParamEntry, program: Program, plan: ShardingPlan) -> bool:
    return plan.layouts[param.fqn].enters_as_shard(program.stale)


def _type(value: object) -> str:
    return f"{len(value)} tensors" if isinstance(value, list) else value_text(value)


def _write(directory: Path, files: Mapping[str, str]) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for name, text in files.items():
        path = directory / name
        temporary = directory / f".{name}.{uuid.uuid4().hex}"
        try:
            temporary.write_text(text, encoding="utf-8")
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
        paths.append(path)
    return paths

"""A program as stable text: its schedule, or every node; no addresses, times or hash order."""

from __future__ import annotations

import linecache
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
from torch import fx

from graphshard.format import mesh_text, some_of
from graphshard.policy.placement import Along, along_text
from graphshard.program import ops
from graphshard.program.aliases import bytes_text
from graphshard.program.collective import Collective, OneTensor, operands_of, param_of
from graphshard.program.finite import Check, values_of
from graphshard.program.program import (
    BACKWARD,
    COMPUTE,
    FORWARD,
    RECOMPUTED,
    REPLAYS,
    Program,
)
from graphshard.program.regions import region_labels
from graphshard.program.sizes import size_text
from graphshard.program.storages import gathered_bytes, storages_of
from graphshard.torch_private.compat import SYMBOLIC

_SHORT_DTYPES = {
    torch.float64: "f64",
    torch.float32: "f32",
    torch.float16: "f16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "bool",
    torch.complex64: "c64",
    torch.complex128: "c128",
}


def schedule_text(program: Program) -> str:
    """The program's events, one on each line; see `Program.timeline`.

    The first column is the bytes of unsharded parameters alive after the event. Compute in forward
    shows the bytes it computes that are saved for backward, and compute in backward the number of
    operators that are recomputed.
    """
    rows: list[tuple[str, str, str, str] | str] = []
    phase = ""
    storages = storages_of(program)
    live = storages.live_unsharded()
    saved = storages.saved_by(lambda storage: storage.node)
    for event, nodes in program.timeline():
        if event.phase != phase:
            phase = event.phase
            rows.append(phase)
        compute = event.op == COMPUTE
        if compute:
            detail = ", ".join([_compute(nodes, saved), *region_labels(nodes, program.regions)])
        else:
            detail = _communication(nodes, program)
        rows.append(
            (f"{live[storages.place[nodes[-1]]]:,}", event.op, unit_label(event.unit), detail)
        )
    heading = ("live bytes", "event", "unit", "")
    return "\n".join([*_header(program), "", *_table(heading, rows)]) + "\n"


def full_text(program: Program) -> str:
    """Every node of the program, one on each line, with dtype, shape, phase and module."""
    lines = [*_header(program), ""]
    roles = dict(_roles(program))
    phase = ""
    for node in program.graph.nodes:
        if node.op == "placeholder":
            lines.append(f"%{node.name} : {value_text(node.meta.get('val'))} = {roles[node]}")
            continue
        if node.op != "output" and node.meta["phase"] != phase:
            phase = node.meta["phase"]
            lines += ["", f"{phase}:"]
        if node.op != "output":
            lines.append(node_line(node))
    return "\n".join([*lines, "", *_ends(program)]) + "\n"


def source_line(node: fx.Node) -> str | None:
    """The line of the model that a node comes from, and whether the node is of its backward."""
    if "line" not in node.meta:
        return None
    file, number, function = node.meta["line"]
    source = linecache.getline(file, number).strip()
    of = "" if node.meta["phase"] == FORWARD else "the backward of "
    return f"{of}{file}:{number} in {function}: {source}"


def node_line(node: fx.Node) -> str:
    """One node as text: %name : dtype[shape] = op(arguments)  # phase module."""
    if node.op == "output":
        return f"return {argument_text(node.args[0])}"
    call = f"{node.op} {node.target}" if node.op != "call_function" else _call(node)
    where = f"{node.meta.get('phase', '?')} {node.meta.get('fqn') or '(root)'}"
    where += f", draws as %{node.meta[REPLAYS]}" if REPLAYS in node.meta else ""
    where += "".join(f", {region}" for region in region_labels([node], None))
    return f"%{node.name} : {value_text(node.meta.get('val'))} = {call}  # {where}"


def value_text(val: Any) -> str:
    """The dtype and shape of a value: "f32[2, 3]", "(f32[2], None)", "None"."""
    if isinstance(val, torch.Tensor):
        return f"{dtype_text(val.dtype)}[{', '.join(map(size_text, val.shape))}]"
    if isinstance(val, (tuple, list)):
        return f"({', '.join(map(value_text, val))})"
    if isinstance(val, SYMBOLIC):
        return size_text(val)
    return "None" if val is None else type(val).__name__


def dtype_text(dtype: torch.dtype) -> str:
    """A short name of a dtype, such as "f32"."""
    return _SHORT_DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def unit_label(unit: str) -> str:
    """The FQN of a unit, or "(root)"."""
    return unit or "(root)"


def argument_text(value: Any) -> str:
    """An argument of a node as stable text."""
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, list):
        return f"[{', '.join(map(argument_text, value))}]"
    if isinstance(value, tuple):
        comma = "," if len(value) == 1 else ""
        return f"({', '.join(map(argument_text, value))}{comma})"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{k!r}: {argument_text(v)}' for k, v in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({argument_text((value.start, value.stop, value.step))})"
    text = repr(value)
    return f"<{type(value).__name__}>" if " at 0x" in text else text


def _call(node: fx.Node) -> str:
    if node.target is operator.getitem:
        return f"{argument_text(node.args[0])}[{argument_text(node.args[1])}]"
    arguments = [argument_text(arg) for arg in node.args]
    arguments += [f"{key}={argument_text(arg)}" for key, arg in node.kwargs.items()]
    return f"{target_text(node.target)}({', '.join(arguments)})"


def target_text(target: Any) -> str:
    """The name of a node's target: "aten.mm", "all_gather"."""
    if target in ops.VOCABULARY:
        return str(target.__name__)
    if hasattr(target, "overloadpacket"):
        return str(target).removesuffix(".default")
    return str(getattr(target, "__name__", type(target).__name__))


def _header(program: Program) -> list[str]:
    counts = Counter(node.meta["phase"] for node in program.nodes() if ops.is_compute(node))
    kind = "forward and backward" if program.grad else "forward only"
    mode = "train" if program.training else "eval"
    numel = sum(param.numel for param in program.params)
    frozen = sum(not param.requires_grad for param in program.params)
    ranks = _count(program.world_size, "rank")
    if len(program.mesh_shape) > 1:
        ranks += f" as {mesh_text(program.mesh_shape)}"
    computes = ", ".join(f"{counts[p]:,} {p}" for p in (FORWARD, BACKWARD) if counts[p])
    return [
        f"program: {kind}, {mode} mode, {ranks}, captured on {program.capture_device}",
        f"parameters: {len(program.params):,}, {_count(numel, 'element')}"
        + (f", {frozen:,} frozen" if frozen else ""),
        f"compute ops: {computes or 'none'}",
        *(program.sizes.header([i.path for i in program.inputs]) if program.sizes else ()),
        *((f"schedule: {program.budget}",) if program.budget else ()),
        *((f"regions: {program.regions}",) if program.regions is not None else ()),
        *(f"note: {note}" for note in program.notes),
        *((f"note: cuda graph: {program.cuda_graphs}",) if program.cuda_graphs else ()),
    ]


def _communication(nodes: list[fx.Node], program: Program) -> str:
    node = nodes[0]
    op = ops.op_of(node)
    if node.target in ops.CHECKS:
        return _checked(nodes)
    if node.target in ops.RANDOM_STATES:
        device = node.kwargs["device"]
        if node.target is ops.save_random_state:
            return f"{bytes_text([node])} bytes, of the {device} generator"
        restores = node.args[0].target is ops.set_random_state  # type: ignore[union-attr]
        return f"of the {device} generator, {'as it was before' if restores else 'to draw again'}"
    if op is not None and op.in_runs:
        values = _values(nodes)
        noun = "param" if param_of(node) is not None else "tensor"
        if node.target is ops.arrive:
            return f"of {ops.op_name(node.args[0])}, {_count(len(nodes), noun)}"  # type: ignore
        over = f" for groups of {OneTensor.of(node).ranks}" if node.target is ops.reshard else ""
        return _amount(bytes_text(nodes), values, noun, over)
    issued = ops.collective_of(node)
    collective = Collective.of(issued)
    if node.target is ops.wait:
        return f"for {collective.op.name}"
    if node.target is ops.free:
        return f"{gathered_bytes(issued, program):,} bytes{_with_others(collective)}"
    operands = operands_of(issued)
    values, size = _values(operands), bytes_text(operands)
    if collective.op.gathers:
        size = f"{gathered_bytes(issued, program):,}"
        waits = (user for user in issued.users if user.target is ops.wait)
        values = next((wait.meta["val"] for wait in waits), values)
    return _amount(size, values, over=_over(collective), dims=collective.dims)


def _checked(checks: list[fx.Node]) -> str:
    """What the nodes of an event of checks read, as text."""
    if checks[0].target is ops.report_finite:
        return f"{_count(len(values_of(checks[0])), 'number')}, to all ranks"
    read = [value for check in checks for value in values_of(check)]
    of = " and ".join(dict.fromkeys(str(Check.of_node(check).of) for check in checks))
    return _amount(bytes_text(read), _values(read), "tensor", over=f" of {of}")


def _over(collective: Collective) -> str:
    """The group and the further units of a collective, as text."""
    over = f" over {collective.named_group}" if collective.named_group is not None else ""
    if collective.ranks is not None:
        over = f" over groups of {collective.ranks}"
    over += " in place" if collective.in_place else ""
    return over + _with_others(collective)


def _with_others(collective: Collective) -> str:
    """The units of a collective but the first, as text."""
    others = [unit_label(unit) for unit in dict.fromkeys(collective.units)][1:]
    return f" with {some_of(others)}" if others else ""


def _amount(
    size: str,
    values: list[torch.Tensor],
    noun: str = "param",
    over: str = "",
    dims: Sequence[Along] = (),
) -> str:
    shapes = Counter(
        value_text(value) + (f" by {along_text(dim)}" if dim else "")
        for value, dim in zip_longest(values, dims, fillvalue=0)
    )
    each = ", ".join(text if n == 1 else f"{n} x {text}" for text, n in shapes.items())
    return f"{size} bytes{over}, {_count(len(values), noun)}: {each}"


def _compute(nodes: list[fx.Node], saved: Mapping[fx.Node, int]) -> str:
    computed = [node for node in nodes if node.target is not ops.release]
    released = [node.args[0] for node in nodes if node.target is ops.release]
    detail = _count(len(computed), "op")
    recomputed = sum(RECOMPUTED in node.meta for node in nodes)
    saved_bytes = sum(saved.get(node, 0) for node in nodes)
    detail += f", {recomputed:,} recomputed" if recomputed else ""
    detail += f", saves {saved_bytes:,} bytes" if saved_bytes else ""
    return detail + (f", releases {_count(len(released), 'param')}" if released else "")


def _values(nodes: Iterable[fx.Node]) -> list[torch.Tensor]:
    return [node.meta["val"] for node in nodes]


def _table(
    heading: tuple[str, ...], rows: Iterable[tuple[str, str, str, str] | str]
) -> Iterator[str]:
    rows = list(rows)
    cells = [heading, *(row for row in rows if not isinstance(row, str))]
    widths = [max(len(row[column]) for row in cells) for column in range(3)]
    for row in (heading, *rows):
        if isinstance(row, str):
            yield f"{row}:"
            continue
        live, event, unit, detail = row
        line = f"{live:>{widths[0]}}  {event:<{widths[1]}}  {unit:<{widths[2]}}  {detail}"
        yield line.rstrip()


def _roles(program: Program) -> Iterator[tuple[fx.Node, str]]:
    """Each placeholder with the text of its entry in the tables."""
    for param in program.params:
        ties = f", also {', '.join(param.names[1:])}" if len(param.names) > 1 else ""
        frozen = "" if param.requires_grad else ", frozen"
        frozen += ", ignored" if param.ignored else ""
        shape = ", ".join(map(str, param.shape))
        yield param.node, f"parameter {param.fqn} [{shape}]{frozen}{ties}"
    yield from roles_of_others(program)


def roles_of_others(program: Program) -> Iterator[tuple[fx.Node, str]]:
    """Each placeholder but those of parameters, with its role in words."""
    for buffer in program.buffers:
        yield buffer.node, f"{'constant' if buffer.constant else 'buffer'} {buffer.fqn}"
    for entry in program.inputs:
        yield entry.node, f"input {entry.path}"
    for output in program.outputs:
        if output.tangent is not None:
            yield output.tangent, f"gradient of output {output.path or '(the result)'}"


def _ends(program: Program) -> Iterator[str]:
    """The output node's lists, one value on each line."""
    results = program.results()
    for output, value in zip(program.outputs, results.outputs, strict=True):
        yield f"output {output.path or '(the result)'} = {argument_text(value)}"
    for mutation, value in zip(program.mutations, results.mutations, strict=True):
        yield f"{mutation.kind} {mutation.name} becomes {argument_text(value)}"
    for param, value in zip(program.params, results.grads, strict=True):
        if value is not None:
            yield f"gradient of {param.fqn} = {argument_text(value)}"
    for entry, value in zip(program.inputs, results.input_grads, strict=True):
        if value is not None:
            yield f"gradient of {entry.path} = {argument_text(value)}"


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}" + ("" if number == 1 else "s")

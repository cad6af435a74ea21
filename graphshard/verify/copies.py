"""Rules on copies between device and host, on casts, and on gradients kept for later."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from torch import fx

from graphshard.planning.layout import ParamLayout
from graphshard.program import ops
from graphshard.program.aliases import aliases_of, storage_root
from graphshard.program.collective import OneTensor, operands_of, param_of, params_of
from graphshard.program.pass_protocol import Stage
from graphshard.program.program import signature
from graphshard.verify.facts import Facts


def check_copies(facts: Facts) -> None:
    """A copy arrives once, in its phase; compute reads nothing that lies on the host.

    A saved activation is copied to the host once and copied back once. Its memory is freed when the
    copy has arrived, so nothing reads it on the device afterwards. From `Stage.OFFLOADED` on, only
    copies read parameters, and every gradient is returned on the host.
    """
    copied: dict[fx.Node, fx.Node] = {}  # the copy, by its operand
    for node in facts.nodes:
        if node.target is ops.arrive and _source(node).target not in ops.COPIES:
            facts.fail("copies", node, f"%{_source(node).name} is no copy that could arrive")
        if node.target in ops.COPIES:
            _check_copy(facts, node, copied)
    if Stage.OFFLOADED in facts.done:
        grads = facts.program.results().grads
        for param, grad in zip(facts.program.params, grads, strict=True):
            if param.ignored:
                continue
            for user in param.node.users:
                if user.target is not ops.to_device:
                    facts.fail(
                        "copies", user, f"it reads %{param.node.name}, which lies on the host"
                    )
            if grad is not None and not _on_host(grad):
                facts.fail("copies", grad, f"the gradient of {param.fqn!r} is left on the device")


def _check_copy(facts: Facts, copy: fx.Node, copied: dict[fx.Node, fx.Node]) -> None:
    arrival, source = _arrival(facts, copy), _source(copy)
    if copy.target is ops.to_host:
        _check_on_host(facts, arrival)
    if param_of(copy) is not None:
        name = str(param_of(copy))
        param = facts.params[name].node
        if (copy.target is ops.to_device) != (_source(copy) is param):
            role = "the parameter" if copy.target is ops.to_device else "a gradient"
            facts.fail("copies", copy, f"%{_source(copy).name} is not {role} {name!r}")
        return
    first = copied.setdefault(source, copy)
    if first is not copy:
        facts.fail("copies", copy, f"%{first.name} copies %{source.name} already")
    if copy.target is ops.to_host:
        _check_freed(facts, copy, arrival, copied)
    elif not _on_host(source):
        facts.fail("copies", copy, f"%{source.name} does not lie on the host")


def _arrival(facts: Facts, copy: fx.Node) -> fx.Node:
    """The `arrive` that ends `copy`."""
    for user in copy.users:
        if user.target is not ops.arrive:
            facts.fail("copies", user, f"it reads %{copy.name}, which has not arrived")
    arrivals = list(copy.users)
    if len(arrivals) != 1:
        facts.fail("copies", copy, f"it must arrive once, and does {len(arrivals)} times")
    if arrivals[0].meta["phase"] != copy.meta["phase"]:
        facts.fail("copies", arrivals[0], "a copy must arrive in the phase it is issued in")
    return arrivals[0]


def _check_on_host(facts: Facts, value: fx.Node) -> None:
    for user in value.users:
        if user.op != "output" and user.target is not ops.to_device:
            facts.fail("copies", user, f"it reads %{value.name}, which lies on the host")


def _check_freed(
    facts: Facts, copy: fx.Node, arrival: fx.Node, copied: dict[fx.Node, fx.Node]
) -> None:
    root = storage_root(_source(copy))
    if root in copied and root is not _source(copy):
        facts.fail(
            "copies", copy, f"%{copied[root].name} copies the storage of its operand already"
        )
    freed = facts.place[arrival]
    for value in aliases_of(root):
        for user in (value, *value.users):
            if user.op == "call_function" and facts.place[user] > freed:
                facts.fail(
                    "copies",
                    user,
                    f"it reads %{value.name} on the device after %{arrival.name}; read what is "
                    "copied back, or copy later",
                )


def _on_host(value: fx.Node) -> bool:
    return value.target is ops.arrive and _source(value).target is ops.to_host


def _source(node: fx.Node) -> fx.Node:
    source = node.args[0]
    assert isinstance(source, fx.Node)  # see `check_transfers`
    return source


_Key = TypeVar("_Key")


def check_accumulated(facts: Facts) -> None:
    """A program keeps all gradients for a later micro-batch, or none, as their reduces take them.

    A program that keeps shards still reduces the gradients of replicated parameters. An accumulated
    gradient is added once, as adding drops it; only the pass that establishes `Stage.ACCUMULATED`
    chooses which are added.
    """
    keeps: dict[str, fx.Node] = {}
    adds: dict[tuple[str, str], fx.Node] = {}
    for node in facts.nodes:
        if node.target not in (ops.accumulate_grad, ops.add_accumulated):
            continue
        arguments = OneTensor.of(node)
        param, of = arguments.param, arguments.accumulated_as
        exists = isinstance(param, str) and param in facts.params
        if not exists or arguments.unit != facts.plan.unit_of_param(str(param)):
            facts.fail("operands", node, "it must say its parameter, and that one's unit")
        layout = facts.plan.layouts[str(param)]
        shape = {"gradient": layout.shape, "shard": layout.shard_shape}.get(str(of))
        if len(node.args) != 1 or signature(node.args[0].meta["val"])[0] != shape:  # type: ignore
            facts.fail(
                "accumulated", node, f"its operand is no {of!r} of {param!r}, of shape {shape}"
            )
        if node.target is ops.accumulate_grad:
            _note_first(facts, keeps, str(param), node, f"keeps {param!r}")
        else:
            _note_first(facts, adds, (str(param), str(of)), node, f"adds that of {param!r}")
    _check_added(facts, adds)
    for entry, grad in zip(facts.program.params, facts.program.results().grads, strict=True):
        sharded = facts.plan.layouts[entry.fqn].sharded
        whole = any(OneTensor.of(node).accumulated_as == "gradient" for node in keeps.values())
        if keeps and grad is not None and not entry.ignored and (whole or sharded):
            facts.fail(
                "accumulated",
                grad,
                f"the gradient of {entry.fqn!r} is returned, but those of others are kept",
            )


def _note_first(
    facts: Facts, firsts: dict[_Key, fx.Node], key: _Key, node: fx.Node, does: str
) -> None:
    first = firsts.setdefault(key, node)
    if first is not node:
        facts.fail("accumulated", node, f"%{first.name} {does} already")


def _check_added(facts: Facts, adds: Mapping[tuple[str, str], fx.Node]) -> None:
    earlier = None if facts.reference is None else facts.reference.added
    if earlier is None or adds.keys() == earlier:
        return
    param, of = min(adds.keys() ^ earlier)
    fault = "is no longer added" if (param, of) in earlier else "was not added before the pass"
    facts.fail("accumulated", adds.get((param, of)), f"the accumulated {of} of {param!r} {fault}")


Move = tuple[fx.Node, fx.Node, str, torch.dtype]
"""A node, the value that it moves, the words for that in an error, and the dtype planned."""


def check_precision(facts: Facts) -> None:
    """Parameters are gathered, and gradients reduced, kept and returned, in their layout's dtypes.

    `check_values` lets casts of a gradient move to another place than the captured one; this rule
    checks the dtypes that they cast to.
    """
    for node, moved, text, dtype in _moves(facts):
        if moved.meta["val"].dtype != dtype:
            facts.fail(
                "precision",
                node,
                f"{text} in {moved.meta['val'].dtype}, and the plan says {dtype}",
            )


def _moves(facts: Facts) -> Iterator[Move]:
    layouts = facts.plan.layouts
    for node in facts.nodes:
        if node.target in (ops.accumulate_grad, ops.add_accumulated):
            param = str(param_of(node))
            if getattr(node.args[0], "target", None) is ops.cast:
                facts.fail(
                    "precision",
                    node,
                    f"it takes the gradient of {param!r} cast, and the sum is to be rounded alone",
                )
            yield node, node, f"it accumulates {param!r}", layouts[param].reduce_dtype
        if ops.is_collective(node):
            for operand, param in zip(operands_of(node), params_of(node), strict=True):
                yield node, operand, f"it moves {param!r}", _in_transit(node, layouts[param])
    for entry, end in zip(facts.program.params, facts.program.results().grads, strict=True):
        if isinstance(end, fx.Node):
            text = f"the gradient of {entry.fqn!r} is returned"
            yield end, end, text, layouts[entry.fqn].grad_dtype


def _in_transit(collective: fx.Node, layout: ParamLayout) -> torch.dtype:
    gathers = collective.target is ops.all_gather
    return layout.compute_dtype if gathers else layout.reduce_dtype

"""Rules on copies between device and host: each arrives once, is read where it lies, and frees."""

from __future__ import annotations

from torch import fx

from graphshard.program import ops
from graphshard.program.aliases import aliases_of, storage_root
from graphshard.program.collective import OneTensor, param_of
from graphshard.program.pass_protocol import Stage
from graphshard.program.program import signature
from graphshard.verify.facts import Facts


def check_copies(facts: Facts) -> None:
    """A copy arrives once, in its phase; compute reads nothing that lies on the host.

    A saved activation is copied to the host once and brought back once, and nothing reads it on the
    device after its copy has arrived, when its memory is given back. Once parameters are offloaded
    they are read by copies alone, and every gradient is returned on the host.
    """
    copied: dict[fx.Node, fx.Node] = {}  # by what is copied, the copy
    for node in facts.nodes:
        if node.target is ops.arrive and _source(node).target not in ops.COPIES:
            facts.fail("copies", node, f"%{_source(node).name} is no copy that could arrive")
        if node.target in ops.COPIES:
            _check_copy(facts, node, copied)
    if Stage.OFFLOADED in facts.done:
        _check_offloaded(facts)


def _check_copy(facts: Facts, copy: fx.Node, copied: dict[fx.Node, fx.Node]) -> None:
    arrival, source = _arrival(facts, copy), _source(copy)
    if copy.target is ops.to_host:
        _check_on_host(facts, arrival)
    if param_of(copy) is not None:
        _check_param(facts, copy)
        return
    first = copied.setdefault(source, copy)
    if first is not copy:
        facts.fail("copies", copy, f"%{first.name} copies %{source.name} already")
    if copy.target is ops.to_host:
        _check_given_back(facts, copy, arrival, copied)
    elif not _on_host(source):
        facts.fail("copies", copy, f"%{source.name} does not lie on the host")


def _check_param(facts: Facts, copy: fx.Node) -> None:
    """To the device goes a parameter, to the host its gradient."""
    name = str(param_of(copy))
    param = facts.params[name].node
    if (copy.target is ops.to_device) != (_source(copy) is param):
        what = "the parameter" if copy.target is ops.to_device else "a gradient"
        facts.fail("copies", copy, f"%{_source(copy).name} is not {what} {name!r}")


def _check_offloaded(facts: Facts) -> None:
    grads = facts.program.results().grads
    for param, grad in zip(facts.program.params, grads, strict=True):
        if param.ignored:
            continue
        for user in param.node.users:
            if user.target is not ops.to_device:
                facts.fail("copies", user, f"it reads %{param.node.name}, which lies on the host")
        if grad is not None and not _on_host(grad):
            facts.fail("copies", grad, f"the gradient of {param.fqn!r} is left on the device")


def _arrival(facts: Facts, copy: fx.Node) -> fx.Node:
    """The `arrive` of a copy."""
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


def _check_given_back(
    facts: Facts, copy: fx.Node, arrival: fx.Node, copied: dict[fx.Node, fx.Node]
) -> None:
    root = storage_root(_source(copy))
    if root in copied and root is not _source(copy):
        facts.fail(
            "copies", copy, f"%{copied[root].name} copies the storage of its operand already"
        )
    given_back = facts.place[arrival]
    for value in aliases_of(root):
        for user in (value, *value.users):
            if user.op == "call_function" and facts.place[user] > given_back:
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


def check_kept(facts: Facts) -> None:
    """What is kept is a parameter's gradient as its reduce would take it, and all are or none.

    Where shards are kept, the gradients of replicated parameters are reduced all the same.
    """
    kept: dict[str, fx.Node] = {}
    for node in facts.nodes:
        if node.target not in (ops.keep, ops.add_kept):
            continue
        arguments = OneTensor.of(node)
        param, of = arguments.param, arguments.kept_as
        known = isinstance(param, str) and param in facts.params
        if not known or arguments.unit != facts.plan.unit_of_param(str(param)):
            facts.fail("operands", node, "it must say its parameter, and that one's unit")
        layout = facts.plan.layouts[str(param)]
        shape = {"gradient": layout.shape, "shard": layout.shard_shape}.get(str(of))
        if len(node.args) != 1 or signature(node.args[0].meta["val"])[0] != shape:  # type: ignore
            facts.fail("kept", node, f"its operand is no {of!r} of {param!r}, of shape {shape}")
        if node.target is ops.keep:
            if str(param) in kept:
                facts.fail("kept", node, f"%{kept[str(param)].name} keeps {param!r} already")
            kept[str(param)] = node
    for entry, grad in zip(facts.program.params, facts.program.results().grads, strict=True):
        sharded = facts.plan.layouts[entry.fqn].sharded
        whole = any(OneTensor.of(node).kept_as == "gradient" for node in kept.values())
        if kept and grad is not None and not entry.ignored and (whole or sharded):
            facts.fail(
                "kept",
                grad,
                f"the gradient of {entry.fqn!r} is returned, but those of others are kept",
            )

"""Mixed precision in a capture: casts of parameters, buffers, inputs and outputs.

Capture traces the step on full parameters, so every cast is a node of the program. Later passes
only move casts (see `graphshard.passes.precision`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

from graphshard.capture.annotation import FQN
from graphshard.errors import CaptureError
from graphshard.policy.precision import Precisions, keeps_its_dtype
from graphshard.program.aliases import cast_dtype
from graphshard.program.program import FORWARD, Program
from graphshard.program.text import source_line
from graphshard.torch_private.kernels import refuses

Args = tuple[Any, ...]


Kwargs = dict[str, Any]


def cast_all(value: Any, dtype: torch.dtype) -> Any:
    """`value` with the floating-point tensors in it in `dtype`; itself, if they are.

    Looks into what pytree knows, dataclasses and sets, as FSDP2 does.
    """
    leaves, structure = pytree.tree_flatten(value)
    changed = [_cast_leaf(leaf, dtype) for leaf in leaves]
    if all(new is old for new, old in zip(changed, leaves, strict=True)):
        return value
    return pytree.tree_unflatten(changed, structure)


def _cast_leaf(leaf: Any, dtype: torch.dtype) -> Any:
    if isinstance(leaf, Tensor | PackedSequence):
        dtype_now = leaf.data.dtype if isinstance(leaf, PackedSequence) else leaf.dtype
        return leaf if not dtype_now.is_floating_point or dtype_now == dtype else leaf.to(dtype)
    if isinstance(leaf, set):
        return {cast_all(entry, dtype) for entry in leaf}
    if dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
        old = {field.name: getattr(leaf, field.name) for field in dataclasses.fields(leaf)}
        new = {name: cast_all(value, dtype) for name, value in old.items()}
        return leaf if all(new[n] is old[n] for n in old) else dataclasses.replace(leaf, **new)
    return leaf


@contextlib.contextmanager
def cast_at_units(model: nn.Module, precisions: Precisions | None) -> Iterator[None]:
    """Cast the inputs and outputs of the units of `model`, and of its BatchNorms."""
    if precisions is None:
        yield
        return
    removable = []
    for fqn, module in model.named_modules():
        if keeps_its_dtype(module):
            if precisions.around(fqn) is None:
                continue
            before, after = _hooks_for_dtype_of(module)
        else:
            precision = precisions.units.get(fqn)
            if precision is None:
                continue
            input_dtype = precision.param_dtype if precision.cast_forward_inputs else None
            before, after = _hooks_for_dtypes(input_dtype, precision.output_dtype)
        removable.append(module.register_forward_pre_hook(before, prepend=True, with_kwargs=True))
        removable.append(module.register_forward_hook(after))
    try:
        yield
    except RuntimeError as error:
        if not re.search("dtype|scalar type|weight type|bias type|same type", str(error)):
            raise
        kept = [
            f"{name!r} ({buffer.dtype})"
            for name, buffer in model.named_buffers()
            if buffer.is_floating_point() and _keeps_another(model, name, buffer, precisions)
        ]
        if not kept:
            raise
        raise CaptureError(
            "under mixed precision an operator meets operands of two dtypes, which its kernel "
            f"refuses ({error}); buffers keep their dtype unless MixedPrecision has a "
            f"buffer_dtype=, here {', '.join(kept)}: give buffer_dtype=, or cast in the forward"
        ).with_traceback(error.__traceback__) from error
    finally:
        for hook in removable:
            hook.remove()


def dtype_of_buffer(
    module: nn.Module, fqn: str, buffer: Tensor, precisions: Precisions | None
) -> torch.dtype:
    """The dtype in which the forward is shown a buffer of `module`, whose name is `fqn`."""
    precision = None if precisions is None else precisions.around(fqn)
    dtype = None if precision is None else precision.buffer_dtype
    if dtype is None or not buffer.is_floating_point() or keeps_its_dtype(module):
        return buffer.dtype
    return dtype


def _keeps_another(model: nn.Module, name: str, buffer: Tensor, precisions: Precisions) -> bool:
    """Whether a buffer stays in another dtype than the parameters around it are computed in."""
    home = name.rpartition(".")[0]
    precision = precisions.around(home)
    if precision is None or keeps_its_dtype(model.get_submodule(home)):
        return False
    return precision.buffer_dtype is None and precision.param_dtype not in (None, buffer.dtype)


def require_one_dtype(program: Program, precisions: Precisions | None) -> None:
    """Refuse a buffer that keeps its dtype and meets another one in an operator that takes one."""
    if precisions is None:
        return
    buffers = {entry.node: entry.fqn for entry in program.buffers if not entry.constant}
    for node in program.nodes(FORWARD):
        operands = node.all_input_nodes
        vals = [operand.meta.get("val") for operand in operands]
        if not refuses(node.target, [val for val in vals if isinstance(val, Tensor)]):
            continue
        dtypes = {val.dtype for val in vals if isinstance(val, Tensor) and val.is_floating_point()}
        for operand in operands:
            dtype = operand.meta["val"].dtype
            if dtype not in dtypes or len(dtypes) != 2:
                continue
            buffer = _buffer_behind(operand, buffers)
            if buffer is not None:
                (other,) = dtypes - {dtype}
                line = source_line(node)
                raise CaptureError(
                    f"buffer {buffers[buffer]!r} is {dtype}, which mixed precision leaves as it "
                    f"is, and meets {other} in {node.target} of {node.meta[FQN] or '(root)'}, "
                    f"which takes one dtype alone; give MixedPrecision(buffer_dtype={other}), or "
                    "cast the buffer in the forward" + (f"\n  at {line}" if line else "")
                )


def _buffer_behind(value: fx.Node, buffers: Collection[fx.Node]) -> fx.Node | None:
    """A buffer from which `value` has its floating-point dtype, if it has that from buffers alone.

    Under another precision an input or a cast may have made it so, where casting buffers is no use.
    """

    def is_alike(node: fx.Node) -> bool:
        val = node.meta.get("val")
        return isinstance(val, Tensor) and val.dtype == value.meta["val"].dtype

    waiting, seen, found = [value], {value}, None
    while waiting:
        node = waiting.pop()
        sources = [source for source in node.all_input_nodes if is_alike(source)]
        if not sources:
            if node not in buffers:
                return None
            found = node
        waiting += [source for source in sources if source not in seen]
        seen.update(sources)
    return found


def _hooks_for_dtypes(inputs: torch.dtype | None, outputs: torch.dtype | None) -> tuple[Any, Any]:
    def before(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs] | None:
        return None if inputs is None else cast_all((args, kwargs), inputs)

    def after(_: nn.Module, __: Args, output: Any) -> Any:
        return None if outputs is None else cast_all(output, outputs)

    return before, after


def _hooks_for_dtype_of(module: nn.Module) -> tuple[Any, Any]:
    """Hooks that cast inputs to the dtype of the state of `module`, and outputs back."""
    state = (*module.parameters(recurse=False), *module.buffers(recurse=False))
    module_dtype = next((t.dtype for t in state if t.is_floating_point()), torch.float32)
    input_dtypes: list[torch.dtype] = []  # a stack: one for each call under way

    def before(_: nn.Module, args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
        leaves = pytree.tree_leaves((args, kwargs))
        floats = [x.dtype for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
        input_dtypes.append(floats[0] if floats else module_dtype)
        return cast_all((args, kwargs), module_dtype)

    def after(_: nn.Module, __: Args, output: Any) -> Any:
        return cast_all(output, input_dtypes.pop())

    return before, after


def place_casts(program: Program, precisions: Precisions | None) -> None:
    """Move each parameter's cast before its first use, and its gradient's after its operand.

    The casts are made before the forward, and autograd orders nodes by the forward. Left in place
    they would stand at both ends of the program, so that no gradient would be ready before the end
    of backward.
    """
    if precisions is None:
        return
    results = program.results()
    place = {node: index for index, node in enumerate(program.graph.nodes)}
    for param, grad in zip(program.params, results.grads, strict=True):
        if precisions.params.get(param.fqn, param.dtype) == param.dtype:
            continue
        for cast in list(param.node.users):
            if cast_dtype(cast) is not None and cast.users:
                first = min(cast.users, key=place.__getitem__)
                if first.op == "call_function" and first.meta["phase"] == cast.meta["phase"]:
                    first.prepend(cast)
                cast.meta[FQN] = param.node.meta[FQN]
        if isinstance(grad, fx.Node) and cast_dtype(grad) == param.dtype:
            source = grad.args[0]
            assert isinstance(source, fx.Node)
            if source.meta["phase"] == grad.meta["phase"]:
                source.append(grad)
            grad.meta[FQN] = param.node.meta[FQN]

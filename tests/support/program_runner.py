"""Running a captured (not rewritten) program as it stands, to compare it with the module itself."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, fx, nn

from graphshard.capture.captured import Capture
from graphshard.capture.entry import capture
from graphshard.capture.structure import CALL, take_apart


def run_captured(
    captured: Capture,
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    tangents: list[Tensor] | None = None,
) -> tuple[Any, dict[str, Tensor], dict[str, Tensor | None], list[Tensor | None]]:
    """(return value, new value per mutated name, gradient per parameter, input gradients)."""
    program = captured.program
    params = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    values: list[Tensor] = [params[p.fqn].detach() for p in program.params]
    for buffer in program.buffers:
        value = buffer.value if buffer.constant else buffers[buffer.fqn].detach().clone()
        assert value is not None
        values.append(value)
    values += [t.detach() for t in take_apart((args, kwargs), name=CALL)[0]]
    expected = [o.tangent.meta["val"] for o in program.outputs if o.tangent is not None]
    if tangents is None:
        tangents = [
            torch.empty_strided(v.shape, v.stride(), dtype=v.dtype).fill_(float(i == 0))
            for i, v in enumerate(expected)
        ]
    assert [t.shape for t in tangents] == [v.shape for v in expected]
    with torch.no_grad():
        outputs, mutations, grads, input_grads = fx.GraphModule(nn.Module(), program.graph)(
            *values, *tangents
        )
    mutated = {m.name: v for m, v in zip(program.mutations, mutations, strict=True)}
    by_name = {p.fqn: g for p, g in zip(program.params, grads, strict=True)}
    return captured.result.build(outputs), mutated, by_name, list(input_grads)


def assert_same_as_eager(
    model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
) -> Capture:
    """Capture, run, and compare bit for bit with the module: first output, gradients, buffers."""
    kwargs = kwargs or {}
    captured = capture(model, args, kwargs)
    eager = copy.deepcopy(model)
    torch.manual_seed(0)
    expected = first_tensor(eager(*args, **kwargs))
    expected.backward(torch.ones_like(expected))
    torch.manual_seed(0)
    actual, mutated, grads, _ = run_captured(captured, model, args, kwargs)
    assert torch.equal(first_tensor(actual), expected)
    for name, param in eager.named_parameters():
        gradient = grads[name]
        if param.grad is None:
            assert gradient is None or not gradient.any(), name
        else:
            assert gradient is not None, name
            assert torch.equal(gradient, param.grad), name
    buffers = dict(eager.named_buffers(remove_duplicate=False))
    for name, value in mutated.items():
        if name in buffers:
            assert torch.equal(value, buffers[name]), name
    return captured


def first_tensor(value: Any) -> Tensor:
    """The first tensor in a nest of containers."""
    tensors = [v for v in torch.utils._pytree.tree_leaves(value) if isinstance(v, Tensor)]
    return tensors[0]

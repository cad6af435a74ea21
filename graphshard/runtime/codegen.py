"""Code generation for lowered graphs: arguments in one list, and cheap calls of operators.

See README.md for the time that torch's own functions save over the operators of `torch.ops`.
"""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor
from torch.fx.graph import CodeGen

from graphshard.torch_private import compat as torch_compat


class BoxedCodeGen(CodeGen):
    """Generates a function of one list, the graph's arguments, which it empties on entry."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        """The first lines of the function, which unpack the list and empty it."""
        names = [name.partition(":")[0].partition("=")[0].strip() for name in free_vars]
        lines = [f"def forward(self, args){maybe_return_annotation}:"]
        if names:
            lines.append(f"    {', '.join(names)}, = args")
        return "\n".join([*lines, "    args.clear()"])


_aten = torch.ops.aten


_FUNCTIONS: dict[Any, Any] = {
    _aten.add.Tensor: torch.add,
    _aten.addmm.default: torch.addmm,
    _aten.bmm.default: torch.bmm,
    _aten.cat.default: torch.cat,
    _aten.clone.default: torch.clone,
    _aten.cos.default: torch.cos,
    _aten.detach.default: torch.detach,
    _aten.div.Tensor: torch.div,
    _aten.exp.default: torch.exp,
    _aten.mean.dim: torch.mean,
    _aten.mm.default: torch.mm,
    _aten.mul.Tensor: torch.mul,
    _aten.native_layer_norm.default: torch.native_layer_norm,
    _aten.neg.default: torch.neg,
    _aten.permute.default: torch.permute,
    _aten.pow.Tensor_Scalar: torch.pow,
    _aten.rsqrt.default: torch.rsqrt,
    _aten.sigmoid.default: torch.sigmoid,
    _aten.sin.default: torch.sin,
    _aten.squeeze.dim: torch.squeeze,
    _aten.stack.default: torch.stack,
    _aten.sub.Tensor: torch.sub,
    _aten.sum.dim_IntList: torch.sum,
    _aten.t.default: torch.t,
    _aten.tanh.default: torch.tanh,
    _aten.transpose.int: torch.transpose,
    _aten.unsqueeze.default: torch.unsqueeze,
}
"""torch's functions by operator; each takes all the operator's arguments, by place and by name."""


def view(tensor: Tensor, shape: list[int]) -> Tensor:
    """A view of `tensor` with another shape; a copy where its strides allow none.

    Torch's fake kernels give some results other strides than the real ones do.
    """
    try:
        return tensor.view(shape)
    except RuntimeError:
        return tensor.reshape(shape)


_METHODS: dict[Any, Any] = {
    _aten.expand.default: Tensor.expand,
    _aten.view.default: view,
}


def call_of(operator: Any) -> Any:
    """The function to call instead of `operator`, of `torch.ops`, with the same arguments."""
    function = _FUNCTIONS.get(operator)
    if isinstance(function, BuiltinFunctionType):  # not replaced by a wrapper in Python
        return function
    return _METHODS.get(operator) or torch_compat.operator_call(operator)

"""What the code of a program calls for one of torch's operators: the same kernels, for less Python.

An operator of `torch.ops` matches its arguments against a schema, value by value; torch's own
functions for Python, `torch.mm` and the like, come with code made for their arguments. Called with
an operator's own arguments, both end in the same dispatch with the same values. For 4 x 16 matrices
`torch.ops.aten.mm.default` took 2.1 us, what it calls 1.6 and `torch.mm` 1.2; a layer norm 3.8 and
2.3 by the last two (torch 2.13, one core).

Only operators are listed whose every argument, by place or by name, the function takes alike. One
that has another meaning in Python, as `split` does, or that saves nothing, is left out.
"""

from __future__ import annotations

from types import BuiltinFunctionType
from typing import Any

import torch
from torch import Tensor

from graphshard import torch_compat

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

_METHODS: dict[Any, Any] = {
    _aten.expand.default: Tensor.expand,
    _aten.view.default: Tensor.view,
}


def call_of(operator: Any) -> Any:
    """What to call with the arguments of `operator`, one of torch.ops, in its place."""
    function = _FUNCTIONS.get(operator)
    if isinstance(function, BuiltinFunctionType):  # not one that Python code was put around
        return function
    return _METHODS.get(operator) or torch_compat.operator_call(operator)

"""Results that torch's fake kernels state otherwise than its real kernels give them.

Programs are traced by fake kernels, and compiled regions and collectives rely on what these say.
The table here has the operators whose fake kernel states another dtype, shape or strides than the
real one. A sweep over torch's own database of operators found them (`test_real_kernels.py`), on the
CPU and for torch 2.13. The table says nothing of other devices.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from graphshard.torch_private.compat import fake_tensor_mode, suggested_format

DEVICE = "cpu"
"""The type of device that the table is about."""

_aten = torch.ops.aten

Rule = Callable[[Sequence[Any], list[Any]], None]
"""Takes all arguments of an operator, and the results of its fake kernel, which it corrects."""


# -- dtypes and shapes ----------------------------------------------------------------------------


def _as(result: Tensor, dtype: torch.dtype, shape: Sequence[Any] | None = None) -> Tensor:
    if shape is not None:
        return result.new_empty(shape, dtype=dtype)
    if result.dtype == dtype:
        return result
    return torch.empty_strided(result.shape, result.stride(), dtype=dtype, device=result.device)


def _dtypes(places: Mapping[int, int]) -> Rule:
    """Results have the dtypes of arguments; by result, the place of the argument."""

    def correct(args: Sequence[Any], results: list[Any]) -> None:
        for index, place in places.items():
            if results[index] is not None and args[place] is not None:
                results[index] = _as(results[index], args[place].dtype)

    return correct


def _statistics(args: Sequence[Any], results: list[Any]) -> None:
    """Mean and deviation have the dtype of the norm's parameters and statistics, if it has any.

    Fake kernels give them the dtype of the input.
    """
    dtype = next((arg.dtype for arg in args[1:] if isinstance(arg, Tensor)), args[0].dtype)
    results[1:3] = [_as(result, dtype) for result in results[1:3]]


def _norms(args: Sequence[Any], results: list[Any]) -> None:
    """The norms of 16-bit weights are float32, of float16 ones too."""
    if args[1].dtype is torch.float16:
        results[1] = _as(results[1], torch.float32)


def _outer(args: Sequence[Any], results: list[Any]) -> None:
    dtype = torch.promote_types(args[0].dtype, torch.promote_types(args[1].dtype, args[2].dtype))
    results[0] = _as(results[0], dtype)


def _single_loss(args: Sequence[Any], results: list[Any]) -> None:
    if args[2] == 0 and args[0].dim() < 2:  # not reduced
        results[0] = _as(results[0], results[0].dtype, ())


def _bags(operator: Any, args: Sequence[Any], results: list[Any]) -> None:
    """bfloat16 takes the path of float16, which needs no bags."""
    if args[0].dtype is torch.bfloat16:
        half = [
            _as(arg, torch.float16)
            if isinstance(arg, Tensor) and arg.dtype is torch.bfloat16
            else arg
            for arg in args
        ]
        results[1] = _as(results[1], results[1].dtype, operator(*half)[1].shape)


def _bags_by_ends(args: Sequence[Any], results: list[Any]) -> None:
    """Without a backward, the sizes of bags have the last offset among them, or have not."""
    _, _, offsets, _, mode, _, _, include_last_offset = args[:8]
    if include_last_offset:
        ends = offsets.shape[0] - int(mode != 0)
        results[2] = _as(results[2], results[2].dtype, (ends,))
        if mode == 0:
            results[3] = _as(results[3], results[3].dtype, (ends,))


# -- strides --------------------------------------------------------------------------------------


def _in_format_of(place: int) -> Rule:
    """The first result is dense in the memory format that ATen suggests for an argument."""

    def correct(args: Sequence[Any], results: list[Any]) -> None:
        if results[0] is not None:
            form = suggested_format(args[place])
            results[0] = torch.empty_like(results[0], memory_format=form)

    return correct


def _contiguous(args: Sequence[Any], results: list[Any]) -> None:
    results[:] = [torch.empty_like(r, memory_format=torch.contiguous_format) for r in results]


def _like(place: int) -> Rule:
    """The result has the strides of an argument."""

    def correct(args: Sequence[Any], results: list[Any]) -> None:
        results[0] = torch.empty_like(args[place], dtype=results[0].dtype)

    return correct


def _elementwise(args: Sequence[Any], results: list[Any]) -> None:
    """The result lies as the sum of the first two arguments does."""
    terms = [_as(arg, torch.float32) for arg in args[:2] if isinstance(arg, Tensor)]
    lies = torch.add(terms[0], terms[-1])
    result = results[0]
    results[0] = torch.empty_strided(
        result.shape, lies.stride(), dtype=result.dtype, device=result.device
    )


def _times_power(args: Sequence[Any], results: list[Any]) -> None:
    """The result lies as a product with a power, which is contiguous in float32."""
    if args[0].dtype is torch.float32:
        _elementwise([args[0], args[1].contiguous()], results)


# -- the table ------------------------------------------------------------------------------------

_OTHER_NUMBERS: dict[Any, tuple[Rule, ...]] = {
    _aten._native_batch_norm_legit.default: (_statistics,),
    _aten._native_batch_norm_legit.no_stats: (_statistics,),
    _aten._native_batch_norm_legit_no_training.default: (_statistics,),
    _aten._native_batch_norm_legit_functional.default: (_statistics, _dtypes({3: 3, 4: 4})),
    _aten._batch_norm_with_update.default: (_statistics,),
    _aten._batch_norm_with_update_functional.default: (_statistics, _dtypes({4: 3, 5: 4})),
    _aten.native_layer_norm.default: (_statistics,),
    _aten.native_layer_norm_backward.default: (_dtypes({1: 5, 2: 6}),),
    _aten.native_group_norm.default: (_statistics,),
    _aten.native_group_norm_backward.default: (_dtypes({0: 1}),),
    _aten._weight_norm_interface.default: (_norms,),
    _aten.addr.default: (_outer,),
    _aten.binary_cross_entropy.default: (_dtypes({0: 0}),),
    _aten.binary_cross_entropy_backward.default: (_dtypes({0: 1}),),
    _aten.huber_loss.default: (_dtypes({0: 0}),),
    _aten.mse_loss_backward.default: (_dtypes({0: 1}),),
    _aten.normal.Tensor_Tensor: (_dtypes({0: 0}),),
    _aten.smooth_l1_loss_backward.default: (_dtypes({0: 1}),),
    _aten.soft_margin_loss.default: (_dtypes({0: 0}),),
    _aten.soft_margin_loss_backward.default: (_dtypes({0: 1}),),
    _aten.multilabel_margin_loss_forward.default: (_single_loss,),
    _aten._embedding_bag.default: (partial(_bags, _aten._embedding_bag.default),),
    _aten._embedding_bag_forward_only.default: (
        partial(_bags, _aten._embedding_bag_forward_only.default),
        _bags_by_ends,
    ),
}
"""Operators with results of other dtypes or shapes."""


_OTHER_STRIDES: dict[Any, Rule] = {
    **{
        operator: _in_format_of(0)
        for operator in (
            _aten._native_batch_norm_legit.default,
            _aten._native_batch_norm_legit.no_stats,
            _aten._native_batch_norm_legit_functional.default,
            _aten._native_batch_norm_legit_no_training.default,
            _aten._batch_norm_with_update.default,
            _aten._batch_norm_with_update_functional.default,
            _aten.channel_shuffle.default,
            _aten.max_unpool2d.default,
            _aten.reflection_pad3d.default,
            _aten.replication_pad3d.default,
        )
    },
    **{
        operator: _in_format_of(1)
        for operator in (
            _aten.native_batch_norm_backward.default,
            _aten.batch_norm_backward.default,
            _aten.reflection_pad2d_backward.default,
            _aten.reflection_pad3d_backward.default,
            _aten.replication_pad2d_backward.default,
            _aten.replication_pad3d_backward.default,
        )
    },
    **dict.fromkeys(
        (
            _aten._log_softmax_backward_data.default,
            _aten.huber_loss_backward.default,
            _aten.log_sigmoid_forward.default,
            _aten.mse_loss_backward.default,
            _aten.nll_loss2d_forward.default,
            _aten.normal.Tensor_Tensor,
            _aten.pow.Scalar,
            _aten.smooth_l1_loss_backward.default,
        ),
        _contiguous,
    ),
    _aten.binary_cross_entropy_backward.default: _like(1),
    _aten.ldexp.Tensor: _times_power,
    **dict.fromkeys(
        (
            _aten.copysign.Tensor,
            _aten.div.Tensor_mode,
            _aten.elu_backward.default,
            _aten.floor_divide.default,
            _aten.hardswish_backward.default,
            _aten.hardtanh_backward.default,
            _aten.heaviside.default,
            _aten.logaddexp.default,
            _aten.logical_and.default,
            _aten.logical_or.default,
            _aten.logical_xor.default,
            _aten.logit_backward.default,
            _aten.mul.Tensor,
            _aten.native_dropout_backward.default,
            _aten.softplus_backward.default,
            _aten.special_xlog1py.default,
            _aten.xlogy.Tensor,
        ),
        _elementwise,
    ),
}
"""Operators with results of other strides."""


_ONE_DTYPE = frozenset(
    {
        _aten.mm.default,
        _aten.addmm.default,
        _aten.addbmm.default,
        _aten.mv.default,
        _aten.linalg_cross.default,
        _aten._embedding_bag.default,
        _aten._embedding_bag_forward_only.default,
        _aten.nll_loss_forward.default,
        _aten.nll_loss2d_forward.default,
        _aten.grid_sampler_2d.default,
        _aten.grid_sampler_3d.default,
        _aten.index_add.default,
        _aten.index_copy.default,
        _aten.index_put.default,
        _aten.index_reduce.default,
        _aten.put.default,
    }
)
"""Operators whose real kernel, unlike the fake one, refuses operands of two floating dtypes."""


_FLOAT_PARAMS = frozenset({_aten.native_layer_norm.default, _aten.native_group_norm.default})
"""Likewise, but the input may have 16 bits and the parameters 32."""


OTHERWISE = frozenset((*_OTHER_NUMBERS, *_OTHER_STRIDES))
"""The operators whose results `as_real` changes."""


def as_real(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], results: Any) -> Any:
    """`results` of the fake kernel of `operator`, with what its real kernel gives."""
    if operator not in OTHERWISE:
        return results
    given = arguments(operator, args, kwargs)
    operands = (arg for arg in given if isinstance(arg, Tensor))
    operand = next(operands, None)  # None: as of `torch.div(7, 2)`
    if operand is None or operand.device.type != DEVICE:
        return results
    single = isinstance(results, Tensor)
    corrected = [results] if single else list(results)
    for rule in _OTHER_NUMBERS.get(operator, ()):
        rule(given, corrected)
    if operator in _OTHER_STRIDES:
        _OTHER_STRIDES[operator](given, corrected)
    return corrected[0] if single else tuple(corrected)


def arguments(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments of `operator` in the order of its schema, defaults among them."""
    rest = operator._schema.arguments[len(args) :]
    return [*args, *(kwargs.get(arg.name, arg.default_value) for arg in rest)]


def stated_results(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What the fake kernel of `operator`, corrected, states for tensors like those among `args`.

    None if it states nothing, for want of the values of tensors for instance.
    """
    mode = fake_tensor_mode()()

    def fake(tensor: Tensor) -> Tensor:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
        )

    with mode, contextlib.suppress(Exception):  # whatever a fake kernel raises
        args, kwargs = tree_map_only(Tensor, fake, (args, kwargs))
        return as_real(operator, args, kwargs, operator(*args, **kwargs))
    return None


def computes_otherwise(operator: Any, operands: Sequence[Any]) -> bool:
    """Whether the real kernel may give other dtypes or shapes than code made from the fake one."""
    if operator not in _OTHER_NUMBERS:
        return False
    tensors = [value for value in operands if isinstance(value, Tensor)]
    floats = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    if all(tensor.device.type != DEVICE for tensor in tensors):
        return False
    if operator in _ALWAYS or len(floats) > 1:
        return True
    return operator in _IN_16_BITS and not floats.isdisjoint((torch.bfloat16, torch.float16))


_ALWAYS = frozenset(
    {
        _aten.multilabel_margin_loss_forward.default,
        _aten._embedding_bag_forward_only.default,
    }
)
"""Operators whose results may differ in every dtype, others with operands of two dtypes only."""


_IN_16_BITS = frozenset(
    {
        _aten._native_batch_norm_legit_functional.default,
        _aten._batch_norm_with_update_functional.default,
        _aten._embedding_bag.default,
        _aten._weight_norm_interface.default,
    }
)
"""Operators whose results may differ where all operands are of 16 bits, too."""


def refuses(operator: Any, operands: Sequence[Tensor]) -> bool:
    """Whether the real kernel refuses the dtypes of its operands, which the fake one takes."""
    floats = [tensor.dtype for tensor in operands if tensor.is_floating_point()]
    if operator in _FLOAT_PARAMS:
        return not set(floats[1:]) <= {floats[0], torch.float32}
    return operator in _ONE_DTYPE and len(set(floats)) > 1

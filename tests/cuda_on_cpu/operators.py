"""torch's operators on CUDA tensors, by its CPU kernels on the same bytes.

Each kernel of the CUDA dispatch key is replaced. The new one queues the operator on the current
stream: its results are allocated at once, by the shapes that meta tensors give, and filled by the
stream's thread. Where shapes depend on values the host waits for the stream, as CUDA's kernels do.
CUDA_ON_CPU_AT_ONCE=1 makes every operator wait for its stream and run in the caller.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from itertools import compress
from typing import Any

import torch
from cuda_on_cpu import attention, draws, stream_queue
from cuda_on_cpu.stream_queue import Use
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

CPU, META = torch.device("cpu"), torch.device("meta")

KEPT = frozenset(
    (
        *("empty.memory_format", "empty_strided", "as_strided", "view", "_reshape_alias"),
        *("view_as_real", "view_as_complex", "unfold", "resize_", "record_stream"),
        *("is_pinned", "_pin_memory", "set_", "set_.source_Storage", "set_.source_Tensor"),
        *("set_.source_Storage_storage_offset", "_has_same_storage_numel", "is_set_to"),
    )
)
"""Kernels that compute nothing: they stay torch's own."""

ADDED = ("convolution", "convolution_backward", "convolution_overrideable")
"""Operators without a CUDA kernel that would choose one of cuDNN."""

AT_ONCE = os.environ.get("CUDA_ON_CPU_AT_ONCE") == "1"

counts: Counter[str] = Counter()
"""Operators by how they ran: "queued", or "waited: NAME"."""

_library = torch.library.Library("aten", "IMPL")


def install() -> None:
    """Replace the kernels of this process."""
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cudnn.enabled = False
    own = {"copy_": _copy, "_local_scalar_dense": _local_scalar_dense}
    named = torch._C._dispatch_get_registrations_for_dispatch_key("CUDA")
    names = [full.removeprefix("aten::") for full in named if full.startswith("aten::")]
    for name in {*names, *ADDED, *own} - KEPT:
        base, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, base), overload or "default")
        kernel = own.get(name) or _kernel(op)
        _library.impl(name, kernel, "CUDA", allow_override=True)


_COMPUTES = ("CPU", "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")


def _kernel(op: Any) -> Callable[..., Any]:
    """A kernel of the CUDA key for `op`."""
    name = op._schema.name + (f".{op._schema.overload_name}" if op._schema.overload_name else "")
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    known = {*_by_other, *attention.FORWARD, *(f"aten::{added}" for added in ADDED)}
    if name not in known and not any(has(name, key) for key in _COMPUTES):

        def not_built(*args: Any, **kwargs: Any) -> Any:
            raise NotImplementedError(f"{name} has no CPU kernel to stand in for CUDA's")

        return not_built
    drawn = draws.draws_of(op)
    by = _by_other.get(op._schema.name, op)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            call = _Call(op, args, kwargs)
            if drawn is not None:
                return call.run(drawn(op, call.device, args, kwargs))
            return call.run(by)

    return kernel


def _layer_norm_backward(
    grad: Tensor, value: Tensor, shape: Any, mean: Tensor, rstd: Tensor, weight: Any, *rest: Any
) -> Any:
    """CUDA keeps the statistics of 16-bit values as floats, the CPU in 16 bits."""
    narrow = weight is None or weight.dtype == value.dtype
    stats = [x.to(value.dtype) if narrow else x for x in (mean, rstd)]
    op = torch.ops.aten.native_layer_norm_backward
    return op(grad, value, shape, *stats, weight, *rest)


_by_other = {"aten::native_layer_norm_backward": _layer_norm_backward, **attention.BACKWARD}
"""What computes an operator on the CPU, where it is not the operator of the same name."""


def alias(tensor: Tensor) -> Tensor:
    """A CPU tensor of the same bytes, which keeps none of them alive, as a kernel's pointer."""
    size, stride = tensor.size(), tensor.stride()
    with torch.inference_mode(False):  # a kernel writes behind the mode in which it was called
        if tensor.numel() == 0:
            return torch.empty_strided(size, stride, dtype=tensor.dtype, device=CPU)
        storage = tensor.untyped_storage()
        bytes_ = storage.data_ptr(), CPU, storage.nbytes()
        made = torch.empty(0, dtype=tensor.dtype, device=CPU)
        same = torch._C._construct_storage_from_data_pointer(*bytes_)
        made.set_(same, tensor.storage_offset(), size, stride)
    if tensor.is_conj():
        made = made.conj()
    return torch._neg_view(made) if tensor.is_neg() else made


class _UnknownShapesError(Exception):
    """The shapes of the results are not known before the values are."""


class _Call:
    """One call of an operator: its CUDA tensors, and their aliases."""

    def __init__(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.op = op
        self._leaves, self._spec = tree_flatten((tuple(args), kwargs))
        self._given: dict[int, tuple[Tensor, Tensor]] = {}  # by id: the tensor, its alias
        self.device = torch.device("cuda")
        for leaf in self._leaves:
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                self._given.setdefault(id(leaf), (leaf, alias(leaf)))
                self.device = leaf.device
            elif isinstance(leaf, torch.device) and leaf.type == "cuda":
                self.device = leaf
        self.stream = stream_queue.current_stream(self.device)

    def run(self, by: Callable[..., Any]) -> Any:
        """The result of the operator, computed by `by` on CPU tensors."""
        if not AT_ONCE:
            try:
                return self._queued(by)
            except _UnknownShapesError:
                pass
        counts[f"waited: {self.op}"] += 1
        return self._waited(by)

    # -- the host waits ------------------------------------------------------------------------

    def _waited(self, by: Callable[..., Any]) -> Any:
        stream_queue.drain(self.stream)
        stream_queue.used_by_host(self.stream, self._uses(()), self.op)
        args, kwargs = self._replaced(lambda x: self._given[id(x)][1], CPU)
        result = by(*args, **kwargs)
        back = {id(same): given for given, same in self._given.values()}

        def on_device(out: Tensor) -> Tensor:
            if id(out) not in back:
                made = torch.empty_strided(
                    out.size(), out.stride(), dtype=out.dtype, device=self.device
                )
                alias(made).copy_(out)
                return made
            given = back[id(out)]
            if given.shape != out.shape:  # resized, where `out=` was too small
                given.resize_(out.shape)
                alias(given).copy_(out)
            return given

        return tree_map_only(Tensor, on_device, result)

    # -- the host does not wait ----------------------------------------------------------------

    def _queued(self, by: Callable[..., Any]) -> Any:
        shapes, back = self._shapes()
        filled: list[Tensor | None] = []  # the results that `by` gives, in order; None: in place

        def on_device(meta: Tensor) -> Tensor:
            if id(meta) in back:
                filled.append(None)
                return back[id(meta)]
            made = torch.empty_strided(
                meta.size(), meta.stride(), dtype=meta.dtype, device=self.device
            )
            filled.append(alias(made))
            return made

        result = tree_map_only(Tensor, on_device, shapes)
        expected = [isinstance(x, Tensor) for x in tree_flatten(shapes)[0]]
        args, kwargs = self._replaced(lambda x: self._given[id(x)][1], CPU, scalars=True)

        def job() -> None:
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
                found = tree_flatten(by(*args, **kwargs))[0]
                whole = len(found) == len(expected)  # or else `by` gives tensors alone
                asked = expected if whole else [isinstance(x, Tensor) for x in found]
                for to, value in zip(filled, compress(found, asked), strict=True):
                    # Meta functions give a size to statistics that evaluation leaves out, and to
                    # gradients that nobody asked for.
                    if to is not None and to.numel() and value is not None and value.numel():
                        to.copy_(value)

        counts["queued"] += 1
        made = [to for to in filled if to is not None]
        stream_queue.submit(self.stream, job, self._uses(made), self.op)
        return result

    def _uses(self, made: Sequence[Tensor]) -> list[Use]:
        """The memory that the operator reads and writes; `made` are its new results."""
        args, kwargs = tree_unflatten(self._leaves, self._spec)
        by_name = zip((a.name for a in self.op._schema.arguments), args, strict=False)
        given = {**dict(by_name), **kwargs}
        written = {
            id(leaf)
            for a in self.op._schema.arguments
            if a.alias_info is not None and a.alias_info.is_write
            for leaf in tree_flatten(given.get(a.name))[0]
        }
        uses = [Use.of(x, writes=key in written) for key, (x, _) in self._given.items()]
        return uses + [Use.of(x, writes=True) for x in made]

    def _shapes(self) -> tuple[Any, dict[int, Tensor]]:
        """The results as meta tensors, and by id of those that were given, the CUDA tensors."""
        if any(isinstance(x, Tensor) and not x.is_cuda and x.dim() for x in self._leaves):
            # Such as an index on the CPU, which CUDA's kernels copy and wait for.
            raise _UnknownShapesError
        metas = {
            key: torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device=META)
            for key, (x, _) in self._given.items()
        }
        args, kwargs = self._replaced(lambda x: metas[id(x)], META)
        try:
            shapes = self.op(*args, **kwargs)
        except (NotImplementedError, RuntimeError) as error:
            raise _UnknownShapesError from error
        back = {}
        for key, meta in metas.items():
            given, _ = self._given[key]
            if given.shape != meta.shape:  # resized, where `out=` was too small
                given.resize_(meta.shape)
                self._given[key] = given, alias(given)
            back[id(meta)] = given
        return shapes, back  # ids that no result has: all were made while the metas lived

    def _replaced(
        self, same: Callable[[Tensor], Tensor], device: torch.device, scalars: bool = False
    ) -> Any:
        """The arguments with other tensors and device; `scalars` of the CPU are read now."""

        def leaf(x: Any) -> Any:
            if isinstance(x, Tensor):
                if x.is_cuda:
                    return same(x)
                return x.clone() if scalars and not _is_number(x) else x
            return device if isinstance(x, torch.device) and x.type == "cuda" else x

        return tree_unflatten([leaf(x) for x in self._leaves], self._spec)


def _is_number(scalar: Tensor) -> bool:
    """Whether a scalar tensor is a Python number, which does not widen the type of a result."""
    kind = torch.float16 if scalar.is_floating_point() else torch.int8
    probe = torch.empty((), dtype=kind, device=CPU)
    return scalar.dtype != probe.dtype and torch.result_type(scalar, probe) == probe.dtype


# -- copies --------------------------------------------------------------------------------------


def _copy(self: Tensor, src: Tensor, non_blocking: bool = False) -> Tensor:
    """`self.copy_(src)`: the host waits unless both are on the device, or it may and one is pinned.

    Equal layouts are one cudaMemcpyAsync; others, and conversions, an operator of the stream.
    """
    device = self.device if self.is_cuda else src.device
    stream = stream_queue.current_stream(device)
    expanded = src.expand(self.shape)
    whole = self.is_contiguous() and expanded.is_contiguous()
    plain = self.dtype == src.dtype and not (self.is_conj() or src.is_conj() or src.is_neg())
    on_host = [x for x in (self, src) if not x.is_cuda]
    if whole and plain:
        stream_queue.copy(self.data_ptr(), src.data_ptr(), self.nbytes, stream)
        if on_host:  # pinned memory is not given to others before the copy has ended
            stream_queue.submit(stream, partial(len, on_host))
    else:
        to = alias(self)  # whose version, and not that of `self`, goes up when the copy runs
        # Pageable memory is read before the call returns.
        given = alias(src) if src.is_cuda else src if src.is_pinned() else src.clone()
        given = given.detach()
        uses = [Use.of(to, writes=True)] if self.is_cuda or self.is_pinned() else []
        if src.is_cuda or src.is_pinned():
            uses.append(Use.of(src, writes=False))
        stream_queue.submit(stream, partial(_write, to, given, on_host), uses, "copy_")
    if on_host and not (non_blocking and all(x.is_pinned() for x in on_host)):
        stream_queue.drain(stream)
    return self


def _write(to: Tensor, value: Tensor, kept: list[Tensor]) -> None:
    """Copy `value` into `to`; `kept` are tensors on the host whose memory is read or written."""
    with torch.no_grad():
        to.copy_(value)


def _local_scalar_dense(self: Tensor) -> Any:
    """`self.item()`: the host waits."""
    stream = stream_queue.current_stream(self.device)
    stream_queue.drain(stream)
    stream_queue.used_by_host(stream, [Use.of(self, writes=False)], "item")
    return torch.ops.aten._local_scalar_dense(alias(self))

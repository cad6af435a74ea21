"""The streams of the runtime made of CPU threads, from Python: queue a call, wait, copy."""

from __future__ import annotations

import ctypes
import itertools
import sys
import traceback
from collections.abc import Callable, Sequence
from types import FrameType

import torch
from torch import Tensor

_runtime = ctypes.CDLL(None)  # its calls give Python's lock back, so that queued calls can run
_Call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Locate = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int)


class Use(ctypes.Structure):
    """Memory that a launch reads or writes."""

    _fields_ = (("at", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("writes", ctypes.c_bool))

    @classmethod
    def of(cls, tensor: Tensor, *, writes: bool) -> Use:
        """From the first element of `tensor` to the last, on the device or pinned."""
        if not tensor.numel():
            return cls(0, 0, writes)
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last = sum((size - 1) * step for size, step in steps)
        return cls(tensor.data_ptr(), (last + 1) * tensor.itemsize, writes)


_USES = [ctypes.POINTER(Use), ctypes.c_int, ctypes.c_char_p]
_runtime.cuda_on_cpu_submit.argtypes = [ctypes.c_void_p, _Call, _Call, ctypes.c_void_p, *_USES]
_runtime.cuda_on_cpu_use.argtypes = [ctypes.c_void_p, *_USES]
_runtime.cuda_on_cpu_locate.argtypes = [_Locate]
_runtime.cuda_on_cpu_stream.argtypes = [ctypes.c_int, ctypes.c_void_p]
_runtime.cuda_on_cpu_stream.restype = ctypes.c_void_p
_runtime.cuda_on_cpu_fail.argtypes = [ctypes.c_char_p]
_runtime.cudaStreamSynchronize.argtypes = [ctypes.c_void_p]
_runtime.cudaGetErrorString.restype = ctypes.c_char_p
_runtime.cudaMemcpyAsync.argtypes = [
    *(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p)
]

_jobs: dict[int, Callable[[], object]] = {}
_numbers = itertools.count(1)


@_Call
def _run(number: int) -> None:
    try:
        _jobs[number]()
    except BaseException:
        _runtime.cuda_on_cpu_fail(traceback.format_exc().encode())


@_Call
def _drop(number: int) -> None:
    del _jobs[number]


def current_stream(device: torch.device) -> int:
    """The handle of the stream on which PyTorch's operators of this thread run."""
    index = torch._C._cuda_getDevice() if device.index is None else device.index
    return _runtime.cuda_on_cpu_stream(index, torch._C._cuda_getCurrentRawStream(index))


def submit(
    stream: int, job: Callable[[], object], uses: Sequence[Use] = (), name: object = ""
) -> None:
    """Call `job` on the stream's thread; again at each replay if the stream is being captured.

    What it raises is an error of the device, told by every later call, as CUDA does; so is a use
    of memory that the stream has not waited for. `name` is that of the operator.
    """
    number = next(_numbers)
    _jobs[number] = job
    _check(_runtime.cuda_on_cpu_submit(stream, _run, _drop, number, *_given(uses, name)))


def used_by_host(stream: int, uses: Sequence[Use], name: object) -> None:
    """Note that the host uses memory itself, behind all work on a stream."""
    _runtime.cuda_on_cpu_use(stream, *_given(uses, name))


def _given(uses: Sequence[Use], name: object) -> tuple[ctypes.Array[Use], int, bytes]:
    where = f"{name}{_line(sys._getframe(2))}" if uses else ""
    return (Use * len(uses))(*uses), len(uses), where.encode()


def _line(frame: FrameType | None) -> str:
    """The innermost line outside of torch and of what stands in for its kernels."""
    skipped = ("torch.", "cuda_on_cpu.")
    while frame is not None and frame.f_globals.get("__name__", "").startswith(skipped):
        frame = frame.f_back
    return "" if frame is None else f" at {frame.f_code.co_filename}:{frame.f_lineno}"


@_Locate
def _locate(to: int, size: int) -> None:
    said = _line(sys._getframe(1)).encode()[: size - 1]
    ctypes.memmove(to, said + b"\0", len(said) + 1)


_runtime.cuda_on_cpu_locate(_locate)


def drain(stream: int) -> None:
    """Wait for all work on a stream, with the errors of cudaStreamSynchronize."""
    _check(_runtime.cudaStreamSynchronize(stream))


class Philox(ctypes.Structure):
    """What a kernel that draws gets: seed and offset, or in a capture their addresses."""

    _fields_ = (
        ("seed", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
        ("within", ctypes.c_uint64),
        ("captured", ctypes.c_bool),
    )

    def read(self) -> tuple[int, int]:
        """Seed and offset as they are when the kernel runs."""
        if not self.captured:
            return self.seed, self.offset
        at = ctypes.c_uint64.from_address
        return at(self.seed).value, at(self.offset).value + self.within


def philox_of(draw: Callable[[], object]) -> Philox:
    """The state that the kernel which `draw` launches would draw by; it does not run."""
    state = Philox()
    _runtime.cuda_on_cpu_expect_draw()
    draw()
    _runtime.cuda_on_cpu_drawn(ctypes.byref(state))
    return state


def copy(to: int, source: int, nbytes: int, stream: int) -> None:
    """cudaMemcpyAsync, which knows pageable memory from pinned."""
    _check(_runtime.cudaMemcpyAsync(to, source, nbytes, 4, stream))


def _check(error: int) -> None:
    if error:
        said = _runtime.cudaGetErrorString(error).decode()
        _runtime.cudaGetLastError()
        raise torch.AcceleratorError(f"CUDA error: {said}")

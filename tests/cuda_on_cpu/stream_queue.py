"""The streams of the runtime made of CPU threads, from Python: queue a call, wait, copy."""

from __future__ import annotations

import ctypes
import itertools
import traceback
from collections.abc import Callable

import torch

_runtime = ctypes.CDLL(None)  # its calls give Python's lock back, so that queued calls can run
_Call = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_runtime.cuda_on_cpu_submit.argtypes = [ctypes.c_void_p, _Call, _Call, ctypes.c_void_p]
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


def submit(stream: int, job: Callable[[], object]) -> None:
    """Call `job` on the stream's thread; again at each replay if the stream is being captured.

    What it raises is an error of the device, told by every later call, as CUDA does.
    """
    number = next(_numbers)
    _jobs[number] = job
    _check(_runtime.cuda_on_cpu_submit(stream, _run, _drop, number))


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

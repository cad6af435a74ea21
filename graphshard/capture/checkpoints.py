"""Tagging nodes that are traced under `torch.utils.checkpoint`, whose calls AOT would drop.

Each node is tagged with the numbers of the checkpointed calls around it. The policy of a selective
checkpoint (`context_fn` made by `create_selective_checkpoint_contexts`) is asked about each
operator, as in eager, and the results that it wants saved are tagged too. A trace on the CPU of a
program for CUDA has the CPU's fused attention, which no such policy knows: it is asked about the
operator that CUDA would run. Whatever a checkpoint's `preserve_rng_state`, what it drew at random
is drawn again with the same numbers.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext

from graphshard.capture.annotation import KEEP, REGION
from graphshard.capture.structure import Same
from graphshard.errors import CaptureError
from graphshard.torch_private import compat as torch_compat
from graphshard.torch_private import trace as torch_trace
from graphshard.torch_private.patches import patched

_aten = torch.ops.aten


_CHECKPOINTING = "torch.utils.checkpoint"

_under_way: list[contextlib.ExitStack] = []
"""The contexts of the checkpointed calls that are under way, the outermost first."""


@contextlib.contextmanager
def ended_by_errors() -> Iterator[None]:
    """At the end, leave the contexts of checkpointed calls that an error has ended.

    On torch 2.11 the error does not pass through the generator that holds them.
    """
    before = len(_under_way)
    try:
        yield
    finally:
        while len(_under_way) > before:
            _under_way.pop().close()


@contextlib.contextmanager
def tag_checkpoint_regions(*, off_target: bool = False) -> Iterator[None]:
    """Tag the nodes traced under `torch.utils.checkpoint`; `off_target`: on the CPU, for CUDA."""
    annotate = torch_trace.annotate()
    numbers = itertools.count()
    around: list[int] = []

    @contextlib.contextmanager
    def region() -> Iterator[None]:
        around.append(next(numbers))
        try:
            with annotate({REGION: tuple(around)}):
                yield
        finally:
            around.pop()

    def without_reentrant(context_fn: Any) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            stack.enter_context(region())
            stack.enter_context(_selection(context_fn, off_target))
            _under_way.append(stack)
            yield
            _under_way.remove(stack)

    class Reentrant:
        @staticmethod
        def apply(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
            if torch.is_grad_enabled() and not any(
                isinstance(arg, Tensor) and arg.requires_grad for arg in args
            ):
                raise CaptureError(
                    "torch.utils.checkpoint with use_reentrant=True and no input that requires a "
                    "gradient gives the parameters inside none; pass use_reentrant=False"
                )
            with region():
                return function(*args)

    def refuse(hooks: Any) -> None:
        raise CaptureError(
            "saved_tensors_hooks (save_on_cpu among them) cannot be carried into the captured "
            "graph; remove the context and let the policy decide what is kept for backward"
        )

    with (
        patched(_CHECKPOINTING, *torch_compat.checkpoint_generator(without_reentrant)),
        patched(_CHECKPOINTING, "CheckpointFunction", Reentrant),
        patched(torch.autograd.graph.saved_tensors_hooks, "__enter__", refuse),
    ):
        yield


def policies_with_state() -> int:
    """How many selective checkpoints there were whose policy may answer alike calls otherwise."""
    return _KeepTags.own


def compared_mode(mode: Any) -> Hashable:
    """A mode in the form to compare: one of a selective checkpoint by its policy."""
    return Same(mode.policy if isinstance(mode, _KeepTags) else mode)


def _selection(context_fn: Any, off_target: bool) -> contextlib.AbstractContextManager[Any]:
    """A context that tags the results which the contexts of a checkpoint would save."""
    if context_fn is None:
        return contextlib.nullcontext()
    contexts: tuple[Any, Any] = context_fn()
    forward, again = contexts
    if isinstance(forward, torch_compat.selective_checkpoint_mode()):
        return _KeepTags(forward.policy_fn, off_target)
    plain = contextlib.nullcontext
    if isinstance(forward, plain) and isinstance(again, plain):
        return contextlib.nullcontext()
    raise CaptureError(
        "torch.utils.checkpoint is given a context_fn whose contexts cannot be carried into the "
        f"captured graph ({type(forward).__name__}, {type(again).__name__}); leave it out, or make "
        "it with torch.utils.checkpoint.create_selective_checkpoint_contexts"
    )


class _KeepTags(TorchDispatchMode):
    """Asks the policy of a selective checkpoint about each operator, and tags saved results."""

    own = 0
    """How many there were with a policy that may have a state of its own."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """True, so that this mode may stand above the tracer's own."""
        return True

    def __init__(self, policy: Callable[..., Any], off_target: bool) -> None:
        super().__init__()
        self.policy, self.off_target = policy, off_target
        if not isinstance(policy, FunctionType) or policy.__closure__:
            _KeepTags.own += 1

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in torch_compat.selective_checkpoint_ignores():
            return func(*args, **kwargs)
        graph = torch_trace.traced_graph()
        before = 0 if graph is None else len(graph.nodes)
        out = func(*args, **kwargs)
        context = SelectiveCheckpointContext(
            is_recompute=False, **torch_compat.selective_checkpoint_output(out)
        )
        asked = _on_cuda(func, kwargs) if self.off_target else func
        if self._keeps(self.policy(context, asked, *args, **kwargs), func) and graph is not None:
            for node in itertools.islice(reversed(graph.nodes), len(graph.nodes) - before):
                node.meta["custom"] = {**(node.meta.get("custom") or {}), KEEP: True}
        return out

    @staticmethod
    def _keeps(choice: Any, func: Any) -> bool:
        if isinstance(choice, bool):
            return choice
        if "OFFLOAD" in choice.name:
            raise CaptureError(
                f"a selective checkpoint asks for {choice.name} of {func}; leave moving "
                'activations to the policy (offload="activations") and return PREFER_SAVE'
            )
        return choice in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def _on_cuda(op: Any, kwargs: dict[str, Any]) -> Any:
    """The fused attention that CUDA runs where the CPU runs its own; other operators as they are.

    CUDA's memory-efficient attention takes a mask; its flash attention does not.
    """
    if op is not _aten._scaled_dot_product_flash_attention_for_cpu.default:
        return op
    if kwargs.get("attn_mask") is not None:
        return _aten._scaled_dot_product_efficient_attention.default
    return _aten._scaled_dot_product_flash_attention.default

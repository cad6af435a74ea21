"""Steps of a case's protocol: what a training loop does between two looks at all values."""

from __future__ import annotations

import functools
import signal
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fuzz_blocks_code import left_in
from fuzz_case import Case
from fuzz_model import (
    DEVICE,
    batch,
    differentiable,
    loss_of,
    random_states,
    set_random_states,
)
from fuzz_sides import Sharded, Side
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from graphshard.errors import GraphshardError, RuntimeStateError
from graphshard.runtime.calls import is_shared
from graphshard.runtime.lowered import LoweredGraph

SHAPE = (2, 4)


@dataclass
class Loop:
    """One side at work: its step's number and what it saw in this step.

    shape: `(B, T)` of the batches. schedulers: stepped with the optimizer.
    """

    case: Case
    side: Side
    number: int = 0
    shape: tuple[int, int] = SHAPE
    seen: list[tuple[str, Any]] = None  # type: ignore[assignment]
    schedulers: list[Any] = None  # type: ignore[assignment]

    def begin(self, number: int) -> None:
        """Start a step; both sides draw the same random numbers in it."""
        self.number, self.seen = number, []
        self.schedulers = self.schedulers or []
        torch.manual_seed(17 * self.case.seed + 5 * number + dist.get_rank())

    def inputs(self, part: int = 0) -> tuple[Tensor, Tensor]:
        return batch(self.case, 10 * self.number + part, dist.get_rank(), self.shape)

    def forward(self, module: Any, *inputs: Tensor, **kwargs: Any) -> Any:
        """Call `module`, under autocast if the case says so."""
        low = getattr(torch, self.case.autocast or "bfloat16")
        with torch.autocast(DEVICE.type, low, enabled=bool(self.case.autocast)):
            return module(*inputs, **kwargs)

    def call(self, part: int = 0, **kwargs: Any) -> Any:
        """A forward; its outputs are noted, with what it left elsewhere."""
        outputs = self.forward(self.side.module, *self.inputs(part), **kwargs)
        left = left_in(self.side.module)
        outputs = (outputs, left) if left else outputs
        self.note("outputs", outputs)
        return outputs

    def note(self, name: str, values: Any) -> None:
        """Keep copies of all tensors in `values`, and what is none as it is."""
        copied = [
            leaf.detach().clone() if isinstance(leaf, Tensor) else leaf
            for leaf in pytree.tree_leaves(values)
        ]
        self.seen.append((name, (pytree.tree_structure(values), copied)))

    def loss(self, outputs: Any, *, first_only: bool = False) -> Tensor:
        """Of all differentiable outputs, or of the first one alone."""
        tensors = differentiable(outputs)
        return loss_of(tensors[:1] if first_only else tensors)

    def backward(self, outputs: Any, **options: Any) -> None:
        self.side.backward(self.loss(outputs), **options)

    def update(self, *, set_to_none: bool = True) -> None:
        """Note all gradients, step and clear."""
        self.note_grads()
        self.side.optim.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.side.zero_grad(set_to_none)

    def note_grads(self) -> None:
        self.note("grads", self.side.grads())


@dataclass(frozen=True)
class Step:
    """One kind of step.

    mixes: `fully_shard` does it by the same rules. resident: SHARD_OPTIMIZER takes it.
    """

    run: Callable[[Loop], None]
    mixes: bool
    resident: bool


STEPS: dict[str, Step] = {}


def step(*, mixes: bool = True, resident: bool = True) -> Callable[[Any], Any]:
    """Add a function to `STEPS` under its name."""

    def add(run: Callable[[Loop], None]) -> Callable[[Loop], None]:
        STEPS[run.__name__] = Step(run, mixes, resident)
        return run

    return add


@step()
def train(loop: Loop) -> None:
    loop.backward(loop.call())
    loop.update()


@step()
def accumulate(loop: Loop) -> None:
    """Several backwards into one gradient, each reduced."""
    for part in range(3):
        loop.backward(loop.call(part))
        loop.note_grads()
    loop.update()


@step()
def no_sync(loop: Loop) -> None:
    with loop.side.unsynced():
        for part in range(2):
            loop.backward(loop.call(part))
    loop.backward(loop.call(2))
    loop.update()


@step(mixes=False)
def no_sync_then_partial(loop: Loop) -> None:
    """The reducing backward does not reach every parameter that waits for a reduce."""
    with loop.side.unsynced():
        loop.backward(loop.call())
    loop.side.backward(loop.loss(loop.call(1), first_only=True))
    loop.update()


@step(mixes=False)
def two_forwards(loop: Loop) -> None:
    """Backwards in the reverse order of the forwards."""
    first, second = loop.call(), loop.call(1)
    loop.backward(second)
    loop.backward(first)
    loop.update()


@step(mixes=False)
def forwards_in_order(loop: Loop) -> None:
    first, second, third = loop.call(), loop.call(1), loop.call(2)
    for outputs in (first, second, third):
        loop.backward(outputs)
    loop.update()


@step(mixes=False)
def one_backward_of_two(loop: Loop) -> None:
    first, second = loop.call(), loop.call(1)
    loop.side.backward(loop.loss(first) * loop.loss(second))
    loop.update()


@step(mixes=False)
def partial(loop: Loop) -> None:
    """A loss that leaves outputs out."""
    loop.side.backward(loop.loss(loop.call(), first_only=True))
    loop.update()


@step(mixes=False)
def last_output(loop: Loop) -> None:
    """A loss of the last output alone."""
    loop.side.backward(loss_of(differentiable(loop.call())[-1:]))
    loop.update()


@step(mixes=False)
def between(loop: Loop) -> None:
    """An exception between forward and backward; the loop goes on with the next batch."""
    try:
        loop.call()
        raise ValueError("of the loop")
    except ValueError:
        pass
    loop.backward(loop.call(1))
    loop.update()


@step()
def evaluate(loop: Loop) -> None:
    loop.side.module.eval()
    with torch.no_grad():
        loop.call()
    loop.side.module.train()


@step(mixes=False)
def infer(loop: Loop) -> None:
    loop.side.module.eval()
    with torch.inference_mode():
        loop.call()
    loop.side.module.train()


@step(mixes=False)
def eval_between(loop: Loop) -> None:
    """An evaluation between a forward and its backward."""
    outputs = loop.call()
    evaluate(loop)
    loop.backward(outputs)
    loop.update()


@step()
def train_in_eval(loop: Loop) -> None:
    loop.side.module.eval()
    loop.backward(loop.call())
    loop.side.module.train()
    loop.update()


@step(mixes=False)
def part_in_eval(loop: Loop) -> None:
    """One block in evaluation mode."""
    block = loop.side.module.get_submodule("blocks.0")
    block.eval()
    loop.backward(loop.call())
    block.train()
    loop.update()


@step(mixes=False)
def drop(loop: Loop) -> None:
    """A forward whose backward never comes."""
    loop.call()


@step(mixes=False)
def no_grad_in_training(loop: Loop) -> None:
    with torch.no_grad():
        loop.call()


@step(mixes=False)
def other_shape(loop: Loop) -> None:
    loop.shape = (3, 5) if loop.shape == SHAPE else SHAPE
    loop.backward(loop.call())
    loop.update()


@step(mixes=False)
def one_row(loop: Loop) -> None:
    """A batch of one and a sequence of two, for this step."""
    kept, loop.shape = loop.shape, (1, 2)
    loop.backward(loop.call())
    loop.update()
    loop.shape = kept


@step(mixes=False)
def other_argument(loop: Loop) -> None:
    loop.backward(loop.call(factor=0.5))
    loop.update()


@step()
def keep_zeros(loop: Loop) -> None:
    """Gradients of zeros in place of None."""
    loop.backward(loop.call())
    loop.update(set_to_none=False)


@step(mixes=False)
def clip(loop: Loop) -> None:
    loop.backward(loop.call())
    loop.note("norm", loop.side.clip(0.05, 2.0).double())
    loop.update()


@step(mixes=False)
def clip_by_sum(loop: Loop) -> None:
    loop.backward(loop.call())
    loop.note("norm", loop.side.clip(0.5, 1.0).double())
    loop.update()


@step(mixes=False)
def edit(loop: Loop) -> None:
    """Writes into every parameter."""
    with torch.no_grad():
        for param in loop.side.params().values():
            if param.is_floating_point():
                param.mul_(0.9).add_(0.01)


@step(mixes=False)
def edit_one(loop: Loop) -> None:
    """Puts other values into the first parameter, as a DTensor or through its local tensor."""
    param = next(iter(loop.side.params().values()))
    if param.is_floating_point():
        with torch.no_grad():
            local = param.to_local() if isinstance(param, DTensor) else param
            local.copy_(local * 0.5)


@step(mixes=False, resident=False)
def edit_data(loop: Loop) -> None:
    """Writes through `.data`, which SHARD_OPTIMIZER cannot see."""
    for param in loop.side.params().values():
        if param.is_floating_point():
            param.data.mul_(0.95)


@step(mixes=False)
def edit_grads(loop: Loop) -> None:
    loop.backward(loop.call())
    for param in loop.side.params().values():
        if param.grad is not None:
            param.grad.mul_(0.5)
    loop.update()


@step(mixes=False)
def edit_buffers(loop: Loop) -> None:
    for buffer in loop.side.module.buffers():
        if buffer.is_floating_point():
            buffer.mul_(0.5)


@step(mixes=False)
def reload(loop: Loop, *, from_first: bool = False) -> None:
    """Saves, trains and loads what was saved, by rank 0 if `from_first`."""
    state = loop.side.save()
    if from_first:  # as a checkpoint's files have buffers and ignored parameters
        for leaf in pytree.tree_leaves(state):
            if isinstance(leaf, Tensor):
                dist.broadcast(leaf, 0)
    loop.backward(loop.call())
    loop.side.optim.step()
    loop.side.zero_grad(True)
    loop.side.load(state)


@step(mixes=False)
def reload_files(loop: Loop) -> None:
    """As `reload`, by a checkpoint's files; the reference keeps its state in memory."""
    if not isinstance(loop.side, Sharded):
        reload(loop, from_first=True)
        return
    folder: list[Any] = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "saved"
    drawn = random_states()
    loop.side.module.save_checkpoint(path, loop.side.optim)
    loop.backward(loop.call())
    after = random_states()
    loop.side.optim.step()
    loop.side.zero_grad(True)
    loop.side.module.load_checkpoint(path, loop.side.optim)
    assert all(map(torch.equal, random_states(), drawn))
    set_random_states(after)


@step(mixes=False)
def hook(loop: Loop) -> None:
    """A hook of a parameter's gradient, for this step."""
    params = [p for p in loop.side.params().values() if p.requires_grad]
    handles = [param.register_hook(lambda grad: grad * 2) for param in params[:2]]
    loop.backward(loop.call())
    loop.update()
    for handle in handles:
        handle.remove()


@step(mixes=False)
def freeze(loop: Loop) -> None:
    """The first trained parameter is frozen for this step."""
    param = next((p for p in loop.side.params().values() if p.requires_grad), None)
    if param is None:
        return
    param.requires_grad_(False)
    outputs = loop.call()
    if differentiable(outputs):
        loop.backward(outputs)
    loop.update()
    param.requires_grad_(True)


@step(mixes=False)
def input_gradient(loop: Loop) -> None:
    x, ids = loop.inputs()
    x.requires_grad_()
    outputs = loop.forward(loop.side.module, x, ids)
    loop.note("outputs", outputs)
    loop.backward(outputs)
    loop.note("input", x.grad)
    loop.update()


@step(mixes=False)
def only_input_gradient(loop: Loop) -> None:
    """Parameters get no gradient."""
    x, ids = loop.inputs()
    x.requires_grad_()
    outputs = loop.forward(loop.side.module, x, ids)
    (grad,) = torch.autograd.grad(loop.loss(outputs), x, allow_unused=True)
    loop.note("input", grad)
    loop.note_grads()


@step(mixes=False)
def part(loop: Loop) -> None:
    """A block by itself."""
    x, ids = loop.inputs()
    if isinstance(loop.side, Sharded):
        call: Any = functools.partial(loop.side.module.submodule_forward, "blocks.0")
    else:
        call = loop.side.module.get_submodule("blocks.0")
    outputs = loop.forward(call, x, ids)
    loop.note("outputs", outputs)
    if differentiable(outputs):
        loop.backward(outputs)
    loop.update()


@step(mixes=False)
def unsharded(loop: Loop) -> None:
    """Writes into whole parameters."""
    if isinstance(loop.side, Sharded):
        with loop.side.module.unsharded() as params:
            _scale(params)
    else:
        _scale(loop.side.params())


def _scale(params: Any) -> None:
    with torch.no_grad():
        for param in set(params.values()):  # a tied one has several names
            if param.is_floating_point():
                param.mul_(torch.linspace(0.9, 1.1, param.numel()).to(param).view(param.shape))


@step(mixes=False)
def schedule(loop: Loop) -> None:
    """From here on the learning rate falls."""
    if not loop.schedulers:
        loop.schedulers.append(torch.optim.lr_scheduler.ExponentialLR(loop.side.optim, 0.7))
    train(loop)


@step(mixes=False)
def scaled(loop: Loop) -> None:
    """A `GradScaler`."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    scaler.scale(loop.loss(loop.call())).backward() if isinstance(
        loop.side, Sharded
    ) else loop.side.backward(scaler.scale(loop.loss(loop.call())))
    scaler.unscale_(loop.side.optim)
    loop.note_grads()
    scaler.step(loop.side.optim)
    scaler.update()
    loop.side.zero_grad(True)


@step(mixes=False)
def plain_zero(loop: Loop) -> None:
    """The optimizer's own `zero_grad`."""
    loop.backward(loop.call())
    loop.note_grads()
    loop.side.optim.step()
    loop.side.optim.zero_grad()


@step(mixes=False)
def skip_update(loop: Loop) -> None:
    """Gradients are dropped without a step."""
    loop.backward(loop.call())
    loop.side.zero_grad(True)


@step(mixes=False)
def backward_twice(loop: Loop) -> None:
    """A second backward through one forward is refused, and the loop goes on."""
    outputs = loop.call()
    loss = loop.loss(outputs)
    loop.side.backward(loss, retain_graph=True)
    if isinstance(loop.side, Sharded):
        with pytest.raises(RuntimeStateError, match="second time"):
            loss.backward()
    loop.update()


class _FailsInside(TorchDispatchMode):
    """Leaves a forward or backward at its `left`-th operator, once, by calling `leave`."""

    def __init__(self, left: int, leave: Callable[[], None]) -> None:
        super().__init__()
        self.left, self.leave = left, leave

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":  # between two messages, as the two ends of one are one call
            self.left -= 1
            if self.left == 0:
                self.leave()
        return func(*args, **(kwargs or {}))


class Left(Exception):  # noqa: N818  # of the loop
    """What the rank raises that leaves."""


def _leave(*_: Any) -> None:
    raise Left


def _interrupt() -> None:
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # in a job in the background
        raise Left
    signal.raise_signal(signal.SIGINT)


def _inside(does: Callable[[], None]) -> Callable[[Loop, Random], None]:
    def run(loop: Loop, rng: Random) -> None:
        mode, run = _FailsInside(rng.randint(1, 150), does), vars(LoweredGraph)["run"]

        def watched(graph: LoweredGraph, args: list[Any]) -> Any:
            with mode:
                return run.fget(graph)(args)

        LoweredGraph.run = watched  # type: ignore[method-assign,assignment]
        try:
            loop.backward(loop.call())
        finally:
            LoweredGraph.run = run  # type: ignore[method-assign]

    return run


def _by_hook(loop: Loop, rng: Random) -> None:
    params = [p for p in loop.side.params().values() if p.requires_grad]
    handle = rng.choice(params).register_post_accumulate_grad_hook(_leave)
    try:
        loop.backward(loop.call())
    finally:
        handle.remove()


def _before_backward(loop: Loop, _: Random) -> None:
    loss = loop.loss(loop.call())
    loss.register_hook(_leave)
    loss.backward()


def _unused(loop: Loop, _: Random) -> None:
    loop.call()
    raise Left


LEAVES = (_inside(_leave), _inside(_interrupt), _by_hook, _before_backward, _unused)
"""How a rank leaves a step. Where it raises nothing, its step is like any other."""


@step(mixes=False)
def leave(loop: Loop) -> None:
    """One rank leaves a step; every rank gets an error soon, and nothing has changed."""
    if not isinstance(loop.side, Sharded):
        return
    module, drawn = loop.side.module, torch.get_rng_state()
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    loop.backward(loop.call())  # so that what follows is captured
    last = [*module._graphshard.programs.steps.values()][-1]
    # Ranks that do not meet in backward hear of an error in their next call only.
    if last.fingerprint.lines != last.forward_graph.fingerprint.lines:
        _one_leaves(loop)
    loop.side.zero_grad(True)
    with torch.no_grad():
        for name, value in module.named_buffers():
            value.copy_(buffers[name])
    torch.set_rng_state(drawn)
    loop.seen.clear()


def _one_leaves(loop: Loop) -> None:
    rng = Random(100 * loop.case.seed + loop.number)
    way, leaves = rng.choice(LEAVES), dist.get_rank() == rng.randrange(dist.get_world_size())
    loop.side.zero_grad(True)
    begin, failed = time.monotonic(), False
    try:
        way(loop, rng) if leaves else loop.backward(loop.call())
    except (Left, KeyboardInterrupt, GraphshardError) as error:
        failed = True
        if leaves and not is_shared(error):  # the others wait in the step that this rank left
            try:
                loop.backward(loop.call())
                failed = False
            except GraphshardError:
                pass
    assert time.monotonic() - begin < 20.0
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, failed)
    assert len(set(told)) == 1, f"errors by rank: {told}"

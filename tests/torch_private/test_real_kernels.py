"""Torch's fake kernels, as the table corrects them, against its real ones on the CPU."""

from __future__ import annotations

import contextlib
import copy
import itertools
import logging
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from full_tensors import full
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

import graphshard
from graphshard.capture.as_eager import eager_kernels
from graphshard.capture.fake_mode import constant_folding_fake_mode
from graphshard.torch_private.compat import private
from graphshard.torch_private.kernels import OTHERWISE, as_real

SAMPLES = 3

MORE_SAMPLES = 8  # of modules, and of the operators in the table, whose later samples differ more

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

LOW = (torch.bfloat16, torch.float16)

LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.mT.contiguous().mT,
    "channels last": lambda x: x.movedim(1, -1).contiguous().movedim(-1, 1),
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
}


def described(value: Any) -> Any:
    """Dtype, shape, and strides as far as they say where elements lie."""
    if not isinstance(value, Tensor):
        return None
    lies = zip(value.stride(), value.shape, strict=True) if value.numel() else ()
    return value.dtype, tuple(value.shape), tuple(step for step, size in lies if size != 1)


class Compared(TorchDispatchMode):
    """Compares the results of each operator with those of its fake kernel.

    wrong: by operator, the first difference. used: the operators whose results the table changed.
    met: all operators.
    """

    def __init__(self) -> None:
        super().__init__()
        self.fakes = constant_folding_fake_mode(device="any other")  # without the table
        self.wrong: dict[Any, str] = {}
        self.used: set[Any] = set()
        self.met: set[Any] = set()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.partition("::")[2]
        functional = getattr(torch.ops.aten, f"{name}_functional", None)
        if functional is not None and func._overloadname == "default":
            self.run(functional.default, tree_map_only(Tensor, Tensor.clone, args), kwargs)
        return self.run(func, args, kwargs)

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        leaves = tree_leaves((args, kwargs))
        known = str((func, [described(x) or x for x in leaves if type(x) is not torch.Generator]))
        tensors = [x for x in leaves if isinstance(x, Tensor)]
        dense = all(x.layout is torch.strided and not x.is_quantized for x in tensors)
        if not dense or known in self.seen:
            return func(*args, **kwargs)
        self.seen.add(known)
        self.met.add(func)
        stated = self.stated(func, *tree_map_only(Tensor, self.fake, (args, kwargs)))
        results = func(*args, **kwargs)
        if stated is not None:
            found, expected = ([*map(described, tree_leaves(r))] for r in (stated, results))
            pairs = zip(found, expected, strict=True)
            if any(a != b for a, b in pairs if b is not None):  # None: nobody asked for it
                operands = [described(x) or x for x in leaves]
                self.wrong.setdefault(func, f"{func}{operands}: {found}, in truth {expected}")
        return results

    def fake(self, value: Tensor) -> Tensor:
        with self.fakes:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)

    def stated(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The results that a trace takes; None for what depends on values or is refused."""
        with self.fakes, contextlib.suppress(Exception):
            plain = func(*args, **kwargs)
            before = [*map(described, tree_leaves(plain))]
            stated = as_real(func, args, kwargs, plain)
            if [*map(described, tree_leaves(stated))] != before:
                self.used.add(func)
            return stated


Call = tuple[Callable[..., Any], Any, Any]
"""A function of two arguments, which hold tensors in any structure."""


def operators() -> Iterator[Call]:
    """Torch's own database of operators."""
    from torch.testing._internal.common_methods_invocations import op_db

    corrected = {func._schema.name.partition("::")[2] for func in OTHERWISE}
    for op in op_db:
        names = op.name.rpartition(".")[2], op.name.replace(".", "_")
        count = MORE_SAMPLES if any(each.startswith(names) for each in corrected) else SAMPLES
        for dtype in DTYPES:
            if "jiterator" in op.name or dtype not in op.supported_dtypes("cpu"):
                continue
            grads = op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")
            with contextlib.suppress(Exception):  # some samples cannot be made
                samples = op.sample_inputs("cpu", dtype, requires_grad=grads)
                for sample in itertools.islice(samples, count):
                    run = lambda x, rest, op=op: op.op(x, *rest[0], **rest[1])  # noqa: E731
                    yield from in_two_dtypes(run, sample.input, (sample.args, sample.kwargs), dtype)


def modules() -> Iterator[Call]:
    """Torch's own database of modules, with and without training."""
    from torch.testing._internal.common_modules import module_db

    for info, training, dtype in itertools.product(module_db, (True, False), DTYPES):
        with contextlib.suppress(Exception):
            made = info.module_inputs_func(
                info, device="cpu", dtype=dtype, requires_grad=True, training=training
            )
            for sample in itertools.islice(made, MORE_SAMPLES):
                given = sample.constructor_input
                module = info.module_cls(*given.args, **given.kwargs).train(training).to(dtype)
                yield from of_module(module, sample.forward_input, dtype)


def more_modules() -> Iterator[Call]:
    """Norms that the database leaves out, bags without a backward, and losses of every pixel."""
    norms = nn.utils.parametrizations
    x, images, ids = torch.randn(2, 4, 4), torch.randn(2, 4, 4, 4), torch.randint(9, (2, 4))
    for dtype, training in itertools.product(DTYPES, (True, False)):
        for module, given in (
            (norms.weight_norm(nn.Linear(4, 4)), x),
            (norms.weight_norm(nn.Conv1d(4, 4, 1), dim=1), x),
            (norms.spectral_norm(nn.Linear(4, 4)), x),
            (nn.InstanceNorm1d(4, affine=True, track_running_stats=True), x),
            (nn.InstanceNorm2d(4, track_running_stats=True), images),
            (nn.BatchNorm1d(4, affine=False), x),
            (nn.BatchNorm2d(4, track_running_stats=False), images),
            *(
                (nn.EmbeddingBag(9, 4, mode=mode, include_last_offset=ends).requires_grad_(g), ids)
                for mode, ends, g in itertools.product(
                    ("sum", "mean", "max"), (True, False), (True, False)
                )
            ),
        ):
            offsets = (
                (torch.tensor([0, 4, 8]),) if getattr(module, "include_last_offset", 0) else ()
            )
            given = given.flatten() if offsets else given
            sample = types.SimpleNamespace(args=(given, *offsets), kwargs={})
            yield from of_module(module.train(training).to(dtype), sample, dtype)
        labels = types.SimpleNamespace(args=(images, torch.randint(4, (2, 4, 4))), kwargs={})
        yield from of_module(nn.NLLLoss(reduction="none"), labels, dtype)


def of_module(module: nn.Module, sample: Any, dtype: torch.dtype) -> Iterator[Call]:
    state = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def run(given: Any, tensors: Any) -> Any:
        with torch.set_grad_enabled(all(p.requires_grad for p in module.parameters())):
            return torch.func.functional_call(module, tensors, *given)

    yield from in_two_dtypes(run, (sample.args, sample.kwargs), state, dtype)


def in_two_dtypes(run: Any, first: Any, rest: Any, dtype: torch.dtype) -> Iterator[Call]:
    """As it is; and with the first operand, or the others, of 16 bits among float32."""
    yield run, changed(first, dtype), changed(rest, dtype)
    if dtype is torch.float32 and any(isinstance(leaf, Tensor) for leaf in tree_leaves(rest)):
        for low in LOW:
            yield run, changed(first, low), rest
            yield run, first, changed(rest, low)


def changed(values: Any, how: torch.dtype | Callable[[Tensor], Tensor]) -> Any:
    """Leaves with the values of those in `values`, in another dtype or another layout."""

    def change(value: Any) -> Any:
        if not isinstance(value, Tensor) or value.layout is not torch.strided:
            return value
        if isinstance(how, torch.dtype):
            new = value.detach().to(how) if value.is_floating_point() else value.detach()
        else:
            new = how(value.detach()) if value.dim() > 1 else value.detach()
        return new.requires_grad_(value.requires_grad)

    return tree_map(change, values)


def layouts(first: Any, rest: Any) -> list[Callable[[Tensor], Tensor]]:
    """All for one dtype of each size, to save time."""
    dtypes = {leaf.dtype for leaf in tree_leaves((first, rest)) if isinstance(leaf, Tensor)}
    seldom = dtypes & {torch.float64, torch.float16}
    return [*LAYOUTS.values()][: 1 if seldom else None]


def forward_and_backward(run: Any, first: Any, rest: Any) -> None:
    results = [r for r in tree_leaves(run(first, rest)) if isinstance(r, Tensor)]
    tracked = [result for result in results if result.requires_grad]
    wanted = [x for x in tree_leaves((first, rest)) if isinstance(x, Tensor) and x.requires_grad]
    if tracked and wanted:
        ones = [torch.ones(result.shape, dtype=result.dtype) for result in tracked]
        torch.autograd.grad(tracked, wanted, ones, allow_unused=True)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_table_has_all_differences_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of torch's operators, forward and backward, as a trace meets them.

    Samples that eager cannot run in a dtype or a layout are of no interest.
    """
    needed = types.ModuleType("expecttest")  # by torch's tests of itself
    needed.TestCase = unittest.TestCase  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "expecttest", needed)
    compared = Compared()
    as_traced = private("torch._dispatch.python", "enable_python_dispatcher")
    threads = torch.get_num_threads()
    logging.disable(logging.ERROR)
    torch.set_num_threads(1)
    try:
        for run, first, rest in itertools.chain(operators(), modules(), more_modules()):
            for layout in layouts(first, rest):
                with contextlib.suppress(Exception), warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    given = changed(first, layout), changed(rest, layout)
                    with eager_kernels(), as_traced(), compared:
                        forward_and_backward(run, *given)
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)
    assert not compared.wrong, "\n".join(compared.wrong.values())
    assert OTHERWISE - compared.used == set()
    assert len(compared.met) > 550


class Between(nn.Module):
    """A norm between two convolutions."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Conv1d(4, 4, 1), norm, nn.Conv1d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x).tanh())).float().square().sum()


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(4),
    "batch, without parameters": lambda: nn.BatchNorm1d(4, affine=False),
    "batch, without statistics": lambda: nn.BatchNorm1d(4, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    "layer": lambda: nn.LayerNorm(6),
    "group": lambda: nn.GroupNorm(2, 4),
    "weight": lambda: nn.utils.parametrizations.weight_norm(nn.Conv1d(4, 4, 1)),
}


@pytest.mark.parametrize("autocast", [True, False])
@pytest.mark.parametrize("dtype", [LOW[0], pytest.param(LOW[1], marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", NORMS)
def test_norms_in_16_bits_give_what_their_programs_say(name, dtype, autocast, caplog):
    torch.manual_seed(0)
    eager = Between(NORMS[name]()).to(torch.float32 if autocast else dtype)
    sharded = graphshard.compile(
        copy.deepcopy(eager), graphshard.LambdaPolicy(lambda _: False), check=True
    )
    x = torch.randn(3, 4, 6, dtype=eager.first.weight.dtype)
    for model in (eager, sharded):
        with torch.autocast("cpu", dtype, enabled=autocast):
            loss = model(x)
        loss.backward()
    for mine, theirs in zip(sharded.parameters(), eager.parameters(), strict=True):
        assert torch.equal(full(mine.grad), theirs.grad)
    for mine, theirs in zip(sharded.buffers(), eager.buffers(), strict=True):
        assert torch.equal(mine, theirs)
    assert not [record for record in caplog.records if record.name == "graphshard"]

"""Classes of inputs and outputs: a program takes and returns those of eager, with gradients."""

from __future__ import annotations

import dataclasses
import warnings
from collections import OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import attrs
import pytest
import torch
from capture_models import Net, Pair, Sample, X, linear
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence
from torch.utils import _pytree as pytree

import graphshard
from graphshard.capture.entry import capture
from graphshard.capture.structure import CALL, take_apart
from graphshard.errors import CaptureError


@dataclasses.dataclass
class Record:
    x: Tensor
    name: str = "a"
    inner: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    count: int = 3


class Named(NamedTuple):
    x: Tensor
    y: Any = None


@attrs.define
class Attributes:
    x: Tensor
    y: int = 2


class Ordered(OrderedDict):
    pass


class Plain:
    __slots__ = ("inner", "x")

    def __init__(self, x: Tensor) -> None:
        self.x, self.inner = x, [x * 2, {"a": x + 1}]


RESULTS: dict[str, Any] = {
    "keyless": lambda m, x: Sample(m.a(x)),
    "keyless nested": lambda m, x: [Sample(m.a(x), Sample(m.b(x))), {"p": Pair(m.a(x), x)}],
    "record": lambda m, x: Record(m.a(x), "b", Record(m.b(x), inner=[Frozen(x * 2)])),
    "frozen": lambda m, x: Frozen(m.a(x), 5),
    "named": lambda m, x: Named(Named(m.a(x), 3), {"z": m.b(x)}),
    "attrs": lambda m, x: Attributes(m.a(x)),
    "ordered": lambda m, x: Ordered(b=m.a(x), a=None, c="s"),
    "default": lambda m, x: defaultdict(list, a=[m.a(x)]),
    "deque": lambda m, x: deque([m.a(x), 1]),
    "slots": lambda m, x: Plain(m.a(x)),
    "nothing": lambda m, x: (None, (None, [None]), m.a(x), {}),
    "scalars": lambda m, x: {"loss": m.a(x).sum(), "n": 3, "f": 1.5, "none": None, 4: True},
    "size": lambda m, x: (m.a(x), x.shape, x.dtype, [x.shape[:1]]),
    "shared": lambda m, x: (lambda y: (y, Record(y, inner=y)))(m.a(x)),
    "structseq": lambda m, x: m.a(x).max(dim=1),
}


def two_linears(forward: Any) -> nn.Module:
    return Net(forward, a=linear(), b=linear())


def outline(value: Any) -> Any:
    """Classes and plain values of a nest, and each tensor with the values it has."""
    if isinstance(value, Tensor):
        return "tensor", value.requires_grad, value.tolist()
    if isinstance(value, dict):
        return type(value), [(key, outline(entry)) for key, entry in value.items()]
    if isinstance(value, list | tuple | deque):
        return type(value), [outline(entry) for entry in value]
    names = [*getattr(value, "__dict__", ()), *getattr(type(value), "__slots__", ())]
    return type(value), [
        (n, outline(getattr(value, n))) for n in names if hasattr(value, n)
    ] or value


def tensors_in(value: Any) -> list[Tensor]:
    return take_apart(value, name="out")[0]


def grads_of(model: nn.Module, result: Any, x: Tensor) -> list[Any]:
    x.grad = None
    sum(t.square().sum() for t in tensors_in(result) if t.requires_grad).backward()
    return [None if t.grad is None else t.grad.tolist() for t in (x, *model.parameters())]


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_those_of_eager(name: str) -> None:
    model = two_linears(RESULTS[name])
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    x = X.clone().requires_grad_()
    ours, theirs = sharded(x), model(x)
    assert outline(ours) == outline(theirs)
    assert grads_of(sharded, ours, x) == grads_of(model, theirs, x)


ARGUMENTS: dict[str, tuple[Any, Any]] = {
    "keyless": (lambda m, a: m.a(a.sample), Sample),
    "pair": (lambda m, a: m.a(a.left) + a.right, lambda x: Pair(x, x * 2)),
    "record": (lambda m, a: m.a(a.x) * len(a.name), lambda x: Record(x, "ab")),
    "frozen": (lambda m, a: m.a(a.x) * a.count, Frozen),
    "named": (lambda m, a: m.a(a.x) * a.y, lambda x: Named(x, 3)),
    "attrs": (lambda m, a: m.a(a.x) * a.y, Attributes),
    "slots": (lambda m, a: m.a(a.x) + a.inner[1]["a"], Plain),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_are_taken_as_eager_does(name: str) -> None:
    forward, make = ARGUMENTS[name]
    model = two_linears(forward)
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    grads = []
    for each in (sharded, model):
        x = X.clone().requires_grad_()
        out = each(make(x))
        out.square().sum().backward()
        grads.append([out.tolist(), x.grad.tolist(), each.a.weight.grad.tolist()])
    assert grads[0] == grads[1]


class Hides:
    """Registered with its mask in the context."""

    def __init__(self, x: Tensor, mask: Tensor) -> None:
        self.x, self.mask = x, mask


pytree.register_pytree_node(
    Hides, lambda value: ([value.x], [value.mask]), lambda xs, masks: Hides(xs[0], masks[0])
)


def test_tensors_in_a_context_are_refused() -> None:
    model = two_linears(lambda m, x: [Hides(m.a(x), m.b(x))])
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    said = "a part of out is a Hides, whose flatten function keeps a tensor in its context"
    with pytest.raises(CaptureError, match=said):
        sharded(X)
    with pytest.raises(CaptureError, match="an argument is a Hides, whose flatten"):
        sharded(Hides(X, X))


def test_paths_of_classes_without_keys() -> None:
    x = torch.zeros(1)
    value = [Sample(x, Pair(x, x)), Named(x), {"k": Record(x)}, torch.Size([2])]
    assert take_apart(value, name="out")[1].paths == (
        "out[0]['sample']",
        "out[0]['rest']<Pair>[0]",
        "out[0]['rest']<Pair>[1]",
        "out[1].x",
        "out[2]['k']<Record>[0]",
    )
    packed = pack_padded_sequence(torch.zeros(3, 2, 4), torch.tensor([3, 1]))
    _, structure = take_apart(((packed,), {"p": packed}), name=CALL)
    assert structure.paths[:2] == ("args[0].data", "args[0].batch_sizes")
    assert structure.paths[2:] == ("kwargs['p'].data", "kwargs['p'].batch_sizes")
    assert type(structure.build([packed.data, packed.batch_sizes] * 2)[0][0]) is PackedSequence


# -- inputs that are more than dense values ---------------------------------------------------


class Image(Tensor):
    pass


class Turned(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return -super().__torch_function__(func, types, args, kwargs or {})


REFUSED: dict[str, tuple[Any, str]] = {
    "class": (lambda x: x.as_subclass(Turned), "Turned, and a program would not run its own __tor"),
    "sparse": (lambda x: x.to_sparse(), r"layout torch.sparse_coo, .*so pass to_dense\(\)"),
    "compressed": (lambda x: x.to_sparse_csr(), "layout torch.sparse_csr"),
    "nested": (lambda x: torch.nested.nested_tensor([x[0], x[1]]), "is a nested tensor"),
    "masked": (lambda x: torch.masked.masked_tensor(x, x > 0), "torch.MaskedTensor"),
    "integers": (
        lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
        "is quantized .torch.qint8",
    ),
    "conjugate": (lambda x: torch.complex(x, x).conj(), r"conjugated .*resolve_conj\(\)"),
    "negative": (lambda x: torch.complex(x, x).conj().imag, "negated when it is read"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_inputs_a_program_cannot_take(name: str) -> None:
    make, said = REFUSED[name]
    model = Net(lambda m, batch: m.fc(torch.ones_like(batch["x"])), fc=linear())
    odd = make(torch.randn(2, 4))
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    sharded({"x": torch.randn(2, 4)})
    with pytest.raises(CaptureError, match=said) as raised:
        sharded({"x": odd})
    assert str(raised.value).startswith("args[0]['x'] ")
    assert len(sharded.programs) == 1
    with pytest.raises(CaptureError, match=said):
        capture(model, ({"x": odd},))


def test_a_program_of_plain_complex_numbers_is_not_used_for_conjugates() -> None:
    model = Net(lambda m, z: m.fc(torch.view_as_real(z).flatten(1)), fc=linear())
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    z = torch.randn(3, 2, dtype=torch.complex64)
    assert torch.equal(sharded(z), model(z))
    with pytest.raises(CaptureError, match="resolve_conj"):
        sharded(z.conj())


def test_a_class_that_adds_nothing_is_noted_once() -> None:
    model = Net(lambda m, x: m.fc(x), fc=linear())
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    x = torch.randn(2, 4, requires_grad=True)
    expected = sharded(x)
    image = x.detach().as_subclass(Image).requires_grad_()
    with pytest.warns(UserWarning, match=r"args\[0\] is a .*Image; .* sees a plain tensor"):
        result = sharded(image)
    assert type(result) is Tensor
    assert torch.equal(result, expected)
    for out in (result, expected):
        out.square().sum().backward()
    assert torch.equal(image.grad.as_subclass(Tensor), x.grad)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sharded(image)
        sharded(torch.nn.Parameter(x))
    assert len(sharded.programs) == 1

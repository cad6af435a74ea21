"""Captured programs compute what the module computes, and their tables say what is what."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from capture_models import Net, X, assert_same_as_eager, first_tensor, linear, run_captured
from torch import Tensor, nn

import graphshard
from graphshard.capture import input_checks
from graphshard.capture.entry import capture
from graphshard.capture.structure import CALL, take_apart
from graphshard.errors import CaptureError
from graphshard.program.program import BACKWARD, FORWARD


def signature_of(args, kwargs):
    return input_checks.signature_of(*take_apart((args, kwargs), name=CALL))


def test_a_meta_model_captures_without_memory_for_its_parameters():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(1 << 20, 1 << 20), nn.Linear(1 << 20, 8))
    program = capture(model, (torch.empty(2, 1 << 20),)).program
    assert program.params[0].numel == 1 << 40
    assert all(p.is_meta for p in model.parameters())


def test_every_node_knows_phase_and_module():
    model = nn.Sequential(linear(), nn.ReLU(), nn.Sequential(linear()))
    program = capture(model, (X,)).program
    phases = [node.meta["phase"] for node in program.nodes()]
    assert phases == sorted(phases, key=[FORWARD, BACKWARD].index)
    assert {n.meta["fqn"] for n in program.nodes(FORWARD)} == {"0", "1", "2.0"}
    assert {n.meta["fqn"] for n in program.nodes(BACKWARD)} == {"0", "1", "2.0"}
    assert all("val" in node.meta for node in program.nodes())


def test_tables_name_parameters_buffers_inputs_and_outputs():
    model = Net(
        lambda m, x, *, scale: {"y": m.bn(m.fc(x)) * scale["s"], "n": x.shape[0]},
        fc=linear(),
        bn=nn.BatchNorm1d(4),
    )
    captured = capture(model, (X,), {"scale": {"s": torch.ones(4, requires_grad=True)}})
    program = captured.program
    assert [p.fqn for p in program.params] == ["fc.weight", "fc.bias", "bn.weight", "bn.bias"]
    assert [i.path for i in program.inputs] == ["args[0]", "kwargs['scale']['s']"]
    assert [i.requires_grad for i in program.inputs] == [False, True]
    assert [o.path for o in program.outputs] == ["out['y']"]
    assert {m.name for m in program.mutations} == {
        "bn.running_mean",
        "bn.running_var",
        "bn.num_batches_tracked",
    }
    assert program.results().input_grads[0] is None
    assert program.results().input_grads[1] is not None


@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_dropout_draws_the_random_numbers_eager_draws(p):
    model = nn.Sequential(linear(), nn.Dropout(p), linear(), nn.Dropout(p))
    assert_same_as_eager(model, (X,))


def test_frozen_and_unused_parameters_get_no_gradient():
    model = Net(lambda m, x: m.b(m.a(x)), a=linear(), b=linear(), unused=linear())
    model.a.weight.requires_grad_(False)
    program = assert_same_as_eager(model, (X,)).program
    without = [
        p.fqn for p, g in zip(program.params, program.results().grads, strict=True) if g is None
    ]
    assert without == ["a.weight", "unused.weight", "unused.bias"]


def test_one_module_used_several_times_keeps_its_name():
    model = Net(lambda m, x: m.a(m.a(m.a(x).tanh())), a=linear())
    program = assert_same_as_eager(model, (X,)).program
    names = [n.meta["fqn"] for n in program.nodes() if "mm" in str(n.target)]
    assert names == ["a"] * len(names)


def test_forward_only_under_no_grad():
    program = capture(nn.Sequential(linear(), nn.BatchNorm1d(4)), (X,), grad=False).program
    assert not program.grad
    assert not list(program.nodes(BACKWARD))
    assert len(program.mutations) == 3
    assert program.results().grads == [None] * 4


def test_inputs_that_need_gradients():
    model = linear()
    x = X.clone().requires_grad_()
    captured = capture(model, (x,))
    _, _, _, input_grads = run_captured(captured, model, (x,), {})
    model(x).backward(torch.ones(6, 4))
    assert torch.equal(input_grads[0], x.grad)


def test_several_outputs_have_tangents_of_their_own():
    def forward(m, x):
        h = m.fc(x)
        return h, h[:, 0], h.view(-1), h.detach(), h.argmax()

    model = Net(forward, fc=linear())
    captured = capture(model, (X,))
    assert [o.tangent is not None for o in captured.program.outputs] == [
        True, True, True, False, False,
    ]  # fmt: skip
    tangents = [torch.randn(6, 4), torch.randn(6), torch.randn(24)]
    _, _, grads, _ = run_captured(captured, model, (X,), {}, tangents)
    torch.autograd.backward(model(X)[:3], tangents)
    assert torch.equal(grads["fc.weight"], model.fc.weight.grad)


def test_outputs_that_are_inputs_parameters_or_the_same_tensor():
    def forward(m, x):
        h = m.fc(x)
        return h, h, x, m.fc.weight, x.t()

    model = Net(forward, fc=linear())
    captured = capture(model, (X,))
    out, _, grads, _ = run_captured(
        captured, model, (X,), {}, [torch.ones(6, 4), torch.ones(6, 4), torch.ones(4, 4)]
    )
    result = model(X)
    torch.autograd.backward(
        [result[0], result[1], result[3]], [torch.ones(6, 4)] * 2 + [torch.ones(4, 4)]
    )
    assert torch.equal(grads["fc.weight"], model.fc.weight.grad)
    assert torch.equal(out[4], X.t())


@dataclass
class Batch:
    x: Tensor
    scale: float


class Box:
    def __init__(self, value):
        self.value = value


def test_objects_pytree_does_not_know_go_in_and_come_out():
    model = Net(lambda m, batch: (m.fc(batch.x) * batch.scale, Box([batch.x + 1])), fc=linear())
    captured = capture(model, (Batch(X, 3.0),))
    out, *_ = run_captured(captured, model, (Batch(X, 3.0),), {})
    assert isinstance(out[1], Box)
    assert torch.equal(out[1].value[0], X + 1)
    assert torch.equal(first_tensor(out), model(Batch(X, 3.0))[0])


def test_non_tensor_arguments_are_part_of_the_signature():
    assert signature_of((X, True), {}) != signature_of((X, 1), {})
    assert signature_of((X,), {"mode": "a"}) != signature_of((X,), {"mode": "b"})
    assert signature_of((X,), {}) == signature_of((X + 1,), {})
    assert signature_of((X,), {}) != signature_of((X.t().contiguous().t(),), {})
    assert signature_of((X,), {}) != signature_of((X.clone().requires_grad_(),), {})
    assert signature_of((Batch(X, 1.0),), {}) != signature_of((Batch(X, 2.0),), {})


def test_other_objects_count_by_what_they_hold():
    box = Box(1.0)
    before = signature_of((X, box), {})
    assert signature_of((X, Box(1.0)), {}) == before
    assert hash(signature_of((X, Box(1.0)), {})) == hash(before)
    box.value = 2.0
    assert signature_of((X, box), {}) != before
    assert signature_of((slice(0, 3),), {}) == signature_of((slice(0, 3),), {})
    assert signature_of((slice(0, 3),), {}) != signature_of((slice(0, 4),), {})


def test_functions_count_by_identity_for_as_long_as_they_are_asked_about():
    seen = {signature_of((lambda x, n=n: x * n,), {}) for n in range(20)}
    assert len(seen) == 20


def test_an_input_changed_in_place_is_a_mutation():
    model = Net(lambda m, x, seen: (seen.add_(1), m.fc(x))[1], fc=linear())
    program = capture(model, (X, torch.zeros(2))).program
    assert [(m.kind, m.name) for m in program.mutations] == [("input", "args[1]")]


def test_the_module_is_left_as_it_was():
    def forward(m, x):
        m.cache = x * 2
        m.calls += 1
        return m.fc(x)

    model = Net(forward, fc=linear())
    model.calls = 0
    before = dict(model.__dict__)
    captured = capture(model, (X,))
    assert model.__dict__ == before
    assert [(each.place.path, each.value) for each in captured.assigned] == [("calls", 1)]
    assert type(model.fc.weight) is nn.Parameter
    assert not model.fc._forward_hooks
    assert not model.fc._forward_pre_hooks


def test_state_in_containers_is_said_to_be_baked_in():
    def forward(m, x):
        m.seen["calls"] += 1
        m.log.append(x.shape)
        return m.fc(x) * m.seen["calls"]

    model = Net(forward, fc=linear())
    model.seen, model.log = {"calls": 0}, []
    with pytest.warns(UserWarning, match="captured program keeps") as warned:
        notes = capture(model, (X,)).program.notes
    said = " ".join(str(w.message) for w in warned)
    assert "assigns seen, log" in said
    assert {w.filename for w in warned} == {__file__}
    assert len(notes) == 1
    assert (model.seen, model.log) == ({"calls": 0}, [])


def test_plain_tensors_the_model_closes_over_are_constants():
    table = torch.randn(4)
    program = assert_same_as_eager(Net(lambda m, x: m.fc(x) + table, fc=linear()), (X,)).program
    assert [b.constant for b in program.buffers] == [True]


@pytest.mark.parametrize(
    "model",
    [
        nn.LSTM(4, 4, num_layers=2, dropout=0.2, batch_first=True),
        nn.GRU(4, 4, num_layers=3, dropout=0.2, bidirectional=True),
        nn.RNN(4, 4, num_layers=2, dropout=0.2),
        Net(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(4, 2, dropout=0.1)),
        nn.TransformerEncoderLayer(4, 2, 8, batch_first=True),
        torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
        torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
        nn.ConvTranspose1d(3, 4, 3),
    ],
    ids=lambda model: type(model).__name__,
)
def test_modules_of_torch(model):
    x = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(2))
    captured = assert_same_as_eager(model, (x,))
    assert not captured.program.notes


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return x * w

    @staticmethod
    def backward(ctx, g):
        return g * ctx.saved_tensors[0], None


def test_a_user_function_may_give_no_gradient():
    model = Net(lambda m, x: Scale.apply(m.fc(x), m.w), fc=linear(), w=nn.Parameter(torch.ones(4)))
    assert_same_as_eager(model, (X,))


def test_copy_is_independent():
    program = capture(linear(), (X,)).program
    other = program.copy()
    for node in list(other.nodes())[-1:]:
        node.meta["fqn"] = "changed"
    assert all(n.meta["fqn"] != "changed" for n in program.nodes())
    assert other.params[0].node.graph is other.graph
    assert [n.name for n in other.graph.nodes] == [n.name for n in program.graph.nodes]


def test_names_that_make_one_identifier_stay_apart():
    model = nn.Module()
    model.a = nn.Linear(4, 4)
    model.a_weight = nn.Parameter(torch.randn(4, 4))
    model.forward = lambda x: model.a(x) @ model.a_weight
    program = capture(model, (X,), {}).program
    targets = [n.target for n in program.graph.nodes if n.op == "placeholder"]
    assert len(set(targets)) == len(targets)
    assert_same_as_eager(
        Net(lambda m, x: m.a(x) @ m.a_weight, a=linear(), a_weight=nn.Parameter(torch.eye(4) * 2)),
        (X,),
    )


def test_hooks_that_a_forward_installs_are_installed_once_in_each_trace():
    """As models of transformers do when outputs of their layers are asked for."""

    def forward(m, x):
        if not getattr(m, "hooked", False):
            m.fc.register_forward_hook(lambda fc, args, out: m.seen[-1].append(out))
            m.hooked = True
        m.seen.append([])
        return [m.fc(x), *m.seen.pop()]

    model = Net(forward, fc=linear())
    model.seen = []
    with pytest.warns(UserWarning, match=r"assigns fc\._forward_hooks, hooked"):
        captured = capture(model, (X,))
    assert len(captured.program.outputs) == 2
    assert not model.fc._forward_hooks


# -- linear algebra ---------------------------------------------------------------------------


MATRICES = {
    "inv": torch.linalg.inv,
    "cholesky": torch.linalg.cholesky,
    "solve": lambda a: torch.linalg.solve(a, a + 1),
    "eigh": lambda a: torch.linalg.eigh(a)[0],
    "qr": lambda a: torch.linalg.qr(a)[0],
    "slogdet": lambda a: torch.linalg.slogdet(a)[1],
}


@pytest.mark.parametrize("name", MATRICES)
def test_linear_algebra(name):
    w = nn.Parameter(3 * torch.eye(4) + 0.1 * torch.randn(4, 4))
    net = Net(lambda m, x: (MATRICES[name](m.w @ m.w.t()) * x[0, 0]).sum(), w=w)
    assert_same_as_eager(net, (X,))


def test_a_bad_matrix_is_an_error_of_the_step_as_of_eager():
    net = Net(lambda m, x: torch.linalg.inv(m.w).sum() * x.sum(), w=nn.Parameter(torch.eye(4)))
    captured = capture(net, (X,))
    run_captured(captured, net, (X,), {})
    with torch.no_grad():
        net.w.zero_()
    for run in (lambda: net(X), lambda: run_captured(captured, net, (X,), {})):
        with pytest.raises(torch.linalg.LinAlgError, match="could not be completed"):
            run()


# -- made at the first call -------------------------------------------------------------------


def makes_parameter(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m.fc, "scale"):
        m.fc.scale = nn.Parameter(torch.ones(4))
    return m.fc(x) * m.fc.scale


def makes_module(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "last"):
        m.last = nn.Linear(4, 4)
    return m.last(m.fc(x))


@pytest.mark.parametrize(
    ("forward", "names"),
    [(makes_parameter, r"fc\.scale"), (makes_module, r"last\.weight, last\.bias")],
)
def test_parameters_made_in_forward_are_refused(forward: Any, names: str) -> None:
    model = Net(forward, fc=linear())
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    with pytest.raises(CaptureError, match=rf"makes parameters \({names}\), .*call the model once"):
        sharded(X)
    model(X)
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    assert torch.equal(sharded(X), model(X))


def registers(m: Any, x: Tensor) -> Tensor:
    if not hasattr(m, "table"):
        m.register_buffer("table", torch.arange(4.0))
    return m.fc(x) + m.table


def fills(m: Any, x: Tensor) -> Tensor:
    if m.fc.table is None:
        m.fc.table = torch.arange(4.0)
    return m.fc(x) + m.fc.table


@pytest.mark.parametrize(("forward", "name"), [(registers, "table"), (fills, r"fc\.table")])
def test_buffers_made_in_forward_are_noted(forward: Any, name: str) -> None:
    model = Net(forward, fc=linear())
    model.fc.register_buffer("table", None)
    with pytest.warns(UserWarning, match=rf"assigns {name} \(a buffer it makes itself"):
        capture(model, (X,))
    model(X)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        capture(model, (X,))


def forces(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    x.requires_grad_()
    energy = m.fc(x).tanh().sum()
    (gradient,) = torch.autograd.grad(energy, x, create_graph=True)
    return energy, -gradient


@pytest.mark.parametrize("tracked", [False, True])
def test_inputs_that_a_forward_differentiates(tracked: bool) -> None:
    model = Net(forces, fc=linear())
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    results = []
    for each in (sharded, model):
        x = X.clone().requires_grad_(tracked)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            out = each(x)
        if each is sharded:
            noted = [w for w in said if "requires_grad_() on args[0]" in str(w.message)]
            assert len(noted) == (not tracked)
        out[1].square().sum().backward()
        grad = x.grad.tolist() if tracked else None
        results.append([*(t.tolist() for t in out), each.fc.weight.grad.tolist(), grad])
    assert results[0] == results[1]

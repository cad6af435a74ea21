"""Sizes that depend on values are sizes of one program, which equals eager in each call."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
import value_size_models as models
from capture_models import Net, X, linear
from loops import same_step
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from value_size_models import STEPS, WORDS, Tagger

import graphshard
from graphshard.capture.entry import capture
from graphshard.errors import CaptureError, SizeCheckError
from graphshard.program.regions import symbols_of
from graphshard.program.storages import storages_of
from graphshard.program.text import full_text
from graphshard.torch_private.unbacked import is_unbacked

SEEDS = (0, 1, 103)  # batches whose masks have 7 rows, all 12, none


def assert_trains_as_eager(model, sharded, seeds=SEEDS):
    """For masks with no, some and all rows."""
    for seed in seeds:
        same_step(model, sharded, *models.batch(seed), objective=models.loss_of)


QUICK = (*list(models.LOSSES)[:4], "experts_that_skip")
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in models.MODELS if name not in QUICK]


@pytest.mark.parametrize("name", [*QUICK, *SLOW])
def test_one_program_serves_all_values(name):
    torch.manual_seed(0)
    model = models.MODELS[name]()
    policy = graphshard.BlockPolicy({type(model.blocks[0])})
    sharded = graphshard.compile(model, policy, example_inputs=models.batch(2), check=True)
    assert_trains_as_eager(model, sharded)
    assert len(sharded.programs) == 1
    assert sharded.program.sizes.by_values


@pytest.mark.parametrize("fields", [{"recompute": "units"}, {"offload": "activations"}], ids=str)
def test_policies_hold_for_such_sizes(fields):
    torch.manual_seed(0)
    model = models.MODELS["first_rows"]()
    policy = graphshard.BlockPolicy({models.Mlp}, **fields)
    sharded = graphshard.compile(model, policy, example_inputs=models.batch(2), check=True)
    assert_trains_as_eager(model, sharded)


def test_storages_count_the_bounds_of_such_sizes():
    program = capture(models.MODELS["mask_loss"](), models.batch(2)).program
    sizes = {storage.node.name: storage.size for storage in storages_of(program).all}
    assert sizes["index"] == models.ROWS * models.CLASSES * 4


def test_compiled_regions_leave_such_sizes_out():
    model = models.MODELS["mask_loss"]()
    policy = graphshard.BlockPolicy({models.Mlp})
    example = models.batch(2)
    plan = graphshard.plan(model, policy, world_size=2, example_inputs=example, backend="inductor")
    in_regions = [node for node in plan.program.nodes() if "region" in node.meta]
    assert in_regions
    for node in in_regions:
        for value in (node, *node.all_input_nodes):
            assert not any(map(is_unbacked, symbols_of(value.meta["val"]))), node.name


def test_estimates_say_what_they_assume():
    model = models.MODELS["first_rows"]()
    policy = graphshard.BlockPolicy({models.Mlp})
    inputs = {"example_inputs": models.batch(2), "process_group_backend": "gloo"}
    plan = graphshard.plan(model, policy, world_size=2, **inputs)
    said = "u0, u1, u2 assumed 12; they depend on values, and bytes and times on them"
    assert f"sizes: {said}" in str(plan)
    estimate = graphshard.simulate(plan, hardware="cpu-gloo")
    assert f"sizes      {said}" in str(estimate)
    assert estimate.to_dict()["assumed_sizes"] == {"u0": 12, "u1": 12, "u2": 12}


def test_a_size_that_may_be_zero_is_taken_not_to_be_where_the_model_asks():
    def forward(m, x):
        rows = (x[:, 0] > 0).nonzero()[:, 0]
        if rows.numel() == 0:  # the line that asks
            return m.fc(x).sum() * 0
        return m.fc(x[rows]).mean()

    model = Net(forward, fc=linear())
    with pytest.warns(UserWarning, match=r"only where u0 != 0 \(test_value_sizes\.py:\d+ in forw"):
        sharded = graphshard.compile(model, graphshard.SizePolicy(1), example_inputs=(X,))
    assert any("each call checks it" in note for note in sharded.program.notes)
    x = torch.randn_like(X)
    x[0, 0] = 1
    assert torch.equal(sharded(x), model(x))
    with pytest.raises(SizeCheckError, match="u0=0") as caught:
        sharded(-torch.ones_like(X))
    assert "# the line that asks" in str(caught.value)


class SplitWeight(nn.Module):
    """Splits a parameter by lengths in the batch, so that its gradient is put together again."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, mask):
        one, other = torch.split(self.weight, torch.stack([mask.sum(), (~mask).sum()]).tolist())
        return one.sum() * 2 + (other * other).sum()


def test_a_gradient_of_parts_has_the_shape_of_its_parameter():
    model = SplitWeight()
    masks = [torch.arange(6) < rows for rows in (2, 0, 6)]
    sharded = graphshard.compile(model, graphshard.SizePolicy(1), example_inputs=masks[:1])
    for mask in masks:
        same_step(model, sharded, mask)


def test_outputs_of_such_sizes_may_have_no_gradient():
    model = models.MODELS["two_results"]()
    policy = graphshard.BlockPolicy({models.Mlp})
    sharded = graphshard.compile(model, policy, example_inputs=models.batch(2), check=True)
    for chosen in (0, 2):
        for seed in SEEDS:
            batch = models.batch(seed)
            same_step(model, sharded, *batch, objective=lambda out, i=chosen: out[i].sum())


def test_experts_of_transformers_loop_over_all():
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    config = MixtralConfig(hidden_size=8, intermediate_size=6, num_local_experts=3)
    config._experts_implementation = "eager"
    model = MixtralExperts(config)
    for param in model.parameters():
        torch.nn.init.normal_(param)
    x, weights = torch.randn(5, 8), torch.rand(5, 2)
    chosen = torch.tensor([[0, 1], [1, 0], [2, 1], [0, 2], [1, 2]])
    sharded = graphshard.compile(
        model, graphshard.SizePolicy(1), example_inputs=(x, chosen, weights)
    )
    for choice in (chosen, chosen.clamp(max=1), torch.zeros_like(chosen)):
        same_step(model, sharded, x, choice, weights, objective=lambda out: out.pow(2).sum())
    assert len(sharded.programs) == 1


def test_experts_of_transformers_are_looked_up_by_the_text_of_their_numbers():
    from transformers import SwitchTransformersConfig
    from transformers.models.switch_transformers import modeling_switch_transformers as switch

    torch.manual_seed(0)
    config = SwitchTransformersConfig(d_model=8, d_ff=6, num_experts=3, expert_capacity=4)
    model = switch.SwitchTransformersSparseMLP(config).eval()  # with no noise of the router
    x = torch.randn(2, 6, 8)
    sharded = graphshard.compile(model, graphshard.SizePolicy(1), example_inputs=(x,))
    for batch in (x, x[:1].expand_as(x).contiguous()):
        same_step(model, sharded, batch, objective=lambda out: out[0].pow(2).sum())
    assert len(sharded.programs) == 1


def batch_of_equal_rows(seed):
    """All rows choose the same two of the three experts."""
    x, target, mask = models.batch(seed)
    return x[:1].expand_as(x).contiguous(), target, mask


def test_experts_that_skip_what_is_empty_share_one_program():
    model = models.MODELS["experts_that_skip"]()
    with pytest.warns(UserWarning, match=r"skips what is empty.*zeros, where eager may leave None"):
        sharded = graphshard.compile(
            model, graphshard.BlockPolicy({models.Experts}), example_inputs=models.batch(0)
        )
    assert "the same program skips what is empty" in str(sharded.program.notes)
    for batch in (models.batch(1), batch_of_equal_rows(2), batch_of_equal_rows(3)):
        losses = []
        for one in (model, sharded):
            one.zero_grad()
            losses.append(one(*batch))
            losses[-1].backward()
        assert torch.equal(*losses)
        for name, param in model.named_parameters():
            expected = torch.zeros_like(param) if param.grad is None else param.grad
            assert torch.equal(sharded.get_parameter(name).grad, expected), name
    assert any(param.grad is None for param in model.parameters())
    assert len(sharded.programs) == 1


def adds_twice(m, x, rows):
    if rows.numel() == 0:
        return 2 * x
    return x.index_add(0, rows, m.fc(x[rows]))


def by_the_number(m, x, rows):
    if rows.numel() == 0:
        return x
    return x + m.fc(x[rows]).sum(0) / rows.numel()


def mean_of_rows(m, x, rows):
    if rows.numel() == 0:
        return x
    return x + m.fc(x[rows]).mean(0)


@pytest.mark.parametrize("way", [adds_twice, by_the_number, mean_of_rows])
def test_what_is_not_the_same_without_rows_is_checked(way):
    def forward(m, x):
        return way(m, x, (x[:, 0] > 0).nonzero()[:, 0])

    model = Net(forward, fc=linear())
    with pytest.warns(UserWarning, match="SizeCheckError"):
        sharded = graphshard.compile(model, graphshard.SizePolicy(1), example_inputs=(X,))
    ones = torch.ones_like(X)
    assert torch.equal(sharded(ones), model(ones))
    with pytest.raises(SizeCheckError, match="u0"):
        sharded(-ones)


def test_the_dump_names_such_sizes():
    model = models.MODELS["mask_loss"]()
    text = full_text(capture(model, models.batch(2)).program)
    assert "size u0: by the values of %index; at most 12, estimates take 12" in text
    assert "f32[u0, 4] = aten.index.Tensor" in text


def test_a_promise_is_checked_in_each_call():
    def forward(m, x):
        torch._check((x > 0).sum().item() <= 3)  # the line at fault
        return m.fc(x)

    model = Net(forward, fc=linear())
    sharded = graphshard.compile(model, graphshard.SizePolicy(1), example_inputs=(X,))
    assert torch.equal(sharded(-torch.ones_like(X)), model(-torch.ones_like(X)))
    with pytest.raises(SizeCheckError, match=r"u0 <= 3.*u0=\d+") as caught:
        sharded(torch.ones_like(X))
    assert "torch._check((x > 0).sum().item() <= 3)  # the line at fault" in str(caught.value)


def test_a_number_that_nothing_reads_is_no_node():
    def forward(m, x):
        x.sum().item()  # as a log line would
        return m.fc(x)

    model = Net(forward, fc=linear())
    plain = Net(lambda m, x: m.fc(x), fc=linear())
    with pytest.warns(UserWarning, match=r"as a log line would"):
        program = capture(model, (X,)).program
    assert any("not read" in note and "as a log line would" in note for note in program.notes)
    ops = [node.target for node in program.nodes()]
    assert ops == [node.target for node in capture(plain, (X,)).program.nodes()]


def test_a_constant_is_still_folded():
    def forward(m, x):
        count = (x > 0).sum().item()
        if torch.arange(4).sum().item() == 6:
            return m.fc(x) * count
        return m.fc(x)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        program = capture(Net(forward, fc=linear()), (X,)).program
    assert len([n for n in program.nodes() if "_local_scalar_dense" in str(n.target)]) == 1


def test_a_range_of_such_a_size_is_no_constant():
    def forward(m, x):
        count = (x > 0).sum().item()
        last = torch.arange(count).sum().item()
        return m.fc(x) * last

    model = Net(forward, fc=linear())
    sharded = graphshard.compile(model, graphshard.SizePolicy(1), example_inputs=(X,))
    for x in (X, torch.ones_like(X), -torch.ones_like(X)):
        assert torch.equal(sharded(x), model(x))


# -- recurrent layers on packed sequences -----------------------------------------------------


def batch(lengths, seed=0):
    torch.manual_seed(seed)
    return torch.randint(WORDS, (len(lengths), STEPS)), torch.tensor(lengths)


CASES = {
    "lstm": lambda: Tagger(nn.LSTM),
    "gru": lambda: Tagger(nn.GRU, enforce_sorted=False),
    "rnn": lambda: Tagger(nn.RNN, nonlinearity="relu", bias=False),
    "stacked": lambda: Tagger(
        nn.LSTM, num_layers=2, bidirectional=True, total_length=STEPS, enforce_sorted=False
    ),
    "projected": lambda: Tagger(nn.LSTM, proj_size=6),
}


@pytest.mark.parametrize("name", CASES)
def test_one_program_serves_all_lengths(name):
    torch.manual_seed(0)
    model = CASES[name]()
    sharded = graphshard.compile(
        model, graphshard.SizePolicy(100), example_inputs=batch([7, 3, 2]), check=True
    )
    unsorted = [[1, 4, 2]] if not model.enforce_sorted else []
    for seed, lengths in enumerate([[7, 3, 2], [5, 5, 1], [1, 1, 1], *unsorted]):
        losses = []
        for one in (model, sharded):
            one.zero_grad()
            losses.append(one(*batch(lengths, seed)))
            losses[-1].backward()
        # Products of few rows are rounded in another way on CPUs without AVX-512.
        torch.testing.assert_close(*losses, rtol=1e-6, atol=1e-7, msg=str(lengths))
        wanted = dict(model.named_parameters())
        for parameter, param in sharded.named_parameters():
            torch.testing.assert_close(param.grad, wanted[parameter].grad, rtol=1e-5, atol=1e-6)
    assert len(sharded.programs) == 1


def test_evaluation_takes_packed_sequences_too():
    model = CASES["stacked"]().eval()
    sharded = graphshard.compile(model, graphshard.SizePolicy(100)).eval()
    with torch.no_grad():
        for lengths in ([7, 3, 2], [2, 6, 1]):
            assert torch.equal(model(*batch(lengths)), sharded(*batch(lengths)))


def test_dropout_between_layers_is_refused():
    model = Tagger(nn.LSTM, num_layers=2, dropout=0.5)
    with pytest.raises(CaptureError, match=r"between its layers(.|\n)*self\.layer"):
        capture(model, batch([7, 3, 2]))


def test_autocast_is_refused():
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(CaptureError, match="runs under autocast"),
    ):
        capture(CASES["lstm"](), batch([7, 3, 2]))


def test_a_sequence_packed_elsewhere_is_refused():
    class Elsewhere(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 3)

        def forward(self, data, batch_sizes):
            packed = PackedSequence(self.fc(data), batch_sizes)
            return pad_packed_sequence(packed)[0]

    with pytest.raises(CaptureError, match="that pack_padded_sequence did not make"):
        capture(Elsewhere(), (torch.randn(5, 4), torch.tensor([3, 2])))


def test_an_output_s_size_may_be_computed_from_such_a_size():
    model = Net(lambda m, x, count: m.fc(x).repeat(1, 2 * count.item() + 1), fc=linear())
    sharded = graphshard.compile(copy.deepcopy(model), graphshard.SizePolicy(10))
    for count in (1, 3, 2):
        args = X, torch.tensor(count)
        same_step(model, sharded, *args, objective=lambda y: y.t().square().sum())
    assert len(sharded.programs) == 1


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_a_layer_takes_sequences_packed_elsewhere(kind):
    model = Net(lambda m, packed: m.layer(packed)[0].data.square().sum(), layer=kind(4, 3))
    sharded = graphshard.compile(copy.deepcopy(model), graphshard.SizePolicy(10))
    for lengths in ([5, 3], [4, 4], [5, 3], [5, 4]):
        packed = pack_padded_sequence(torch.randn(5, 2, 4), torch.tensor(lengths))
        same_step(model, sharded, packed)


def zeroed(x, at):
    x = x.clone()
    x[at : at + 2] = 0
    return x


@pytest.mark.parametrize(
    ("forward", "programs"),
    [
        (lambda m, x, at: m.fc(x[at : at + 3]), 1),
        (lambda m, x, at: m.fc(x)[:, at : at + 2], 1),
        (lambda m, x, at: x @ m.fc.weight[at : at + 2].T, 1),
        (lambda m, x, at: m.fc(x).narrow(0, at, 2), 1),
        (lambda m, x, at: m.fc(x[at : at + 4])[1 : at + 2], 1),
        (lambda m, x, at: m.fc(x).t()[at:].contiguous(), 1),
        (lambda m, x, at: m.fc(x)[at], 3),
        (lambda m, x, at: zeroed(m.fc(x), at), 1),
    ],
)
def test_slices_begin_where_values_say(forward, programs):
    model = Net(lambda m, x, at: forward(m, x, at.item()), fc=linear())
    sharded = graphshard.compile(copy.deepcopy(model), graphshard.SizePolicy(10))
    for at in range(3):
        same_step(model, sharded, X, torch.tensor(at), objective=lambda out: out.square().sum())
    assert len(sharded.programs) == programs


@pytest.mark.parametrize("holds", [lambda rows: rows == 3, lambda rows: rows <= 3])
def test_a_check_of_a_slice_that_nothing_uses_is_refused(holds):
    def forward(m, x, at):
        torch._check(holds(x[at.item() :].shape[0]))
        return m.fc(x)

    with pytest.raises(CaptureError, match="about the size of a value that it does not use"):
        capture(Net(forward, fc=linear()), (X, torch.tensor(3)))

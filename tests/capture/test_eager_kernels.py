"""Operators that tracing would take apart run as eager runs them, to the same bits."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from capture_models import Net, assert_same_as_eager
from loops import same_step
from torch import nn

import graphshard

LINES, IMAGES, VOLUMES = torch.randn(2, 3, 9), torch.randn(2, 3, 9, 9), torch.randn(2, 3, 5, 6, 5)

WAYS = [
    (LINES, {"mode": "nearest"}, "upsample_nearest1d"),
    (LINES, {"mode": "linear"}, "upsample_linear1d"),
    (LINES, {"mode": "nearest-exact"}, "_upsample_nearest_exact1d"),
    (IMAGES, {"mode": "nearest"}, "upsample_nearest2d"),
    (IMAGES, {"mode": "bilinear", "align_corners": True}, "upsample_bilinear2d"),
    (IMAGES, {"mode": "bicubic"}, "upsample_bicubic2d"),
    (IMAGES, {"mode": "nearest-exact"}, "_upsample_nearest_exact2d"),
    (VOLUMES, {"mode": "nearest"}, "upsample_nearest3d"),
    (VOLUMES, {"mode": "trilinear"}, "upsample_trilinear3d"),
]


def interpolating(x: torch.Tensor, **how) -> Net:
    convolution = {3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}[x.dim()]
    return Net(lambda m, x: F.interpolate(m.conv(x), **how), conv=convolution(3, 4, 3))


@pytest.mark.parametrize(
    "by",
    [{"scale_factor": 2.5}, pytest.param({"size": 11}, marks=pytest.mark.slow)],
    ids=["scale", "size"],
)
@pytest.mark.parametrize(("x", "how", "operator"), WAYS, ids=[way[2] for way in WAYS])
def test_interpolation_is_one_operator_each_way(x, how, operator, by):
    program = assert_same_as_eager(interpolating(x, **how, **by), (x,)).program
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count(f"aten.{operator}.default") == 1
    assert targets.count(f"aten.{operator}_backward.default") == 1


@pytest.mark.parametrize(
    "forward",
    [
        lambda m, x: F.hardshrink(m.conv(x)),
        lambda m, x: F.softshrink(m.conv(x)),
        lambda m, x: F.multi_margin_loss(m.conv(x)[:, :, 0, 0], torch.tensor([1, 3])),
        lambda m, x: F.multilabel_margin_loss(
            m.conv(x)[:, :, 0, 0], torch.tensor([[1, 3, -1, 0], [2, -1, 0, 0]])
        ),
        lambda m, x: m.norm(m.conv(x)),
    ],
    ids=["hardshrink", "softshrink", "multi_margin", "multilabel_margin", "batch_norm"],
)
def test_the_same_bits(forward):
    model = Net(forward, conv=nn.Conv2d(3, 4, 3), norm=nn.BatchNorm2d(4))
    assert_same_as_eager(model, (IMAGES,))


@pytest.mark.parametrize("mode", ["nearest", "bilinear", "bicubic"])
def test_symbolic_sizes(mode):
    model = interpolating(IMAGES, scale_factor=2, mode=mode)
    width = {"args[0]": {3: "width"}}
    sharded = graphshard.compile(
        model, graphshard.SizePolicy(10), example_inputs=(IMAGES,), dynamic=width
    )
    for x in (IMAGES, torch.randn(2, 3, 9, 13)):
        assert torch.equal(sharded(x), model(x))
        same_step(model, sharded, x, objective=torch.sum)


class Doubled(nn.Module):
    """Has something to train, and the dtype of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x):
        return x * self.scale.to(x.dtype)


def encoder(layers: int = 1, **options) -> nn.Module:
    torch.manual_seed(0)
    options = {"nhead": 2, "dim_feedforward": 16, "batch_first": True} | options
    return nn.Sequential(*(nn.TransformerEncoderLayer(8, **options) for _ in range(layers))).eval()


def autocast_dtype(model: nn.Module, dtype: torch.dtype = torch.bfloat16) -> torch.dtype:
    """The dtype of what `model` returns under autocast, as the sharded one does."""
    sharded = graphshard.compile(model, graphshard.BlockPolicy(nn.TransformerEncoderLayer))
    x = torch.randn(2, 4, 8, dtype=next(model.parameters()).dtype)
    with torch.autocast("cpu", dtype):
        torch.manual_seed(1)
        expected = model(x)
        torch.manual_seed(1)
        actual = sharded(x)
    assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.05)
    return expected.dtype


@torch.no_grad()
def test_encoder_layers_under_autocast_have_the_dtype_of_eager_s_fused_operator():
    assert autocast_dtype(encoder(layers=2)) == torch.bfloat16
    assert autocast_dtype(encoder(), torch.float16) == torch.float16
    assert autocast_dtype(encoder(norm_first=True, activation="gelu")) == torch.bfloat16
    frozen = encoder().requires_grad_(False)
    with torch.enable_grad():
        assert autocast_dtype(nn.Sequential(frozen, Doubled())) == torch.bfloat16


@torch.no_grad()
def test_encoder_layers_under_autocast_keep_their_dtype_where_eager_fuses_nothing():
    for options in ({"batch_first": False}, {"bias": False}, {"nhead": 1}, {"activation": F.silu}):
        assert autocast_dtype(encoder(**options)) == torch.float32
    assert autocast_dtype(encoder().train()) == torch.float32
    assert autocast_dtype(encoder().double()) == torch.float64
    with torch.enable_grad():
        assert autocast_dtype(encoder()) == torch.float32
    hooked = encoder()
    for layer in hooked:
        layer.linear1.register_forward_hook(lambda module, args, out: None)
    with pytest.warns(UserWarning, match="hooks on modules are captured"):
        assert autocast_dtype(hooked) == torch.float32


def test_autocast_reaches_the_operators_that_others_are_made_of_in_inference_mode():
    def forward(m, x):
        product = torch.einsum("bi,ki->bk", x, x)  # by bmm, which autocast knows
        return product, F.mse_loss(m.fc(x), x), torch.tensordot(x, x.mT, 1)

    sharded = graphshard.compile(Net(forward, fc=nn.Linear(4, 4)), graphshard.SizePolicy(1))
    with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
        dtypes = [output.dtype for output in sharded(torch.randn(3, 4))]
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]


@torch.no_grad()
def test_encoder_layers_follow_torch_s_switch_of_the_fused_operator():
    model, x = encoder(), torch.randn(2, 4, 8)
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    try:
        for fused in (True, False, True):
            torch.backends.mha.set_fastpath_enabled(fused)
            with torch.autocast("cpu", torch.bfloat16):
                assert sharded(x).dtype == model(x).dtype
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class Padded(nn.Module):
    """An encoder that is called with the padding of its input, and has a norm to train."""

    def __init__(self, encoder_options=None, **options) -> None:
        super().__init__()
        torch.manual_seed(0)
        options = {"nhead": 2, "dim_feedforward": 16, "batch_first": True} | options
        layer = nn.TransformerEncoderLayer(8, **options)
        self.encoder = nn.TransformerEncoder(layer, 2, nn.LayerNorm(8), **(encoder_options or {}))
        nn.init.normal_(self.encoder.norm.bias)
        self.eval()

    def forward(self, x, padding, mask=None):
        return self.encoder(x, mask, padding, is_causal=False)


def as_floats(mask: torch.Tensor, value: float = -torch.inf) -> torch.Tensor:
    return torch.zeros(mask.shape).masked_fill(mask, value)


TOKENS = torch.randn(3, 4, 8)
LEFT = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [0, 1, 1, 1]]).bool()
MIXED = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0], [1, 1, 0, 1]]).bool()


def assert_same_padding(model: nn.Module, masks: list[torch.Tensor], zeros: list[bool], *args):
    """Compare with eager by each mask, with one program for masks that differ in values alone.

    `zeros` says whether the encoder's norm is given zeros.
    """
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    dtype = model.encoder.norm.weight.dtype
    for mask, any_zeros in zip(masks, zeros, strict=True):
        expected = model(TOKENS.to(dtype), mask, *args)
        actual = sharded(TOKENS.to(dtype), mask, *args)
        assert (actual.dtype, actual.stride()) == (expected.dtype, expected.stride())
        torch.testing.assert_close(actual, expected)
        assert (expected == model.encoder.norm.bias).all(-1).any() == any_zeros


EMPTY_ROW = torch.tensor([[0, 0, 1, 1], [0, 0, 0, 0], [1, 1, 1, 1]]).bool()
PADDINGS = [LEFT, LEFT.flip(1), MIXED, EMPTY_ROW, as_floats(LEFT), as_floats(MIXED)]


@torch.no_grad()
@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)]
)
def test_an_encoder_leaves_zeros_where_its_padding_is_on_the_right_of_all_rows(dtype):
    on_the_right = [True, False, False, True, True, False]
    assert_same_padding(Padded().to(dtype), PADDINGS, on_the_right)
    finite = as_floats(LEFT, 1.0)
    assert_same_padding(Padded(), [finite, finite.flip(1)], [True, False])


@torch.no_grad()
def test_the_fused_operator_takes_float_masks_as_masks_of_bool():
    causal = torch.ones(4, 4).triu(1).bool()
    layer = encoder()[0]
    sharded = graphshard.compile(layer, graphshard.SizePolicy(10))
    for mask, padding in (
        (as_floats(causal, 0.5), None),
        (None, as_floats(LEFT, 0.5)),
        (causal, LEFT),
        (as_floats(causal, 0.5), as_floats(LEFT)),
    ):
        expected = layer(TOKENS, mask, padding)
        torch.testing.assert_close(sharded(TOKENS, mask, padding), expected)
    with torch.enable_grad():
        mask = as_floats(causal, 0.5)
        torch.testing.assert_close(sharded(TOKENS, mask), layer(TOKENS, mask))


@torch.no_grad()
def test_an_encoder_without_mask_check_counts_the_padding_alone():
    assert_same_padding(Padded({"mask_check": False}), PADDINGS, [True] * 6)


@torch.no_grad()
def test_an_encoder_with_hooks_on_its_layers_leaves_zeros_too():
    model = Padded()
    for layer in model.encoder.layers:
        layer.linear1.register_forward_hook(lambda module, args, out: None)
    masks = [LEFT, LEFT.flip(1), as_floats(LEFT, 1.0)]
    with pytest.warns(UserWarning, match="hooks on modules are captured"):
        assert_same_padding(model, masks, [True, False, True])


def test_a_frozen_encoder_leaves_zeros_in_a_step_with_gradients():
    model = Padded()
    model.encoder.layers.requires_grad_(False)
    assert_same_padding(model, [LEFT, LEFT.flip(1)], [True, False])


@pytest.mark.filterwarnings("ignore:enable_nested_tensor is True")
@pytest.mark.parametrize(
    "options",
    [
        {"encoder_options": {"enable_nested_tensor": False}},
        {"nhead": 1},
        {"norm_first": True},
        {"bias": False},
        {"activation": F.silu},
    ],
    ids=lambda options: next(iter(options)),
)
@torch.no_grad()
def test_an_encoder_leaves_no_zeros_where_eager_does_not(options):
    assert_same_padding(Padded(**options), [LEFT, LEFT.flip(1)], [False, False])


@pytest.mark.slow
def test_an_encoder_leaves_no_zeros_with_gradients_in_training_or_with_another_mask():
    assert_same_padding(Padded(), [LEFT], [False])
    assert_same_padding(Padded(dropout=0.0).train(), [LEFT], [False])
    with torch.no_grad():
        assert_same_padding(Padded(dropout=0.0).train(), [LEFT], [False])
        assert_same_padding(Padded(), [LEFT], [False], torch.ones(4, 4).triu(1).bool())
        try:
            torch.backends.mha.set_fastpath_enabled(False)
            assert_same_padding(Padded(), [LEFT], [False])
        finally:
            torch.backends.mha.set_fastpath_enabled(True)


@torch.no_grad()
def test_an_encoder_with_padding_under_autocast():
    """Eager fails in float32 with padding on the right of all rows."""
    model = Padded()
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    with torch.autocast("cpu", torch.bfloat16):
        expected, actual = model(TOKENS, LEFT.flip(1)), sharded(TOKENS, LEFT.flip(1))
        assert actual.dtype == expected.dtype
        torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.05)
        model = Padded().double()
        assert_same_padding(model, [LEFT, LEFT.flip(1)], [True, False])


def test_torch_s_rules_are_back_afterwards():
    rules = torch.ops.aten.upsample_bilinear2d.vec.py_kernels
    before = dict(rules)
    assert before
    with pytest.raises(graphshard.CaptureError):
        graphshard.plan(
            Net(lambda m, x: F.interpolate(m.conv(x), mode="bilinear"), conv=nn.Conv2d(3, 4, 3)),
            graphshard.SizePolicy(10),
            example_inputs=(IMAGES,),
            world_size=2,
        )
    assert rules == before


# -- the CTC loss ---------------------------------------------------------------------------------


@pytest.mark.parametrize("is_flat", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum", "blank": 3}, {"reduction": "none", "zero_infinity": True}],
    ids=str,
)
def test_the_ctc_loss_is_eager_s_for_targets_of_any_lengths(options, is_flat):
    def forward(m, x, targets, rows, lengths):
        if is_flat:
            targets = targets[torch.arange(targets.shape[1]) < lengths[:, None]]
        return F.ctc_loss(m.fc(x).log_softmax(-1), targets, rows, lengths, **options)

    torch.manual_seed(0)
    model = Net(forward, fc=nn.Linear(8, 12))
    x, targets = torch.randn(9, 3, 8), torch.randint(4, 12, (3, 4))
    sharded = graphshard.compile(copy.deepcopy(model), graphshard.SizePolicy(1))
    for lengths in ([3, 2, 4], [1, 4, 1], [4, 0, 2]):
        # Three rows are too few for four targets: an infinite loss.
        rows = torch.tensor([9, 3 if options.get("zero_infinity") else 9, 8])
        args = x, targets, rows, torch.tensor(lengths)
        same_step(model, sharded, *args, objective=lambda losses: losses.sum())
    assert len(sharded.programs) == 1

"""What changes a sharded module: parameters, modules and dtypes are refused by name, or taken."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import TiedGPT, tokens_of
from models import generating_gpt2 as gpt2
from peft import LoraConfig
from state_checks import seeded
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import graphshard
from graphshard.errors import ModelChangeError, RuntimeStateError


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


CHANGES: dict[str, Any] = {
    "old weight_norm": weight_norm,
    "weight_norm": parametrizations.weight_norm,
    "old spectral_norm": spectral_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "parametrization": lambda part: parametrize.register_parametrization(part, "weight", Doubled()),
    "prune": lambda part: prune.l1_unstructured(part, "weight", 0.5),
    "attribute": lambda part: setattr(part, "extra", nn.Parameter(torch.ones(2))),
    "registered": lambda part: part.register_parameter("extra", nn.Parameter(torch.ones(2))),
    "buffer": lambda part: part.register_buffer("extra", torch.ones(2)),
    "deleted": lambda part: delattr(part, "weight"),
    "none": lambda part: setattr(part, "weight", None),
}


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_changes_of_parts_are_refused(name: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    said = r"'0\.\w+' cannot be added.* removed.*before graphshard\.compile"
    if name in ("weight_norm", "spectral_norm", "orthogonal", "parametrization"):
        said = rf"{said}|'0\.\w+' cannot be added, replaced or removed as a module"
    with pytest.raises(RuntimeStateError, match=said):
        CHANGES[name](sharded.get_submodule("0"))
    with pytest.raises(RuntimeStateError, match=r"'more' cannot be added"):
        sharded.register_parameter("more", nn.Parameter(torch.ones(2)))


def test_a_parameter_taken_from_its_table_is_missed() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    del sharded.get_submodule("0")._parameters["weight"]
    with pytest.raises(RuntimeStateError, match=r"parameter '0\.weight' was removed; weight_norm"):
        sharded(torch.randn(2, 4))


def test_parameters_and_buffers_can_be_replaced() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).eval()
    sharded = graphshard.compile(model, graphshard.SizePolicy(10))
    for each in (model, sharded):
        torch.manual_seed(0)
        each.get_submodule("0").weight = nn.Parameter(torch.randn(4, 4))
        each.get_submodule("1").running_mean = torch.randn(4)
    x = torch.randn(2, 4)
    assert torch.equal(sharded(x), model(x))


LARGE = graphshard.SizePolicy(10)


# -- tied parameters ------------------------------------------------------------------------------

NAMES = ("embed", "head")

WAYS: dict[str, Any] = {
    "attribute": lambda part, new: setattr(part, "weight", new),
    "registered": lambda part, new: part.register_parameter("weight", new),
    "table": lambda part, new: part._parameters.update(weight=new),
    "loaded": lambda part, new: part.load_state_dict({"weight": new.detach()}, assign=True),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("way", WAYS)
def test_one_name_of_a_tied_parameter_is_not_given_another_one(name: str, way: str) -> None:
    sharded = graphshard.compile(seeded(TiedGPT), graphshard.SizePolicy(1))
    new = nn.Parameter(sharded.head.weight.detach() * 2)
    WAYS[way](sharded.get_submodule(name), new)
    said = r"'embed\.weight' and 'head\.weight' are one tied parameter.*give every name the same"
    for use in (lambda: sharded(*tokens_of(0, 0)), sharded.full_state_dict):
        with pytest.raises(RuntimeStateError, match=said):
            use()
    for change in ("deleted", "none"):
        with pytest.raises(RuntimeStateError, match=rf"'{name}\.weight' cannot be added or rem"):
            CHANGES[change](sharded.get_submodule(name))


@pytest.mark.parametrize("given", [("head",), ("embed",), NAMES])
def test_a_tied_parameter_stays_tied_when_a_state_dict_is_assigned(given: Any) -> None:
    model = seeded(TiedGPT).eval()
    sharded = graphshard.compile(model, graphshard.SizePolicy(1))
    state = {n: v for n, v in model.state_dict().items() if n.removesuffix(".weight") not in NAMES}
    state |= {f"{n}.weight": model.head.weight.detach() * 2 for n in given}
    sharded.load_state_dict(state, assign=True)
    with torch.no_grad():
        model.head.weight.mul_(2)
    assert torch.equal(sharded(*tokens_of(0, 0)), model(*tokens_of(0, 0)))
    assert sharded.embed.weight is sharded.head.weight


def test_parameters_are_not_tied_afterwards() -> None:
    sharded = graphshard.compile(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), LARGE)
    sharded.get_submodule("1").weight = sharded.get_submodule("0").weight
    with pytest.raises(RuntimeStateError, match=r"'1\.weight' was .* by parameter '0\.weight'"):
        sharded(torch.ones(1, 4))


# -- methods of the model -------------------------------------------------------------------------


class Changing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
        self.heads = nn.ModuleDict({"a": nn.Linear(4, 4)})
        self.gain = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.heads["a"](x * self.gain)

    def grow(self) -> None:
        self.layers.append(nn.Linear(4, 4))

    def shrink(self) -> None:
        self.layers = nn.ModuleList(list(self.layers)[:1])

    def add_head(self, name: str) -> None:
        self.heads[name] = nn.Linear(4, 2)

    def resize(self) -> None:
        new = nn.Linear(4, 8)
        if new.weight.std() > 0:
            self.layers[0].weight.data = new.weight.data

    def scale(self) -> None:
        with torch.no_grad():
            self.gain.mul_(2)

    def merge(self) -> None:
        self.gain.data = self.gain.data * 2

    def new_gain(self) -> None:
        self.gain = nn.Parameter(torch.zeros(4))

    def without_gain(self) -> None:
        del self.gain

    def low(self) -> Any:
        return self.half()

    def tie(self) -> str:
        self.layers[0].weight, self.heads = self.layers[0].weight, self.heads
        return "tied"

    def features(self, x: Tensor) -> Tensor:
        head, self.heads["a"] = self.heads["a"], nn.Identity()
        try:
            return self(x)
        finally:
            self.heads["a"] = head


METHODS: dict[str, Any] = {
    **dict.fromkeys(
        ("grow", "shrink", "resize", "scale", "merge", "new_gain", "without_gain", "low"), ()
    ),
    "add_head": ("b",),
    "layers.append": (nn.Linear(4, 4),),
    "layers.insert": (0, nn.Linear(4, 4)),
    "layers.pop": (0,),
    "heads.clear": (),
    "layers.0.reset_parameters": (),
}


@pytest.mark.parametrize("name", METHODS)
def test_methods_that_change_the_model_say_so(name: str) -> None:
    model = Changing()
    sharded = graphshard.compile(model, LARGE)
    path, _, method = name.rpartition(".")
    said = rf"{method}\(\) changes the model.* before graphshard\.compile, and compile it again"
    with pytest.raises(ModelChangeError, match=said):
        getattr(sharded.get_submodule(path), method)(*METHODS[name])
    assert [n for n, _ in sharded.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert torch.equal(sharded(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_methods_that_leave_the_model_as_it_is_run() -> None:
    model = Changing()
    sharded = graphshard.compile(model, LARGE)
    assert sharded.tie() == "tied"
    assert sharded.float() is sharded
    assert torch.equal(sharded.features(torch.ones(1, 4)), model.features(torch.ones(1, 4)))
    assert torch.equal(sharded(torch.ones(1, 4)), model(torch.ones(1, 4)))


def test_methods_of_transformers_say_so_or_run() -> None:
    ids = torch.ones(1, 4, dtype=torch.int64)
    sharded: Any = graphshard.compile(gpt2(), LARGE)
    before = sharded(input_ids=ids).logits
    for name, argument in {
        "resize_token_embeddings": 40,
        "set_input_embeddings": nn.Embedding(8, 8),
        "add_adapter": LoraConfig(target_modules=["c_attn"], fan_in_fan_out=True),
    }.items():
        with pytest.raises(ModelChangeError, match=rf"{name}\(\) changes the model.*compile it a"):
            getattr(sharded, name)(argument)
    sharded.tie_weights()
    same = sharded.config.vocab_size
    assert sharded.resize_token_embeddings(same) is sharded.get_input_embeddings()
    assert torch.equal(sharded(input_ids=ids).logits, before)


def test_lists_of_modules_are_not_changed() -> None:
    sharded = graphshard.compile(Changing(), LARGE)

    def extend() -> None:
        sharded.layers += [nn.Linear(4, 4)]

    changes = (
        lambda: sharded.layers.__setitem__(0, nn.Linear(4, 4)),
        lambda: sharded.layers.__delitem__(0),
        lambda: sharded.heads.__setitem__("b", nn.Linear(4, 4)),
        extend,
    )
    for change in changes:
        with pytest.raises(ModelChangeError, match=r"cannot be added, replaced or removed"):
            change()


# -- casts ----------------------------------------------------------------------------------------

CASTS: dict[str, Any] = {
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "bfloat16": lambda m: m.bfloat16(),
    "to a dtype": lambda m: m.to(torch.bfloat16),
    "to the dtype of a tensor": lambda m: m.to(torch.ones(1, dtype=torch.float64)),
    "to a device": lambda m: m.to("meta"),
    "type": lambda m: m.type(torch.float64),
    "of a part": lambda m: m.get_submodule("0").half(),
    "of buffers": lambda m: m.get_submodule("1").half(),
}


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


@pytest.mark.parametrize("name", CASTS)
def test_casts_are_refused_at_once(name: str) -> None:
    sharded = graphshard.compile(nn.Sequential(nn.Linear(4, 4), Table()), LARGE)
    said = r"cannot be cast or moved: '[01]\.\w+' is torch\.float32 .*mixed_precision"
    with pytest.raises(ModelChangeError, match=said):
        CASTS[name](sharded)
    assert sharded(torch.ones(1, 4)).dtype == torch.float32


def test_casts_to_what_is_so_already_do_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Table())
    sharded = graphshard.compile(copy.deepcopy(model), LARGE)
    params = list(sharded.parameters())
    for cast in (
        lambda m: m.float(),
        lambda m: m.to("cpu"),
        lambda m: m.cpu(),
        lambda m: m.to(torch.float32, non_blocking=True),
        lambda m: m.type(torch.float32),
        lambda m: m.to(memory_format=torch.channels_last),
        lambda m: m.to_empty(device="cpu"),
        lambda m: m.get_submodule("0").float(),
    ):
        assert isinstance(cast(sharded), nn.Module)
    assert all(mine is before for mine, before in zip(sharded.parameters(), params, strict=True))
    assert torch.equal(sharded(torch.ones(1, 4)), model(torch.ones(1, 4)))

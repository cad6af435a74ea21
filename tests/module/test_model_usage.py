"""What a training loop may do with models: freeze, adapt, ignore, mix, call in part, hook."""

from __future__ import annotations

import copy
import logging
import warnings

import pytest
import torch
import torch.distributed as dist
from full_tensors import full
from loops import OneProcess, backward, compiled, exact, gpt, same_grads, same_params, same_step
from models import Block, Odd, TiedGPT, features_of, gpt2, tokens_of
from ranks import checks_of, on_ranks
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import PolicyError, RuntimeStateError

# -- frozen parameters ------------------------------------------------------------------------


def lora_model() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    lora = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.0, fan_in_fan_out=True)
    model = get_peft_model(gpt2(use_cache=False), lora).train()
    for name, param in model.named_parameters():
        if "lora_B" in name:  # zero at first, so that A would get no gradient
            nn.init.normal_(param, std=0.1)
    return model


class Lora(nn.Module):
    """The loss of the model, from positional arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(input_ids=ids, labels=ids).loss


def ids_of(rank: int, step: int) -> tuple[Tensor]:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return (torch.randint(0, 67, (2, 9), generator=generator),)


def adapters(rank: int) -> None:
    """peft's LoRA: only adapters have gradients, reduces and optimizer state."""
    model = Lora(lora_model())
    trained = {name for name, param in model.named_parameters() if param.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        sharded = graphshard.compile(model, graphshard.BlockPolicy({"GPT2Block"}))
    reference = OneProcess(
        model,
        dist.get_world_size(),
        lambda m: torch.optim.AdamW((p for p in m.parameters() if p.requires_grad), lr=1e-2),
    )
    (group,) = sharded.parameter_groups()
    assert set(group["names"]) == trained
    optim = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    for step in range(2):
        reference.backward(lambda r, step=step: [ids_of(r, step)])
        backward(sharded, rank, *ids_of(rank, step))
        same_grads(sharded, reference.model, exact=exact())
        reference.step()
        optim.step()
        optim.zero_grad()
    same_params(sharded, reference.model, exact=exact())
    assert len(optim.state) == len(trained)
    program = sharded.program
    for param, grad in zip(program.params, program.results().grads, strict=True):
        assert (grad is not None) == (param.fqn in trained), param.fqn
    reduced = {
        name
        for node in program.nodes()
        if getattr(node.target, "__name__", "") == "reduce_scatter"
        for name in node.kwargs["params"]
    }
    assert reduced == trained
    again = {
        name
        for node in program.nodes("backward")
        if getattr(node.target, "__name__", "") == "all_gather"
        for name in node.kwargs["params"]
    }
    # Biases are read by forward only, and the embeddings' input needs no gradient.
    assert not any(name.endswith(".bias") and "ln_" not in name for name in again), again
    assert not any("wte" in name or "wpe" in name for name in again), again


def frozen_between_steps(rank: int) -> None:
    torch.manual_seed(0)
    model = Odd()
    sharded = compiled(model)
    records: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            records.append(record.getMessage())

    logger = logging.getLogger("graphshard")
    handler = Listener(level=logging.INFO)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        backward(sharded, rank, *features_of(rank, 0, 16))
        sharded.zero_grad()
        for name, param in (*sharded.named_parameters(), *model.named_parameters()):
            if name.startswith("first.up"):
                param.requires_grad_(False)
            if name == "frozen.down.bias":
                param.requires_grad_(True)
        backward(sharded, rank, *features_of(rank, 1, 16))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    (said,) = records
    assert "now trained: frozen.down.bias" in said
    assert "now frozen: first.up.weight, first.up.bias" in said
    reference = OneProcess(model, dist.get_world_size())
    reference.backward(lambda r: [features_of(r, 1, 16)])
    same_grads(sharded, reference.model, exact=exact())


# -- ignored parameters -----------------------------------------------------------------------


def ignored_parameters(rank: int) -> None:
    """By module, by parameter and by expression: each rank's own, trained beside the shards."""
    model = gpt(2)
    chosen = [model.blocks[1].norm, model.blocks[0].down.bias, r"blocks\.\d\.up\.bias"]
    names = {
        "blocks.1.norm.weight",
        "blocks.1.norm.bias",
        "blocks.0.down.bias",
        "blocks.0.up.bias",
        "blocks.1.up.bias",
    }
    reference = OneProcess(model, dist.get_world_size())
    sharded = compiled(model, ignored=chosen)
    assert {layout.fqn for layout in sharded.plan.ignored} == names
    assert not names & {name for unit in sharded.plan.units for name in unit.params}
    assert "ignored: " in str(sharded.plan)
    own = dict(model.named_parameters())
    for name, param in sharded.named_parameters():
        assert (param is own[name]) == (name in names), name
        assert isinstance(param, DTensor) == (name not in names)
    batch = tokens_of(rank, 0)
    torch.manual_seed(rank)
    mine = copy.deepcopy(reference.model)
    mine(*batch).backward()
    reference.backward(lambda r: [tokens_of(r, 0)])
    backward(sharded, rank, *batch)
    mine_grads = {name: p.grad for name, p in mine.named_parameters()}
    mean_grads = {name: p.grad for name, p in reference.model.named_parameters()}
    for name, param in sharded.named_parameters():
        expected = (mine_grads if name in names else mean_grads)[name]
        torch.testing.assert_close(full(param.grad), expected, rtol=1e-5, atol=1e-7)
    # Optimizers that take many tensors at once want one kind in a group.
    groups = sharded.parameter_groups([("bias", {"weight_decay": 0.0})])
    assert len(groups) == 4
    for p in (1.0, 2.0, float("inf")):
        norm = sharded.clip_grad_norm_(1e6, p)
        everyones = [torch.zeros(()) for _ in range(dist.get_world_size())]
        dist.all_gather(everyones, norm)
        assert all(torch.equal(norm, other) for other in everyones)
    for name in sorted(names):  # averaged by the user
        dist.all_reduce(own[name].grad)
        own[name].grad /= dist.get_world_size()
    for p in (1.0, 2.0, float("inf")):
        theirs = torch.nn.utils.clip_grad_norm_(reference.model.parameters(), 1e6, p)
        torch.testing.assert_close(sharded.clip_grad_norm_(1e6, p), theirs, rtol=1e-5, atol=0)
    optim = torch.optim.AdamW(groups, lr=1e-2, foreach=True)
    optim.step()
    optim.zero_grad()
    assert sharded(*batch).isfinite()
    with sharded.unsharded() as params:
        assert params["blocks.0.up.bias"] is own["blocks.0.up.bias"]
    with sharded.no_sync():
        backward(sharded, rank, *batch)
    backward(sharded, rank, *batch)
    assert set(sharded.state_dict()) == set(model.state_dict())


def ignored_wrongly(rank: int) -> None:
    model = gpt(1)
    for ignored, said in (
        ("blocks.0.nothing", "matches no module's and no parameter's whole FQN"),
        (nn.Linear(2, 2), "a Linear is no module or parameter of the model"),
        (torch.ones(2), r"a tensor of shape \(2,\) is no module"),
        ("(", "is no regular expression"),
        (model, "is the whole model"),
    ):
        with pytest.raises(PolicyError, match=said):
            compiled(model, ignored=ignored)
    whole = compiled(model, ignored="blocks.0")
    assert [unit.fqn for unit in whole.plan.units] == [""]
    backward(whole, rank, *tokens_of(rank, 0))
    assert all(p.grad is not None for p in whole.parameters())
    with torch.device("meta"):
        empty = TiedGPT(1)
    sharded = compiled(empty, ignored=r".*\.bias")
    with pytest.raises(RuntimeStateError, match="has no values yet"):
        sharded(*tokens_of(rank, 0))
    sharded.init_weights(seed=1)
    backward(sharded, rank, *tokens_of(rank, 0))
    assert not isinstance(sharded.blocks[0].up.bias, DTensor)


# -- several models, parts of a model ---------------------------------------------------------


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 17), nn.Tanh(), nn.Linear(17, 6))

    def forward(self, noise: Tensor) -> Tensor:
        return self.body(noise)


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x).mean()


Pair = list[nn.Module]


def critic_s_turn(pair: Pair, rank: int, step: int) -> None:
    generator, critic = pair
    (noise,), (real,) = features_of(rank, step, 4), features_of(rank, step + 50, 6)
    (critic(generator(noise).detach()) - critic(real)).backward()


def generator_s_turn(pair: Pair, rank: int, step: int) -> None:
    generator, critic = pair
    (noise,) = features_of(rank, step, 4)
    (-critic(generator(noise))).backward()


def share_gradients(models: list[nn.Module]) -> None:
    for params in zip(*(model.parameters() for model in models), strict=True):
        mean = sum((p.grad for p in params[1:]), params[0].grad) / len(models)
        for p in params:
            p.grad = mean.clone()


def two_models(rank: int) -> None:
    """A generator and a critic, losses through both, an optimizer each."""
    torch.manual_seed(0)
    plain: Pair = [Generator(), Critic()]
    replicas = [copy.deepcopy(plain) for _ in range(dist.get_world_size())]
    ours: Pair = [graphshard.compile(m, graphshard.BlockPolicy({nn.Linear})) for m in plain]
    optims = [[torch.optim.SGD(m.parameters(), lr=0.1) for m in p] for p in (ours, *replicas)]
    for step in range(2):
        for turn, which in ((critic_s_turn, 1), (generator_s_turn, 0)):
            turn(ours, rank, step)
            for r, pair in enumerate(replicas):
                turn(pair, r, step)
            share_gradients([pair[which] for pair in replicas])
            # Two backwards through the critic are reduced one by one here.
            same_grads(ours[which], replicas[0][which], exact=False)
            for each in optims:
                each[which].step()
            for model in (*ours, *(m for pair in replicas for m in pair)):
                model.zero_grad()
    for mine, theirs in zip(ours, replicas[0], strict=True):
        same_params(mine, theirs, exact=False)


def parts_are_called(rank: int) -> None:
    model = gpt(2)
    sharded = compiled(model)
    reference = OneProcess(model, dist.get_world_size())
    x = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(rank)).requires_grad_()
    torch.manual_seed(rank)
    out = sharded.submodule_forward("blocks.1", x)
    torch.manual_seed(rank)
    mine = reference.replicas[rank]
    mine_x = x.detach().clone().requires_grad_()
    expected = mine.blocks[1](mine_x)
    assert torch.equal(out, expected)
    out.sum().backward()
    expected.sum().backward()
    assert torch.equal(x.grad, mine_x.grad)
    gathered = {event.unit for event in sharded.program.schedule() if event.op == "all_gather"}
    assert gathered == {"blocks.1"}
    for name, param in sharded.named_parameters():
        assert (param.grad is not None) == name.startswith("blocks.1."), name
    assert sharded.plan.program is None  # no program of the whole model yet
    sharded.zero_grad()
    backward(sharded, rank, *tokens_of(rank, 0))
    reference = OneProcess(model, dist.get_world_size())
    reference.backward(lambda r: [tokens_of(r, 0)])
    same_grads(sharded, reference.model, exact=exact())
    with pytest.raises(PolicyError, match=r"no module 'blocks.7'"):
        sharded.submodule_forward("blocks.7", x)
    with pytest.raises(RuntimeStateError, match=r"sharded.submodule_forward\('blocks.0', ...\)"):
        sharded.blocks[0](x)


# -- calls other than forward's ----------------------------------------------------------------


class Encoder(nn.Module):
    """Has a method besides forward, which uses a block of it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(dropout=0.0)
        self.head = nn.Linear(16, 3)

    def encode(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return self.block(x * scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x)).pow(2).mean()


def methods_are_called(rank: int) -> None:
    torch.manual_seed(0)
    model = Encoder()
    sharded = compiled(model)
    (x,) = features_of(rank, 0, 16)
    assert torch.equal(sharded.call_method("encode", x, scale=2.0), model.encode(x, scale=2.0))
    assert torch.equal(sharded.call_method("block.up.forward", x), model.block.up(x))
    assert torch.equal(sharded.encode(x, scale=2.0), model.encode(x, scale=2.0))
    assert sharded.encode.__doc__ == model.encode.__doc__
    with pytest.raises(AttributeError, match="no attribute 'decode'"):
        sharded.decode(x)
    with pytest.raises(PolicyError, match="no method 'decode'"):
        sharded.call_method("decode", x)
    sharded.call_method("encode", x).sum().backward()
    model.encode(x).sum().backward()
    assert sharded.head.weight.grad is None
    assert sharded.block.up.weight.grad is not None


# -- hooks ------------------------------------------------------------------------------------


def hooks_on_the_model(rank: int) -> None:
    """What hooks compute is captured, backward hooks too; that they are there is said."""
    torch.manual_seed(0)
    model = Encoder()
    model.block.up.register_forward_pre_hook(lambda module, args: (args[0] + 1.0,))
    model.block.register_forward_hook(lambda module, args, out: out * 2.0)
    model.block.norm.register_full_backward_hook(lambda module, grads, outs: (grads[0] * 3.0,))
    model.head.register_full_backward_pre_hook(lambda module, outs: (outs[0] * 0.5,))
    reference = OneProcess(model, dist.get_world_size())
    with pytest.warns(UserWarning, match=r"hooks on modules .* block \(Block\): .*lambda"):
        sharded = compiled(model)
    (x,) = features_of(rank, 0, 16)
    sharded(x.requires_grad_()).backward()
    reference.backward(lambda r: [(features_of(r, 0, 16)[0].requires_grad_(),)])
    same_grads(sharded, reference.model, exact=exact())


ON_FOUR = [adapters, ignored_parameters, two_models, parts_are_called]

test_on_two_ranks = on_ranks(checks_of(globals(), but=[adapters]), 2, timeout=400)
test_adapters_on_two_ranks = pytest.mark.slow(on_ranks([adapters], 2, timeout=400))
test_on_four_ranks = pytest.mark.slow(on_ranks(ON_FOUR, 4, timeout=400))


# -- ignored parameters on one rank -----------------------------------------------------------


class TwoHeads(nn.Module):
    """A trunk and two heads, each an output of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(4, 4)
        self.left = nn.Linear(4, 3)
        self.right = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return self.left(h), self.right(h)


class Casting(TwoHeads):
    """Casts what its left head takes and gives."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        left = self.left(h.to(self.left.weight.dtype)) * 2
        return left.to(h.dtype), self.right(h)


@pytest.mark.parametrize("ignored", ["left", "right", r"left\.weight", "trunk"])
@pytest.mark.parametrize("used", [0, 1])
def test_an_output_may_be_left_out_of_the_loss(ignored: str, used: int) -> None:
    torch.manual_seed(0)
    eager = TwoHeads()
    policy = graphshard.LambdaPolicy(lambda _: False, ignored=ignored)
    sharded = graphshard.compile(copy.deepcopy(eager), policy, check=True)
    x = torch.randn(2, 4)
    same_step(eager, sharded, x, objective=lambda out: out[used].square().sum())


def mixed(ignored: str, model: nn.Module) -> graphshard.ShardedModule:
    precision = graphshard.MixedPrecision(param_dtype=torch.bfloat16)
    policy = graphshard.LambdaPolicy(lambda _: False, ignored=ignored, mixed_precision=precision)
    return graphshard.compile(model, policy, example_inputs=(torch.randn(2, 4),))


@pytest.mark.parametrize(
    ("ignored", "names"),
    [
        ("left", "'left.bias', 'left.weight'"),
        (r"left\.weight", "'left.weight'"),
        (r"left\.bias", "'left.bias'"),
    ],
)
def test_an_ignored_parameter_in_a_product_of_another_dtype_is_refused(
    ignored: str, names: str
) -> None:
    with pytest.raises(PolicyError, match=f"is {names}, which `ignored` keeps out") as refused:
        mixed(ignored, TwoHeads())
    assert "addmm.default in left takes operands in torch.bfloat16 and torch.float32" in str(
        refused.value
    )


def test_an_ignored_module_may_cast_for_itself() -> None:
    model = Casting()
    sharded = mixed("left", model)
    x = torch.randn(2, 4)
    trunk, right = (copy.deepcopy(m).bfloat16() for m in (model.trunk, model.right))
    h = trunk(x.bfloat16())
    expected = (model.left(h.float()) * 2).bfloat16(), right(h)
    for mine, theirs in zip(sharded(x), expected, strict=True):
        assert torch.equal(mine, theirs)

"""`Accelerator` with sharded modules equals `Accelerator` with DDP; its states are saved whole."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.utils import TorchDynamoPlugin
from models import CASES
from ranks import checks_of, error_of, on_ranks
from safetensors.torch import load_file
from state_checks import assert_same, shared_folder
from torch import Tensor, nn
from trainers import accelerator, llama
from transformers import LlamaForCausalLM

import graphshard
from graphshard import hf
from graphshard.errors import CheckpointError, PolicyError, RuntimeStateError
from graphshard.module.sharded_module import ShardedModule
from graphshard.program.program import RECOMPUTED

BLOCKS = graphshard.BlockPolicy({nn.Linear})


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(6, 8)
        self.drop = nn.Dropout(0.2)
        self.down = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.drop(self.up(x)).relu())


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


def trained(
    accelerator: Accelerator, model: nn.Module, optim: Any, steps: int, *, clips: bool = True
) -> list[float]:
    """Losses and norms of steps on this rank's batches, two to a step of the optimizer."""
    torch.manual_seed(dist.get_rank())
    seen = []
    for number in range(steps):
        x = torch.randn(
            4, 6, generator=torch.Generator().manual_seed(10 * number + dist.get_rank())
        )
        with accelerator.accumulate(model):
            loss = model(x).float().pow(2).mean()
            accelerator.backward(loss)
            seen.append(loss.item())
            if accelerator.sync_gradients and clips:
                seen.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.05)))
            optim.step()
            optim.zero_grad()
    return seen


def weights(model: nn.Module) -> list[Tensor]:
    return [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]


@cache
def by_ddp(**options: Any) -> tuple[list[float], list[Tensor]]:
    plain = accelerator(gradient_accumulation_steps=2, **options)
    model, optim = plain.prepare(model := net(), sgd(model))
    return trained(plain, model, optim, 6), weights(model)


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-7)


def handed_back_and_trains_as_ddp(rank: int) -> None:
    losses, params = by_ddp()
    acc = accelerator(gradient_accumulation_steps=2)
    sharded = graphshard.compile(net(), BLOCKS)
    model, optim = acc.prepare(sharded, sgd(sharded))
    assert model is sharded
    assert acc.prepare(model) is sharded
    assert acc.unwrap_model(model) is sharded
    assert trained(acc, model, optim, 6) == pytest.approx(losses, rel=1e-6)
    assert_equal(weights(model), params)
    assert sharded._graphshard.bindings.accumulated.tensors == {}


def autocast_acts(rank: int) -> None:
    losses, params = by_ddp(mixed_precision="bf16")
    acc = accelerator(gradient_accumulation_steps=2, mixed_precision="bf16")
    sharded = graphshard.compile(net(), BLOCKS)
    model, optim = acc.prepare(sharded, sgd(sharded))
    x = torch.ones(2, 6)
    assert model(x).dtype == torch.float32  # as Accelerate converts outputs
    with torch.no_grad():
        exact = graphshard.compile(net(), BLOCKS)(x)
    assert not torch.equal(model(x), exact)
    assert trained(acc, model, optim, 6) == pytest.approx(losses, rel=1e-6)
    assert_equal(weights(model), params)


def states_are_saved_whole(rank: int) -> None:
    folder = shared_folder()

    def start() -> tuple[Accelerator, nn.Module, Any, Any]:
        acc = accelerator(gradient_accumulation_steps=2)
        sharded = graphshard.compile(net(), BLOCKS)
        optim = sgd(sharded)
        return acc, *acc.prepare(sharded, optim, torch.optim.lr_scheduler.StepLR(optim, 1, 0.5))

    acc, model, optim, scheduler = start()
    trained(acc, model, optim, 4)
    scheduler.step()
    acc.save_state(str(folder / "state"))
    drawn = torch.rand(3)
    expected = trained(acc, model, optim, 4)
    params = weights(model)

    acc, model, optim, scheduler = start()
    rate = optim.param_groups[0]["lr"]
    acc.load_state(str(folder / "state"))
    assert optim.param_groups[0]["lr"] < rate
    assert torch.equal(torch.rand(3), drawn)
    assert trained(acc, model, optim, 4) == expected
    for mine, other in zip(weights(model), params, strict=True):
        assert torch.equal(mine, other)
    assert (folder / "state" / "graphshard_0" / ".metadata").is_file()
    other = accelerator()
    plain = other.prepare(nn.Linear(2, 2))  # one without sharded modules saves as ever
    other.save_state(str(folder / "plain"))
    other.wait_for_everyone()  # the main process alone wrote
    other.load_state(str(folder / "plain"))
    assert isinstance(plain, nn.parallel.DistributedDataParallel)


def whole_weights_are_given_and_saved(rank: int) -> None:
    folder = shared_folder()
    acc = accelerator()
    model = acc.prepare(graphshard.compile(net(), BLOCKS))
    expected = net().state_dict()
    given = acc.get_state_dict(model)
    assert (rank == 0) == bool(given)
    acc.save(given, folder / "weights.pt")
    acc.save_model(model, folder / "one")
    acc.save_model(model, folder / "many", max_shard_size="200B")
    acc.save_model(model, folder / "pickled", safe_serialization=False)
    dist.barrier()
    for file in (folder / "weights.pt", folder / "pickled" / "pytorch_model.bin"):
        assert_same(torch.load(file), expected)
    assert_same(load_file(folder / "one" / "model.safetensors"), expected)
    assert (folder / "many" / "model.safetensors.index.json").is_file()
    assert len([*(folder / "many").glob("*.safetensors")]) == 2
    again = graphshard.compile(Net(), graphshard.BlockPolicy({nn.Linear}, sync_module_states=True))
    again.load_safetensors(folder / "many")
    assert_same(again.full_state_dict(rank0_only=False), expected)
    save = lambda **options: acc.save_model(model, folder / "one", **options)  # noqa: E731
    assert "'ten' is not a size" in error_of(lambda: save(max_shard_size="ten"), CheckpointError)
    text = error_of(lambda: acc.save_model(model, folder / "weights.pt"), CheckpointError)
    assert "is a file, not a folder" in text
    plain = acc.prepare(nn.Linear(2, 2))
    assert len(acc.get_state_dict(plain)) == 2


def pretrained_models_are_saved_as_scripts_for_accelerate_do(rank: int) -> None:
    folder = shared_folder()
    acc = hf.shard_models_of(accelerator(), graphshard.BlockPolicy())
    model = acc.prepare(llama())
    unwrapped = acc.unwrap_model(model)
    options = {"is_main_process": acc.is_main_process, "save_function": acc.save}
    weights = acc.get_state_dict(model)
    unwrapped.save_pretrained(folder / "own", **options, safe_serialization=True)
    unwrapped.save_pretrained(folder / "given", **options, state_dict=weights)
    halves = {name: value.half() for name, value in weights.items()}
    unwrapped.save_pretrained(folder / "half", state_dict=halves, max_shard_size="20KB")
    dist.barrier()
    for name, cast in (("own", Tensor.float), ("given", Tensor.float), ("half", Tensor.half)):
        saved = LlamaForCausalLM.from_pretrained(folder / name, dtype="auto").state_dict()
        expected = {key: cast(value) for key, value in llama().state_dict().items()}
        assert_same({key: cast(value) for key, value in saved.items()}, expected)
    assert len([*(folder / "half").glob("*.safetensors")]) > 1

    for wrong, text in (
        ({"is_main_process": rank == 1}, "is_main_process=False on rank 0"),
        ({"safe_serialization": False}, "safe_serialization=False asks for pickles"),
        ({"save_function": print}, "would never be called"),
        ({"state_dict": model.state_dict()}, "state_dict has a DTensor for 'model.embed"),
        ({"state_dict": {} if rank == 0 else None}, "missing or empty on rank 0"),
        ({"state_dict": weights, "dtype": torch.half}, "state_dict is written as it is"),
        ({"variant": "fp16"}, "has no variant= (got 'fp16'); rename the files"),
        ({"push_to_hub": True}, "write a folder first and upload it"),
        ({"max_shard_size": "big"}, "'big' is not a size"),
    ):
        message = error_of(
            lambda wrong=wrong: model.save_pretrained(folder / "no", **wrong), CheckpointError
        )
        assert text in message
    model.save_pretrained(folder / "own", push_to_hub=False, variant=None, save_peft_format=True)


@contextmanager
def fsdp_settings() -> Iterator[None]:
    """What the launcher makes of a configuration file of FSDP version 2."""
    settings = {
        "ACCELERATE_USE_FSDP": "true",
        "FSDP_VERSION": "2",
        "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
        "FSDP_TRANSFORMER_CLS_TO_WRAP": "Linear",
        "FSDP_RESHARD_AFTER_FORWARD": "false",
        "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
    }
    os.environ |= settings
    try:
        yield
    finally:
        for name in settings:
            del os.environ[name]


def a_configuration_of_fsdp2_switches_by_one_line(rank: int) -> None:
    losses, params = by_ddp()
    with fsdp_settings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        acc = accelerator(gradient_accumulation_steps=2)
        hf.shard_models_of(acc)
        model, optim = acc.prepare(model := net(), sgd(model))
    assert isinstance(model, ShardedModule)
    policy = model.plan.policy
    assert policy.strategy is graphshard.Strategy.SHARD_GRAD_OP
    assert {unit.fqn for unit in model.plan.units} >= {"up", "down"}
    assert trained(acc, model, optim, 6) == pytest.approx(losses, rel=1e-6)
    assert_equal(weights(model), params)


def an_accelerator_that_believes_it_is_alone_is_refused(rank: int) -> None:
    """As a configuration of FSDP with `use_cpu: true` makes it under `accelerate launch`."""
    accelerator()  # forgets the settings of the last one
    AcceleratorState._reset_state(reset_partial_state=True)
    refused = r"1 process.*2 ranks.*Accelerator\(cpu=True\)"
    with fsdp_settings(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        alone = Accelerator()
        assert alone.num_processes == 1
        with pytest.raises(PolicyError, match=refused):
            hf.shard_models_of(alone)
        with pytest.raises(PolicyError, match=refused):
            alone.prepare(graphshard.compile(net(), BLOCKS))
        assert hf.shard_models_of(accelerator()).num_processes == 2


def what_would_have_no_effect_is_refused(rank: int) -> None:
    sharded = graphshard.compile(net(), BLOCKS)
    acc = accelerator(dynamo_plugin=TorchDynamoPlugin(backend="eager"))
    with pytest.raises(PolicyError, match=r"torch\.compile, which cannot take a sharded module"):
        acc.prepare(sharded)
    acc = accelerator()
    with pytest.raises(PolicyError, match="no FSDP settings to take a policy from"):
        hf.shard_models_of(acc)
    acc.prepare(net())
    with pytest.raises(PolicyError, match="has prepared a model already"):
        hf.shard_models_of(acc, BLOCKS)
    acc = hf.shard_models_of(accelerator(), BLOCKS)
    model = net()
    optim = sgd(model)
    optim.state[next(model.parameters())]["step"] = torch.tensor(1.0)
    with pytest.raises(PolicyError, match="has a state for the parameters of the model before"):
        acc.prepare(model, optim)
    acc = accelerator()
    both = [*sharded.parameters(), *(other := graphshard.compile(net(), BLOCKS)).parameters()]
    acc.prepare(sharded, other, torch.optim.SGD(both, lr=0.1))
    with pytest.raises(CheckpointError, match="one optimizer for each sharded module"):
        acc.save_state(mkdtemp())


test_on_two_ranks = on_ranks(checks_of(globals()), 2, timeout=300)


def test_an_accelerator_that_does_not_know_sharded_modules_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sharded = graphshard.compile(net(), BLOCKS)
    monkeypatch.setattr(ShardedModule, "_known_to_accelerate", False)
    with pytest.raises(RuntimeStateError, match=r"import graphshard\.hf before Accelerator"):
        getattr(sharded, "_is_accelerate_prepared", False)


@pytest.mark.slow
def test_the_device_of_an_accelerator_on_cpus_is_the_cpu() -> None:
    """It has an index, which caches of transformers compare with that of a tensor."""
    case = CASES["t5"]
    model, batch = case.model().eval(), case.inputs(0)
    policy = graphshard.BlockPolicy()
    sharded = graphshard.compile(model, policy, device="cpu:0").eval()
    torch.testing.assert_close(sharded(**batch).loss, model(**batch).loss)
    planned = graphshard.plan(model, policy, device="cpu:0", world_size=2, example_kwargs=batch)
    assert planned.program is not None
    assert planned.program.device == "cpu"


def test_gradient_checkpointing_is_switched_without_capturing_again() -> None:
    """As trainers do around what they compute without gradients."""
    model = llama(0.0)
    model.gradient_checkpointing_enable()
    assert model.model.embed_tokens._forward_hooks  # of transformers
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="hooks on modules are captured")
        sharded = graphshard.compile(model, graphshard.BlockPolicy())
    ids = torch.arange(12).view(2, 6)
    loss = sharded(input_ids=ids, labels=ids).loss
    program = sharded.program
    assert any(RECOMPUTED in node.meta for node in program.nodes())
    for _ in range(2):
        sharded.gradient_checkpointing_disable()
        other = sharded(input_ids=ids, labels=ids)
        sharded.gradient_checkpointing_enable()
        again = sharded(input_ids=ids, labels=ids)
        assert torch.equal(again.loss, loss)
        torch.testing.assert_close(other.loss, loss)
    assert len(sharded.programs) == 2
    sharded.enable_input_require_grads()
    sharded.disable_input_require_grads()
    sharded(input_ids=ids, labels=ids).loss.backward()
    assert all(param.grad is not None for param in sharded.parameters())
    assert len(sharded.programs) == 2
    sharded.gradient_checkpointing_enable({"use_reentrant": True})  # which is another program
    assert torch.equal(sharded(input_ids=ids, labels=ids).loss, loss)
    assert len(sharded.programs) == 3

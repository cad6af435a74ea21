"""peft: what a sharded model saves, `PeftModel.from_pretrained` and `from_pretrained` read."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import trainers
from models import generating_gpt2 as gpt2
from models import generating_llama as llama
from models import prompts
from peft import LoraConfig, PeftModel, PromptTuningConfig, get_peft_model
from ranks import checks_of, error_of, on_ranks
from state_checks import shared_folder
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

import graphshard
from graphshard.errors import CheckpointError
from graphshard.hf import load_adapters
from graphshard.module.sharded_module import ShardedModule

BLOCKS = graphshard.BlockPolicy()


def adapted(model: PreTrainedModel, **options: Any) -> Any:
    """A model with adapters that change what it computes."""
    torch.manual_seed(1)
    config = LoraConfig(r=4, lora_alpha=16, task_type="CAUSAL_LM", **options)
    with_adapters = get_peft_model(model, config).eval()
    for name, param in with_adapters.named_parameters():
        if param.requires_grad and "lora_A" not in name:
            nn.init.normal_(param, std=0.3)
    return with_adapters


def lora() -> Any:
    return adapted(llama(), target_modules=["q_proj", "v_proj", "down_proj"])


def lora_and_head() -> Any:
    """With a module that is trained whole, and a second adapter."""
    model = adapted(llama(), target_modules=["q_proj"], modules_to_save=["lm_head"])
    model.add_adapter("second", LoraConfig(r=2, target_modules=["k_proj"]))
    return model


def lora_on_conv() -> Any:
    """On transposed weights, with the magnitudes of DoRA and trained biases, and a tied head."""
    return adapted(
        gpt2(), target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True, bias="lora_only"
    )


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=prompts(0)).logits


def there_and_back(make: Callable[[], Any], base: Callable[[], PreTrainedModel]) -> None:
    folder = shared_folder()
    expected = logits(make())
    assert not torch.allclose(expected, logits(base()), atol=1e-3)
    sharded = graphshard.compile(make(), BLOCKS)
    written = sharded.save_pretrained(folder / "adapters")
    make().save_pretrained(str(folder / f"theirs-{dist.get_rank()}"))
    weights = sharded.full_state_dict()
    sharded.save_pretrained(folder / "given", state_dict=weights, safe_serialization=True)
    sharded.save_pretrained(folder / "merged", merge=True)
    dist.barrier()
    theirs = folder / f"theirs-{dist.get_rank()}"
    for file in theirs.rglob("adapter_*"):
        ours = folder / "adapters" / file.relative_to(theirs)
        assert ours.read_bytes() == file.read_bytes()
        given = folder / "given" / file.relative_to(theirs)
        assert given.read_bytes() == file.read_bytes()
        assert ours in written or dist.get_rank()
    again = PeftModel.from_pretrained(base(), folder / "adapters").eval()
    assert torch.equal(logits(again), expected)
    merged, report = AutoModelForCausalLM.from_pretrained(
        folder / "merged", output_loading_info=True
    )
    assert not any(report.values()), report
    whole = make().merge_and_unload()
    for (name, mine), other in zip(merged.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, other), name
    assert torch.equal(logits(merged.eval()), logits(whole.eval()))
    torch.testing.assert_close(logits(merged), expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(logits(sharded), expected)  # it has its adapters as before

    new = make()
    for param in new.parameters():
        if param.requires_grad:
            nn.init.ones_(param)
    other = graphshard.compile(new, BLOCKS)
    assert not torch.equal(logits(other), expected)
    load_adapters(other, folder / "adapters")
    assert torch.equal(logits(other), expected)


def adapters_are_read_back(rank: int) -> None:
    there_and_back(lora, llama)


def other_adapters_are_read_back(rank: int) -> None:
    there_and_back(lora_and_head, llama)
    there_and_back(lora_on_conv, gpt2)


def a_trained_model_generates(rank: int) -> None:
    model = lora()
    sharded = graphshard.compile(lora(), BLOCKS)
    assert isinstance(sharded, PeftModel)
    expected = model.generate(input_ids=prompts(rank), max_new_tokens=6 + rank)
    found = sharded.generate(input_ids=prompts(rank), max_new_tokens=6 + rank)
    assert torch.equal(found, expected)
    names = [name for name, _ in sharded.iter_full(dtype=torch.float16)]
    assert names == list(model.state_dict())


def files_have_the_dtype_asked_for(rank: int) -> None:
    folder = shared_folder()
    sharded = graphshard.compile(lora(), BLOCKS)
    sharded.save_pretrained(folder / "merged", merge=True, dtype=torch.bfloat16)
    sharded.save_pretrained(folder / "many", merge=True, max_shard_bytes=8000)
    dist.barrier()
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged")
    assert merged.dtype == torch.bfloat16
    assert len(list((folder / "many").glob("*.safetensors"))) > 2
    whole = lora().merge_and_unload()
    many = AutoModelForCausalLM.from_pretrained(folder / "many")
    for (name, param), other, half in zip(
        whole.named_parameters(), many.parameters(), merged.parameters(), strict=True
    ):
        assert torch.equal(param, other), name
        assert torch.equal(param.to(torch.bfloat16), half), name
    assert "peft_type" not in json.loads((folder / "many" / "config.json").read_text())


def prompts_are_read_back(rank: int) -> None:
    folder = shared_folder()
    config = PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    prompted = get_peft_model(gpt2(), config).eval()
    expected = logits(prompted)
    sharded = graphshard.compile(prompted, BLOCKS)
    sharded.save_pretrained(folder)
    dist.barrier()
    again = PeftModel.from_pretrained(gpt2(), folder).eval()
    assert torch.equal(logits(again), expected)


def a_trainer_loads_the_best_adapters(rank: int) -> None:
    trainers.accelerator()
    folder = shared_folder()
    data = trainers.texts()
    options = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "load_best_model_at_end": True,
        "metric_for_best_model": "eval_loss",
        "greater_is_better": True,  # so that the last is not the best
    }
    args = trainers.arguments(folder, max_steps=2, save_steps=1, learning_rate=0.1, **options)
    model = get_peft_model(trainers.llama(0.0), LoraConfig(r=2, target_modules=["q_proj"]))
    run = trainers.Sharded(model, args, train_dataset=data, eval_dataset=data[:4])
    run.train()
    best = str(run.state.best_model_checkpoint)
    assert best.endswith("checkpoint-1")
    assert (Path(best) / "adapter_config.json").is_file()
    again = PeftModel.from_pretrained(trainers.llama(0.0), best).eval()
    assert torch.equal(logits(run.model.eval()), logits(again))


def what_cannot_be_saved_is_told(rank: int) -> None:
    folder = shared_folder()
    prompted = get_peft_model(
        gpt2(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    )
    sharded = graphshard.compile(prompted, BLOCKS)
    text = error_of(lambda: sharded.save_pretrained(folder, dtype=torch.half), CheckpointError)
    assert "these adapters are computed as they are saved" in text
    text = error_of(lambda: sharded.save_pretrained(folder, merge=True), CheckpointError)
    assert "peft cannot merge the adapters" in text
    plain: ShardedModule = graphshard.compile(llama(), BLOCKS)
    text = error_of(lambda: plain.save_pretrained(folder, merge=True), CheckpointError)
    assert "LlamaForCausalLM is not" in text
    text = error_of(lambda: load_adapters(plain, folder), CheckpointError)
    assert "compiled from LlamaForCausalLM" in text
    text = error_of(
        lambda: load_adapters(graphshard.compile(lora(), BLOCKS), folder), CheckpointError
    )
    assert "there is no checkpoint at" in text
    if os.getuid():
        return
    (Path(folder) / "file").touch()
    dist.barrier()
    sharded = graphshard.compile(lora(), BLOCKS)
    text = error_of(lambda: sharded.save_pretrained(Path(folder) / "file"), CheckpointError)
    assert "writing" in text


test_on_two_ranks = pytest.mark.slow(on_ranks(checks_of(globals()), 2, timeout=300))

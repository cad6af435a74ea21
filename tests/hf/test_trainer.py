"""transformers' Trainer: sharded runs equal its runs by DDP, and resume to the same bytes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import checks_of, error_of, on_ranks
from state_checks import shared_folder
from torch.nn.utils.rnn import pad_sequence
from trainers import Sharded, accelerator, arguments, llama, texts
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    LlamaForCausalLM,
    Trainer,
)

import graphshard
from graphshard.errors import CheckpointError, PolicyError, RuntimeStateError
from graphshard.module.sharded_module import ShardedModule


def run(
    kind: type[Trainer],
    folder: Path,
    resume: Path | None = None,
    *,
    dropout: float = 0.1,
    **changes: Any,
) -> Trainer:
    accelerator()  # forgets the settings of the last Trainer
    data = texts()
    trainer = kind(
        llama(dropout), arguments(folder, **changes), train_dataset=data, eval_dataset=data[:6]
    )
    trainer.train(resume_from_checkpoint=resume and str(resume))
    return trainer


def logged(trainer: Trainer) -> list[float]:
    keys = ("loss", "grad_norm", "eval_loss")
    return [entry[key] for entry in trainer.state.log_history for key in keys if key in entry]


def bytes_of(folder: Path) -> bytes:
    return (folder / "model.safetensors").read_bytes()


def losses_norms_and_bytes_equal_those_of_ddp(rank: int) -> None:
    folder = shared_folder()
    options = {"eval_strategy": "steps", "eval_steps": 3, "load_best_model_at_end": True}
    theirs = run(Trainer, folder / "ddp", **options)
    ours = run(Sharded, folder / "sharded", **options)
    assert isinstance(ours.model, ShardedModule)
    assert isinstance(ours.model, LlamaForCausalLM)
    assert len(logged(theirs)) == 14
    assert logged(ours) == pytest.approx(logged(theirs), rel=1e-6)
    best = folder / "sharded" / "checkpoint-6"
    assert ours.state.best_model_checkpoint == str(best)
    exported = LlamaForCausalLM.from_pretrained(best).state_dict()
    for name, value in (
        LlamaForCausalLM.from_pretrained(folder / "ddp" / "checkpoint-6").state_dict().items()
    ):
        torch.testing.assert_close(exported[name], value, rtol=1e-6, atol=1e-7)
    full = ours.model.full_state_dict(rank0_only=False)
    assert all(torch.equal(exported[name], value) for name, value in full.items())

    again = run(Sharded, folder / "again", folder / "sharded" / "checkpoint-3", **options)
    assert logged(again) == logged(ours)
    dist.barrier()
    assert bytes_of(folder / "again" / "checkpoint-6") == bytes_of(best)


def options_of_trainer_act(rank: int) -> None:
    folder = shared_folder()
    options: dict[str, Any] = {
        "dropout": 0.0,  # whose backward rounds otherwise in bf16
        "bf16": True,
        "gradient_checkpointing": True,
        "max_grad_norm": 0.0,
        "save_only_model": True,
    }
    theirs = run(Trainer, folder / "ddp", **options)
    ours = run(Sharded, folder / "sharded", **options)
    assert logged(ours) == pytest.approx(logged(theirs), rel=1e-6), (logged(ours), logged(theirs))
    assert ours.model.model.gradient_checkpointing
    assert not (folder / "sharded" / "checkpoint-6" / "graphshard").exists()
    ours.args.max_steps = 8
    ours.train()  # another training of the module as it is, with weights as they are
    assert ours.state.global_step == 8
    metrics = ours.evaluate()
    assert metrics["eval_loss"] == pytest.approx(ours.evaluate()["eval_loss"])


def one_program_serves_texts_of_all_lengths(rank: int) -> None:
    folder = shared_folder()
    lengths = [5, 9, 13, 7, 11, 16, 6, 8]
    data = [
        {"input_ids": text["input_ids"][:length], "labels": text["input_ids"][:length]}
        for text, length in zip(texts(), lengths * 8, strict=True)
    ]

    def padded(batch: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        ids = pad_sequence([text["input_ids"] for text in batch], batch_first=True)
        labels = pad_sequence([text["labels"] for text in batch], True, -100)
        return {"input_ids": ids, "labels": labels, "attention_mask": (labels != -100).long()}

    losses = []
    for kind in (Trainer, Sharded):
        accelerator()
        args = arguments(folder / kind.__name__, gradient_accumulation_steps=1)
        trainer = kind(llama(0.0), args, train_dataset=data, data_collator=padded)
        trainer.train()
        losses.append(logged(trainer))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    assert len(trainer.model.programs) <= 2  # of the first shape, and of all


def what_cannot_act_is_refused(rank: int) -> None:
    accelerator()
    with pytest.raises(PolicyError, match=r'compile_options=\{"backend": "inductor"\}'):
        Sharded(llama(), arguments(mkdtemp(), torch_compile=True), train_dataset=texts())
    accelerator()
    text: Any = "block"
    with pytest.raises(PolicyError, match=r"got 'block'; what the command line calls block"):
        Sharded(llama(), arguments(mkdtemp()), policy=text)
    accelerator()
    model = llama()
    optim = torch.optim.SGD(model.parameters(), lr=0.1)
    trainer = Sharded(model, arguments(mkdtemp()), train_dataset=texts(), optimizers=(optim, None))
    with pytest.raises(PolicyError, match="an optimizer of the model's parameters before they"):
        trainer.train()
    args = arguments(mkdtemp(), optim="adafactor")
    accelerator()
    with pytest.raises(PolicyError, match=r"Adafactor \(of optim= .* whole parameters"):
        Sharded(llama(), args, train_dataset=texts()).train()
    args = arguments(mkdtemp())
    accelerator()
    whole: Any = {"optimizer_cls_and_kwargs": (torch.optim.Adafactor, {"lr": 0.1})}
    with pytest.raises(PolicyError, match='such as optim="adamw_torch"'):
        Sharded(llama(), args, train_dataset=texts(), **whole).train()
    accelerator()
    sharded = graphshard.compile(llama(), graphshard.BlockPolicy())
    with pytest.raises(RuntimeStateError, match=r"put graphshard\.hf\.ShardedTrainer before the"):
        Trainer(sharded, arguments(mkdtemp()), train_dataset=texts())
    with pytest.raises(PolicyError, match="the model is compiled already, so that policy="):
        Sharded(sharded, arguments(mkdtemp()), policy=graphshard.BlockPolicy())


def a_sharded_module_is_taken_as_it_is(rank: int) -> None:
    accelerator()
    sharded = graphshard.compile(llama(), graphshard.BlockPolicy())
    trainer = Sharded(sharded, arguments(shared_folder(), max_steps=1), train_dataset=texts())
    trainer.train()
    assert trainer.model is sharded
    assert trainer._loss_shifts_labels
    assert trainer.label_names == ["labels"]


def ranks_take_the_first_ones_weights(rank: int) -> None:
    """As DDP does, for models that each rank built from its own seed."""
    runs = []
    for kind, options in (
        (Trainer, {}),
        (Sharded, {"policy": graphshard.BlockPolicy(strategy="NO_SHARD")}),
    ):
        accelerator()
        model = llama()
        if rank > 0:
            model.lm_head.reset_parameters()
        args = arguments(mkdtemp(), max_steps=2, save_strategy="no")
        trainer = kind(model, args, train_dataset=texts(), **options)
        trainer.train()
        runs.append(logged(trainer))
    assert runs[1] == pytest.approx(runs[0], rel=1e-6)


def a_checkpoint_of_a_plain_trainer_is_resumed(rank: int) -> None:
    folder = shared_folder()
    theirs = run(Trainer, folder / "ddp", weight_decay=0.1)
    plain = folder / "ddp" / "checkpoint-3"
    resumed: list[dict[str, Any]] = []

    class Looking(Sharded):
        def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
            super()._load_optimizer_and_scheduler(checkpoint)
            optim = getattr(self.optimizer, "optimizer", self.optimizer)
            options = {"kind": "full", "rank0_only": False}
            resumed.append(self.model.optimizer_state_dict(optim, **options))

    ours = run(Looking, folder / "sharded", plain, weight_decay=0.1)
    assert logged(ours) == pytest.approx(logged(theirs), rel=1e-6)
    saved = torch.load(plain / "optimizer.pt", weights_only=True)
    groups = [group["params"] for group in resumed[0]["param_groups"]]
    assert list(map(len, groups)) == [len(group["params"]) for group in saved["param_groups"]]
    for index, name in enumerate(name for names in groups for name in names):
        for key, value in saved["state"][index].items():
            assert torch.equal(resumed[0]["state"][name][key], value)
    rates = [log["learning_rate"] for log in ours.state.log_history if "learning_rate" in log]
    assert rates == [
        log["learning_rate"] for log in theirs.state.log_history if "learning_rate" in log
    ]

    def refused(text: str) -> None:
        dist.barrier()
        message = error_of(lambda: run(Sharded, folder / "no", plain), CheckpointError)
        assert text in message
        dist.barrier()

    def change(act: Callable[[], object]) -> None:
        dist.barrier()
        if rank == 0:
            act()
        dist.barrier()

    saved["param_groups"][0]["params"].pop()
    kept = (plain / "optimizer.pt").read_bytes()
    change(lambda: torch.save(saved, plain / "optimizer.pt"))
    refused("the optimizer has groups of [9, 3]; resume with the model and the optimizer's")
    change(lambda: (plain / "optimizer.pt").write_bytes(kept))
    change((plain / "scheduler.pt").unlink)
    refused("has optimizer.pt and lacks the other one of optimizer.pt and scheduler.pt")
    change(lambda: (plain / "scheduler.pt").write_bytes(b"cut off"))
    refused("cannot be read")
    change(lambda: (plain / "optimizer_0").mkdir())
    refused("optimizer_0 holds optimizer states of FSDP or DeepSpeed")


def a_classifier_says_its_kind_of_problem_as_by_ddp(rank: int) -> None:
    """Its forward settles `config.problem_type`, which is saved with it."""
    folder = shared_folder()
    data = [{"input_ids": each["input_ids"], "labels": i % 3} for i, each in enumerate(texts())]
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    found = []
    for kind in (Trainer, Sharded):
        accelerator()
        torch.manual_seed(0)
        config = BertConfig(vocab_size=128, intermediate_size=64, num_labels=3, **sizes)
        options = arguments(folder / kind.__name__, save_steps=6)
        trainer = kind(BertForSequenceClassification(config), options, train_dataset=data)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.train()
        assert not [each for each in caught if "forward assigns" in str(each.message)]
        dist.barrier()
        saved = BertConfig.from_pretrained(folder / kind.__name__ / "checkpoint-6")
        assert saved.problem_type == "single_label_classification"
        found.append(logged(trainer))
    assert found[1] == pytest.approx(found[0], rel=1e-6)
    assert len(trainer.model.programs) == 2  # with accumulation


QUICK = [
    a_sharded_module_is_taken_as_it_is,
    what_cannot_act_is_refused,
    ranks_take_the_first_ones_weights,
]
test_on_two_ranks = on_ranks(QUICK, 2, timeout=400)
test_more_on_two_ranks = pytest.mark.slow(on_ranks(checks_of(globals(), but=QUICK), 2, timeout=400))

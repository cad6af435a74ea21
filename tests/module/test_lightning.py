"""PyTorch Lightning drives sharded modules: the same numbers, checkpoints, errors."""

from __future__ import annotations

import copy
import os
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from models import Block
from ranks import checks_of, on_ranks
from state_checks import Stranger, shared_folder
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import graphshard
from graphshard.errors import CheckpointError, PlanError, PolicyError

pl = pytest.importorskip("lightning.pytorch")

from lightning.fabric.plugins.environments import TorchElasticEnvironment  # noqa: E402

from graphshard.lightning import GraphShardStrategy, read_file  # noqa: E402

POLICY = graphshard.BlockPolicy({Block})


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(dropout=0.0), Block(dropout=0.0))
        self.head = nn.Linear(16, 3)

    def forward(self, x):
        return self.head(self.blocks(x))


class Classifier(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.model = Stack()
        self.losses: list[float] = []
        self.seen: list[float] = []

    def training_step(self, batch, index):
        x, y = batch
        loss = F.cross_entropy(self.model(x), y)
        self.log("loss", loss, sync_dist=True)
        self.losses.append(loss.item())
        return loss

    def validation_step(self, batch, index):
        x, y = batch
        self.seen.append(F.cross_entropy(self.model(x), y).item())

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def data(rank: int, size: int) -> DataLoader:
    torch.manual_seed(7)
    x, y = torch.randn(24, 16), torch.randint(3, (24,))
    return DataLoader(TensorDataset(x[rank::size], y[rank::size]), batch_size=4)


def trainer(folder: Path, **options) -> pl.Trainer:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    options = {"max_epochs": 1, "strategy": GraphShardStrategy(POLICY)} | options
    return pl.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        plugins=[TorchElasticEnvironment()],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        **options,
    )


def by_hand(rank: int, size: int, epochs: int, clip: float | None = None, every: int = 1):
    """The same training without Lightning: gradients averaged over the ranks by all_reduce."""
    module = Classifier()
    model, optimizer = module.model, torch.optim.AdamW(module.parameters(), lr=1e-2)
    losses = []
    for _ in range(epochs):
        for step, (x, y) in enumerate(data(rank, size)):
            loss = F.cross_entropy(model(x), y)
            losses.append(loss.item())
            (loss / every).backward()
            if (step + 1) % every:
                continue
            for param in model.parameters():
                dist.all_reduce(param.grad)
                param.grad /= size
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            optimizer.zero_grad()
    return losses, model


def trains_as_by_hand(rank: int) -> None:
    size = dist.get_world_size()
    module = Classifier()
    trainer(shared_folder()).fit(module, data(rank, size), data(rank, size))
    losses, reference = by_hand(rank, size, 1)
    assert isinstance(module.model, graphshard.ShardedModule)
    assert module.losses == losses
    for name, param in module.model.named_parameters():
        assert torch.equal(param.full_tensor(), reference.get_parameter(name)), name
    assert module.seen


def accumulates_and_clips(rank: int) -> None:
    size = dist.get_world_size()
    module = Classifier()
    options = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5}
    trainer(shared_folder(), **options).fit(module, data(rank, size))
    _, reference = by_hand(rank, size, 1, clip=0.5, every=3)
    for name, param in module.model.named_parameters():
        torch.testing.assert_close(
            param.full_tensor(), reference.get_parameter(name), rtol=1e-5, atol=1e-6
        )


def trains_in_low_precision(rank: int) -> None:
    size = dist.get_world_size()
    module = Classifier()
    trainer(shared_folder(), precision="bf16-mixed").fit(module, data(rank, size))
    torch.testing.assert_close(module.losses, by_hand(rank, size, 1)[0], rtol=0.02, atol=0.02)
    assert any("bfloat16" in str(p.meta["val"]) for p in module.model.program.nodes())


def parameters_of_low_precision(rank: int) -> None:
    size = dist.get_world_size()
    module = Classifier()
    module.rest = nn.BatchNorm1d(2, affine=False)
    trainer(shared_folder(), precision="bf16-true").fit(module, data(rank, size))
    assert {param.dtype for param in module.parameters()} == {torch.bfloat16}
    assert module.rest.running_mean.dtype == torch.bfloat16
    torch.testing.assert_close(module.losses, by_hand(rank, size, 1)[0], rtol=0.02, atol=0.02)


def resumes_from_a_file(rank: int) -> None:
    resumes(rank, sharded=False)


def resumes_what_ddp_began(rank: int) -> None:
    size, folder = dist.get_world_size(), shared_folder()
    first = trainer(folder, strategy="ddp")
    first.fit(Classifier(), data(rank, size))
    path = folder / "one.ckpt"
    first.save_checkpoint(path)
    dist.barrier()
    module = Classifier()
    trainer(folder, max_epochs=2).fit(module, data(rank, size), ckpt_path=str(path))
    losses, reference = by_hand(rank, size, 2)
    torch.testing.assert_close(module.losses, losses[len(losses) // 2 :])
    for name, param in module.model.named_parameters():
        torch.testing.assert_close(param.full_tensor(), reference.get_parameter(name))
    if rank == 0:
        checkpoint = torch.load(path)
        checkpoint["optimizer_states"][0]["param_groups"][0]["params"].pop()
        torch.save(checkpoint, path)
    dist.barrier()
    with pytest.raises(CheckpointError, match=r"has groups of \[\d+\] parameters, and the"):
        trainer(folder, max_epochs=2).fit(Classifier(), data(rank, size), ckpt_path=str(path))


def resumes_from_a_folder(rank: int) -> None:
    resumes(rank, sharded=True)


def resumes(rank: int, sharded: bool) -> None:
    size, folder = dist.get_world_size(), shared_folder()
    strategy = GraphShardStrategy(POLICY, sharded_checkpoint=sharded)
    first = trainer(folder, strategy=strategy)
    first.fit(Classifier(), data(rank, size))
    path = folder / "one.ckpt"
    sizes = []
    for _ in range(2):  # the second replaces the first
        first.save_checkpoint(path)
        dist.barrier()
        sizes.append(len([*path.rglob("*")]))
        dist.barrier()
    assert sizes[0] == sizes[1]
    assert path.is_dir() == sharded
    module = Classifier()
    nn.init.zeros_(module.model.head.weight)  # the checkpoint has to make up for it
    again = trainer(folder, max_epochs=2, strategy=GraphShardStrategy(POLICY))
    again.fit(module, data(rank, size), ckpt_path=str(path))
    losses, reference = by_hand(rank, size, 2)
    assert module.losses == losses[len(losses) // 2 :]
    for name, param in module.model.named_parameters():
        assert torch.equal(param.full_tensor(), reference.get_parameter(name)), name
    if not sharded and rank == 0:
        plain = torch.load(path, weights_only=True)["state_dict"]
        copy.deepcopy(Classifier()).load_state_dict(plain)


def refuses_what_it_cannot_shard(rank: int) -> None:
    size = dist.get_world_size()
    bare = Classifier()
    bare.extra = nn.Parameter(torch.ones(2))
    with pytest.raises(PlanError, match="'extra' is in none of the sharded modules"):
        trainer(shared_folder()).fit(bare, data(rank, size))
    listed = Classifier()
    listed.model = nn.ModuleList([Stack()])
    with pytest.raises(PlanError, match="model is a ModuleList, which never runs itself"):
        trainer(shared_folder()).fit(listed, data(rank, size))
    named = GraphShardStrategy(POLICY, modules=["modell"])
    with pytest.raises(PolicyError, match="names 'modell'"):
        trainer(shared_folder(), strategy=named).fit(Classifier(), data(rank, size))


def loads_only_data_unless_told(rank: int) -> None:
    size, folder = dist.get_world_size(), shared_folder()
    first = trainer(folder)
    first.fit(Classifier(), data(rank, size))
    path = folder / "one.ckpt"
    first.save_checkpoint(path)
    if rank == 0:
        checkpoint = torch.load(path, weights_only=True)
        torch.save({**checkpoint, "x": Stranger(folder / "ran")}, path)
    dist.barrier()
    again = trainer(folder, max_epochs=2)
    with pytest.raises(CheckpointError, match="pass trust=True to GraphShardStrategy"):
        again.fit(Classifier(), data(rank, size), ckpt_path=str(path))
    assert not (folder / "ran").exists()
    dist.barrier()  # both have read it
    if rank == 0:
        torch.save({**checkpoint, "x": Path("/trusted")}, path)
    dist.barrier()
    strategy = GraphShardStrategy(POLICY, trust=True)
    trusting = trainer(folder, max_epochs=2, strategy=strategy)
    trusting.fit(Classifier(), data(rank, size), ckpt_path=str(path))
    assert trusting.current_epoch == 2


test_on_two_ranks = on_ranks(checks_of(globals()), 2)


def test_a_policy_is_needed():
    with pytest.raises(PolicyError, match="instance of a Policy; got 'ddp'"):
        GraphShardStrategy("ddp")


def test_a_file_with_a_tensor_larger_than_its_record_is_refused(tmp_path):
    """Torch reads beyond the record's memory in that case."""
    file = tmp_path / "x.ckpt"
    torch.save({"state_dict": {"a": torch.arange(3.0)}}, file)
    assert read_file(file, trust=False)["state_dict"]["a"].tolist() == [0, 1, 2]
    with zipfile.ZipFile(file) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(file, "w") as archive:
        for name, raw in parts.items():
            assert b"K\x03tq" in raw or not name.endswith("data.pkl")
            grown = raw.replace(b"K\x03tq", b"Mxftq").replace(b"K\x03\x85", b"Mxf\x85")
            archive.writestr(name, grown if name.endswith("data.pkl") else raw)
    with pytest.raises(CheckpointError, match=r"x.ckpt is damaged"):
        read_file(file, trust=False)


@pytest.mark.parametrize("contents", [[1], {"epoch": 1}])
def test_a_file_without_a_state_dict_is_refused(contents, tmp_path):
    torch.save(contents, tmp_path / "x.ckpt")
    strategy = GraphShardStrategy(POLICY)
    strategy.connect(Classifier())
    with pytest.raises(CheckpointError, match="is no checkpoint of Lightning"):
        strategy.load_checkpoint(tmp_path / "x.ckpt")

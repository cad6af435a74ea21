"""The same GPT under PyTorch Lightning: `Trainer(strategy=GraphShardStrategy(policy))`.

python examples/lightning_gpt.py --devices 2
"""

from __future__ import annotations

import argparse

import lightning.pytorch as pl
import stdlib_bytes
import torch
from gpt import GPT, Block, GPTConfig
from torch.utils.data import DataLoader, Dataset

import graphshard
from graphshard.lightning import GraphShardStrategy


class Windows(Dataset):
    """Windows of the standard library's source, the same on every rank."""

    def __init__(self, count: int, length: int = 64) -> None:
        data, _ = stdlib_bytes.load()
        self.idx, self.targets = stdlib_bytes.batch(data, size=count, length=length, seed=0)

    def __len__(self) -> int:
        return len(self.idx)

    def __getitem__(self, index: int):
        return self.idx[index], self.targets[index]


class LanguageModel(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT(GPTConfig(layers=2, width=64))

    def training_step(self, batch, index):
        loss = self.model(*batch)
        self.log("loss", loss, prog_bar=True, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--windows", type=int, default=320)
    args = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy=GraphShardStrategy(graphshard.BlockPolicy({Block})),
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(LanguageModel(), DataLoader(Windows(args.windows), batch_size=8, num_workers=0))
    if trainer.is_global_zero:
        print(f"loss {trainer.callback_metrics['loss'].item():.3f}")


if __name__ == "__main__":
    main()

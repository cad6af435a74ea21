"""A rank that trains between hosts whose link fails, and saves meanwhile: FOLDER STEPS.

Each step is a line in FOLDER/rankR.txt. A checkpoint is written in the background from step SAVED
on, and what it holds is compared with the parameters of that step at the end.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import graphshard
from examples.gpt import GPT, Block, GPTConfig

SAVED = 6
CONFIG = GPTConfig(64, layers=2, heads=4, width=192)


def compiled(seed: int) -> graphshard.ShardedModule:
    torch.manual_seed(seed)
    return graphshard.compile(GPT(CONFIG), graphshard.BlockPolicy({Block}))


def main(folder: Path, steps: int) -> None:
    patience = datetime.timedelta(seconds=float(os.environ["PATIENCE"]))
    dist.init_process_group("gloo", timeout=patience)
    rank = dist.get_rank()
    sharded = compiled(0)
    optim = torch.optim.AdamW(sharded.parameters())
    generator = torch.Generator().manual_seed(rank)
    saving, kept = None, {}
    with (folder / f"rank{rank}.txt").open("w") as said:
        for step in range(steps):
            if step == SAVED:
                saving = sharded.save_checkpoint(folder / "saved", optim, background=True)
                kept = {name: part.clone() for name, part in sharded.local_state_dict().items()}
            ids = torch.randint(64, (2, 33), generator=generator)
            loss = sharded(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optim.step()
            optim.zero_grad()
            print(step, loss.item().hex(), file=said, flush=True)
    assert saving is not None
    saving.result()
    other = compiled(1)
    other.load_checkpoint(folder / "saved", torch.optim.AdamW(other.parameters()))
    for name, part in other.local_state_dict().items():
        torch.testing.assert_close(part, kept[name], rtol=0, atol=0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))

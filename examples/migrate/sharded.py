"""Train sharded by graphshard: torchrun --nproc-per-node 2 sharded.py"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
from task import MICRO, Block, Model, arguments, batch

import graphshard

args = arguments()
dist.init_process_group("gloo")
here = (dist.get_rank(), dist.get_world_size())
torch.manual_seed(0)
model = graphshard.compile(Model(), graphshard.BlockPolicy({Block}))
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, T_max=100)
first, last = 0, args.folder / "last"
if last.exists():
    extra = {"step": 0}
    model.load_checkpoint(last, optim, schedule, extra=extra)
    first = extra["step"]

for step in range(first, args.steps):
    total = torch.zeros(())
    for micro in range(MICRO):
        with model.no_sync() if micro < MICRO - 1 else nullcontext():
            loss = model(*batch(step, micro, *here)) / MICRO
            loss.backward()
        total += loss.detach()
    norm = model.clip_grad_norm_(1.0)
    optim.step()
    schedule.step()
    optim.zero_grad()
    dist.all_reduce(total, dist.ReduceOp.AVG)
    if here[0] == 0:
        print(f"step {step} loss {total:.4f} norm {norm:.4f}")

model.eval()
with torch.no_grad():
    loss = model(*batch(-1, 0, *here))
dist.all_reduce(loss, dist.ReduceOp.AVG)
if here[0] == 0:
    print(f"held-out loss {loss:.4f}")
    args.folder.mkdir(exist_ok=True)
model.save_checkpoint(last, optim, schedule, extra={"step": args.steps})
full = model.full_state_dict()  # {} on ranks other than 0
if here[0] == 0:
    torch.save(full, args.folder / "weights.pt")
del model, optim, schedule
dist.destroy_process_group()

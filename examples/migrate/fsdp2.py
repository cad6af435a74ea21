"""Train sharded by FSDP2: torchrun --nproc-per-node 2 fsdp2.py"""

import gc

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from task import MICRO, Model, arguments, batch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

args = arguments()
dist.init_process_group("gloo")
here = (dist.get_rank(), dist.get_world_size())
torch.manual_seed(0)
model = Model()
for block in model.blocks:
    fully_shard(block)
fully_shard(model)
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, T_max=100)
first, last = 0, args.folder / "last"
if last.exists():
    weights, moments = get_state_dict(model, optim)
    saved = {"model": weights, "optim": moments, "schedule": schedule.state_dict(), "step": 0}
    dcp.load(saved, checkpoint_id=last)
    set_state_dict(model, optim, model_state_dict=weights, optim_state_dict=moments)
    schedule.load_state_dict(saved["schedule"])
    first = saved["step"]

for step in range(first, args.steps):
    total = torch.zeros(())
    for micro in range(MICRO):
        model.set_requires_gradient_sync(micro == MICRO - 1)
        loss = model(*batch(step, micro, *here)) / MICRO
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()
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
weights, moments = get_state_dict(model, optim)
state = {"model": weights, "optim": moments}
dcp.save({**state, "schedule": schedule.state_dict(), "step": args.steps}, checkpoint_id=last)
full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
if here[0] == 0:
    torch.save(full, args.folder / "weights.pt")
del model, optim, schedule, weights, moments, state, full
gc.collect()  # collectives that FSDP2 holds; one that Python's end drops aborts the process
dist.destroy_process_group()

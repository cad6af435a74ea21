"""Train on one device: python single.py"""

import torch
from task import MICRO, Model, arguments, batch

args = arguments()
torch.manual_seed(0)
model = Model()
optim = torch.optim.AdamW(model.parameters(), lr=1e-2)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optim, T_max=100)
first, last = 0, args.folder / "last.pt"
if last.exists():
    saved = torch.load(last)
    model.load_state_dict(saved["model"])
    optim.load_state_dict(saved["optim"])
    schedule.load_state_dict(saved["schedule"])
    first = saved["step"]

for step in range(first, args.steps):
    total = torch.zeros(())
    for micro in range(MICRO):
        loss = model(*batch(step, micro)) / MICRO
        loss.backward()
        total += loss.detach()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optim.step()
    schedule.step()
    optim.zero_grad()
    print(f"step {step} loss {total:.4f} norm {norm:.4f}")

model.eval()
with torch.no_grad():
    loss = model(*batch(-1, 0))
print(f"held-out loss {loss:.4f}")
args.folder.mkdir(exist_ok=True)
state = {"model": model.state_dict(), "optim": optim.state_dict()}
torch.save({**state, "schedule": schedule.state_dict(), "step": args.steps}, last)
torch.save(model.state_dict(), args.folder / "weights.pt")

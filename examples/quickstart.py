import os

import torch
from gpt import GPT, Block, GPTConfig

import graphshard

with torch.device("meta"):
    model = GPT(GPTConfig())
idx, targets = torch.randint(256, (2, 8, 128))
sharded = graphshard.compile(model, graphshard.BlockPolicy({Block}), example_inputs=(idx, targets))
sharded.init_weights(seed=0)
optimizer = torch.optim.AdamW(sharded.parameters(), lr=3e-4)
loss = sharded(idx, targets)
loss.backward()
optimizer.step()
if os.environ.get("RANK", "0") == "0":  # one rank prints
    print(sharded.plan, f"loss {loss.item():.3f}", sep="\n\n")

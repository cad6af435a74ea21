"""Train a small T5, an encoder and a decoder, with its blocks as units.

    torchrun --nproc-per-node 2 examples/train_t5.py
    torchrun --nproc-per-node 2 examples/train_t5.py --strategy SHARD_GRAD_OP --precision bf16

It reads a window of the Python standard library's source and writes the bytes that follow.
"""

from __future__ import annotations

import argparse
import gc
import os

import stdlib_bytes
import torch
import torch.distributed as dist
from transformers import T5Config, T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

import graphshard

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=8, help="sequences per rank and step")
    parser.add_argument("--strategy", default="FULL_SHARD")
    parser.add_argument("--precision", choices=list(DTYPES), default="fp32")
    return parser.parse_args()


def t5() -> T5ForConditionalGeneration:
    config = T5Config(
        vocab_size=256,
        d_model=64,
        d_kv=16,
        d_ff=128,
        num_layers=2,
        num_heads=4,
        decoder_start_token_id=0,
    )
    with torch.device("meta"):
        return T5ForConditionalGeneration(config).train()


def run(args: argparse.Namespace) -> None:
    data, _ = stdlib_bytes.load()
    dtype = DTYPES[args.precision]
    policy = graphshard.BlockPolicy(
        {T5Block},
        strategy=args.strategy,
        mixed_precision=dtype and graphshard.MixedPrecision(param_dtype=dtype),
    )
    sharded = graphshard.compile(t5(), policy)
    sharded.init_weights(seed=0)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=3e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=args.precision == "fp16")
    if RANK == 0:
        print(sharded.plan, "\n")
    torch.manual_seed(RANK)  # dropout draws from it
    for step in range(1, args.steps + 1):
        window, _ = stdlib_bytes.batch(data, size=args.batch, length=64, seed=step * WORLD + RANK)
        source, target = window.split([48, 16], dim=1)
        loss = sharded(input_ids=source, labels=target.contiguous()).loss
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        sharded.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if step % 20 == 0 and RANK == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")


def main() -> None:
    args = parse_args()
    torch.set_num_threads(1)
    if WORLD > 1:
        dist.init_process_group("gloo")
    run(args)
    if WORLD > 1:
        gc.collect()  # nothing may still refer to the group when the interpreter ends
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

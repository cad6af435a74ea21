"""Fine-tune a causal language model of transformers, sharded over ranks, with the usual options.

    torchrun --nproc-per-node 2 examples/finetune_causal_lm.py --cpu-offload on
    torchrun --nproc-per-node 2 examples/finetune_causal_lm.py --experiment out/run  # run it twice

The model is built on meta, from --model (a folder that `save_pretrained` wrote, streamed into the
shards) or as a small GPT-2 with random weights. It learns the Python standard library's own source,
byte by byte. With --experiment a sharded checkpoint is kept there, and a second run goes on from
it; --export writes what transformers' `from_pretrained` reads.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

import stdlib_bytes
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GPT2Config, PreTrainedModel

import graphshard

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", metavar="DIR", help="a folder written by save_pretrained")
    parser.add_argument("--layers", type=int, default=4, help="without --model")
    parser.add_argument("--width", type=int, default=128, help="without --model")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of this run")
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per rank and forward")
    parser.add_argument("--seq-length", type=int, default=128)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--numel-to-wrap", type=float, default=5e4, help="least elements of a unit")
    parser.add_argument("--no-reshard-after-forward", action="store_true", help="as ZeRO stage 2")
    parser.add_argument("--cpu-offload", choices=["on", "off"], default="off")
    parser.add_argument("--precision", choices=["fp32", "fp16", "bf16"], default="fp32")
    parser.add_argument("--update-freq", type=int, default=1, help="forwards per optimizer step")
    parser.add_argument("--checkpoint-activations", action="store_true")
    parser.add_argument("--offload-activations", action="store_true")
    parser.add_argument("--clip-norm", type=float, default=1.0)
    parser.add_argument("--experiment", metavar="DIR", type=Path, help="checkpoints go there")
    parser.add_argument("--export", metavar="DIR", type=Path, help="save_pretrained at the end")
    parser.add_argument("--log-freq", type=int, default=10)
    return parser.parse_args()


def policy_of(args: argparse.Namespace) -> graphshard.Policy:
    """The policy that the options ask for."""
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(args.precision)
    wanted = {"params": args.cpu_offload == "on", "activations": args.offload_activations}
    return graphshard.SizePolicy(
        args.numel_to_wrap,
        strategy="SHARD_GRAD_OP" if args.no_reshard_after_forward else "FULL_SHARD",
        mixed_precision=dtype and graphshard.MixedPrecision(dtype, reduce_dtype=torch.float32),
        offload=[what for what, is_wanted in wanted.items() if is_wanted] or None,
        recompute="units" if args.checkpoint_activations else None,
    )


def model_on_meta(args: argparse.Namespace) -> PreTrainedModel:
    if args.model:
        config = AutoConfig.from_pretrained(args.model)
    else:
        config = GPT2Config(
            vocab_size=256,
            n_positions=args.seq_length,
            n_embd=args.width,
            n_layer=args.layers,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
        )
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)


def memory(device: torch.device) -> str:
    """The memory of this rank after a step (valley), and at its highest (peak)."""
    if device.type == "cuda":
        valley, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
    else:
        unit = 1 if sys.platform == "darwin" else 1024
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        statm, valley = Path("/proc/self/statm"), float("nan")
        if statm.exists():
            valley = int(statm.read_text().split()[1]) * resource.getpagesize()
    return f"valley {valley / 2**20:,.0f} MiB  peak {peak / 2**20:,.0f} MiB"


class Trainer:
    """A sharded model, its optimizer, and where they are in training."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.data, _ = stdlib_bytes.load()
        self.step = 0
        model = model_on_meta(args)
        model.train()
        idx, _ = self.batch(0)
        self.model = graphshard.compile(
            model,
            policy_of(args),
            example_kwargs={"input_ids": idx, "labels": idx, "use_cache": False},
            device=device,
        )
        if args.model:
            self.model.load_safetensors(args.model)
        else:
            self.model.init_weights(seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        kind = "cpu" if args.cpu_offload == "on" else device.type
        self.scaler = torch.amp.GradScaler(kind, enabled=args.precision == "fp16")

    def batch(self, number: int) -> tuple[Tensor, Tensor]:
        idx, targets = stdlib_bytes.batch(
            self.data,
            size=self.args.batch_size,
            length=self.args.seq_length,
            seed=number * WORLD + RANK,
        )
        return idx.to(self.device), targets.to(self.device)

    def train_step(self) -> float:
        """One optimizer step over `--update-freq` batches; the mean loss of all ranks."""
        args = self.args
        total = torch.zeros((), device=self.device)
        for part in range(args.update_freq):
            idx, _ = self.batch(self.step * args.update_freq + part)
            last = part == args.update_freq - 1
            with contextlib.nullcontext() if last else self.model.no_sync():
                loss = self.model(input_ids=idx, labels=idx, use_cache=False).loss
                self.scaler.scale(loss / args.update_freq).backward()
            total += loss.detach().float() / args.update_freq
        self.scaler.unscale_(self.optimizer)
        self.model.clip_grad_norm_(args.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.step += 1
        if WORLD > 1:
            dist.all_reduce(total)
        return total.item() / WORLD


def say(*words: Any) -> None:
    if RANK == 0:
        print(*words, flush=True)


def run(args: argparse.Namespace, device: torch.device) -> None:
    torch.manual_seed(RANK)
    trainer = Trainer(args, device)
    say(trainer.model.plan, "\n")
    checkpoint = args.experiment and args.experiment / "checkpoint"
    if checkpoint and checkpoint.exists():
        extra = {"step": 0}
        trainer.model.load_checkpoint(checkpoint, trainer.optimizer, extra=extra)
        trainer.step = extra["step"]
        say(f"going on from step {trainer.step}")
    begin = time.perf_counter()
    for number in range(1, args.steps + 1):
        loss = trainer.train_step()
        if number % args.log_freq == 0 or number == args.steps:
            sequences = args.batch_size * args.update_freq * WORLD * number
            speed = sequences * args.seq_length / (time.perf_counter() - begin)
            say(f"step {trainer.step:4d}  loss {loss:.4f}  {speed:,.0f} tokens/s  {memory(device)}")
    if checkpoint:
        trainer.model.save_checkpoint(checkpoint, trainer.optimizer, extra={"step": trainer.step})
        say(f"checkpoint in {args.experiment}")
    if args.export:
        trainer.model.save_pretrained(args.export)
        say(f"exported to {args.export}")


def main() -> None:
    args = parse_args()
    local = int(os.environ.get("LOCAL_RANK", "0"))
    cuda = torch.cuda.device_count() > local
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if WORLD > 1:
        dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    run(args, device)
    if WORLD > 1:
        gc.collect()  # nothing may still refer to the group when the interpreter ends
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""`graphshard consolidate DIR OUT`: convert a sharded checkpoint to safetensors."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from graphshard.errors import CheckpointError
from graphshard.format import some_of
from graphshard.policy.precision import DTYPES
from graphshard.progress import Progress
from graphshard.state.consolidate import plan_consolidation


def add_consolidate(commands: Any, parse_bytes: Callable[[str], int]) -> None:
    """Add the command to the parser of all commands."""
    summary = "merge a sharded checkpoint into safetensors, one tensor in memory at a time"
    command: argparse.ArgumentParser = commands.add_parser(
        "consolidate", help=summary, description=summary
    )
    command.add_argument(
        "source",
        type=Path,
        metavar="DIR",
        help="a directory written by torch.distributed.checkpoint",
    )
    command.add_argument(
        "out", type=Path, metavar="OUT", help="a .safetensors file, or a directory for several"
    )
    command.add_argument(
        "--max-shard-size",
        type=parse_bytes,
        metavar="BYTES",
        help="of one file, e.g. 5GB; several get an index as transformers reads it",
    )
    command.add_argument(
        "--key", help='of the dict that holds the model (default: "model", or the only one)'
    )
    command.add_argument(
        "--dtype", choices=sorted(DTYPES), help="of floating point values (default: as they are)"
    )
    command.add_argument(
        "--trust", action="store_true", help="unpickle all of it, which may run its author's code"
    )
    command.add_argument("--times", action="store_true", help="say how long each stage took")
    command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    command.set_defaults(run=run_consolidate)


def run_consolidate(options: argparse.Namespace, progress: Progress) -> str:
    """Convert the checkpoint; return the written files, one per line, and the left-out keys."""
    if options.out.suffix in (".bin", ".pt", ".pth"):
        raise CheckpointError(f"{options.out} must be a .safetensors file or a directory")
    with progress.stage("read the metadata"):
        consolidation = plan_consolidation(
            options.source,
            options.out,
            key=options.key,
            max_shard_bytes=options.max_shard_size,
            dtype=DTYPES.get(options.dtype),
            trust=options.trust,
        )
    with progress.stage("write tensors", total=len(consolidation.tensors)):
        lines = [str(path) for path in consolidation.run(progress.advance)]
    if consolidation.left_out:
        lines.append(f"left out, since they are no tensors: {some_of(consolidation.left_out)}")
    return "\n".join(lines)

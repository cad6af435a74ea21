"""Save and load a sharded module: state dicts, optimizer state, checkpoint files.

A file of this folder is loaded when it is first asked for: a module can be compiled and trained
without checkpoints, which load much of torch.
"""

import importlib
import importlib.util
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from graphshard.state import checkpoints as checkpoints
    from graphshard.state import load as load
    from graphshard.state import optim as optim
    from graphshard.state import replicas as replicas
    from graphshard.state import save as save
    from graphshard.state import state_tensors as state_tensors


def __getattr__(name: str) -> ModuleType:
    full = f"{__name__}.{name}"
    if importlib.util.find_spec(full) is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(full)

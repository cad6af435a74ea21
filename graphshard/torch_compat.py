"""The one place that touches torch's private API, for torch 2.11 to 2.13.

Every accessor imports lazily and raises `UnsupportedTorchError` when this torch lacks the name, so
that a torch upgrade fails here, with a sentence, and nowhere else.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from graphshard.errors import UnsupportedTorchError

SUPPORTED = "torch 2.11 to 2.13"


def private(module: str, name: str) -> Any:
    """Attribute `name` of the private module `module`.

    Raises:
        UnsupportedTorchError: this torch has no such module or name.
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UnsupportedTorchError(
            f"torch {torch.__version__} has no {module}.{name}, which graphshard needs; "
            f"use {SUPPORTED}"
        ) from error

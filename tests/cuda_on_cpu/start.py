"""Replaces torch's operators behind its import, where the runtime of CPU threads is loaded.

Every process of the environment imports this first (cuda_on_cpu.pth, of make_runtime.py).
"""

from __future__ import annotations

import ctypes
import importlib.util
import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _AfterTorch(MetaPathFinder):
    """Finds torch once, and adds the operators behind its import."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        assert spec is not None
        assert spec.loader is not None
        load = spec.loader.exec_module

        def load_and_replace(module: ModuleType) -> None:
            load(module)
            from cuda_on_cpu import operators

            operators.install()

        spec.loader.exec_module = load_and_replace  # type: ignore[method-assign]
        return spec


if hasattr(ctypes.CDLL(None), "cuda_on_cpu_submit"):
    sys.meta_path.insert(0, _AfterTorch())

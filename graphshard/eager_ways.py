"""Models that have a way for compilers go the one they go in eager."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

_TRANSFORMERS = "transformers.utils.import_utils"


@contextlib.contextmanager
def eager_ways() -> Iterator[None]:
    """Let transformers take the tensors of a trace for those of eager.

    It asks whether a tensor is fake, and if so makes a mask where eager needs none: other bits,
    and more memory. What it asks torch (is this a compilation?) has torch's own answer.
    """
    module: Any = sys.modules.get(_TRANSFORMERS)
    asked = getattr(module, "is_fake_tensor", None)
    if asked is None:
        yield
        return
    module.is_fake_tensor = lambda value: False
    try:
        yield
    finally:
        module.is_fake_tensor = asked

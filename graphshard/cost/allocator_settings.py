"""Settings of torch's caching allocator, in the words of PYTORCH_CUDA_ALLOC_CONF."""

from __future__ import annotations

from dataclasses import dataclass

from graphshard.errors import CostError

KIB, MIB = 1 << 10, 1 << 20


@dataclass(frozen=True)
class AllocatorSettings:
    """Settings of torch's allocator, as in PYTORCH_CUDA_ALLOC_CONF.

    Args:
        expandable_segments: map pages behind a growing range in place of segments.
        max_split_bytes: cached blocks of this size or more are not split, and serve only requests
            of this size or more that leave at most 20 MiB of them; None for no limit.
        roundup_divisions: sizes are rounded up to the next of so many steps between two powers of
            2; 0 or 1 for multiples of 512 bytes.
        large_segment_bytes: of the segment that requests between 1 and 10 MiB share.
    """

    expandable_segments: bool = False
    max_split_bytes: int | None = None
    roundup_divisions: int = 0
    large_segment_bytes: int = 20 * MIB

    @classmethod
    def parse(cls, text: str) -> AllocatorSettings:
        """Read the text of PYTORCH_CUDA_ALLOC_CONF, such as "expandable_segments:True"."""
        values: dict[str, bool | int] = {}
        for entry in filter(None, (part.strip() for part in text.split(","))):
            name, colon, value = (part.strip() for part in entry.partition(":"))
            try:
                if not colon:
                    raise ValueError("no value")
                if name == "expandable_segments":
                    values[name] = {"true": True, "false": False}[value.lower()]
                elif name == "max_split_size_mb":
                    values["max_split_bytes"] = _at_least(value, 20) * MIB
                elif name == "large_segment_size_mb":
                    values["large_segment_bytes"] = _at_least(value, 20) * MIB
                elif name == "roundup_power2_divisions":
                    values["roundup_divisions"] = _power_of_2(value)
                elif name not in _WITHOUT_EFFECT:
                    raise CostError(
                        f"the allocator's setting {name!r} is not modelled; modelled are "
                        "expandable_segments, max_split_size_mb, roundup_power2_divisions (one "
                        "number) and large_segment_size_mb"
                    )
            except (KeyError, ValueError) as error:
                raise CostError(
                    f"the allocator's setting {entry!r} is malformed ({error}); write it as in "
                    "PYTORCH_CUDA_ALLOC_CONF, such as expandable_segments:True"
                ) from None
        return cls(**values)  # type: ignore[arg-type]

    def __str__(self) -> str:
        """The text that `parse` reads."""
        parts = []
        if self.expandable_segments:
            parts.append("expandable_segments:True")
        if self.max_split_bytes is not None:
            parts.append(f"max_split_size_mb:{self.max_split_bytes // MIB}")
        if self.roundup_divisions > 1:
            parts.append(f"roundup_power2_divisions:{self.roundup_divisions}")
        if self.large_segment_bytes != 20 * MIB:
            parts.append(f"large_segment_size_mb:{self.large_segment_bytes // MIB}")
        return ",".join(parts)


DEFAULT = AllocatorSettings()

NO_CACHE = "none"
"""The text for PYTORCH_NO_CUDA_MEMORY_CACHING=1."""


def allocator_settings(text: str) -> AllocatorSettings | None:
    """The settings that `text` names, as in PYTORCH_CUDA_ALLOC_CONF; None for "none"."""
    return None if text == NO_CACHE else AllocatorSettings.parse(text)


_WITHOUT_EFFECT = frozenset(
    {
        "release_lock_on_cudamalloc",
        "pinned_use_cuda_host_register",
        "pinned_num_register_threads",
        "pinned_use_background_threads",
        "pinned_reserve_segment_size_mb",
    }
)
"""Settings that change neither sizes nor places on the device."""


def _at_least(text: str, least: int) -> int:
    value = int(text)
    if value < least:
        raise ValueError(f"at least {least}")
    return value


def _power_of_2(text: str) -> int:
    value = int(text)
    if value < 1 or value & (value - 1):
        raise ValueError("a power of 2")
    return value

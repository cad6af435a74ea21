"""The colours of the page: those of Okabe and Ito, which colour-blind people tell apart.

Where there are more kinds than colours, the second kind of a colour is hatched.
"""

from __future__ import annotations

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
RED, SKY, YELLOW, GREY = "#D55E00", "#56B4E9", "#F0E442", "#9A9A9A"

PLAIN, HATCHED = False, True

SPANS: dict[str, tuple[str, bool]] = {
    "forward": (BLUE, PLAIN),
    "backward": (ORANGE, PLAIN),
    "all_gather": (GREEN, PLAIN),
    "reduce_scatter": (PURPLE, PLAIN),
    "all_reduce": (PURPLE, HATCHED),
    "to_device": (GREY, PLAIN),
    "to_host": (GREY, HATCHED),
    "compute waits": (RED, HATCHED),
    "optimizer": (SKY, PLAIN),
    "overhead": (SKY, HATCHED),
    "other": (YELLOW, PLAIN),
}
"""Colour and whether hatched of a span: by phase on the compute stream, elsewhere by op."""

MEMORY: dict[str, tuple[str, bool]] = {
    "shards": (BLUE, PLAIN),
    "copies of rows": (BLUE, HATCHED),
    "optimizer": (SKY, PLAIN),
    "optimizer's step": (SKY, HATCHED),
    "inputs and buffers": (GREY, PLAIN),
    "copied from the host": (GREY, HATCHED),
    "unsharded parameters": (GREEN, PLAIN),
    "saved for backward": (ORANGE, PLAIN),
    "recomputed": (ORANGE, HATCHED),
    "gradients to reduce": (PURPLE, PLAIN),
    "communication buffers": (PURPLE, HATCHED),
    "gradients": (RED, PLAIN),
    "gradients accumulated by no_sync": (RED, HATCHED),
    "at work": (YELLOW, PLAIN),
    "returned": (YELLOW, HATCHED),
}
"""Colour and whether hatched of a category of memory, from the longest-lived at the bottom."""

CLASSES = (SKY, ORANGE, GREEN, PURPLE, YELLOW, GREY, BLUE, RED)
"""Colours of the classes of units, in the order of the plan."""

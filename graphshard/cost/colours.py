"""The colours of the picture of a step and of the report: each fill means one thing in both.

The hue says what is held, worked on or moved, from the colours of Okabe and Ito, in steps of
lightness; the hatch tells kinds of one hue apart, and crosses are transfers. Units are grey.
"""

from __future__ import annotations

from typing import NamedTuple

BLUE, SKY, GREEN, MINT = "#0072B2", "#56B4E9", "#009E73", "#8FDDC4"
PLUM, PURPLE, YELLOW, BROWN = "#7B3F6E", "#CC79A7", "#F0E442", "#8A6240"
PEACH, ORANGE, RED = "#FFC38A", "#E69F00", "#D55E00"


class Fill(NamedTuple):
    """What an area is filled with; the hatches are those that Bokeh and matplotlib both know."""

    colour: str
    hatch: str
    """One of `HATCHES`, or "" for none."""
    meaning: str


HATCHES = ("/", "x", ".")

_OPTIMIZER = Fill(YELLOW, "", "the optimizer: its update, and its state")

WAIT = "compute waits"

TIMES: dict[str, Fill] = {
    "forward": Fill(PEACH, "", "computes the forward pass"),
    "backward": Fill(ORANGE, "", "computes the backward pass"),
    WAIT: Fill(RED, "", "nothing to compute until a transfer ends: exposed"),
    "optimizer": _OPTIMIZER,
    "overhead": Fill(PEACH, "/", "time of a step outside of forward, backward and optimizer"),
    "all_gather": Fill(SKY, "x", "brings the shards of parameters together from all ranks"),
    "reduce_scatter": Fill(PURPLE, "x", "sums gradients of all ranks; each keeps its shard"),
    "all_reduce": Fill(PLUM, "x", "sums gradients of all ranks; each keeps all"),
    "to_device": Fill(BROWN, "x", "copies from the host's memory to the device"),
    "to_host": Fill(BROWN, ".", "copies from the device to the host's memory"),
    "other": Fill(ORANGE, "/", "work of no phase, and transfers of other kinds"),
}
"""The fill of a span: by phase on the compute stream, elsewhere by op."""

MEMORY: dict[str, Fill] = {
    "shards": Fill(BLUE, "", "the rank's own part of the parameters"),
    "copies of rows": Fill(BLUE, "/", "parts of parameters, copied to see writes into them"),
    "optimizer": _OPTIMIZER,
    "optimizer's step": Fill(YELLOW, "/", "what the update takes while it runs"),
    "inputs and buffers": Fill(BROWN, "", "the batch, and buffers of the model"),
    "copied from the host": Fill(BROWN, "/", "what was kept in the host's memory, back again"),
    "unsharded parameters": Fill(SKY, "", "whole parameters, gathered for their use"),
    "saved for backward": Fill(GREEN, "", "activations that backward needs"),
    "recomputed": Fill(GREEN, "/", "activations that backward computes once more"),
    "gradients to reduce": Fill(PURPLE, "", "whole gradients, before they are reduced"),
    "communication buffers": Fill(PURPLE, "/", "what collectives read and write"),
    "gradients": Fill(PLUM, "", "the rank's own part of the gradients"),
    "gradients accumulated by no_sync": Fill(PLUM, "/", "whole gradients of earlier batches"),
    "at work": Fill(MINT, "", "results that are used up within their phase"),
    "returned": Fill(MINT, "/", "what the step returns"),
}
"""The fill of a category of memory, from the longest-lived at the bottom."""

UNKNOWN = Fill("#FFFFFF", "x", "of a kind without a colour")

FAR = 2.5
"""The device's memory is on the scale of a picture up to so many times the peak."""

UNITS = ("#C4CAD1", "#9DA5AE", "#DFE3E7", "#7E8791")
"""Greys of the classes of units, in the order of the plan; each tile has its name, too."""


def stream_meaning(stream: str) -> str:
    """What runs on a row of the timeline, for people who do not know its name."""
    if stream == "compute":
        return "the device's kernels, in the order of the program"
    if stream.startswith("network"):
        group = stream.removeprefix("network (").removesuffix(")")
        return f"the communication stream of the group {group!r}: all gathers and reduces in it"
    return "copies beside compute, on a stream of their own"

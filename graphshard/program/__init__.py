"""The program: one graph of a step, its vocabulary, and the questions one can ask of it."""

from graphshard.program.pass_protocol import Pass
from graphshard.program.program import BACKWARD, FORWARD, Event, ParamEntry, Program

__all__ = ["BACKWARD", "FORWARD", "Event", "ParamEntry", "Pass", "Program"]

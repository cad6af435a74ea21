"""The operators of a program at the path by which dumped code imports them."""

import sys

from graphshard.program import ops
from graphshard.program.ops import *  # noqa: F403  # for type checkers

sys.modules[__name__] = ops

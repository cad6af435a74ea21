"""Decide the units, layouts and options of a model on a mesh, without a graph."""

from graphshard.planning.layout import ParamLayout, Unit, UnitOptions
from graphshard.planning.plan import ShardingPlan

__all__ = ["ParamLayout", "ShardingPlan", "Unit", "UnitOptions"]

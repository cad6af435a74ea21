"""What was decided for a model and a mesh: units, layouts, options. Needs no graph."""

from graphshard.planning.layout import ParamLayout, Unit
from graphshard.planning.options import UnitOptions
from graphshard.planning.plan import ShardingPlan

__all__ = ["ParamLayout", "ShardingPlan", "Unit", "UnitOptions"]

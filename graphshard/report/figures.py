"""The figures of the page, empty: the page's script fills them from the estimate's plain data."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from bokeh.embed import json_item
from bokeh.layouts import gridplot
from bokeh.models import (
    BoxZoomTool,
    CDSView,
    ColumnDataSource,
    FactorRange,
    GroupFilter,
    HoverTool,
    InversionFilter,
    Label,
    LabelSet,
    NumeralTickFormatter,
    PanTool,
    Range1d,
    ResetTool,
    SaveTool,
    Span,
    TapTool,
    WheelZoomTool,
)
from bokeh.plotting import figure

from graphshard.cost.colours import HATCHES, MEMORY, UNITS, UNKNOWN
from graphshard.cost.streams import COMPUTE

TREEMAP_SIZE = 3.0, 1.0
"""Width and height of the treemap, in units of its axes."""

_ID = re.compile(r'"(p\d+|[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})"')
"""What bokeh names its models and documents."""

_TIP = '<div style="max-width:340px;white-space:pre-wrap;font:13px sans-serif">@tip</div>'
_TEXT = "13px"
_SEEN = UNITS[-1]  # before paper of either scheme
_DARK = {"fill_color": "#222222", "line_color": "white"}
_HATCH: dict[str, Any] = {
    "hatch_color": "#222222",
    "hatch_alpha": 0.5,
    "hatch_scale": 8,
}
_BAR = 0.8  # of a row's height
_LEFT, _RIGHT = 150, 12  # pixels beside the frames of figures that share an axis


def figures(
    streams: Sequence[str],
    categories: Sequence[str],
    *,
    seconds: float,
    time_unit: str,
    memory_unit: str,
    measured: bool,
    what_if: bool,
) -> dict[str, Any]:
    """Every figure of a page by the id of its place there, as items for BokehJS to embed.

    The `streams` are the rows of the timeline, the `categories` the layers of memory, from the
    bottom. The step is `seconds` of `time_unit` long.
    """
    made = {
        "treemap": treemap(),
        "step": step(streams, categories, seconds, time_unit, memory_unit),
    }
    if what_if:
        made["scatter"] = what_if_scatter(time_unit, memory_unit)
    if measured:
        made["trace"] = measured_scatter(time_unit)
    items = {name: json_item(model, f"gs-{name}") for name, model in made.items()}
    return _renumbered(items)


def _renumbered(items: Mapping[str, Any]) -> dict[str, Any]:
    """The items with ids that do not depend on what the process drew before, or on chance."""
    new: dict[str, str] = {}
    text = _ID.sub(
        lambda found: f'"{new.setdefault(found[1], f"g{len(new) + 1}")}"', json.dumps(items)
    )
    renumbered: dict[str, Any] = json.loads(text)
    return renumbered


def treemap() -> Any:
    """A tile for each unit."""
    width, height = TREEMAP_SIZE
    columns = ("left", "right", "top", "bottom", "x", "y", "colour", "label", "unit", "tip")
    source = _empty("tiles", *columns)
    plot = figure(
        name="treemap",
        height=300,
        sizing_mode="stretch_width",
        x_range=Range1d(0, width),
        y_range=Range1d(0, height),
        tools=[TapTool(), HoverTool(tooltips=_TIP, point_policy="follow_mouse")],
        toolbar_location=None,
    )
    plot.axis.visible = plot.grid.visible = False
    plot.quad(
        "left",
        "right",
        "top",
        "bottom",
        source=source,
        fill_color="colour",
        line_color="white",
        line_width=1.5,
        selection_line_color="black",
        selection_line_width=3,
        nonselection_fill_alpha=1,
        nonselection_line_color="white",
    )
    labels = LabelSet(
        x="x",
        y="y",
        text="label",
        source=source,
        text_align="center",
        text_baseline="middle",
        text_font_size=_TEXT,
        text_color="#000000",
    )
    plot.add_layout(labels)
    return _legible(plot)


def step(
    streams: Sequence[str],
    categories: Sequence[str],
    seconds: float,
    time_unit: str,
    memory_unit: str,
) -> Any:
    """The streams over time, and live memory below them on the same axis."""
    along = Range1d(0, seconds, bounds=(0, seconds), min_interval=seconds * 1e-5)
    label = f"{time_unit} after the step began"
    rows = FactorRange(*reversed(streams))
    timeline = _over_time(along, label, 130 + 34 * len(streams), y_range=rows)
    timeline.ygrid.visible = False
    bar: dict[str, Any] = {"y": "stream", "left": "left", "right": "right", "height": _BAR}
    spans = _empty("spans", "stream", "left", "right", "colour", "tip")
    computes = GroupFilter(column_name="stream", group=COMPUTE)
    # A tooltip beside the mouse would hide the next spans: it stands above the first row, and below
    # others.
    for rows_of, side in ((computes, "above"), (InversionFilter(operand=computes), "below")):
        bars = timeline.hbar(
            **bar,
            source=spans,
            view=CDSView(filter=rows_of),
            fill_color="colour",
            line_color="white",
            line_width=0.3,
        )
        follow = {"point_policy": "follow_mouse", "attachment": side}
        timeline.add_tools(HoverTool(renderers=[bars], tooltips=_TIP, **follow))
    # BokehJS makes a canvas for each bar whose hatch is a column.
    for hatch in HATCHES:
        source = _empty(f"hatched {hatch}", "stream", "left", "right")
        look = {"fill_alpha": 0, "line_color": None, "hatch_pattern": hatch}
        timeline.hbar(**bar, source=source, **look, **_HATCH)
    memory = _over_time(along, label, 300, y_range=Range1d(0, 1, name="height"))
    memory.yaxis.axis_label = f"{memory_unit} alive"
    memory.yaxis.formatter = NumeralTickFormatter(format="0,0.[00]")
    # BokehJS never ends drawing an area without points.
    borders = [f"y{number}" for number in range(len(categories) + 1)]
    flat = {name: [0.0, 0.0] for name in ("seconds", *borders)}
    source = ColumnDataSource(flat, name="memory")
    for number, name in enumerate(categories):
        fill = MEMORY.get(name, UNKNOWN)
        memory.varea_step(
            "seconds",
            f"y{number}",
            f"y{number + 1}",
            step_mode="after",
            source=source,
            fill_color=fill.colour,
            **({"hatch_pattern": fill.hatch, **_HATCH} if fill.hatch else {}),
        )
    peak = _empty("peak", "seconds", "bytes")
    memory.scatter("seconds", "bytes", source=peak, size=12, marker="star", **_DARK)
    memory.add_layout(_line("width", "capacity", dash="dashed"))
    room = Label(name="room", x=6, y=4, x_units="screen", text="", text_font_size=_TEXT)
    memory.add_layout(room)
    for plot in (timeline, memory):
        plot.add_layout(_line("height", "cursor"))
    return gridplot(
        [[timeline], [memory]],
        sizing_mode="stretch_width",
        toolbar_location="above",
        merge_tools=True,
        toolbar_options={"logo": None},
    )


def what_if_scatter(time_unit: str, memory_unit: str) -> Any:
    """A point for each policy: the step's time against its peak."""
    plot = _scatter("scatter", 340, f"{time_unit} a step", f"{memory_unit} at the peak")
    plot.scatter(
        "x",
        "y",
        source=_empty("points", "x", "y", "marker", "colour", "tip"),
        size=14,
        marker="marker",
        fill_color="colour",
        line_color=_SEEN,
        nonselection_fill_alpha=0.8,
        nonselection_line_alpha=1,
        selection_line_width=3,
    )
    plot.add_layout(_line("width", "capacity", dash="dashed"))
    return plot


def measured_scatter(time_unit: str) -> Any:
    """A point for each event: its predicted against its measured time, on logarithmic axes."""
    axes = {"x_axis_type": "log", "y_axis_type": "log"}
    plot = _scatter("trace", 380, f"{time_unit} predicted", f"{time_unit} measured", **axes)
    plot.line("x", "y", source=_empty("equal", "x", "y"), line_dash="dashed", color=_SEEN)
    plot.scatter(
        "x",
        "y",
        source=_empty("events", "x", "y", "marker", "colour", "tip"),
        size=9,
        marker="marker",
        fill_color="colour",
        fill_alpha=0.7,
        line_color=_SEEN,
    )
    return plot


def _scatter(name: str, height: int, x_label: str, y_label: str, **options: Any) -> Any:
    plot = figure(
        name=name,
        height=height,
        sizing_mode="stretch_width",
        tools=[TapTool(), HoverTool(tooltips=_TIP), PanTool(), WheelZoomTool(), ResetTool()],
        toolbar_location="above",
        x_axis_label=x_label,
        y_axis_label=y_label,
        min_border_left=_LEFT,
        **options,
    )
    plot.toolbar.logo = None
    return _legible(plot)


def _empty(name: str, *columns: str) -> ColumnDataSource:
    return ColumnDataSource({column: [] for column in columns}, name=name)


def _over_time(along: Range1d, label: str, height: int, **options: Any) -> Any:
    plot = figure(
        height=height,
        sizing_mode="stretch_width",
        x_range=along,
        x_axis_label=label,
        tools=[],
        min_border_left=_LEFT,
        min_border_right=_RIGHT,
        **options,
    )
    box = BoxZoomTool(dimensions="width")
    wheel = WheelZoomTool(dimensions="width", modifiers={"ctrl": True})
    plot.add_tools(box, PanTool(dimensions="width"), wheel, ResetTool(), SaveTool())
    plot.toolbar.active_drag = box
    plot.toolbar.active_scroll = wheel
    return _legible(plot)


def _legible(plot: Any) -> Any:
    """Give a plot's axes large labels, and the page's background."""
    plot.axis.major_label_text_font_size = plot.axis.axis_label_text_font_size = _TEXT
    plot.background_fill_color = plot.border_fill_color = None
    return plot


def _line(dimension: str, name: str, dash: str = "solid") -> Span:
    """A line across a plot, hidden until the page's script places it."""
    return Span(
        name=name,
        dimension=dimension,
        location=0,
        visible=False,
        line_dash=dash,
        line_width=1.5,
    )

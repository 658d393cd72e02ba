"""Charts of the exactness error, of depth and rank per device kind, and of waiting."""

from __future__ import annotations

from typing import Any, Literal

import altair as alt

from fedstrata.report.drawing import (
    BLUE,
    CURVE_HEIGHT,
    DARK_ORANGE,
    GREENS,
    HALF,
    IDLE,
    INK,
    LEFT_EXTENT,
    ORANGE,
    RED,
    SOFT,
    Data,
    count_axis,
    map_axes,
    map_size,
    round_axis,
    row_axis,
    rows_height,
    sampled_words,
)
from fedstrata.report.levels import LOG_SPAN
from fedstrata.report.strata import Devices, Exactness
from fedstrata.report.view import Point, RunView

_LABEL_GAP = 13
_MOST_POINTS = 40


def exactness_chart(view: RunView, exactness: Exactness, data: Data) -> alt.LayerChart:
    """The error, or the distance, per round: relative to the product and to the update."""
    if exactness.name == "distance_to_mean":
        words = "of the robust mean from the plain one; it is meant to differ"
        title = "Distance to the mean"
    else:
        words, title = "of the merged products from the mean of the clients' products", "Exactness error"
    series = {
        "of the product": (exactness.product, BLUE, BLUE),
        "of the update": (exactness.update, ORANGE, DARK_ORANGE),
    }
    values = [p.value for points, _, _ in series.values() for p in points]
    positive = [v for v in values if v > 0]
    is_log = bool(positive) and max(positive) > LOG_SPAN * min(positive)
    if is_log:
        words += "; logarithmic" + ("; zeros are left out" if len(positive) < len(values) else "")
        series = {name: ([p for p in points if p.value > 0], c, ink) for name, (points, c, ink) in series.items()}
    top, bottom = max(values), min(positive) if is_log else 0.0
    scale = alt.Scale(type="log", domain=[bottom, top]) if is_log else alt.Scale(domain=[0, top or 1.0])
    axis = alt.Axis(tickCount=5, minExtent=LEFT_EXTENT, format=".0e" if is_log or top < 1e-3 else ".2~g")
    return _lines(view, series, scale, axis, alt.TitleParams(title, subtitle=words), data)


def wait_chart(view: RunView, devices: Devices, data: Data) -> alt.LayerChart | None:
    """How long clients wait for the slowest one: planned, and by the device profiles."""
    planned, simulated = devices.planned_wait, devices.simulated_wait
    if not planned and not simulated:
        return None
    series = {"planned": (planned, BLUE, BLUE), "simulated": (simulated, ORANGE, DARK_ORANGE)}
    top = max(p.value for points in (planned, simulated) for p in points)
    top = max(top, devices.max_wait or 0.0, 0.01) * 1.1
    axis = alt.Axis(tickCount=5, minExtent=LEFT_EXTENT, format=".0%")
    title = alt.TitleParams("Waiting for the slowest client", subtitle="mean over the cohort, as a share of its time")
    scale = alt.Scale(domain=[0, top])
    chart = _lines(view, series, scale, axis, title, data, is_close=True)
    if devices.max_wait is None or not planned:
        return chart
    limit = data.chart([{"value": devices.max_wait}])
    y = alt.Y("value:Q", scale=scale)
    rule = limit.mark_rule(color=RED, strokeDash=[5, 4], strokeWidth=1.2).encode(y=y)
    text = limit.mark_text(text=f"accepted {devices.max_wait:.0%}", color=RED, fontSize=11, align="left", dy=-7)
    return alt.layer(chart, rule, text.encode(x=alt.value(4), y=y), title=title, width=HALF, height=CURVE_HEIGHT)


def _lines(
    view: RunView,
    series: dict[str, tuple[list[Point], str, str]],
    scale: alt.Scale,
    axis: alt.Axis,
    title: alt.TitleParams,
    data: Data,
    is_close: bool = False,
) -> alt.LayerChart:
    """Lines with their names at the right end, one above the other.

    Where lines may lie upon each other (`is_close`), the first is wider, so that it shows below the second.
    """
    y = alt.Y("value:Q", scale=scale, axis=axis, title=None)
    x = round_axis(view.num_rounds)
    layers: list[Any] = []
    for i, (points, color, _) in enumerate(series.values()):
        if points:
            chart = data.points(points).encode(x=x, y=y)
            layers.append(chart.mark_line(color=color, strokeWidth=4 if is_close and not i else 2))
            if len(points) <= _MOST_POINTS:
                layers.append(chart.mark_point(color=color, filled=True, size=28, opacity=1))
    drawn = {name: points[-1] for name, (points, _, _) in series.items() if points}
    order = sorted(drawn, key=lambda name: drawn[name].value)
    for place, name in enumerate(order):
        # names stand at the end of their lines, the lower one below, the higher one above
        shift = _LABEL_GAP / 2 if len(order) == 2 and place == 0 else -_LABEL_GAP / 2 if len(order) == 2 else 0
        look = {"text": name, "color": series[name][2], "fontSize": 11, "align": "left", "dx": 7, "dy": shift}
        layers.append(data.points([drawn[name]]).mark_text(**look).encode(x=x, y=y))
    return alt.layer(*layers, title=title, width=HALF, height=CURVE_HEIGHT)


def kind_map(view: RunView, devices: Devices, data: Data, what: Literal["depth", "rank"] = "depth") -> alt.LayerChart:
    """Depth or rank per device kind and round, as means over the clients in the round."""
    rows = [k.kind for k in devices.kinds]
    width, height = map_size(len(view.rounds), len(rows))
    axes = map_axes(view.rounds, rows, None, LEFT_EXTENT)
    shown = set(view.rounds)
    values: list[dict[str, Any]] = [
        {"round": p.server_round, "row": k.kind, "value": p.value, "text": f"{p.value:.3g}"}
        for k in devices.kinds
        for p in (k.depth if what == "depth" else k.rank)
        if p.server_round in shown
    ]
    most = max((v["value"] for v in values), default=1.0)
    everything = data.chart([{"round": r, "row": k} for r in view.rounds for k in rows])
    layers: list[Any] = [everything.mark_rect(color=IDLE).encode(**axes)]
    color = alt.Color("value:Q", scale=alt.Scale(domain=[0, most], range=list(GREENS)), legend=None)
    chart = data.chart(values)
    layers.append(chart.mark_rect().encode(**axes, color=color))
    longest = max((len(v["text"]) for v in values), default=1)
    if width / len(view.rounds) >= 8 + 6 * longest:
        ink = alt.condition(f"datum.value >= {most / 2}", alt.value("white"), alt.value(INK))
        layers.append(chart.mark_text(fontSize=11).encode(**axes, text="text:N", color=ink))
    names = {"depth": "Blocks per device kind", "rank": "Rank per device kind"}
    words = "mean over the clients in the round; gray: none took part" + sampled_words(view.rounds, view.num_rounds)
    return alt.layer(*layers, title=alt.TitleParams(names[what], subtitle=words), width=width, height=height)


def rank_bars(view: RunView, devices: Devices, data: Data) -> alt.LayerChart:
    """The plan's rank of every block."""
    rows = [s for s in view.strata if s.isdecimal()]
    values = [{"row": s, "value": r} for s, r in devices.block_ranks.items()]
    y = row_axis(rows, None, LEFT_EXTENT)
    x = count_axis(max(devices.block_ranks.values()), "rank")
    chart = data.chart(values)
    bars = chart.mark_bar(color=BLUE, opacity=0.75).encode(x=x, y=y)
    layers: list[Any] = [bars]
    if rows_height(len(rows)) / len(rows) >= 12:
        look = {"align": "left", "dx": 4, "fontSize": 11, "color": SOFT}
        layers.append(chart.mark_text(**look).encode(x=x, y=y, text="value:Q"))
    title = alt.TitleParams("Rank of each block", subtitle="the plan's, the same for every client")
    return alt.layer(*layers, title=title, width=HALF - 140, height=rows_height(len(rows)))

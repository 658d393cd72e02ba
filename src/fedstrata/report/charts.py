"""The charts of a run's picture, in Altair. Imported only when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import vl_convert

from fedstrata.core.units import format_bytes
from fedstrata.report.drawing import (
    BLUE,
    BLUES,
    BYTES_HEIGHT,
    CURVE_HEIGHT,
    DARK_ORANGE,
    FONT,
    GREENS,
    HALF,
    ID_WIDTH,
    IDLE,
    INK,
    LEFT_EXTENT,
    ORANGE,
    RED,
    SOFT,
    WHOLE,
    Data,
    empty_chart,
    gradient_legend,
    map_axes,
    map_size,
    round_axis,
    round_domain,
    sampled_words,
)
from fedstrata.report.strata import StrataView
from fedstrata.report.strata_charts import strata_charts
from fedstrata.report.view import Point, RunView, round_ticks

_MOST_BARS = 30


def draw_svg(view: RunView, why: StrataView) -> str:
    """The whole picture as SVG text, about 1200 px wide.

    Args:
        view: Curves, maps and bytes.
        why: Scores, selection, allocation and exactness; charts without records are left out.
    """
    data = Data()
    upper = [draw(view, data) for draw in (_loss_chart, _accuracy_chart, _stratum_map, _client_map)]
    upper += strata_charts(view, why, data)
    grid = alt.concat(*upper, columns=2, align="each", spacing=34).resolve_scale(color="independent")
    title = alt.TitleParams(view.title, subtitle=view.subtitle, fontSize=19, subtitleFontSize=12, offset=22)
    chart = (
        alt.vconcat(grid, _bytes_chart(view, data), spacing=34, background="white", padding=18, title=title)
        .resolve_scale(color="independent")
        .configure(font=FONT)
        .configure_title(anchor="start", color=INK, subtitleColor=SOFT, fontSize=14, subtitleFontSize=11, frame="group")
        .configure_view(stroke=None)
        .configure_axis(
            labelColor=SOFT, titleColor=SOFT, titleFontWeight="normal", labelFontSize=11, titleFontSize=11,
            domainColor="#bbbbbb", tickColor="#bbbbbb", gridColor="#eeeeee", labelLimit=ID_WIDTH, labelFlush=False,
        )
        .configure_legend(labelColor=SOFT, titleColor=SOFT, titleFontWeight="normal", labelFontSize=11)
    )  # fmt: skip
    spec = chart.to_dict() | {"datasets": data.rows}
    return str(vl_convert.vegalite_to_svg(spec))


def _loss_chart(view: RunView, data: Data) -> alt.LayerChart:
    title = alt.TitleParams("Training loss", subtitle="mean over the cohort's steps")
    if not view.loss:
        return empty_chart(data, title, "no client finished a step")
    layers = _curve(view, data, view.loss, INK, alt.Scale(nice=True, zero=len(view.loss) == 1), LEFT_EXTENT)
    layers.append(_end_label(data, view.loss[-1], INK))
    return alt.layer(*layers, title=title, width=HALF, height=CURVE_HEIGHT)


def _accuracy_chart(view: RunView, data: Data) -> alt.LayerChart:
    title = alt.TitleParams("Validation accuracy", subtitle=view.accuracy_of)
    scale = alt.Scale(domain=[0, 1])
    layers: list[Any] = _curve(view, data, view.accuracy, BLUE, scale, _right_extent(view)) if view.accuracy else []
    start, end = round_domain(view.num_rounds)
    best = next((p for p in view.accuracy if p.server_round == view.best_round), None)
    late = best is None or best.server_round > start + 0.6 * (end - start)
    base, test = view.base_accuracy, view.test_accuracy
    if base is not None:
        below = test is not None and base < test
        at = alt.value(HALF)
        layers += _rule(view, data, base, SOFT, f"untouched model on test {base:.3f}", at, "right", below, [5, 4])
    if test is not None:
        below = base is not None and test <= base
        x, align = (4, "left") if late else (HALF, "right")  # away from the label of the best round
        layers += _rule(view, data, test, RED, f"test {test:.3f}", alt.value(x), align, below, [1, 0])
    if not layers:
        return empty_chart(data, title, "no validation set")
    if best is not None:
        point = data.points([best]).encode(x=round_axis(view.num_rounds), y=alt.Y("value:Q", scale=scale))
        layers.append(point.mark_point(color=BLUE, filled=True, size=90, opacity=1))
        near_base = base is not None and 0 <= best.value - base < 0.15
        above = near_base or best.value < 0.2 or test is None or best.value >= test
        look = {"text": f"best: round {best.server_round}, {best.value:.3f}", "fontSize": 11, "fontWeight": "bold"}
        look |= {"align": "right" if late else "left", "dx": 6 if late else 0, "dy": -14 if above else 16}
        layers.append(point.mark_text(color="white", stroke="white", strokeWidth=4, **look))
        layers.append(point.mark_text(color=BLUE, **look))
    return alt.layer(*layers, title=title, width=HALF, height=CURVE_HEIGHT)


def _curve(view: RunView, data: Data, points: Sequence[Point], color: str, scale: alt.Scale, extent: int) -> list[Any]:
    y = alt.Y("value:Q", scale=scale, title=None, axis=alt.Axis(tickCount=5, minExtent=extent))
    chart = data.points(points).encode(x=round_axis(view.num_rounds), y=y)
    layers = [chart.mark_line(color=color, strokeWidth=2)]
    if len(points) <= 40:
        layers.append(chart.mark_point(color=color, filled=True, size=28, opacity=1))
    return layers


def _rule(
    view: RunView, data: Data, value: float, color: str, words: str, x: Any, align: str, below: bool, dash: list[int]
) -> list[Any]:
    chart = data.chart([{"value": value}])
    axis = alt.Axis(tickCount=5, minExtent=_right_extent(view))
    y = alt.Y("value:Q", scale=alt.Scale(domain=[0, 1]), title=None, axis=axis)
    rule = chart.mark_rule(color=color, strokeDash=dash, strokeWidth=1.2).encode(y=y)
    text = chart.mark_text(text=words, color=color, fontSize=11, align=align, dy=10 if below else -8)
    return [rule, text.encode(x=x, y=y)]


def _end_label(data: Data, point: Point, color: str) -> Any:
    """The last value, right of its point."""
    chart = data.points([point]).mark_text(color=color, fontSize=11, align="left", dx=7)
    return chart.encode(x="round:Q", y="value:Q", text=alt.Text("value:Q", format=".3f"))


def _stratum_map(view: RunView, data: Data) -> alt.LayerChart:
    most = max(c.num_clients for c in view.stratum_cells)
    width, height = map_size(len(view.rounds), len(view.strata))
    values = [{"round": c.server_round, "row": c.stratum, "count": c.num_clients} for c in view.stratum_cells]
    axes = map_axes(view.rounds, view.strata, "block (0 at the input)", LEFT_EXTENT)
    trained = data.chart([v for v in values if v["count"]])
    numbers = _has_numbers(view, width, height, len(view.strata))
    color = _scale("count", (1, max(most, 2)), BLUES, None if numbers else "clients")
    layers = [_cells(data.chart(values), axes).mark_rect(color=IDLE)]
    layers.append(_cells(trained, axes).mark_rect().encode(color=color))
    if numbers:
        layers.append(_numbers(trained, axes, 0.5 * (1 + max(most, 2))))
    words = "how many clients trained it; gray: nobody" + sampled_words(view.rounds, view.num_rounds)
    title = alt.TitleParams("Who trained which block", subtitle=words)
    return alt.layer(*layers, title=title, width=width, height=height)


def _client_map(view: RunView, data: Data) -> alt.LayerChart:
    width, height = map_size(len(view.rounds), len(view.clients))
    axes = map_axes(view.rounds, view.clients, None, _right_extent(view))
    everything = [{"round": r, "row": c} for r in view.rounds for c in view.clients]
    good = [
        {"round": c.server_round, "row": c.client, "count": c.num_blocks}
        for c in view.client_cells
        if c.num_blocks is not None
    ]
    failed = [{"round": c.server_round, "row": c.client} for c in view.client_cells if c.num_blocks is None]
    numbers = _has_numbers(view, width, height, len(view.clients))
    layers = [_cells(data.chart(everything), axes).mark_rect(color=IDLE)]
    if good:
        chart = data.chart(good)
        color = _scale("count", (0, view.num_blocks), GREENS, None if numbers else "blocks")
        layers.append(_cells(chart, axes).mark_rect().encode(color=color))
        if numbers:
            layers.append(_numbers(chart, axes, 0.5 * view.num_blocks))
    if failed:
        chart = data.chart(failed)
        layers.append(_cells(chart, axes).mark_rect(color=RED))
        if numbers:
            layers.append(_cells(chart, axes).mark_text(text="×", color="white", fontSize=12))
    sampled = f" ({len(view.clients)} of {view.num_clients} clients)" if len(view.clients) < view.num_clients else ""
    words = f"of {view.num_blocks}; gray: not drawn; red: failed" + sampled_words(view.rounds, view.num_rounds)
    title = alt.TitleParams(f"How many blocks each client trained{sampled}", subtitle=words)
    return alt.layer(*layers, title=title, width=width, height=height)


def _right_extent(view: RunView) -> int:
    """Room for the client ids, about 6.4 px a character, left of both charts of the right column."""
    return max(LEFT_EXTENT, min(ID_WIDTH, round(6.4 * max(len(c) for c in view.clients)))) + 8


def _cells(chart: Any, axes: dict[str, Any]) -> Any:
    return chart.mark_rect().encode(**axes)


def _scale(field: str, domain: tuple[int, int], colors: tuple[str, str], legend: str | None) -> alt.Color:
    bar = gradient_legend(legend, sorted({*domain}), "d") if legend else None
    return alt.Color(f"{field}:Q", scale=alt.Scale(domain=list(domain), range=list(colors)), legend=bar)


def _has_numbers(view: RunView, width: int, height: int, num_rows: int) -> bool:
    """Whether cells are large enough to read a number in them."""
    return width / len(view.rounds) >= 18 and height / num_rows >= 12


def _numbers(chart: Any, axes: dict[str, Any], middle: float) -> Any:
    color = alt.condition(f"datum.count >= {middle}", alt.value("white"), alt.value(INK))
    text = chart.mark_text(fontSize=11).encode(text=alt.Text("count:Q", format="d"), color=color)
    return text.encode(**axes)


def _bytes_chart(view: RunView, data: Data) -> alt.LayerChart:
    series = {"down": (view.downlink, ORANGE), "up": (view.uplink, BLUE)}
    inks = {"down": DARK_ORANGE, "up": BLUE}
    sums = {name: sum(p.value for p in points) for name, (points, _) in series.items()}
    unit, size = _unit(max(p.value for points, _ in series.values() for p in points))
    heights = [p.value / size for points, _ in series.values() for p in points]
    values = [
        {"round": p.server_round, "value": p.value / size, "direction": name}
        for name, (points, _) in series.items()
        for p in points
    ]
    chart = data.chart(values)
    scale = alt.Scale(domain=list(series), range=[color for _, color in series.values()])
    y = alt.Y(
        "value:Q",
        title=f"{unit} per round",
        axis=alt.Axis(tickCount=4, minExtent=LEFT_EXTENT),
        scale=alt.Scale(zero=True),
    )
    width = min(WHOLE, max(135 * view.num_rounds, 260))
    color = alt.Color("direction:N", scale=scale, legend=None)
    if view.num_rounds <= _MOST_BARS:
        axis = alt.Axis(title="round", labelAngle=0, ticks=False, values=round_ticks(view.rounds, _MOST_BARS))
        gaps = alt.Scale(paddingInner=0.25, paddingOuter=0.12)
        offset = alt.XOffset("direction:N", scale=alt.Scale(domain=list(series)))
        layers = [chart.mark_bar().encode(x=alt.X("round:O", axis=axis, scale=gaps), xOffset=offset, y=y, color=color)]
    else:
        layers = [chart.mark_line(strokeWidth=2).encode(x=round_axis(view.num_rounds), y=y, color=color)]
    highest = max(heights) or 1.0
    lasts = {name: points[-1].value / size for name, (points, _) in series.items()}
    for name, height in _apart(lasts, highest * 16 / BYTES_HEIGHT).items():
        label = data.chart([{"value": height}])
        words = f"{name} {format_bytes(lasts[name] * size)}"
        text = label.mark_text(text=words, color=inks[name], align="left", dx=6, fontSize=11, fontWeight="bold")
        layers.append(text.encode(x=alt.value(width), y="value:Q"))
    words = f"in all {format_bytes(sums['down'])} down to the clients and {format_bytes(sums['up'])} up"
    title = alt.TitleParams("Bytes on the line per round", subtitle=words)
    return alt.layer(*layers, title=title, width=width, height=BYTES_HEIGHT)


def _apart(heights: dict[str, float], least: float) -> dict[str, float]:
    """Two label heights that are at least `least` apart, the higher one moved up."""
    low, high = sorted(heights, key=lambda name: heights[name])
    return {low: heights[low], high: max(heights[high], heights[low] + least)}


def _unit(largest: float) -> tuple[str, int]:
    """The largest decimal unit that is not larger than the value."""
    units = (("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
    return next(((name, size) for name, size in units if largest >= size), ("bytes", 1))

"""The charts of a run's picture, in Altair. Imported only when something is drawn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt
import vl_convert

from fedstrata.core.units import format_bytes
from fedstrata.report.view import Point, RunView, round_ticks

# Okabe and Ito's palette: told apart with any kind of color vision.
BLUE, ORANGE, RED = "#0072B2", "#E69F00", "#D55E00"
DARK_ORANGE = "#9a6700"  # the same hue, for text on white
INK, SOFT, IDLE = "#222222", "#6b6b6b", "#ececec"
BLUES, GREENS = ("#d3e5f2", "#08386b"), ("#d2ecdf", "#00432e")

HALF, WHOLE, CURVE_HEIGHT, BYTES_HEIGHT = 470, 1050, 190, 150
FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
_MOST_BARS = 30
_LEFT_EXTENT = 44
_ID_WIDTH = 120


def draw_svg(view: RunView) -> str:
    """The whole picture as SVG text, about 1200 px wide."""
    data = _Data()
    upper = [draw(view, data) for draw in (_loss_chart, _accuracy_chart, _stratum_map, _client_map)]
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
            domainColor="#bbbbbb", tickColor="#bbbbbb", gridColor="#eeeeee", labelLimit=_ID_WIDTH, labelFlush=False,
        )
        .configure_legend(labelColor=SOFT, titleColor=SOFT, titleFontWeight="normal", labelFontSize=11)
    )  # fmt: skip
    spec = chart.to_dict() | {"datasets": data.rows}
    return str(vl_convert.vegalite_to_svg(spec))


class _Data:
    """Rows by name: charts refer to them, so that Altair neither copies nor checks thousands of rows."""

    def __init__(self) -> None:
        self.rows: dict[str, list[dict[str, Any]]] = {}

    def chart(self, rows: list[dict[str, Any]]) -> alt.Chart:
        """A chart of these rows."""
        name = f"rows-{len(self.rows)}"
        self.rows[name] = rows
        return alt.Chart(alt.NamedData(name))

    def points(self, points: Sequence[Point]) -> alt.Chart:
        """A chart with the fields `round` and `value`."""
        return self.chart([{"round": p.server_round, "value": p.value} for p in points])


def _loss_chart(view: RunView, data: _Data) -> alt.LayerChart:
    title = alt.TitleParams("Training loss", subtitle="mean over the cohort's steps")
    if not view.loss:
        return _empty(data, title, "no client finished a step")
    layers = _curve(view, data, view.loss, INK, alt.Scale(nice=True, zero=len(view.loss) == 1), _LEFT_EXTENT)
    layers.append(_end_label(data, view.loss[-1], INK))
    return alt.layer(*layers, title=title, width=HALF, height=CURVE_HEIGHT)


def _accuracy_chart(view: RunView, data: _Data) -> alt.LayerChart:
    title = alt.TitleParams("Validation accuracy", subtitle=view.accuracy_of)
    scale = alt.Scale(domain=[0, 1])
    layers: list[Any] = _curve(view, data, view.accuracy, BLUE, scale, _right_extent(view)) if view.accuracy else []
    start, end = _domain(view)
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
        return _empty(data, title, "no validation set")
    if best is not None:
        point = data.points([best]).encode(x=_x(view), y=alt.Y("value:Q", scale=scale))
        layers.append(point.mark_point(color=BLUE, filled=True, size=90, opacity=1))
        near_base = base is not None and 0 <= best.value - base < 0.15
        above = near_base or best.value < 0.2 or test is None or best.value >= test
        look = {"text": f"best: round {best.server_round}, {best.value:.3f}", "fontSize": 11, "fontWeight": "bold"}
        look |= {"align": "right" if late else "left", "dx": 6 if late else 0, "dy": -14 if above else 16}
        layers.append(point.mark_text(color="white", stroke="white", strokeWidth=4, **look))
        layers.append(point.mark_text(color=BLUE, **look))
    return alt.layer(*layers, title=title, width=HALF, height=CURVE_HEIGHT)


def _curve(view: RunView, data: _Data, points: Sequence[Point], color: str, scale: alt.Scale, extent: int) -> list[Any]:
    y = alt.Y("value:Q", scale=scale, title=None, axis=alt.Axis(tickCount=5, minExtent=extent))
    chart = data.points(points).encode(x=_x(view), y=y)
    layers = [chart.mark_line(color=color, strokeWidth=2)]
    if len(points) <= 40:
        layers.append(chart.mark_point(color=color, filled=True, size=28, opacity=1))
    return layers


def _rule(
    view: RunView, data: _Data, value: float, color: str, words: str, x: Any, align: str, below: bool, dash: list[int]
) -> list[Any]:
    chart = data.chart([{"value": value}])
    axis = alt.Axis(tickCount=5, minExtent=_right_extent(view))
    y = alt.Y("value:Q", scale=alt.Scale(domain=[0, 1]), title=None, axis=axis)
    rule = chart.mark_rule(color=color, strokeDash=dash, strokeWidth=1.2).encode(y=y)
    text = chart.mark_text(text=words, color=color, fontSize=11, align=align, dy=10 if below else -8)
    return [rule, text.encode(x=x, y=y)]


def _end_label(data: _Data, point: Point, color: str) -> Any:
    """The last value, right of its point."""
    chart = data.points([point]).mark_text(color=color, fontSize=11, align="left", dx=7)
    return chart.encode(x="round:Q", y="value:Q", text=alt.Text("value:Q", format=".3f"))


def _empty(data: _Data, title: alt.TitleParams, words: str) -> alt.LayerChart:
    text = data.chart([{}]).mark_text(text=words, color=SOFT, fontSize=12)
    placed = text.encode(x=alt.value(HALF / 2), y=alt.value(CURVE_HEIGHT / 2))
    return alt.layer(placed, title=title, width=HALF, height=CURVE_HEIGHT)


def _stratum_map(view: RunView, data: _Data) -> alt.LayerChart:
    most = max(c.num_clients for c in view.stratum_cells)
    width, height = _map_size(view, view.strata)
    values = [{"round": c.server_round, "row": c.stratum, "count": c.num_clients} for c in view.stratum_cells]
    axes = _map_axes(view, view.strata, height, "block (0 at the input)", _LEFT_EXTENT)
    trained = data.chart([v for v in values if v["count"]])
    numbers = _has_numbers(view, width, height, len(view.strata))
    color = _scale("count", (1, max(most, 2)), BLUES, None if numbers else "clients")
    layers = [_cells(data.chart(values), axes).mark_rect(color=IDLE)]
    layers.append(_cells(trained, axes).mark_rect().encode(color=color))
    if numbers:
        layers.append(_numbers(trained, axes, 0.5 * (1 + max(most, 2))))
    words = "how many clients trained it; gray: nobody" + _sampled_rounds(view)
    title = alt.TitleParams("Who trained which block", subtitle=words)
    return alt.layer(*layers, title=title, width=width, height=height)


def _client_map(view: RunView, data: _Data) -> alt.LayerChart:
    width, height = _map_size(view, view.clients)
    axes = _map_axes(view, view.clients, height, None, _right_extent(view))
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
    words = f"of {view.num_blocks}; gray: not drawn; red: failed" + _sampled_rounds(view)
    title = alt.TitleParams(f"How many blocks each client trained{sampled}", subtitle=words)
    return alt.layer(*layers, title=title, width=width, height=height)


def _map_size(view: RunView, rows: list[str]) -> tuple[int, int]:
    """Size of a map in px; rows are whole pixels high, so that the gaps between them look alike."""
    return min(HALF, max(64 * len(view.rounds), 130)), len(rows) * _row_step(rows) - _row_gap(rows)


def _row_step(rows: list[str]) -> int:
    return max(4, min(26, 540 // len(rows)))


def _row_gap(rows: list[str]) -> int:
    return 1 if _row_step(rows) >= 8 else 0


def _right_extent(view: RunView) -> int:
    """Room for the client ids, about 6.4 px a character, left of both charts of the right column."""
    return max(_LEFT_EXTENT, min(_ID_WIDTH, round(6.4 * max(len(c) for c in view.clients)))) + 8


def _map_axes(view: RunView, rows: list[str], height: int, title: str | None, extent: int) -> dict[str, Any]:
    step = -(-len(rows) * 11 // height)
    labeled = [r for i, r in enumerate(reversed(rows)) if i % step == 0 or not r.isdigit()]
    x_axis = alt.Axis(values=round_ticks(view.rounds), labelAngle=0, title="round", domain=False, ticks=False)
    y_axis = alt.Axis(values=labeled, title=title, domain=False, ticks=False, minExtent=extent)
    x_scale = alt.Scale(domain=view.rounds, paddingInner=0.04 if len(view.rounds) <= 50 else 0)
    y_scale = alt.Scale(domain=rows, paddingInner=_row_gap(rows) / _row_step(rows))
    x, y = alt.X("round:O", scale=x_scale, axis=x_axis), alt.Y("row:O", scale=y_scale, axis=y_axis, sort=None)
    return {"x": x, "y": y}


def _cells(chart: Any, axes: dict[str, Any]) -> Any:
    return chart.mark_rect().encode(**axes)


def _scale(field: str, domain: tuple[int, int], colors: tuple[str, str], legend: str | None) -> alt.Color:
    bar = None
    if legend:
        bar = alt.Legend(title=legend, orient="bottom", direction="horizontal", gradientLength=160, gradientThickness=9,
                         titleOrient="left", values=sorted({*domain}), format="d")  # fmt: skip
    return alt.Color(f"{field}:Q", scale=alt.Scale(domain=list(domain), range=list(colors)), legend=bar)


def _has_numbers(view: RunView, width: int, height: int, num_rows: int) -> bool:
    """Whether cells are large enough to read a number in them."""
    return width / len(view.rounds) >= 18 and height / num_rows >= 12


def _numbers(chart: Any, axes: dict[str, Any], middle: float) -> Any:
    color = alt.condition(f"datum.count >= {middle}", alt.value("white"), alt.value(INK))
    text = chart.mark_text(fontSize=11).encode(text=alt.Text("count:Q", format="d"), color=color)
    return text.encode(**axes)


def _sampled_rounds(view: RunView) -> str:
    if len(view.rounds) == view.num_rounds:
        return ""
    return f"; one in {view.rounds[1] - view.rounds[0]} rounds is shown"


def _bytes_chart(view: RunView, data: _Data) -> alt.LayerChart:
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
        axis=alt.Axis(tickCount=4, minExtent=_LEFT_EXTENT),
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
        layers = [chart.mark_line(strokeWidth=2).encode(x=_x(view), y=y, color=color)]
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


def _domain(view: RunView) -> tuple[float, float]:
    return (0.5, 1.5) if view.num_rounds == 1 else (1, view.num_rounds)


def _x(view: RunView) -> alt.X:
    ticks = round_ticks(range(1, view.num_rounds + 1))
    axis = alt.Axis(title="round", values=ticks, format="d", grid=False)
    return alt.X("round:Q", scale=alt.Scale(domain=list(_domain(view)), nice=False), axis=axis)

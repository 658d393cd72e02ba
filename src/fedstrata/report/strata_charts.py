"""Charts of why a run trained what it trained: scores, selection, allocation. Imported only when something is drawn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import altair as alt

from fedstrata.report.drawing import (
    IDLE,
    INK,
    KINDS,
    LEFT_EXTENT,
    ORANGE,
    PURPLES,
    Data,
    count_axis,
    gradient_legend,
    map_axes,
    map_size,
    row_axis,
    row_step,
    rows_height,
    sampled_words,
)
from fedstrata.report.levels import Scale, score_scale
from fedstrata.report.strata import ScoreMap, StrataView, Tally
from fedstrata.report.strata_curves import exactness_chart, kind_map, rank_bars, wait_chart
from fedstrata.report.strata_text import SCORE_WORDS
from fedstrata.report.view import RunView

_ROW_TITLE = "block (0 at the input)"
_SMALLEST_DOT_CELL = 7
_BAR_WIDTH = 330
_ERROR_BARS = 2.0
_OTHERS = "other kinds"


def strata_charts(view: RunView, why: StrataView, data: Data) -> list[Any]:
    """The charts that the run has records for, in reading order, each half as wide as the picture."""
    charts: list[Any] = []
    by_source = {s.source: s for s in why.scores}
    if "planner" in by_source:
        charts.append(_score_map(view, why, by_source["planner"], data))
    if why.target != "plan":
        charts.append(_allocation_bars(view, why, data))
    if why.has_selection:
        scores = by_source.get("selector")
        charts.append(_score_map(view, why, scores, data) if scores else _selection_map(view, why, data))
        charts.append(_selection_bars(view, why, data))
    if why.devices is not None:
        charts += [kind_map(view, why.devices, data), wait_chart(view, why.devices, data)]
        ranks = rank_bars(view, why.devices, data) if why.devices.block_ranks else None
        charts.append(ranks or kind_map(view, why.devices, data, "rank"))
    if why.exactness is not None and why.exactness.product:
        charts.append(exactness_chart(view, why.exactness, data))
    return [c for c in charts if c is not None]


def _score_map(view: RunView, why: StrataView, scores: ScoreMap, data: Data) -> alt.LayerChart:
    rows, width, axes = _map_frame(view)
    scale = score_scale(scores, why.rounds)
    column = {r: i for i, r in enumerate(why.rounds)}
    values: list[dict[str, Any]] = []
    idle: list[dict[str, Any]] = []
    for s in rows:
        row = scores.values.get(s, ())
        for r in view.rounds:
            value = row[column[r]] if row else None
            if scale is None or value is None or (r, s) in scores.other:
                idle.append({"round": r, "row": s})
            else:
                values.append({"round": r, "row": s, "value": max(value, scale.low)})
    layers = [_cells(data, idle, axes).mark_rect(color=IDLE)]
    if scale is not None:
        layers.append(_cells(data, values, axes).mark_rect().encode(color=_score_color(scores, scale)))
    shown = set(view.rounds)
    infinite = [{"round": r, "row": s} for r, s in sorted(scores.infinite) if r in shown]
    if infinite:
        layers.append(_cells(data, infinite, axes).mark_rect(color=ORANGE))
    dots = _dots(view, why, scores.source, data, axes, width)
    return alt.layer(
        *layers, *dots, title=_score_title(view, scores, scale, bool(dots)), width=width, height=rows_height(len(rows))
    )


def _score_color(scores: ScoreMap, scale: Scale) -> alt.Color:
    domain = [scale.low, scale.high if scale.high > scale.low else scale.low + (abs(scale.low) or 1.0)]
    kind: Any = "log" if scale.is_log else "linear"
    legend = gradient_legend(SCORE_WORDS.get(scores.name, scores.name), sorted({scale.low, scale.high}), ".3~g")
    return alt.Color("value:Q", scale=alt.Scale(type=kind, domain=domain, range=list(PURPLES)), legend=legend)


def _score_title(view: RunView, scores: ScoreMap, scale: Scale | None, has_dots: bool) -> alt.TitleParams:
    name = SCORE_WORDS.get(scores.name, scores.name)
    who = "planner" if scores.source == "planner" else "server"
    words = [f"{name}, logarithmic colors" if scale and scale.is_log else name]
    if has_dots:
        words.append("dots: trained" if scores.source == "planner" else "dots: taken over")
    if scores.infinite:
        words.append("orange: infinite")
    words.append("gray: no score")
    second = [scores.note] if scores.note else []
    if scores.source == "selector" and scores.reported and scores.reported != scores.values:
        second.append("shown is what ranks: the score less the number of tensors that moved")
    first = "; ".join(words) + sampled_words(view.rounds, view.num_rounds)
    return alt.TitleParams(
        f"How the {who} scored each block", subtitle=[first, *(["; ".join(second)] if second else [])]
    )


def _dots(view: RunView, why: StrataView, source: str, data: Data, axes: Mapping[str, Any], width: int) -> list[Any]:
    """A dot where a stratum was trained (planner) or taken over (selector), if cells are large enough."""
    side = min(width / len(view.rounds), row_step(len(view.strata)))
    if side < _SMALLEST_DOT_CELL:
        return []
    column = {r: i for i, r in enumerate(why.rounds)}
    marked = [
        {"round": r, "row": h.stratum}
        for h in why.strata
        for r in view.rounds
        if (h.holders[column[r]] > 0 if source == "planner" else h.selected[column[r]] is True)
    ]
    size = min(60.0, (0.45 * side) ** 2)
    chart = _cells(data, marked, axes)
    return [
        chart.mark_point(shape="circle", filled=True, color="white", stroke=INK, strokeWidth=0.8, size=size, opacity=1)
    ]


def _selection_map(view: RunView, why: StrataView, data: Data) -> alt.LayerChart:
    rows, width, axes = _map_frame(view)
    column = {r: i for i, r in enumerate(why.rounds)}
    found: dict[bool | None, list[dict[str, Any]]] = {True: [], False: [], None: []}
    for h in why.strata:
        for r in view.rounds:
            found[h.selected[column[r]]].append({"round": r, "row": h.stratum})
    colors = ((None, IDLE), (False, PURPLES[0]), (True, PURPLES[1]))
    layers = [_cells(data, found[key], axes).mark_rect(color=color) for key, color in colors if found[key]]
    words = "dark: taken over; light: left out; gray: nobody trained it" + sampled_words(view.rounds, view.num_rounds)
    title = alt.TitleParams("What the server took over", subtitle=words)
    return alt.layer(*layers, title=title, width=width, height=rows_height(len(rows)))


def _map_frame(view: RunView) -> tuple[list[str], int, dict[str, Any]]:
    rows = view.strata
    return rows, map_size(len(view.rounds), len(rows))[0], map_axes(view.rounds, rows, _ROW_TITLE, LEFT_EXTENT)


def _cells(data: Data, rows: list[dict[str, Any]], axes: Mapping[str, Any]) -> Any:
    return data.chart(rows).mark_rect().encode(**axes)


def _allocation_bars(view: RunView, why: StrataView, data: Data) -> alt.LayerChart:
    kinds = list(why.strata[0].by_kind)
    shown = kinds if len(kinds) <= len(KINDS) else [*kinds[: len(KINDS) - 1], _OTHERS]
    bars = [
        {
            "row": h.stratum,
            "value": tally.num_hits,
            "kind": kind if kind in shown else _OTHERS,
            "order": kinds.index(kind),
        }
        for h in why.strata
        for kind, tally in h.by_kind.items()
    ]
    legend = alt.Legend(title=None, orient="bottom", direction="horizontal", columns=3, symbolType="square")
    color = alt.Color("kind:N", scale=alt.Scale(domain=shown, range=list(KINDS[: len(shown)])), legend=legend)
    title = alt.TitleParams("How often each block was trained", subtitle=_target_words(why))
    chart = data.chart(bars).mark_bar(opacity=0.75).encode(color=color, order=alt.Order("order:Q"))
    return _bars(view, chart, {h.stratum: h.trained for h in why.strata}, "client-rounds", title, data)


def _target_words(why: StrataView) -> list[str]:
    mark = "black: what the chances lead to, ± 2 standard deviations"
    if why.target == "pattern":
        return ["black: the pattern's sets"]
    largest = why.largest_deviation
    if largest is None:
        return [mark]
    t = largest.trained
    verdict = "within chance" if abs(t.z or 0.0) <= why.chance_limit else "more than chance explains"
    return [mark, f"largest deviation: {t.deviation:+.1f}, block {largest.stratum} (one σ: {t.std:.1f}), {verdict}"]


def _selection_bars(view: RunView, why: StrataView, data: Data) -> alt.LayerChart:
    taken = {h.stratum: h.taken for h in why.strata if h.taken is not None}
    chart = data.chart([{"row": s, "value": t.num_hits} for s, t in taken.items()]).mark_bar(
        color=PURPLES[1], opacity=0.6
    )
    words = "black: as many drawn at random, ± 2 standard deviations"
    title = alt.TitleParams("How often the server took each block over", subtitle=words)
    return _bars(view, chart, taken, "rounds", title, data)


def _bars(
    view: RunView, chart: Any, tallies: Mapping[str, Tally], unit: str, title: alt.TitleParams, data: Data
) -> alt.LayerChart:
    """Horizontal bars with the target and what chance alone gives, a row per stratum."""
    rows = view.strata
    y = row_axis(rows, None, LEFT_EXTENT)
    most = max((t.num_cases for t in tallies.values()), default=1)
    bars = chart.encode(x=count_axis(most, unit), y=y)
    targets = [
        {
            "row": s,
            "target": t.expected,
            "low": max(t.expected - _ERROR_BARS * t.std, 0),
            "high": min(t.expected + _ERROR_BARS * t.std, most),
        }
        for s, t in tallies.items()
    ]
    marks = data.chart(targets)
    height = max(3, row_step(len(rows)) - 6)
    rule = marks.mark_rule(color=INK, strokeWidth=1.2).encode(x="low:Q", x2="high:Q", y=y)
    tick = marks.mark_tick(color=INK, thickness=2, height=height, orient="vertical").encode(x="target:Q", y=y)
    return alt.layer(bars, rule, tick, title=title, width=_BAR_WIDTH, height=rows_height(len(rows)))

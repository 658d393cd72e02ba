"""What all charts of a run's picture share, in Altair: colors, sizes, rows by name, axes of rounds and of maps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import altair as alt

from fedstrata.report.view import Point, round_ticks

# Okabe and Ito's palette: told apart with any kind of color vision.
BLUE, ORANGE, RED, GREEN = "#0072B2", "#E69F00", "#D55E00", "#009E73"
KINDS = (BLUE, ORANGE, GREEN, "#CC79A7", "#56B4E9", RED)
DARK_ORANGE = "#9a6700"  # the same hue, for text on white
INK, SOFT, IDLE = "#222222", "#6b6b6b", "#ececec"
BLUES, GREENS, PURPLES = ("#d3e5f2", "#08386b"), ("#d2ecdf", "#00432e"), ("#e6ddf1", "#3c1361")

HALF, WHOLE, CURVE_HEIGHT, BYTES_HEIGHT = 470, 1050, 190, 150
FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
LEFT_EXTENT, ID_WIDTH = 44, 120


class Data:
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


def empty_chart(data: Data, title: alt.TitleParams, words: str) -> alt.LayerChart:
    """A chart of the size of a curve that only says why there is none."""
    text = data.chart([{}]).mark_text(text=words, color=SOFT, fontSize=12)
    placed = text.encode(x=alt.value(HALF / 2), y=alt.value(CURVE_HEIGHT / 2))
    return alt.layer(placed, title=title, width=HALF, height=CURVE_HEIGHT)


def round_domain(num_rounds: int) -> tuple[float, float]:
    """The ends of an axis of rounds."""
    return (0.5, 1.5) if num_rounds == 1 else (1, num_rounds)


def round_axis(num_rounds: int) -> alt.X:
    """The axis of a curve over the rounds."""
    axis = alt.Axis(title="round", values=round_ticks(range(1, num_rounds + 1)), format="d", grid=False)
    return alt.X("round:Q", scale=alt.Scale(domain=list(round_domain(num_rounds)), nice=False), axis=axis)


def map_size(num_rounds: int, num_rows: int) -> tuple[int, int]:
    """Size of a map in px; rows are whole pixels high, so that the gaps between them look alike."""
    return min(HALF, max(64 * num_rounds, 130)), rows_height(num_rows)


def rows_height(num_rows: int) -> int:
    """Height of a map or of bars with so many rows."""
    return num_rows * row_step(num_rows) - row_gap(num_rows)


def row_step(num_rows: int) -> int:
    """Height of a row with its gap."""
    return max(4, min(26, 540 // num_rows))


def row_gap(num_rows: int) -> int:
    """Pixels between two rows."""
    return 1 if row_step(num_rows) >= 8 else 0


def row_axis(rows: list[str], title: str | None, extent: int) -> alt.Y:
    """Rows of a map from the top, as many labeled as there is room for."""
    step = -(-len(rows) * 11 // rows_height(len(rows)))
    upward = list(reversed(rows))
    named = [i for i, r in enumerate(upward) if not r.isdecimal()]
    labeled = [
        r for i, r in enumerate(upward) if i in named or (i % step == 0 and all(abs(i - n) >= step for n in named))
    ]
    axis = alt.Axis(values=labeled, title=title, domain=False, ticks=False, minExtent=extent, grid=False)
    scale = alt.Scale(domain=rows, paddingInner=row_gap(len(rows)) / row_step(len(rows)))
    return alt.Y("row:O", scale=scale, axis=axis, sort=None)


def map_axes(rounds: list[int], rows: list[str], title: str | None, extent: int) -> dict[str, Any]:
    """Columns and rows of a map."""
    axis = alt.Axis(values=round_ticks(rounds), labelAngle=0, title="round", domain=False, ticks=False)
    scale = alt.Scale(domain=rounds, paddingInner=0.04 if len(rounds) <= 50 else 0)
    return {"x": alt.X("round:O", scale=scale, axis=axis), "y": row_axis(rows, title, extent)}


def count_axis(most: int, title: str) -> alt.X:
    """An axis of whole numbers from 0, at the field `value`."""
    ticks = {"values": list(range(most + 1))} if most <= 5 else {"tickCount": 5}
    scale = alt.Scale(domain=[0, max(most, 1)], nice=False)
    return alt.X("value:Q", scale=scale, axis=alt.Axis(title=title, format="d", **ticks))


def gradient_legend(title: str, values: list[float], number_format: str) -> alt.Legend:
    """A small horizontal bar of colors below a map."""
    return alt.Legend(
        title=title, orient="bottom", direction="horizontal", gradientLength=160, gradientThickness=9,
        titleOrient="left", values=values, format=number_format,
    )  # fmt: skip


def sampled_words(rounds: Sequence[int], num_rounds: int) -> str:
    """What a subtitle says where not every round has a column."""
    return "" if len(rounds) == num_rounds else f"; one in {rounds[1] - rounds[0]} rounds is shown"

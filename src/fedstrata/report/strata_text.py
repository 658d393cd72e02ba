"""Why a run trained what it trained, as a terminal shows it: a line per stratum, then sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedstrata.core.units import format_bytes, format_seconds
from fedstrata.report.levels import Level, Scale, binned, score_scale
from fedstrata.report.strata import Exactness, ScoreMap, StrataView, StratumHistory, Tally
from fedstrata.report.view import Point
from fedstrata.report.words import count_of, ranges, rounds_named, strata_named

SCORE_WORDS = {"fisher": "Fisher score", "updates": "mean squared update", "zico_clients": "agreement over clients"}
_BARS = ("▁▂▃▄▅▆▇█", "·")
_ASCII_BARS = (".:-=+*#@", "_")
_NARROWEST, _WIDEST = 6, 24
_NAME_WIDTH, _MARGIN = 14, 2

Bars: TypeAlias = tuple[str, str]
"""Characters from low to high, and the one for nothing."""


@dataclass(frozen=True)
class _Column:
    """A number or a strip per stratum."""

    name: str
    number: Callable[[StratumHistory], str] | None = None
    strip: Callable[[StratumHistory], Sequence[Level]] | None = None


def print_strata(view: StrataView) -> None:
    """Prints a table of strata, the input at the bottom, and below it what there is to say about it.

    Args:
        view: As `read_strata` reads it. Without a finished round nothing is printed.
    """
    if not view.rounds:
        return
    console = Console(highlight=False)
    bars = _BARS if console.encoding.lower().startswith("utf") else _ASCII_BARS
    console.print()
    console.print(Text("Who trained which block, and why", style="bold"))
    console.print(Text(_caption(view, bars), style="dim"))
    console.print()
    console.print(_table(view, console.width, bars))
    console.print()
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(min_width=10, overflow="fold")
    grid.add_column(overflow="fold")
    for name, text in sentences(view):
        grid.add_row(Text(f"  {name}", style="dim"), Text(text))
    for i, flag in enumerate(view.flags):
        grid.add_row(Text("" if i else "  warnings", style="yellow"), Text(flag.text))
    console.print(grid)


def sentences(view: StrataView) -> Iterator[tuple[str, str]]:
    """Name and text of everything that is said below the table, warnings aside."""
    largest = view.largest_deviation
    if largest is not None:
        yield "allocation", _allocation(view, largest)
    elif view.target == "pattern":
        yield "allocation", "the target is the pattern's sets; nothing is left to chance"
    if view.has_selection:
        yield "selection", _selection(view)
    for scores in view.scores:
        yield f"{scores.source}", _score_words(scores, view.rounds)
    if view.devices is not None:
        for kind in view.devices.kinds:
            yield (
                kind.kind,
                f"{count_of(kind.num_clients, 'client')}, depth {_span(kind.depth)}, rank {_span(kind.rank)}",
            )
        if view.devices.simulated_wait:
            share = _mean(view.devices.simulated_wait)
            yield "waiting", f"{share:.0%} of the slowest client's time, on average, by the device profiles"
    if view.exactness is not None and view.exactness.product:
        yield "exactness", _exactness(view.exactness)
    if view.probes is not None:
        p = view.probes
        examples = f"{count_of(p.num_examples, 'example')} ({', '.join(p.sources) or 'source not recorded'})"
        amounts = f"{format_bytes(p.downlink_bytes)} down, {format_bytes(p.uplink_bytes)} up"
        yield "probes", f"before {rounds_named(p.rounds)}: {examples}, {amounts}, {format_seconds(p.predicted_s)}"


def _caption(view: StrataView, bars: Bars) -> str:
    first, last = view.rounds[0], view.rounds[-1]
    span = f"round {first}" if first == last else f"rounds {first} to {last} from left to right"
    return f"The input is at the bottom; {span}; {bars[0][-1]} most, {bars[1]} none, blank: no value."


def _table(view: StrataView, width: int, bars: Bars) -> Table:
    columns = _columns(view)
    strips = [c for c in columns if c.strip is not None]
    texts = {c.name: [c.number(h) for h in view.strata] for c in columns if c.number}
    room = width - _NAME_WIDTH - sum(max(map(len, [name, *cells])) + _MARGIN for name, cells in texts.items())
    length = max(_NARROWEST, min(len(view.rounds), _WIDEST, room // len(strips) - _MARGIN))
    table = Table(box=None, padding=(0, _MARGIN, 0, 0), header_style="dim", pad_edge=False)
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column.name, justify="right" if column.number else "left", overflow="fold")
    rows = [
        (h.stratum, [c.number(h) if c.number else _drawn(c, h, length, bars) for c in columns])
        for h in reversed(view.strata)
    ]
    for names, cells in _folded(rows):
        table.add_row(Text(f"  {strata_named(names)}"), *map(Text, cells))
    return table


def _columns(view: StrataView) -> list[_Column]:
    most = max(view.num_clients, 1)
    columns = [
        _Column("trained by", strip=lambda h: [n / most for n in h.holders]),
        _Column("times", number=lambda h: f"{h.trained.num_hits}/{h.trained.num_cases}"),
    ]
    if view.target != "plan":
        columns.append(_Column("target", number=lambda h: _expected(h.trained)))
    if view.has_selection:
        columns.append(_Column("taken", strip=lambda h: [None if s is None else float(s) for s in h.selected]))
        columns.append(_Column("rounds", number=lambda h: f"{h.taken.num_hits}/{h.taken.num_cases}" if h.taken else ""))
        columns.append(_Column("at random", number=lambda h: _expected(h.taken) if h.taken else ""))
    for scores in view.scores:
        scale = score_scale(scores, view.rounds)
        columns.append(_Column("score", strip=_score_strip(scores, scale, view.rounds)))
    return columns


def _score_strip(
    scores: ScoreMap, scale: Scale | None, rounds: Sequence[int]
) -> Callable[[StratumHistory], Sequence[Level]]:
    def levels(history: StratumHistory) -> Sequence[Level]:
        return scale.levels(scores, history.stratum, rounds) if scale else [None] * len(rounds)

    return levels


def _drawn(column: _Column, history: StratumHistory, length: int, bars: Bars) -> str:
    cells = binned(column.strip(history), length) if column.strip else []
    top = len(bars[0]) - 1
    # 0 is "nobody" for shares; the lowest score is a score, and comes as a small positive level
    return "".join(" " if x is None else bars[1] if x <= 0 else bars[0][min(top, int(x * len(bars[0])))] for x in cells)


def _folded(rows: Sequence[tuple[str, list[str]]]) -> list[tuple[list[str], list[str]]]:
    """Neighboring blocks that look alike on one line."""
    groups: list[tuple[list[str], list[str]]] = []
    for stratum, cells in rows:
        if groups and groups[-1][1] == cells and stratum.isdecimal() and groups[-1][0][-1].isdecimal():
            groups[-1][0].append(stratum)
        else:
            groups.append(([stratum], cells))
    return groups


def _expected(tally: Tally) -> str:
    return f"{tally.expected:.1f} ±{tally.std:.1f}" if tally.z is not None else f"{tally.expected:.0f}"


def _allocation(view: StrataView, largest: StratumHistory) -> str:
    t = largest.trained
    verdict = "within" if abs(t.z or 0.0) <= view.chance_limit else "beyond"
    return (
        f"furthest from its target: {strata_named([largest.stratum])}, trained {count_of(t.num_hits, 'time')}, target "
        f"{t.expected:.1f}; chance alone gives ±{t.std:.1f} (one standard deviation), so that {t.deviation:+.1f} is "
        f"{verdict} what chance explains"
    )


def _selection(view: StrataView) -> str:
    competing = [h for h in view.strata if h.taken is not None]
    always = [h.stratum for h in competing if h.taken and h.taken.num_hits == h.taken.num_cases]
    never = [h.stratum for h in competing if h.taken and h.taken.num_hits == 0]
    words = [f"always taken over: {strata_named(always)}"] if always else []
    words += [f"never: {strata_named(never)}"] if never else []
    if not words:
        return "every block was taken over in some rounds and left in others"
    return "; ".join(words)


def _score_words(scores: ScoreMap, rounds: tuple[int, ...]) -> str:
    name = SCORE_WORDS.get(scores.name, scores.name)
    scale = score_scale(scores, rounds)
    if scale is None:
        return f"{name}: no values that can be compared"
    how = "logarithmic strip" if scale.is_log else "linear strip"
    words = [f"{name} from {scale.low:.3g} to {scale.high:.3g} ({how})"]
    if scores.source == "planner":
        words.append(f"computed before {rounds_named(scores.computed_in)}" if scores.computed_in else "")
    elif scores.reported and scores.reported != scores.values:
        words.append("the key that ranks, the score less the number of tensors that moved")
    return "; ".join(w for w in [*words, scores.note] if w)


def _exactness(exactness: Exactness) -> str:
    last, largest = exactness.product[-1], max(exactness.product, key=lambda p: p.value)
    what = "distance to the mean (meant to differ)" if exactness.name == "distance_to_mean" else "error"
    words = f"{what} {last.value:.1e} of the product in round {last.server_round}"
    if largest.server_round != last.server_round:
        words += f", at most {largest.value:.1e} (round {largest.server_round})"
    if exactness.update:
        words += f"; {exactness.update[-1].value:.1e} of the update"
    return words


def _span(points: Sequence[Point]) -> str:
    """The values that occur: whole ones as they are, others as an interval."""
    values = sorted({p.value for p in points})
    if not values:
        return "none"
    if all(v.is_integer() for v in values):
        return ranges([int(v) for v in values])
    return f"{values[0]:.1f} to {values[-1]:.1f}"


def _mean(points: Sequence[Point]) -> float:
    return sum(p.value for p in points) / len(points)

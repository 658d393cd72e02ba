"""What a person reads in the terminal: the summary of a run, the plan of a round, methods, packages.

Everything goes to standard output, fits 80 columns, wraps instead of cutting words, and is plain text where the
output is not a terminal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fedstrata.core.tensors import parse_stratum, stratum_name
from fedstrata.core.units import format_bytes, format_seconds
from fedstrata.report.summary import headline, next_steps, summary_rows
from fedstrata.report.words import count_of, ranges

_BAR_WIDTH = 20
_WIDEST_BLOCK_BAR = 12
_NARROW = 72
_METHOD_COLUMNS = {
    "exact": "exact mean",
    "unequal_ranks": "unequal ranks",
    "unequal_depth": "unequal depth",
    "partial_participation": "part of fleet",
    "needs_server_data": "server data",
    "client_state": "client state",
    "personalised": "own models",
}


def print_summary(folder: Path, summary: Mapping[str, Any], run_record: Mapping[str, Any]) -> None:
    """The end of a run as a person reads it: what was reached, by whom, at what cost, and what comes next.

    Args:
        folder: The run folder; commands name it as it is given here.
        summary: Content of `summary.json`.
        run_record: Content of `run.json`.
    """
    console = Console(highlight=False)
    console.print()
    console.print(Text(headline(summary), style="bold"))
    console.print()
    console.print(_pairs(summary_rows(folder, summary, run_record)))
    console.print()
    console.print(Text("Next", style="bold"))
    for purpose, lines in next_steps(folder, summary, run_record):
        console.print(Text(f"  {purpose}", style="dim"), soft_wrap=True)
        for line in lines:
            console.print(Text(f"    {line}", style="cyan"), soft_wrap=True)


def print_plan(table: Mapping[str, Any]) -> None:
    """The plan of one round: per client its blocks, ranks, bytes and seconds, then coverage and totals.

    Args:
        table: As `fedstrata plan --json` prints it.
    """
    console = Console(highlight=False)
    clients, num_blocks = table["clients"], table["num_blocks"]
    sizes = f"{count_of(len(clients), 'client')}, a model of {count_of(num_blocks, 'block')}"
    console.print(Text(f"Round {table['server_round']} with {table['method']}: {sizes}", style="bold"))
    console.print()
    console.print(_plan_table(console, table))
    console.print()
    console.print(Text("How many clients train each block", style="bold"))
    full, empty = _glyphs(console)
    coverage = Table.grid(padding=(0, 2))
    for name, count in _grouped(table["coverage"]):
        filled = -(-count * _BAR_WIDTH // max(len(clients), 1))
        bar = Text(full * filled, style="cyan") + Text(empty * (_BAR_WIDTH - filled), style="dim")
        words = f"{count} of {len(clients)}" if count else "nobody in this round"
        coverage.add_row(Text(f"  {name}"), bar, Text(words, style="" if count else "yellow"))
    console.print(coverage)
    console.print()
    totals = table["totals"]
    most = "" if all(c["fixed_length"] for c in clients) else "at most "
    amounts = f"{format_bytes(totals['downlink_bytes'])} down and {format_bytes(totals['uplink_bytes'])} up"
    seconds = f"the slowest client needs {format_seconds(totals['round_s'])} by its device profile"
    console.print(Text(f"In all {most}{amounts}; {seconds}.", style="bold"))
    if most:
        console.print(Text("The codec's output depends on the values, so bytes are an upper bound."))
    server = table.get("server") or {}
    if server.get("needs") == "all updates":
        held = f"{server['aggregator']} needs all of them at once: {format_bytes(server['update_bytes'])}"
        console.print(Text(f"The server keeps the replies of a round until its end, because {held}."))
    for note in table["notes"]:
        console.print(Text(f"note: {note}"))


def print_methods(rows: Iterable[Mapping[str, Any]]) -> None:
    """The methods by name: a table of what each allows and needs, then what each does."""
    console = Console(highlight=False)
    rows = list(rows)
    table = _table(["method", *_METHOD_COLUMNS.values()], whole=("method",))
    for row in rows:
        marks = [_yes_no(row[key]) for key in _METHOD_COLUMNS]
        table.add_row(Text(row["name"], style="bold"), *marks)
    console.print(table)
    console.print()
    legend = {
        "exact mean": "the merged model is the weighted mean of the clients' models; n/a: nothing is merged, "
        "or it depends on the adapter kind",
        "unequal ranks, depth": "clients may differ in LoRA rank, or in which blocks they train",
        "part of fleet": "a round may take some of the clients",
        "server data, client state": "what it needs beside the clients' data",
        "own models": "every client ends with a model of its own",
    }
    console.print(_pairs(legend.items(), style="dim"))
    for row in rows:
        aliases = f"  (also: {', '.join(row['aliases'])})" if row["aliases"] else ""
        console.print()
        console.print(Text(row["name"], style="bold") + Text(aliases, style="dim"))
        about = [("", row["summary"]), ("trains", row["trains"]), ("sends", row["sends"]), ("paper", row["paper"])]
        console.print(_pairs(about))


def print_assets(rows: Iterable[Mapping[str, Any]]) -> None:
    """Packaged models and data: what there is, what is installed, and the command that brings the rest."""
    console = Console(highlight=False)
    rows = list(rows)
    for row in rows:
        state = Text("installed", style="green") if row["installed"] else Text("not installed", style="yellow")
        if row.get("verified"):
            state = Text("installed, checked against its SHA-256", style="green")
        console.print(Text(row["name"], style="bold") + Text(f"  {row['kind']}  ", style="dim") + state)
        about = [
            ("", row["description"]),
            ("package", f"{row['requirement']}, about {format_bytes(row['size_bytes'])}"),
            ("license", row["license"]),
        ]
        console.print(_pairs(about))
        if not row["installed"]:
            console.print(Text("  install  ", style="dim") + Text(row["command"], style="cyan"), soft_wrap=True)
        console.print()
    if not rows:
        console.print("no packaged models or data")


def _plan_table(console: Console, table: Mapping[str, Any]) -> Table:
    clients, num_blocks = table["clients"], table["num_blocks"]
    full, empty = _glyphs(console)
    has_ranks = table["max_rank"] > 0
    rank = ["rank"] if has_ranks else []
    numbers = ("texts", *rank, "steps", "down", "up", "time")
    device = ["device"] if console.width >= _NARROW else []
    out = _table(["client", *device, "texts", "blocks", *rank, "steps", "down", "up", "time"], whole=numbers)
    for c in clients:
        blocks = set(c["blocks"])
        count = f"{len(blocks)}/{num_blocks}"
        if num_blocks <= _WIDEST_BLOCK_BAR:
            marks = (full if b in blocks else empty for b in range(num_blocks))
            where = Text("".join(marks), style="cyan") + Text(f" {count}", style="default")
        else:
            where = Text(f"{ranges(sorted(blocks))} ({count})" if blocks else "none")
        ranks = sorted({r for s, r in c["ranks"].items() if s.isdigit()})
        spread = "–".join(str(r) for r in dict.fromkeys((ranks[0], ranks[-1]))) if ranks else "0"
        sizes = [format_bytes(c[key]) for key in ("downlink_bytes", "uplink_bytes")]
        cells = [str(c["steps"]), *sizes, format_seconds(c["predicted_s"])]
        out.add_row(
            Text(c["client"]),
            *(Text(c[key], style="dim") for key in device),
            str(c["num_examples"]),
            where,
            *([spread] if has_ranks else []),
            *cells,
        )
    return out


def _grouped(coverage: Mapping[str, int]) -> list[tuple[str, int]]:
    """Coverage with runs of equally covered blocks as one line: `("blocks 0–2", 2)`."""
    groups: list[tuple[list[str], int]] = []
    for key, count in coverage.items():
        joins = groups and groups[-1][1] == count and key.isdigit() and groups[-1][0][-1].isdigit()
        if joins:
            groups[-1][0].append(key)
        else:
            groups.append(([key], count))
    return [
        (stratum_name(parse_stratum(keys[0])) if len(keys) == 1 else f"blocks {keys[0]}–{keys[-1]}", count)
        for keys, count in groups
    ]


def _table(columns: Sequence[str], whole: Sequence[str] = ()) -> Table:
    """A table without lines whose cells never lose a character; those of `whole` columns stay on one line."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim", pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", no_wrap=name in whole)
    return table


def _pairs(rows: Iterable[tuple[str, str]], style: str = "") -> Table:
    """Indented name-value lines; long values wrap below themselves."""
    grid = Table.grid(padding=(0, 2, 0, 0))
    grid.add_column(overflow="fold")
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(f"  {name}", style="dim"), Text(value, style=style))
    return grid


def _yes_no(value: bool | None) -> Text:
    if value is None:
        return Text("n/a", style="dim")
    return Text("yes", style="green") if value else Text("no", style="dim")


def _glyphs(console: Console) -> tuple[str, str]:
    """A full and an empty cell of a bar, in the characters that the output can show."""
    return ("█", "░") if console.encoding.lower().startswith("utf") else ("#", ".")

"""A report of laws as a person reads it: broken ones last, with their counterexamples."""

from __future__ import annotations

from rich.console import Console
from rich.text import Text

from fedstrata.check.law import CheckReport

_MARKS = {"holds": ("holds", "green"), "broken": ("BROKEN", "bold red"), "left out": ("left out", "dim")}


def print_report(report: CheckReport) -> None:
    """Prints every law, then the counterexamples, then one line that sums up."""
    console = Console(highlight=False)
    console.print(Text(f"{report.kind} {report.target}", style="bold"))
    for result in report.results:
        mark, style = _MARKS[result.status]
        line = Text(f"  {mark:8}  ", style=style) + Text(f"{result.name}: ", style="bold") + Text(result.says)
        if result.status == "left out" and result.text:
            line += Text(f"; {result.text}", style="dim")
        console.print(line, soft_wrap=True)
    for result in report.broken:
        console.print()
        console.print(Text(f"counterexample to {result.name}: {result.says}", style="bold red"), soft_wrap=True)
        for text in result.text.splitlines():
            console.print(Text(f"  {text}"), soft_wrap=True)
    console.print()
    held = sum(r.status == "holds" for r in report.results)
    skipped = sum(r.status == "left out" for r in report.results)
    words = [f"{held} laws hold", f"{len(report.broken)} broken", f"{skipped} left out"]
    console.print(Text(", ".join(words), style="green" if report.holds else "red"))

"""The live display of a run: round, loss, validation, bytes, who trains how many blocks, time left."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fedstrata.core.units import format_bytes
from fedstrata.experiment.watch import Watch
from fedstrata.plan.base import RoundPlan
from fedstrata.record.checkpoint import ServerState

if TYPE_CHECKING:
    from fedstrata.experiment.build import Built


_HINT = "Ctrl-C stops after this round"


class RunDisplay(Watch):
    """Live on a terminal; one line per round elsewhere.

    Args:
        console: Where to draw; standard error, so that standard output stays for results.
    """

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live: Live | None = None
        self._progress = Progress(
            TextColumn("[bold]round {task.fields[now]}/{task.fields[rounds]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console,
        )
        self._task: TaskID | None = None
        self._blocks = 0
        self._rounds = 0
        self._cohort: dict[str, dict[str, Any]] = {}
        self._devices: dict[str, str] = {}
        self._last: Mapping[str, Any] = {}
        self._bytes = {"uplink": 0, "downlink": 0}
        self._message = ""
        self._began = time.perf_counter()

    def __enter__(self) -> RunDisplay:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Gives the terminal back, whatever happened."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def step(self, what: str) -> None:
        """One dim line."""
        self._console.print(Text(f"· {what}", style="dim"), soft_wrap=not self._console.is_terminal)

    def note(self, text: str) -> None:
        """One line."""
        line = Text("note ", style="yellow") + Text(text, style="default")
        self._console.print(line, soft_wrap=not self._console.is_terminal)

    def start(self, built: Built, state: ServerState) -> None:
        """Opens the display."""
        setup = built.setup
        size = min(setup.clients_per_round or len(setup.workers), len(setup.workers))
        self._blocks = setup.shape.num_blocks
        self._devices = {c.id: c.device.name for c in setup.workers.clients}
        rounds = self._rounds = setup.num_rounds
        self._bytes = {d: int(state.totals.get(d, {}).get("total", 0)) for d in self._bytes}
        if state.validation:
            self._last = {"metrics": {"validation": state.validation[-1]}}
        if state.server_round:
            self.note(f"going on after round {state.server_round}")
        self._task = self._progress.add_task(
            "rounds", total=rounds * size, completed=state.server_round * size, now=state.server_round, rounds=rounds
        )
        if self._console.is_terminal:
            self._live = Live(self._view(), console=self._console, refresh_per_second=4, transient=True)
            self._live.start()

    def planned(self, plan: RoundPlan) -> None:
        """A new cohort."""
        self._cohort = {p.client: {"blocks": p.blocks, "state": "waits", "loss": None} for p in plan.clients}
        if self._task is not None:
            self._progress.update(self._task, now=plan.server_round)
        self._refresh()

    def client_began(self, client: str) -> None:
        """Shows who trains."""
        self._cohort[client]["state"] = "[bold cyan]trains[/bold cyan]"
        self._refresh()

    def client_back(self, client: str) -> None:
        """One client further."""
        self._cohort[client]["state"] = "back"
        if self._task is not None:
            self._progress.advance(self._task)
        self._refresh()

    def client_done(self, record: Mapping[str, Any]) -> None:
        """What came of it."""
        entry = self._cohort[record["client"]]
        entry["state"] = "[green]done[/green]" if record["status"] == "ok" else "[red]failed[/red]"
        entry["loss"] = record["loss"]
        for direction in self._bytes:
            self._bytes[direction] += record["bytes"][direction]["total"]
        if record["failure"]:
            reason = next(iter(record["failure"]["detail"].splitlines()), record["failure"]["reason"])
            self.note(f"client {record['client']} failed: {reason}")
        for warning in record["warnings"]:
            self.note(f"client {record['client']}: {warning}")
        self._refresh()

    def round_done(self, record: Mapping[str, Any]) -> None:
        """One line per round where there is no live display."""
        self._last = record
        if self._live is None:
            line = f"round {record['server_round']}/{self._rounds}: {self._figures()}"
            self._console.print(Text(line), soft_wrap=True)
        self._refresh()

    def interrupted(self) -> None:
        """Says what happens now."""
        self._message = "stopping after this round; Ctrl-C again stops at once"
        if self._live is None:
            self.note(self._message)
        self._refresh()

    def finishing(self) -> None:
        """Closes the live part."""
        if self._live is not None:
            self._live.update(self._progress)
            self._live.stop()
            self._live = None
        self.step("reading the test set once")

    def finished(self, folder: Path) -> None:
        """Nothing further: the summary follows."""

    def already_finished(self, folder: Path) -> None:
        """Says so."""
        self.note(
            f"{folder} is already finished; the same command with --fresh runs it anew, "
            f"`fedstrata run --resume {shlex.quote(str(folder))} --set rounds.count=N` trains further"
        )

    def _refresh(self) -> None:
        if self._live is not None:
            self._live.update(self._view())

    def _view(self) -> Group:
        table = Table(box=None, padding=(0, 1, 0, 0), show_edge=False)
        for name in ("client", "device", "trains", "", "loss", ""):
            style = "dim" if name == "device" else ""
            table.add_column(name, style=style, header_style="dim", no_wrap=name != "device", overflow="fold")
        for client, entry in list(self._cohort.items())[:16]:
            blocks = set(entry["blocks"])
            bar = "".join("█" if b in blocks else "░" for b in range(self._blocks)) if self._blocks <= 40 else ""
            loss = f"{entry['loss']:.3f}" if entry["loss"] is not None else ""
            count = f"{len(blocks)} of {self._blocks} blocks"
            device = Text(self._devices.get(client, ""))
            table.add_row(Text(client), device, f"[cyan]{bar}[/cyan]", count, loss, entry["state"])
        # The last line always stands there: a display that grows while the terminal echoes ^C leaves a line behind.
        message = Text(self._message, style="yellow") if self._message else Text(_HINT, style="dim")
        return Group(self._progress, Text(self._figures(), style="bold"), table, message)

    def _figures(self) -> str:
        parts = []
        if self._last.get("train_loss") is not None:
            parts.append(f"training loss {self._last['train_loss']:.3f}")
        validation = self._last.get("metrics", {}).get("validation")
        if validation:
            parts.append(f"validation accuracy {validation['accuracy']:.3f}")
        parts.append(f"↑ {format_bytes(self._bytes['uplink'])}")
        parts.append(f"↓ {format_bytes(self._bytes['downlink'])}")
        parts.append(f"{time.perf_counter() - self._began:.0f} s")
        return "   ".join(parts)

"""The Python API: `fedstrata.run` and `fedstrata.load`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.errors import RunFolderError
from fedstrata.report.stored import CLIENTS_FILE, ROUNDS_FILE, read_records, read_run, read_summary


@dataclass(frozen=True)
class RunResult:
    """What a run left behind.

    Attributes:
        folder: The run folder.
    """

    folder: Path

    @property
    def info(self) -> dict[str, Any]:
        """`run.json`: the resolved spec, the status, where everything came from."""
        return read_run(self.folder)

    @property
    def summary(self) -> dict[str, Any]:
        """`summary.json`; only finished runs have one."""
        summary = read_summary(self.folder)
        if summary is None:
            raise RunFolderError(
                f"{self.folder} has no summary yet", do=f"finish it with `fedstrata run --resume {self.folder}`"
            )
        return summary

    @property
    def rounds(self) -> Any:
        """One row per round: a pandas DataFrame where pandas is installed, else a list of dicts."""
        return _table(read_records(self.folder / ROUNDS_FILE))

    @property
    def clients(self) -> Any:
        """One row per client and round, likewise."""
        return _table(read_records(self.folder / CLIENTS_FILE))

    @property
    def adapter(self) -> Path:
        """The folder that `PeftModel.from_pretrained` reads."""
        return self.folder / "adapter"

    def _repr_html_(self) -> str:
        picture = self.folder / "report.svg"
        if picture.exists():
            return picture.read_text(encoding="utf-8")
        return f"<code>fedstrata run in {self.folder}</code>"

    def draw(self) -> list[Path]:
        """Draws `report.svg` and `report.png` into the folder."""
        from fedstrata.report.picture import draw_run

        return draw_run(self.folder)


def run(
    experiment: str | Path | Mapping[str, Any],
    *,
    out: str | Path | None = None,
    fresh: bool = False,
    quiet: bool = False,
    keep_payloads: bool = False,
    engine: str = "auto",
    workers: int | None = None,
    **overrides: Any,
) -> RunResult:
    """Runs an experiment; an interrupted one goes on, a finished one is just loaded.

    Args:
        experiment: A TOML file, "quickstart", or the content of an experiment file as nested mappings.
        out: The run folder; `runs/<name>-<hash>` where None.
        fresh: Delete an earlier run in that folder first.
        quiet: No progress display.
        keep_payloads: Store every payload as it went over the line.
        engine: How clients run: "local" in this process, "pool" in worker processes, "auto" as it pays.
            Results are equal.
        workers: How many clients train at the same time; as many as there are cores where None.
        **overrides: Keys of the spec with `__` for dots, e.g. `rounds__count=20`; `seed` stands for `run__seed`.

    Returns:
        The result; `.summary`, `.rounds`, `.clients`, `.adapter`.

    Raises:
        FedstrataError: If anything a user can mend is wrong.

    Example:
        `fs.run("quickstart", rounds__count=2)`
    """
    from contextlib import nullcontext

    from rich.console import Console

    from fedstrata.experiment.load import load_spec
    from fedstrata.experiment.progress import RunDisplay
    from fedstrata.experiment.quickstart import quickstart_experiment
    from fedstrata.experiment.runner import RunOptions, run_experiment
    from fedstrata.experiment.watch import SilentWatch

    pairs = {("run.seed" if k == "seed" else k.replace("__", ".")): v for k, v in overrides.items()}
    display: Any = nullcontext(SilentWatch()) if quiet else RunDisplay(Console(stderr=True))
    with display as watch:
        quick = experiment == "quickstart"
        spec, base_dir = quickstart_experiment(watch, pairs) if quick else load_spec(experiment, pairs)
        options = RunOptions(
            Path(out) if out is not None else None,
            fresh=fresh,
            keep_payloads=keep_payloads,
            engine=engine,
            workers=workers,
        )
        return RunResult(run_experiment(spec, base_dir, options, watch).path)


def load(folder: str | Path) -> RunResult:
    """An earlier run, finished or not.

    Raises:
        RunFolderError: If the folder is no run folder.
    """
    path = Path(folder)
    read_run(path)
    return RunResult(path)


def _table(records: list[dict[str, Any]]) -> Any:
    try:
        import pandas as pd  # type: ignore[import-untyped]
    except ImportError:
        return records
    return pd.json_normalize(records, max_level=2)

"""Whole runs of the tiny experiment."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.experiment.build import Built, build
from fedstrata.experiment.load import load_spec, respec
from fedstrata.experiment.runner import RunOptions, run_experiment
from fedstrata.experiment.watch import SilentWatch, Watch


class TinyRuns:
    """Runs the tiny experiment with changes; folders are named below the test's own."""

    def __init__(self, world: Path, tiny: Callable[..., dict[str, Any]]) -> None:
        self.world, self.tiny = world, tiny

    def __call__(
        self, name: str, /, *, watch: Watch | None = None, options: dict[str, Any] | None = None, **changes: Any
    ) -> Path:
        """Runs and returns the folder."""
        spec, base = load_spec(self.tiny(**changes))
        chosen = RunOptions(out=self.world / name, **(options or {}))
        return run_experiment(spec, base, chosen, watch or SilentWatch()).path

    def built(self, folder: Path) -> Built:
        """The experiment of a folder, built anew."""
        return build(*respec(folder), SilentWatch())

    @staticmethod
    def watch(**callbacks: Callable[..., None]) -> Watch:
        """A silent watch with some callbacks."""
        watch = SilentWatch()
        for name, callback in callbacks.items():
            setattr(watch, name, callback)
        return watch

    @staticmethod
    def lines(folder: Path, name: str) -> list[dict[str, Any]]:
        """The records of `<name>.jsonl`."""
        return [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()]

    @staticmethod
    def read(folder: Path, name: str) -> dict[str, Any]:
        """The content of `<name>.json`."""
        value: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
        return value


@pytest.fixture
def runs(world: Path, tiny: Callable[..., dict[str, Any]]) -> TinyRuns:
    """Runs the tiny experiment."""
    return TinyRuns(world, tiny)

"""From a built run to workers: what they share, and how each of them opens its trainer."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.client import Trainer
from fedstrata.core.blob import map_blob, write_blob
from fedstrata.discovery import file_of, is_own
from fedstrata.engine.base import MachineBase
from fedstrata.engine.crew import CrewEngine
from fedstrata.engine.pool import ProcessCrew
from fedstrata.errors import EngineError
from fedstrata.experiment.build import Built
from fedstrata.experiment.plugins import load_plugins
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.record.clients import ClientStates
from fedstrata.record.files import TEMPORARY_SUFFIX, plain_os_errors
from fedstrata.record.site import Site, SiteBase
from fedstrata.train.share import TrainerParts, condensed, model_parts, open_trainer, trainer_arrays

SHARED_FOLDER = "workers" + TEMPORARY_SUFFIX
"""In the run folder; what a kill leaves of it goes with the other leftovers."""


@dataclass(frozen=True, eq=False)
class WorkerKit:
    """Everything that a worker needs beside the arrays.

    Attributes:
        parts: Of its trainer.
        spec: Names the files with parts of the user's.
        base_dir: Where relative paths of the spec start.
        modules: Modules that register parts when they are imported.
    """

    parts: TrainerParts
    spec: ExperimentSpec
    base_dir: Path
    modules: tuple[str, ...]

    def open(self, arrays: Mapping[str, np.ndarray], site: Site) -> Trainer:
        """The trainer."""
        load_plugins(self.spec, self.base_dir)
        for name in self.modules:
            importlib.import_module(name)
        trainer = open_trainer(self.parts, arrays)
        trainer.site = site
        return trainer


@dataclass(frozen=True, eq=False)
class FileOpener:
    """Opens a worker's trainer over a file of arrays that all workers of this machine map."""

    kit: WorkerKit
    path: Path

    def __call__(self, site: Site) -> Trainer:
        """The trainer."""
        return self.kit.open(map_blob(self.path)[0], site)


def make_kit(built: Built, base_dir: Path) -> tuple[WorkerKit, dict[str, np.ndarray]]:
    """A run's kit and arrays."""
    model, weights = model_parts(built.trainer.adapted.loaded, built.weights)
    owners, data = trainer_arrays(built.dataset, built.indices)
    parts = TrainerParts(
        model,
        built.spec.adapter,
        built.setup.layout,
        built.setup.scaling,
        owners,
        built.dataset.num_truncated,
        built.dataset.max_length,
        built.spec.run.seed,
        built.spec.compute.threads_per_client,
        built.spec.eval.batch_size,
        built.spec.compute.reuse_memory_bytes,
    )
    return WorkerKit(parts, built.spec, base_dir, _modules(built)), weights | data


@contextmanager
def pool_engine(
    built: Built, base_dir: Path, folder: Path, num_workers: int, states: ClientStates, site: SiteBase
) -> Iterator[CrewEngine]:
    """Worker processes for a run, with what they share in a folder of their own."""
    shared = folder / SHARED_FOLDER
    crew = ProcessCrew(*_shared_opener(built, base_dir, shared, num_workers))
    base = MachineBase(site, built.setup.base_layout, partial(condensed, adapter=built.spec.adapter))
    with CrewEngine(crew, states, base, folder=shared / "replies") as engine:
        yield engine


def _shared_opener(built: Built, base_dir: Path, shared: Path, num_workers: int) -> tuple[FileOpener, int, Path]:
    kit, arrays = make_kit(built, base_dir)
    path = shared / "arrays"
    with plain_os_errors(path):
        shared.mkdir(parents=True, exist_ok=True)
        with path.open("wb") as file:
            write_blob(file, arrays, {})
    return FileOpener(kit, path.resolve()), num_workers, shared.resolve()


def _modules(built: Built) -> tuple[str, ...]:
    """Modules of the user's that bring what clients run: they register it again in a worker.

    Files that the spec names are loaded by the spec.

    Raises:
        EngineError: If something was written in the main script or in a notebook, where a worker cannot find it.
    """
    setup = built.setup
    classes = {type(p) for part in (setup.method.objective, *setup.codecs) for p in _with_inner(part)}
    outside = [c for c in classes if not is_own(c) and file_of(c) is None]
    for part in outside:
        if part.__module__ == "__main__":
            raise EngineError(
                f"Workers cannot find {part.__qualname__}",
                expected="a part in a module or a file of its own",
                got="one that is written in the main script or in a notebook",
                do="put it into a file, or run with --engine local",
            )
    return tuple(sorted({c.__module__ for c in outside}))


def _with_inner(part: Any) -> Iterator[Any]:
    """A part and the parts inside it."""
    yield part
    if is_dataclass(part):
        for field in fields(part):
            inner = getattr(part, field.name)
            if is_dataclass(inner):
                yield from _with_inner(inner)

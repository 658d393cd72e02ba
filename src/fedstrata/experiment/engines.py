"""Which engine runs the clients, with how many workers. It decides how long a run takes, and nothing else."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from fedstrata.engine.local import LocalEngine
from fedstrata.errors import ConfigError, EngineError, did_you_mean
from fedstrata.experiment.build import Built
from fedstrata.experiment.watch import Watch
from fedstrata.experiment.workers import pool_engine
from fedstrata.plan.base import ClientPlan
from fedstrata.record.clients import FolderStates
from fedstrata.record.site import SiteBase
from fedstrata.server.measure import local_flop
from fedstrata.server.orders import Engine

ENGINES = ("auto", "local", "pool")
CORE_FLOP_PER_S = 5e10
"""A guess for one core; it only decides whether workers are worth their start."""
START_S = 10.0
"""Training must get shorter by this much, or workers are not worth their start."""
WORKER_BYTES = 600 << 20
"""What a worker needs for itself, beside copies of what is trained in full."""


@dataclass(frozen=True)
class EngineChoice:
    """An engine and its size.

    Attributes:
        name: `local` or `pool`.
        workers: How many clients can train at the same time.
        why: In words, where it was not asked for.
    """

    name: str
    workers: int = 1
    why: str = ""


def check_engine(name: str, workers: int | None) -> None:
    """Refuses an engine that does not exist.

    Raises:
        ConfigError: If there is no such engine, or it has no such number of workers.
    """
    if name not in ENGINES:
        raise ConfigError(f'There is no engine "{name}"', where="--engine", do=did_you_mean(name, ENGINES))
    if workers is not None and workers < 1:
        raise ConfigError("There must be at least one worker", where="--workers", got=str(workers))
    if workers is not None and name == "local":
        raise ConfigError("--engine local has no workers", got=f"--workers {workers}", do="leave one of the two out")


def choose_engine(name: str, workers: int | None, built: Built, rounds_left: int) -> EngineChoice:
    """The engine that was asked for; with `auto` processes where they save time, else this one.

    Args:
        name: `auto`, `local` or `pool`.
        workers: How many; None: one per usable core and `threads_per_client`, no more than the cohort and memory allow.
        built: The run.
        rounds_left: How many rounds are still to come.
    """
    if name == "local":
        return EngineChoice("local")
    setup = built.setup
    cohort = min(setup.clients_per_round or len(setup.workers), len(setup.workers))
    count = workers or max(1, min(usable_cores() // setup.threads, cohort, _that_fit(built)))
    if name != "auto":
        return EngineChoice(name, count)
    if count == 1 or cohort == 1:
        return EngineChoice("local", why="one client at a time")
    sizes = [local_flop(setup, ClientPlan(c, setup.server_ranks, {})) for c in setup.workers.ids]
    train_s = rounds_left * cohort * math.fsum(sizes) / len(sizes) / CORE_FLOP_PER_S
    if train_s * (1 - 1 / count) < START_S:
        return EngineChoice("local", why="too little work for workers")
    return EngineChoice("pool", count)


@contextmanager
def open_engine(
    choice: EngineChoice, built: Built, base_dir: Path, folder: Path, watch: Watch, *, may_fall_back: bool
) -> Iterator[tuple[Engine, EngineChoice]]:
    """The engine, ready, and what it became: where workers cannot start, clients may train in this process.

    Raises:
        EngineError: If workers cannot start, and nothing else may take their place.
    """
    site = built.trainer.site = SiteBase(folder / "site" / "base.safetensors")
    states = FolderStates(folder / "clients")
    with ExitStack() as stack:
        if choice.name == "pool":
            watch.step(f"starting {choice.workers} workers")
            try:
                engine = stack.enter_context(pool_engine(built, base_dir, folder, choice.workers, states, site))
                engine.start()
            except EngineError as error:
                if not may_fall_back:
                    raise
                stack.close()
                watch.note(f"no workers, clients train one after the other: {error.one_line}")
                choice = EngineChoice("local", why=error.what)
            else:
                yield engine, choice
                return
        yield LocalEngine(built.trainer, states), choice


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and the limit of its container."""
    found = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text(encoding="ascii").split()
        found = min(found, max(1, math.ceil(int(quota) / int(period))))
    except (OSError, ValueError):  # no such limit here
        pass
    return found


def _that_fit(built: Built) -> int:
    """How many workers fit into free memory; what is trained in full is there with its gradient and two moments."""
    own = 4 * built.setup.shape.base_bytes if built.setup.adapter == "full" else 0
    return max(1, int(psutil.virtual_memory().available // (WORKER_BYTES + own)))


def engine_record(choice: EngineChoice) -> dict[str, Any]:
    """What `run.json` says under `measured`."""
    return asdict(choice)

"""Trainers that worker processes of the tests open: several real ones behind each other, or one that misbehaves."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.client import FisherSums, LocalWork, Score, Trainer
from fedstrata.core.merges import Merge
from fedstrata.core.tensors import Layout, NamedTensors
from fedstrata.engine.base import FollowedBase
from fedstrata.message import Task, TaskLayouts
from fedstrata.record.site import Site


@dataclass
class Step:
    """Adds one to what it trains; some clients kill their process, sleep or raise.

    Attributes:
        layout: The server's tensors.
        marks: Where it notes who began, a file per try.
        kills: How many tries of a client end in SIGKILL.
        sleeps_s: How long a client takes.
        waits_for: How many tries of all clients must have begun before a client goes on.
        sizes: How many examples a client has, 1 where it is not here.
    """

    layout: Layout
    marks: Path
    kills: dict[str, int] = field(default_factory=dict)
    sleeps_s: dict[str, float] = field(default_factory=dict)
    waits_for: dict[str, int] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)

    def __call__(self, site: Site) -> Trainer:
        return self

    @property
    def server_layout(self) -> Layout:
        return self.layout

    @property
    def base_layout(self) -> Layout:
        return self.layout

    def initial(self, layout: Layout) -> NamedTensors:
        return layout.zeros()

    def take_merges(self, client: str, known: int, number: int, merges: Sequence[Merge], *, keep: bool) -> None:
        raise AssertionError("nothing is merged here")

    def train(self, task: Task, layouts: TaskLayouts, start: NamedTensors) -> LocalWork:
        tries = len(list(self.marks.glob(f"{task.client}.*")))
        (self.marks / f"{task.client}.{tries}").write_text(str(os.getpid()))
        time.sleep(self.sleeps_s.get(task.client, 0.0))
        until = time.monotonic() + 60
        while len(list(self.marks.glob("*"))) < self.waits_for.get(task.client, 0) and time.monotonic() < until:
            time.sleep(0.02)
        if tries < self.kills.get(task.client, 0):
            os.kill(os.getpid(), signal.SIGKILL)
        if task.client == "raises":
            raise ValueError("the disk of this client is full")
        tensors = {n: t + np.float32(1) for n, t in start.items()}
        return LocalWork(tensors, num_examples=self.sizes.get(task.client, 1), num_steps=1, loss=0.0)

    def evaluate(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> Score:
        return Score(1, 0.0, 1)

    def gradient(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> tuple[NamedTensors, int]:
        raise AssertionError("nobody asks here")

    def fisher(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> FisherSums:
        raise AssertionError("nobody asks here")


@dataclass
class Several:
    """Opens several trainers, so that workers need to start only once: the file `now` says whose turn it is."""

    openers: dict[str, Any]
    now: Path

    def __call__(self, site: Any) -> Any:
        return Switch(self, site)


class Switch:
    """The trainer whose turn it is."""

    def __init__(self, several: Several, site: Any) -> None:
        self._several, self._fetch, self._open = several, site._fetch, {}

    def __getattr__(self, name: str) -> Any:
        key = self._several.now.read_text()
        if key not in self._open:
            self._open[key] = self._several.openers[key](FollowedBase(self._fetch))
        return getattr(self._open[key], name)


@dataclass
class Broken:
    """Cannot be opened."""

    def __call__(self, site: Site) -> Trainer:
        raise MemoryError("no room for the model")

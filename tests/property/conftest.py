"""A small world for the laws of methods: twelve blocks, non-square maps, a trainer of numpy and seeded noise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest

from fedstrata.client import LocalWork, Score
from fedstrata.codec import Codec, Float32
from fedstrata.core.lora import init_lora
from fedstrata.core.rng import generator
from fedstrata.core.shape import AdapterKind, ModelShape, TargetShape, global_layout
from fedstrata.core.tensors import EMBEDDINGS, HEAD, Layout, NamedTensors, Stratum, TensorSpec
from fedstrata.core.wire import Bytes
from fedstrata.device.fleet import Client, DeviceProfile, Fleet
from fedstrata.engine.local import LocalEngine
from fedstrata.message import Task, TaskLayouts
from fedstrata.method import METHODS, Method
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.clients import MemoryStates
from fedstrata.record.failure import ClientFailure
from fedstrata.round import Observer, run_round
from fedstrata.server.setup import POOLED_CLIENT, RoundSetup

NUM_BLOCKS = 12
DEVICES = {name: DeviceProfile(name, 1 << 30, rate, 1e6, 1e6) for name, rate in (("big", 2e9), ("small", 1e9))}
OPTIONS: dict[str, dict[str, Any]] = {
    "last_k": {"k": 2},
    "fedra_freeze": {"strata": {"big": 3, "small": 2}},
    "suffix_by_device": {"depth": {"big": 11, "small": 1}},
}


def make_method(name: str, **options: Any) -> Method:
    """A method with options that fit the small world."""
    return METHODS.build(name, OPTIONS.get(name, {}) | options)


CASES = [(name, adapter) for name in sorted(METHODS.entries) for adapter in sorted(make_method(name).adapters)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a `case` runs for every method with every kind of adapter that it is defined for."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=["-".join(c) for c in CASES])


def make_shape(width: int, height: int) -> ModelShape:
    """Per block a map `q` of [height, width] and a map `v` of [width, height + 1]; a head; for `full` the same maps."""
    targets, parameters = [], [TensorSpec("words", (4, width), EMBEDDINGS)]
    for block in range(NUM_BLOCKS):
        for name, n_in, n_out in (("q", width, height), ("v", height + 1, width)):
            targets.append(TargetShape(f"layers.{block}.{name}", block, n_in, n_out))
            parameters.append(TensorSpec(f"layers.{block}.{name}.weight", (n_out, n_in), block))
    head = (TensorSpec("classifier.weight", (3, width), HEAD), TensorSpec("classifier.bias", (3,), HEAD))
    return ModelShape("Small", NUM_BLOCKS, width, 16, tuple(targets), head, (*parameters, *head), 4000)


@dataclass
class NoiseTrainer:
    """Adds noise to what is trained; the noise depends on round, client and tensor, and a little on the start.

    `habits` names clients that misbehave: "raise", "nan", "stray" (changes something unplanned), "still".
    """

    server_layout: Layout
    sizes: Mapping[str, int]
    habits: dict[str, str] = field(default_factory=dict)
    all_alike: bool = False
    starts: dict[str, NamedTensors] = field(default_factory=dict)
    local: dict[str, NamedTensors] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)

    def initial(self, layout: Layout) -> NamedTensors:
        first = init_lora(3, layout)
        return {s.name: first.get(s.name, np.full(s.shape, 0.5, np.float32)) for s in layout}

    def train(self, task: Task, layouts: TaskLayouts, start: NamedTensors) -> LocalWork:
        habit = self.habits.get(task.client)
        self.tasks[task.client] = task
        self.starts[task.client] = {n: t.copy() for n, t in start.items()}
        if habit == "raise":
            raise ValueError("the disk of this client is full")
        tensors = {n: t.copy() for n, t in start.items()}
        whose = "all" if self.all_alike else task.client
        for spec in layouts.trained:
            rng = generator(5, "noise", task.server_round, whose, spec.name)
            noise = rng.standard_normal(spec.shape).astype(np.float32)
            if habit != "still":
                tensors[spec.name] = (0.9 * tensors[spec.name] + 0.3 * noise).astype(np.float32)
        if habit == "nan":
            next(iter(tensors[n] for n in layouts.trained.names)).flat[0] = np.nan
        if habit == "stray":
            name = next(n for n in layouts.present.names if n not in layouts.trained)
            tensors[name] = tensors[name] + np.float32(1e-6)
        self.local[task.client] = {n: t.copy() for n, t in tensors.items()}
        steps = 0 if habit == "still" else int(task.train["local_steps"])
        return LocalWork(tensors, self.sizes[task.client], steps, 0.75, measured={"train_s": 0.5})

    def evaluate(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> Score:
        return Score(4, 2.0, 3)


@dataclass
class Line:
    """An engine that damages what some clients answer, and counts what crosses the line."""

    inner: LocalEngine
    damage: set[str] = field(default_factory=set)

    def run(self, tasks: Iterable[tuple[str, int, Bytes]]) -> Iterator[tuple[str, Bytes | ClientFailure]]:
        for client, answer in self.inner.run(tasks):
            if client in self.damage and not isinstance(answer, ClientFailure):
                data = bytearray(answer)
                data[-1] ^= 1
                yield client, bytes(data)
            else:
                yield client, answer


@dataclass
class World:
    """A setup, its trainer and its state; `round()` advances it."""

    setup: RoundSetup
    trainer: NoiseTrainer
    state: ServerState
    line: Line
    states: MemoryStates
    payloads: dict[tuple[str, str], Bytes] = field(default_factory=dict)

    def round(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Runs one round; returns its record and the clients' records by client."""
        self.payloads.clear()
        observer = Observer(
            payload=lambda r, client, direction, data: self.payloads.update({(client, direction): data})
        )
        self.state, record, clients = run_round(self.setup, self.state, self.line, observer)
        return record, {c["client"]: c for c in clients}


class Lab:
    """Makes worlds."""

    method = staticmethod(make_method)
    pooled = POOLED_CLIENT

    def world(
        self,
        method: Method,
        adapter: AdapterKind = "lora",
        *,
        sizes: Mapping[str, int],
        width: int = 5,
        height: int = 7,
        rank: int = 3,
        trained_before: bool = True,
        habits: Mapping[str, str] | None = None,
        damage: Iterable[str] = (),
        all_alike: bool = False,
        downlink: Codec | None = None,
        **setup: Any,
    ) -> World:
        """A world whose server has random tensors; every stratum has changed once unless `trained_before` is False."""
        shape = make_shape(width, height)
        kinds = list(DEVICES.values())
        fleet = Fleet(tuple(Client(c, kinds[i % 2], n) for i, (c, n) in enumerate(sorted(sizes.items()))))
        ranks: dict[Stratum, int]
        if adapter == "full":
            ranks = {EMBEDDINGS: 1, **dict.fromkeys(shape.blocks, 1), HEAD: 1}
        else:
            ranks = {**method.planner.server_ranks(shape, rank), HEAD: 1}
        layout = global_layout(shape, adapter, ranks)
        options = {
            "seed": 11,
            "num_rounds": 9,
            "clients_per_round": None,
            "min_replies": 1,
            "train": {
                "learning_rate": 0.1, "schedule": "constant", "batch_size": 4, "local_steps": 2, "local_epochs": None,
            },
            "max_length": 8,
        } | setup  # fmt: skip
        made = RoundSetup(
            method=method,
            shape=shape,
            fleet=fleet,
            layout=layout,
            scaling={t: 1.5 for t in layout.targets},
            downlink=downlink or Float32(),
            **options,
        )
        trainer = NoiseTrainer(layout, dict(sizes) | {POOLED_CLIENT: sum(sizes.values())}, dict(habits or {}))
        trainer.all_alike = all_alike
        state = ServerState(
            self._tensors(layout, trainer, trained_before),
            server_round=3 if trained_before else 0,
            versions={str(s): 1 + (i % 3) if trained_before else 0 for i, s in enumerate(layout.strata)},
            planner=method.planner.init(shape, made.workers),
            selector=method.selector.init(),
        )
        states = MemoryStates()
        return World(made, trainer, state, Line(LocalEngine(trainer, states), set(damage)), states)

    def without(self, world: World, client: str) -> World:
        """The same world at the same moment, without one client."""
        fleet = Fleet(tuple(c for c in world.setup.fleet.clients if c.id != client))
        trainer = NoiseTrainer(world.trainer.server_layout, world.trainer.sizes)
        states = MemoryStates()
        setup = replace(world.setup, fleet=fleet)
        return World(setup, trainer, world.state, Line(LocalEngine(trainer, states)), states)

    @staticmethod
    def _tensors(layout: Layout, trainer: NoiseTrainer, trained_before: bool) -> NamedTensors:
        first = trainer.initial(layout)
        if not trained_before:
            return first
        return {
            n: (t + generator(7, "server", n).standard_normal(t.shape) * 0.4).astype(np.float32)
            for n, t in first.items()
        }

    @staticmethod
    def effective(world: World, tensors: Mapping[str, np.ndarray], stratum: Stratum) -> dict[str, np.ndarray]:
        """Effective weights of one stratum in float64: base + s·B·A per map, and plain weights as they are."""
        result = {}
        for spec in world.setup.layout.of(stratum):
            if spec.kind == "weight":
                result[spec.name] = tensors[spec.name].astype(np.float64)
            elif spec.kind == "lora_A":
                a, b = (tensors[f"{spec.target}.{f}"].astype(np.float64) for f in ("lora_A", "lora_B"))
                base = generator(13, "base", spec.target).standard_normal((b.shape[0], a.shape[1]))
                result[spec.target] = base + world.setup.scaling[spec.target] * (b @ a)
        return result


@pytest.fixture(scope="session")
def lab() -> Lab:
    """Makes worlds."""
    return Lab()

"""A small world for the laws of methods: non-square maps, two kinds of devices, a trainer of numpy and seeded noise."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from fedstrata.aggregate import sketch_slices
from fedstrata.client import FisherSums, LocalWork, Score
from fedstrata.codec import Codec, Float32
from fedstrata.core.lora import init_lora, lora_scaling, orthonormal_rows
from fedstrata.core.merges import BaseLog, Merge
from fedstrata.core.rng import generator
from fedstrata.core.shape import AdapterKind, ModelShape, TargetShape, global_layout
from fedstrata.core.tensors import EMBEDDINGS, HEAD, Layout, NamedTensors, Stratum, TensorSpec, leading_slice
from fedstrata.core.wire import Bytes, peek_header
from fedstrata.device.fleet import Client, DeviceProfile, Fleet
from fedstrata.engine.local import LocalEngine
from fedstrata.message import Task, TaskLayouts
from fedstrata.method import METHODS, Method
from fedstrata.optimize import NoOptimizer
from fedstrata.plan.base import ContestPlanner
from fedstrata.record.checkpoint import ServerState, load_checkpoint, save_checkpoint
from fedstrata.record.clients import FolderStates, MemoryStates
from fedstrata.record.failure import ClientFailure
from fedstrata.record.site import SiteBase
from fedstrata.round import Observer, run_round
from fedstrata.select import AcceptAll
from fedstrata.server.orders import Answer, Order
from fedstrata.server.setup import POOLED_CLIENT, RoundSetup

NUM_BLOCKS = 12
ALPHA = 4.5
DEVICES = {name: DeviceProfile(name, 1 << 30, rate, 1e6, 1e6) for name, rate in (("big", 2e9), ("small", 1e9))}
OPTIONS: dict[str, dict[str, Any]] = {
    "last_k": {"k": 2},
    "fedra_freeze": {"strata": {"big": 3, "small": 2}},
    "fedra_skip": {"strata": {"big": 3, "small": 2}},
    "suffix_by_device": {"depth": {"big": 3, "small": 1}},
    "legend": {"rank_start": 1, "rank_step": 0.4},
    "fedadapter": {"start_width": 2, "step": 1, "max_width": 4},
}
"""Options that fit models of 4 and of 12 blocks whose maps have at least 5 rows and columns."""


def make_method(name: str, **options: Any) -> Method:
    """A method with options that fit the small world."""
    return METHODS.build(name, OPTIONS.get(name, {}) | options)


def plain_method(name: str, **options: Any) -> Method:
    """The method as laws 1, 2 and 7 ask for it: no selector, float32, no server optimizer."""
    return make_method(name, **options).with_parts(selector=AcceptAll(), codec=Float32(), optimizer=NoOptimizer())


CASES = [(name, adapter) for name in sorted(METHODS.entries) for adapter in sorted(make_method(name).adapters)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that asks for a `case` runs for every method with every kind of adapter that it is defined for."""
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", CASES, ids=["-".join(c) for c in CASES])


def make_shape(width: int, height: int, num_blocks: int) -> ModelShape:
    """Per block a map `q` of [height, width] and a map `v` of [width, height + 1]; a head; for `full` the same maps."""
    targets, parameters = [], [TensorSpec("words", (4, width), EMBEDDINGS)]
    for block in range(num_blocks):
        for name, n_in, n_out in (("q", width, height), ("v", height + 1, width)):
            targets.append(TargetShape(f"layers.{block}.{name}", block, n_in, n_out))
            parameters.append(TensorSpec(f"layers.{block}.{name}.weight", (n_out, n_in), block))
    head = (TensorSpec("classifier.weight", (3, width), HEAD), TensorSpec("classifier.bias", (3,), HEAD))
    return ModelShape("Small", num_blocks, width, 16, tuple(targets), head, (*parameters, *head), 4000)


@dataclass
class NoiseTrainer:
    """Adds noise to what is trained; the noise depends on round, client and tensor, and a little on the start.

    `habits` names clients that misbehave: "raise", "nan", "stray" (changes something unplanned), "still". With
    `all_alike` all clients make the same change; a smaller rank makes the first slices of it.
    """

    server_layout: Layout
    base_layout: Layout
    sizes: Mapping[str, int]
    habits: dict[str, str] = field(default_factory=dict)
    all_alike: bool = False
    seed: int = 11
    noise: float = 0.3
    site: SiteBase = field(default_factory=SiteBase)
    starts: dict[str, NamedTensors] = field(default_factory=dict)
    local: dict[str, NamedTensors] = field(default_factory=dict)
    tasks: dict[str, Task] = field(default_factory=dict)
    bases: dict[str, BaseLog] = field(default_factory=dict)

    def initial(self, layout: Layout) -> NamedTensors:
        first = init_lora(self.seed, layout)
        return {s.name: first.get(s.name, np.full(s.shape, 0.5, np.float32)) for s in layout}

    def train(self, task: Task, layouts: TaskLayouts, start: NamedTensors) -> LocalWork:
        habit = self._habit(task)
        self.tasks[task.client] = task
        self.bases[task.client] = self.site.log
        self.starts[task.client] = {n: t.copy() for n, t in start.items()}
        tensors = {n: t.copy() for n, t in start.items()}
        whose = "all" if self.all_alike else task.client
        for spec in layouts.trained:
            rng = generator(5, "noise", task.server_round, whose, spec.name)
            noise = leading_slice(rng.standard_normal(self.server_layout[spec.name].shape), spec.shape)
            if habit != "still":
                tensors[spec.name] = (0.9 * tensors[spec.name] + self.noise * noise).astype(np.float32)
        if habit == "nan":
            next(iter(tensors[n] for n in layouts.trained.names)).flat[0] = np.nan
        if habit == "stray":
            name = next((n for n in layouts.present.names if n not in layouts.trained), "a.stranger")
            tensors[name] = tensors.get(name, np.zeros(2, np.float32)) + np.float32(1e-6)
        self.local[task.client] = {n: t.copy() for n, t in tensors.items()}
        steps = 0 if habit == "still" else int(task.train["local_steps"])
        return LocalWork(tensors, self.sizes[task.client], steps, 0.75, measured={"train_s": 0.5})

    def evaluate(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> Score:
        return Score(4, 2.0, 3)

    def take_merges(self, client: str, known: int, number: int, merges: Sequence[Merge], *, keep: bool) -> None:
        self.bases[client] = self.site.take(client, known, number, merges, keep=keep)

    def fisher(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> FisherSums:
        bad = self._habit(task) == "nan"
        blocks = task.options["strata"]
        rng = generator(5, "fisher", task.server_round, task.client)
        found = {b: np.nan if bad else float(x) for b, x in zip(blocks, rng.random(len(blocks)), strict=True)}
        return FisherSums(found, 8)

    def gradient(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> tuple[NamedTensors, int]:
        self._habit(task)
        rng = generator(5, "gradient", task.client)
        return {s.name: rng.standard_normal(s.shape).astype(np.float32) for s in self.base_layout}, self.sizes[
            task.client
        ]

    def _habit(self, task: Task) -> str | None:
        habit = self.habits.get(task.client)
        if habit == "raise":
            raise ValueError("the disk of this client is full")
        return habit


@dataclass
class Line:
    """An engine that damages what some clients answer."""

    inner: LocalEngine
    damage: set[str] = field(default_factory=set)

    def run(self, orders: Sequence[Order]) -> Iterator[tuple[str, Answer]]:
        for client, answer in self.inner.run(orders):
            if client in self.damage and not isinstance(answer, ClientFailure):
                data = bytearray(answer)
                data[-1] ^= 1
                yield client, bytes(data)
            else:
                yield client, answer


@dataclass
class World:
    """A setup, its trainer and its state; `round()` advances it, `before` is the state that the last round had."""

    setup: RoundSetup
    trainer: NoiseTrainer
    state: ServerState
    line: Line
    states: MemoryStates | FolderStates
    payloads: dict[tuple[str, str], Bytes] = field(default_factory=dict)
    before: ServerState | None = None

    def round(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Runs one round; returns its record and the clients' records by client."""
        self.payloads.clear()
        observer = Observer(
            payload=lambda r, client, direction, data: self.payloads.update({(client, direction): data})
        )
        self.before = self.state
        self.state, record, clients = run_round(self.setup, self.state, self.line, observer)
        return record, {c["client"]: c for c in clients}

    @property
    def is_slicing(self) -> bool:
        """Whether clients share rank slices with the server, all in its scaling."""
        aggregator = self.setup.method.aggregator
        return aggregator.unequal_ranks and not aggregator.folds_scaling

    def sent_rank(self, client: str, stratum: Stratum) -> int:
        """The rank that the last reply states."""
        return int(peek_header(self.payloads[client, "up"])["ranks"][str(stratum)])

    def slices(self, client: str, stratum: Stratum) -> list[int]:
        """Which of the server's rank slices the last reply is about."""
        rank = self.sent_rank(client, stratum)
        if self.setup.method.pairs.slices == "leading":
            return list(range(rank))
        whole = self.setup.server_ranks[stratum]
        return list(sketch_slices(self.setup.seed, self.state.server_round, client, whole, rank))

    def pair(self, client: str, target: str, tensors: Mapping[str, np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """A and B of a client in float64, as far as they were sent."""
        rank = self.sent_rank(client, self.setup.layout[f"{target}.lora_A"].stratum)
        a, b = (tensors[f"{target}.{f}"].astype(np.float64) for f in ("lora_A", "lora_B"))
        return a[:rank], b[:, :rank]

    def client_scaling(self, client: str, target: str) -> float:
        """s_k."""
        task = self.trainer.tasks[client]
        layouts = task.layouts(self.setup.layout)
        return task.scalings(self.setup.scaling, self.setup.layout, layouts.present)[target]

    def weight(self, target: str, merged: BaseLog, state: ServerState | None = None) -> np.ndarray:
        """The base weight of a target with what was merged into it, in float64."""
        a, b = f"{target}.lora_A", f"{target}.lora_B"
        shape = (self.setup.layout[b].shape[0], self.setup.layout[a].shape[1])
        base = generator(13, "base", target).standard_normal(shape)
        return np.asarray(base + merged.dense().get(target, np.zeros(1)))

    def effective(self, state: ServerState, target: str, slices: list[int] | None = None) -> np.ndarray:
        """Base + s·B·A of the server in float64; of some rank slices only."""
        a, b = (state.tensors[f"{target}.{f}"].astype(np.float64) for f in ("lora_A", "lora_B"))
        which = range(len(a)) if slices is None else slices
        product = b[:, list(which)] @ a[list(which)]
        return np.asarray(self.weight(target, state.base) + self.setup.scaling[target] * product)

    def sides(self, client: str, stratum: Stratum) -> list[tuple[str, np.ndarray, np.ndarray]]:
        """(name, server's, client's) of everything that a stratum adds to the model and that both of them have.

        Effective weights of maps, on the slices that were trained where slices are shared; one factor where the other
        one stays on its client; other tensors as they are.
        """
        found = []
        layouts = self.trainer.tasks[client].layouts(self.setup.layout)
        for spec in layouts.up.of(stratum):
            mine, server = self.trainer.local[client][spec.name], self.state.tensors[spec.name]
            if spec.kind not in ("lora_A", "lora_B") or self.setup.method.pairs.local:
                found.append((spec.name, leading_slice(server, mine.shape).astype(np.float64), mine.astype(np.float64)))
                continue
            if spec.target in {name for name, _, _ in found}:
                continue
            a, b = self.pair(client, spec.target, self.trainer.local[client])
            scaling = self.setup.scaling[spec.target] if self.is_slicing else self.client_scaling(client, spec.target)
            slices = self.slices(client, stratum) if self.is_slicing else None
            whole = self.weight(spec.target, self.trainer.bases[client]) + scaling * (b @ a)
            found.append((spec.target, self.effective(self.state, spec.target, slices), whole))
        return found

    def reopen(self, folder: Path) -> World:
        """The same world as another process finds it: everything that counts is read from files again."""
        path = folder / "state"
        save_checkpoint(path, self.state, "hash")
        trainer = replace(self.trainer, site=SiteBase(folder / "base"), starts={}, local={}, tasks={}, bases={})
        states = FolderStates(folder / "clients")
        line = Line(LocalEngine(trainer, states), self.line.damage)
        return World(self.setup, trainer, load_checkpoint(path)[0], line, states)


class Lab:
    """Makes worlds."""

    method = staticmethod(make_method)
    plain = staticmethod(plain_method)
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
        num_blocks: int = NUM_BLOCKS,
        kinds: Sequence[str] = ("big", "small"),
        trained_before: bool = True,
        habits: Mapping[str, str] | None = None,
        damage: Iterable[str] = (),
        all_alike: bool = False,
        downlink: Codec | None = None,
        folder: Path | None = None,
        **setup: Any,
    ) -> World:
        """A world whose server looks as if it had trained for three rounds, unless `trained_before` is False."""
        shape = make_shape(width, height, num_blocks)
        devices = [DEVICES[k] for k in kinds]
        fleet = Fleet(tuple(Client(c, devices[i % len(devices)], n) for i, (c, n) in enumerate(sorted(sizes.items()))))
        ranks: dict[Stratum, int] = {HEAD: 1}
        if adapter == "full":
            ranks |= {EMBEDDINGS: 1, **dict.fromkeys(shape.blocks, 1)}
        else:
            ranks |= method.planner.server_ranks(shape, rank)
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
            "head": method.head or "aggregate",
            "examples_of": {"client_heldout": dict.fromkeys((*sizes, POOLED_CLIENT), 8)},
            "scaling_power": 1.0 if method.scaling in ("by_rank", "by_sketch") else 0.0,
        } | setup  # fmt: skip
        made = RoundSetup(
            method=method,
            shape=shape,
            fleet=fleet,
            layout=layout,
            scaling=_scaling(method, layout),
            downlink=downlink or Float32(),
            kind=adapter,
            **options,
        )
        everyone = dict(sizes) | {POOLED_CLIENT: sum(sizes.values())}
        site = SiteBase(folder / "base") if folder else SiteBase()
        trainer = NoiseTrainer(layout, made.base_layout, everyone, dict(habits or {}), all_alike, made.seed, site=site)
        state = ServerState(
            _tensors(method, layout, trainer, trained_before),
            server_round=3 if trained_before else 0,
            versions={str(s): 1 + (i % 3) if trained_before else 0 for i, s in enumerate(layout.strata)},
            planner=method.planner.init(shape, made.workers),
            selector=method.selector.init(),
            base=_merged(layout) if trained_before and method.aggregator.moves_base else BaseLog(),
        )
        states = FolderStates(folder / "clients") if folder else MemoryStates()
        return World(made, trainer, state, Line(LocalEngine(trainer, states), set(damage)), states)

    def without(self, world: World, client: str) -> World:
        """The same world at the same moment, without one client."""
        fleet = Fleet(tuple(c for c in world.setup.fleet.clients if c.id != client))
        trainer = replace(world.trainer, habits={}, site=SiteBase(), starts={}, local={}, tasks={}, bases={})
        states = MemoryStates()
        setup = replace(world.setup, fleet=fleet)
        return World(setup, trainer, world.state, Line(LocalEngine(trainer, states)), states)

    @staticmethod
    def trained_by(world: World, record: Mapping[str, Any], clients: Mapping[str, Any]) -> dict[Stratum, list[str]]:
        """Stratum → the clients whose reply trained what the server shows of it, itself left out where it is local.

        Of candidates that train side by side the server shows the one called "same" until they are judged.
        """
        held: dict[Stratum, list[str]] = {}
        groups = record["why"].get("groups", {}) if isinstance(world.setup.method.planner, ContestPlanner) else {}
        for client, line in clients.items():
            if groups.get(client, "same") == "same":
                for key in line["trained"]:
                    stratum = cast("Stratum", int(key) if key.isdecimal() else key)
                    if stratum not in world.setup.local_strata:
                        held.setdefault(stratum, []).append(client)
        return held


def _scaling(method: Method, layout: Layout) -> dict[str, float]:
    """The method's own number, or alpha over the server's rank."""
    if not isinstance(method.scaling, str):
        return dict.fromkeys(layout.targets, float(method.scaling))
    ranks = {s.target: s.rank for s in layout if s.kind in ("lora_A", "lora_R")}
    return {t: lora_scaling(ALPHA, r) for t, r in ranks.items()}


def _tensors(method: Method, layout: Layout, trainer: NoiseTrainer, trained_before: bool) -> NamedTensors:
    """What the server of this method may hold: what both sides draw is as drawn, an orthonormal A is orthonormal."""
    tensors = trainer.initial(layout)
    for spec in layout:
        if trained_before and spec.kind not in method.pairs.drawn:
            noise = generator(7, "server", spec.name).standard_normal(spec.shape) * 0.4
            tensors[spec.name] = (tensors[spec.name] + noise).astype(np.float32)
        if spec.kind == "lora_A" and method.pairs.start == "orthonormal":
            tensors[spec.name] = orthonormal_rows(tensors[spec.name])
    return tensors


def _merged(layout: Layout) -> BaseLog:
    """Two merges of rank 1."""
    log = BaseLog()
    for number in (1, 2):
        rng = generator(7, "merge", number)
        sizes = {t: (layout[f"{t}.lora_B"].shape[0], layout[f"{t}.lora_A"].shape[1]) for t in layout.targets}
        pairs = {t: (rng.standard_normal((n, 1)), rng.standard_normal((1, m))) for t, (n, m) in sizes.items()}
        log = log.append({t: (b.astype(np.float32), a.astype(np.float32)) for t, (b, a) in pairs.items()})
    return log


@pytest.fixture(scope="session")
def lab() -> Lab:
    """Makes worlds."""
    return Lab()

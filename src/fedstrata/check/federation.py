"""A whole federation of numpy: clients that add seeded noise instead of training."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

import numpy as np

from fedstrata.check.fleets import Names, make_fleet, shape_of
from fedstrata.check.law import LeftOut, Trial
from fedstrata.client import FisherSums, LocalWork, Score
from fedstrata.codec.floats import Float32
from fedstrata.core.lora import init_lora, orthonormal_rows
from fedstrata.core.merges import Merge
from fedstrata.core.rng import generator
from fedstrata.core.shape import AdapterKind, global_layout
from fedstrata.core.tensors import EMBEDDINGS, HEAD, Layout, NamedTensors, Stratum
from fedstrata.engine.local import LocalEngine
from fedstrata.errors import PlanError
from fedstrata.message import Task, TaskLayouts
from fedstrata.method.base import Method
from fedstrata.record.checkpoint import ServerState
from fedstrata.record.clients import MemoryStates
from fedstrata.record.failure import ClientFailure
from fedstrata.record.site import SiteBase
from fedstrata.round import run_round
from fedstrata.server.orders import Answer, Order
from fedstrata.server.setup import POOLED_CLIENT, RoundSetup

Habit: TypeAlias = Literal["raises", "sends NaN", "strays"]
_SCALING = 1.5
_NUM_BLOCKS = 12
_RANK = 4


@dataclass
class NoiseTrainer:
    """Moves what is planned by seeded noise, and a little by where it started.

    Attributes:
        server_layout: Of the server's tensors.
        base_layout: A pair per map, as updates of the base are written.
        sizes: Training examples by client.
        seed: Of the noise.
        habits: Clients that misbehave.
        alike: Whether all clients of a round find the same.
        local: What each client ended with in the latest round.
        site: What was merged into the base model on this machine.
    """

    server_layout: Layout
    base_layout: Layout
    sizes: Mapping[str, int]
    seed: int = 0
    habits: Mapping[str, Habit] = field(default_factory=dict)
    alike: bool = False
    local: dict[str, NamedTensors] = field(default_factory=dict)
    site: SiteBase = field(default_factory=SiteBase)

    def initial(self, layout: Layout) -> NamedTensors:
        """First values: LoRA pairs from their streams, everything else from one of our own."""
        first = init_lora(self.seed, layout)
        for spec in layout:
            if spec.name not in first:
                values = generator(self.seed, "first", spec.name).standard_normal(spec.shape)
                first[spec.name] = values.astype(np.float32)
        return {s.name: first[s.name] for s in layout}

    def train(self, task: Task, layouts: TaskLayouts, start: NamedTensors) -> LocalWork:
        """Noise instead of training."""
        habit = self.habits.get(task.client)
        if habit == "raises":
            raise ValueError("this client fails, because the law wants it to")
        tensors = {n: t.copy() for n, t in start.items()}
        whose = "all" if self.alike else task.client
        for spec in layouts.trained:
            noise = generator(self.seed, "noise", task.server_round, whose, spec.name).standard_normal(spec.shape)
            tensors[spec.name] = (0.9 * tensors[spec.name] + 0.3 * noise).astype(np.float32)
        if habit == "sends NaN":
            tensors[layouts.trained.names[0]].flat[0] = np.nan
        if habit == "strays":
            stray = next((n for n in layouts.present.names if n not in layouts.trained), None)
            if stray is not None:
                tensors[stray] = tensors[stray] + np.float32(1e-3)
        self.local[task.client] = {n: t.copy() for n, t in tensors.items()}
        return LocalWork(tensors, self.sizes[task.client], int(task.train["local_steps"]), 0.5)

    def evaluate(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> Score:
        """A score that depends on client and round only."""
        rng = generator(self.seed, "score", task.server_round, task.client)
        return Score(8, float(rng.random()), int(rng.integers(9)))

    def take_merges(self, client: str, known: int, number: int, merges: Sequence[Merge], *, keep: bool) -> None:
        """Keeps them."""
        self.site.take(client, known, number, merges, keep=keep)

    def gradient(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> tuple[NamedTensors, int]:
        """Drawn factors."""
        return {
            s.name: generator(self.seed, "gradient", task.client, s.name).standard_normal(s.shape).astype(np.float32)
            for s in self.base_layout
        }, min(self.sizes[task.client], int(task.options["examples"]))

    def fisher(self, task: Task, layouts: TaskLayouts, tensors: NamedTensors) -> FisherSums:
        """Drawn sums."""
        blocks = [int(b) for b in task.options["strata"]]
        rng = generator(self.seed, "fisher", task.server_round, task.client)
        return FisherSums({b: float(x) for b, x in zip(blocks, rng.random(len(blocks)), strict=True)}, 8)


@dataclass
class DamagedLine:
    """An engine on whose line one bit flips in the replies of some clients.

    Attributes:
        inner: Runs the clients.
        damaged: Whose replies.
    """

    inner: LocalEngine
    damaged: frozenset[str] = frozenset()

    def run(self, orders: Sequence[Order]) -> Iterator[tuple[str, Answer]]:
        """Answers in ascending client id."""
        for client, answer in self.inner.run(orders):
            if client in self.damaged and not isinstance(answer, ClientFailure):
                data = bytearray(answer)
                data[-1] ^= 1
                yield client, bytes(data)
            else:
                yield client, answer


@dataclass
class Federation:
    """A setup, its clients and its state; `round` advances it.

    Attributes:
        setup: What all rounds share.
        trainer: All clients.
        state: The server's.
        line: To the clients.
        states: What stays on the clients.
    """

    setup: RoundSetup
    trainer: NoiseTrainer
    state: ServerState
    line: DamagedLine
    states: MemoryStates

    def round(self) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
        """Runs one round; returns its record and the clients' records by client."""
        self.state, record, clients = run_round(self.setup, self.state, self.line)
        return record, {c["client"]: c for c in clients}

    def holders(self, clients: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
        """Strata as keys of the records, and whose reply trained them."""
        found: dict[str, list[str]] = {}
        for client, record in clients.items():
            for stratum in record["trained"]:
                found.setdefault(stratum, []).append(client)
        return found

    def without(self, client: str) -> Federation:
        """The same federation at the same moment, without one client."""
        fleet = replace(self.setup.fleet, clients=tuple(c for c in self.setup.fleet.clients if c.id != client))
        trainer = replace(self.trainer, habits={}, local={}, site=SiteBase())
        states = MemoryStates()
        line = DamagedLine(LocalEngine(trainer, states))
        return Federation(replace(self.setup, fleet=fleet), trainer, self.state, line, states)


def make_federation(
    method: Method,
    adapter: AdapterKind,
    names: Names,
    trial: Trial,
    *,
    num_clients: int = 2,
    habits: Mapping[str, Habit] | None = None,
    damaged: Iterable[str] = (),
    alike: bool = False,
    clients_per_round: int | None = None,
    head: Literal["aggregate", "frozen"] = "aggregate",
) -> Federation:
    """A federation before its first round, of twelve blocks.

    Raises:
        LeftOut: If the method's plan refuses this world.
    """
    rng = trial.rng("sizes")
    wide, high = 14 + int(rng.integers(3)), 18 + int(rng.integers(3))
    shape = shape_of(_NUM_BLOCKS, wide, high)
    fleet = make_fleet(names, num_clients, trial)
    trial.note(f"model: {_NUM_BLOCKS} blocks, maps [{high}, {wide}] and [{wide}, {high + 1}], adapter.kind = {adapter}")
    try:
        ranks: dict[Stratum, int] = dict.fromkeys(shape.blocks, 1)
        ranks = {EMBEDDINGS: 1, **ranks} if adapter == "full" else method.planner.server_ranks(shape, _RANK)
        layout = global_layout(shape, adapter, {**ranks, HEAD: 1})
        setup = _setup(method, shape, fleet, layout, adapter, trial.seed, clients_per_round, method.head or head)
        planner = method.planner.init(shape, setup.workers)
    except PlanError as error:
        raise LeftOut(f"its plan refuses the worlds that were tried: {error.one_line}") from error
    sizes = {c.id: c.num_examples for c in fleet.clients}
    pooled = {POOLED_CLIENT: sum(sizes.values())}
    trainer = NoiseTrainer(layout, setup.base_layout, sizes | pooled, trial.seed, dict(habits or {}), alike)
    tensors = trainer.initial(layout)
    if method.pairs.start == "orthonormal":
        tensors |= {s.name: orthonormal_rows(tensors[s.name]) for s in layout if s.kind == "lora_A"}
    state = ServerState(
        tensors,
        versions={str(s): 0 for s in layout.strata},
        planner=planner,
        selector=method.selector.init(),
    )
    states = MemoryStates()
    return Federation(setup, trainer, state, DamagedLine(LocalEngine(trainer, states), frozenset(damaged)), states)


def _setup(
    method: Method,
    shape: Any,
    fleet: Any,
    layout: Layout,
    adapter: AdapterKind,
    seed: int,
    clients_per_round: int | None,
    head: Literal["aggregate", "local", "frozen"],
) -> RoundSetup:
    number = _SCALING if isinstance(method.scaling, str) else float(method.scaling)
    train = {
        "learning_rate": 0.1,
        "schedule": "constant",
        "batch_size": 4,
        "local_steps": 2,
        "local_epochs": None,
    }
    return RoundSetup(
        method=method,
        shape=shape,
        fleet=fleet,
        layout=layout,
        scaling=dict.fromkeys(layout.targets, number),
        scaling_power=1.0 if method.scaling in ("by_rank", "by_sketch") else 0.0,
        kind=adapter,
        seed=seed,
        num_rounds=4,
        clients_per_round=clients_per_round,
        min_replies=1,
        train=train,
        max_length=8,
        downlink=Float32(),
        head=head,
    )

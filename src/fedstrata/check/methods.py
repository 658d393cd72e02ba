"""The laws of methods: two rounds of a whole federation, on seeded noise instead of training."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fedstrata.check.common import first_difference, is_json, same_bits
from fedstrata.check.federation import DamagedLine, Federation, Habit, make_federation
from fedstrata.check.fleets import Names
from fedstrata.check.law import Law, LeftOut, Trial
from fedstrata.codec.floats import Float32
from fedstrata.core.shape import AdapterKind
from fedstrata.core.tensors import NamedTensors, parse_stratum, stratum_name
from fedstrata.engine.local import LocalEngine
from fedstrata.errors import ConfigError, RoundError
from fedstrata.experiment.plugins import check_registered
from fedstrata.method.base import Method
from fedstrata.optimize.optimizers import NoOptimizer
from fedstrata.plan.base import ContestPlanner
from fedstrata.record.checkpoint import load_checkpoint, save_checkpoint
from fedstrata.select.accept_all import AcceptAll
from fedstrata.server.setup import POOLED_CLIENT

_FINE = 1e-6


@dataclass(frozen=True)
class MethodSubject:
    """A method, the kinds of adapters that it is tried with, and the names that its options speak of."""

    method: Method
    adapters: tuple[AdapterKind, ...]
    names: Names

    @property
    def bare(self) -> Method:
        """Without what the laws of merging leave out: lossy codec, selector, server optimizer."""
        return self.method.with_parts(codec=Float32(), selector=AcceptAll(), optimizer=NoOptimizer())

    def adapter(self, trial: Trial) -> AdapterKind:
        """The kinds in turn."""
        return self.adapters[trial.index % len(self.adapters)]


def _registered(subject: MethodSubject, trial: Trial) -> None:
    try:
        check_registered(subject.method)
    except ConfigError as error:
        trial.broken(str(error))
    config = subject.method.to_config()
    try:
        json.dumps(config, allow_nan=False)
    except (TypeError, ValueError) as error:
        trial.broken(f"what it says about itself is no JSON: {error}", f"{config!r}"[:400])


def _one_reply(subject: MethodSubject, trial: Trial) -> None:
    _needs_merging(subject.method)
    if subject.method.aggregator.personal or subject.method.pairs.local:
        raise LeftOut("its clients keep a part of the model, so that there is no effective weight of the server's")
    world = make_federation(subject.bare, subject.adapter(trial), subject.names, trial, clients_per_round=1)
    start = world.state
    _, clients = world.round()
    (client,) = clients
    trial.note(f"the only reply is that of {client}")
    trial.demand(bool(clients[client]["trained"]), "it trained nothing")
    _equals_client(world, start.tensors, client, clients[client]["trained"], trial)


def _idempotence(subject: MethodSubject, trial: Trial) -> None:
    _needs_merging(subject.method)
    if subject.method.aggregator.personal or subject.method.pairs.local:
        raise LeftOut("its clients keep a part of the model, so that there is no effective weight of the server's")
    if subject.method.pairs.slices == "drawn" or subject.method.aggregator.unequal_ranks:
        raise LeftOut("clients of unequal ranks do not reply alike; the aggregator's own battery has this law")
    world = make_federation(subject.bare, subject.adapter(trial), subject.names, trial, alike=True, num_clients=3)
    start = world.state
    _, clients = world.round()
    trial.note("all clients reply alike")
    for client, record in clients.items():
        _equals_client(world, start.tensors, client, record["trained"], trial)


def _needs_merging(method: Method) -> None:
    if method.topology == "alone":
        raise LeftOut("nothing is merged")
    if isinstance(method.planner, ContestPlanner):
        raise LeftOut("several models are trained side by side")


def _equals_client(world: Federation, start: NamedTensors, client: str, trained: list[str], trial: Trial) -> None:
    """The server's effective weights on what a client trained are the client's."""
    local = world.trainer.local[client]
    power, layout = world.setup.scaling_power, world.setup.layout
    for key in trained:
        for spec in layout.of(parse_stratum(key)):
            if spec.kind == "weight":
                got, expected, what = world.state.tensors[spec.name], local[spec.name], spec.name
            elif spec.kind == "lora_A":
                names = (spec.name, f"{spec.target}.lora_B")
                slices = _slices(world, client, key, len(local[spec.name]))
                mine = [local[n].astype(np.float64) for n in names]
                scaling = world.setup.scaling[spec.target]
                own = scaling * (spec.rank / len(mine[0])) ** power
                a, b = (world.state.tensors[n].astype(np.float64) for n in names)
                if world.setup.method.pairs.slices == "drawn":
                    got, expected = b[:, slices] @ a[slices], mine[1] @ mine[0]
                elif not world.setup.method.aggregator.folds_scaling and len(mine[0]) < spec.rank:
                    got, expected = b[:, slices] @ a[slices] * scaling, own * mine[1] @ mine[0]
                else:
                    got, expected = scaling * b @ a + _base(world, spec.target, b @ a), own * mine[1] @ mine[0]
                what = f"s·B·A of {spec.target}"
            elif spec.kind == "lora_R":  # between orthonormal factors
                got, expected, what = world.state.tensors[spec.name], local[spec.name], spec.name
            else:
                continue
            _compare(np.asarray(got, np.float64), np.asarray(expected, np.float64), f"{what} after {client}", trial)


def _base(world: Federation, target: str, like: np.ndarray) -> np.ndarray:
    """What was merged into the base at a target; the federation starts without."""
    return world.state.base.dense().get(target, np.zeros_like(like)).astype(np.float64)


def _slices(world: Federation, client: str, key: str, rank: int) -> list[int]:
    from fedstrata.aggregate.sketch import sketch_slices

    if world.setup.method.pairs.slices == "leading":
        return list(range(rank))
    whole = world.setup.server_ranks[parse_stratum(key)]
    return list(sketch_slices(world.setup.seed, world.state.server_round, client, whole, rank))


def _compare(got: np.ndarray, expected: np.ndarray, what: str, trial: Trial) -> None:
    gap, norm = float(np.linalg.norm(got - expected)), float(np.linalg.norm(expected))
    if gap <= _FINE * max(norm, 1e-3):
        return
    at = tuple(int(i) for i in np.unravel_index(np.argmax(np.abs(got - expected)), got.shape))
    trial.broken(
        f"{what}{list(at)}: the server has {got[at]:.7g}, expected {expected[at]:.7g}", f"relative {gap / norm:.2g}"
    )


def _untouched(subject: MethodSubject, trial: Trial) -> None:
    if isinstance(subject.method.planner, ContestPlanner):
        raise LeftOut("several models are trained side by side")
    world = make_federation(
        subject.method, subject.adapter(trial), subject.names, trial, num_clients=2 + trial.index % 3
    )
    for _ in range(2):
        before = world.state
        _, clients = world.round()
        held = world.holders(clients) if subject.method.topology != "alone" else {}
        for stratum in world.setup.layout.strata:
            if str(stratum) in held:
                continue
            names = [s.name for s in world.setup.layout.of(stratum)]
            old, new = ({n: s.tensors[n] for n in names} for s in (before, world.state))
            where = f"round {world.state.server_round}: nobody trained {stratum_name(stratum)}"
            trial.demand(same_bits(old, new), f"{where}, and yet {first_difference(old, new)}")
            versions = (before.versions[str(stratum)], world.state.versions[str(stratum)])
            trial.demand(
                versions[0] == versions[1], f"{where}, and its version went from {versions[0]} to {versions[1]}"
            )


def _failure(subject: MethodSubject, trial: Trial) -> None:
    """A client that raises, sends NaN, or whose reply is damaged leaves the model as if it had not been drawn."""
    if isinstance(subject.method.planner, ContestPlanner):
        raise LeftOut("who is drawn decides who trains what")
    how = ("raises", "sends NaN", "damaged")[trial.index % 3]
    count = 2 * len(subject.names.kinds) + trial.index % 2  # without one client every device kind is still there
    adapter = subject.adapter(trial)
    ids = [c.id for c in make_federation(subject.method, adapter, subject.names, Trial(trial.seed, trial.index),
                                         num_clients=count).setup.fleet.clients]  # fmt: skip
    failing = POOLED_CLIENT if subject.method.topology == "pooled" else ids[1]
    habits: Mapping[str, Habit] = {} if how == "damaged" else {failing: how}  # type: ignore[dict-item]
    damaged = {failing} if how == "damaged" else set()
    make = {"num_clients": count, "habits": habits, "damaged": damaged}
    world = make_federation(subject.method, adapter, subject.names, trial, **make)  # type: ignore[arg-type]
    trial.note(f"client {failing} {how if how != 'damaged' else 'answers, and a bit of its reply flips'}")
    if subject.method.topology == "pooled":
        try:
            world.round()
        except RoundError:
            return
        trial.broken("the round went through without its only reply")
    other = world.without(failing)
    record, clients = world.round()
    if failing not in clients or not clients[failing]["planned"]:
        raise LeftOut("the client that fails has nothing to do")
    other.round()
    failed = [f["client"] for f in record["failures"]]
    trial.demand(failed == [failing], f"failures in the record: {failed}; expected {failing}")
    if _plans_alone(subject.method):
        same = same_bits(world.state.tensors, other.state.tensors)
        trial.demand(same, "the model differs from one without that client:",
                     first_difference(world.state.tensors, other.state.tensors))  # fmt: skip
        trial.demand(dict(world.state.versions) == dict(other.state.versions), "versions differ from those without it")


def _plans_alone(method: Method) -> bool:
    """Whether a client's plan is the same whoever else takes part, so that leaving one out compares."""
    return method.planner.id not in ("depth_and_rank", "exclusive")


def _stray(subject: MethodSubject, trial: Trial) -> None:
    """Law 8, with a frozen head, so that there is always something that is not planned."""
    if subject.method.head is not None:
        raise LeftOut("it decides about the head itself")
    adapter = subject.adapter(trial)
    ids = [c.id for c in make_federation(subject.method, adapter, subject.names, Trial(trial.seed, trial.index))
           .setup.fleet.clients]  # fmt: skip
    habits: dict[str, Habit] = dict.fromkeys((*ids, POOLED_CLIENT), "strays")
    world = make_federation(subject.method, adapter, subject.names, trial, habits=habits, head="frozen")
    trial.note("every client also changes a tensor that was not planned")
    try:
        record, _ = world.round()
    except RoundError as error:
        trial.demand("not planned" in str(error), f"the round fails for another reason: {error}")
        return
    trial.broken(f"the round went through with {record['num_replies']} replies")


def _resume(subject: MethodSubject, trial: Trial) -> None:
    adapter, count = subject.adapter(trial), 2 + trial.index % 3
    worlds = [
        make_federation(subject.method, adapter, subject.names, Trial(trial.seed, trial.index), num_clients=count)
        for _ in range(2)
    ]
    through, stopped = worlds
    for _ in range(2):
        record, _ = through.round()
        trial.demand(
            is_json({k: v for k, v in record.items() if k != "measured"}), f"a record that is no JSON: {record}"[:400]
        )
    stopped.round()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "server.safetensors"
        save_checkpoint(path, stopped.state, "check")
        state, _ = load_checkpoint(path)
    trainer = replace(stopped.trainer, local={})
    line = DamagedLine(LocalEngine(trainer, stopped.states))
    resumed = replace(stopped, state=state, trainer=trainer, line=line)
    resumed.round()
    trial.note(f"{count} clients, {adapter}: stored after round 1, then round 2")
    whole, parts = ({n: s.tensors[n] for n in sorted(s.tensors)} for s in (through.state, resumed.state))
    trial.demand(same_bits(whole, parts), "going on from the checkpoint differs:", first_difference(whole, parts))
    for name in ("versions", "planner", "selector", "accepted", "totals"):
        one, two = (_plain(getattr(s, name)) for s in (through.state, resumed.state))
        trial.demand(one == two, f"{name} differs after the checkpoint: {one} and {two}"[:600])


def _plain(value: Any) -> Any:
    return {k: _plain(v) for k, v in value.items()} if isinstance(value, Mapping) else value


METHOD_LAWS: tuple[Law[MethodSubject], ...] = (
    Law("registered", "a client finds every part of it by its id", _registered),
    Law("one reply", "one reply gives the server that client's effective weights (law 1)", _one_reply),
    Law("idempotence", "identical replies count as one (law 2)", _idempotence),
    Law("untouched", "what nobody trained keeps its bits and its version, over two rounds (law 3)", _untouched),
    Law("failure", "a client that fails leaves the model as if it had not been drawn (law 4)", _failure),
    Law("stray", "a change that was not planned fails the client (law 8)", _stray),
    Law("resume", "going on from a checkpoint gives the same bits", _resume),
)

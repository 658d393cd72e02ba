"""Keys that cannot be true together; each is an error, never silently ignored."""

from __future__ import annotations

from fedstrata.data.config import PARTITION_KINDS
from fedstrata.device.profiles import profile_names
from fedstrata.errors import ConfigError, did_you_mean
from fedstrata.experiment.methods import build_downlink, build_method
from fedstrata.experiment.proxies import proxy_problems
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.method import Method
from fedstrata.plan.base import ContestPlanner

_PARTITION_KEYS = {
    "alpha": {"dirichlet", "quantity"},
    "shards_per_client": {"shards"},
    "column": {"natural"},
}


def find_contradictions(spec: ExperimentSpec) -> list[str]:
    """Every contradiction within one spec, each in one sentence with its place."""
    problems: list[str] = []
    train, adapter = spec.train, spec.adapter
    if train.local_steps is not None and train.local_epochs is not None:
        problems.append("train.local_steps and train.local_epochs are both set: keep one")
    if adapter.kind == "full":
        given = adapter.model_fields_set & {"max_rank", "alpha", "scaling", "targets", "dropout"}
        problems.extend(f'adapter.{key} is set, but adapter.kind = "full" has no LoRA' for key in sorted(given))
    kind = spec.simulation.partition.kind
    for key, kinds in _PARTITION_KEYS.items():
        if key in spec.simulation.partition.model_fields_set and kind in PARTITION_KINDS and kind not in kinds:
            users = ", ".join(sorted(kinds))
            problems.append(f'simulation.partition.{key} is set, but kind = "{kind}" does not use it (used by {users})')
    if train.local_steps == 0:
        problems.append("train.local_steps = 0: nobody would train anything")
    problems.extend(_fleet(spec))
    problems.extend(_validation(spec))
    problems.extend(_method(spec))
    return problems


def _fleet(spec: ExperimentSpec) -> list[str]:
    devices, rounds = spec.simulation.devices, spec.rounds
    problems = [
        f'simulation.devices: unknown device kind "{kind}"; {did_you_mean(kind, profile_names())}'
        for kind in devices
        if kind not in profile_names()
    ]
    if not devices or any(n < 1 for n in devices.values()):
        return [*problems, "simulation.devices: at least one kind, and at least one client of every kind"]
    fleet = sum(devices.values())
    cohort = rounds.clients_per_round or fleet
    if cohort > fleet:
        problems.append(f"rounds.clients_per_round = {cohort}, but simulation.devices has {fleet} clients")
    elif rounds.min_replies > cohort:
        problems.append(f"rounds.min_replies = {rounds.min_replies}, but a round invites {cohort} clients")
    return problems


def has_validation(spec: ExperimentSpec) -> bool:
    """Whether some examples are held out to select by."""
    data = spec.data
    return (data.validation_fraction if spec.eval.on == "server" else data.client_validation_fraction) > 0


def _validation(spec: ExperimentSpec) -> list[str]:
    problems = []
    if not has_validation(spec):
        key = "validation_fraction" if spec.eval.on == "server" else "client_validation_fraction"
        why = f'data.{key} is 0 and eval.on = "{spec.eval.on}", so nothing can be validated'
        if spec.run.keep == "best":
            problems.append(f'run.keep = "best", but {why}')
        if spec.eval.on == "clients":
            problems.append(f"nobody could validate: {why}")
        if spec.rounds.patience is not None or spec.rounds.target is not None:
            problems.append(f"rounds.patience or rounds.target is set, but {why}")
    elif spec.run.keep == "best" and spec.eval.every > spec.rounds.count:
        problems.append(f'run.keep = "best", but eval.every = {spec.eval.every} and there are fewer rounds')
    if spec.adapter.head == "local" and spec.eval.on != "clients":
        problems.append('adapter.head = "local" gives every client its own model: set eval.on = "clients"')
    return problems


def _method(spec: ExperimentSpec) -> list[str]:
    problems: list[str] = []
    for build in (build_method, build_downlink):
        try:
            built = build(spec)
            if isinstance(built, Method):
                problems += proxy_problems(spec, built)
                if isinstance(built.planner, ContestPlanner) and not has_validation(spec):
                    problems.append("the method judges candidates on validation examples, and there are none")
        except ConfigError as error:
            problems.append(error.one_line)
    return problems

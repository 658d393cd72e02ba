"""From a spec to a method: its five parts, with those replaced that it leaves open."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fedstrata.aggregate.base import AGGREGATORS
from fedstrata.codec.base import CODECS, Codec
from fedstrata.errors import ConfigError
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.method import METHODS, Method
from fedstrata.objective.base import OBJECTIVES
from fedstrata.plan.base import PLANNERS, AskingPlanner
from fedstrata.select.base import SELECTORS

_PARTS: dict[str, tuple[str, Any]] = {
    "plan": ("planner", PLANNERS),
    "objective": ("objective", OBJECTIVES),
    "aggregate": ("aggregator", AGGREGATORS),
    "select": ("selector", SELECTORS),
}


_NEEDS_OTHER_CLIENTS = {
    "sketch_mean": "train drawn rank slices, which they cannot do yet",
    "svd_mean": "train B alone, which they cannot do yet",
}


def build_method(spec: ExperimentSpec) -> Method:
    """The method with the file's own parts.

    Raises:
        ConfigError: If a part is unknown, its options are wrong, the method fixes it, or two choices clash.
    """
    name = METHODS.find(spec.method.name).name
    method = METHODS.build(spec.method.name, spec.method.options)
    for table, (part, registry) in _PARTS.items():
        config = getattr(spec, table)
        if config is not None:
            _refuse_fixed(method, name, table)
            method = method.with_parts(**{part: registry.build(config, where=table)})
    if spec.codec.uplink is not None:
        _refuse_fixed(method, name, "codec")
        method = method.with_parts(codec=CODECS.build(spec.codec.uplink, where="codec.uplink"))
    if spec.codec.send is not None:
        _refuse_fixed(method, name, "codec")
        method = method.with_parts(send=spec.codec.send)
    _refuse_unwired(method)
    if method.codec.deltas_only and method.send == "weights":
        raise ConfigError(f'codec.send = "weights", but codec "{method.codec.id}" makes sense for differences only')
    if spec.adapter.kind not in method.adapters:
        allowed = " or ".join(sorted(method.adapters))
        raise ConfigError(f'Method "{name}" is defined for adapter.kind = "{allowed}"', got=spec.adapter.kind)
    if method.topology == "alone" and spec.run.keep == "best":
        raise ConfigError(
            f'run.keep = "best", but with "{name}" every client has a model of its own', do='keep = "last"'
        )
    return method


def build_downlink(spec: ExperimentSpec) -> Codec:
    """The downlink's codec: one that both sides can repeat, because the server must know what clients start from."""
    codec = CODECS.build(spec.codec.downlink, where="codec.downlink")
    if codec.deltas_only or not codec.deterministic:
        raise ConfigError(
            f'codec.downlink = "{codec.id}" cannot carry weights that both sides agree on',
            expected="a codec for weights with nearest rounding",
        )
    return codec


def _refuse_unwired(method: Method) -> None:
    """Parts that are there, but need something of a round that no round does yet."""
    aggregator, planner, selector = method.aggregator, method.planner, method.selector
    if aggregator.moves_base:
        raise ConfigError(f'aggregate = "{aggregator.id}" moves the base model, which a run cannot do yet')
    if aggregator.id in _NEEDS_OTHER_CLIENTS:
        raise ConfigError(f'aggregate = "{aggregator.id}" needs clients that {_NEEDS_OTHER_CLIENTS[aggregator.id]}')
    if isinstance(planner, AskingPlanner):
        raise ConfigError(f'plan = "{planner.id}" asks clients for importance scores, which a run cannot do yet')
    if getattr(selector, "needs_moments", False) and not getattr(aggregator, "moments", False):
        raise ConfigError(
            f'select = "{selector.id}" with this score needs the spread over clients',
            do='set aggregate = { id = "holders_mean", moments = true }',
        )


def _refuse_fixed(method: Method, name: str, table: str) -> None:
    if table not in method.open_choices:
        open_tables = ", ".join(f"[{t}]" for t in sorted(method.open_choices))
        raise ConfigError(f'[{table}] is set, but method "{name}" fixes it', expected=f"only {open_tables} are open")


def method_rows() -> list[dict[str, Any]]:
    """One row per method, for `fedstrata methods`."""
    return [
        {"name": e.name, "summary": e.summary, "aliases": list(e.aliases), **asdict(e.facts)}
        for e in sorted(METHODS.entries.values(), key=lambda e: e.name)
    ]

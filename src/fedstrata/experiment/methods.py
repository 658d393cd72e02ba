"""From a spec to a method: its five parts, with those replaced that it leaves open."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

from fedstrata.aggregate.base import AGGREGATORS
from fedstrata.codec.base import CODECS, Codec
from fedstrata.core.shape import AdapterKind
from fedstrata.errors import ConfigError
from fedstrata.experiment.plugins import check_registered
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.method import METHODS, Method
from fedstrata.method.columns import refusal
from fedstrata.objective.base import OBJECTIVES
from fedstrata.objective.rank_decay import RankDecay
from fedstrata.optimize.base import OPTIMIZERS, check_coordinates
from fedstrata.plan.base import PLANNERS, ContestPlanner, Planner
from fedstrata.plan.client_ranks import ClientRanks
from fedstrata.plan.scoring import STATISTICS
from fedstrata.select.base import SELECTORS

_PARTS: dict[str, tuple[str, Any]] = {
    "plan": ("planner", PLANNERS),
    "objective": ("objective", OBJECTIVES),
    "aggregate": ("aggregator", AGGREGATORS),
    "select": ("selector", SELECTORS),
    "optimize": ("optimizer", OPTIMIZERS),
}


_FACTOR_AGAIN = frozenset({"product_mean", "raflora", "svd_mean"})
"""Aggregators after which entry (i, j) of a factor stands for another direction."""


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
            built = registry.build(config, where=table)
            if table != "optimize":  # whether it fits is asked of the aggregator
                _refuse_fixed(method, name, table, built)
            method = method.with_parts(**{part: built})
    if spec.codec.uplink is not None:
        _refuse_fixed(method, name, "codec")
        method = method.with_parts(codec=CODECS.build(spec.codec.uplink, where="codec.uplink"))
    if spec.codec.send is not None:
        _refuse_fixed(method, name, "codec")
        method = method.with_parts(send=spec.codec.send)
    planner: Any = method.planner
    if getattr(planner, "rank_limit", 0) is None and "max_rank" in spec.adapter.model_fields_set:
        method = method.with_parts(planner=replace(planner, rank_limit=spec.adapter.max_rank))
    check_registered(method)
    _check_parts(method, name, spec)
    if method.codec.deltas_only and method.send == "weights":
        raise ConfigError(f'codec.send = "weights", but codec "{method.codec.id}" makes sense for differences only')
    if spec.adapter.kind not in method.adapters:
        allowed = " or ".join(sorted(method.adapters))
        raise ConfigError(f'Method "{name}" is defined for adapter.kind = "{allowed}"', got=spec.adapter.kind)
    personal = method.topology == "alone" or method.pairs.local or method.head == "local"
    if personal and spec.run.keep == "best":
        facts = METHODS.find(name).facts
        error = refusal(name, facts, "personalised", 'run.keep = "best"', wanted=False, do='set run.keep = "last"')
        raise error or ConfigError('run.keep = "best", but every client has a model of its own', do='keep = "last"')
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


def _check_parts(method: Method, name: str, spec: ExperimentSpec) -> None:
    """Refuses parts that do not go together."""
    aggregator, selector, pairs = method.aggregator, method.selector, method.pairs
    if getattr(selector, "needs_moments", False) and not getattr(aggregator, "moments", False):
        raise ConfigError(
            f'select = "{selector.id}" with this score needs the spread over clients',
            do='set aggregate = { id = "holders_mean", moments = true }',
        )
    check_coordinates(method.optimizer, aggregator)
    _refuse_unequal_ranks(method, name, spec)
    changes = pairs.redrawn or pairs.slices == "drawn" or aggregator.id in _FACTOR_AGAIN
    if changes and _has_error_feedback(method.codec):
        raise ConfigError(
            f'codec.uplink = "error_feedback", but with "{name}" what is left unsent means something else later',
            do="use the inner codec alone",
        )
    if method.planner.id == "after_gradient" and spec.adapter.kind != "square":
        raise ConfigError('plan = "after_gradient" is for adapter.kind = "square"', do='use method.name = "fed_sb"')
    importance = getattr(method.planner, "importance", "")
    if importance in STATISTICS and not getattr(aggregator, "moments", False):
        raise ConfigError(
            f'importance = "{importance}" needs the clients\' squared differences',
            do='set aggregate = { id = "holders_mean", moments = true }',
        )
    if aggregator.id == "svd_mean" and pairs.trained != (("lora_B",),):
        raise ConfigError('aggregate = "svd_mean" needs clients that train B alone', do='use method.name = "fedsvd"')
    if aggregator.id == "sketch_mean" and pairs.slices != "drawn":
        raise ConfigError('aggregate = "sketch_mean" needs drawn rank slices', do='use method.name = "fslora"')
    if aggregator.id == "stack" and not pairs.redrawn:
        raise ConfigError('aggregate = "stack" needs pairs that are drawn anew', do='use method.name = "flora"')
    if spec.rounds.downlink == "changed" and (pairs.slices == "drawn" or method.scaling == "by_rank"):
        raise ConfigError(
            f'rounds.downlink = "changed", but "{name}" hands out other slices or scalings than a client holds',
            do='set rounds.downlink = "full"',
        )
    if spec.rounds.downlink == "changed" and isinstance(method.planner, ContestPlanner):
        raise ConfigError(
            f'rounds.downlink = "changed", but "{name}" trains several models, each with versions of its own',
            do='set rounds.downlink = "full"',
        )
    if method.head is not None and "head" in spec.adapter.model_fields_set and spec.adapter.head != method.head:
        raise ConfigError(
            f'adapter.head = "{spec.adapter.head}", but "{name}" fixes it', expected=f'adapter.head = "{method.head}"'
        )


def _refuse_unequal_ranks(method: Method, name: str, spec: ExperimentSpec) -> None:
    """Refuses ranks that the aggregator would refuse reply by reply; full parameters have none."""
    if method.aggregator.unequal_ranks or spec.adapter.kind == "full":
        return
    planner, setting = method.planner, ""
    if isinstance(planner, ClientRanks):
        ranks = planner.ranks
        unequal = len(spec.simulation.devices) > 1 if ranks is None else len({*ranks.values()}) > 1
        setting = f'plan = "{planner.id}" gives clients different ranks' if unequal else ""
    elif isinstance(method.objective, RankDecay):
        setting = f'objective = "{method.objective.id}" lets clients shrink their ranks'
    if setting:
        do = 'set aggregate = "rank_slice_mean" or "product_mean"' if "aggregate" in method.open_choices else None
        facts = replace(METHODS.find(name).facts, unequal_ranks=False)  # with this aggregator
        error = refusal(name, facts, "unequal_ranks", setting, do=do)
        if error is not None:
            raise error


def _has_error_feedback(codec: Any) -> bool:
    """Whether a codec, or one inside it, remembers what was left unsent."""
    return codec.id == "error_feedback" or (hasattr(codec, "inner") and _has_error_feedback(codec.inner))


def _refuse_fixed(method: Method, name: str, table: str, part: Any = None) -> None:
    """Refuses a choice that the method does not leave open; a plan by the column that says no, where one does."""
    if table not in method.open_choices:
        if isinstance(part, Planner) and part.id not in ("all", "exclusive"):
            key, what = "unequal_depth", "trains other blocks than the method's own plan"
            if part.id == "client_ranks":
                key, what = "unequal_ranks", "gives clients different ranks"
            error = refusal(name, METHODS.find(name).facts, key, f'plan = "{part.id}" {what}')
            if error is not None:
                raise error
        open_tables = ", ".join(f"[{t}]" for t in sorted(method.open_choices))
        raise ConfigError(f'[{table}] is set, but method "{name}" fixes it', expected=f"only {open_tables} are open")


def adapter_kind(spec: ExperimentSpec) -> AdapterKind:
    """The kind that the file sets; else LoRA, or what the method is defined for."""
    kind = spec.adapter.kind
    if "kind" in spec.adapter.model_fields_set:
        return kind
    adapters = METHODS.build(spec.method.name, spec.method.options).adapters
    return kind if kind in adapters else cast("AdapterKind", sorted(adapters)[0])

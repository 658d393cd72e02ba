"""Which laws apply to what, and all of them at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args

from fedstrata.check.aggregators import AGGREGATOR_LAWS
from fedstrata.check.codecs import CODEC_LAWS
from fedstrata.check.cohorts import Taster
from fedstrata.check.fleets import Names, names_in
from fedstrata.check.law import CheckReport, LawResult, try_laws
from fedstrata.check.methods import METHOD_LAWS, MethodSubject
from fedstrata.check.objectives import OBJECTIVE_LAWS
from fedstrata.check.optimizers import OPTIMIZER_LAWS
from fedstrata.check.planners import PLANNER_LAWS, PlannerSubject
from fedstrata.check.selectors import SELECTOR_LAWS
from fedstrata.check.target import METHOD, Target
from fedstrata.core.shape import AdapterKind
from fedstrata.errors import ConfigError
from fedstrata.experiment.plugins import KINDS
from fedstrata.method.base import Method

_ADAPTERS: tuple[AdapterKind, ...] = get_args(AdapterKind)
"""Kinds of adapters that the worlds have."""


def check(target: Target, *, trials: int = 20, seed: int = 0) -> CheckReport:
    """Tries every law that applies.

    Args:
        target: From `find_target` or `target_of`.
        trials: Worlds per law; a whole federation is tried in a third of them.
        seed: Root of the worlds.

    Returns:
        The report; of a method with the laws of its parts first.

    Raises:
        ConfigError: If nothing could be tried, because the options fit none of the worlds.
    """
    names = names_in(dict(target.options))
    if target.kind == METHOD:
        results = _method(target.thing, names, trials, seed)
    else:
        results = _part(target.kind, target.thing, names, trials, seed, "")
    return CheckReport(target.name, target.kind, results, seed)


def _part(kind: str, part: Any, names: Names, trials: int, seed: int, prefix: str) -> tuple[LawResult, ...]:
    batteries: dict[str, Callable[[], tuple[Any, Any]]] = {
        "codec": lambda: (CODEC_LAWS, part),
        "aggregator": lambda: (AGGREGATOR_LAWS, Taster(part)),
        "planner": lambda: (PLANNER_LAWS, PlannerSubject(part, names)),
        "selector": lambda: (SELECTOR_LAWS, part),
        "objective": lambda: (OBJECTIVE_LAWS, part),
        "optimizer": lambda: (OPTIMIZER_LAWS, part),
    }
    laws, subject = batteries[kind]()
    return _tried(kind, try_laws(laws, subject, trials=trials, seed=seed, prefix=prefix))


def _tried(kind: str, results: tuple[LawResult, ...]) -> tuple[LawResult, ...]:
    """Refuses a battery in which nothing was tried: its silence would look like consent."""
    first, *others = results
    if all(r.status == "left out" for r in others):
        raise ConfigError(
            f"No law of this {kind} could be tried",
            got=others[0].text,
            do="give it other --options, or more --trials; the worlds have 12, 4, 2, 13 or 24 blocks",
        )
    return (first, *others)


def _method(method: Method, names: Names, trials: int, seed: int) -> tuple[LawResult, ...]:
    results: list[LawResult] = []
    for kind, k in KINDS.items():
        results += _part(kind, getattr(method, k.field), names, trials, seed, f"{kind}: ")
    adapters = tuple(a for a in _ADAPTERS if a in method.adapters)
    if adapters:
        subject = MethodSubject(method, adapters, names)
        found = try_laws(METHOD_LAWS, subject, trials=max(1, trials // 3), seed=seed)
        return (*results, *_tried(METHOD, found))
    why = f"the worlds have no adapters of kind {', '.join(sorted(method.adapters))}"
    return (*results, *(LawResult(law.name, law.says, "left out", 0, why) for law in METHOD_LAWS))

"""Law 5: what a mean was divided by, against what it says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedstrata.aggregate.base import Aggregator, ClientUpdate, Proposal
from fedstrata.check.cohorts import Cohort
from fedstrata.check.law import Trial
from fedstrata.core.tensors import TensorSpec

_RELATIVE, _ABSOLUTE = 2e-6, 2e-6


def check_denominators(aggregator: Aggregator[Any], cohort: Cohort, proposal: Proposal, trial: Trial) -> None:
    """Compares tensors that are plain means with the formula of the denominator that the proposal states.

        holders    Σ_{k ∈ holders} q_k·local_k / Σ_{k ∈ holders} q_k
        cohort     W + Σ_{k ∈ holders} q_k·(local_k − W) / Σ_{k ∈ cohort} q_k

    Plain weights are means in every aggregator that is not robust; LoRA factors in those with fixed coordinates.
    """
    said = proposal.statistics.get("denominator")
    trial.demand(
        said in ("holders", "cohort"), f'statistics["denominator"] is {said!r}', 'expected "holders" or "cohort"'
    )
    if aggregator.robust:
        return
    shares = aggregator.weights({u.client: u.num_examples for u in cohort.updates})
    for spec in cohort.layout:
        holders = [u for u in cohort.updates if spec.name in u.layout]
        is_mean = spec.kind == "weight" or (aggregator.fixed_coordinates and spec.target not in proposal.weights)
        if holders and is_mean and spec.name in proposal.tensors:
            _compare(str(said), spec, holders, shares, cohort, proposal.tensors[spec.name].astype(np.float64), trial)


def _compare(
    said: str,
    spec: TensorSpec,
    holders: Sequence[ClientUpdate],
    shares: Mapping[str, float],
    cohort: Cohort,
    got: np.ndarray,
    trial: Trial,
) -> None:
    whole = {"holders": sum(shares[u.client] for u in holders), "cohort": sum(shares.values())}
    old = cohort.current[spec.name].astype(np.float64)
    moved = sum((shares[u.client] * (u.local(spec.name) - old) for u in holders), np.zeros_like(old))
    expected = {name: old + moved / total for name, total in whole.items()}
    if _is_close(got, expected[said]):
        return
    at = tuple(int(i) for i in np.unravel_index(np.argmax(np.abs(got - expected[said])), got.shape))
    terms = " + ".join(f"{shares[u.client]:.4g}·{u.local(spec.name)[at]:.6g}" for u in holders)
    total = whole[said]
    formula = f"({terms}) / {total:.4g}" if said == "holders" else "W + Σ q·(local − W) over the cohort"
    other = "cohort" if said == "holders" else "holders"
    undivided = sum((shares[u.client] * u.local(spec.name) for u in holders), np.zeros_like(old)) / whole["cohort"]
    if _is_close(got, expected[other]):
        diagnosis = f'this is what the denominator "{other}" gives'
    elif said == "holders" and _is_close(got, undivided):
        diagnosis = "this is the holders' sum divided by the weight of the whole cohort"
    else:
        diagnosis = "this is neither the mean over the holders nor over the cohort"
    trial.broken(
        f"{spec.name}{list(at)} is {got[at]:.7g}, expected {expected[said][at]:.7g} = {formula}",
        f"it has {len(holders)} holders ({', '.join(u.client for u in holders)}) among {len(cohort.updates)} replies",
        f'statistics["denominator"] says "{said}"; {diagnosis}',
    )


def _is_close(got: np.ndarray, expected: np.ndarray) -> bool:
    return bool(np.allclose(got, expected, rtol=_RELATIVE, atol=_ABSOLUTE))

"""The laws of aggregators: 1 to 5 and 7, and the flags that a part declares."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from fedstrata.aggregate.base import AGGREGATORS, ClientUpdate, Proposal
from fedstrata.aggregate.exactness import ExactnessProbe
from fedstrata.check.cohorts import SCALING, Cohort, Taster, cut
from fedstrata.check.common import config_law, copied, first_difference, same_bits
from fedstrata.check.denominators import check_denominators
from fedstrata.check.law import Law, LeftOut, Trial
from fedstrata.core.tensors import HEAD, Layout, TensorSpec
from fedstrata.errors import AggregationError

_FINE = 1e-6


def _close(trial: Trial, got: np.ndarray, expected: np.ndarray, what: str, tolerance: float = _FINE) -> None:
    gap, norm = float(np.linalg.norm(got - expected)), float(np.linalg.norm(expected))
    if gap <= tolerance * max(norm, 1e-3):
        return
    at = tuple(int(i) for i in np.unravel_index(np.argmax(np.abs(got - expected)), got.shape))
    trial.broken(
        f"{what}: relative difference {gap / max(norm, 1e-3):.2g}, allowed {tolerance:g}",
        f"largest at {list(at)}: got {got[at]:.7g}, expected {expected[at]:.7g}",
    )


def _one_reply(taster: Taster, trial: Trial) -> None:
    cohort = taster.cohort(trial, num_clients=1)
    (update,) = cohort.updates
    proposal = cohort.merge(taster.aggregator)
    local = {n: update.local(n) for n in update.layout.names}
    for name in cohort.maps(update):
        _close(trial, cohort.merged(proposal, name), cohort.effective(local, name), f"effective weight of {name}")


def _idempotence(taster: Taster, trial: Trial) -> None:
    cohort = taster.cohort(trial, num_clients=1)
    (update,) = cohort.updates
    count = 2 + trial.index % 4
    alike = [replace(update, client=f"d{k}") for k in range(count)]
    one, many = cohort.merge(taster.aggregator), cohort.merge(taster.aggregator, alike)
    for name in cohort.maps(update):
        what = f"{count} replies like that of c0, effective weight of {name}"
        _close(trial, cohort.merged(many, name), cohort.merged(one, name), what)


def _no_holder(taster: Taster, trial: Trial) -> None:
    cohort = taster.cohort(trial)
    proposal = cohort.merge(taster.aggregator)
    held = set(cohort.strata)
    stray = [n for n in proposal.tensors if cohort.layout[n].stratum not in held]
    trial.demand(not stray, f"nobody trained {', '.join(stray[:3])}, and yet the proposal has new values for it")
    moved = [t for t in proposal.base_update if cohort.layout[f"{t}.lora_A"].stratum not in held]
    trial.demand(not moved, f"nobody trained {', '.join(moved[:3])}, and yet the proposal moves its base")
    expected = {s: len(cohort.holders(s)) for s in cohort.strata}
    trial.demand(dict(proposal.holders) == expected, f"holders are {dict(proposal.holders)}", f"expected    {expected}")


def _form(taster: Taster, trial: Trial) -> None:
    cohort = taster.cohort(trial)
    proposal = cohort.merge(taster.aggregator)
    names = [n for n in cohort.layout.names if n in proposal.tensors]
    trial.demand(list(proposal.tensors) == names, f"tensors {list(proposal.tensors)}", f"layout  {names}")
    for name, tensor in proposal.tensors.items():
        shape = cohort.layout[name].shape
        trial.demand(
            tensor.dtype == np.float32 and tensor.shape == shape and bool(np.isfinite(tensor).all()),
            f"{name} is {tensor.dtype} {list(tensor.shape)}, finite: {bool(np.isfinite(tensor).all())}",
            f"expected finite float32 {list(shape)}",
        )
    trial.demand(
        not proposal.base_update or taster.aggregator.moves_base, "it moves the base, and moves_base says it does not"
    )
    stratum = next(iter(proposal.holders))
    part = proposal.restrict([stratum])
    inside = {s.name for s in cohort.layout.of(stratum)}
    trial.demand(
        set(part.tensors) <= inside, f"Proposal.restrict([{stratum}]) keeps {sorted(set(part.tensors) - inside)}"
    )


def _order(taster: Taster, trial: Trial) -> None:
    cohort = taster.cohort(trial)
    count = len(cohort.updates)
    renamed = [replace(u, client=f"r{k}") for k, u in enumerate(reversed(cohort.updates))]
    one, other = cohort.merge(taster.aggregator), cohort.merge(taster.aggregator, renamed)
    for update in cohort.updates:
        for name in cohort.maps(update):
            what = f"with the {count} clients renamed in reverse order, {name}"
            _close(trial, cohort.merged(other, name), cohort.merged(one, name), what, tolerance=2e-5)


def _repeat(taster: Taster, trial: Trial) -> None:
    cohort = taster.cohort(trial)
    before = copied(cohort.current)
    sent = [copied(u.values) for u in cohort.updates]
    one, other = cohort.merge(taster.aggregator), cohort.merge(taster.aggregator)
    trial.demand(same_bits(_all(one), _all(other)), "the same replies twice:", first_difference(_all(one), _all(other)))
    for tensor in one.tensors.values():
        tensor += 1  # a proposal that shares memory with the server or a reply would now change it
    trial.demand(
        same_bits(before, cohort.current), "the server's tensors changed", first_difference(before, cohort.current)
    )
    for update, values in zip(cohort.updates, sent, strict=True):
        trial.demand(same_bits(values, update.values), f"the reply of {update.client} changed")


def _all(proposal: Proposal) -> dict[str, np.ndarray]:
    pairs = {f"{t} base {i}": f for t, factors in proposal.base_update.items() for i, f in enumerate(factors)}
    return dict(proposal.tensors) | pairs


def _denominators(taster: Taster, trial: Trial) -> None:
    cohort = taster.cohort(trial)
    check_denominators(taster.aggregator, cohort, cohort.merge(taster.aggregator), trial)


def _weights(taster: Taster, trial: Trial) -> None:
    cohort = taster.cohort(trial)
    _shares(trial, "weights()", taster.aggregator.weights({u.client: u.num_examples for u in cohort.updates}),
            {u.client for u in cohort.updates})  # fmt: skip
    for target, shares in cohort.merge(taster.aggregator).weights.items():
        stratum = next(s.stratum for s in cohort.layout if s.target == target)
        _shares(trial, f"Proposal.weights of {target}", shares, {u.client for u in cohort.holders(stratum)})


def _shares(trial: Trial, what: str, shares: Mapping[str, float], clients: set[str]) -> None:
    good = set(shares) == clients and min(shares.values()) >= 0 and math.isclose(sum(shares.values()), 1, abs_tol=1e-9)
    trial.demand(good, f"{what} = {dict(shares)}", f"expected: numbers from 0 for {sorted(clients)} that add up to 1")


def _empty(taster: Taster, trial: Trial) -> None:
    cohort = taster.cohort(trial, num_clients=1)
    for what, call in (
        ("finish() without a reply", lambda: cohort.merge(taster.aggregator, [])),
        ("weights({})", lambda: taster.aggregator.weights({})),
    ):
        try:
            call()
        except AggregationError:
            continue
        trial.broken(f"{what} gave a result; expected AggregationError")


def _exact(taster: Taster, trial: Trial) -> None:
    aggregator = taster.aggregator
    if not aggregator.exact:
        raise LeftOut("it does not say that it is exact")
    cohort = taster.cohort(trial, pairs_only=True)
    probe = ExactnessProbe(cohort.layout, cohort.context.scaling, aggregator)
    for update in cohort.updates:
        probe.add(update)
    found = probe.finish(cohort.merge(aggregator), cohort.current)
    error = found["exactness_error"]
    trial.demand(
        error is None or error <= 1e-5,
        f"it says exact; ‖D_s − Σ q_k·D_k‖ / ‖Σ q_k·D_k‖ = {error}, allowed 1e-5",
        f"per target: { {t: v['exactness_error'] for t, v in found['per_target'].items()} }",
    )


def _needs(taster: Taster, trial: Trial) -> None:
    aggregator = taster.aggregator
    trial.demand(aggregator.needs in ("sum", "all updates"), f'needs = {aggregator.needs!r}: "sum" or "all updates"')
    if aggregator.needs != "sum":
        raise LeftOut("it says that it needs all updates")
    cohort = taster.cohort(trial)
    acc, refs = aggregator.zero(cohort.layout, cohort.context), []
    for update in cohort.updates:
        mine = replace(update, values=copied(update.values))
        refs.append([weakref.ref(t) for t in mine.values.values()])
        acc = aggregator.add(acc, mine)
        del mine
    kept = [u.client for u, r in zip(cohort.updates, refs, strict=True) if any(ref() is not None for ref in r)]
    trial.demand(not kept, f'needs = "sum", but the replies of {", ".join(kept)} are still kept after add()')


def _unequal_ranks(taster: Taster, trial: Trial) -> None:
    aggregator = taster.aggregator
    cohort = taster.cohort(trial, pairs_only=True, num_clients=2)
    block = next((s for s in cohort.updates[0].layout.strata if s != HEAD), None)
    rank = max((s.rank for s in cohort.layout), default=0)
    if block is None or rank < 2:
        raise LeftOut("the world has no rank to cut")
    whole = cohort.updates[0]
    small = replace(cut(whole, rank - 1), client="d")
    trial.note(f"a client d trains the same at rank {rank - 1} of {rank}")
    if not aggregator.unequal_ranks:
        try:
            cohort.merge(aggregator, [whole, small])
        except AggregationError as error:
            trial.demand("d" in str(error), f"the refusal does not name the client: {error}")
            return
        trial.broken("unequal_ranks says no, and yet the replies were merged; expected AggregationError")
    cohort.merge(aggregator, [whole, small])
    _one_small_reply(cohort, small, cohort.merge(aggregator, [small]), trial)


def _one_small_reply(cohort: Cohort, small: ClientUpdate, proposal: Proposal, trial: Trial) -> None:
    """Either the product is the client's, or its slices are and the others keep their bits."""
    local = {n: small.local(n) for n in small.layout.names}
    for target in small.layout.targets:
        mine = cohort.effective(local, target)
        merged = cohort.merged(proposal, target)
        if np.linalg.norm(merged - mine) <= _FINE * max(float(np.linalg.norm(mine)), 1e-3):
            continue
        for spec in (s for s in small.layout if s.target == target):
            leading = tuple(slice(n) for n in spec.shape)
            new, old = proposal.tensors[spec.name], cohort.current[spec.name]
            _close(trial, new[leading].astype(np.float64), local[spec.name], f"the client's slices of {spec.name}")
            rest = np.ones(new.shape, bool)
            rest[leading] = False
            trial.demand(
                new[rest].tobytes() == old[rest].tobytes(),
                f"slices of {spec.name} that nobody had do not keep their bits",
            )


def _scaling(taster: Taster, trial: Trial) -> None:
    cohort = taster.cohort(trial, pairs_only=True, num_clients=1)
    (update,) = cohort.updates
    if not update.layout.targets:
        raise LeftOut("nobody trains a pair")
    own = replace(update, scaling=dict.fromkeys(cohort.layout.targets, 2 * SCALING))
    trial.note(f"it scales its pairs with {2 * SCALING:g}, the server with {SCALING:g}")
    if not taster.aggregator.folds_scaling:
        if _takes_drawn_slices(taster, cohort, update):
            raise LeftOut("it takes drawn slices, whose scaling stands in the clients' gradients")
        try:
            cohort.merge(taster.aggregator, [own])
        except AggregationError:
            return
        trial.broken("folds_scaling says no, and yet factors of two scalings were mixed; expected AggregationError")
    proposal = cohort.merge(taster.aggregator, [own])
    local = {n: own.local(n) for n in own.layout.names}
    for name in own.layout.targets:
        expected = cohort.effective(local, name, 2 * SCALING)
        _close(trial, cohort.merged(proposal, name), expected, f"effective weight of {name}")


def _takes_drawn_slices(taster: Taster, cohort: Cohort, update: ClientUpdate) -> bool:
    ranks = {s.stratum: s.rank for s in update.layout if s.rank}
    try:
        cohort.merge(taster.aggregator, [replace(update, slices={s: tuple(range(r)) for s, r in ranks.items()})])
    except AggregationError:
        return False
    return True


def _float64(taster: Taster, trial: Trial) -> None:
    """1 between two huge values of opposite sign: in float32 the small one is lost."""
    if taster.aggregator.robust:
        raise LeftOut("a robust mean is no sum")
    cohort = taster.cohort(trial, num_clients=1)
    huge = 2.0 ** (26 + trial.index % 4)
    layout = Layout((*(s for s in cohort.layout if s.stratum != HEAD), TensorSpec("head.bias", (2,), HEAD)))
    world = replace(cohort, layout=layout, current={n: np.zeros_like(cohort.current[n]) for n in layout.names})
    mine = layout.restrict([HEAD])
    start = {"head.bias": np.zeros(2, np.float32)}
    trial.world.clear()
    updates = []
    for client, value in (("c0", huge), ("c1", 1.0), ("c2", -huge)):
        trial.note(f"client {client}: 1 example, head.bias moves from 0 to {value:.10g}")
        updates.append(ClientUpdate(client, 1, mine, start, {"head.bias": np.full(2, value, np.float32)}))
    got = world.merge(taster.aggregator, updates).tensors["head.bias"].astype(np.float64)
    q = taster.aggregator.weights(dict.fromkeys(("c0", "c1", "c2"), 1))
    expected = np.full(2, q["c1"] + huge * (q["c0"] - q["c2"]))
    _close(trial, got, expected, "head.bias, whose sum needs float64")


AGGREGATOR_LAWS: tuple[Law[Taster], ...] = (
    Law("config", "its config survives JSON and builds an equal part, found by its id",
        lambda taster, trial: config_law(AGGREGATORS).check(taster.aggregator, trial)),
    Law("one reply", "one reply gives the server that client's effective weights (law 1)", _one_reply),
    Law("idempotence", "identical replies count as one (law 2)", _idempotence),
    Law("no holder", "what nobody trained stays out of the proposal, and holders are counted (law 3)", _no_holder),
    Law("form", "a proposal holds finite float32 tensors in the layout's order and can be cut", _form),
    Law("order", "names of clients change nothing but rounding (law 4)", _order),
    Law("repeat", "the same replies give the same bits, and nothing that came in is changed", _repeat),
    Law("float64 sums", "sums are kept in float64 and divided once (law 4)", _float64),
    Law("denominator", "a mean divides by what its statistics say (law 5)", _denominators),
    Law("weights", "weights are those of the holders and add up to 1 (law 7)", _weights),
    Law("empty cohort", "no reply is an AggregationError, never a number", _empty),
    Law("exact", "who says exact has no exactness error (law 7)", _exact),
    Law("needs", 'who needs the "sum" keeps no reply', _needs),
    Law("unequal ranks", "a smaller rank counts on its slices or as a product, or is refused by name", _unequal_ranks),
    Law("scaling", "a client's own scaling is folded in, or refused (law 6)", _scaling),
)  # fmt: skip

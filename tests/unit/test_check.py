"""The battery: every part of ours passes, and planted bugs are caught with counterexamples that one can read."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import numpy as np
import pytest

from fedstrata.aggregate import AGGREGATORS, Aggregator, ClientUpdate, HoldersMean, MergeContext, Proposal
from fedstrata.check import CheckReport, check, find_target, target_of
from fedstrata.codec import CODECS, Codec, Float32
from fedstrata.core.rng import generator
from fedstrata.core.tensors import HEAD, Layout
from fedstrata.core.wire import Payload
from fedstrata.errors import ConfigError
from fedstrata.experiment.plugins import KINDS
from fedstrata.method import METHODS
from fedstrata.objective import OBJECTIVES, Objective
from fedstrata.optimize import OPTIMIZERS, OptimizerState, ServerOptimizer
from fedstrata.plan import PLANNERS, AllStrata, PlanContext, Planner, RoundPlan, client_plan
from fedstrata.select import SELECTORS, SelectContext, Selector

OPTIONS: dict[str, dict[str, Any]] = {
    "fixed": {"clients": {f"c{k}": [k] for k in range(6)}},
    "zstd": {"inner": "int8"},
    "error_feedback": {"inner": {"id": "top_k", "fraction": 0.3}},
    "last_k": {"k": 2},
    "first_k": {"k": 2},
    "suffix_by_device": {"depth": {"laptop-16gb": 6, "jetson-nx": 2}},
}
PARTS = [(kind, part) for kind, k in KINDS.items() for part in k.registry]
METHODS_TRIED = ("fedavg", "flora", "fslora", "fed_hello", "rolora", "local_only")
"""One of every way to merge; `fedstrata check-part` takes the others."""


@pytest.fixture(autouse=True)
def _forget_parts() -> Iterator[None]:
    """Takes out what a test registered."""
    yield
    for kind in KINDS.values():
        kind.registry.forget(__name__)


def broken(report: CheckReport) -> dict[str, str]:
    return {r.name: r.text for r in report.broken}


@pytest.mark.parametrize(("kind", "part"), PARTS, ids=["-".join(p) for p in PARTS])
def test_every_part_of_ours_keeps_its_laws(kind: str, part: str) -> None:
    report = check(find_target(part, kind=kind, options=OPTIONS.get(part, {})), trials=5, seed=1)
    assert broken(report) == {}
    assert sum(r.status == "holds" for r in report.results) >= 4


@pytest.mark.parametrize("name", METHODS_TRIED)
def test_methods_of_ours_keep_their_laws(name: str) -> None:
    report = check(find_target(name, kind="method"), trials=3, seed=2)
    assert broken(report) == {}
    assert {r.name for r in report.results if r.status == "holds"} >= {"registered", "untouched", "failure", "resume"}


@pytest.mark.engine
@pytest.mark.parametrize("name", sorted(METHODS.entries))
def test_every_method_of_ours_keeps_its_laws(name: str) -> None:
    assert broken(check(find_target(name, kind="method"), trials=6)) == {}


def merge_by_cohort(acc: dict[str, Any], layout: Layout, current: Mapping[str, np.ndarray], said: str) -> Proposal:
    """Sums of the holders over the weight of everybody: the mistake."""
    tensors = {n: (acc["sums"][n] / acc["total"]).astype(np.float32) for n in layout.names if n in acc["sums"]}
    holders = {s: acc["holders"][s] for s in layout.strata if s in acc["holders"]}
    return Proposal(tensors, holders, {"denominator": said}, layout=layout)


@dataclass(frozen=True)
class WrongDenominator(Aggregator[dict[str, Any]]):
    """Divides by the cohort and says holders."""

    id: ClassVar[str] = "wrong_denominator"
    needs: ClassVar[Literal["sum", "all updates"]] = "sum"
    unequal_ranks: ClassVar[bool] = False

    def zero(self, layout: Layout, context: MergeContext | None = None) -> dict[str, Any]:
        return {"layout": layout, "sums": {}, "holders": {}, "total": 0.0, "inner": HoldersMean().zero(layout, context)}

    def add(self, acc: dict[str, Any], update: ClientUpdate) -> dict[str, Any]:
        HoldersMean().add(acc["inner"], update)  # refuses what does not fit
        for name in update.layout.names:
            acc["sums"][name] = acc["sums"].get(name, 0.0) + update.num_examples * update.local(name)
        for stratum in update.layout.strata:
            acc["holders"][stratum] = acc["holders"].get(stratum, 0) + 1
        acc["total"] += update.num_examples
        return acc

    def finish(self, acc: dict[str, Any], current: Mapping[str, np.ndarray]) -> Proposal:
        HoldersMean().finish(acc["inner"], current)
        return merge_by_cohort(acc, acc["layout"], current, "holders")

    def weights(self, updates: Mapping[str, int]) -> Mapping[str, float]:
        return HoldersMean().weights(updates)


def test_a_planted_denominator_bug_is_caught_with_numbers_that_one_can_check_by_hand() -> None:
    AGGREGATORS.register(WrongDenominator)
    report = check(target_of(WrongDenominator()))
    found = broken(report)
    assert list(found) == ["denominator"]
    text = found["denominator"]
    assert "world 1 of seed 0" in text  # two clients: with one of them the mistake does not show
    assert "client c0: 15 examples" in text
    assert "client c1: 8 examples" in text
    assert "it has 1 holders (c0) among 2 replies" in text
    assert 'statistics["denominator"] says "holders"' in text
    assert "this is the holders' sum divided by the weight of the whole cohort" in text


@dataclass(frozen=True)
class Naive(Codec):
    """What many would write first: it trusts the bytes, forgets a length, and calls itself lossless."""

    id: ClassVar[str] = "naive"
    trusting: bool = True
    lossless: ClassVar[bool] = True  # type: ignore[misc]
    fixed_length: ClassVar[bool] = True  # type: ignore[misc]
    deltas_only: ClassVar[bool] = False  # type: ignore[misc]
    deterministic: ClassVar[bool] = True  # type: ignore[misc]

    def encode(
        self, tensors: Any, layout: Layout, residual: Any, rng: np.random.Generator
    ) -> tuple[Payload, dict[str, np.ndarray]]:
        flat = [np.ravel(tensors[n]) for n in layout.names]
        return Payload(b"", np.concatenate([*flat, np.zeros(1, np.float32)]).astype(np.float16).tobytes()), {}

    def decode(self, payload: Payload, layout: Layout) -> dict[str, np.ndarray]:
        flat, start, tensors = np.frombuffer(payload.values, np.float16).astype(np.float32), 0, {}
        for spec in layout:
            tensors[spec.name] = flat[start : start + spec.num_values].reshape(spec.shape)
            start += spec.num_values
        return tensors

    def max_bytes(self, layout: Layout) -> tuple[int, int]:
        return 0, 2 * layout.num_values


def test_a_naive_codec_breaks_the_laws_that_it_should() -> None:
    CODECS.register(Naive)
    found = broken(check(target_of(Naive())))
    assert set(found) == {"round trip", "extreme values", "length", "hostile bytes"}
    assert "it says lossless" in found["round trip"]
    assert "only PayloadError may come out of bytes" in found["hostile bytes"]
    assert "max_bytes says (0, 2)" in found["length"]


@dataclass(frozen=True)
class Bounded(Codec):
    """Rounds to whole numbers, and promises half of what it does."""

    id: ClassVar[str] = "bounded"
    bound: float = 0.5

    lossless: ClassVar[bool] = False  # type: ignore[misc]
    fixed_length: ClassVar[bool] = True  # type: ignore[misc]
    deltas_only: ClassVar[bool] = False  # type: ignore[misc]
    deterministic: ClassVar[bool] = True  # type: ignore[misc]

    def encode(self, tensors: Any, layout: Layout, residual: Any, rng: np.random.Generator) -> Any:
        return Float32().encode({n: np.rint(t) for n, t in tensors.items()}, layout, {}, rng)

    def decode(self, payload: Payload, layout: Layout) -> Any:
        return Float32().decode(payload, layout)

    def max_bytes(self, layout: Layout) -> tuple[int, int]:
        return Float32().max_bytes(layout)

    def error_bound(self, tensor: np.ndarray) -> float:
        return self.bound


@pytest.mark.parametrize(("bound", "laws"), [(0.5, set()), (0.1, {"round trip"})])
def test_a_codec_is_held_to_the_bound_that_it_states(bound: float, laws: set[str]) -> None:
    CODECS.register(Bounded)
    found = broken(check(target_of(Bounded(bound))))
    assert set(found) == laws
    assert all("error_bound says 0.1" in text for text in found.values())


@dataclass(frozen=True)
class OneSeed(Planner):
    """Draws blocks by the round's number only, keeps a set in its state, and changes it in place."""

    id: ClassVar[str] = "one_seed"

    def init(self, shape: Any, fleet: Any) -> dict[str, Any]:
        return {"seen": []}

    def server_ranks(self, shape: Any, max_rank: int) -> Any:
        return AllStrata().server_ranks(shape, max_rank)

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        rng = generator(0, "blocks", context.server_round)
        plans = [client_plan(c, {int(rng.choice(list(context.strata))): 1}, context) for c in sorted(context.cohort)]
        state["seen"].append(context.server_round)
        return RoundPlan(context.server_round, tuple(plans)), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        return state | {"last": np.float32(1)}


def test_a_planner_that_ignores_the_seed_and_is_not_pure_is_caught() -> None:
    PLANNERS.register(OneSeed)
    found = broken(check(target_of(OneSeed())))
    assert set(found) == {"seeds", "pure", "json"}
    assert "the same for the seeds 0 to 4" in found["seeds"]
    assert "changed the state it was given: {'seen': []}" in found["pure"]


@dataclass(frozen=True)
class LastRoundAll(Planner):
    """Trains everything in the last planned round, without a word about it."""

    id: ClassVar[str] = "last_round_all"
    says: bool = False

    def decided_by_rounds(self, num_rounds: int) -> dict[str, Any]:
        return {"all in round": num_rounds} if self.says else {}

    def init(self, shape: Any, fleet: Any) -> dict[str, Any]:
        return {}

    def server_ranks(self, shape: Any, max_rank: int) -> Any:
        return AllStrata().server_ranks(shape, max_rank)

    def plan(self, state: dict[str, Any], context: PlanContext) -> tuple[RoundPlan, dict[str, Any]]:
        late = context.server_round > context.num_rounds // 4
        blocks = {b: 1 for b in context.strata if late or b == 0}
        plans = [client_plan(c, blocks, context) for c in sorted(context.cohort)]
        return RoundPlan(context.server_round, tuple(plans)), state

    def observe(self, state: dict[str, Any], round_record: Mapping[str, Any]) -> dict[str, Any]:
        return state


def test_a_planner_that_is_silent_about_the_number_of_rounds_is_caught() -> None:
    PLANNERS.register(LastRoundAll)
    found = broken(check(target_of(LastRoundAll())))
    assert set(found) == {"rounds"}
    assert "a run of 20 and one of 40 rounds differ" in found["rounds"]
    assert "decided_by_rounds" in found["rounds"]
    assert broken(check(target_of(LastRoundAll(says=True)))) == {}


@dataclass(frozen=True)
class ByHand(Selector):
    """Cuts the tensors by hand and forgets everything else."""

    id: ClassVar[str] = "by_hand"

    def init(self) -> dict[str, Any]:
        return {}

    def select(
        self, state: dict[str, Any], proposal: Proposal, context: SelectContext
    ) -> tuple[Proposal, dict[str, Any], dict[str, Any]]:
        kept = {HEAD: proposal.holders[HEAD]} if HEAD in proposal.holders else {}
        names = [s.name for s in context.layout.of(HEAD)]
        tensors = {n: proposal.tensors[n] for n in names if n in proposal.tensors}
        return replace(proposal, tensors=tensors, holders=kept), state, {"accepted": {1, 2}}


def test_a_selector_that_does_not_use_restrict_is_caught() -> None:
    SELECTORS.register(ByHand)
    found = broken(check(target_of(ByHand())))
    assert set(found) == {"subset", "json"}
    assert "Proposal.restrict" in found["subset"]


@dataclass(frozen=True)
class Rooted(Objective):
    """A norm written as a root, which has no gradient at 0; and a plain objective with a penalty."""

    id: ClassVar[str] = "rooted"
    is_plain: bool = False  # type: ignore[misc]

    def penalty(self, trained: Mapping[str, Any], start: Mapping[str, Any]) -> Any:
        return sum((((t - start[n]) ** 2).sum()) ** 0.5 for n, t in trained.items())


@pytest.mark.parametrize(("is_plain", "laws"), [(False, {"finite"}), (True, {"finite", "plain"})])
def test_a_gradient_that_is_not_finite_and_a_false_plain_are_caught(is_plain: bool, laws: set[str]) -> None:
    OBJECTIVES.register(Rooted)
    assert set(broken(check(target_of(Rooted(is_plain))))) == laws


@dataclass(frozen=True)
class Restless(ServerOptimizer):
    """Counts steps of everything, whoever held it."""

    id: ClassVar[str] = "restless"
    needs_fixed_coordinates: ClassVar[bool] = True

    def step(
        self, state: OptimizerState, proposal: Proposal, current: Mapping[str, np.ndarray]
    ) -> tuple[Proposal, OptimizerState]:
        return proposal, OptimizerState(state.moments, {n: state.steps.get(n, 0) + 1 for n in current})


def test_an_optimizer_that_touches_what_nobody_held_is_caught() -> None:
    OPTIMIZERS.register(Restless)
    found = broken(check(target_of(Restless())))
    assert list(found) == ["untouched"]
    assert "nobody held b.1.w, and its steps went from None to 1" in found["untouched"]


def test_a_bug_in_a_part_breaks_its_method_too() -> None:
    AGGREGATORS.register(WrongDenominator)
    method = METHODS.build("last_k", {}).with_parts(aggregator=WrongDenominator())
    found = broken(check(target_of(method), trials=6))
    assert set(found) == {"aggregator: denominator"}


def test_a_part_that_is_not_registered_is_told_so() -> None:
    found = broken(check(target_of(METHODS.build("last_k", {}).with_parts(codec=Bounded())), trials=3))
    assert "registered" in found
    assert 'Clients could not find the codec "bounded"' in found["registered"]


def test_the_same_seed_gives_the_same_report_and_names_its_worlds() -> None:
    AGGREGATORS.register(WrongDenominator)
    first, second, other = (check(target_of(WrongDenominator()), trials=4, seed=s).to_json() for s in (3, 3, 4))
    assert first == second != other
    assert first["holds"] is False
    assert "of seed 3" in str(first)


@pytest.mark.parametrize(
    ("text", "kind", "told"),
    [
        ("krum", None, r"Several kinds of parts are called .krum.[\s\S]*--kind"),
        ("int9", None, 'did you mean "int8"'),
        ("int8", "codex", 'did you mean "codec"'),
        ("./nowhere.py:x", None, "cannot be read"),
    ],
)
def test_a_target_that_cannot_be_found_says_what_to_type(text: str, kind: str | None, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        find_target(text, kind=kind)


@pytest.mark.parametrize("kind", ["planner", "method"])
def test_options_that_fit_no_world_are_refused_because_nothing_could_be_tried(kind: str) -> None:
    with pytest.raises(ConfigError, match=r"No law of this [\s\S]*k = 99, but the model has"):
        check(find_target("last_k", kind=kind, options={"k": 99}), trials=4)

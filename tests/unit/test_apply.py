"""From a proposal to the server's next state: selection, the server optimizer, and what stays as it was."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fedstrata.aggregate import AGGREGATORS, Proposal
from fedstrata.codec import Float32
from fedstrata.core.shape import ModelShape, TargetShape, global_layout
from fedstrata.core.tensors import HEAD, TensorSpec
from fedstrata.device.fleet import Client, DeviceProfile, Fleet
from fedstrata.errors import PlanError
from fedstrata.method import METHODS
from fedstrata.optimize import OPTIMIZERS, Adam, Momentum, NoOptimizer, check_coordinates
from fedstrata.record.checkpoint import ServerState, load_checkpoint, save_checkpoint
from fedstrata.select import AcceptLast
from fedstrata.server.apply import agreement, apply_proposal, mean_squared_delta, unchanged
from fedstrata.server.setup import RoundSetup

HEAD_SPEC = TensorSpec("classifier.bias", (3,), HEAD)
TARGETS = tuple(TargetShape(f"layers.{b}.q", b, 4, 5) for b in range(3))
SHAPE = ModelShape("Small", 3, 4, 16, TARGETS, (HEAD_SPEC,), (HEAD_SPEC,), 400)
LAYOUT = global_layout(SHAPE, "lora", {0: 2, 1: 2, 2: 2, HEAD: 1})
FLEET = Fleet((Client("a", DeviceProfile("box", 1 << 30, 1e9, 1e6, 1e6), 5),))


def values(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {s.name: rng.standard_normal(s.shape).astype(np.float32) for s in LAYOUT}


def setup_of(**parts: Any) -> RoundSetup:
    return RoundSetup(
        method=METHODS.build("fedavg", {}).with_parts(**parts), shape=SHAPE, fleet=FLEET, layout=LAYOUT,
        scaling=dict.fromkeys(LAYOUT.targets, 2.0), seed=7, num_rounds=5, clients_per_round=None, min_replies=1,
        train={}, max_length=8, downlink=Float32(),
    )  # fmt: skip


STATE = ServerState(values(0), 3, {"0": 1, "1": 2, "2": 2, "head": 3})


def proposal_of(blocks: tuple[Any, ...], seed: int = 1, **more: Any) -> Proposal:
    new = values(seed)
    tensors = {s.name: new[s.name] for s in LAYOUT if s.stratum in blocks}
    return Proposal(tensors, dict.fromkeys(blocks, 2), layout=LAYOUT, **more)


def pair(number: float) -> tuple[np.ndarray, np.ndarray]:
    return np.full((5, 1), number, np.float32), np.ones((1, 4), np.float32)


def test_what_nobody_held_keeps_tensors_and_version() -> None:
    applied = apply_proposal(setup_of(), STATE, proposal_of((1, HEAD)), 4)
    for spec in LAYOUT:
        same = applied.tensors[spec.name].tobytes() == STATE.tensors[spec.name].tobytes()
        assert same == (spec.stratum not in (1, HEAD))
    assert applied.versions == {"0": 1, "1": 4, "2": 2, "head": 4}
    assert list(applied.record["holders"].items()) == [("1", 2), ("head", 2)]
    assert STATE.versions == {"0": 1, "1": 2, "2": 2, "head": 3}


def test_what_the_selector_rejects_keeps_everything() -> None:
    """The last one of three blocks is accepted; the others keep tensors, version, moments and base weights."""
    base = {t: pair(1.0) for t in LAYOUT.targets}
    setup = setup_of(selector=AcceptLast(0.34), optimizer=Momentum())
    applied = apply_proposal(setup, STATE, proposal_of((0, 1, 2, HEAD), base_update=base), 4)
    assert applied.versions == {"0": 1, "1": 2, "2": 4, "head": 4}
    assert set(applied.base.dense()) == {"layers.2.q"}
    assert {k.split("/")[1] for k in applied.optimizer.moments} == {
        "layers.2.q.lora_A", "layers.2.q.lora_B", "classifier.bias",
    }  # fmt: skip
    assert applied.tensors["layers.0.q.lora_A"].tobytes() == STATE.tensors["layers.0.q.lora_A"].tobytes()
    assert applied.record["selection"]["accepted"] == ["2", "head"]
    assert set(applied.record["holders"]) == {"0", "1", "2", "head"}  # of the proposal, before selection


def test_a_rejected_base_update_makes_no_merge_at_all() -> None:
    proposal = proposal_of((0, 1, 2), base_update={"layers.0.q": pair(1.0)})
    applied = apply_proposal(setup_of(selector=AcceptLast(0.34)), STATE, proposal, 4)
    assert applied.base is STATE.base


def test_momentum_without_momentum_is_no_optimizer_up_to_one_rounding() -> None:
    """W − (W − W̄) in float64, cast once: W̄ within half a unit in the last place of the larger of both."""
    plain, moved = (
        apply_proposal(setup_of(optimizer=o), STATE, proposal_of((0, 1, HEAD)), 4)
        for o in (NoOptimizer(), Momentum(1.0, 0.0))
    )
    for name, tensor in plain.tensors.items():
        np.testing.assert_allclose(moved.tensors[name], tensor, rtol=6e-8, atol=1e-9)
    assert (plain.optimizer.moments, plain.optimizer.steps) == ({}, {})
    assert moved.optimizer.steps == dict.fromkeys(sorted(s.name for s in LAYOUT if s.stratum != 2), 1)


def test_the_pseudo_gradient_is_what_the_server_had_minus_the_accepted_mean() -> None:
    """Two steps of v ← ½·v + g, W ← W − 0.1·v; block 1 is held once, block 2 never."""
    setup = setup_of(optimizer=Momentum(0.1, 0.5))
    first = apply_proposal(setup, STATE, proposal_of((0, 1), 1), 4)
    middle = replace(
        STATE, tensors=first.tensors, moments=first.optimizer.moments, optimizer_steps=first.optimizer.steps
    )
    second = apply_proposal(setup, middle, proposal_of((0,), 2), 5)
    for name in ("layers.0.q.lora_A", "layers.0.q.lora_B"):
        w0 = STATE.tensors[name].astype(np.float64)
        v1 = w0 - values(1)[name]
        w1 = (w0 - 0.1 * v1).astype(np.float32).astype(np.float64)
        v2 = 0.5 * v1 + (w1 - values(2)[name])
        np.testing.assert_allclose(second.tensors[name], w1 - 0.1 * v2, rtol=1e-6, atol=1e-7)
    for name in ("layers.1.q.lora_A", "layers.1.q.lora_B"):
        assert second.tensors[name].tobytes() == first.tensors[name].tobytes()
        assert second.optimizer.moments[f"v/{name}"].tobytes() == first.optimizer.moments[f"v/{name}"].tobytes()
    assert second.optimizer.steps["layers.0.q.lora_A"] == 2
    assert second.optimizer.steps["layers.1.q.lora_A"] == 1
    assert not any("layers.2" in key for key in second.optimizer.moments)


@pytest.mark.parametrize("optimizer", [Momentum(), Adam(), *(OPTIMIZERS.build(o) for o in ("yogi", "adagrad"))])
def test_moments_go_through_a_checkpoint_to_the_bit(optimizer: Any, tmp_path: Any) -> None:
    setup, state = setup_of(optimizer=optimizer), STATE
    states = []
    for reload in (False, True):
        state = STATE
        for server_round in (4, 5, 6):
            applied = apply_proposal(setup, state, proposal_of((0, HEAD), server_round), server_round)
            made = applied.optimizer
            state = replace(
                state, tensors=applied.tensors, versions=applied.versions, server_round=server_round,
                moments=made.moments, optimizer_steps=made.steps,
            )  # fmt: skip
            if reload:
                save_checkpoint(tmp_path / "state", state, "hash")
                state = load_checkpoint(tmp_path / "state")[0]
        states.append(state)
    assert states[0].moments
    assert {n: t.tobytes() for n, t in states[0].moments.items()} == {
        n: t.tobytes() for n, t in states[1].moments.items()
    }
    assert {n: t.tobytes() for n, t in states[0].tensors.items()} == {
        n: t.tobytes() for n, t in states[1].tensors.items()
    }
    assert states[0].optimizer_steps == states[1].optimizer_steps


def test_optimizers_follow_exactly_the_methods_with_fixed_coordinates() -> None:
    """Others factor a product again, redraw pairs or move the base: a moment would belong to another direction."""
    able = {n for n in METHODS.entries if METHODS.build(n, OPTIONS.get(n, {})).aggregator.fixed_coordinates}
    for name in METHODS.entries:
        aggregator = METHODS.build(name, OPTIONS.get(name, {})).aggregator
        check_coordinates(NoOptimizer(), aggregator)
        for optimizer in OPTIMIZERS:
            if optimizer == "none":
                continue
            if name in able:
                check_coordinates(OPTIMIZERS.build(optimizer), aggregator)
            else:
                with pytest.raises(PlanError, match="cannot follow"):
                    check_coordinates(OPTIMIZERS.build(optimizer), aggregator)
    wanted = {
        "fedavg", "fedprox", "fedit", "ffa_lora", "rolora", "fed_sb", "fed_hello", "legend", "fedra_freeze",
        "fedra_skip",
    }  # fmt: skip
    assert wanted <= able
    assert not able & {
        "flexlora", "flora", "raflora", "fedex_lora", "lora_fair", "fedsvd", "hetlora", "rank_slice_mean", "fslora",
        "krum", "median", "trimmed_mean", "clipped_mean",
    }  # fmt: skip


OPTIONS = {"last_k": {"k": 2}, "suffix_by_device": {"depth": {"box": 1}}}


def test_only_aggregators_of_tensors_keep_their_coordinates() -> None:
    keeping = {a for a in AGGREGATORS if AGGREGATORS[a].fixed_coordinates}
    assert keeping == {"holders_mean", "cohort_mean", "factor_mean"}


def test_a_round_without_a_merge_leaves_everything() -> None:
    state = replace(STATE, moments={"v/x": np.ones(2)}, optimizer_steps={"x": 3}, selector={"s": 1})
    applied = unchanged(state)
    assert applied.tensors is state.tensors
    assert (applied.versions, applied.selector, applied.base) == (state.versions, {"s": 1}, state.base)
    assert applied.optimizer.moments is state.moments
    assert applied.optimizer.steps == {"x": 3}
    assert applied.record["holders"] == {}


def test_the_mean_squared_delta_counts_every_entry_of_every_holder() -> None:
    """Σ Δ² over A (8 entries) and B (10) of 2 holders: (8·1 + 10·4)/(2·18); the head: 3·9/(2·3)."""
    moments = {
        "layers.1.q.lora_A": (np.zeros((2, 4)), np.ones((2, 4))),
        "layers.1.q.lora_B": (np.zeros((5, 2)), np.full((5, 2), 4.0)),
        "classifier.bias": (np.zeros(3), np.full(3, 9.0)),
    }
    found = mean_squared_delta(proposal_of((1, HEAD), moments=moments))
    assert found == {"1": pytest.approx(48 / 36), "head": pytest.approx(4.5)}
    applied = apply_proposal(setup_of(), STATE, proposal_of((1, HEAD), moments=moments), 4)
    assert applied.record["statistics"]["mean_squared_delta"] == found
    assert "mean_squared_delta" not in apply_proposal(setup_of(), STATE, proposal_of((1,)), 4).record["statistics"]


def test_agreement_over_clients_is_the_zico_score_of_strata_with_four_holders() -> None:
    """Δ = 1, 1, 3, 3 of four holders in every entry: mean 2, std 1, so that log Σ_ω 2 over 8 entries of A is log 16."""
    moments = {
        "layers.1.q.lora_A": (np.full((2, 4), 8.0), np.full((2, 4), 20.0)),
        "layers.1.q.lora_B": (np.full((5, 2), 8.0), np.full((5, 2), 20.0)),
        "layers.2.q.lora_A": (np.full((2, 4), 6.0), np.full((2, 4), 14.0)),
    }
    proposal = replace(proposal_of((1, 2), moments=moments), holders={1: 4, 2: 3})
    found = agreement(proposal)
    assert found == {"1": pytest.approx(math.log(16) + math.log(20))}
    assert apply_proposal(setup_of(), STATE, proposal, 4).record["statistics"]["zico_clients"] == found

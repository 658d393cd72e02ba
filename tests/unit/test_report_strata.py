"""`strata_view`: what the records say about each stratum, with numbers computed by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.report.history import strata_view
from fedstrata.report.strata import StrataView, StratumHistory

Stored = Callable[..., Path]


def run_of(num_blocks: int = 4, **plan: Any) -> dict[str, Any]:
    return {"model": {"num_blocks": num_blocks}, "parts": {"plan": plan}}


def round_of(server_round: int, **more: Any) -> dict[str, Any]:
    return {"server_round": server_round, **more}


def client_of(
    server_round: int, client: str, blocks: list[int], kind: str = "phone", rank: int = 4, **more: Any
) -> dict[str, Any]:
    planned = {str(b): rank for b in blocks} | {"head": 1}
    record = {"server_round": server_round, "client": client, "device": kind, "status": "ok", "planned": planned}
    return record | {"trained": list(planned), **more}


def of(view: StrataView, stratum: str) -> StratumHistory:
    return next(h for h in view.strata if h.stratum == stratum)


def flags_of(view: StrataView, kind: str) -> list[str]:
    return [f.text for f in view.flags if f.kind == kind]


def group_of(candidates: str, accepted: str, **more: Any) -> dict[str, Any]:
    return {"blocks": list(candidates), "candidates": list(candidates), "accepted": list(accepted), **more}


# --- allocation


def test_drawn_blocks_are_held_against_their_chance_of_being_drawn() -> None:
    why = {"rule": "random_pattern", "probabilities": {"0": 0.5, "1": 0.25, "2": 0.25, "3": 0.0}}
    rounds = [round_of(r, why=why, holders={"0": 1, "1": 1, "head": 1}) for r in (1, 2)]
    clients = [client_of(r, "a", [0, 1]) for r in (1, 2)]
    view = strata_view(run_of(), rounds, clients)
    assert view.target == "chances"
    # two of three by (1/2, 1/4, 1/4): block 0 with 5/6, the others with (2 − 5/6)/2 = 7/12
    first, second = of(view, "0").trained, of(view, "1").trained
    assert (first.num_cases, first.num_hits) == (2, 2)
    assert first.expected == pytest.approx(2 * 5 / 6)
    assert first.std == pytest.approx(math.sqrt(2 * (5 / 6) * (1 / 6)))
    assert first.z == pytest.approx((2 - 10 / 6) / math.sqrt(10 / 36))
    assert second.expected == pytest.approx(2 * 7 / 12)
    assert (of(view, "3").trained.expected, of(view, "3").trained.z) == (0.0, None)
    assert of(view, "head").trained.z is None
    assert of(view, "0").chances == (0.5, 0.5)
    # block 2: 0 − 14/12 in units of √(2 · 7/12 · 5/12), the largest
    assert view.largest_deviation is of(view, "2")
    assert of(view, "2").trained.z == pytest.approx(-(7 / 6) / math.sqrt(70 / 144))


def test_equal_chances_need_no_record_of_them() -> None:
    view = strata_view(run_of(), [round_of(1, why={"rule": "random_k"})], [client_of(1, "a", [2])])
    tally = of(view, "2").trained
    assert (tally.expected, tally.variance) == (pytest.approx(1 / 4), pytest.approx(3 / 16))
    assert view.target == "chances"


def test_device_kinds_are_counted_apart_and_together() -> None:
    why = {"rule": "random_pattern", "probabilities": dict.fromkeys("0123", 0.25)}
    clients = [
        client_of(1, "a", [0, 1], "laptop"),
        client_of(1, "b", [0], "phone"),
        client_of(1, "c", [3], "phone"),
        client_of(1, "d", [0], "phone", status="failed", trained=[]),
    ]
    block = of(strata_view(run_of(), [round_of(1, why=why)], clients), "0")
    assert list(block.by_kind) == ["phone", "laptop"]  # the most replies first
    laptop, phone = block.by_kind["laptop"], block.by_kind["phone"]
    assert (laptop.num_cases, laptop.num_hits, laptop.expected) == (1, 1, pytest.approx(2 / 4))
    assert (phone.num_cases, phone.num_hits, phone.expected) == (2, 1, pytest.approx(2 * 1 / 4))
    assert block.trained.expected == pytest.approx(1.0)
    assert block.trained.variance == pytest.approx(1 / 4 + 2 * 3 / 16)


def test_a_pattern_is_held_against_its_sets() -> None:
    why = {"rule": "pattern", "sets": {"phone": [0, 3]}}
    view = strata_view(run_of(), [round_of(1, why=why)], [client_of(1, "a", [0, 2])])
    assert view.target == "pattern"
    assert [of(view, str(b)).trained.deviation for b in range(4)] == [0, 0, 1, -1]
    assert view.largest_deviation is None


def test_other_plans_are_held_against_themselves() -> None:
    client = client_of(1, "a", [1, 2]) | {"trained": ["2", "head"]}
    view = strata_view(run_of(), [round_of(1, why={"rule": "all"})], [client])
    assert view.target == "plan"
    assert (of(view, "1").num_planned, of(view, "1").trained.deviation) == (1, -1)
    assert flags_of(view, "unmoved") == ["block 1 did not change although it was planned (in up to 1 reply)"]


def test_an_allocation_far_from_its_target_is_flagged() -> None:
    why = {"rule": "random_pattern", "probabilities": {"0": 0.5, "1": 0.5}}
    rounds = [round_of(r, why=why) for r in range(1, 31)]
    fair = [client_of(r, "a", [r % 2]) for r in range(1, 31)]
    assert flags_of(strata_view(run_of(2), rounds, fair), "allocation") == []
    # 30 of 30 where 15 ± √7.5 is due: z = 15/2.74 = 5.5; the limit for two blocks is 2.8
    unfair = [client_of(r, "a", [0]) for r in range(1, 31)]
    texts = flags_of(strata_view(run_of(2), rounds, unfair), "allocation")
    assert texts[0] == "block 0 was trained 30 times, its target is 15.0 ± 2.7: more than chance explains"
    assert len(texts) == 2


# --- scores


def test_the_planners_scores_come_with_the_rounds_that_computed_them() -> None:
    why = {"rule": "fisher", "importance": "fisher", "source": "client_heldout", "control": "permuted"}
    rounds = [
        round_of(1, why=why | {"scores": None, "scored_round": 0}),
        round_of(2, why=why | {"scores": {"0": 3.0, "1": 1e-3}, "scored_round": 2}),
        round_of(3, why=why | {"scores": {"0": 3.0, "1": 1e-3}, "scored_round": 2}),
    ]
    (scores,) = strata_view(run_of(2), rounds, []).scores
    assert (scores.source, scores.name, scores.computed_in) == ("planner", "fisher", (2,))
    assert scores.values == {"0": (None, 3.0, 3.0), "1": (None, 1e-3, 1e-3)}
    assert scores.note == "examples: client_heldout; the chances come from permuted scores"


def selection_of(accepted: str, **more: Any) -> dict[str, Any]:
    record = {"rule": "top_blocks", "score": "consistency", "score_on": "factors", "accepted": [*accepted, "head"]}
    group = group_of("012", accepted, scored_by="consistency", flat=False, tied=[])
    keys = {"0": 0.5, "1": 0.25, "2": 0.125}
    return record | {"groups": [group], "keys": keys, "scores": {b: k + 4 for b, k in keys.items()}} | more


def test_the_selectors_key_score_and_choice_are_shown_per_round() -> None:
    holders = {"0": 2, "1": 2, "2": 1, "head": 2}
    rounds = [round_of(1, selection=selection_of("0"), holders=holders)]
    view = strata_view(run_of(), rounds, [])
    (scores,) = view.scores
    assert scores.values["0"] == (0.5,)
    assert scores.reported["0"] == (4.5,)  # four tensors moved
    assert [of(view, s).selected for s in ("0", "1", "3", "head")] == [(True,), (False,), (None,), (True,)]
    assert [of(view, s).holders for s in ("0", "2", "3")] == [(2,), (1,), (0,)]


def test_selection_is_compared_with_as_many_drawn_at_random() -> None:
    two = group_of("01", "1", scored_by="consistency", flat=False, tied=[])
    rounds = [round_of(1, selection=selection_of("0"), holders={"0": 1, "1": 1, "2": 1, "head": 1})]
    rounds.append(round_of(2, selection=selection_of("1", groups=[two])))
    view = strata_view(run_of(), rounds, [])
    taken = of(view, "0").taken
    assert taken is not None
    assert (taken.num_cases, taken.num_hits) == (2, 1)
    assert taken.expected == pytest.approx(1 / 3 + 1 / 2)  # S/g of both rounds
    assert taken.variance == pytest.approx((1 / 3) * (2 / 3) + (1 / 2) * (1 / 2))
    assert of(view, "2").taken is not None
    assert of(view, "2").taken.num_cases == 1
    assert of(view, "3").taken is None
    assert of(view, "head").taken is None


def test_a_server_that_takes_everything_selects_nothing() -> None:
    selection = {"rule": "accept_all", "accepted": ["0", "head"]}
    view = strata_view(run_of(1), [round_of(1, selection=selection, holders={"0": 1, "head": 1})], [])
    assert not view.has_selection
    assert of(view, "0").selected == (True,)


def test_infinite_scores_and_replaced_scores_are_not_compared_with_others() -> None:
    infinite = selection_of(
        "0", keys={"0": None, "1": 0.25}, scores={"0": None, "1": 4.25}, flagged={"0": ["a.lora_B"]}
    )
    replaced = selection_of("0", score="zico_clients")
    normal = selection_of("0", score="zico_clients", groups=[group_of("012", "0", scored_by="zico_clients")])
    rounds = [round_of(1, selection=infinite)]
    view = strata_view(run_of(), rounds, [])
    assert view.scores[0].infinite == {(1, "0")}
    assert view.scores[0].comparable(view.rounds) == [0.25]
    assert flags_of(view, "infinite")[0].startswith("a tensor of block 0 moved by one and the same number in round 1")
    view = strata_view(run_of(), [round_of(1, selection=replaced), round_of(2, selection=normal)], [])
    assert (view.scores[0].name, view.scores[0].other) == ("zico_clients", {(1, "0"), (1, "1"), (1, "2")})
    assert len(view.scores[0].comparable(view.rounds)) == 3
    expected = "blocks 0–2 had too few holders for zico_clients in round 1: scored by consistency"
    assert flags_of(view, "fallback") == [expected]


def test_a_score_that_was_always_replaced_gives_the_map_its_name() -> None:
    view = strata_view(run_of(), [round_of(1, selection=selection_of("0", score="zico_clients"))], [])
    assert (view.scores[0].name, view.scores[0].other) == ("consistency", frozenset())


# --- warnings


def test_flat_scores_and_ties_are_told_once_for_all_rounds() -> None:
    flat = [group_of("012", "0", scored_by="consistency", flat=True, tied=["1", "0"])]
    fine = [group_of("012", "0", scored_by="consistency", flat=False, tied=[])]
    rounds = [round_of(r, selection=selection_of("0", groups=g)) for r, g in ((1, flat), (2, fine), (3, flat))]
    view = strata_view(run_of(), rounds, [])
    (text,) = flags_of(view, "flat")
    assert text.startswith("scores of blocks 0–2 are numerically flat in rounds 1, 3")
    (text,) = flags_of(view, "tie")
    assert text == "equal scores of blocks 0–1 in rounds 1, 3: the lower block was taken"


def test_a_wait_beyond_its_limit_is_flagged_with_the_largest() -> None:
    why = {"rule": "depth_and_rank", "wait_target_met": False}
    rounds = [round_of(r, why=why | {"wait_ratio": w}) for r, w in ((1, 0.31), (2, 0.42))]
    rounds.append(round_of(3, why=why | {"wait_ratio": 0.9, "wait_target_met": True}))
    (text,) = flags_of(strata_view(run_of(), rounds, []), "wait")
    assert "rounds 1–2, up to 42% of the slowest client's time" in text


def test_clients_that_were_refused_left_out_or_too_slow_are_named() -> None:
    why = {
        "rule": "depth_and_rank",
        "excluded": {"b": "memory: 3 GB of 2 GB"},
        "over_target": ["c"],
        "capped": {"d": 2},
        "refused_answers": {"e": "count = 0"},
        "never_held": [1, 2],
        "note": "nothing to score by: the chances stay as they were",
    }
    view = strata_view(run_of(), [round_of(1, why=why)], [])
    assert flags_of(view, "excluded") == ["b: left out in round 1 (memory: 3 GB of 2 GB)"]
    assert flags_of(view, "over_target") == ["c cannot keep the target time in round 1"]
    assert flags_of(view, "capped") == ["d: kept from full depth by memory or bytes in round 1"]
    assert flags_of(view, "refused_answer") == ["e: answered, but not usably in round 1 (count = 0)"]
    assert flags_of(view, "scored_unheld")[0].startswith("nobody had held blocks 1–2 when they were scored in round 1")
    assert flags_of(view, "note") == ["nothing to score by: the chances stay as they were (round 1)"]
    assert [f.clients for f in view.flags if f.kind == "excluded"] == [("b",)]


def test_robust_means_that_fell_back_are_named() -> None:
    strata = {"0": {"num_holders": 2, "fallback": "mean"}, "1": {"num_holders": 4, "fallback": None}}
    keep = {"2": {"num_holders": 1, "fallback": "keep"}}
    rounds = [round_of(1, statistics={"strata": strata, "warnings": ["told above"]})]
    rounds.append(round_of(2, statistics={"strata": keep}))
    view = strata_view(run_of(), rounds, [])
    assert flags_of(view, "fallback") == [
        "too few holders for the robust mean of block 0 in round 1: they took the plain mean",
        "too few holders for the robust mean of block 2 in round 2: they stayed as they were",
    ]
    assert flags_of(view, "warning") == []


def test_strata_that_nobody_trained_are_named() -> None:
    view = strata_view(run_of(), [round_of(1), round_of(2)], [client_of(1, "a", [3]), client_of(2, "a", [2, 3])])
    assert flags_of(view, "never_trained") == ["nobody trained blocks 0–1 in 2 rounds: as at the start"]


def test_warnings_of_parts_that_are_not_ours_are_passed_on_up_to_five() -> None:
    rounds = [
        round_of(1, selection={"warnings": [f"text {i}" for i in range(7)]}),
        round_of(2, why={"warnings": ["text 0"]}),
    ]
    texts = flags_of(strata_view(run_of(), rounds, []), "warning")
    assert texts[0] == "text 0 (rounds 1–2)"
    assert len(texts) == 6
    assert texts[-1] == "2 further warnings of parts in rounds.jsonl"


# --- exactness, probes, devices

"""`strata_view`: what the records say about each stratum, with numbers computed by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.report.history import read_strata, strata_view
from fedstrata.report.strata import StrataView, StratumHistory
from fedstrata.report.view import Point

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


def test_the_exactness_error_is_a_line_with_gaps_where_it_is_null() -> None:
    values = [{"exactness_error": 0.5, "exactness_error_update": 0.25, "reason": None}, {"exactness_error": None}]
    rounds = [round_of(i, exactness=e) for i, e in enumerate([*values, None], start=1)]
    exactness = strata_view(run_of(), rounds, []).exactness
    assert exactness is not None
    assert (exactness.name, exactness.product, exactness.update) == (
        "exactness_error",
        [Point(1, 0.5)],
        [Point(1, 0.25)],
    )


def test_robust_means_have_a_distance_instead_of_an_error() -> None:
    record = {"exactness_error": None, "distance_to_mean": 0.125, "distance_to_mean_update": 0.5}
    exactness = strata_view(run_of(), [round_of(1, exactness=record)], []).exactness
    assert exactness is not None
    assert (exactness.name, exactness.product, exactness.update) == (
        "distance_to_mean",
        [Point(1, 0.125)],
        [Point(1, 0.5)],
    )


def test_an_error_that_was_never_measured_says_why() -> None:
    record = {"exactness_error": None, "reason": "there are no LoRA pairs"}
    view = strata_view(run_of(), [round_of(1, exactness=record)], [])
    assert flags_of(view, "no_exactness") == ["the exactness error was not measured: there are no LoRA pairs"]


def test_the_cost_of_probes_is_added_up() -> None:
    def probe(examples: float, down: int, up: int, seconds: float, failures: int) -> dict[str, Any]:
        size = {"downlink": {"total": down}, "uplink": {"total": up}}
        about = {
            "kind": "fisher",
            "source": "client_heldout",
            "num_answers": 2,
            "num_examples": examples,
            "bytes": size,
        }
        return about | {"predicted_s": seconds, "failures": [{"client": "x"}] * failures}

    rounds = [round_of(1), round_of(2, probes=probe(16.0, 1000, 10, 1.5, 0)), round_of(3, probes=None)]
    rounds.append(round_of(4, probes=probe(8.0, 500, 5, 0.25, 1)))
    view = strata_view(run_of(), rounds, [])
    probes = view.probes
    assert probes is not None
    assert (probes.rounds, probes.sources, probes.num_answers) == ((2, 4), ("client_heldout",), 4)
    assert (probes.num_examples, probes.downlink_bytes, probes.uplink_bytes) == (24, 1500, 15)
    assert (probes.predicted_s, probes.num_failures) == (1.75, 1)
    assert flags_of(view, "probe_failures")[0].startswith("1 answer to the planner's questions did not come")


def test_depth_rank_and_waiting_per_device_kind() -> None:
    why = {"rule": "depth_and_rank", "ranks": {"0": 2, "1": 3, "2": 4, "3": 5}, "depths": {"a": 2, "b": 4, "c": 3}}
    rounds = [round_of(1, why=why | {"wait_ratio": 0.1}, predicted={"round_s": 8.0, "mean_wait_s": 2.0})]
    clients = [
        client_of(1, "a", [2, 3], "phone") | {"planned": {"2": 4, "3": 5, "head": 1}},
        client_of(1, "b", [0, 1, 2, 3], "laptop") | {"planned": {"0": 2, "1": 3, "2": 4, "3": 5}},
        client_of(1, "c", [1, 2, 3], "phone") | {"planned": {"1": 3, "2": 4, "3": 5}},
    ]
    devices = strata_view(run_of(max_wait=0.2), rounds, clients).devices
    assert devices is not None
    assert devices.block_ranks == {"0": 2, "1": 3, "2": 4, "3": 5}
    assert [(k.kind, k.num_clients) for k in devices.kinds] == [("phone", 2), ("laptop", 1)]
    phone, laptop = devices.kinds
    assert phone.depth == [Point(1, 2.5)]  # (2 + 3)/2
    assert phone.rank == [Point(1, (4 + 5 + 3 + 4 + 5) / 5)]
    assert laptop.rank == [Point(1, 3.5)]  # (2 + 3 + 4 + 5)/4
    assert (devices.planned_wait, devices.simulated_wait) == ([Point(1, 0.1)], [Point(1, 0.25)])
    assert devices.max_wait == 0.2


def test_ranks_of_clients_are_not_taken_for_ranks_of_blocks() -> None:
    why = {"rule": "client_ranks", "ranks": {"1": 4, "b": 8}}  # a client may be called "1"
    clients = [client_of(1, "1", [0, 1], "phone", 4), client_of(1, "b", [0, 1], "laptop", 8)]
    devices = strata_view(run_of(2), [round_of(1, why=why)], clients).devices
    assert devices is not None
    assert devices.block_ranks == {}
    assert {k.kind: k.rank for k in devices.kinds} == {"phone": [Point(1, 4.0)], "laptop": [Point(1, 8.0)]}


# --- robustness


def test_records_without_any_reason_still_count_who_trained_what(stored_run: Stored) -> None:
    view = read_strata(stored_run(num_rounds=2, cohort=6))  # its records hold nothing about why
    # the devices train 3, 2 and 1 of three blocks, two clients of each
    assert [h.holders for h in view.strata] == [(2, 2), (4, 4), (6, 6), (6, 6)]
    assert (view.target, view.scores, view.exactness, view.probes, view.devices) == ("plan", (), None, None, None)
    assert view.flags == ()


def test_a_run_without_a_finished_round_is_empty(stored_run: Stored) -> None:
    folder = stored_run(num_rounds=1, finished=False)
    (folder / "rounds.jsonl").write_text("")
    view = read_strata(folder)
    assert (view.rounds, view.flags) == ((), ())
    assert [h.holders for h in view.strata] == [(), (), ()]


STRANGE: list[Any] = [None, 3, "text", [], [1, None], {"a": {}}, {"0": "x", "zz": 1, "1": None}, True, math.inf]


@pytest.mark.parametrize("strange", STRANGE, ids=[str(i) for i in range(len(STRANGE))])
def test_values_of_another_form_count_as_not_there(strange: Any) -> None:
    tables = dict.fromkeys(("why", "selection", "holders", "statistics", "exactness", "probes", "predicted"), strange)
    inner = dict.fromkeys(
        ("rule", "probabilities", "sets", "scores", "scored_round", "accepted", "groups", "keys", "flagged", "depths",
         "ranks", "wait_ratio", "excluded", "over_target", "never_held", "note", "warnings", "strata", "bytes",
         "failures", "source", "score", "reason", "exactness_error", "num_examples"),
        strange,
    )  # fmt: skip
    legend = {"why": inner | {"rule": "depth_and_rank"}, "selection": inner | {"groups": [inner]}}
    rounds = [round_of(1, **tables), round_of(2, **dict.fromkeys(tables, inner)), round_of(3, **legend)]
    view = strata_view(run_of(), rounds, [client_of(r, "a", [0]) for r in (1, 2, 3)])
    assert view.rounds == (1, 2, 3)
    assert of(view, "0").trained.num_hits == 3
    json.dumps(view.to_json(), allow_nan=False)


def test_lines_of_a_round_that_did_not_finish_do_not_count() -> None:
    view = strata_view(run_of(), [round_of(1)], [client_of(1, "a", [0]), client_of(2, "a", [0, 1])])
    assert of(view, "0").trained.num_cases == 1
    assert of(view, "1").holders == (0,)


def test_the_json_holds_one_entry_per_round_and_survives_a_round_trip() -> None:
    why = {"rule": "random_pattern", "probabilities": {"0": 0.5, "1": 0.5}}
    rounds = [round_of(r, why=why, selection=selection_of("0"), exactness={"exactness_error": 0.5}) for r in (1, 2)]
    view = strata_view(run_of(2), rounds, [client_of(r, "a", [0]) for r in (1, 2)])
    data = json.loads(json.dumps(view.to_json(), allow_nan=False))
    assert data["rounds"] == [1, 2]
    assert [s["stratum"] for s in data["strata"]] == ["0", "1", "head"]
    assert data["strata"][0]["trained"]["expected"] == pytest.approx(1.0)  # two rounds, each 1/2
    assert data["strata"][0]["taken"]["num_hits"] == 2
    assert data["scores"][0]["values"]["0"] == [0.5, 0.5]
    assert data["exactness"]["product"] == [{"server_round": 1, "value": 0.5}, {"server_round": 2, "value": 0.5}]
    # |z| of both blocks is 1/√(2 · 1/4); the first of them is named
    assert data["allocation"]["largest_deviation"] == {"stratum": "0", "z": pytest.approx(1 / math.sqrt(0.5))}

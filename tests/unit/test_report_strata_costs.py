"""What a report says about exactness, probes, devices and odd records."""

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


def selection_of(accepted: str, **more: Any) -> dict[str, Any]:
    record = {"rule": "top_blocks", "score": "consistency", "score_on": "factors", "accepted": [*accepted, "head"]}
    group = group_of("012", accepted, scored_by="consistency", flat=False, tied=[])
    keys = {"0": 0.5, "1": 0.25, "2": 0.125}
    return record | {"groups": [group], "keys": keys, "scores": {b: k + 4 for b, k in keys.items()}} | more


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

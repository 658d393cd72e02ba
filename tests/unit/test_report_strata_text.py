"""The terminal's part of a report: a line per stratum, then sentences."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from fedstrata.report.history import strata_view
from fedstrata.report.levels import Scale, binned
from fedstrata.report.strata_text import print_strata
from fedstrata.report.words import rounds_named, some_of, strata_named

Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "JUPYTER_COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def client_of(server_round: int, client: str, blocks: list[int]) -> dict[str, Any]:
    planned = {str(b): 4 for b in blocks} | {"head": 1}
    record = {"server_round": server_round, "client": client, "device": "phone", "status": "ok"}
    return record | {"planned": planned, "trained": list(planned)}


def printed(capsys: Capture, rounds: list[dict[str, Any]], clients: list[dict[str, Any]], num_blocks: int = 3) -> str:
    print_strata(strata_view({"model": {"num_blocks": num_blocks}, "parts": {}}, rounds, clients))
    return capsys.readouterr().out


def row_of(out: str, name: str) -> list[str]:
    line = next(line for line in out.splitlines() if line.strip().startswith(name))
    return line.strip().removeprefix(name).split()


def words(text: str) -> str:
    return " ".join(text.split())


DRAWN = {"rule": "random_pattern", "probabilities": {"0": 0.5, "1": 0.5, "2": 0.0}}


def test_each_stratum_has_a_line_with_the_input_at_the_bottom(capsys: Capture) -> None:
    rounds = [{"server_round": r, "why": DRAWN} for r in (1, 2, 3, 4)]
    out = printed(capsys, rounds, [client_of(r, "a", [0 if r < 4 else 1]) for r in (1, 2, 3, 4)])
    assert "The input is at the bottom; rounds 1 to 4 from left to right" in out
    names = [line.split("  ")[1] for line in out.splitlines() if line.startswith("  ") and "/4" in line]
    assert names == ["head", "block 2", "block 1", "block 0"]
    # drawn with 1/2 in each of four rounds: 2.0 ± √(4 · 1/4) = 1.0
    assert row_of(out, "block 0") == ["███·", "3/4", "2.0", "±1.0"]
    assert row_of(out, "block 2") == ["····", "0/4", "0"]
    assert row_of(out, "head") == ["████", "4/4", "4"]


def test_the_allocation_is_judged_in_words(capsys: Capture) -> None:
    rounds = [{"server_round": r, "why": DRAWN} for r in range(1, 31)]
    clients = [client_of(r, "a", [0]) for r in range(1, 31)]
    out = words(printed(capsys, rounds, clients))
    # 30 of 30 where 15 ± √(30/4) = 2.7 is due
    assert "furthest from its target: block 0, trained 30 times, target 15.0; chance alone gives ±2.7" in out
    assert "so that +15.0 is beyond what chance explains" in out
    assert "block 0 was trained 30 times" in out.split("warnings")[1]


def test_selection_shows_what_was_taken_and_what_a_random_draw_would_give(capsys: Capture) -> None:
    group = {"candidates": ["0", "1", "2"], "accepted": ["2"], "scored_by": "magnitude"}
    keys = {"0": 1e-4, "1": 1e-2, "2": 1.0}
    selection = {"score": "magnitude", "groups": [group], "accepted": ["2", "head"], "keys": keys, "scores": keys}
    holders = {"0": 1, "1": 1, "2": 1, "head": 1}
    rounds = [{"server_round": r, "selection": selection, "holders": holders} for r in (1, 2)]
    out = printed(capsys, rounds, [client_of(r, "a", [0, 1, 2]) for r in (1, 2)])
    # S/g = 1/3 in both rounds: 0.7 ± √(2 · 2/9) = 0.7; the score of block 1 is in the middle of two times 100
    assert row_of(out, "block 2") == ["██", "2/2", "██", "2/2", "0.7", "±0.7", "██"]
    assert row_of(out, "block 1") == ["██", "2/2", "··", "0/2", "0.7", "±0.7", "▅▅"]
    assert row_of(out, "block 0") == ["██", "2/2", "··", "0/2", "0.7", "±0.7", "▁▁"]
    assert "always taken over: block 2; never: blocks 0–1" in words(out)
    assert "magnitude from 0.0001 to 1 (logarithmic strip)" in words(out)


def test_scores_within_a_hundred_times_are_on_a_linear_scale(capsys: Capture) -> None:
    why = {"rule": "fisher", "importance": "fisher", "source": "public", "scored_round": 1}
    rounds = [{"server_round": 1, "why": why | {"scores": {"0": 1.0, "1": 50.0, "2": 100.0}}}]
    out = words(printed(capsys, rounds, [client_of(1, "a", [0])]))
    assert "Fisher score from 1 to 100 (linear strip); computed before round 1; examples: public" in out


def test_exactness_probes_and_waiting_have_a_sentence_each(capsys: Capture) -> None:
    size = {"downlink": {"total": 1_500_000}, "uplink": {"total": 2500}}
    probes = {"num_examples": 24.0, "source": "client_heldout", "bytes": size, "predicted_s": 90.0, "failures": []}
    rounds: list[dict[str, Any]] = [
        {"server_round": 1, "exactness": {"exactness_error": 0.5, "exactness_error_update": 0.6}},
        {"server_round": 2, "exactness": {"exactness_error": 0.02, "exactness_error_update": 0.1}, "probes": probes},
    ]
    for record, wait in zip(rounds, (1.0, 3.0), strict=True):
        record["why"] = {"rule": "depth_and_rank", "ranks": {"0": 4}}
        record["predicted"] = {"round_s": 10.0, "mean_wait_s": wait}
    out = words(printed(capsys, rounds, [client_of(1, "a", [1, 2]), client_of(2, "a", [2])]))
    assert "error 2.0e-02 of the product in round 2, at most 5.0e-01 (round 1); 1.0e-01 of the update" in out
    assert "before round 2: 24 examples (client_heldout), 1.5 MB down, 2.5 kB up, 1 min 30 s" in out
    assert "phone 1 client, depth 1–2, rank 4" in out
    assert "20% of the slowest client's time" in out  # (10% + 30%)/2


def test_a_robust_mean_is_said_to_be_meant_to_differ(capsys: Capture) -> None:
    rounds = [{"server_round": 1, "exactness": {"distance_to_mean": 0.25, "reason": "a robust mean"}}]
    out = words(printed(capsys, rounds, [client_of(1, "a", [0])]))
    assert "distance to the mean (meant to differ) 2.5e-01 of the product in round 1" in out
    assert "not measured" not in out


def test_neighbors_that_look_alike_share_a_line_and_a_hundred_blocks_fit(capsys: Capture) -> None:
    clients = [client_of(r, "a", list(range(90, 100))) for r in range(1, 401)]
    out = printed(capsys, [{"server_round": r} for r in range(1, 401)], clients, num_blocks=100)
    lines = [line for line in out.splitlines() if "/400" in line]
    assert [line.split("  ")[1] for line in lines] == ["head", "blocks 90–99", "blocks 0–89"]
    assert max(map(len, out.splitlines())) <= 80


def test_long_runs_of_unlike_blocks_still_fit_eighty_columns(capsys: Capture) -> None:
    why = {"rule": "fisher", "probabilities": {str(b): 1 / 32 for b in range(32)}, "scored_round": 1}
    rounds = [
        {"server_round": r, "why": why | {"scores": {str(b): 1.0 + b * r for b in range(32)}}} for r in range(1, 301)
    ]
    clients = [client_of(r, c, [(r * i) % 32 for i in range(1, 5)]) for r in range(1, 301) for c in "abcdefghij"]
    out = printed(capsys, rounds, clients, num_blocks=32)
    assert sum("/3000" in line for line in out.splitlines()) == 33
    assert max(map(len, out.splitlines())) <= 80
    assert not [line for line in out.splitlines() if line.startswith("    ") and "█" in line]  # no strip was wrapped


def test_strips_fall_back_to_ascii(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    view = strata_view({"model": {"num_blocks": 2}, "parts": {}}, [{"server_round": 1}], [client_of(1, "a", [0])])
    with (tmp_path / "out.txt").open("w", encoding="ascii", errors="replace") as file:
        monkeypatch.setattr(sys, "stdout", file)
        print_strata(view)
    text = (tmp_path / "out.txt").read_text()
    assert row_of(text, "block 0") == ["@", "1/1"]
    assert row_of(text, "block 1") == ["_", "0/1"]


def test_nothing_is_said_about_a_run_without_a_round(capsys: Capture) -> None:
    assert printed(capsys, [], []) == ""


def test_a_scale_shows_equal_ratios_as_equal_steps_or_equal_differences() -> None:
    assert Scale(1.0, 10_000.0, True).level(100.0) == pytest.approx(0.5)  # log 100 / log 10000
    assert Scale(1.0, 5.0, False).level(2.0) == pytest.approx(0.25)  # (2 − 1)/(5 − 1)
    assert Scale(1.0, 10_000.0, True).level(0.0) > 0  # below the smallest positive value, and still a score
    assert Scale(3.0, 3.0, False).level(3.0) == 0.5


def test_bins_are_means_of_neighboring_rounds() -> None:
    assert binned([1.0, 0.0, None, 1.0, None, None], 3) == [0.5, 1.0, None]
    assert binned([0.25, 0.75], 5) == [0.25, 0.75]


def test_phrases_shorten_what_is_long() -> None:
    assert rounds_named(range(1, 31)) == "rounds 1–30"
    assert rounds_named(range(4, 304, 5)) == "rounds 4, 9, 14, 19, 24 and 55 more"
    assert rounds_named([1, 3, 5, 7, 9]) == "rounds 1, 3, 5, 7, 9"
    assert strata_named(["head", "embeddings", "1", "0", "4"]) == "blocks 0–1, 4, embeddings, head"
    assert some_of("fedcba") == "a, b, c, d, e and 1 more"

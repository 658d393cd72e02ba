"""The charts of why: which ones a run gets, and the numbers in them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.report.drawing import KINDS, ORANGE, Data
from fedstrata.report.history import read_strata
from fedstrata.report.picture import draw_run, read_view
from fedstrata.report.strata_charts import strata_charts

Stored = Callable[..., Path]
Change = Callable[[dict[str, Any]], dict[str, Any]]


def rewrite(folder: Path, name: str, change: Change) -> Path:
    path = folder / f"{name}.jsonl"
    records = [change(json.loads(line)) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


def charts_of(folder: Path) -> tuple[dict[str, dict[str, Any]], dict[str, list[dict[str, Any]]]]:
    """Charts by title, and all rows by name."""
    data = Data()
    charts = [chart.to_dict() for chart in strata_charts(read_view(folder), read_strata(folder), data)]
    return {c["title"]["text"]: c for c in charts}, data.rows


def rows_of(chart: dict[str, Any], rows: dict[str, list[dict[str, Any]]], mark: str, place: int = 0) -> Any:
    """The rows behind a chart's layers of one mark."""
    layers = [x for x in chart["layer"] if (x["mark"]["type"] if isinstance(x["mark"], dict) else x["mark"]) == mark]
    return rows[(layers[place].get("data") or chart["data"])["name"]]  # Altair lifts what all layers share


def drawn(folder: Path, num_blocks: int = 3) -> Path:
    why = {"rule": "random_pattern", "probabilities": {str(b): 1 / num_blocks for b in range(num_blocks)}}
    return rewrite(folder, "rounds", lambda r: r | {"why": why})


def selecting(folder: Path, keys: dict[str, float | None], accepted: list[str]) -> Path:
    group = {"candidates": list(keys), "accepted": accepted, "scored_by": "consistency", "flat": False, "tied": []}
    selection = {"score": "consistency", "groups": [group], "accepted": [*accepted, "head"], "keys": keys}
    selection["scores"] = {b: None if k is None else k + 4 for b, k in keys.items()}
    selection["flagged"] = {b: ["w"] for b, k in keys.items() if k is None}
    holders = dict.fromkeys([*keys, "head"], 2)
    return rewrite(folder, "rounds", lambda r: r | {"selection": selection, "holders": holders})


def test_a_run_without_reasons_gets_no_further_chart(stored_run: Stored) -> None:
    assert charts_of(stored_run())[0] == {}


def test_bars_stack_device_kinds_and_mark_the_target_with_two_standard_deviations(stored_run: Stored) -> None:
    charts, rows = charts_of(drawn(stored_run(num_rounds=4, cohort=6)))
    (chart,) = charts.values()
    # every device trains its last 3, 2 and 1 of three blocks, two clients of each in four rounds
    bars = {(r["row"], r["kind"]): r["value"] for r in rows_of(chart, rows, "bar")}
    assert bars["0", "laptop-16gb"] == 8
    assert bars["1", "jetson-tx2"] == 0
    assert bars["2", "jetson-tx2"] == 8
    marks = {r["row"]: r for r in rows_of(chart, rows, "rule")}
    # equal chances: 8 · (3/3 + 2/3 + 1/3) = 16; only the last two kinds vary: 16 · 2/9
    assert marks["0"]["target"] == pytest.approx(16.0)
    assert marks["0"]["high"] == pytest.approx(16 + 2 * (16 * 2 / 9) ** 0.5)
    assert marks["head"] == {"row": "head", "target": 24.0, "low": 24.0, "high": 24.0}
    assert "more than chance explains" in " ".join(chart["title"]["subtitle"])  # 8 and 24 instead of 16 ± 1.9


def test_many_device_kinds_share_the_last_color(stored_run: Stored) -> None:
    folder = drawn(stored_run(num_rounds=2, num_clients=9, cohort=9))
    rewrite(folder, "clients", lambda c: c | {"device": f"kind of {c['client']}"})
    charts, rows = charts_of(folder)
    (chart,) = charts.values()
    kinds = {r["kind"] for r in rows_of(chart, rows, "bar")}
    assert len(kinds) == len(KINDS)
    assert "other kinds" in kinds
    assert sum(r["value"] for r in rows_of(chart, rows, "bar") if r["row"] == "head") == 18  # nobody is lost


def test_scores_that_span_more_than_a_hundred_times_are_logarithmic_and_say_so(stored_run: Stored) -> None:
    charts, rows = charts_of(selecting(stored_run(num_rounds=2), {"0": 1e-3, "1": 0.2, "2": 0.0}, ["1"]))
    chart = charts["How the server scored each block"]
    color = chart["layer"][1]["encoding"]["color"]["scale"]
    assert (color["type"], color["domain"]) == ("log", [1e-3, 0.2])
    assert "logarithmic colors" in chart["title"]["subtitle"][0]
    values = {(r["round"], r["row"]): r["value"] for r in rows_of(chart, rows, "rect", 1)}
    assert values[1, "2"] == 1e-3  # a zero has the lowest color
    assert {(r["round"], r["row"]) for r in rows_of(chart, rows, "rect", 0)} == {(1, "head"), (2, "head")}


def test_scores_of_one_size_are_linear(stored_run: Stored) -> None:
    charts, _ = charts_of(selecting(stored_run(num_rounds=1), {"0": -1.0, "1": 500.0, "2": 2.0}, ["1"]))
    chart = charts["How the server scored each block"]
    assert chart["layer"][1]["encoding"]["color"]["scale"]["type"] == "linear"
    assert "logarithmic" not in " ".join(chart["title"]["subtitle"])


def test_dots_are_where_the_server_took_over_and_infinite_scores_are_orange(stored_run: Stored) -> None:
    charts, rows = charts_of(selecting(stored_run(num_rounds=2), {"0": None, "1": 0.5, "2": 0.25}, ["0"]))
    chart = charts["How the server scored each block"]
    assert {(r["round"], r["row"]) for r in rows_of(chart, rows, "point")} == {
        (r, s) for r in (1, 2) for s in ("0", "head")
    }
    orange = next(layer for layer in chart["layer"] if layer["mark"].get("color") == ORANGE)
    assert rows[orange["data"]["name"]] == [{"round": 1, "row": "0"}, {"round": 2, "row": "0"}]
    assert "orange: infinite" in chart["title"]["subtitle"][0]


def test_selection_bars_count_rounds_and_mark_a_random_draw(stored_run: Stored) -> None:
    charts, rows = charts_of(selecting(stored_run(num_rounds=4), {"0": 0.1, "1": 0.5, "2": 0.25}, ["1"]))
    chart = charts["How often the server took each block over"]
    assert {r["row"]: r["value"] for r in rows_of(chart, rows, "bar")} == {"0": 0, "1": 4, "2": 0}
    assert {r["row"]: r["target"] for r in rows_of(chart, rows, "tick")} == pytest.approx({b: 4 / 3 for b in "012"})


def test_a_selection_without_scores_is_a_map_of_what_was_taken(stored_run: Stored) -> None:
    group = {"candidates": ["0", "1", "2"], "accepted": ["2"]}
    selection = {"rule": "last_blocks", "groups": [group], "accepted": ["2", "head"]}
    folder = rewrite(stored_run(num_rounds=1, cohort=6), "rounds", lambda r: r | {"selection": selection})
    charts, rows = charts_of(folder)
    assert list(charts) == ["What the server took over", "How often the server took each block over"]
    light, dark = (rows_of(charts["What the server took over"], rows, "rect", i) for i in (0, 1))
    assert {r["row"] for r in light} == {"0", "1"}
    assert {r["row"] for r in dark} == {"2", "head"}


def test_depth_rank_and_waiting_are_drawn_for_plans_about_devices(stored_run: Stored) -> None:
    why = {"rule": "depth_and_rank", "ranks": {"0": 2, "1": 3, "2": 5}, "wait_ratio": 0.1}
    predicted = {"round_s": 4.0, "mean_wait_s": 1.0}
    folder = rewrite(stored_run(num_rounds=3, cohort=6), "rounds", lambda r: r | {"why": why, "predicted": predicted})
    charts, rows = charts_of(folder)
    assert list(charts) == ["Blocks per device kind", "Waiting for the slowest client", "Rank of each block"]
    depths = {(r["round"], r["row"]): r["value"] for r in rows_of(charts["Blocks per device kind"], rows, "rect", 1)}
    assert depths[1, "laptop-16gb"] == 3
    assert depths[3, "jetson-tx2"] == 1
    assert {r["row"]: r["value"] for r in rows_of(charts["Rank of each block"], rows, "bar")} == {
        "0": 2,
        "1": 3,
        "2": 5,
    }
    waits = [rows_of(charts["Waiting for the slowest client"], rows, "line", i)[0]["value"] for i in (0, 1)]
    assert waits == [0.1, 0.25]  # planned; 1 s of 4 s


def test_ranks_of_clients_are_drawn_per_device_kind(stored_run: Stored) -> None:
    folder = rewrite(stored_run(num_rounds=1), "rounds", lambda r: r | {"why": {"rule": "client_ranks"}})
    charts, rows = charts_of(folder)
    assert list(charts) == ["Blocks per device kind", "Rank per device kind"]
    assert {r["value"] for r in rows_of(charts["Rank per device kind"], rows, "rect", 1)} == {4.0}


@pytest.mark.parametrize(
    ("key", "title", "words"),
    [
        ("exactness_error", "Exactness error", "from the mean of the clients' products"),
        ("distance_to_mean", "Distance to the mean", "meant to differ"),
    ],
)
def test_the_error_is_a_line_and_robust_means_call_it_a_distance(
    stored_run: Stored, key: str, title: str, words: str
) -> None:
    def change(record: dict[str, Any]) -> dict[str, Any]:
        value = 10.0 ** -record["server_round"]
        return record | {"exactness": {key: value, f"{key}_update": 0.0 if value < 1e-3 else value}}

    charts, rows = charts_of(rewrite(stored_run(num_rounds=4), "rounds", change))
    chart = charts[title]
    assert words in chart["title"]["subtitle"]
    assert "logarithmic; zeros are left out" in chart["title"]["subtitle"]  # 1e-1 to 1e-4 is more than 100 times
    assert [r["value"] for r in rows_of(chart, rows, "line", 0)] == pytest.approx([1e-1, 1e-2, 1e-3, 1e-4])
    assert len(rows_of(chart, rows, "line", 1)) == 3


def test_a_hundred_strata_and_a_single_round_are_drawn(stored_run: Stored) -> None:
    many = drawn(stored_run("many", num_rounds=1, num_blocks=100, cohort=6), 100)
    selecting(many, {str(b): 2.0**b for b in range(100)}, ["99"])
    svg = draw_run(many)[0].read_text()
    for title in ("How often each block was trained", "How the server scored each block", "Bytes on the line"):
        assert title in svg
    left = [float(x) for x in re.findall(r'<svg[^>]*width="([\d.]+)"', svg)]
    assert left
    assert left[0] < 1400
    charts, _ = charts_of(many)
    assert "point" not in json.dumps(charts["How the server scored each block"])  # no dots in cells of five pixels
    labels = charts["How the server scored each block"]["layer"][0]["encoding"]["y"]["axis"]["values"]
    assert labels[:2] == ["0", "3"]
    assert labels[-2:] == ["96", "head"]  # 99 would touch the head's label

"""`draw_run`: what the picture counts and shows."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fedstrata.errors import AssetError, RunFolderError
from fedstrata.report.picture import MAX_CLIENT_ROWS, draw_run, read_view
from fedstrata.report.view import ClientCell, StratumCell, every_kth, round_ticks, spread_sample

pytestmark = pytest.mark.engine

Stored = Callable[..., Path]
PNG = b"\x89PNG\r\n\x1a\n"


def lines_of(folder: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def test_a_finished_run_becomes_two_pictures_with_its_result(stored_run: Stored) -> None:
    folder = stored_run(failed=((2, "client-00"),))
    paths = draw_run(folder)
    assert paths == [folder / "report.svg", folder / "report.png"]
    svg, png = paths[0].read_text(), paths[1].read_bytes()
    assert "suffix_by_device: test accuracy 0.850 after 4 rounds (untouched model 0.250)" in svg
    assert "best: round 4, 0.750" in svg  # 0.9 - 0.6 / 4
    assert png.startswith(PNG)
    assert 1000 <= int.from_bytes(png[16:20], "big") <= 1400  # width in px
    assert not list(folder.glob("*.partial"))
    assert draw_run(folder)[0].read_text() == svg  # the same records give the same picture


def test_an_unfinished_run_is_drawn_as_far_as_it_came(stored_run: Stored) -> None:
    folder = stored_run(num_rounds=1, finished=False)
    svg = draw_run(folder)[0].read_text()
    assert "suffix_by_device: 1 round so far" in svg
    assert "not finished: 1 of 1 rounds" in svg
    assert "untouched" not in svg


def test_a_run_without_validation_is_drawn(stored_run: Stored) -> None:
    folder = stored_run(finished=False)
    rounds = [r | {"metrics": {}, "train_loss": None} for r in lines_of(folder, "rounds.jsonl")]
    (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    svg = draw_run(folder)[0].read_text()
    assert "no validation set" in svg
    assert "no client finished a step" in svg
    assert "best: round" not in svg


def test_a_stratum_cell_counts_the_clients_that_trained_it(stored_run: Stored) -> None:
    folder = stored_run(num_rounds=3, cohort=6)
    view = read_view(folder)
    # all six clients take part: two of each device, which train the last 3, round(1.5) = 2 and 1 of three blocks
    assert view.strata == ["head", "2", "1", "0"]
    expected = {"head": 6, "2": 6, "1": 4, "0": 2}
    assert view.stratum_cells == [StratumCell(r, s, expected[s]) for r in (1, 2, 3) for s in view.strata]


def test_a_failed_client_counts_for_no_stratum_and_has_no_blocks(stored_run: Stored) -> None:
    view = read_view(stored_run(num_rounds=1, cohort=6, failed=((1, "client-00"),)))
    assert ClientCell(1, "client-00", None) in view.client_cells
    assert ClientCell(1, "client-03", 3) in view.client_cells
    assert StratumCell(1, "0", 1) in view.stratum_cells


def test_clients_that_were_never_drawn_have_a_row_but_no_cell(stored_run: Stored) -> None:
    view = read_view(stored_run(num_rounds=1, cohort=1))
    assert view.clients == [f"client-{i:02d}" for i in range(6)]
    assert len(view.client_cells) == 1


def test_client_lines_of_a_round_that_did_not_finish_are_left_out(stored_run: Stored) -> None:
    folder = stored_run(num_rounds=3, cohort=6, finished=False)
    (folder / "rounds.jsonl").write_text("".join((folder / "rounds.jsonl").read_text().splitlines(True)[:2]))
    view = read_view(folder)
    assert view.num_rounds == 2
    assert {c.server_round for c in view.client_cells} == {1, 2}


def test_bytes_of_all_rounds_add_up_to_the_ledger(stored_run: Stored) -> None:
    folder = stored_run()
    view, totals = read_view(folder), json.loads((folder / "summary.json").read_text())["totals"]
    assert sum(p.value for p in view.downlink) == totals["downlink_bytes"]
    assert sum(p.value for p in view.uplink) == totals["uplink_bytes"]


def test_bytes_of_an_evaluation_on_clients_count(stored_run: Stored) -> None:
    folder = stored_run(num_rounds=1)
    before = read_view(folder)
    (record,) = lines_of(folder, "rounds.jsonl")
    record["evaluation_bytes"] = {"downlink": {"total": 70}, "uplink": {"total": 7}}
    (folder / "rounds.jsonl").write_text(json.dumps(record) + "\n")
    after = read_view(folder)
    assert after.downlink[0].value - before.downlink[0].value == 70
    assert after.uplink[0].value - before.uplink[0].value == 7


@pytest.mark.parametrize(("metric", "best"), [("accuracy", 2), ("loss", 3)])
def test_the_best_round_is_the_first_best_by_the_metric_that_selects(
    stored_run: Stored, metric: str, best: int
) -> None:
    folder = stored_run(num_rounds=4)
    run, rounds = json.loads((folder / "run.json").read_text()), lines_of(folder, "rounds.jsonl")
    run["spec"]["eval"]["metric"] = metric
    (folder / "run.json").write_text(json.dumps(run))
    scores = [(0.5, 0.9), (0.8, 0.7), (0.8, 0.4), (0.7, 0.4)]
    for record, (accuracy, loss) in zip(rounds, scores, strict=True):
        record["metrics"]["validation"] = {"accuracy": accuracy, "loss": loss}
    (folder / "rounds.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rounds))
    assert read_view(folder).best_round == best


def test_runs_with_models_per_client_show_means_over_clients(stored_run: Stored) -> None:
    view = read_view(stored_run(personal=True))
    assert view.accuracy[-1].value == pytest.approx(0.9 - 0.6 / 4 - 0.01)  # the helper's mean is 0.01 lower
    assert view.test_accuracy == pytest.approx(0.84)
    assert "own models reach 0.840" in view.title


def test_a_large_fleet_is_sampled_and_the_title_says_so(stored_run: Stored) -> None:
    folder = stored_run(num_rounds=2, num_clients=90, cohort=50)
    view = read_view(folder)
    assert (len(view.clients), view.num_clients) == (MAX_CLIENT_ROWS, 90)
    assert {c.client for c in view.client_cells} <= set(view.clients)
    assert StratumCell(1, "head", 50) in view.stratum_cells  # strata count everyone, shown or not
    assert "(40 of 90 clients)" in draw_run(folder)[0].read_text()


def test_pooled_data_show_the_one_client_that_trained(stored_run: Stored) -> None:
    folder = stored_run(num_rounds=1, cohort=1)
    run = json.loads((folder / "run.json").read_text())
    run["parts"]["topology"] = "pooled"
    (folder / "run.json").write_text(json.dumps(run))
    assert read_view(folder).clients == [lines_of(folder, "clients.jsonl")[0]["client"]]


def test_nothing_in_the_svg_is_fetched_from_elsewhere(stored_run: Stored) -> None:
    svg = draw_run(stored_run(num_rounds=1))[0].read_text()
    links = set(re.findall(r"https?://[^\"' )]+", svg))
    assert links <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}  # names of XML, not addresses


def test_a_run_without_rounds_is_refused(stored_run: Stored) -> None:
    folder = stored_run(num_rounds=1, finished=False)
    (folder / "rounds.jsonl").unlink()
    with pytest.raises(RunFolderError, match="no finished round"):
        draw_run(folder)


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="not a run folder"):
        draw_run(tmp_path)


@pytest.mark.parametrize("package", ["altair", "vl_convert"])
def test_a_missing_package_is_named_with_its_command(
    stored_run: Stored, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(AssetError, match="pip install altair vl-convert-python"):
        draw_run(stored_run(num_rounds=1))


def test_ticks_of_long_axes_are_few_and_round() -> None:
    assert round_ticks(range(1, 13)) == list(range(1, 13))
    assert round_ticks(range(1, 31)) == [1, 5, 10, 15, 20, 25, 30]
    assert all(len(round_ticks(range(1, n + 1))) <= 12 for n in range(1, 3000, 37))


def test_samples_are_spread_and_never_larger_than_asked() -> None:
    assert spread_sample("abcd", 4) == list("abcd")
    assert spread_sample("abcdef", 3) == ["a", "c", "e"]
    assert every_kth(range(1, 402), 200) == list(range(1, 402, 3))  # 401 values: k = ceil(401 / 200) = 3
    assert every_kth([1, 2], 2) == [1, 2]

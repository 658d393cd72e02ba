"""What the terminal says: the closing summary, the plan of a round, methods and packages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedstrata.report.terminal import print_assets, print_methods, print_plan, print_summary

Stored = Callable[..., Path]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "JUPYTER_COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("COLUMNS", "80")


def words(text: str) -> str:
    """The text without line breaks and padding, so that wrapping does not matter."""
    return " ".join(text.split())


def summary_of(folder: Path, capsys: Capture, run: dict[str, Any] | None = None, **changes: Any) -> str:
    summary = json.loads((folder / "summary.json").read_text()) | changes
    record = json.loads((folder / "run.json").read_text()) | (run or {})
    print_summary(folder, summary, record)
    return capsys.readouterr().out


def test_the_summary_begins_with_the_result_and_the_untouched_model(stored_run: Stored, capsys: Capture) -> None:
    lines = summary_of(stored_run(), capsys).strip().splitlines()
    assert lines[0] == "Test accuracy 0.850 (untouched model 0.250) after 4 rounds"


def test_the_summary_says_who_learned_what(stored_run: Stored, capsys: Capture) -> None:
    out = words(summary_of(stored_run(cohort=6), capsys))
    assert "6 clients on 3 kinds of devices (2 laptop-16gb, 2 jetson-nx, 2 jetson-tx2)" in out
    # 3 blocks times 1, 0.5 and 0.2, at least one
    assert "each trained only the blocks it could afford, of 3: laptop-16gb 3, jetson-nx 2, jetson-tx2 1" in out


def test_the_summary_does_not_claim_unequal_depth_where_there_is_none(stored_run: Stored, capsys: Capture) -> None:
    out = words(summary_of(stored_run(num_blocks=1), capsys))
    assert "every client trained all 1 block" in out
    assert "afford" not in out


def test_the_summary_sets_bytes_beside_a_full_exchange(stored_run: Stored, capsys: Capture) -> None:
    out = words(summary_of(stored_run(cohort=6), capsys))
    # 4 rounds of 6 replies; per round 2 * (400 + 300 + 200) = 1800 bytes up, twice that down
    assert "14.4 kB down to clients, 7.2 kB up" in out
    # 2 directions * 1 MB * 24 replies = 48 MB; 48e6 / 21600 = 2222
    assert "the whole model both ways for the same 24 replies would be 48.0 MB, 2,222 times as much" in out


def test_failed_replies_are_not_part_of_the_comparison(stored_run: Stored, capsys: Capture) -> None:
    out = words(summary_of(stored_run(cohort=6, failed=((1, "client-00"),)), capsys))
    assert "for the same 23 replies would be 46.0 MB" in out
    assert "1 client failure; " in out


def test_the_summary_shows_validation_time_and_notes(stored_run: Stored, capsys: Capture) -> None:
    out = words(summary_of(stored_run(), capsys))
    assert "accuracy 0.750 in the last evaluation (round 4), 0.750 in the best (round 4)" in out  # 0.9 - 0.6 / 4
    assert "time 12.5 s, of which training 10.0 s on the simulated devices it would take 1 min 30 s" in out
    assert "3 of 100 texts were repeated and dropped" in out


def test_the_summary_names_the_kept_state_and_the_next_commands(stored_run: Stored, capsys: Capture) -> None:
    folder = stored_run()
    out = summary_of(folder, capsys)
    assert words(f"the best state by validation (round 4) in {folder}")[:60] in words(out)
    lines = [line.strip() for line in out.splitlines()]
    assert f"fedstrata report {folder}" in lines
    assert f"fedstrata run --resume {folder} --set rounds.count=8" in lines
    assert "fedstrata init --data FILE" in lines
    assert f'PeftModel.from_pretrained(base, "{folder}/adapter")' in lines


def test_personal_runs_are_worded_as_means_over_clients(stored_run: Stored, capsys: Capture) -> None:
    folder = stored_run(personal=True)
    out = summary_of(folder, capsys)
    said = "Test accuracy of the clients' own models: mean 0.840, worst tenth 0.650 (untouched model 0.250)"
    assert said in words(out)
    assert "each alone, nothing was merged" in words(out)
    assert "whole model both ways" not in out
    assert f'PeftModel.from_pretrained(base, "{folder}/adapter/CLIENT")' in out


def test_pooled_runs_are_not_called_federated(stored_run: Stored, capsys: Capture) -> None:
    out = words(summary_of(stored_run(), capsys, run={"parts": {"topology": "pooled"}}))
    assert "one model on the pooled data of all 6 clients (nothing federated" in out
    assert "whole model both ways" not in out


@pytest.mark.parametrize(
    ("reason", "why", "command"),
    [
        ("patience", "the validation metric did not improve", "--set rounds.patience=6"),
        ("interrupted", "Ctrl-C was pressed", "run --resume"),
        ("target", "the validation metric reached", None),
    ],
)
def test_an_early_stop_says_why_and_how_to_go_on(
    stored_run: Stored, capsys: Capture, reason: str, why: str, command: str | None
) -> None:
    folder = stored_run()
    spec = json.loads((folder / "run.json").read_text())["spec"]
    spec["rounds"] = {"count": 20, "patience": 3}
    out = summary_of(folder, capsys, run={"spec": spec}, status="stopped early", stop_reason=reason)
    assert "stopped early" in out
    assert f"4 of 20 rounds: {why}" in words(out)
    assert "rounds.count=" not in out
    assert command is None or command in out


def test_a_run_with_a_decaying_rate_is_not_offered_more_rounds(stored_run: Stored, capsys: Capture) -> None:
    folder = stored_run()
    spec = json.loads((folder / "run.json").read_text())["spec"] | {"train": {"schedule": "cosine"}}
    assert "--resume" not in summary_of(folder, capsys, run={"spec": spec})


def test_a_run_whose_plan_counts_on_its_rounds_is_not_offered_more(stored_run: Stored, capsys: Capture) -> None:
    folder = stored_run()
    assert "--resume" in summary_of(folder, capsys, run={"decided_by_rounds": {}})
    assert "--resume" not in summary_of(folder, capsys, run={"decided_by_rounds": {"refresh": 2}})


def test_a_run_from_a_file_names_that_file(stored_run: Stored, capsys: Capture) -> None:
    command = ["fedstrata", "run", "my texts.toml", "--set", "run.seed=1"]
    out = summary_of(stored_run(), capsys, run={"measured": {"command": command}})
    assert 'fedstrata plan "my texts.toml"' in out
    assert "fedstrata init" not in out


def test_full_models_load_without_a_base(stored_run: Stored, capsys: Capture) -> None:
    folder = stored_run()
    spec = json.loads((folder / "run.json").read_text())["spec"] | {"adapter": {"kind": "full", "head": "aggregate"}}
    out = summary_of(folder, capsys, run={"spec": spec})
    assert f'AutoModelForSequenceClassification.from_pretrained("{folder}/adapter")' in out
    assert "PeftModel" not in out


def test_names_with_brackets_are_printed_as_they_are(stored_run: Stored, capsys: Capture) -> None:
    out = summary_of(stored_run(), capsys, run={"notes": ["column [bold]text[/bold] was used"]})
    assert "column [bold]text[/bold] was used" in out


def plan_table(num_blocks: int = 6, **changes: Any) -> dict[str, Any]:
    """Three clients that train the last 3, 2 and 1 blocks at ranks 2 to 8."""
    clients = [
        {
            "client": f"client-{i:02d}",
            "device": "jetson-nx",
            "num_examples": 40 + i,
            "blocks": list(range(num_blocks - 3 + i, num_blocks)),
            "ranks": {
                **{str(b): 8 if b == num_blocks - 1 else 2 for b in range(num_blocks - 3 + i, num_blocks)},
                "head": 1,
            },
            "steps": 5,
            "downlink_bytes": 1_000_000 * (i + 1),
            "uplink_bytes": 500 * (i + 1),
            "fixed_length": True,
            "predicted_s": 30.0 * (i + 1),
        }
        for i in range(3)
    ]
    coverage = {str(b): max(0, b - num_blocks + 4) for b in range(num_blocks)} | {"head": 3}
    totals = {"downlink_bytes": 6_000_000, "uplink_bytes": 3000, "round_s": 90.0}
    table = {"server_round": 2, "num_blocks": num_blocks, "max_rank": 8, "method": "suffix_by_device"}
    return table | {"clients": clients, "coverage": coverage, "totals": totals, "notes": []} | changes


def test_the_plan_shows_each_client_on_one_line_of_eighty_columns(capsys: Capture) -> None:
    print_plan(plan_table())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "Round 2 with suffix_by_device: 3 clients, a model of 6 blocks"
    row = next(line for line in lines if line.startswith("client-00"))
    assert row.split() == [
        "client-00",
        "jetson-nx",
        "40",
        "░░░███",
        "3/6",
        "2–8",
        "5",
        "1.0",
        "MB",
        "500",
        "B",
        "30.0",
        "s",
    ]
    assert max(map(len, lines)) <= 80


def test_the_plan_shows_coverage_and_totals(capsys: Capture) -> None:
    print_plan(plan_table())
    out = capsys.readouterr().out
    bars = {
        line.split("  ")[1]: line.split()[-3:] for line in out.splitlines() if "░" in line and line.startswith("  ")
    }
    assert "nobody in this round" in out
    assert bars["block 3"] == ["1", "of", "3"]
    assert "In all 6.0 MB down and 3.0 kB up; the slowest client needs 1 min 30 s" in words(out)
    assert "upper bound" not in out


def test_the_plan_says_when_the_server_must_keep_all_replies(capsys: Capture) -> None:
    keeps = "The server keeps the replies of a round until its end, because median needs all of them at once: 3.0 MB."
    print_plan(plan_table() | {"server": {"aggregator": "median", "needs": "all updates", "update_bytes": 3_000_000}})
    assert keeps in words(capsys.readouterr().out)
    print_plan(plan_table() | {"server": {"aggregator": "holders_mean", "needs": "sum", "update_bytes": 0}})
    assert "The server keeps" not in capsys.readouterr().out


def test_neighbors_with_equal_coverage_share_a_line(capsys: Capture) -> None:
    print_plan(plan_table(num_blocks=32))
    lines = [line.split("  ")[1] for line in capsys.readouterr().out.splitlines() if line.startswith("  ")]
    assert lines == ["blocks 0–28", "block 29", "block 30", "block 31", "head"]


def test_the_plan_of_a_deep_model_names_blocks_as_ranges(capsys: Capture) -> None:
    table = plan_table(num_blocks=32)
    table["clients"][0]["blocks"] = [0, 2, 3, 31]
    print_plan(table)
    assert "0, 2–3, 31 (4/32)" in words(capsys.readouterr().out.replace("\n" + " " * 27, " "))


def test_bytes_that_depend_on_the_values_are_called_an_upper_bound(capsys: Capture) -> None:
    table = plan_table()
    table["clients"][1]["fixed_length"] = False
    print_plan(table)
    out = words(capsys.readouterr().out)
    assert "In all at most 6.0 MB down" in out
    assert "upper bound" in out


def test_full_parameter_plans_have_no_ranks(capsys: Capture) -> None:
    print_plan(plan_table(max_rank=0, notes=["12 texts were cut to 48 tokens"]))
    out = capsys.readouterr().out
    assert "rank" not in out
    assert "note: 12 texts were cut to 48 tokens" in out


def test_long_names_wrap_and_lose_nothing(capsys: Capture) -> None:
    table = plan_table()
    table["clients"][0]["client"] = "hospital-of-the-holy-spirit-north-wing-ward-7"
    print_plan(table)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    start = lines.index(next(line for line in lines if line.startswith("hosp")))
    width = lines[start].index("jetson")
    end = next(i for i, line in enumerate(lines) if line.startswith("client-01"))
    assert "".join(line[:width].strip() for line in lines[start:end]) == table["clients"][0]["client"]


def test_bars_fall_back_to_ascii(capsys: Capture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with (tmp_path / "out.txt").open("w", encoding="ascii", errors="replace") as file:
        monkeypatch.setattr(sys, "stdout", file)
        print_plan(plan_table())
    assert "...### 3/6" in (tmp_path / "out.txt").read_text()


def method_row(**changes: Any) -> dict[str, Any]:
    flags = {"needs_server_data": False, "client_state": False, "partial_participation": True}
    flags |= {"unequal_ranks": False, "unequal_depth": True, "personalised": False, "exact": True}
    about = {"summary": "Every client trains all blocks.", "trains": "all blocks", "sends": "differences"}
    return {"name": "fedavg", "aliases": ["avg"], "paper": "A paper, 2017", **about, **flags, **changes}


def test_methods_are_listed_with_what_they_allow(capsys: Capture) -> None:
    print_methods([method_row(), method_row(name="a_method_of_long_name", exact=None, aliases=[])])
    out = capsys.readouterr().out
    rows = {line.split()[0]: line.split()[1:] for line in out.splitlines()[2:4]}
    # exact, ranks, depth, part of fleet, server data, state, own models
    assert rows["fedavg"] == ["yes", "no", "yes", "yes", "no", "no", "no"]
    assert rows["a_method_of_long_name"] == ["n/a", "no", "yes", "yes", "no", "no", "no"]
    for text in ("(also: avg)", "Every client trains all blocks.", "differences", "A paper, 2017"):
        assert text in out
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80


def asset_row(**changes: Any) -> dict[str, Any]:
    row = {"name": "texts", "kind": "data", "requirement": "texts==1.0", "installed": True, "verified": False}
    row |= {"description": "Some texts in five classes", "license": "MIT", "size_bytes": 3_000_000}
    return row | {"command": "fedstrata assets install texts"} | changes


def test_assets_say_what_is_installed_and_how_to_install_the_rest(capsys: Capture) -> None:
    print_assets([asset_row(), asset_row(name="model", installed=False, command="fedstrata assets install model")])
    out = capsys.readouterr().out
    assert "texts  data  installed" in out
    assert "model  data  not installed" in out
    assert "texts==1.0, about 3.0 MB" in out
    assert "fedstrata assets install model" in out
    assert "fedstrata assets install texts" not in out


def test_verified_assets_say_so(capsys: Capture) -> None:
    print_assets([asset_row(verified=True)])
    assert "installed, checked against its SHA-256" in capsys.readouterr().out

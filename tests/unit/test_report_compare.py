"""`compare_runs`: what counts as a difference between two runs, and how it is told."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

from fedstrata.errors import RunFolderError
from fedstrata.record.checkpoint import load_checkpoint, save_checkpoint
from fedstrata.report.compare import MAX_LINES, compare_runs

Stored = Callable[..., Path]


@pytest.fixture
def pair(stored_run: Stored) -> tuple[Path, Path]:
    return stored_run("first"), stored_run("second")


def change(path: Path, mend: Callable[[dict[str, Any]], None], line: int | None = None) -> None:
    """Changes a JSON file, or one line (from 1) of a JSON-lines file."""
    if line is None:
        value = json.loads(path.read_text())
        mend(value)
        path.write_text(json.dumps(value))
        return
    lines = path.read_text().splitlines()
    value = json.loads(lines[line - 1])
    mend(value)
    lines[line - 1] = json.dumps(value)
    path.write_text("\n".join(lines) + "\n")


def test_equal_runs_have_no_differences(pair: tuple[Path, Path]) -> None:
    assert compare_runs(*pair) == []


def test_measured_values_and_names_and_test_readings_do_not_count(pair: tuple[Path, Path]) -> None:
    second = pair[1]
    change(second / "run.json", lambda r: r.update(name="other", measured={"started_at": "later"}))
    change(second / "run.json", lambda r: r["spec"].update(name="other"))
    change(second / "rounds.jsonl", lambda r: r["measured"].update(wall_s=99.0), line=2)
    change(second / "clients.jsonl", lambda r: r.pop("measured"), line=1)
    change(second / "summary.json", lambda r: r.update(name="other", num_test_reads=7, measured={}))
    for name in ("payloads", "report.svg", ".lock", "evaluations.jsonl"):
        (second / name).mkdir() if name == "payloads" else (second / name).write_text("x")
    assert compare_runs(*pair) == []


def test_a_changed_value_is_named_with_file_line_key_and_both_values(pair: tuple[Path, Path]) -> None:
    change(pair[1] / "rounds.jsonl", lambda r: r["metrics"]["validation"].update(accuracy=0.5), line=2)
    # round 2: 0.9 - 0.6 / 2 = 0.6000000000000001 in float64
    assert compare_runs(*pair) == [
        f"rounds.jsonl line 2 (round 2): metrics.validation.accuracy: {0.9 - 0.6 / 2} != 0.5"
    ]


def test_a_client_line_is_named_with_its_client(pair: tuple[Path, Path]) -> None:
    first = json.loads((pair[0] / "clients.jsonl").read_text().splitlines()[0])
    change(pair[1] / "clients.jsonl", lambda r: r["planned"].update(head=2), line=1)
    expected = f"clients.jsonl line 1 (round 1, {first['client']}): planned.head: 1 != 2"
    assert compare_runs(*pair) == [expected]


@pytest.mark.parametrize(
    ("one", "other"), [(0, 0.0), (0.0, -0.0), (1, True), (0.1, 0.1 + 2**-56), ("1", 1), (None, 0), ([1], [1, 2])]
)
def test_values_that_only_python_calls_equal_differ(pair: tuple[Path, Path], one: Any, other: Any) -> None:
    for folder, value in zip(pair, (one, other), strict=True):
        change(folder / "summary.json", lambda r, value=value: r.update(extra=value))
    lines = compare_runs(*pair)
    assert len(lines) == 1
    assert lines[0].startswith("summary.json: extra: ")
    assert lines[0].endswith(f"{json.dumps(one)} != {json.dumps(other)}")


def test_an_entry_of_a_list_is_named_by_its_place(pair: tuple[Path, Path]) -> None:
    change(pair[1] / "run.json", lambda r: r["clients"][3].update(num_examples=21))
    assert compare_runs(*pair) == ["run.json: clients[3].num_examples: 20 != 21"]


def test_long_values_are_shown_where_they_begin_to_differ(pair: tuple[Path, Path]) -> None:
    for folder, end in zip(pair, "xy", strict=True):
        change(folder / "run.json", lambda r, end=end: r.update(note="a" * 300 + end))
    (line,) = compare_runs(*pair)
    assert line == f'run.json: note: …{"a" * 12}x" != …{"a" * 12}y"'


def test_a_key_of_one_side_is_a_difference(pair: tuple[Path, Path]) -> None:
    change(pair[0] / "run.json", lambda r: r["spec"].update(extra=1))
    assert compare_runs(*pair) == ["run.json: spec.extra: only in the first: 1"]


def test_keys_in_another_order_are_other_bytes(pair: tuple[Path, Path]) -> None:
    change(pair[1] / "run.json", lambda r: r.update(seed=r.pop("seed")))
    (line,) = compare_runs(*pair)
    assert line.startswith("run.json: top level: keys in another order: ")


def test_further_rounds_of_one_side_are_counted(stored_run: Stored) -> None:
    first, second = stored_run("first", num_rounds=3), stored_run("second", num_rounds=4)
    assert "rounds.jsonl: 3 lines != 4 lines" in compare_runs(first, second)


def test_a_missing_file_is_named_with_the_run_that_has_it(pair: tuple[Path, Path]) -> None:
    (pair[0] / "summary.json").unlink()
    (pair[1] / "best" / "adapter_config.json").unlink()
    assert compare_runs(*pair) == [
        f"summary.json: only in {pair[1]}",
        f"best/adapter_config.json: only in {pair[0]}",
    ]


def test_a_changed_tensor_of_the_checkpoint_is_named(pair: tuple[Path, Path]) -> None:
    path = pair[1] / "checkpoint" / "state.safetensors"
    state, known = load_checkpoint(path)
    state.tensors["a.lora_A"] = state.tensors["a.lora_A"] + np.float32([[0, 0, 0.5], [0, 0, 0.25]])
    save_checkpoint(path, state, known)
    assert compare_runs(*pair) == [
        "checkpoint/state.safetensors: tensor a.lora_A: 2 of 6 values differ, by at most 0.5"
    ]


def test_a_changed_state_of_the_checkpoint_is_named(pair: tuple[Path, Path]) -> None:
    path = pair[1] / "checkpoint" / "state.safetensors"
    state, _ = load_checkpoint(path)
    save_checkpoint(
        path, type(state)(state.tensors, 5, {"0": 1}, accepted={"client-00": 2}, totals=state.totals), "f" * 64
    )
    assert compare_runs(*pair) == [
        'checkpoint/state.safetensors: spec_hash: "eeeeeeeeeeee" != "ffffffffffff"',
        "checkpoint/state.safetensors: server_round: 4 != 5",
        "checkpoint/state.safetensors: accepted.client-00: 1 != 2",
    ]


def test_zero_and_negative_zero_in_a_tensor_differ(pair: tuple[Path, Path]) -> None:
    path = pair[1] / "adapter" / "adapter_model.safetensors"
    tensors = load(path.read_bytes())
    tensors["a.lora_A"][0, 0] = -0.0
    path.write_bytes(save(tensors))
    assert compare_runs(*pair) == [
        "adapter/adapter_model.safetensors: tensor a.lora_A: 1 of 6 values differ, by at most 0"
    ]


def test_other_bytes_with_the_same_content_still_differ(pair: tuple[Path, Path]) -> None:
    path = pair[1] / "last" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()), indent=1))
    (line,) = compare_runs(*pair)
    assert line.startswith("last/adapter_config.json: bytes differ from byte 1 on (")


def test_client_states_are_compared_byte_for_byte(pair: tuple[Path, Path]) -> None:
    for folder, data in zip(pair, (b"abcd", b"abXd"), strict=True):
        (folder / "clients" / "client-00").mkdir(parents=True)
        (folder / "clients" / "client-00" / "4.state").write_bytes(data)
    assert compare_runs(*pair) == ["clients/client-00/4.state: bytes differ from byte 2 on (4 bytes != 4 bytes)"]


def test_damaged_tensors_are_told_by_their_bytes(pair: tuple[Path, Path]) -> None:
    (pair[1] / "checkpoint" / "state.safetensors").write_bytes(b"not a checkpoint")
    (line,) = compare_runs(*pair)
    assert line.startswith("checkpoint/state.safetensors: bytes differ from byte 0 on (")


def test_what_an_interrupted_write_left_does_not_count(pair: tuple[Path, Path]) -> None:
    (pair[1] / "checkpoint" / "state.safetensors.partial").write_bytes(b"half")
    assert compare_runs(*pair) == []


def test_many_differences_are_counted_and_every_file_is_heard(stored_run: Stored) -> None:
    first = stored_run("first", num_rounds=30)
    second = stored_run("second", num_rounds=30, seed=1)
    for path in (second / "checkpoint").iterdir():
        path.unlink()
    lines = compare_runs(first, second)
    assert MAX_LINES * 0.2 < len(lines) <= MAX_LINES + 10
    assert any(line.startswith("rounds.jsonl: ") and line.endswith(" further differences") for line in lines)
    assert f"checkpoint/state.safetensors: only in {first}" in lines


@pytest.mark.parametrize("content", [None, "[1]", "{"])
def test_what_is_no_run_folder_is_refused(stored_run: Stored, tmp_path: Path, content: str | None) -> None:
    other = tmp_path / "other"
    other.mkdir()
    if content is not None:
        (other / "run.json").write_text(content)
    with pytest.raises(RunFolderError, match="other"):
        compare_runs(stored_run("first"), other)


def test_a_damaged_line_is_an_error_and_a_cut_last_line_is_not(pair: tuple[Path, Path]) -> None:
    rounds = pair[1] / "rounds.jsonl"
    text = rounds.read_text()
    rounds.write_text(text + '{"server_round": 5, "co')
    assert compare_runs(*pair) == []
    rounds.write_text("{broken\n" + text)
    with pytest.raises(RunFolderError, match=r"rounds\.jsonl"):
        compare_runs(*pair)

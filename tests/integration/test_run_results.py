"""What a whole run leaves behind is what really happened."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import PeftModel

from fedstrata.client import Score
from fedstrata.core.tensors import HEAD
from fedstrata.message import unpack_reply, unpack_task
from fedstrata.method import METHODS
from fedstrata.record.checkpoint import load_checkpoint
from fedstrata.report.compare import compare_runs
from fedstrata.train.adapter_folder import load_adapter
from fedstrata.train.batches import collate, evaluation_batches, lengths_of
from fedstrata.train.model import load_model
from fedstrata.train.trainer import TorchTrainer

OPTIONS: dict[str, dict[str, Any]] = {
    "fedra_freeze": {"strata": 1},
    "suffix_by_device": {"depth": {"laptop-16gb": 3, "jetson-nx": 2, "jetson-tx2": 1}},
}
CASES = [(n, a) for n in sorted(METHODS.entries) for a in sorted(METHODS.build(n, OPTIONS.get(n, {})).adapters)]
FULL = {"kind": "full"}


def method(name: str, **options: Any) -> dict[str, Any]:
    return {"name": name, **OPTIONS.get(name, {}), **options}


def weights(folder: Path) -> bytes:
    return (folder / "adapter" / "adapter_model.safetensors").read_bytes()


def tensors(folder: Path) -> dict[str, np.ndarray]:
    return dict(load_checkpoint(folder / "checkpoint" / "state.safetensors")[0].tensors)


@pytest.mark.parametrize(("name", "adapter"), CASES)
def test_every_method_finishes_with_plan_equal_to_trained(runs: Any, name: str, adapter: str) -> None:
    changes = {"adapter": FULL} if adapter == "full" else {}
    folder = runs("run", method=method(name), rounds__count=2, **changes)
    summary = runs.read(folder, "summary")
    assert (summary["status"], summary["num_rounds"], summary["num_test_reads"]) == ("success", 2, 1)
    assert summary["num_client_failures"] == 0
    clients = runs.lines(folder, "clients")
    for line in clients:
        assert line["trained"] == list(line["planned"])
        assert (line["status"], line["warnings"]) == ("ok", [])
    kinds = {"central": {"laptop-16gb"}}.get(name, {"laptop-16gb", "jetson-nx", "jetson-tx2"})
    assert {c["device"] for c in clients} <= kinds
    if name == "suffix_by_device":
        depth = {(c["device"], len([s for s in c["planned"] if s.isdigit()])) for c in clients}
        assert depth <= set(OPTIONS[name]["depth"].items())
    moved = any(not np.array_equal(t, tensors(folder)[n]) for n, t in runs.built(folder).initial.tensors.items())
    assert moved == (name != "local_only")


def test_the_same_seed_gives_the_same_bytes_and_another_seed_other_ones(runs: Any) -> None:
    changes = {
        "codec": {"uplink": {"id": "error_feedback", "inner": {"id": "int4", "rounding": "stochastic"}}},
        "method": method("fedra_freeze"),
    }
    one, two = (runs(name, **changes) for name in ("one", "two"))
    assert compare_runs(one, two) == []
    assert compare_runs(one, runs("other", run__seed=1, **changes)) != []


def test_a_proximal_term_of_zero_is_fedavg_to_the_bit(runs: Any) -> None:
    plain = runs("plain", method=method("fedavg"))
    assert weights(runs("zero", method=method("fedprox", mu=0))) == weights(plain)
    assert weights(runs("some", method=method("fedprox", mu=10.0))) != weights(plain)


@pytest.mark.parametrize(
    "changes",
    [
        {"method": method("fedra_freeze"), "codec": {"uplink": "int8"}, "rounds__downlink": "changed"},
        {"eval__on": "clients", "data__client_validation_fraction": 0.3},
    ],
)
def test_the_ledger_equals_the_lengths_of_the_kept_payloads(runs: Any, changes: dict[str, Any]) -> None:
    folder = runs("run", options={"keep_payloads": True}, **changes)
    sizes: dict[tuple[str, str], int] = {}
    total = {"down": 0, "up": 0}
    for path in (folder / "payloads").rglob("*.*"):
        client, _, direction = path.name.rpartition(".")
        total[direction.removeprefix("evaluation-")] += path.stat().st_size
        if not direction.startswith("evaluation"):
            sizes[client, direction] = sizes.get((client, direction), 0) + path.stat().st_size
    summary = runs.read(folder, "summary")["totals"]
    assert (summary["downlink_bytes"], summary["uplink_bytes"]) == (total["down"], total["up"])
    recorded: dict[tuple[str, str], int] = {}
    for line in runs.lines(folder, "clients"):
        for direction in ("down", "up"):
            key = (line["client"], direction)
            recorded[key] = recorded.get(key, 0) + line["bytes"][f"{direction}link"]["total"]
    assert recorded == sizes
    rounds = runs.lines(folder, "rounds")
    for direction in ("down", "up"):
        evaluated = sum(r.get("evaluation_bytes", {}).get(f"{direction}link", {}).get("total", 0) for r in rounds)
        assert sum(r["bytes"][f"{direction}link"]["total"] for r in rounds) + evaluated == total[direction]
        assert (evaluated > 0) == ("eval__on" in changes)


def test_kept_payloads_rebuild_the_mean(runs: Any) -> None:
    folder = runs("run", options={"keep_payloads": True}, rounds__count=1, codec={"uplink": "bfloat16"})
    built = runs.built(folder)
    start, layout = dict(built.initial.tensors), built.setup.layout
    total, mean = 0, {n: np.zeros(t.shape) for n, t in start.items()}
    for path in sorted((folder / "payloads" / "00001").glob("*.up")):
        task, _ = unpack_task(path.with_suffix(".down").read_bytes())
        registered = built.setup.fleet[task.client].num_examples
        update, reply = unpack_reply(path.read_bytes(), task, layout, start, num_examples=registered)
        assert (reply.client, reply.num_steps) == (path.stem, 2)
        total += update.num_examples
        for name in update.layout.names:
            mean[name] += update.num_examples * update.local(name)
    for name, tensor in tensors(folder).items():
        np.testing.assert_allclose(tensor, mean[name] / total, rtol=2e-7, atol=1e-12)


def test_the_test_set_is_read_at_the_end_and_never_before(runs: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[tuple[str, int]] = []
    folder = runs.world / "run"

    def count(score: Callable[..., Score]) -> Callable[..., Score]:
        def counted(self: TorchTrainer, *args: Any) -> Score:
            reads.append((args[-1], len(runs.lines(folder, "rounds"))))
            return score(self, *args)

        return counted

    for name in ("score", "score_adapter"):
        monkeypatch.setattr(TorchTrainer, name, count(getattr(TorchTrainer, name)))
    runs("run")
    # validation once per round, before the round's line is written; the test for the kept model and for the base
    assert reads == [("server_validation", 0), ("server_validation", 1), ("server_validation", 2), *[("test", 3)] * 2]
    assert runs.read(folder, "summary")["num_test_reads"] == 1
    runs("run")
    assert len(reads) == 5


def score_with_peft(runs: Any, folder: Path, adapter: Path) -> tuple[int, int]:
    """Correct answers and examples of the test set, in plain PEFT."""
    built = runs.built(folder)
    spec, labels = built.spec, runs.read(folder, "run")["labels"]
    base = load_model(spec.model, spec.adapter, label_names=labels, seed=spec.run.seed, base_dir=runs.world)
    model = PeftModel.from_pretrained(base.model, str(adapter)).eval()
    examples, test = built.trainer.examples, built.trainer.indices_of("test")
    correct = 0
    with torch.inference_mode():
        for chosen in evaluation_batches(test, lengths_of(examples, test), 32):
            batch = collate(examples, chosen, base.pad_id)
            labels = batch.pop("labels")
            correct += int((model(**batch).logits.argmax(-1) == labels).sum())
    return correct, len(test)


@pytest.mark.parametrize("keep", ["best", "last"])
def test_the_adapter_scores_in_peft_what_the_summary_says(runs: Any, keep: str) -> None:
    changes = {"rounds__count": 5, "train__local_steps": 5, "method": method("suffix_by_device")}
    folder = runs("run", run__keep=keep, **changes)
    summary = runs.read(folder, "summary")
    correct, count = score_with_peft(runs, folder, folder / "adapter")
    assert summary["metrics"]["test"]["accuracy"] == correct / count
    assert summary["metrics"]["test"]["num_examples"] == count
    assert summary["kept"] == keep
    best = summary["metrics"]["validation"]["best"]
    assert summary["kept_round"] == (best["server_round"] if keep == "best" else 5)
    kept = folder / keep / "adapter_model.safetensors"
    assert weights(folder) == kept.read_bytes()
    scores = [r["metrics"]["validation"]["accuracy"] for r in runs.lines(folder, "rounds")]
    assert best["server_round"] == 1 + int(np.argmax(scores))  # of equal ones the earliest
    last = tensors(folder)
    assert all(np.array_equal(t, last[n]) for n, t in load_adapter(folder / "last")[0].items())


def test_without_a_validation_set_the_last_state_is_kept(runs: Any) -> None:
    folder = runs("run", data__validation_fraction=0.0, rounds__count=2)
    summary = runs.read(folder, "summary")
    assert (summary["kept"], summary["kept_round"]) == ("last", 2)
    assert summary["metrics"]["validation"] == {"final": None, "last_k_mean": None, "best": None}
    assert not (folder / "best").exists()


def test_validation_on_clients_adds_up_their_counts(runs: Any) -> None:
    folder = runs("run", eval__on="clients", data__client_validation_fraction=0.3, rounds__count=2)
    held = [c["num_validation"] for c in runs.read(folder, "run")["clients"]]
    for record in runs.lines(folder, "rounds"):
        values = record["metrics"]["validation"]
        assert values["num_examples"] == sum(held) > 6
        assert values["num_clients"] == sum(n > 0 for n in held)
        assert values["worst_clients_accuracy"] <= values["client_mean_accuracy"]
    assert (folder / "best").exists()


def test_pooled_data_can_be_validated_where_it_was_pooled(runs: Any) -> None:
    options = {"eval__on": "clients", "data__client_validation_fraction": 0.3, "rounds__count": 2}
    folder = runs("run", method=method("central"), **options)
    held = [c["num_validation"] for c in runs.read(folder, "run")["clients"]]
    assert all(r["metrics"]["validation"]["num_examples"] == sum(held) for r in runs.lines(folder, "rounds"))


def test_a_local_head_is_saved_per_client_with_the_shared_blocks(runs: Any) -> None:
    options = {"eval__on": "clients", "data__client_validation_fraction": 0.3}
    folder = runs("run", adapter__head="local", **options)
    state, _ = load_checkpoint(folder / "checkpoint" / "state.safetensors")
    built = runs.built(folder)
    head = [s.name for s in built.setup.layout.of(HEAD)]
    assert sorted(p.name for p in (folder / "adapter").iterdir()) == sorted(state.accepted)
    loaded = {c: load_adapter(folder / "adapter" / c)[0] for c in state.accepted}
    for values in loaded.values():
        assert all(np.array_equal(values[n], t) == (n not in head) for n, t in state.tensors.items())
    assert all(np.array_equal(state.tensors[n], built.initial.tensors[n]) for n in head)
    assert len({values[head[0]].tobytes() for values in loaded.values()}) == len(loaded)
    accuracies = [built.trainer.score(values, "test").num_correct / 36 for values in loaded.values()]
    test = runs.read(folder, "summary")["metrics"]["test"]
    assert test["client_mean_accuracy"] == pytest.approx(sum(accuracies) / len(accuracies), abs=1e-12)
    assert test["num_examples"] == 36 * len(loaded)


def test_clients_on_their_own_leave_adapters_that_score_what_the_summary_says(runs: Any) -> None:
    folder = runs("run", method=method("local_only"), train__local_steps=4)
    accepted = load_checkpoint(folder / "checkpoint" / "state.safetensors")[0].accepted
    correct = [score_with_peft(runs, folder, folder / "adapter" / c)[0] for c in accepted]
    summary = runs.read(folder, "summary")
    assert summary["metrics"]["test"]["accuracy"] == sum(correct) / (36 * len(correct))
    assert summary["metrics"]["test"]["num_clients"] == len(accepted)
    assert summary["kept"] == "last"
    sections = [c["bytes"][d] for c in runs.lines(folder, "clients") for d in ("downlink", "uplink")]
    assert all(s["values"] == s["side"] == 0 for s in sections)


def test_keeping_the_best_of_many_personal_models_is_refused_before_anything_runs(runs: Any) -> None:
    options = {"eval__on": "clients", "data__client_validation_fraction": 0.3}
    with pytest.raises(Exception, match=r"run\.keep"):
        runs("run", adapter__head="local", run__keep="best", **options)
    assert not (runs.world / "run" / "run.json").exists()


@pytest.mark.parametrize("steps", [{"train__local_steps": 3}, {"train__local_steps": None, "train__local_epochs": 1}])
def test_central_takes_as_many_steps_as_the_federation(runs: Any, steps: dict[str, Any]) -> None:
    federated, central = (runs(name, method=method(name), **steps) for name in ("fedavg", "central"))
    per_round = [
        [sum(c["num_steps"] for c in runs.lines(f, "clients") if c["server_round"] == r) for r in (1, 2, 3)]
        for f in (federated, central)
    ]
    assert per_round[0] == per_round[1]
    assert {c["client"] for c in runs.lines(central, "clients")} == {"central"}
    examples = sum(c["num_examples"] for c in runs.read(federated, "run")["clients"])
    assert {c["num_examples"] for c in runs.lines(central, "clients")} == {examples}


def test_validation_may_be_rarer_than_rounds(runs: Any) -> None:
    folder = runs("run", eval__every=2, rounds__count=5, rounds__patience=1)
    validated = [r["server_round"] for r in runs.lines(folder, "rounds") if r["metrics"]]
    summary = runs.read(folder, "summary")
    assert validated == [2, 4][: len(validated)]
    assert summary["metrics"]["validation"]["final"]["server_round"] == validated[-1]
    assert summary["kept_round"] in validated

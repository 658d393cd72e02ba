"""The words of a run's closing summary, from its records."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.core.units import format_bytes, format_seconds
from fedstrata.report.stored import CLIENTS_FILE, ROUNDS_FILE, num_blocks_trained, read_records
from fedstrata.report.words import count_of

_WHY_STOPPED = {
    "target": "the validation metric reached rounds.target",
    "patience": "the validation metric did not improve for rounds.patience evaluations",
    "interrupted": "Ctrl-C was pressed; the round at hand was finished first",
}


def headline(summary: Mapping[str, Any]) -> str:
    """One sentence: what was reached, what the untouched model reaches, after how many rounds."""
    test, base = summary["metrics"]["test"], summary["metrics"]["base"]
    rounds = f"after {count_of(summary['num_rounds'], 'round')}"
    untouched = f"(untouched model {base['accuracy']:.3f})"
    if "client_mean_accuracy" not in test:
        return f"Test accuracy {test['accuracy']:.3f} {untouched} {rounds}"
    return (
        f"Test accuracy of the clients' own models: mean {test['client_mean_accuracy']:.3f}, "
        f"worst tenth {test['worst_clients_accuracy']:.3f} {untouched} {rounds}"
    )


def summary_rows(folder: Path, summary: Mapping[str, Any], run_record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and text of every line below the headline."""
    rounds, clients = read_records(folder / ROUNDS_FILE), read_records(folder / CLIENTS_FILE)
    topology = run_record["parts"]["topology"]
    rows = []
    if summary["status"] != "success":
        why = _WHY_STOPPED.get(summary["stop_reason"], str(summary["stop_reason"]))
        rows.append((summary["status"], f"{_planned(summary, run_record)}: {why}"))
    rows += [
        ("method", f"{summary['method']}, seed {summary['seed']}"),
        ("learned by", _who(run_record, topology)),
        *(("", line) for line in _blocks(run_record, clients, topology)),
        ("validation", _validation(summary)),
        ("sent", _sent(summary, topology)),
    ]
    replies = sum(r["num_replies"] for r in rounds)
    if topology == "federated" and replies:
        rows.append(("", _comparison(summary, replies)))
    measured = summary["measured"]
    rows.append(
        ("time", f"{format_seconds(measured['wall_s'])}, of which training {format_seconds(measured['train_s'])}")
    )
    predicted = summary["totals"]["predicted_s"]
    if predicted >= 0.1:
        rows.append(("", f"on the simulated devices it would take {format_seconds(predicted)}"))
    rows.append(("kept", _kept(folder, summary)))
    if summary["num_client_failures"]:
        count = count_of(summary["num_client_failures"], "client failure")
        rows.append(("failures", f"{count}; {folder / ROUNDS_FILE} says which and why"))
    return [*rows, *(("note", note) for note in run_record["notes"])]


def next_steps(
    folder: Path, summary: Mapping[str, Any], run_record: Mapping[str, Any]
) -> list[tuple[str, tuple[str, ...]]]:
    """What one may want to do next, each with its commands."""
    name = _quoted(folder)
    steps: list[tuple[str, tuple[str, ...]]] = [
        ("see the curves, who trained which block, and the bytes", (f"fedstrata report {name}",))
    ]
    more = _go_on(summary, run_record)
    if more is not None:
        steps.append((more[0], (f"fedstrata run --resume {name}{more[1]}",)))
    file = _experiment_file(run_record)
    if file is not None:
        steps.append(("see the plan of a round without training", (f"fedstrata plan {_quoted(file)}",)))
    else:
        own = ("fedstrata init --data FILE", "fedstrata plan EXPERIMENT.toml", "fedstrata run EXPERIMENT.toml")
        steps.append(("use your own data: write an experiment, see who would train what, run it", own))
    return [*steps, *_loading(folder, summary, run_record)]


def _planned(summary: Mapping[str, Any], run_record: Mapping[str, Any]) -> str:
    return f"{summary['num_rounds']} of {count_of(run_record['spec']['rounds']['count'], 'round')}"


def _who(run_record: Mapping[str, Any], topology: str) -> str:
    clients = run_record["clients"]
    kinds = Counter(c["device"] for c in clients)
    if topology == "pooled":
        everyone = count_of(len(clients), "client")
        return f"one model on the pooled data of all {everyone} (nothing federated, for comparison)"
    listing = ", ".join(f"{count} {device}" for device, count in kinds.items())
    who = f"{count_of(len(clients), 'client')} on {count_of(len(kinds), 'kind')} of devices ({listing})"
    return f"{who}; each alone, nothing was merged" if topology == "alone" else who


def _blocks(run_record: Mapping[str, Any], clients: list[dict[str, Any]], topology: str) -> list[str]:
    """How many blocks clients trained, by kind of device where that differs."""
    total = run_record["model"]["num_blocks"]
    spans: dict[str, set[int]] = {c["device"]: set() for c in run_record["clients"]}
    for c in clients:
        if c["status"] == "ok":
            spans[c["device"]].add(num_blocks_trained(c))
    seen = set().union(*spans.values())
    if not seen:
        return []
    who = "it" if topology == "pooled" else "every client"
    if seen == {total}:
        return [f"{who} trained all {count_of(total, 'block')}"]
    if len(seen) == 1:
        return [f"{who} trained {seen.pop()} of {count_of(total, 'block')}"]
    ways = ", ".join(f"{device} {_span(counts)}" for device, counts in spans.items() if counts)
    return [f"each trained only the blocks it could afford, of {total}: {ways}"]


def _span(counts: set[int]) -> str:
    low, high = min(counts), max(counts)
    return str(low) if low == high else f"{low}–{high}"


def _validation(summary: Mapping[str, Any]) -> str:
    validation = summary["metrics"]["validation"]
    final, best = validation["final"], validation["best"]
    if final is None or best is None:
        return "none; there is no validation set"
    key = "client_mean_accuracy" if "client_mean_accuracy" in summary["metrics"]["test"] else "accuracy"
    last = f"{final[key]:.3f} in the last evaluation (round {final['server_round']})"
    return f"accuracy {last}, {best[key]:.3f} in the best (round {best['server_round']})"


def _sent(summary: Mapping[str, Any], topology: str) -> str:
    totals = summary["totals"]
    amounts = f"{format_bytes(totals['downlink_bytes'])} down to clients, {format_bytes(totals['uplink_bytes'])} up"
    return f"{amounts} (tasks and reports only)" if topology == "alone" else amounts


def _comparison(summary: Mapping[str, Any], replies: int) -> str:
    full = 2 * summary["base_bytes"] * replies
    ours = summary["totals"]["downlink_bytes"] + summary["totals"]["uplink_bytes"]
    times = f", {full / ours:,.0f} times as much" if ours and full >= 2 * ours else ""
    return (
        f"for comparison: the whole model both ways for the same {count_of(replies, 'reply', 'replies')} would be "
        f"{format_bytes(full)}{times}"
    )


def _kept(folder: Path, summary: Mapping[str, Any]) -> str:
    state = "the best state by validation" if summary["kept"] == "best" else "the last state"
    each = ", one folder per client" if "client_mean_accuracy" in summary["metrics"]["test"] else ""
    return f"{state} (round {summary['kept_round']}) in {folder / 'adapter'}{each}"


def _go_on(summary: Mapping[str, Any], run_record: Mapping[str, Any]) -> tuple[str, str] | None:
    """Purpose and flags of the command that trains further; None where a run cannot be extended."""
    if summary["stop_reason"] == "interrupted":
        return "go on to the planned end", ""
    rounds = run_record["spec"]["rounds"]
    if summary["stop_reason"] == "patience":
        return "go on with more patience", f" --set rounds.patience={2 * rounds['patience']}"
    fixed = run_record["spec"]["train"]["schedule"] != "constant" or run_record.get("decided_by_rounds")
    if summary["stop_reason"] != "count" or fixed:
        return None
    return "train further; the result equals a run planned that long", f" --set rounds.count={2 * rounds['count']}"


def _experiment_file(run_record: Mapping[str, Any]) -> Path | None:
    """The experiment file that the command line named, if it did."""
    command = run_record["measured"].get("command", [])
    return next((Path(w) for w in command if w.endswith(".toml")), None) if "run" in command else None


def _loading(
    folder: Path, summary: Mapping[str, Any], run_record: Mapping[str, Any]
) -> list[tuple[str, tuple[str, ...]]]:
    personal = "client_mean_accuracy" in summary["metrics"]["test"]
    path = (folder / "adapter" / "CLIENT" if personal else folder / "adapter").as_posix()
    if run_record["spec"]["adapter"]["kind"] == "full":
        return [("load it in Python", (f'AutoModelForSequenceClassification.from_pretrained("{path}")',))]
    base = f"{run_record['model']['source']} with {count_of(len(run_record['labels']), 'label')}"
    return [("load it in Python", (f"# base: {base}", f'PeftModel.from_pretrained(base, "{path}")'))]


def _quoted(path: Path) -> str:
    text = str(path)
    return f'"{text}"' if " " in text else text

"""Draws a run folder as one picture: `report.svg` and `report.png`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedstrata.core.tensors import parse_stratum, stratum_order
from fedstrata.errors import AssetError, RunFolderError
from fedstrata.record.files import atomic_write
from fedstrata.report.history import read_strata
from fedstrata.report.stored import (
    CLIENTS_FILE,
    ROUNDS_FILE,
    is_personal,
    num_blocks_trained,
    read_records,
    read_run,
    read_summary,
)
from fedstrata.report.view import ClientCell, Point, RunView, StratumCell, every_kth, spread_sample

MAX_CLIENT_ROWS = 40
MAX_ROUND_COLUMNS = 200
_UNFINISHED = {"started": "not finished", "failed": "ended by an error", "cancelled": "cancelled"}


def draw_run(folder: Path) -> list[Path]:
    """Draws the rounds that a run folder holds, also of an unfinished run, without any connection.

    Args:
        folder: The run folder; the pictures are written into it, each whole or not at all.

    Returns:
        The paths of `report.svg` and `report.png`.

    Raises:
        RunFolderError: If it is not a run folder, no round is finished, or it cannot be written.
        AssetError: If the packages that draw are missing.
    """
    view = read_view(folder)
    try:
        import altair  # noqa: F401
        import vl_convert
    except ModuleNotFoundError as error:
        raise AssetError(
            "Drawing needs two packages", got=f"{error.name} is missing", do="pip install altair vl-convert-python"
        ) from error
    from fedstrata.report.charts import draw_svg

    svg = draw_svg(view, read_strata(folder))
    paths = [folder / "report.svg", folder / "report.png"]
    atomic_write(paths[0], svg.encode())
    atomic_write(paths[1], vl_convert.svg_to_png(svg, scale=1.0))
    return paths


def read_view(folder: Path) -> RunView:
    """What the picture shows, from the records alone.

    Raises:
        RunFolderError: If it is not a run folder, is damaged, or no round is finished.
    """
    run, summary = read_run(folder), read_summary(folder)
    rounds = read_records(folder / ROUNDS_FILE)
    if not rounds:
        raise RunFolderError(
            f"{folder} has no finished round to draw", do=f"go on with `fedstrata run --resume {folder}`"
        )
    last_round = rounds[-1]["server_round"]
    clients = [c for c in read_records(folder / CLIENTS_FILE) if c["server_round"] <= last_round]
    shown_rounds = every_kth([r["server_round"] for r in rounds], MAX_ROUND_COLUMNS)
    everyone = sorted({c["client"] for c in clients} | _registered(run))
    shown_clients = spread_sample(everyone, MAX_CLIENT_ROWS)
    strata = _strata(run, clients)
    key = "client_mean_accuracy" if is_personal(run) else "accuracy"
    metrics = summary["metrics"] if summary else None
    return RunView(
        title=_title(run, summary, last_round),
        subtitle=_subtitle(run, summary, last_round),
        num_rounds=last_round,
        num_blocks=run["model"]["num_blocks"],
        num_clients=len(everyone),
        strata=strata,
        rounds=shown_rounds,
        clients=shown_clients,
        loss=[Point(r["server_round"], r["train_loss"]) for r in rounds if r["train_loss"] is not None],
        accuracy=[Point(r["server_round"], v[key]) for r in rounds if (v := r["metrics"].get("validation"))],
        best_round=_best_round(run, rounds),
        test_accuracy=metrics["test"][key] if metrics else None,
        base_accuracy=metrics["base"]["accuracy"] if metrics else None,
        accuracy_of="mean over the clients' own models" if key == "client_mean_accuracy" else "of the server's model",
        stratum_cells=_stratum_cells(clients, strata, set(shown_rounds)),
        client_cells=_client_cells(clients, set(shown_clients), set(shown_rounds)),
        downlink=[Point(r["server_round"], _bytes(r, "downlink")) for r in rounds],
        uplink=[Point(r["server_round"], _bytes(r, "uplink")) for r in rounds],
    )


def _registered(run: Mapping[str, Any]) -> set[str]:
    """The fleet, except where its data were pooled and one client stands for all."""
    return set() if run["parts"]["topology"] == "pooled" else {c["client"] for c in run["clients"]}


def _title(run: Mapping[str, Any], summary: Mapping[str, Any] | None, last_round: int) -> str:
    rounds = f"{last_round} round{'' if last_round == 1 else 's'}"
    if summary is None:
        return f"{run['method']}: {rounds} so far"
    test, base = summary["metrics"]["test"], summary["metrics"]["base"]
    if "client_mean_accuracy" in test:
        reached = f"the clients' own models reach {test['client_mean_accuracy']:.3f} on test data"
    else:
        reached = f"test accuracy {test['accuracy']:.3f}"
    return f"{run['method']}: {reached} after {rounds} (untouched model {base['accuracy']:.3f})"


def _subtitle(run: Mapping[str, Any], summary: Mapping[str, Any] | None, last_round: int) -> list[str]:
    kinds = Counter(c["device"] for c in run["clients"])
    fleet = ", ".join(f"{count} {device}" for device, count in kinds.most_common(4))
    more = f" and {len(kinds) - 4} more kinds" if len(kinds) > 4 else ""
    head = f"{run['name']}  ·  seed {run['seed']}  ·  {run['model']['source']}"
    parts = [f"{len(run['clients'])} clients: {fleet}{more}"]
    planned = run["spec"]["rounds"]["count"]
    if summary is None:
        parts.append(f"{_UNFINISHED.get(run['status'], run['status'])}: {last_round} of {planned} rounds")
    elif summary["status"] != "success":
        parts.append(f"{summary['status']} ({summary['stop_reason']}) after {last_round} of {planned} rounds")
    return [head, "  ·  ".join(parts)]


def _strata(run: Mapping[str, Any], clients: list[dict[str, Any]]) -> list[str]:
    """All blocks, and the named strata that somebody was to train, from the head down to the input."""
    named = {key for c in clients for key in c["planned"] if not key.isdigit()}
    keys = named | {str(b) for b in range(run["model"]["num_blocks"])}
    return sorted(keys, key=lambda k: stratum_order(parse_stratum(k)), reverse=True)


def _best_round(run: Mapping[str, Any], rounds: list[dict[str, Any]]) -> int | None:
    """The first round with the best value of the metric that selects."""
    metric = run["spec"]["eval"]["metric"]
    values: dict[int, float] = {r["server_round"]: v[metric] for r in rounds if (v := r["metrics"].get("validation"))}
    if not values:
        return None
    return (min if metric == "loss" else max)(values, key=lambda r: values[r])


def _stratum_cells(clients: list[dict[str, Any]], strata: list[str], rounds: set[int]) -> list[StratumCell]:
    """How many clients trained each stratum in each round."""
    good = [c for c in clients if c["status"] == "ok" and c["server_round"] in rounds]
    counts = Counter((c["server_round"], key) for c in good for key in c["trained"])
    return [StratumCell(r, key, counts[r, key]) for r in sorted(rounds) for key in strata]


def _client_cells(clients: list[dict[str, Any]], shown: set[str], rounds: set[int]) -> list[ClientCell]:
    """How many blocks each client trained; None where it failed."""
    return [
        ClientCell(c["server_round"], c["client"], num_blocks_trained(c) if c["status"] == "ok" else None)
        for c in clients
        if c["client"] in shown and c["server_round"] in rounds
    ]


def _bytes(record: Mapping[str, Any], direction: str) -> int:
    """All bytes of a round in one direction: training, and what was asked or evaluated beside it."""
    asked = [record.get(key) or {} for key in ("probes", "contest")]
    parts = [record["bytes"], record.get("evaluation_bytes") or {}, *(part.get("bytes") or {} for part in asked)]
    return sum(int(part[direction]["total"]) for part in parts if direction in part)

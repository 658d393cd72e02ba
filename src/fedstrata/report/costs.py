"""What a run's records say beside the strata: the exactness error, the planner's questions, depth and waiting."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from fedstrata.report.allocation import planned_strata
from fedstrata.report.reasons import Reasons, mapping, number, numbers, sequence
from fedstrata.report.strata import Devices, Exactness, KindHistory, ProbeTotals
from fedstrata.report.view import Point

_DEVICE_RULES = frozenset({"depth_and_rank", "client_ranks"})


def read_exactness(rounds: Sequence[Mapping[str, Any]]) -> Exactness | None:
    """The error per round, or of robust means the distance; None where no round says anything about it."""
    records = [(r["server_round"], mapping(r.get("exactness"))) for r in rounds]
    if not any(record for _, record in records):
        return None
    is_robust = any("distance_to_mean" in record for _, record in records)
    name = "distance_to_mean" if is_robust else "exactness_error"
    reasons = [str(record["reason"]) for _, record in records if record.get("reason")]
    return Exactness(
        name="distance_to_mean" if is_robust else "exactness_error",
        product=_series(records, name),
        update=_series(records, f"{name}_update"),
        reason=reasons[-1] if reasons else None,
    )


def _series(records: Sequence[tuple[int, Mapping[str, Any]]], key: str) -> list[Point]:
    values = [(r, number(record.get(key))) for r, record in records]
    return [Point(r, v) for r, v in values if v is not None]


def read_probes(rounds: Sequence[Mapping[str, Any]]) -> ProbeTotals | None:
    """All questions of the run together; None without any."""
    asked = [(r["server_round"], mapping(r.get("probes"))) for r in rounds if mapping(r.get("probes"))]
    if not asked:
        return None
    records = [record for _, record in asked]
    return ProbeTotals(
        rounds=tuple(r for r, _ in asked),
        sources=tuple(dict.fromkeys(str(r["source"]) for r in records if r.get("source"))),
        num_answers=sum(int(number(r.get("num_answers")) or 0) for r in records),
        num_examples=sum(int(number(r.get("num_examples")) or 0) for r in records),
        downlink_bytes=sum(_total(r, "downlink") for r in records),
        uplink_bytes=sum(_total(r, "uplink") for r in records),
        predicted_s=sum(number(r.get("predicted_s")) or 0.0 for r in records),
        num_failures=sum(len(list(sequence(r.get("failures")))) for r in records),
    )


def _total(record: Mapping[str, Any], direction: str) -> int:
    return int(number(mapping(mapping(record.get("bytes")).get(direction)).get("total")) or 0)


def read_devices(
    run: Mapping[str, Any],
    reasons: Sequence[Reasons],
    rounds: Sequence[Mapping[str, Any]],
    clients: Sequence[Mapping[str, Any]],
) -> Devices | None:
    """Depth, rank and waiting; None where no plan was about devices."""
    if not any(r.rule in _DEVICE_RULES for r in reasons):
        return None
    by_depth = [r for r in reasons if r.rule == "depth_and_rank"]
    last_ranks = numbers(by_depth[-1].why.get("ranks")) if by_depth else {}
    options = mapping(mapping(run.get("parts")).get("plan"))
    return Devices(
        kinds=_kinds(clients),
        block_ranks={s: int(r) for s, r in last_ranks.items() if s.isdecimal()},
        planned_wait=[Point(r.server_round, r.wait_ratio) for r in reasons if r.wait_ratio is not None],
        simulated_wait=_simulated_wait(rounds),
        max_wait=number(options.get("max_wait")),
    )


def _simulated_wait(rounds: Sequence[Mapping[str, Any]]) -> list[Point]:
    points = []
    for record in rounds:
        predicted = numbers(record.get("predicted"))
        if predicted.get("round_s") and "mean_wait_s" in predicted:
            points.append(Point(record["server_round"], predicted["mean_wait_s"] / predicted["round_s"]))
    return points


def _kinds(clients: Sequence[Mapping[str, Any]]) -> list[KindHistory]:
    members: defaultdict[str, set[str]] = defaultdict(set)
    depths: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    ranks: defaultdict[tuple[str, int], list[int]] = defaultdict(list)
    for client in clients:
        kind, server_round = client["device"], client["server_round"]
        blocks = [rank for s, rank in planned_strata(client).items() if s.isdecimal()]
        members[kind].add(client["client"])
        depths[kind, server_round].append(len(blocks))
        ranks[kind, server_round] += blocks
    counts = Counter({kind: len(ids) for kind, ids in members.items()})
    order = sorted(counts, key=lambda kind: (-counts[kind], kind))
    return [KindHistory(kind, counts[kind], _means(kind, depths), _means(kind, ranks)) for kind in order]


def _means(kind: str, values: Mapping[tuple[str, int], list[int]]) -> list[Point]:
    return [Point(r, sum(found) / len(found)) for (k, r), found in values.items() if k == kind and found]

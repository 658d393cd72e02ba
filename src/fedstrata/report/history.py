"""Reads why a run trained what it trained, from its records alone."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedstrata.core.tensors import parse_stratum, stratum_order
from fedstrata.report.allocation import TrainingTally, count_taken, planned_strata
from fedstrata.report.costs import read_devices, read_exactness, read_probes
from fedstrata.report.flags import find_flags
from fedstrata.report.reasons import Reasons, is_stratum, read_reasons
from fedstrata.report.stored import CLIENTS_FILE, ROUNDS_FILE, read_records, read_run
from fedstrata.report.strata import ScoreMap, StrataView, StratumHistory


def read_strata(folder: Path) -> StrataView:
    """What the records of a run folder say about its strata; without a finished round everything in it is empty.

    Raises:
        RunFolderError: If it is not a run folder, or is damaged.
    """
    return strata_view(read_run(folder), read_records(folder / ROUNDS_FILE), read_records(folder / CLIENTS_FILE))


def strata_view(
    run: Mapping[str, Any], rounds: Sequence[Mapping[str, Any]], clients: Sequence[Mapping[str, Any]]
) -> StrataView:
    """The same from records.

    Args:
        run: `run.json`.
        rounds: Lines of `rounds.jsonl`.
        clients: Lines of `clients.jsonl`; those of a round that is not in `rounds` do not count.
    """
    reasons = [read_reasons(r) for r in rounds]
    numbers = tuple(r.server_round for r in reasons)
    by_round: defaultdict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for client in clients:
        by_round[client["server_round"]].append(client)
    lines = [[c for c in by_round[r] if c["status"] == "ok"] for r in numbers]
    num_blocks = run["model"]["num_blocks"]
    strata = _strata(num_blocks, reasons, [c for r in numbers for c in by_round[r]])
    tally = TrainingTally(strata, num_blocks)
    for why, replies in zip(reasons, lines, strict=True):
        for client in replies:
            tally.add(why, client)
    counts = [_holders(why, replies) for why, replies in zip(reasons, lines, strict=True)]
    histories = tuple(_history(s, reasons, counts, tally) for s in strata)
    probes = read_probes(rounds)
    exactness = read_exactness(rounds)
    return StrataView(
        rounds=numbers,
        num_replies=tuple(len(replies) for replies in lines),
        num_clients=max((len(by_round[r]) for r in numbers), default=0),
        strata=histories,
        target=tally.target,
        scores=tuple(m for m in (_planner_scores(reasons, strata), _selector_scores(reasons, strata)) if m),
        exactness=exactness,
        probes=probes,
        devices=read_devices(run, reasons, rounds, [c for r in numbers for c in by_round[r]]),
        flags=tuple(find_flags(reasons, histories, probes, exactness)),
    )


def _strata(num_blocks: int, reasons: Sequence[Reasons], clients: Sequence[Mapping[str, Any]]) -> list[str]:
    """All blocks, and the named strata that somebody was to train, from the input to the head."""
    named = {s for c in clients for s in planned_strata(c) if not s.isdecimal() and is_stratum(s)}
    named |= {s for r in reasons for s in r.holders or () if not s.isdecimal()}
    keys = named | {str(b) for b in range(num_blocks)}
    return sorted(keys, key=lambda s: stratum_order(parse_stratum(s)))


def _holders(reasons: Reasons, replies: Sequence[Mapping[str, Any]]) -> Mapping[str, int]:
    """Who trained each stratum: as the aggregator counted, else as the clients say."""
    if reasons.holders is not None:
        return reasons.holders
    return Counter(str(s) for c in replies for s in c["trained"])


def _history(
    stratum: str, reasons: Sequence[Reasons], counts: Sequence[Mapping[str, int]], tally: TrainingTally
) -> StratumHistory:
    held = tuple(c.get(stratum, 0) for c in counts)
    return StratumHistory(
        stratum=stratum,
        holders=held,
        chances=tuple(r.chances.get(stratum) for r in reasons),
        selected=tuple(
            stratum in r.accepted if r.accepted is not None and n else None for r, n in zip(reasons, held, strict=True)
        ),
        num_planned=tally.num_planned[stratum],
        trained=tally.of(stratum),
        by_kind={kind: tally.of(stratum, [kind]) for kind in tally.kinds},
        taken=count_taken(reasons, stratum),
    )


def _planner_scores(reasons: Sequence[Reasons], strata: Sequence[str]) -> ScoreMap | None:
    scored = [r for r in reasons if r.scores]
    if not scored:
        return None
    last = scored[-1].why
    words = [f"examples: {last['source']}"] if isinstance(last.get("source"), str) else []
    if last.get("control") in ("permuted", "inverted"):
        words.append(f"the chances come from {last['control']} scores")
    return ScoreMap(
        source="planner",
        name=str(last.get("importance") or "score"),
        values={s: tuple(r.scores.get(s) for r in reasons) for s in strata},
        reported={},
        infinite=frozenset(),
        other=frozenset(),
        computed_in=tuple(sorted({r.scored_round for r in scored if r.scored_round})),
        note="; ".join(words),
    )


def _selector_scores(reasons: Sequence[Reasons], strata: Sequence[str]) -> ScoreMap | None:
    scored = [r for r in reasons if r.keys or r.reported or r.infinite]
    if not scored:
        return None
    last = scored[-1].selection
    wanted = str(last.get("score") or "score")
    used = Counter(by for r in scored for by in r.scored_by.values() if by)
    if used and wanted not in used:  # it had to be replaced in every round
        wanted = max(sorted(used), key=lambda by: used[by])
    return ScoreMap(
        source="selector",
        name=wanted,
        values={s: tuple((r.keys or r.reported).get(s) for r in reasons) for s in strata},
        reported={s: tuple(r.reported.get(s) for r in reasons) for s in strata},
        infinite=frozenset((r.server_round, s) for r in scored for s in r.infinite),
        other=frozenset((r.server_round, s) for r in scored for s, by in r.scored_by.items() if by and by != wanted),
        computed_in=tuple(r.server_round for r in scored),
        note="of products s·B·A" if last.get("score_on") == "product" else "",
    )

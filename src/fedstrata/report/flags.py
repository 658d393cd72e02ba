"""Warnings in words: what a reader must know before believing a run's scores, choices and allocation."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from fedstrata.report.inclusion import chance_limit
from fedstrata.report.reasons import Reasons, is_stratum, mapping, sequence
from fedstrata.report.strata import Exactness, Flag, ProbeTotals, StratumHistory
from fedstrata.report.words import count_of, rounds_named, some_of, strata_named

_MOST_OTHER = 5


def find_flags(
    reasons: Sequence[Reasons],
    histories: Sequence[StratumHistory],
    probes: ProbeTotals | None,
    exactness: Exactness | None,
) -> Iterator[Flag]:
    """All warnings of a run, those about strata first."""
    if not reasons:
        return
    yield from _training(reasons, histories)
    yield from _selection(reasons)
    yield from _robust(reasons)
    yield from _planner(reasons)
    if probes is not None and probes.num_failures:
        text = f"{count_of(probes.num_failures, 'answer')} to the planner's questions did not come, or came damaged"
        yield Flag("probe_failures", text, probes.rounds)
    if exactness is not None and exactness.reason and not exactness.product:
        yield Flag("no_exactness", f"the exactness error was not measured: {exactness.reason}")
    yield from _other_warnings(reasons)


def _training(reasons: Sequence[Reasons], histories: Sequence[StratumHistory]) -> Iterator[Flag]:
    never = [h.stratum for h in histories if not any(h.holders)]
    if never:
        rounds = count_of(len(reasons), "round")
        text = f"nobody trained {strata_named(never)} in {rounds}: as at the start"
        yield Flag("never_trained", text, strata=tuple(never))
    idle = {h.stratum: h.num_planned - h.trained.num_hits for h in histories if h.num_planned > h.trained.num_hits}
    if idle:
        most = count_of(max(idle.values()), "reply", "replies")
        text = f"{strata_named(idle)} did not change although it was planned (in up to {most})"
        yield Flag("unmoved", text, strata=tuple(idle))
    drawn = [h for h in histories if h.trained.z is not None]
    limit = chance_limit(len(drawn))
    for h in drawn:
        if abs(h.trained.z or 0.0) > limit:
            t = h.trained
            text = (
                f"{strata_named([h.stratum])} was trained {count_of(t.num_hits, 'time')}, its target is "
                f"{t.expected:.1f} ± {t.std:.1f}: more than chance explains"
            )
            yield Flag("allocation", text, strata=(h.stratum,))


def _selection(reasons: Sequence[Reasons]) -> Iterator[Flag]:
    flat = _collect(reasons, lambda r: [s for g in r.groups if g.is_flat for s in g.candidates])
    if flat.rounds:
        text = (
            f"scores of {strata_named(flat.names)} are numerically flat in {rounds_named(flat.rounds)}: "
            "the choice between them says little"
        )
        yield Flag("flat", text, flat.rounds, flat.names)
    ties = _collect(reasons, lambda r: [s for g in r.groups for s in g.tied])
    if ties.rounds:
        text = f"equal scores of {strata_named(ties.names)} in {rounds_named(ties.rounds)}: the lower block was taken"
        yield Flag("tie", text, ties.rounds, ties.names)
    infinite = _collect(reasons, lambda r: sorted(r.infinite, key=_key))
    if infinite.rounds:
        text = (
            f"a tensor of {strata_named(infinite.names)} moved by one and the same number in "
            f"{rounds_named(infinite.rounds)}: the score is infinite"
        )
        yield Flag("infinite", text, infinite.rounds, infinite.names)
    other: defaultdict[tuple[str, str], dict[int, list[str]]] = defaultdict(dict)
    for r in reasons:
        wanted = str(r.selection.get("score") or "")
        for s, by in r.scored_by.items():
            if wanted and by and by != wanted:
                other[wanted, by].setdefault(r.server_round, []).append(s)
    for (wanted, by), found in other.items():
        strata = tuple(sorted({s for names in found.values() for s in names}, key=_key))
        text = f"{strata_named(strata)} had too few holders for {wanted} in {rounds_named(found)}: scored by {by}"
        yield Flag("fallback", text, tuple(found), strata)


def _robust(reasons: Sequence[Reasons]) -> Iterator[Flag]:
    for way, words in (("mean", "took the plain mean"), ("keep", "stayed as they were")):
        found = _collect(reasons, partial(_fell_back, way=way))
        if found.rounds:
            text = (
                f"too few holders for the robust mean of {strata_named(found.names)} in "
                f"{rounds_named(found.rounds)}: they {words}"
            )
            yield Flag("fallback", text, found.rounds, found.names)


def _fell_back(reasons: Reasons, way: str) -> list[str]:
    about = mapping(reasons.statistics.get("strata"))
    return [s for s, said in about.items() if is_stratum(s) and mapping(said).get("fallback") == way]


def _planner(reasons: Sequence[Reasons]) -> Iterator[Flag]:
    late = [r.server_round for r in reasons if r.why.get("wait_target_met") is False]
    if late:
        waits = [r.wait_ratio for r in reasons if r.server_round in late and r.wait_ratio is not None]
        most = f", up to {max(waits):.0%} of the slowest client's time" if waits else ""
        text = f"no depths keep the wait within its limit in {rounds_named(late)}{most}"
        yield Flag("wait", text, tuple(late))
    over = _collect(reasons, lambda r: [str(c) for c in sequence(r.why.get("over_target"))])
    if over.rounds:
        text = f"{some_of(over.names)} cannot keep the target time in {rounds_named(over.rounds)}"
        yield Flag("over_target", text, over.rounds, clients=over.names)
    for key, kind, words in (
        ("excluded", "excluded", "left out"),
        ("capped", "capped", "kept from full depth by memory or bytes"),
        ("refused_answers", "refused_answer", "answered, but not usably"),
    ):
        found = _collect(reasons, partial(_names_under, key=key))
        if found.rounds:
            why = {str(t) for r in reasons for t in mapping(r.why.get(key)).values() if isinstance(t, str)}
            because = f" ({some_of(why, most=2)})" if why and key != "capped" else ""
            text = f"{some_of(found.names)}: {words} in {rounds_named(found.rounds)}{because}"
            yield Flag(kind, text, found.rounds, clients=found.names)
    unheld = _collect(reasons, lambda r: [str(s) for s in sequence(r.why.get("never_held")) if is_stratum(str(s))])
    if unheld.rounds:
        text = (
            f"nobody had held {strata_named(unheld.names)} when they were scored in {rounds_named(unheld.rounds)}: "
            "they counted like the mean of the others"
        )
        yield Flag("scored_unheld", text, unheld.rounds, unheld.names)
    notes: defaultdict[str, list[int]] = defaultdict(list)
    for r in reasons:
        if isinstance(r.why.get("note"), str):
            notes[r.why["note"]].append(r.server_round)
    for note, rounds in notes.items():
        yield Flag("note", f"{note} ({rounds_named(rounds)})", tuple(rounds))


def _names_under(reasons: Reasons, key: str) -> list[str]:
    return list(mapping(reasons.why.get(key)))


def _other_warnings(reasons: Sequence[Reasons]) -> Iterator[Flag]:
    """Sentences of parts that are not ours; ours are told above, once for all rounds."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for r in reasons:
        records: list[Mapping[str, Any]] = [r.why]
        records += [] if any(g.scored_by for g in r.groups) else [r.selection]
        records += [] if mapping(r.statistics.get("strata")) else [r.statistics]
        for text in (str(t) for record in records for t in sequence(record.get("warnings"))):
            found[text].append(r.server_round)
    for text, rounds in list(found.items())[:_MOST_OTHER]:
        yield Flag("warning", f"{text} ({rounds_named(rounds)})", tuple(rounds))
    if len(found) > _MOST_OTHER:
        yield Flag("warning", f"{len(found) - _MOST_OTHER} further warnings of parts in rounds.jsonl")


class _Found:
    """Where something was found."""

    def __init__(self, found: Mapping[int, Iterable[str]]) -> None:
        self.rounds = tuple(found)
        self.names = tuple(sorted({n for names in found.values() for n in names}, key=_key))


def _collect(reasons: Sequence[Reasons], names_in: Callable[[Reasons], Iterable[str]]) -> _Found:
    """Rounds in which a list of names is not empty, and all these names."""
    found = {r.server_round: list(names_in(r)) for r in reasons}
    return _Found({r: names for r, names in found.items() if names})


def _key(name: str) -> tuple[int, int, str]:
    """Blocks by number, then the rest by name."""
    return (0, int(name), "") if name.isdecimal() else (1, 0, name)

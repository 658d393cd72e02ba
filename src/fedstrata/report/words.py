"""Small pieces of sentences that reports share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedstrata.core.tensors import parse_stratum, stratum_name, stratum_order


def count_of(number: int, noun: str, plural: str | None = None) -> str:
    """A number with its noun.

    Example:
        >>> count_of(1, "round"), count_of(2, "reply", "replies")
        ('1 round', '2 replies')
    """
    return f"{number} {noun}" if number == 1 else f"{number} {plural or noun + 's'}"


def ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers as ranges.

    Example:
        >>> ranges([0, 1, 2, 5])
        '0–2, 5'
    """
    parts: list[list[int]] = []
    for n in numbers:
        if parts and parts[-1][-1] == n - 1:
            parts[-1].append(n)
        else:
            parts.append([n])
    return ", ".join(str(p[0]) if len(p) == 1 else f"{p[0]}–{p[-1]}" for p in parts)


def rounds_named(rounds: Iterable[int], most: int = 5) -> str:
    """Rounds as a phrase; after some ranges the rest is counted.

    Example:
        >>> rounds_named([3]), rounds_named([4, 1, 2]), rounds_named(range(1, 20, 3), most=2)
        ('round 3', 'rounds 1–2, 4', 'rounds 1, 4 and 5 more')
    """
    known = sorted(set(rounds))
    breaks = [i for i, r in enumerate(known) if i and r != known[i - 1] + 1]  # where a range ends
    shown = known[: breaks[most - 1]] if len(breaks) >= most else known
    more = f" and {len(known) - len(shown)} more" if len(shown) < len(known) else ""
    return f"round{'' if len(known) == 1 else 's'} {ranges(shown)}{more}"


def strata_named(strata: Iterable[str]) -> str:
    """Strata as a phrase, from the input to the head.

    Example:
        >>> strata_named(["head", "2", "1"]), strata_named(["7"])
        ('blocks 1–2, head', 'block 7')
    """
    known = sorted(set(strata), key=lambda s: stratum_order(parse_stratum(s)))
    blocks = [int(s) for s in known if s.isdecimal()]
    named = [stratum_name(parse_stratum(s)) for s in known if not s.isdecimal()]
    first = [f"block{'' if len(blocks) == 1 else 's'} {ranges(blocks)}"] if blocks else []
    return ", ".join([*first, *named])


def some_of(names: Iterable[str], most: int = 5) -> str:
    """Names in order, the rest counted.

    Example:
        >>> some_of("cab", most=2)
        'a, b and 1 more'
    """
    known = sorted(set(names))
    more = f" and {len(known) - most} more" if len(known) > most else ""
    return ", ".join(known[:most]) + more

"""Amounts as people read them; everywhere else they are plain numbers with the unit in the name."""

from __future__ import annotations


def format_bytes(count: float) -> str:
    """Bytes with a decimal unit (1 kB = 1000 bytes).

    Example:
        >>> format_bytes(999), format_bytes(1500), format_bytes(2_500_000)
        ('999 B', '1.5 kB', '2.5 MB')
    """
    value = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(value) < 1000 or unit == "TB":
            return f"{value:.0f} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def format_seconds(seconds: float) -> str:
    """A duration.

    Example:
        >>> format_seconds(5.21), format_seconds(90), format_seconds(7300)
        ('5.2 s', '1 min 30 s', '2 h 2 min')
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"

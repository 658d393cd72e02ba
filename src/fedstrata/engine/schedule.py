"""Which client begins next. It decides how long a round takes, and nothing else."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from fedstrata.server.orders import Order


def largest_first(orders: Iterable[Order]) -> deque[Order]:
    """The orders in the order in which they begin: the most work first, so that no long one is left for the end.

    With m workers the last one ends at most 4/3 − 1/(3m) times as late as with the best schedule (Graham 1969). Equal
    sizes go by client id.
    """
    return deque(sorted(orders, key=lambda o: (-o.size, o.client)))


def num_ahead(num_waiting: int, num_workers: int) -> int:
    """How many jobs a worker that is busy may already hold: one, so that it never waits for the server.

    Towards the end of a round none: a job that lies with a busy worker cannot be done by an idle one.

    Example:
        >>> num_ahead(10, 2), num_ahead(2, 2)
        (1, 0)
    """
    return 1 if num_waiting > num_workers else 0

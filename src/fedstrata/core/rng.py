"""Named random streams: no global seeds, no dependence on the order of calls."""

from __future__ import annotations

import hashlib

import numpy as np


def derive_seed(seed: int, *path: str | int) -> int:
    """A 128-bit seed for the stream that `path` names.

    The seed is the first 16 bytes of SHA-256 over the run's seed and the path, each part written with its
    type and length so that no two paths collide by concatenation.

    Args:
        seed: The run's seed.
        *path: What the stream is for, e.g. `"cohort", server_round`.

    Example:
        >>> derive_seed(0, "cohort", 1) == derive_seed(0, "cohort", 1)
        True
        >>> derive_seed(0, "cohort", 1) == derive_seed(0, "cohort", 11)
        False
    """
    digest = hashlib.sha256()
    for part in (seed, *path):
        text = str(part).encode()
        digest.update(f"{type(part).__name__}:{len(text)}:".encode() + text)
    return int.from_bytes(digest.digest()[:16], "little")


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """The random stream that `path` names; the same arguments give the same numbers everywhere.

    Example:
        >>> int(generator(7, "cohort", 1).integers(100)) == int(generator(7, "cohort", 1).integers(100))
        True
    """
    return np.random.Generator(np.random.PCG64(derive_seed(seed, *path)))


def sample_without_replacement(rng: np.random.Generator, log_weights: np.ndarray, count: int) -> np.ndarray:
    """Draws `count` of L items without replacement, by Gumbel keys.

    Keys are log π_l + Gumbel; the `count` largest win (the lower index on a tie). The chance that an item is
    included is *not* count·π_l: log the realised frequency where it matters.

    Args:
        rng: A named stream.
        log_weights: log π, shape [L]; −inf excludes an item.
        count: How many to draw.

    Returns:
        The drawn indices in ascending order, shape [count].
    """
    keys = log_weights + rng.gumbel(size=log_weights.shape)
    order = np.argsort(-keys, kind="stable")
    return np.sort(order[:count])

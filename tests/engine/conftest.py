"""What worker processes import beside the package."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

SUPPORT = str(Path(__file__).parents[1] / "support")


@pytest.fixture(autouse=True, scope="session")
def _support_is_found() -> None:
    """Spawned processes get this process's path."""
    if SUPPORT not in sys.path:
        sys.path.insert(0, SUPPORT)

"""Writes the page of methods: `python scripts/write_method_page.py docs/methods.md`."""

from __future__ import annotations

import sys
from pathlib import Path

import fedstrata.method  # noqa: F401  (all methods register themselves)
from fedstrata.method.columns import comparison_page

if __name__ == "__main__":
    Path(sys.argv[1]).write_text(comparison_page(), encoding="utf-8")

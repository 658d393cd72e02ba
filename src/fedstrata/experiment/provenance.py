"""Where a result comes from: code, versions, machine. All of it is recorded under `measured`."""

from __future__ import annotations

import datetime
import os
import platform
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from fedstrata import __version__

_PACKAGES = ("numpy", "torch", "transformers", "peft", "tokenizers", "safetensors", "zstandard")


def provenance(base_dir: Path) -> dict[str, Any]:
    """Everything one needs to know to run the same again."""
    return {
        "fedstrata": __version__,
        "commit": _commit(),
        "started_at": now(),
        "command": sys.argv,
        "base_dir": str(base_dir),
        "machine": {
            "platform": platform.platform(),
            "processor": platform.processor() or platform.machine(),
            "num_cpus": os.cpu_count(),
        },
        "environment": numeric_environment(),
    }


def numeric_environment() -> dict[str, str]:
    """What the bits of a result depend on beside spec and seed: versions and the CPU's instruction set."""
    import torch

    versions = {"python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            versions[name] = "missing"
    return versions | {"cpu": torch.backends.cpu.get_cpu_capability(), "arch": platform.machine()}


def now() -> str:
    """The time of day, in UTC."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _commit() -> dict[str, Any] | None:
    """The commit of a source checkout; None for an installed package."""
    root = Path(__file__).resolve().parents[3]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10).stdout

    try:
        return {"hash": git("rev-parse", "HEAD").strip(), "dirty": bool(git("status", "--porcelain").strip())}
    except (OSError, subprocess.SubprocessError):
        return None

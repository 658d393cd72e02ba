"""Makes `.venv` with everything that the quick start and the tests need; again, it is a no-op.

Needs nothing but Python 3.11 or newer. The commands that it runs are printed, so that they can be run by hand:

    python3 -m venv .venv
    .venv/bin/python -m pip install -c constraints.txt -e '.[dev]'
    .venv/bin/python -m pip install --no-deps -r assets.txt
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VENV = ROOT / ".venv"
STAMP = VENV / ".fedstrata-setup"
INPUTS = ("pyproject.toml", "constraints.txt", "assets.txt", "scripts/setup_env.py")


def main() -> None:
    """Sets up; a no-op where nothing is to do."""
    if sys.version_info < (3, 11):  # noqa: UP036  (this file is what an old interpreter runs first)
        found = ".".join(map(str, sys.version_info[:3]))
        stop(f"Python 3.11 or newer is needed, this is {found}", "name a newer one: `make PYTHON=python3.11 …`")
    if STAMP.exists() and STAMP.read_text() == fingerprint() and works():
        return
    if importlib.util.find_spec("venv") is None or importlib.util.find_spec("ensurepip") is None:
        version = f"{sys.version_info.major}.{sys.version_info.minor}"
        stop(
            "This Python cannot make virtual environments",
            f"run `apt-get install python{version}-venv` (Debian, Ubuntu)",
        )
    if not works():
        call([sys.executable, "-m", "venv", "--clear", str(VENV)])
    sys.stderr.write("installing into .venv; the first time this downloads about 2 GB and takes minutes\n")
    pip = [str(python()), "-m", "pip", "install", "--disable-pip-version-check", "--progress-bar", "off", "-q"]
    call([*pip, "-c", "constraints.txt", "-e", ".[dev]"])
    call([*pip, "--no-deps", "-r", "assets.txt"])
    STAMP.write_text(fingerprint())


def python() -> Path:
    """The environment's interpreter."""
    return VENV / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def works() -> bool:
    """Whether the environment exists and has pip."""
    if not python().exists():
        return False
    return subprocess.run([str(python()), "-m", "pip", "--version"], capture_output=True, check=False).returncode == 0


def fingerprint() -> str:
    """Changes when another set-up is needed."""
    digest = hashlib.sha256(sys.version.encode() + str(ROOT).encode())
    for name in INPUTS:
        digest.update((ROOT / name).read_bytes())
    return digest.hexdigest()


def call(command: list[str]) -> None:
    """Runs a command, or stops with its name."""
    sys.stderr.write(f"$ {shlex.join(command)}\n")
    done = subprocess.run(command, cwd=ROOT, check=False)
    if done.returncode != 0:
        stop(f"This command failed with status {done.returncode}: {shlex.join(command)}", "see its message above")


def stop(what: str, do: str) -> None:
    """Ends with a message that says what to do."""
    sys.exit(f"error: {what}\n  what to do: {do}")


if __name__ == "__main__":
    main()

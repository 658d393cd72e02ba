"""How long it takes to begin. Run: `python benchmarks/startup.py`.

Seconds until `fedstrata --help` has ended, best of ten, beside a Python that does nothing; and until the quick start's
model, data and plan are ready for the first training step, in a process of its own, best of three.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

FIRST_STEP = """
import sys
from pathlib import Path
from fedstrata.experiment.quickstart import quickstart_experiment
from fedstrata.experiment.runner import RunOptions, run_experiment
from fedstrata.experiment.watch import SilentWatch

class Ready(Exception):
    pass

class Stop(SilentWatch):
    def client_done(self, record):
        print(record["measured"]["train_s"])
        raise Ready

watch = Stop()
spec, base = quickstart_experiment(watch, {"train.local_steps": 1, "rounds.count": 1})
try:
    run_experiment(spec, base, RunOptions(Path(sys.argv[1])), watch)
except Ready:
    pass
"""


def seconds(*command: str) -> tuple[float, str]:
    """Wall time of one process, and what it printed."""
    began = time.perf_counter()
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - began, done.stdout


def first_step() -> float:
    """From the start of the process to the first training step: one step is trained, and its time taken off."""
    with tempfile.TemporaryDirectory() as folder:
        wall, out = seconds(sys.executable, "-c", FIRST_STEP, str(Path(folder) / "run"))
    return wall - float(out)


def main() -> None:
    """Measures and prints a table."""
    nothing = min(seconds(sys.executable, "-c", "pass")[0] for _ in range(10))
    show = (sys.executable, "-m", "fedstrata.cli", "--help")
    print("| what | seconds |\n|---|---:|")
    print(f"| `python -c pass` | {nothing:.2f} |")
    print(f"| `fedstrata --help` | {min(seconds(*show)[0] for _ in range(10)):.2f} |")
    print(f"| the quick start up to its first training step | {min(first_step() for _ in range(3)):.1f} |")


if __name__ == "__main__":
    main()

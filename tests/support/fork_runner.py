"""Runs tiny experiments in forked children of one warm process, so that a kill costs no import of torch.

Reads one JSON object per line: `{"experiment": FILE, "out": DIR, "kill_at": N, "set": {…}, "extend": bool}`. The child
counts operations that reach the disk (before and after each) and kills itself with SIGKILL at the N-th; 0 lets it
finish. Answers one JSON line: `{"status": exit status or -signal, "operations": how many were counted}`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import peft
import torch
import transformers

from fedstrata.experiment.load import load_spec
from fedstrata.experiment.runner import RunOptions, run_experiment
from fedstrata.experiment.watch import SilentWatch

WARM = (peft, torch, transformers.AutoModelForSequenceClassification, transformers.BertForSequenceClassification)


def count_operations(kill_at: int, counter: list[int]) -> None:
    """Wraps everything that changes the disk."""

    def wrap(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            tick()
            result = original(*args, **kwargs)
            tick()
            return result

        setattr(owner, name, counted)

    def tick() -> None:
        counter[0] += 1
        if counter[0] == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    wrap(os, "fsync")
    wrap(Path, "replace")
    wrap(Path, "unlink")
    wrap(Path, "mkdir")
    wrap(shutil, "rmtree")


def child(order: dict[str, Any], answer: int) -> None:
    """Runs one experiment and reports how many operations it took."""
    counter = [0]
    torch.set_num_threads(1)
    count_operations(order.get("kill_at", 0), counter)
    spec, base = load_spec(Path(order["experiment"]), order.get("set", {}))
    options = RunOptions(out=Path(order["out"]), extend=order.get("extend", False))
    run_experiment(spec, base, options, SilentWatch())
    os.write(answer, str(counter[0]).encode())


def main() -> None:
    """Forks a child per line."""
    print("ready", flush=True)
    for line in sys.stdin:
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(read)
            try:
                child(json.loads(line), write)
            except BaseException as error:
                print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
                os._exit(1)
            os._exit(0)
        os.close(write)
        counted = os.read(read, 100)
        os.close(read)
        _, status = os.waitpid(pid, 0)
        print(json.dumps({"status": os.waitstatus_to_exitcode(status), "operations": int(counted or 0)}), flush=True)


if __name__ == "__main__":
    main()

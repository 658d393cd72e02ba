"""Every method on the quick start's task, several seeds: the table in docs/method-table.md.

    python benchmarks/method_table.py --quick --out runs/methods --write docs/method-table.md

Runs that are finished are not run again, so that the command can be stopped and repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from fedstrata.method import METHODS

RUN = """
import json, sys
import fedstrata as fs
fs.run(json.loads(sys.argv[1]), out=sys.argv[2])
"""


@dataclass(frozen=True)
class Size:
    """How much is trained.

    Attributes:
        rounds: Rounds.
        batch_size: Examples per step.
        max_length: Tokens per text.
        threads: CPU threads per client.
    """

    rounds: int
    batch_size: int
    max_length: int
    threads: int


FULL, QUICK = Size(9, 16, 40, 2), Size(5, 8, 16, 1)


def experiment(method: str, seed: int, size: Size) -> dict[str, Any]:
    """The quick start with another method, float32 on the line unless the method says otherwise."""
    text = resources.files("fedstrata.examples").joinpath("quickstart.toml").read_text()
    values = tomllib.loads(text)
    values.pop("codec")
    values |= {"name": f"{method}-{seed}", "method": {"name": method}, "run": {"seed": seed}}
    values["rounds"] |= {"count": size.rounds}
    values["train"] |= {"batch_size": size.batch_size}
    values["model"] |= {"max_length": size.max_length}
    values["compute"] = {"threads_per_client": size.threads}
    return values


def run_all(methods: Iterable[str], seeds: int, size: Size, out: Path) -> None:
    """Runs what is not finished, one after the other, each in a process of its own."""
    for seed in range(seeds):
        for method in methods:
            folder = out / f"{method}-{seed}"
            if (folder / "summary.json").exists():
                continue
            values = experiment(method, seed, size)
            command = [sys.executable, "-c", RUN, json.dumps(values), str(folder)]
            done = subprocess.run(command, check=False, capture_output=True, text=True)
            print(method, seed, "ok" if done.returncode == 0 else done.stderr[-2000:], flush=True)


def spread(values: list[float]) -> str:
    """Mean ± sample standard deviation."""
    mean = statistics.fmean(values)
    return f"{mean:.3f} ± {statistics.stdev(values):.3f}" if len(values) > 1 else f"{mean:.3f}"


def row(method: str, folders: list[Path]) -> str:
    """One line of the table."""
    found = [json.loads((f / "summary.json").read_text()) for f in folders]
    accuracy = spread([s["metrics"]["test"]["accuracy"] for s in found])
    up, down = (statistics.fmean(s["totals"][f"{d}_bytes"] for s in found) / 1e6 for d in ("uplink", "downlink"))
    seconds = statistics.fmean(s["measured"]["wall_s"] for s in found)
    simulated = statistics.fmean(s["totals"]["predicted_s"] for s in found)
    return f"| `{method}` | {accuracy} | {len(found)} | {up:.2f} | {down:.2f} | {simulated:.1f} | {seconds:.0f} |"


def table(methods: Iterable[str], seeds: int, size: Size, out: Path) -> str:
    """The page."""
    rows = []
    for method in methods:
        folders = [out / f"{method}-{seed}" for seed in range(seeds)]
        folders = [f for f in folders if (f / "summary.json").exists()]
        if folders:
            rows.append(row(method, folders))
    work = f"{size.rounds} rounds of 5 steps with {size.batch_size} texts of at most {size.max_length} tokens"
    flag = "--quick " if size == QUICK else ""
    head = f"""# Every method on the quick start's task

MiniLM learns to sort BBC News over 12 clients of three device kinds, 6 per round, label skew (Dirichlet 0.5):
{work}.
Float32 on the line unless the method says otherwise; every method at the quick start's learning rate, not tuned for
each. Test accuracy of the round that was best on the server's validation examples (personalized methods: the clients'
own models after the last round), mean ± standard deviation over seeds. MB = 10⁶ bytes, counted. Simulated seconds are
those of the pretend devices; measured seconds are those of one shared two-core machine and of no use for ranking.
These are figures, not a verdict: three seeds and one untuned rate do not say which method is better.

```sh
python benchmarks/method_table.py {flag}--seeds {seeds} --out runs/methods --write docs/method-table.md
```

| method | test accuracy | seeds | MB up | MB down | simulated s | measured s |
|---|---|---|---|---|---|---|
"""
    return head + "\n".join(rows) + "\n"


def main() -> None:
    """Runs and writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="a third of the work: shorter texts, smaller batches")
    parser.add_argument("--out", type=Path, default=Path("runs/methods"))
    parser.add_argument("--write", type=Path, help="the page; printed where left out")
    parser.add_argument("--methods", nargs="*", default=sorted(METHODS.entries))
    arguments = parser.parse_args()
    size = QUICK if arguments.quick else FULL
    run_all(arguments.methods, arguments.seeds, size, arguments.out)
    page = table(arguments.methods, arguments.seeds, size, arguments.out)
    if arguments.write:
        arguments.write.write_text(page)
    else:
        print(page)


if __name__ == "__main__":
    main()

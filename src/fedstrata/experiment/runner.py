"""Runs one experiment from its spec to its summary, and goes on after any kind of end."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.engine.local import LocalEngine
from fedstrata.errors import RunFolderError
from fedstrata.experiment.build import Built, build
from fedstrata.experiment.finish import finish
from fedstrata.experiment.interrupt import Interrupts
from fedstrata.experiment.load import resolved
from fedstrata.experiment.provenance import numeric_environment, provenance
from fedstrata.experiment.scoring import is_better, stop_reason, validate
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.experiment.store import SCHEMA_VERSION, RunFolder, resume_hash, spec_difference, spec_hash
from fedstrata.experiment.watch import Watch
from fedstrata.record.clients import FolderStates
from fedstrata.record.files import read_json
from fedstrata.round import Observer, run_round


@dataclass(frozen=True)
class RunOptions:
    """How to run, without any influence on the result.

    Attributes:
        out: The run folder; `runs/<name>-<hash>` where None.
        fresh: Delete an earlier run in that folder.
        keep_payloads: Store every payload as it went over the line.
        other_environment: Go on although versions or the CPU differ from the run's beginning.
        extend: Whether a larger `rounds.count` than the folder's is meant (`--resume DIR --set rounds.count=…`).
    """

    out: Path | None = None
    fresh: bool = False
    keep_payloads: bool = False
    other_environment: bool = False
    extend: bool = False


def run_experiment(spec: ExperimentSpec, base_dir: Path, options: RunOptions, watch: Watch) -> RunFolder:
    """Runs, resumes or finds finished.

    Args:
        spec: What to learn.
        base_dir: Where the spec's relative paths start.
        options: Where and how.
        watch: The progress display.

    Returns:
        The run folder, with `summary.json`.

    Raises:
        FedstrataError: If anything a user can mend is wrong. What was finished before is kept.
    """
    values = resolved(spec)
    folder = RunFolder(options.out or default_folder(spec))
    folder.lock()
    try:
        if options.fresh:
            folder.clear()
        if folder.exists:
            _admit(folder, values, options)
            if folder.is_finished:
                watch.already_finished(folder.path)
                return folder
        _train(folder, spec, values, base_dir, options, watch)
    finally:
        folder.unlock()
    return folder


def default_folder(spec: ExperimentSpec) -> Path:
    """`runs/<name>-<first digits of the spec's hash>` below the current folder."""
    return Path("runs") / f"{spec.name}-{spec_hash(resolved(spec))[:8]}"


def _admit(folder: RunFolder, values: Mapping[str, Any], options: RunOptions) -> None:
    """Refuses a folder of another experiment or environment; prepares one that is to be extended."""
    record = read_json(folder.run_file)
    difference = spec_difference(record["spec"], values)
    if difference:
        same_so_far = resume_hash(record["spec"]) == resume_hash(values)
        if not (options.extend and same_so_far):
            raise RunFolderError(
                f"{folder.path} holds another experiment",
                got="\n    ".join(["", *difference]),
                do="choose another folder with --out, start anew with --fresh, or extend with "
                "`--resume DIR --set rounds.count=N` (only with a constant learning rate)",
            )
    then, now = record["measured"]["environment"], numeric_environment()
    changed = [
        f"{k}: {then.get(k)} -> {now.get(k)}" for k in sorted(then.keys() | now.keys()) if then.get(k) != now.get(k)
    ]
    if changed and not folder.is_finished and not options.other_environment:
        raise RunFolderError(
            f"{folder.path} was begun in another environment, so its bits cannot be continued",
            got="; ".join(changed),
            do="install the versions it was begun with, or pass --other-environment to go on all the same",
        )
    if folder.is_finished and (difference or record.get("stop_reason") == "interrupted"):
        reads = read_json(folder.summary_file)["num_test_reads"]
        record["measured"]["earlier_test_reads"] = reads
        folder.write_run(record | {"spec": dict(values), "spec_hash": spec_hash(values), "status": "started"})
        folder.summary_file.unlink()
    elif difference:
        folder.write_run(record | {"spec": dict(values), "spec_hash": spec_hash(values)})


def _train(
    folder: RunFolder,
    spec: ExperimentSpec,
    values: dict[str, Any],
    base_dir: Path,
    options: RunOptions,
    watch: Watch,
) -> None:
    began = time.perf_counter()
    with Interrupts(watch) as interrupts:
        built = build(spec, base_dir, watch)
        known = resume_hash(values)
        if not folder.exists:
            folder.write_run(_run_record(spec, values, built, base_dir))
        state = folder.load(known) or built.initial
        first_round = state.server_round + 1
        engine = LocalEngine(built.trainer, FolderStates(folder.path / "clients"))
        keep = folder.keep_payload if options.keep_payloads else Observer().payload
        watch.start(built, state)
        observer = Observer(watch.planned, watch.client_done, keep)
        try:
            reason = stop_reason(spec, state)
            while reason is None:
                state, record, clients = run_round(built.setup, state, engine, observer)
                state = validate(built, state, record, engine)
                folder.append(record, clients)
                if is_better(built, state):
                    built.save_adapter(folder.path / "best", state.tensors)
                folder.commit(state, known)
                watch.round_done(record)
                reason = stop_reason(spec, state) or ("interrupted" if interrupts.asked else None)
        except KeyboardInterrupt:
            folder.set_status("cancelled")
            raise
        except Exception as error:
            folder.set_status("failed", error=str(error)[:2000])
            raise
        watch.finishing()
        wall_s = time.perf_counter() - began
        finish(folder, built, state, engine, reason, wall_s=wall_s, first_round=first_round)
        watch.finished(folder.path)


def _run_record(spec: ExperimentSpec, values: dict[str, Any], built: Built, base_dir: Path) -> dict[str, Any]:
    """`run.json` at the start."""
    return {
        "schema_version": SCHEMA_VERSION,
        "name": spec.name,
        "status": "started",
        "stop_reason": None,
        "method": built.method_name,
        "seed": spec.run.seed,
        "spec_hash": spec_hash(values),
        "spec": values,
        "parts": built.setup.method.to_config(),
        **built.info,
        "measured": provenance(base_dir),
    }

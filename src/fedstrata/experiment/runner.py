"""Runs one experiment from its spec to its summary, and goes on after any kind of end."""

from __future__ import annotations

import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedstrata.discovery import foreign_errors, in_words
from fedstrata.errors import FedstrataError
from fedstrata.experiment.admission import Admission, admit, check_world
from fedstrata.experiment.build import Built, build
from fedstrata.experiment.engines import check_engine, choose_engine, engine_record, open_engine
from fedstrata.experiment.finish import finish
from fedstrata.experiment.interrupt import Interrupts
from fedstrata.experiment.load import resolved
from fedstrata.experiment.methods import build_method
from fedstrata.experiment.plugins import outside_places
from fedstrata.experiment.provenance import provenance
from fedstrata.experiment.scoring import is_better, stop_reason, validate
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.experiment.store import SCHEMA_VERSION, RunFolder, resume_hash, spec_hash
from fedstrata.experiment.watch import Watch
from fedstrata.round import Observer, run_round
from fedstrata.server.evaluate import drop_payload


@dataclass(frozen=True)
class RunOptions:
    """How to run, without any influence on the result.

    Attributes:
        out: The run folder; `runs/<name>-<hash>` where None.
        fresh: Delete an earlier run in that folder, once everything for the new one is loaded.
        keep_payloads: Store every payload as it went over the line.
        other_environment: Go on although versions or the CPU differ from the run's beginning.
        engine: `auto`, `local` or `pool`.
        workers: How many clients train at the same time; None lets the engine decide.
        extend: Whether a larger `rounds.count` than the folder's is meant (`--resume DIR --set rounds.count=…`).
    """

    out: Path | None = None
    fresh: bool = False
    keep_payloads: bool = False
    other_environment: bool = False
    extend: bool = False
    engine: str = "auto"
    workers: int | None = None


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
    check_engine(options.engine, options.workers)
    values, method = resolved(spec), build_method(spec)
    folder = RunFolder(options.out or default_folder(spec))
    folder.lock()
    try:
        admission = None
        if folder.exists and not options.fresh:
            admission = admit(
                folder,
                values,
                method.planner,
                extend=options.extend,
                other_environment=options.other_environment,
            )
            if admission.is_done:
                watch.already_finished(folder.path)
                return folder
        with foreign_errors(outside_places(method, spec)):
            _train(folder, spec, values, base_dir, options, watch, admission)
    finally:
        folder.unlock()
    return folder


def default_folder(spec: ExperimentSpec) -> Path:
    """`runs/<name>-<first digits of the spec's hash>` below the current folder."""
    return Path("runs") / f"{spec.name}-{spec_hash(resolved(spec))[:8]}"


def _train(
    folder: RunFolder,
    spec: ExperimentSpec,
    values: dict[str, Any],
    base_dir: Path,
    options: RunOptions,
    watch: Watch,
    admission: Admission | None,
) -> None:
    began = time.perf_counter()
    with Interrupts(watch) as interrupts, ExitStack() as running:
        built = build(spec, base_dir, watch)
        known = resume_hash(values, _decided_by_rounds(built))
        if admission is not None:
            check_world(folder, admission.before, built.info)
            state = folder.load(known) or built.initial
            folder.reopen(admission.record)
        else:
            folder.clear()
            folder.write_run(_run_record(spec, values, built, base_dir))
            state = folder.load(known) or built.initial
        try:
            first_round = state.server_round + 1
            choice = choose_engine(options.engine, options.workers, built, spec.rounds.count - state.server_round)
            may_fall_back = options.engine == "auto"
            engine, choice = running.enter_context(
                open_engine(choice, built, base_dir, folder.path, watch, may_fall_back=may_fall_back)
            )
            folder.note(engine=engine_record(choice))
            keep = folder.keep_payload if options.keep_payloads else drop_payload
            watch.start(built, state)
            observer = Observer(watch.planned, watch.client_done, keep, watch.client_began, watch.client_back)
            reason = stop_reason(spec, state)
            while reason is None:
                round_began = time.perf_counter()
                state, record, clients = run_round(built.setup, state, engine, observer)
                state = validate(built, state, record, engine, keep)
                record["measured"]["wall_s"] = time.perf_counter() - round_began  # the validation included
                folder.append(record, clients)
                if is_better(built, state):
                    built.save_adapter(folder.path / "best", state.tensors, state.base)
                folder.commit(state, known)
                watch.round_done(record)
                reason = stop_reason(spec, state) or ("interrupted" if interrupts.asked else None)
            watch.finishing()
            wall_s = time.perf_counter() - began
            finish(folder, built, state, engine, reason, wall_s=wall_s, first_round=first_round)
        except KeyboardInterrupt:
            _note_end(folder, "cancelled")
            raise
        except (Exception, SystemExit) as error:  # a part from outside may ask Python to end
            text = str(error) if isinstance(error, FedstrataError) else in_words(error)
            _note_end(folder, "failed", error=text[:2000])
            raise
        watch.finished(folder.path)


def _note_end(folder: RunFolder, status: str, **measured: Any) -> None:
    """Notes how a run ended, if that can still be written; what ended it is the error that counts."""
    with suppress(FedstrataError):
        folder.set_status(status, **measured)


def _decided_by_rounds(built: Built) -> dict[str, Any]:
    """What the planner makes of the planned number of rounds."""
    return built.setup.method.planner.decided_by_rounds(built.setup.num_rounds)


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
        "decided_by_rounds": _decided_by_rounds(built),
        **built.info,
        "measured": provenance(base_dir),
    }

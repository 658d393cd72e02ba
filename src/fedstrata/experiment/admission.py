"""Whether a run may go on in a folder: the same experiment, environment, data and model, or a plain refusal."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedstrata.errors import RunFolderError
from fedstrata.experiment.provenance import numeric_environment
from fedstrata.experiment.store import RunFolder, resume_hash, spec_difference, spec_hash
from fedstrata.experiment.stored import read_run_record, require_keys
from fedstrata.plan.base import Planner
from fedstrata.record.files import read_json


@dataclass(frozen=True)
class Admission:
    """A folder whose run may go on.

    Attributes:
        before: `run.json` as it is.
        record: `run.json` as it will be once everything is loaded; until then nothing is changed.
        is_done: Whether nothing is left to do.
    """

    before: Mapping[str, Any]
    record: Mapping[str, Any]
    is_done: bool = False


def admit(
    folder: RunFolder, values: Mapping[str, Any], planner: Planner, *, extend: bool, other_environment: bool
) -> Admission:
    """Compares a folder with the experiment that is to run in it. Nothing is written.

    Args:
        folder: With `run.json`.
        values: The resolved spec.
        planner: The spec's; it says what it makes of the number of rounds.
        extend: Whether another `rounds.count`, `patience` or `target` is meant.
        other_environment: Whether other versions or another CPU are accepted.

    Raises:
        RunFolderError: With every difference.
    """
    before = read_run_record(folder.path)
    difference = spec_difference(before["spec"], values)
    then, now = (planner.decided_by_rounds(v["rounds"]["count"]) for v in (before["spec"], values))
    if difference and not (extend and resume_hash(before["spec"], then) == resume_hash(values, now)):
        made = [f'the plan "{planner.id}" makes of it{line}' for line in spec_difference(then, now, " ")]
        hint = f'; with the plan "{planner.id}": {planner.to_extend}' if made and planner.to_extend else ""
        raise RunFolderError(
            f"{folder.path} holds another experiment",
            got="\n    ".join(["", *difference, *made]),
            do="choose another folder with --out, start anew with --fresh, or extend with "
            f"`--resume DIR --set rounds.count=N` (only with a constant learning rate{hint})",
        )
    if folder.is_finished and not difference and before.get("stop_reason") != "interrupted":
        return Admission(before, before, is_done=True)
    num_rounds = folder.num_finished_rounds() if difference else 0
    if values["rounds"]["count"] < num_rounds:
        raise RunFolderError(
            f"{folder.path} has finished {num_rounds} rounds already",
            expected=f"rounds.count of {num_rounds} or more",
            got=str(values["rounds"]["count"]),
        )
    if not other_environment:
        _check_environment(folder, before)
    measured = {k: v for k, v in before["measured"].items() if k != "error"}
    if folder.is_finished:
        summary = read_json(folder.summary_file)
        require_keys(summary, {"num_test_reads": int}, str(folder.summary_file))
        measured["earlier_test_reads"] = summary["num_test_reads"]
    record = {**before, "spec": dict(values), "spec_hash": spec_hash(values), "measured": measured}
    return Admission(before, record | {"status": "started", "stop_reason": None})


def check_world(folder: RunFolder, before: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    """Refuses to go on with other data, clients or another model than the run was begun with.

    Args:
        folder: For the message.
        before: `run.json`.
        info: What was loaded now (`Built.info`).

    Raises:
        RunFolderError: With every difference.
    """
    difference = spec_difference(_world(before), _world(info), "run.")
    if difference:
        raise RunFolderError(
            f"{folder.path} was begun with other data or another model",
            got="\n    ".join(["", *(line.removeprefix("run.") for line in difference[:10])]),
            do="bring back what it was begun with, or start anew with --fresh",
        )


def _world(record: Mapping[str, Any]) -> dict[str, Any]:
    data, model = record.get("data", {}), record.get("model", {})
    return {
        "data": data.get("sha256"),
        "model": {"identity": model.get("identity")},
        "labels": record.get("labels"),
        "plugins": record.get("plugins", {}),
        "clients": {c["client"]: {k: v for k, v in c.items() if k != "client"} for c in record.get("clients", [])},
    }


def _check_environment(folder: RunFolder, before: Mapping[str, Any]) -> None:
    then, now = before["measured"].get("environment", {}), numeric_environment()
    changed = spec_difference(then, now, "environment.")
    if changed:
        raise RunFolderError(
            f"{folder.path} was begun in another environment, so its bits cannot be continued",
            got="; ".join(line.removeprefix("environment.") for line in changed),
            do="install the versions it was begun with, or pass --other-environment to go on all the same",
        )

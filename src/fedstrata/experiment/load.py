"""From a TOML file to a checked experiment: every mistake at once, with its place and the likely fix."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedstrata.errors import ConfigError
from fedstrata.experiment.contradictions import find_contradictions
from fedstrata.experiment.methods import adapter_kind
from fedstrata.experiment.mistakes import describe_mistake, has_no_size, not_finite, other_types, shown
from fedstrata.experiment.plugins import load_plugins
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.experiment.stored import read_run_record, require_keys

Overrides = Iterable[str] | Mapping[str, Any]


def load_spec(source: Path | str | Mapping[str, Any], overrides: Overrides = ()) -> tuple[ExperimentSpec, Path]:
    """Reads an experiment.

    Args:
        source: A TOML file, or its content as a mapping.
        overrides: `a.b=value` texts, the value in TOML (bare words are text), or values by dotted key.

    Returns:
        The spec, and the folder that its relative paths start from.

    Raises:
        ConfigError: With every mistake that was found.
    """
    if isinstance(source, Mapping):
        values, base, where = dict(source), Path.cwd(), "the given experiment"
    else:
        path = Path(source)
        values, base, where = _read_toml(path), path.resolve().parent, str(path)
        values.setdefault("name", _safe_name(path.stem))
    return check_spec(_overridden(values, overrides), where=where, base_dir=base), base


def check_spec(values: Mapping[str, Any], *, where: str, base_dir: Path | None = None) -> ExperimentSpec:
    """The spec of these values, or one `ConfigError` with all mistakes."""
    problems = list(not_finite(values))
    try:
        spec = ExperimentSpec.model_validate(values)
    except ValidationError as error:
        problems += dict.fromkeys(describe_mistake(e) for e in error.errors() if not has_no_size(e["input"]))
        raise ConfigError("The experiment cannot be read", problems=problems, where=where) from error
    problems += other_types(values, spec)
    if problems:
        raise ConfigError("The experiment cannot be read", problems=problems, where=where)
    load_plugins(spec, base_dir or Path.cwd())
    spec = _with_adapter_of_method(spec)
    problems = find_contradictions(spec)
    if problems:
        raise ConfigError("The experiment contradicts itself", problems=problems, where=where)
    return spec


def _with_adapter_of_method(spec: ExperimentSpec) -> ExperimentSpec:
    """The spec with the adapter kind that the method is defined for, where the file leaves it open."""
    try:
        kind = adapter_kind(spec)
    except ConfigError:  # an unknown method or a wrong option: told with everything else
        return spec
    if kind == spec.adapter.kind:
        return spec
    return spec.model_copy(update={"adapter": spec.adapter.model_copy(update={"kind": kind})})


def resolved(spec: ExperimentSpec) -> dict[str, Any]:
    """The spec with every default written out, JSON-ready: what the run folder stores."""
    values: dict[str, Any] = json.loads(spec.model_dump_json())
    return values


def json_schema() -> dict[str, Any]:
    """A JSON schema of the experiment file, for editors."""
    schema = ExperimentSpec.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def read_toml_text(text: str, where: str) -> dict[str, Any]:
    """The tables of a TOML text."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("This is not valid TOML", where=where, got=str(error)) from error


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return read_toml_text(path.read_text(encoding="utf-8"), str(path))
    except FileNotFoundError as error:
        raise ConfigError(
            f"There is no experiment file {path}",
            do="`fedstrata init --data FILE` writes one, `fedstrata quickstart` needs none",
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("The experiment file cannot be read", where=str(path), got=str(error)) from error


def _overridden(values: dict[str, Any], overrides: Overrides) -> dict[str, Any]:
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(_parse_override, overrides)
    for key, value in pairs:
        parts = key.split(".")
        table = values
        for i, part in enumerate(parts[:-1]):
            inner = table.get(part) or {}
            if not isinstance(inner, Mapping):
                raise ConfigError(
                    f"{'.'.join(parts[: i + 1])} is a value, not a table", where=f"override of {key}", got=shown(inner)
                )
            table[part] = table = dict(inner)
        table[parts[-1]] = value
    return values


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, right = (part.strip() for part in text.partition("="))
    if not equals or not all(key.split(".")):
        raise ConfigError("An override is not understood", expected="--set table.key=value", got=text)
    if right == "none":
        return key, None
    try:
        return key, tomllib.loads(f"value = {right}")["value"]
    except tomllib.TOMLDecodeError:
        return key, right


def _safe_name(stem: str) -> str:
    """A name for the run folder that every file system and shell takes."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", stem).strip("._-") or "experiment"


def respec(folder: Path, overrides: Overrides = ()) -> tuple[ExperimentSpec, Path]:
    """The spec that a run folder was begun with, changed by overrides, and the folder of its relative paths.

    Raises:
        ConfigError: With every mistake in the overrides.
        RunFolderError: If the folder is no run folder, or is damaged.
    """
    record = read_run_record(folder)
    require_keys(record, {"measured.base_dir": str, "measured.environment": dict}, str(folder / "run.json"))
    # What equals the default counts as not written, or the check for contradicting keys would see it as set.
    values = ExperimentSpec.model_validate(record["spec"]).model_dump(mode="json", exclude_defaults=True)
    base = Path(record["measured"]["base_dir"])
    return check_spec(_overridden(values, overrides), where=str(folder / "run.json"), base_dir=base), base

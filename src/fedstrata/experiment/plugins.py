"""Methods and parts from outside: files that an experiment names, and what the record says about their origin.

A reference `./my_method.py:mymethod` stands where a method's name or a part's id stands; its path starts at the folder
of the experiment file. A file is run once, under a module name of its own, and again only if its content changed. Every
part in it is registered, so that a client finds it by its id. Installed packages are found by `fedstrata.discovery`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import re
import sys
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from fedstrata.aggregate.base import AGGREGATORS, Aggregator
from fedstrata.codec.base import CODECS, Codec
from fedstrata.data.partition import PARTITIONS
from fedstrata.data.sources import SOURCES
from fedstrata.discovery import REFERENCE, FileOrigin, in_words, is_own, note_file, origin_record, place_of
from fedstrata.errors import ConfigError, FedstrataError, did_you_mean
from fedstrata.experiment.spec import ExperimentSpec
from fedstrata.method import METHODS, Method, MethodEntry
from fedstrata.objective.base import OBJECTIVES, Objective
from fedstrata.optimize.base import OPTIMIZERS, ServerOptimizer
from fedstrata.plan.base import PLANNERS, Planner
from fedstrata.registry import FunctionTable, Registry, check_part_class
from fedstrata.select.base import SELECTORS, Selector


@dataclass(frozen=True)
class PartKind:
    """One of the choices that parts are for.

    Attributes:
        registry: Where its parts are.
        base: What they derive from.
        field: Of `Method`.
        table: Of the experiment file.
    """

    registry: Registry[Any]
    base: type
    field: str
    table: str


KINDS: dict[str, PartKind] = {
    "planner": PartKind(PLANNERS, Planner, "planner", "plan"),
    "objective": PartKind(OBJECTIVES, Objective, "objective", "objective"),
    "codec": PartKind(CODECS, Codec, "codec", "codec"),
    "aggregator": PartKind(AGGREGATORS, Aggregator, "aggregator", "aggregate"),
    "selector": PartKind(SELECTORS, Selector, "selector", "select"),
    "optimizer": PartKind(OPTIMIZERS, ServerOptimizer, "optimizer", "optimize"),
}


def is_reference(text: object) -> bool:
    """Whether a name is a file reference.

    Example:
        >>> is_reference("./my_method.py:mymethod"), is_reference("fedavg")
        (True, False)
    """
    return isinstance(text, str) and REFERENCE.fullmatch(text) is not None


def load_plugins(spec: ExperimentSpec, base_dir: Path) -> None:
    """Loads every file that a spec names; afterwards its references are known like names. Calling it again is cheap.

    Raises:
        ConfigError: If a file cannot be read or run, lacks what is asked of it, or brings a name that is taken.
    """
    if is_reference(spec.method.name):
        load_method(spec.method.name, base_dir)
    configs: list[tuple[str, Any]] = [(kind, getattr(spec, k.table)) for kind, k in KINDS.items() if kind != "codec"]
    configs += [("codec", spec.codec.uplink), ("codec", spec.codec.downlink)]
    for kind, config in configs:
        for reference in _references(config):
            load_part(kind, reference, base_dir)
    tables: list[tuple[FunctionTable[Any], str | None]] = [(PARTITIONS, spec.simulation.partition.kind)]
    tables += [(SOURCES, s) for s in (spec.data.source, spec.data.test_source, spec.data.proxy_source)]
    for table, name in tables:
        if name is not None and is_reference(name):
            table.refer(name, load_object(name, base_dir))


def load_method(reference: str, base_dir: Path) -> MethodEntry:
    """The method that a reference means.

    Raises:
        ConfigError: As `load_plugins`, or if it is no function.
    """
    make = load_object(reference, base_dir)
    if not inspect.isfunction(make):
        raise ConfigError(
            f"{reference} is no method",
            expected="a function that returns fedstrata.method.Method",
            got=f"{make!r}"[:200],
        )
    entry = METHODS.entry_of(make)
    METHODS.refer(reference, entry)
    return entry


def load_part(kind: str, reference: str, base_dir: Path) -> type:
    """The part that a reference means.

    Args:
        kind: A key of `KINDS`.
        reference: `FILE.py:NAME`.
        base_dir: Where a relative path starts.

    Raises:
        ConfigError: As `load_plugins`, or if it is no part of this kind.
    """
    part = load_object(reference, base_dir)
    check_part_class(part, kind, reference)
    if not issubclass(part, KINDS[kind].base):
        raise ConfigError(f"{reference} is no {kind}", expected=f"a class derived from {KINDS[kind].base.__name__}")
    KINDS[kind].registry.register(part)
    KINDS[kind].registry.refer(reference, part)
    return cast("type", part)


def load_object(reference: str, base_dir: Path) -> Any:
    """What stands under a name in a file.

    Raises:
        ConfigError: If the reference is none, or the file cannot be read or run or lacks the name.
    """
    match = REFERENCE.fullmatch(reference)
    if match is None:
        raise ConfigError(
            "This is no file reference", expected="FILE.py:NAME, e.g. ./my_method.py:mymethod", got=reference
        )
    try:
        path = base_dir / Path(match["path"]).expanduser()
    except RuntimeError as error:  # a home folder that nobody knows
        raise ConfigError("A file with a method or a part cannot be read", where=reference, got=str(error)) from error
    module = load_file(path)
    if match["name"] not in vars(module):
        own = [n for n, x in vars(module).items() if getattr(x, "__module__", None) == module.__name__]
        raise ConfigError(
            f'There is no "{match["name"]}" in {match["path"]}', where=reference, do=did_you_mean(match["name"], own)
        )
    return vars(module)[match["name"]]


def load_file(path: Path) -> ModuleType:
    """The module that a file makes; it is run once, and again if its content changed since.

    Raises:
        ConfigError: If it cannot be read, or raises; says in which line.
    """
    try:
        source = path.read_bytes()
    except (OSError, ValueError) as error:  # a path with a null character is a ValueError
        raise ConfigError(
            "A file with a method or a part cannot be read",
            where=str(path),
            got=error.strerror if isinstance(error, OSError) else str(error),
            do="relative paths start at the folder of the experiment file",
        ) from error
    origin = FileOrigin(path, hashlib.sha256(source).hexdigest())
    where = hashlib.sha256(str(path.resolve()).encode()).hexdigest()[:12]
    name = f"fedstrata_file_{where}_{re.sub(r'[^A-Za-z0-9_]', '_', path.stem)}"
    known = sys.modules.get(name)
    if known is not None and known.__dict__.get("__sha256__") == origin.sha256:
        return known
    _forget(name)
    module = ModuleType(name)
    module.__file__ = str(path)
    module.__dict__["__sha256__"] = origin.sha256
    sys.modules[name] = module
    note_file(name, origin)
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
        _register_parts(module)
    except BaseException as error:  # somebody else's code may raise anything, and even ask Python to end
        _forget(name)
        if isinstance(error, FedstrataError | KeyboardInterrupt):
            raise
        raise _not_run(path, error) from error
    return module


def plugin_record(
    method: Method, name: str | None = None, spec: ExperimentSpec | None = None
) -> dict[str, dict[str, str]]:
    """What `run.json` says about everything that is not Fedstrata's own; empty where all of it is.

    Args:
        method: With its parts.
        name: The method's name or reference, to record where its function comes from.
        spec: The experiment, to record where its partition and its sources come from.

    Returns:
        By `method`, by table (`plan`, `codec`, …), `partition`, `source` and `test_source`: the object, its file and
        the file's SHA-256, or the package, its version and the module's SHA-256. A part inside another one stands
        under `codec.inner`.
    """
    records = {key: origin_record(thing) for key, thing in _things(method, name, spec).items()}
    return {key: record for key, record in records.items() if record is not None}


def outside_places(method: Method, spec: ExperimentSpec) -> tuple[str, ...]:
    """Where everything comes from that is not Fedstrata's own, in words."""
    things = _things(method, spec.method.name, spec).values()
    return tuple(dict.fromkeys(place_of(thing) for thing in things if not is_own(thing)))


def _things(method: Method, name: str | None, spec: ExperimentSpec | None) -> dict[str, Any]:
    """The classes and functions at work, by what they do."""
    things = {"method": METHODS.find(name).make} if name is not None else {}
    for kind in KINDS.values():
        things |= _part_classes(kind.table, getattr(method, kind.field))
    return things if spec is None else things | _functions(spec)


def check_registered(method: Method) -> None:
    """Refuses a method with a part that a client could not find by its id.

    Raises:
        ConfigError: With the part, and what its id finds instead.
    """
    for kind, k in KINDS.items():
        for part in _part_classes(k.table, getattr(method, k.field)).values():
            found = k.registry[part.id] if part.id in k.registry.names else None
            if found is not part:
                raise ConfigError(
                    f'Clients could not find the {kind} "{part.id}" of this method',
                    where=place_of(part),
                    expected=f"a {kind} that is registered under its id",
                    got=place_of(found) if found is not None else "no such id",
                    do=f"put @{k.registry.choice.split()[-1].upper()}S.register above the class, and in a package an "
                    f"entry point in the group {k.registry.group}",
                )


def _references(config: Any) -> Iterator[str]:
    """File references in a part's config, those of nested parts included."""
    if isinstance(config, Mapping):
        for value in config.values():
            yield from _references(value)
    elif is_reference(config):
        yield config


def _functions(spec: ExperimentSpec) -> dict[str, Any]:
    """The partition and the sources of a spec that are functions."""
    named: dict[str, tuple[FunctionTable[Any], str]] = {"partition": (PARTITIONS, spec.simulation.partition.kind)}
    for key, source in (("source", spec.data.source), ("test_source", spec.data.test_source)):
        if source is not None:
            named[key] = (SOURCES, source if SOURCES.is_referred(source) else source.partition(":")[0])
    return {key: table[name] for key, (table, name) in named.items() if name in table}


def _part_classes(where: str, part: Any) -> dict[str, Any]:
    classes: dict[str, Any] = {where: type(part)}
    for f in dataclasses.fields(part):
        if f.metadata.get("part"):
            classes |= _part_classes(f"{where}.{f.name}", getattr(part, f.name))
    return classes


def _register_parts(module: ModuleType) -> None:
    """Registers the parts of a file that carry no decorator."""
    for thing in list(vars(module).values()):
        if not (isinstance(thing, type) and thing.__module__ == module.__name__):
            continue
        frozen = getattr(getattr(thing, "__dataclass_params__", None), "frozen", False)
        for kind in KINDS.values():
            if issubclass(thing, kind.base) and frozen and isinstance(getattr(thing, "id", None), str):
                kind.registry.register(thing)


def _forget(module: str) -> None:
    """Takes out a module and all that it registered."""
    sys.modules.pop(module, None)
    for kind in KINDS.values():
        kind.registry.forget(module)
    METHODS.forget(module)
    note_file(module, None)


def _not_run(path: Path, error: BaseException) -> ConfigError:
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename == str(path):
        lines.append(error.lineno)
    is_import = isinstance(error, ModuleNotFoundError)
    return ConfigError(
        "A file with a method or a part cannot be run",
        where=f"{path}, line {lines[-1]}" if lines else str(path),
        got=in_words(error),
        do="a file stands alone: put what it imports from its own folder into it, or into a package "
        "(`fedstrata new-method` writes one)"
        if is_import
        else "mend the file",
    )

"""What comes from outside: entry points of installed packages, and files that an experiment names.

Entry points are read once per process and imported only when a name is looked up or listed.
"""

from __future__ import annotations

import hashlib
import re
import sys
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from fedstrata.errors import ConfigError, FedstrataError

OWN_PACKAGE = "fedstrata"
REFERENCE = re.compile(r"(?P<path>.+\.py):(?P<name>[^\W\d]\w*)")
"""How an experiment names something in a file: `./my_method.py:mymethod`."""
_MOST_WORDS = 500


@dataclass(frozen=True)
class PlugIn:
    """One entry point of an installed package.

    Attributes:
        group: E.g. `fedstrata.codecs`.
        name: What users write.
        target: `module:object`.
        distribution: The package's name.
        version: The package's version.
    """

    group: str
    name: str
    target: str
    distribution: str
    version: str

    @property
    def place(self) -> str:
        """Where it comes from, in words."""
        return f"{self.distribution} {self.version} ({self.target})"

    def load(self) -> Any:
        """Imports the object.

        Raises:
            ConfigError: If the import fails for any reason; names package, module and error.
        """
        what, where = f'The plug-in "{self.name}" cannot be loaded', f"{self.place}, entry point of {self.group}"
        with foreign_code(what, where=where, do=f"mend it, or run `pip uninstall {self.distribution}`"):
            return metadata.EntryPoint(self.name, self.target, self.group).load()


@dataclass(frozen=True)
class FileOrigin:
    """A Python file that an experiment names.

    Attributes:
        path: Where it stands.
        sha256: Of the bytes that were run.
    """

    path: Path
    sha256: str


_FILES: dict[str, FileOrigin] = {}


@cache
def plug_ins(group: str) -> tuple[PlugIn, ...]:
    """The entry points of a group, sorted by name; nothing is imported."""
    found = []
    for point in metadata.entry_points(group=group):
        dist = point.dist
        name, version = (dist.metadata["Name"], dist.version) if dist is not None else ("an unknown package", "?")
        found.append(PlugIn(group, point.name, point.value, name, version))
    return tuple(sorted(found, key=lambda p: (p.name, p.distribution)))


def look_again() -> None:
    """Forgets what was read, for packages that were installed since."""
    plug_ins.cache_clear()


@contextmanager
def foreign_code(what: str, *, where: str, do: str) -> Iterator[None]:
    """Around code of somebody else, which may raise anything and even ask Python to end.

    Args:
        what: What went wrong if it does.
        where: Where it comes from; an error's own line is added.
        do: What to do then.

    Raises:
        ConfigError: Instead of anything but Fedstrata's own errors and Ctrl-C.
    """
    try:
        yield
    except (FedstrataError, KeyboardInterrupt):
        raise
    except BaseException as error:
        line = failing_line(error)
        raise ConfigError(what, where=f"{where}; {line}" if line else where, got=in_words(error), do=do) from error


@contextmanager
def foreign_errors(outside: Collection[str] = ()) -> Iterator[None]:
    """Around our code that calls code of somebody else: an error that began there is told as one.

    Args:
        outside: Which methods and parts from outside are at work; an unexpected error of ours is then most likely due
            to what one of them handed back.

    Raises:
        ConfigError: With file and line, where an error began in an experiment's file or an installed plug-in, or
            with all of `outside`, if there is any; without them, errors of ours pass.
    """
    try:
        yield
    except (FedstrataError, KeyboardInterrupt):
        raise
    except BaseException as error:
        where = failing_line(error)
        if where is None and (not outside or not isinstance(error, Exception)):
            raise
        if where is None:
            raise ConfigError(
                "Something failed that a method or a part from outside takes part in",
                where=", ".join(outside),
                got=in_words(error),
                do="`fedstrata check-part` tells what it hands back that is wrong; if it finds nothing, report a bug",
            ) from error
        raise ConfigError(
            "A method or a part from outside raised an error",
            where=where,
            got=in_words(error),
            do="mend it; `fedstrata check-part` tries a method or a part in many small worlds",
        ) from error


def failing_line(error: BaseException) -> str | None:
    """File and line of the innermost call that stands in an experiment's file or an installed plug-in, if any does."""
    files = {str(origin.path) for origin in _FILES.values()}
    groups = [g for g in metadata.entry_points().groups if g.startswith(f"{OWN_PACKAGE}.")]
    packages = {p.target.partition(":")[0].partition(".")[0] for g in groups for p in plug_ins(g)} - {OWN_PACKAGE}
    for frame, line in reversed(list(traceback.walk_tb(error.__traceback__))):
        file, module = frame.f_code.co_filename, str(frame.f_globals.get("__name__", ""))
        if file in files or module.partition(".")[0] in packages:
            return f"{file}, line {line}"
    return None


def in_words(error: BaseException) -> str:
    """Name and text of an error, short and printable."""
    text = f"{type(error).__name__}: {error}".encode(errors="replace").decode()
    return text if len(text) <= _MOST_WORDS else f"{text[:_MOST_WORDS]}…"


def no_reference(text: str) -> ConfigError | None:
    """The error for a name that looks like a file but is no reference to something in it; None for others."""
    if ".py" not in text or REFERENCE.fullmatch(text):
        return None
    return ConfigError("This is no file reference", expected="FILE.py:NAME, e.g. ./my_method.py:mymethod", got=text)


def note_file(module: str, origin: FileOrigin | None) -> None:
    """Keeps which file a module was made of; None forgets it."""
    if origin is None:
        _FILES.pop(module, None)
    else:
        _FILES[module] = origin


def file_of(thing: Any) -> FileOrigin | None:
    """The experiment's file that a class or function stands in, None if it stands in none."""
    return _FILES.get(thing.__module__)


def is_own(thing: Any) -> bool:
    """Whether a class or function belongs to Fedstrata itself."""
    return str(thing.__module__).partition(".")[0] == OWN_PACKAGE


def place_of(thing: Any) -> str:
    """Where a class or function comes from, in words: its name, and its file or its package."""
    name = f"{thing.__module__}.{thing.__qualname__}"
    origin = file_of(thing)
    if origin is not None:
        return f"{origin.path}:{thing.__qualname__}"
    dist = None if is_own(thing) else _distribution_of(thing)
    return name if dist is None else f"{name} ({dist[0]} {dist[1]})"


def origin_record(thing: Any) -> dict[str, str] | None:
    """What the run's record says about a class or function from outside; None for Fedstrata's own.

    Returns:
        `object`, and `file` with its `sha256`, or `distribution` and `version` with the `sha256` of the module; only
        the object where neither is known (a class written in a notebook).
    """
    if is_own(thing):
        return None
    origin = file_of(thing)
    if origin is not None:
        return {"object": thing.__qualname__, "file": origin.path.name, "sha256": origin.sha256}
    record = {"object": f"{thing.__module__}:{thing.__qualname__}"}
    dist = _distribution_of(thing)
    if dist is not None:
        record |= {"distribution": dist[0], "version": dist[1]}
    source = getattr(sys.modules.get(thing.__module__), "__file__", None)
    if source is not None and Path(source).is_file():
        record["sha256"] = hashlib.sha256(Path(source).read_bytes()).hexdigest()
    return record


def _distribution_of(thing: Any) -> tuple[str, str] | None:
    """Name and version of the installed package that a class or function belongs to."""
    top = str(thing.__module__).partition(".")[0]
    for group in metadata.entry_points().groups:
        for plug_in in plug_ins(group) if group.startswith(f"{OWN_PACKAGE}.") else ():
            if plug_in.target.partition(":")[0].partition(".")[0] == top:
                return plug_in.distribution, plug_in.version
    for name in metadata.packages_distributions().get(top, ()):  # a part without an entry point
        return name, metadata.version(name)
    return None

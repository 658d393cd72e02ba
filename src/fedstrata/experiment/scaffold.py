"""A package for a method of one's own, ready to be installed and tested."""

from __future__ import annotations

import keyword
import re
import sys
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

from fedstrata.errors import ConfigError
from fedstrata.method.registry import METHODS

_TEMPLATES = "fedstrata.examples.new_method"
_RESERVED = frozenset(("test", "tests", "src", "conftest", "setup", "con", "prn", "aux", "nul"))
"""What test runners, builders and file systems take for something else."""
_NAME = re.compile(r"[a-z][a-z0-9_]{1,39}")
_FILES = {
    "pyproject.toml.txt": "pyproject.toml",
    "README.md.txt": "README.md",
    "experiment.toml.txt": "experiment.toml",
    "method.py.txt": "src/{{name}}/__init__.py",
    "test.py.txt": "tests/test_{{name}}.py",
}


def write_method_package(name: str, folder: Path) -> list[Path]:
    """Writes a pip-installable folder with a method that composes parts, one part of its own, a test, an experiment.

    Args:
        name: The method's and the package's name.
        folder: Where to write; it must not exist, or be empty.

    Returns:
        The files, in the order in which one reads them.

    Raises:
        ConfigError: If the name cannot be a package's, is taken, or the folder holds something.
    """
    _check_name(name)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(
            f"{folder} is already there",
            expected="a new or empty folder; nothing is overwritten",
            do="choose another folder",
        )
    written = []
    try:
        for template, target in _FILES.items():
            text = resources.files(_TEMPLATES).joinpath(template).read_text("utf-8")
            path = folder / _filled(target, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_filled(text, name), encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise ConfigError("The package cannot be written", where=str(folder), got=error.strerror) from error
    return written


def _filled(text: str, name: str) -> str:
    return text.replace("{{name}}", name).replace("{{dist}}", name.replace("_", "-"))


def _is_installed(name: str) -> bool:
    """Whether a module of this name can be imported; a bare folder beside us is none."""
    spec = find_spec(name)
    return spec is not None and spec.origin is not None


def _check_name(name: str) -> None:
    if not _NAME.fullmatch(name) or name.endswith("_") or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        raise ConfigError(
            f'A method cannot be called "{name}"',
            expected="2 to 40 lower-case letters, digits and underscores, beginning with a letter, no Python keyword",
        )
    if name in sys.stdlib_module_names or name in _RESERVED or _is_installed(name):
        raise ConfigError(
            f'A package cannot be called "{name}"',
            got="a name that Python, the system or an installed package has taken",
            do="choose another name",
        )
    try:
        METHODS.find(name)
    except ConfigError:
        return
    raise ConfigError(f'There is a method "{name}" already', do="choose another name; `fedstrata methods` lists them")

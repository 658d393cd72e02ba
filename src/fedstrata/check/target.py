"""What is to be checked: a part or a method, from a file, an installed package, or Fedstrata itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedstrata.discovery import no_reference, plug_ins
from fedstrata.errors import ConfigError, did_you_mean
from fedstrata.experiment.plugins import KINDS, is_reference, load_method, load_object, load_part
from fedstrata.method.base import Method
from fedstrata.method.registry import GROUP, METHODS

METHOD = "method"


@dataclass(frozen=True)
class Target:
    """A part or a method with its options.

    Attributes:
        name: What it is called in the report.
        kind: `method`, or a key of `fedstrata.experiment.plugins.KINDS`.
        thing: The part or the method.
        options: What it was built with; device kinds and clients in it become those of the worlds.
    """

    name: str
    kind: str
    thing: Any
    options: Mapping[str, Any] = field(default_factory=dict)


def target_of(thing: Any) -> Target:
    """A part or a method that is at hand, for tests.

    Raises:
        ConfigError: If it is neither.
    """
    if isinstance(thing, Method):
        return Target("the method", METHOD, thing)
    for name, kind in KINDS.items():
        if isinstance(thing, kind.base):
            return Target(getattr(thing, "id", type(thing).__name__), name, thing, vars(thing))
    raise ConfigError(
        "This is neither a part nor a method", expected=f"a method, or a {', '.join(KINDS)}", got=f"{thing!r}"[:200]
    )


def find_target(
    text: str, *, kind: str | None = None, options: Mapping[str, Any] | None = None, base_dir: Path | None = None
) -> Target:
    """Finds what a user means.

    Args:
        text: `FILE.py:NAME`, the name of an installed part or method, or a built-in id.
        kind: What it is, where several kinds have that name.
        options: Its options.
        base_dir: Where a relative path starts; the current folder where left out.

    Raises:
        ConfigError: If there is none or several, it cannot be loaded, or its options are wrong.
    """
    options = dict(options or {})
    if "id" in options:
        raise ConfigError(
            "The id is not one of the options", got=f"id = {options['id']!r}", do=f"name it instead of {text}"
        )
    if kind is not None and kind not in (METHOD, *KINDS):
        raise ConfigError(f'There is no kind of part "{kind}"', do=did_you_mean(kind, (METHOD, *KINDS)))
    if is_reference(text):
        kind = _load(text, kind, base_dir or Path.cwd())
    elif kind is None:
        kind = _kind_of_name(text)
    if kind == METHOD:
        return Target(text, kind, METHODS.build(text, options), options)
    return Target(text, kind, KINDS[kind].registry.build({"id": text, **options}), options)


def _load(reference: str, kind: str | None, base_dir: Path) -> str:
    """Loads a file's part or method and says what it is."""
    thing = load_object(reference, base_dir)
    if kind is None:
        fits = [k for k, v in KINDS.items() if isinstance(thing, type) and issubclass(thing, v.base)]
        fits += [METHOD] if inspect.isfunction(thing) else []
        if not fits:
            raise ConfigError(
                f"{reference} is neither a part nor a method",
                expected="a class derived from Planner, Objective, Codec, Aggregator, Selector or ServerOptimizer, "
                "or a function that returns a Method",
                got=f"{thing!r}"[:200],
            )
        kind = fits[0]
    if kind == METHOD:
        load_method(reference, base_dir)
    else:
        load_part(kind, reference, base_dir)
    return kind


def _kind_of_name(name: str) -> str:
    found = [k for k, v in KINDS.items() if name in v.registry.names]
    plain = {n for e in METHODS.entries.values() for n in (e.name, *e.aliases)} | {p.name for p in plug_ins(GROUP)}
    found += [METHOD] if name in plain else []
    if len(found) > 1:
        raise ConfigError(
            f'Several kinds of parts are called "{name}"', got=", ".join(found), do=f"add --kind {found[0]}, say"
        )
    if not found and (wrong := no_reference(name)) is not None:
        raise wrong
    if not found:
        known = {n for v in KINDS.values() for n in v.registry.names} | plain
        raise ConfigError(f'There is no part or method "{name}"', do=did_you_mean(name, known))
    return found[0]

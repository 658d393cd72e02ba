"""A law, a trial of it, and what came of it."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, NoReturn, TypeAlias, TypeVar

import numpy as np

from fedstrata.core.rng import generator

S = TypeVar("S")
Status: TypeAlias = Literal["holds", "broken", "left out"]


class LawBroken(Exception):
    """A law does not hold in this trial; the text is the counterexample."""


class LeftOut(Exception):
    """The law does not apply to this part, or not in this world; the text says why."""


@dataclass
class Trial:
    """One world, drawn from named streams; the larger the index, the larger it is.

    Attributes:
        seed: Root of the streams.
        index: From 0.
        world: What the world is like, in lines for a counterexample.
    """

    seed: int
    index: int
    world: list[str] = field(default_factory=list)

    def rng(self, *path: str | int) -> np.random.Generator:
        """A named stream of this trial; the same in all laws."""
        return generator(self.seed, "check", self.index, *path)

    def note(self, line: str) -> None:
        """Adds a line to the description of the world."""
        self.world.append(line)

    def broken(self, *lines: str) -> NoReturn:
        """Ends the trial: the law does not hold, because of what the lines say."""
        raise LawBroken("\n".join(lines))

    def demand(self, holds: bool, *lines: str) -> None:
        """Ends the trial unless `holds`."""
        if not holds:
            self.broken(*lines)


@dataclass(frozen=True)
class Law(Generic[S]):
    """One sentence that must be true, and how to try it.

    Attributes:
        name: Short, unique in its battery.
        says: The sentence.
        check: Raises `LawBroken` with a counterexample, or `LeftOut`.
    """

    name: str
    says: str
    check: Callable[[S, Trial], None]


@dataclass(frozen=True)
class LawResult:
    """What came of a law.

    Attributes:
        name: The law's.
        says: Its sentence.
        status: `left out`: it does not apply.
        num_trials: In how many worlds it was tried.
        text: The counterexample, or why it was left out.
    """

    name: str
    says: str
    status: Status
    num_trials: int
    text: str = ""


@dataclass(frozen=True)
class CheckReport:
    """All laws of one part or method.

    Attributes:
        target: What was checked.
        kind: What it is.
        results: Law by law; for a method also those of its parts, whose names begin with the part's kind.
        seed: Root of the worlds.
    """

    target: str
    kind: str
    results: tuple[LawResult, ...]
    seed: int = 0

    @property
    def holds(self) -> bool:
        """Whether no law is broken."""
        return not self.broken

    @property
    def broken(self) -> tuple[LawResult, ...]:
        """The broken laws."""
        return tuple(r for r in self.results if r.status == "broken")

    def to_json(self) -> dict[str, Any]:
        """For scripts."""
        laws = [
            {"law": r.name, "says": r.says, "status": r.status, "num_trials": r.num_trials, "text": r.text}
            for r in self.results
        ]
        return {"target": self.target, "kind": self.kind, "seed": self.seed, "holds": self.holds, "laws": laws}


def try_laws(laws: Iterable[Law[S]], subject: S, *, trials: int, seed: int, prefix: str = "") -> tuple[LawResult, ...]:
    """Tries every law in growing worlds, and stops a law at its first counterexample.

    Args:
        laws: The battery.
        subject: What it is tried on.
        trials: Worlds per law.
        seed: Root of the worlds.
        prefix: Stands before the names of the laws.
    """
    return tuple(_try(law, subject, trials, seed, prefix) for law in laws)


def _try(law: Law[S], subject: S, trials: int, seed: int, prefix: str) -> LawResult:
    done, reason = 0, ""
    for index in range(trials):
        trial = Trial(seed, index)
        try:
            with np.errstate(all="ignore"):
                law.check(subject, trial)
            done += 1
        except LeftOut as why:
            reason = reason or str(why)
        except LawBroken as found:
            return LawResult(prefix + law.name, law.says, "broken", done + 1, _text(trial, str(found).splitlines()))
        except (Exception, SystemExit) as error:  # the part is somebody else's code and may raise anything
            lines = [f"it raised {type(error).__name__}: {error}", *_frames(error)]
            return LawResult(prefix + law.name, law.says, "broken", done + 1, _text(trial, lines))
    status: Status = "holds" if done else "left out"
    return LawResult(prefix + law.name, law.says, status, done, "" if done else reason)


def _text(trial: Trial, lines: Sequence[str]) -> str:
    return "\n".join([f"world {trial.index} of seed {trial.seed}:", *(f"  {line}" for line in (*trial.world, *lines))])


def _frames(error: BaseException) -> list[str]:
    """The innermost calls of an unexpected error."""
    frames = traceback.extract_tb(error.__traceback__)[-2:]
    return [f"at {Path(f.filename).name}:{f.lineno}, in {f.name}: {f.line}" for f in frames]

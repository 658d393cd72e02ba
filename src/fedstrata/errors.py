"""Every error that Fedstrata raises on purpose.

```
FedstrataError                 something a user can mend; shown without a traceback
├── ConfigError                the experiment file or a flag is wrong (all mistakes at once)
├── AssetError                 a model, a data set or a package is missing; names the command that brings it
├── DataError                  the data cannot be used as asked
├── ModelError                 the model cannot be loaded or its blocks cannot be found
├── PlanError                  a plan that cannot be carried out, found before anything is sent
├── PayloadError               bytes that are not what they should be
├── AggregationError           replies that cannot be merged
├── RoundError                 a round without enough good replies
├── EngineError                workers cannot be started
├── ClientError                a client's work failed (becomes a ClientFailure record)
└── RunFolderError             a run folder that is another run's, damaged, or cannot be written
```
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class FedstrataError(Exception):
    """Something a user can mend; the command line shows it without a traceback.

    Args:
        what: What went wrong, in words a user knows.
        expected: What would have been right.
        got: What was found instead.
        where: File, key, client or round.
        do: What to do now.
    """

    def __init__(
        self,
        what: str,
        *,
        expected: str | None = None,
        got: str | None = None,
        where: str | None = None,
        do: str | None = None,
    ) -> None:
        self.what, self.expected, self.got, self.where, self.do = what, expected, got, where, do
        lines = [what]
        for label, text in (("where", where), ("expected", expected), ("got", got), ("what to do", do)):
            if text:
                lines.append(f"  {label}: {text}")
        super().__init__("\n".join(lines))

    @property
    def one_line(self) -> str:
        """The message as one sentence, for lists of mistakes."""
        parts = [self.what.replace("\n  - ", "; ")]
        if self.where:
            parts.append(f"in {self.where}")
        parts.extend(f"{label} {text}" for label, text in (("expected", self.expected), ("got", self.got)) if text)
        return "; ".join([*parts, *([self.do] if self.do else [])])


class ConfigError(FedstrataError):
    """The experiment file or a flag is wrong; `problems` holds every mistake that was found."""

    def __init__(self, what: str, *, problems: Iterable[str] = (), **parts: str | None) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([what, *(f"  - {p}" for p in self.problems)]), **parts)


class AssetError(FedstrataError):
    """A model, a data set or a package is missing; the message names the command that brings it."""


class DataError(FedstrataError):
    """The data cannot be used as asked."""


class ModelError(FedstrataError):
    """The model cannot be loaded, or its blocks cannot be found."""


class PlanError(FedstrataError):
    """A plan that cannot be carried out; raised before anything is sent."""


class PayloadError(FedstrataError):
    """Bytes that are not what they should be: damaged, hostile, or of another layout."""


class AggregationError(FedstrataError):
    """Replies that cannot be merged."""


class RoundError(FedstrataError):
    """A round without enough good replies."""


class EngineError(FedstrataError):
    """Workers cannot be started."""


class ClientError(FedstrataError):
    """A client's work failed; the server records it as a `ClientFailure`."""


class RunFolderError(FedstrataError):
    """A run folder that belongs to another run, is damaged, or cannot be written."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """A hint that ends an error message: the nearest known name, then all of them.

    Example:
        >>> did_you_mean("fedvag", ["fedavg", "fedprox"])
        'did you mean "fedavg"? known: fedavg, fedprox'
    """
    names = sorted(set(known))
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    listing = f"known: {', '.join(names)}" if names else "there are none"
    return f'did you mean "{close[0]}"? {listing}' if close else listing

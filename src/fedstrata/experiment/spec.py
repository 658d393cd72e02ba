"""The experiment file: what to learn, and the pretend world that a simulation learns it in."""

# ruff: noqa: E501

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from fedstrata.data.config import DataConfig, PartitionConfig, TaskConfig
from fedstrata.train.config import AdapterConfig, ModelConfig, TrainConfig

PartConfig = dict[str, Any] | str


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MethodConfig(BaseModel):
    """`[method]`: a published method by name; its options stand beside the name."""

    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(default="fedavg", description="Name or alias; `fedstrata methods` lists them.")

    @property
    def options(self) -> dict[str, Any]:
        """Everything beside the name."""
        return dict(self.model_extra or {})


class CodecConfig(_Table):
    """`[codec]`: how tensors become bytes, in each direction."""

    uplink: PartConfig | None = Field(
        default=None,
        description='Codec of replies, e.g. { id = "int8", block = 256 }; the method\'s own where left out.',
    )
    downlink: PartConfig = Field(default="float32", description="Codec of tasks.")
    send: Literal["delta", "weights"] | None = Field(
        default=None, description="Whether clients send differences or values; the method's own where left out."
    )


class RoundsConfig(_Table):
    """`[rounds]`: how many, with whom, and when to stop."""

    count: int = Field(default=8, ge=1, description="Rounds.")
    clients_per_round: int | None = Field(
        default=None, ge=1, description="Clients drawn per round; everyone where left out."
    )
    min_replies: int = Field(default=1, ge=1, description="Good replies needed to make a round; fewer is an error.")
    downlink: Literal["full", "changed"] = Field(
        default="full",
        description='"full" sends every tensor the plan needs; "changed" leaves out what the client holds.',
    )
    patience: int | None = Field(
        default=None, ge=1, description="Stop after this many evaluations without a better validation metric."
    )
    target: float | None = Field(default=None, description="Stop once the validation metric reaches this.")


class EvalConfig(_Table):
    """`[eval]`: the validation that selects, and the test that is read once."""

    metric: Literal["accuracy", "loss"] = Field(default="accuracy", description="Metric that selects the best round.")
    every: int = Field(default=1, ge=1, description="Validate after every so many rounds.")
    on: Literal["server", "clients"] = Field(
        default="server",
        description="Who owns the validation examples: the server, or the clients (sums and counts only).",
    )
    batch_size: int = Field(default=32, ge=1, description="Examples per forward pass.")


class RunConfig(_Table):
    """`[run]`: seed and what is kept."""

    seed: int = Field(default=0, ge=0, description="Root of all named random streams.")
    keep: Literal["best", "last"] | None = Field(
        default=None,
        description='Which state `adapter/` holds: "best" by validation, or "last"; best where there is a validation set.',
    )
    last_k: int = Field(default=3, ge=1, description="Rounds in the mean of the last validations.")


class ComputeConfig(_Table):
    """`[compute]`: part of the spec because results depend on it."""

    threads_per_client: int = Field(
        default=1,
        ge=1,
        le=256,
        description="CPU threads for training and evaluating; results are equal only at equal threads.",
    )
    reuse: Literal["auto", "off", "always"] = Field(
        default="auto",
        description='Compute what enters a client\'s lowest trained block once per example: "auto" where examples are visited often enough; changes results by rounding.',
    )
    reuse_memory_bytes: int = Field(
        default=1 << 29,
        ge=0,
        description="What a process may keep of that; a client that needs more does without.",
    )


class RecordConfig(_Table):
    """`[record]`: optional measurements."""

    exactness: bool = Field(
        default=True, description="Log how far the merged product is from the mean of the clients' products."
    )
    exactness_values: int = Field(
        default=1 << 26, ge=0, description="Memory for it, in numbers; beyond it null is logged."
    )


class SimulationConfig(_Table):
    """`[simulation]`: the pretend world; a real federation ignores it and says so."""

    devices: dict[str, int] = Field(
        default_factory=lambda: {"laptop-16gb": 4},
        description="How many clients of each device kind, in ascending client id.",
    )
    partition: PartitionConfig = Field(
        default_factory=PartitionConfig, description="How pooled examples are spread over the clients."
    )


class ExperimentSpec(_Table):
    """A whole experiment. Every key has a default; `fedstrata init --full` writes them all."""

    name: str = Field(
        default="experiment",
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="Name of the run folder; the file's own name where left out.",
    )
    model: ModelConfig = Field(default_factory=ModelConfig)
    data: DataConfig = Field(default_factory=DataConfig)
    task: TaskConfig = Field(default_factory=TaskConfig)
    adapter: AdapterConfig = Field(default_factory=AdapterConfig)
    method: MethodConfig = Field(default_factory=MethodConfig)
    plan: PartConfig | None = Field(default=None, description="Another planner, where the method leaves it open.")
    objective: PartConfig | None = Field(
        default=None, description="Another objective, where the method leaves it open."
    )
    aggregate: PartConfig | None = Field(
        default=None, description="Another aggregator, where the method leaves it open."
    )
    select: PartConfig | None = Field(default=None, description="Another selector, where the method leaves it open.")
    optimize: PartConfig | None = Field(
        default=None, description="A server optimizer, where the method's mean keeps its coordinates."
    )
    codec: CodecConfig = Field(default_factory=CodecConfig)
    rounds: RoundsConfig = Field(default_factory=RoundsConfig)
    train: TrainConfig = Field(default_factory=TrainConfig)
    eval: EvalConfig = Field(default_factory=EvalConfig)
    run: RunConfig = Field(default_factory=RunConfig)
    compute: ComputeConfig = Field(default_factory=ComputeConfig)
    record: RecordConfig = Field(default_factory=RecordConfig)
    simulation: SimulationConfig = Field(default_factory=SimulationConfig)

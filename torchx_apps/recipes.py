"""Built-in recipes: every public function here that returns a Job is one, by its own name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where the rows come from.

    Attributes:
        name: a data set known by name.
        path: folder of parquet files, in place of a name.
    """

    name: Literal["planted", "checkerboard"] = "planted"
    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The towers.

    Attributes:
        embedding_dim: D, width of every tower's output.
        layers: widths of the hidden layers.
    """

    embedding_dim: int = 64
    layers: tuple[int, ...] = (128, 64)


@dataclass(frozen=True, kw_only=True)
class LoaderConfig:
    """How batches are cut.

    Attributes:
        batch_size: B, rows per rank and step.
    """

    batch_size: int = 1024

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise ValueError(f"batch_size is {self.batch_size}; it must be at least 1")


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """How parameters move.

    Attributes:
        learning_rate: step size of the dense optimizer.
    """

    learning_rate: float = 1e-3


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """How tables are sharded."""

    path: str | None = None


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long to train.

    Attributes:
        epochs: passes over the data.
        shuffle: draw rows in a new order each epoch.
    """

    epochs: int = 1
    shuffle: bool = True


@dataclass(frozen=True, kw_only=True)
class Job:
    """All that one training needs."""

    name: str
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    loader: LoaderConfig = field(default_factory=LoaderConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    build: Callable[[Job], object] = lambda job: None


def two_tower() -> Job:
    """A query tower and a candidate tower under a dot product."""
    return Job(name="two_tower")

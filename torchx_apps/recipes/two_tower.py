"""The recipes two_tower and retrieval: a user tower and an item tower, under a top NN or a dot product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.modules.config import (
    LOSSES,
    Activation,
    Interaction,
    LossName,
    Normalization,
    check_hardest,
    check_loss,
)
from torchrec_ext.schema.validation import OutOfRange
from torchrec_ext.train.config import TrainConfig
from torchx_apps.tasks.job import Job

if TYPE_CHECKING:
    from torchrec_ext.data.prepared import Prepared
    from torchrec_ext.models.tower_model import TowerModel
    from torchrec_ext.modules.tower import Tower


@dataclass(frozen=True, kw_only=True)
class TowersConfig:
    """Settings of all recipes with towers.

    Args:
        embedding_dim: columns of every table.
        tower_widths: widths of each tower's MLP, the last is D, what the interaction sees; where there is none, a
            tower's output is its concatenated embeddings.
        interaction: ``top_nn`` (concatenation, MLP, logit), ``dot``, or another of :func:`interaction_layer`.
        top_widths: hidden widths of the interaction.
        activation: activation between layers.
        normalization: normalisation before each activation.
        dropout: share of values dropped after each activation.
        loss: ``bce`` over labels or the loader's negatives; ``bpr`` or ``sampled_softmax``, which compare a positive
            with its own negatives; or, for ``loader.negatives=0`` and the interactions ``dot`` and ``cosine``,
            ``in_batch``, a softmax over the candidates of the batch, or ``catalogue``, over all items, whose tower
            then runs for every item in every step.
        temperature: divisor of the scores under the softmax losses and ``cosine``.
        hardest: number of negatives of a row that count under ``in_batch``, those with the greatest scores; 0 for all.
        out_of_range: what happens to an id outside its table: ``error``, or ``oov``, which reads row 0.
    """

    embedding_dim: int = 32
    tower_widths: tuple[int, ...] = (64,)
    interaction: Interaction = "top_nn"
    top_widths: tuple[int, ...] = (128, 64)
    activation: Activation = "relu"
    normalization: Normalization = "none"
    dropout: float = 0.0
    loss: LossName = "bce"
    temperature: float = 1.0
    hardest: int = 0
    out_of_range: OutOfRange = "error"

    def __post_init__(self) -> None:
        check_loss(self.loss, self.interaction, self.temperature)
        check_hardest("model.hardest", self.hardest, self.loss)


@dataclass(frozen=True, kw_only=True)
class TwoTowerConfig(TowersConfig):
    """The towers of the recipes ``two_tower`` and ``retrieval``; see :class:`TowersConfig` for further settings.

    Args:
        without: columns that the towers do not read.
    """

    without: tuple[str, ...] = ()


def two_tower_job() -> Job:
    """User features -> NN_user, item features -> NN_item, both -> top NN."""
    return Job(
        name="two_tower",
        build=build_two_tower,
        model=TwoTowerConfig(),
        data=DataConfig(history_length=20),
        optimizer=OptimizerConfig(tables_lr=0.25, dense_lr=2e-3),
        train=TrainConfig(epochs=10, eval_every=2),
    )


def retrieval() -> Job:
    """User and item towers under a softmax over the batch, ranked by dot product.

    A user is represented by the items that he or she has taken: without a vector for each user the towers fit the
    training rows less and rank held-out items better, and new users need no training.
    """
    return Job(
        name="retrieval",
        build=build_two_tower,
        model=TwoTowerConfig(
            embedding_dim=64,
            tower_widths=(128, 64),
            without=("user_id",),
            interaction="dot",
            dropout=0.2,
            loss="in_batch",
        ),
        data=DataConfig(history_length=64),
        loader=LoaderConfig(batch_size=1024, negatives=0),
        optimizer=OptimizerConfig(tables_lr=0.05, dense_lr=2e-3),
        train=TrainConfig(epochs=16, eval_every=4),
    )


def build_two_tower(config: TwoTowerConfig, data: Prepared) -> TowerModel:
    """Builds a tower over the item's columns and one over all others; ids and lists have tables, the rest is dense."""
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

    columns = (*data.features, *data.dense)
    unknown = sorted(set(config.without) - set(columns))
    if unknown:
        raise ValueError(
            f"model.without names {unknown}, which '{data.name}' does not have; it has {sorted(columns)}"
        )
    towers = {}
    for tower in ("user", "item"):
        mine = [
            name
            for name in columns
            if name not in config.without and (name in data.items) == (tower == "item")
        ]
        if not mine:
            raise ValueError(
                f"model.without={config.without}: leaves no column to the tower of the {tower}; add columns or "
                "histories, or write --model.without and no name"
            )
        tables = [
            EmbeddingBagConfig(
                name=name,
                feature_names=[name],
                num_embeddings=data.vocab[name],
                embedding_dim=config.embedding_dim,
                pooling=PoolingType.MEAN,
            )
            for name in mine
            if name in data.features
        ]
        dense = [name for name in mine if name in data.dense]
        towers[tower] = tower_of(config, tables, dense)
    # The user's tower runs once for a positive and its negatives; under a softmax over the
    # batch no two rows share a user.
    shared = () if LOSSES[config.loss].shared else ("user",)
    return model_of(config, towers, data, shared=shared)


def tower_of(
    config: TowersConfig, tables: Sequence[Any], dense: Sequence[str]
) -> Tower:
    """Builds a tower over some tables and dense columns."""
    from torchrec_ext.modules.tower import Tower

    return Tower(
        tables,
        config.tower_widths,
        dense=dense,
        activation=config.activation,
        normalization=config.normalization,
        dropout=config.dropout,
    )


def model_of(
    config: TowersConfig,
    towers: Mapping[str, Tower],
    data: Prepared,
    *,
    item: str = "item_id",
    shared: Sequence[str] = (),
) -> TowerModel:
    """Builds the interaction over towers and the loss, the tables on the meta device.

    Args:
        config: settings of interaction and loss.
        towers: the towers by name, the item's last.
        data: the training rows, whose counts of items correct a softmax over the batch.
        item: column of the items.
        shared: towers that run once for the rows that share their input.
    """
    import torch

    from torchrec_ext.models.retrieval import RetrievalModel
    from torchrec_ext.models.tower_model import TowerModel
    from torchrec_ext.modules.interaction import interaction_layer
    from torchrec_ext.modules.losses import row_loss

    top = interaction_layer(
        config.interaction,
        [tower.out_features for tower in towers.values()],
        config.top_widths,
        activation=config.activation,
        normalization=config.normalization,
        dropout=config.dropout,
        activate_input=bool(config.tower_widths),
        temperature=config.temperature,
    )
    meta = torch.device("meta")
    kind = LOSSES[config.loss]
    if not kind.shared:
        # A cosine has divided by the temperature already.
        temperature = 1.0 if top.temperature else config.temperature
        loss = row_loss(config.loss, temperature=temperature)
        return TowerModel(towers, top, loss=loss, shared=shared, device=meta)
    counts = None
    if kind.in_batch:
        counts = torch.from_numpy(data.popularity)
    return RetrievalModel(
        towers,
        top,
        counts=counts,
        item_feature=item,
        temperature=config.temperature,
        loss=config.loss,
        hardest=config.hardest,
        device=meta,
    )

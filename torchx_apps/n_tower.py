"""The recipe n_tower: user, item and context, a tower for each, and a network over the three."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from torchrec_ext.data.labelled import LabelledConfig, LabelledData
from torchrec_ext.data.loader import LoaderConfig
from torchrec_ext.distributed.optimizers import OptimizerConfig
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction_choice import Interaction, interaction_layer
from torchrec_ext.modules.layers import Activation, Normalization
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import OutOfRange
from torchrec_ext.train.loop import TrainConfig
from torchrec_ext.train.schedule import Schedule
from torchx_apps.job import Job
from torchx_apps.labelled import labelled_task


@dataclass(frozen=True, kw_only=True)
class NTowerConfig:
    """The towers of the recipe ``n_tower``.

    Args:
        embedding_dim: columns of every table.
        embedding_std: standard deviation of the tables' first values.
        tower_widths: widths of each tower's MLP; none: a tower's output is its embeddings side by side.
        interaction: over the towers' outputs, see :func:`interaction_layer`.
        top_widths: hidden widths of the interaction.
        activation: between layers.
        normalization: before each activation.
        dropout: after each activation.
        out_of_range: what an id outside its table does: ``error``, or ``oov`` for row 0.
    """

    embedding_dim: int = 8
    embedding_std: float = 0.01
    tower_widths: tuple[int, ...] = ()
    interaction: Interaction = "dcn"
    top_widths: tuple[int, ...] = (128, 64)
    activation: Activation = "relu"
    normalization: Normalization = "batch"
    dropout: float = 0.2
    out_of_range: OutOfRange = "error"


def n_tower() -> Job:
    """Three towers, user, item and context, and a deep cross network over them; Frappe, rows with labels."""
    return Job(
        name="n_tower",
        build=build_n_tower,
        model=NTowerConfig(),
        data=LabelledConfig(),
        task=labelled_task,
        loader=LoaderConfig(negatives=0, label="label"),
        # l2 keeps the tables from learning rare ids by heart. After batch normalisation their scale is free, so little hangs on it.
        optimizer=OptimizerConfig(tables="adam", tables_lr=1e-3, dense_lr=1e-3, tables_l2=0.05),
        train=TrainConfig(epochs=12, tables_schedule=Schedule(kind="cosine"), dense_schedule=Schedule(kind="cosine")),
    )


def build_n_tower(config: NTowerConfig, data: LabelledData) -> TowerModel:
    """One tower for each of user, item and, where there is any, context."""
    sides: dict[str, tuple[Sequence[str], Sequence[str]]] = {"user": (("user_id",), ()), "item": (("item_id",), ())}
    if data.context:
        sides["context"] = (data.context, data.dense)
    towers = {
        name: Tower(
            [_table(feature, data.vocab[feature], config) for feature in features],
            config.tower_widths,
            dense=dense,
            activation=config.activation,
            normalization=config.normalization,
            dropout=config.dropout,
            device=torch.device("meta"),
        )
        for name, (features, dense) in sides.items()
    }
    top = interaction_layer(
        config.interaction,
        [tower.out_features for tower in towers.values()],
        config.top_widths,
        activation=config.activation,
        normalization=config.normalization,
        dropout=config.dropout,
    )
    return TowerModel(towers, top)


def _table(feature: str, rows: int, config: NTowerConfig) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=feature,
        feature_names=[feature],
        num_embeddings=rows,
        embedding_dim=config.embedding_dim,
        pooling=PoolingType.MEAN,
        init_fn=partial(torch.nn.init.normal_, std=config.embedding_std),
    )

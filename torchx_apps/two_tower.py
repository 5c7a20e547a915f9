"""The recipe two_tower: user features -> NN_user, item features -> NN_item, both -> top NN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from torchrec_ext.data.datasets import DataConfig
from torchrec_ext.data.interactions import InteractionData
from torchrec_ext.distributed.optimizers import OptimizerConfig
from torchrec_ext.models.tower_model import Interaction, TowerModel
from torchrec_ext.models.tower_model import two_tower as make_two_tower
from torchrec_ext.modules.tower import Activation
from torchrec_ext.schema import OutOfRange
from torchrec_ext.train.loop import TrainConfig
from torchx_apps.job import Job


@dataclass(frozen=True, kw_only=True)
class TwoTowerConfig:
    """The towers of the recipe ``two_tower``.

    Args:
        embedding_dim: columns of every table.
        tower_widths: widths of each tower's MLP; the last is D, what the interaction sees.
        interaction: ``top_nn`` (concatenation, MLP, logit) or ``dot``.
        top_widths: hidden widths of the top NN.
        activation: between layers.
        dropout: after each activation.
        share_user: run the user tower once for a positive and its negatives; the result is the same.
        out_of_range: what an id outside its table does: ``error``, or ``oov`` for row 0.
    """

    embedding_dim: int = 32
    tower_widths: tuple[int, ...] = (64,)
    interaction: Interaction = "top_nn"
    top_widths: tuple[int, ...] = (128, 64)
    activation: Activation = "relu"
    dropout: float = 0.0
    share_user: bool = True
    out_of_range: OutOfRange = "error"


def two_tower() -> Job:
    """User features -> NN_user, item features -> NN_item, both -> top NN; MovieLens 100K."""
    return Job(
        name="two_tower",
        build=build_two_tower,
        model=TwoTowerConfig(),
        data=DataConfig(history_length=20),
        optimizer=OptimizerConfig(tables_lr=0.25, dense_lr=2e-3),
        train=TrainConfig(epochs=10, eval_every=2),
    )


USER_FEATURES = ("user_id", "gender", "occupation", "zip_prefix", "history")
ITEM_FEATURES = ("item_id", "release_year", "genres")


def build_two_tower(config: TwoTowerConfig, data: InteractionData) -> TowerModel:
    """The towers over the features that MovieLens and the generated sets have."""

    def tables(features: tuple[str, ...]) -> list[EmbeddingBagConfig]:
        return [
            EmbeddingBagConfig(
                name=feature,
                feature_names=[feature],
                num_embeddings=data.vocab[feature],
                embedding_dim=config.embedding_dim,
                pooling=PoolingType.MEAN,
            )
            for feature in features
        ]

    return make_two_tower(
        tables(USER_FEATURES),
        tables(ITEM_FEATURES),
        user_dense=data.dense,
        tower_widths=config.tower_widths,
        interaction=config.interaction,
        top_widths=config.top_widths,
        activation=config.activation,
        dropout=config.dropout,
        shared=("user",) if config.share_user else (),
        device=torch.device("meta"),
    )

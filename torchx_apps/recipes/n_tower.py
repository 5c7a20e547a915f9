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
from torchx_apps.grouping import check_towers, compression_of, features_by_tower
from torchx_apps.job import Job
from torchx_apps.labelled import labelled_task


@dataclass(frozen=True, kw_only=True)
class NTowerConfig:
    """The towers of the recipe ``n_tower``.

    Args:
        embedding_dim: columns of every table.
        embedding_std: standard deviation of the tables' first values.
        tower_widths: widths of each tower's MLP; none: a tower's output is its embeddings side by side.
        towers: user, item and context where empty; a number: so many towers, in which features stand together that have most to do
            with one another, see :func:`features_by_tower`; or the features, as ``user_id+homework,item_id+daytime``.
        towers_from: of a number of towers, safetensors of a trained model of these tables (``torchx_apps.publish``), by whose
            vectors features are near; by their ids alone where empty.
        towers_bound: of a number of towers, MiB of the tables of one; 1.1 times an even share where 0.
        compress: what a tower's embeddings are compressed to before its MLP or, without one, before they leave its ranks: settings
            of a :class:`Compression`, as ``dim=16,flat=2``; nothing where empty.
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
    towers: str = ""
    towers_from: str = ""
    towers_bound: float = 0.0
    compress: str = ""
    interaction: Interaction = "dcn"
    top_widths: tuple[int, ...] = (128, 64)
    activation: Activation = "relu"
    normalization: Normalization = "batch"
    dropout: float = 0.2
    out_of_range: OutOfRange = "error"

    def __post_init__(self) -> None:
        compression_of(self.compress)
        check_towers(self.towers)
        if not self.towers.isdecimal() and (self.towers_from or self.towers_bound):
            raise ValueError(
                f"model.towers_from and model.towers_bound are of a number of towers; model.towers={self.towers!r} is none"
            )


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
    """One tower for each of user, item and, where there is any, context; or those that ``config.towers`` asks for."""
    towers = {
        name: Tower(
            [_table(feature, data.vocab[feature], config) for feature in features],
            config.tower_widths,
            dense=dense,
            activation=config.activation,
            normalization=config.normalization,
            dropout=config.dropout,
            compress=compression_of(config.compress),
            device=torch.device("meta"),
        )
        for name, (features, dense) in _sides(config, data).items()
    }
    top = interaction_layer(
        config.interaction,
        [tower.out_features for tower in towers.values()],
        config.top_widths,
        activation=config.activation,
        normalization=config.normalization,
        dropout=config.dropout,
        activate_input=bool(config.tower_widths),
    )
    return TowerModel(towers, top)


def _sides(config: NTowerConfig, data: LabelledData) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
    """By tower its features and its dense columns."""
    if not config.towers:
        usual: dict[str, tuple[Sequence[str], Sequence[str]]] = {"user": (("user_id",), ()), "item": (("item_id",), ())}
        return {**usual, "context": (data.context, data.dense)} if data.context else usual
    features = ["user_id", "item_id", *data.context]
    sizes = {name: 4.0 * data.vocab[name] * config.embedding_dim for name in features}
    found = features_by_tower(
        config.towers, features, data.train, sizes, trained=config.towers_from, bound=config.towers_bound * 2**20
    )
    least = min(found, key=lambda tower: sum(sizes[name] for name in found[tower]))  # has room for what has no table
    return {tower: (names, data.dense if tower == least else ()) for tower, names in found.items()}


def _table(feature: str, rows: int, config: NTowerConfig) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=feature,
        feature_names=[feature],
        num_embeddings=rows,
        embedding_dim=config.embedding_dim,
        pooling=PoolingType.MEAN,
        init_fn=partial(torch.nn.init.normal_, std=config.embedding_std),
    )

"""The recipes n_tower, stream and multi_task: a tower for user, item and context each, and a network over the three.

``n_tower`` holds its rows in memory; ``stream`` reads what rec.data.preprocess wrote, of any size, while it trains, and
so does ``multi_task``, which learns several labels of a row together.
Keys of the recipes say which columns are in which tower.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.modules.config import (
    LOSSES,
    Interaction,
    Normalization,
)
from torchrec_ext.schema.validation import listed
from torchrec_ext.train.config import Schedule, TrainConfig
from torchx_apps.recipes.two_tower import TowersConfig, model_of, tower_of
from torchx_apps.tasks.job import Job
from torchx_apps.tasks.loading import labelled_task

if TYPE_CHECKING:
    from torchrec_ext.data.prepared import Prepared
    from torchrec_ext.models.multi_task import MultiTaskModel
    from torchrec_ext.models.tower_model import TowerModel
    from torchrec_ext.modules.tower import Tower


def columns_by_name(
    towers: Mapping[str, Sequence[str]], features: Sequence[str], dense: Sequence[str]
) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
    """Returns the names of each tower's features and of its dense columns, by tower.

    Args:
        towers: names of each tower's columns, by tower; see ``model.towers``.
        features: names of all features.
        dense: names of all dense columns.

    Raises:
        ValueError: a name is that of no column, or a column is in two towers, or in none.
    """
    columns = [*features, *dense]
    counts = Counter(name for names in towers.values() for name in names)
    for name in [*counts, *columns]:
        if name not in columns or counts[name] != 1:
            place = f"in {counts[name]} towers" if name in columns else "no column"
            raise ValueError(
                f"model.towers: '{name}' is {place}; name each column in one tower: {listed(columns)}"
            )
    found: dict[str, tuple[Sequence[str], Sequence[str]]] = {}
    for tower, names in towers.items():
        mine = [name for name in columns if name in names]
        numbers = [name for name in mine if name in dense]
        found[tower] = ([name for name in mine if name not in dense], numbers)
    return found


@dataclass(frozen=True, kw_only=True)
class NTowerConfig(TowersConfig):
    """The towers of the recipes ``n_tower`` and ``stream``; see :class:`TowersConfig` for further settings.

    Args:
        embedding_std: standard deviation of the tables' initial values.
        towers: the columns of each tower, as in ``--model.towers.user user_id age --model.towers.item item_id price``,
            the item's tower last; user, item and context where empty. Where empty, an interaction that takes two
            towers, such as ``dot``, gets the context as part of the user's.
    """

    embedding_dim: int = 8
    embedding_std: float = 0.01
    tower_widths: tuple[int, ...] = ()
    towers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    interaction: Interaction = "dcn"
    normalization: Normalization = "batch"
    dropout: float = 0.2


def n_tower() -> Job:
    """Three towers, user, item and context, and a deep cross network over them; rows with labels."""
    return Job(
        name="n_tower",
        build=build_n_tower,
        model=NTowerConfig(),
        data=DataConfig(ranked=0),
        task=labelled_task,
        loader=LoaderConfig(negatives=0),
        # tables_l2 keeps the tables from memorising rare ids; its exact value matters
        # little, since batch normalisation removes the tables' scale.
        optimizer=OptimizerConfig(
            tables="adam", tables_lr=1e-3, dense_lr=1e-3, tables_l2=0.05
        ),
        train=TrainConfig(
            epochs=12,
            schedule=Schedule(kind="cosine"),
        ),
    )


def stream_job() -> Job:
    """Towers over the rows that rec.data.preprocess wrote, of any size, read while they train; generated rows alone."""
    return Job(
        name="stream",
        build=build_n_tower,
        model=NTowerConfig(
            embedding_dim=16, tower_widths=(64, 32), top_widths=(64,), dropout=0.0
        ),
        data=DataConfig(),
        task=labelled_task,
        loader=LoaderConfig(batch_size=4096, negatives=0),
        optimizer=OptimizerConfig(
            tables="row_wise_adagrad", tables_lr=0.05, dense="adam", dense_lr=1e-3
        ),
        train=TrainConfig(epochs=1),
    )


def build_n_tower(config: NTowerConfig, data: Prepared) -> TowerModel:
    """Builds a tower for user, item and, if there is any, context; or the towers of ``config.towers``."""
    towers = _towers(config, data)
    item = "item_id"
    if LOSSES[config.loss].shared:
        item = _item_of(config, data, towers)
    return model_of(config, towers, data, item=item)


def _item_of(config: NTowerConfig, data: Prepared, towers: Mapping[str, Tower]) -> str:
    """Returns the item column; the last tower must read it for a loss that compares items."""
    from torchx_apps.tasks.export_data import tower_columns

    item = data.roles.item
    *_, last = towers
    if item is None:
        raise ValueError(
            f"model.loss={config.loss}: the preprocessing of '{data.name}' names no item; name its column in the "
            "preprocessing recipe, Prepare(item=...), or set model.loss=bce"
        )
    columns = tower_columns(towers[last])
    if item not in columns:
        raise ValueError(
            f"model.loss={config.loss} with model.towers: the last tower, '{last}', must read the "
            f"items, column '{item}', and the other one what is asked for them"
        )
    features, dense = data.towers["item"]
    others = sorted({*columns} - {*features, *dense})
    if others and LOSSES[config.loss].catalogue:
        raise ValueError(
            f"model.loss={config.loss} with model.towers: the last tower, '{last}', reads column "
            f"'{others[0]}', which is not the item's, so that the catalogue has no value of it; leave model.towers out"
        )
    return item


def _towers(config: NTowerConfig, data: Prepared) -> dict[str, Tower]:
    return {
        name: tower_of(config, tables_of_features(config, data, features), dense)
        for name, (features, dense) in _columns_by_tower(config, data).items()
    }


@dataclass(frozen=True, kw_only=True)
class MultiTaskConfig(NTowerConfig):
    """The towers and tasks of the recipe ``multi_task``; its interaction is a top NN with a head for each task.

    Args:
        weights: weight of a task's loss, by task, as in ``--model.weights.conversion 0.5``; 1 for a task that is not
            named.
    """

    interaction: Interaction = "top_nn"
    weights: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.interaction != "top_nn":
            raise ValueError(
                f"model.interaction={self.interaction}: several tasks share the hidden layers of top_nn; leave it out"
            )
        if self.loss != "bce":
            raise ValueError(
                f"model.loss={self.loss}: each task is learned by its label of a row; take model.loss=bce"
            )


def multi_task() -> Job:
    """Clicks and conversions together, by towers with a head for each label; a log of any size, or generated rows."""
    return Job(
        name="multi_task",
        build=build_multi_task,
        model=MultiTaskConfig(
            embedding_dim=16,
            embedding_std=0.1,
            tower_widths=(64, 32),
            top_widths=(64,),
            normalization="none",
            dropout=0.0,
        ),
        data=DataConfig(),
        task=labelled_task,
        # What user and item tell together needs some hundred steps; with millions of
        # rows one epoch of large batches.
        loader=LoaderConfig(batch_size=256, negatives=0),
        optimizer=OptimizerConfig(
            tables="row_wise_adagrad", tables_lr=0.05, dense="adam", dense_lr=3e-3
        ),
        train=TrainConfig(epochs=3),
    )


def build_multi_task(config: MultiTaskConfig, data: Prepared) -> MultiTaskModel:
    """Builds the towers of ``stream`` and a head for each label of the preprocessing, in its order.

    Raises:
        ValueError: the rows have one label, or a task is named that they have no label of.
    """
    import torch

    from torchrec_ext.models.multi_task import MultiTaskModel, MultiTaskTop

    labels = [data.roles.label, *data.roles.tasks]
    weights = config.weights
    if len(labels) < 2:
        raise ValueError(
            f"data.name={data.name}: its preprocessing names one label, '{labels[0]}'; name more, as "
            "Prepare(label='click', tasks=('conversion',)), or take --recipe stream"
        )
    for name in weights:
        if name not in labels:
            raise ValueError(
                f"model.weights={name}: the rows of '{data.name}' have no such label; their labels are {listed(labels)}"
            )
    towers = _towers(config, data)
    top = MultiTaskTop(
        [tower.out_features for tower in towers.values()],
        len(labels),
        config.top_widths,
        activation=config.activation,
        normalization=config.normalization,
        dropout=config.dropout,
    )
    return MultiTaskModel(
        towers,
        top,
        tasks={name: weights.get(name, 1.0) for name in labels},
        device=torch.device("meta"),
    )


def _columns_by_tower(
    config: NTowerConfig, data: Prepared
) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
    """Returns the names of each tower's features and of its dense columns, by tower."""
    from torchrec_ext.modules.interaction import INTERACTIONS

    if config.towers:
        return columns_by_name(config.towers, data.features, data.dense)
    towers = data.towers
    takes_two = INTERACTIONS[config.interaction].towers == 2
    if not takes_two or not {"context", "item"} <= towers.keys():
        return towers
    user, user_dense = towers.get("user", ((), ()))
    context, dense = towers["context"]
    return {
        "user": ((*user, *context), (*user_dense, *dense)),
        "item": towers["item"],
    }


def tables_of_features(
    config: Any,
    data: Prepared,
    features: Sequence[str],
    *,
    bags: bool = True,
    own_tables: Collection[str] = (),
) -> list[Any]:
    """Declares the tables of a tower's features; tables of one name in several towers are one table.

    Args:
        config: a model's settings with ``embedding_dim`` and ``embedding_std``.
        data: data with the table of each feature.
        features: names of the features.
        bags: whether a row's vectors are averaged; otherwise each vector of a sequence stays.
        own_tables: tables that each of these features has for itself.
    """
    import torch
    from torchrec.modules.embedding_configs import (
        EmbeddingBagConfig,
        EmbeddingConfig,
        PoolingType,
    )

    kind: Any = (
        partial(EmbeddingBagConfig, pooling=PoolingType.MEAN)
        if bags
        else EmbeddingConfig
    )
    readers: dict[str, list[str]] = {}
    for feature in features:
        table = data.tables[feature]
        if table in own_tables:
            table = f"{table}_{feature}"
        readers.setdefault(table, []).append(feature)
    configs = []
    for name, names in readers.items():
        table_config = kind(
            name=name,
            feature_names=names,
            num_embeddings=data.vocab[names[0]],
            embedding_dim=config.embedding_dim,
            init_fn=partial(torch.nn.init.normal_, std=config.embedding_std),
        )
        configs.append(table_config)
    return configs

"""The recipe n_tower: a tower for user, item and context each, and a network over the three.

Keys of the recipe say which features are in which tower, and how a tower's output is compressed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.datasets.labelled import LabelledConfig, LabelledData
from torchrec_ext.data.loader.loader import LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.models.partition import affinity, id_vectors, partition
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.compression import Compression
from torchrec_ext.modules.interaction import Interaction, interaction_layer
from torchrec_ext.modules.layers import Activation, Normalization
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import OutOfRange
from torchrec_ext.train.config import Schedule
from torchrec_ext.train.loop import TrainConfig
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.tasks.job import Job
from torchx_apps.tasks.labelled import labelled_task

ROWS = 4096  # number of rows from which affinities are computed


def compression_of(text: str) -> Compression | None:
    """Parses ``model.compress``, settings of a :class:`Compression` such as ``dim=16,flat=2``; None for an empty text.

    Example:
        >>> compression_of("kind=cross,dim=8,per_feature=1")
        Compression(kind='cross', dim=8, per_feature=1, flat=1, layers=1)
        >>> compression_of("dims=8")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: model.compress=dims=8: there is no key 'dims'; did you mean 'dim'? Keys here: ...
    """
    if not text:
        return None
    try:
        return apply_overrides(Compression(), text.split(","))
    except ValueError as error:
        raise ValueError(f"model.compress={str(error).removeprefix('--set ')}") from None


def check_towers(text: str) -> None:
    """Checks the text of ``model.towers``, which is empty, a number of towers, or the towers' features.

    Raises:
        ValueError: the text is none of these.
    """
    if text.isdecimal() and int(text) < 1:
        raise ValueError(f"model.towers={text}: must be 1 or more")
    if text and not text.isdecimal() and not all(all(group.split("+")) for group in text.split(",")):
        raise ValueError(
            f"model.towers={text}: give a number of towers, or their features, such as user_id+city,item_id+daytime"
        )


def features_by_tower(
    towers: str,
    features: Sequence[str],
    rows: Chunk,
    sizes: Mapping[str, float],
    *,
    trained: str = "",
    bound: float = 0.0,
) -> dict[str, list[str]]:
    """Returns the names of each tower's features, by tower.

    Args:
        towers: text of ``model.towers``: for a number the partitioner of Disaggregated Multi-Tower groups the features
            by affinity; other text lists the features of each tower.
        features: names of all features.
        rows: training rows from which affinities are computed.
        sizes: bytes of each feature's table.
        trained: safetensors file of a model whose tables have the features' names: affinities are then computed from
            its vectors, instead of from the ids that occur together.
        bound: greatest number of bytes of a tower; 1.1 times an even share where 0.

    Raises:
        ValueError: a feature is unknown, listed twice or not listed; or no grouping keeps the bound.
    """
    if not towers.isdecimal():
        return _listed(towers, features)
    sample = np.linspace(0, rows.num_rows - 1, min(ROWS, rows.num_rows)).astype(np.int64)
    ids = {name: torch.from_numpy(rows[name].take(sample).values.astype(np.int64)) for name in features}
    vectors = _learned(Path(trained), ids) if trained else id_vectors(_batch(ids), features)
    result = partition(affinity(vectors, "cka"), towers=int(towers), load=sizes, bound=bound or None)
    if os.environ.get("RANK", "0") == "0":
        print(f"features by affinity:\n{result}\n", flush=True)
    return {tower: list(names) for tower, names in result.groups.items()}


def _listed(towers: str, features: Sequence[str]) -> dict[str, list[str]]:
    groups = [group.split("+") for group in towers.split(",")]
    given = [name for group in groups for name in group]
    unknown = [name for name in given if name not in features]
    twice = [name for name in given if given.count(name) > 1]
    missing = [name for name in features if name not in given]
    if unknown:
        raise ValueError(
            f"model.towers={towers}: there is no feature '{unknown[0]}'; the features are {', '.join(features)}"
        )
    if twice:
        raise ValueError(f"model.towers={towers}: '{twice[0]}' stands there twice; a feature is in one tower")
    if missing:
        raise ValueError(
            f"model.towers={towers}: '{missing[0]}' stands in no tower; give each of {', '.join(features)} one"
        )
    return {f"tower_{number}": group for number, group in enumerate(groups)}


def _learned(trained: Path, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from safetensors import safe_open

    if not trained.is_file():
        raise ValueError(
            f"model.towers_from={trained}: there is no such file; write one with `python -m torchx_apps.publish RUN`"
        )
    vectors = {}
    with safe_open(trained, framework="pt") as file:
        paths = {path.split(".")[-2]: path for path in file.keys() if "embedding" in path}  # noqa: SIM118
        for name, rows in ids.items():
            if name not in paths:
                raise ValueError(
                    f"model.towers_from={trained}: it has no table '{name}'; its tables are {', '.join(sorted(paths))}"
                )
            table = file.get_tensor(paths[name])
            if len(table) <= int(rows.max()):
                raise ValueError(
                    f"model.towers_from={trained}: table '{name}' has {len(table):,} rows, the data ids up to "
                    f"{rows.max():,}"
                )
            vectors[name] = table[rows]
    return vectors


def _batch(ids: Mapping[str, Tensor]) -> TowerBatch:
    count = len(next(iter(ids.values())))
    lengths = torch.ones(count * len(ids), dtype=torch.int32)
    sparse = KeyedJaggedTensor(list(ids), torch.cat(list(ids.values())), lengths=lengths)
    none = torch.empty(count, 0)
    return TowerBatch(sparse=sparse, dense=none, labels=none, weights=none, total_weight=none)


@dataclass(frozen=True, kw_only=True)
class NTowerConfig:
    """The towers of the recipe ``n_tower``.

    Args:
        embedding_dim: columns of every table.
        embedding_std: standard deviation of the tables' initial values.
        tower_widths: widths of each tower's MLP; where there is none, a tower's output is its concatenated embeddings.
        towers: user, item and context where empty; a number of towers, to group the features by affinity, see
            :func:`features_by_tower`; or the features of each tower, as ``user_id+homework,item_id+daytime``.
        towers_from: safetensors of a trained model of these tables (``torchx_apps.publish``), whose vectors then say
            which features are near; their ids do where empty. Needs a number of towers.
        towers_bound: greatest size of one tower's tables in MiB; 1.1 times an even share where 0. Needs a number of
            towers.
        compress: settings of the :class:`Compression` of a tower's embeddings before its MLP or, without one, before
            they leave its ranks, such as ``dim=16,flat=2``; none where empty.
        interaction: network over the towers' outputs, see :func:`interaction_layer`.
        top_widths: hidden widths of the interaction.
        activation: activation between layers.
        normalization: normalisation before each activation.
        dropout: share of values dropped after each activation.
        out_of_range: what happens to an id outside its table: ``error``, or ``oov``, which reads row 0.
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
                f"model.towers_from and model.towers_bound need a number of towers; model.towers={self.towers!r} is "
                "none"
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
        # tables_l2 keeps the tables from memorising rare ids; its exact value matters little, since batch normalisation
        # removes the tables' scale.
        optimizer=OptimizerConfig(tables="adam", tables_lr=1e-3, dense_lr=1e-3, tables_l2=0.05),
        train=TrainConfig(epochs=12, tables_schedule=Schedule(kind="cosine"), dense_schedule=Schedule(kind="cosine")),
    )


def build_n_tower(config: NTowerConfig, data: LabelledData) -> TowerModel:
    """Builds a tower for user, item and, where there is any, context; or the towers that ``config.towers`` names."""
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
        for name, (features, dense) in _columns_by_tower(config, data).items()
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


def _columns_by_tower(config: NTowerConfig, data: LabelledData) -> dict[str, tuple[Sequence[str], Sequence[str]]]:
    """Returns the names of each tower's features and of its dense columns, by tower."""
    if not config.towers:
        usual: dict[str, tuple[Sequence[str], Sequence[str]]] = {"user": (("user_id",), ()), "item": (("item_id",), ())}
        return {**usual, "context": (data.context, data.dense)} if data.context else usual
    features = ["user_id", "item_id", *data.context]
    sizes = {name: 4.0 * data.vocab[name] * config.embedding_dim for name in features}
    groups = features_by_tower(
        config.towers, features, data.train, sizes, trained=config.towers_from, bound=config.towers_bound * 2**20
    )
    # Dense columns have no affinity; the tower with the smallest tables reads them.
    smallest = min(groups, key=lambda tower: sum(sizes[name] for name in groups[tower]))
    return {tower: (names, data.dense if tower == smallest else ()) for tower, names in groups.items()}


def _table(feature: str, rows: int, config: NTowerConfig) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=feature,
        feature_names=[feature],
        num_embeddings=rows,
        embedding_dim=config.embedding_dim,
        pooling=PoolingType.MEAN,
        init_fn=partial(torch.nn.init.normal_, std=config.embedding_std),
    )

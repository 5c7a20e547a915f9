"""The recipe n_tower: user, item and context, a tower for each, and a network over the three.

Which features stand in which tower, and what a tower's output is compressed to, as keys of a recipe say.
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

ROWS = 4096  # that affinities are taken from


def compression_of(text: str) -> Compression | None:
    """``model.compress``: settings of a :class:`Compression`, such as ``dim=16,flat=2``; None for nothing.

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
    """``model.towers``: nothing, a number, or features.

    Raises:
        ValueError: another text.
    """
    if text.isdecimal() and int(text) < 1:
        raise ValueError(f"model.towers={text}: must be 1 or more")
    if text and not text.isdecimal() and not all(all(group.split("+")) for group in text.split(",")):
        raise ValueError(
            f"model.towers={text}: give a number of towers, or their features, such as user_id+city,item_id+daytime"
        )


def features_by_tower(
    asked: str,
    features: Sequence[str],
    rows: Chunk,
    sizes: Mapping[str, float],
    *,
    trained: str = "",
    bound: float = 0.0,
) -> dict[str, list[str]]:
    """The features of each tower.

    Args:
        asked: as :func:`check_towers` takes it: a number has the partitioner of Disaggregated Multi-Tower group the
            features by affinity, text says itself who stands together.
        features: all of them.
        rows: of the training, which affinities are taken from.
        sizes: bytes of each feature's table.
        trained: safetensors of a model whose tables have the features' names: affinities are then those of what it has
            learned, in place of those of ids that come together.
        bound: of the bytes of a tower; 1.1 times an even share where 0.

    Raises:
        ValueError: features that are not there, stand twice or nowhere; or no grouping keeps the bound.
    """
    if not asked.isdecimal():
        return _listed(asked, features)
    place = np.linspace(0, rows.num_rows - 1, min(ROWS, rows.num_rows)).astype(np.int64)
    ids = {name: torch.from_numpy(rows[name].take(place).values.astype(np.int64)) for name in features}
    vectors = _learned(Path(trained), ids) if trained else id_vectors(_batch(ids), features)
    found = partition(affinity(vectors, "cka"), towers=int(asked), load=sizes, bound=bound or None)
    if os.environ.get("RANK", "0") == "0":
        print(f"features by affinity:\n{found}\n", flush=True)
    return {tower: list(names) for tower, names in found.groups.items()}


def _listed(asked: str, features: Sequence[str]) -> dict[str, list[str]]:
    groups = [group.split("+") for group in asked.split(",")]
    given = [name for group in groups for name in group]
    if unknown := [name for name in given if name not in features]:
        raise ValueError(
            f"model.towers={asked}: there is no feature '{unknown[0]}'; the features are {', '.join(features)}"
        )
    if twice := [name for name in given if given.count(name) > 1]:
        raise ValueError(f"model.towers={asked}: '{twice[0]}' stands there twice; a feature is in one tower")
    if missing := [name for name in features if name not in given]:
        raise ValueError(
            f"model.towers={asked}: '{missing[0]}' stands in no tower; give each of {', '.join(features)} one"
        )
    return {f"tower_{number}": group for number, group in enumerate(groups)}


def _learned(trained: Path, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
    from safetensors import safe_open

    if not trained.is_file():
        raise ValueError(
            f"model.towers_from={trained}: there is no such file; write one with `python -m torchx_apps.publish RUN`"
        )
    vectors = {}
    with safe_open(trained, framework="pt") as held:
        paths = {path.split(".")[-2]: path for path in held.keys() if "embedding" in path}  # noqa: SIM118
        for name, own in ids.items():
            if name not in paths:
                raise ValueError(
                    f"model.towers_from={trained}: it has no table '{name}'; its tables are {', '.join(sorted(paths))}"
                )
            table = held.get_tensor(paths[name])
            if len(table) <= int(own.max()):
                raise ValueError(
                    f"model.towers_from={trained}: table '{name}' has {len(table):,} rows, the data ids up to "
                    f"{own.max():,}"
                )
            vectors[name] = table[own]
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
        embedding_std: standard deviation of the tables' first values.
        tower_widths: widths of each tower's MLP; none: a tower's output is its embeddings side by side.
        towers: user, item and context where empty; a number: so many towers, in which features stand together that have
            most to do with one another, see :func:`features_by_tower`; or the features, as
            ``user_id+homework,item_id+daytime``.
        towers_from: of a number of towers, safetensors of a trained model of these tables (``torchx_apps.publish``), by
            whose vectors features are near; by their ids alone where empty.
        towers_bound: of a number of towers, MiB of the tables of one; 1.1 times an even share where 0.
        compress: what a tower's embeddings are compressed to before its MLP or, without one, before they leave its
            ranks: settings of a :class:`Compression`, as ``dim=16,flat=2``; nothing where empty.
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
                f"model.towers_from and model.towers_bound are of a number of towers; model.towers={self.towers!r} is "
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
        # l2 keeps the tables from learning rare ids by heart. After batch normalisation their scale is free, so little
        # hangs on it.
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

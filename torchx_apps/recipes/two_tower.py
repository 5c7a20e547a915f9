"""The recipes two_tower and retrieval: a user tower and an item tower, under a top NN or a dot product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.modules.config import (
    LOSSES,
    Activation,
    Interaction,
    LossName,
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


_REJECTED = {
    False: "drawn negatives are never known items",
    True: "the softmax is over all items, those that the user has taken among them",
}


@dataclass(frozen=True, kw_only=True)
class TwoTowerConfig:
    """The towers of the recipes ``two_tower`` and ``retrieval``.

    Args:
        embedding_dim: columns of every table.
        tower_widths: widths of each tower's MLP; the last is D, what the interaction sees.
        features: columns that the towers read; all columns of the set where none are named.
        without: columns that the towers do not read.
        interaction: ``top_nn`` (concatenation, MLP, logit), ``dot``, or another of :func:`interaction_layer`.
        top_widths: hidden widths of the top NN.
        activation: activation between layers.
        dropout: share of values dropped after each activation.
        loss: ``bce`` over the loader's negatives; ``bpr`` or ``sampled_softmax``, which compare a positive
            with its own negatives; or, for ``loader.negatives=0`` and the interactions ``dot`` and ``cosine``,
            ``in_batch``, a softmax over the candidates of the batch, or ``catalogue``, over all items, whose tower
            then runs for every item in every step.
        temperature: divisor of the scores under the softmax losses and ``cosine``.
        correct: correct ``in_batch`` for the popularity of its candidates, and ``sampled_softmax`` for how likely each
            candidate was drawn.
        reject_known: under ``in_batch`` never use an item as a negative of a user who has taken it. Where false, a
            user's other items compete with the row's item, as in the softmax over the whole catalogue that the batch
            stands for.
        hardest: number of negatives of a row that count under ``in_batch``, those with the greatest scores; 0 for all.
        share_items: the user's history reads the item table, instead of a table for histories.
        share_user: run the user tower once for a positive and its negatives; the result is the same.
        out_of_range: what happens to an id outside its table: ``error``, or ``oov``, which reads row 0.
    """

    embedding_dim: int = 32
    tower_widths: tuple[int, ...] = (64,)
    features: tuple[str, ...] = ()
    without: tuple[str, ...] = ()
    interaction: Interaction = "top_nn"
    top_widths: tuple[int, ...] = (128, 64)
    activation: Activation = "relu"
    dropout: float = 0.0
    loss: LossName = "bce"
    temperature: float = 1.0
    correct: bool = True
    reject_known: bool = False
    hardest: int = 0
    share_items: bool = False
    share_user: bool = True
    out_of_range: OutOfRange = "error"

    def __post_init__(self) -> None:
        # Parsed for its errors alone, before any data are loaded.
        check_loss(self.loss, self.interaction, self.temperature)
        check_hardest("model.hardest", self.hardest, self.loss)
        if self.reject_known and not LOSSES[self.loss].in_batch:
            raise ValueError(
                f"model.reject_known=true with model.loss={self.loss}: {_REJECTED[LOSSES[self.loss].catalogue]}; leave "
                "it out, or set model.loss=in_batch"
            )


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
    import torch

    from torchrec_ext.data.negatives.known_items import KnownItems
    from torchrec_ext.data.negatives.known_pairs import KnownPairs
    from torchrec_ext.models.retrieval import RetrievalModel
    from torchrec_ext.models.tower_model import TowerModel
    from torchrec_ext.modules.interaction import interaction_layer
    from torchrec_ext.modules.losses import row_loss

    available = {*data.features, *data.dense}
    for field, setting in (("features", config.features), ("without", config.without)):
        unknown = sorted(set(setting) - available)
        if unknown:
            raise ValueError(
                f"model.{field} names {unknown}, which '{data.name}' does not have; it has {sorted(available)}"
            )
    names = set(config.features or available) - set(config.without)
    user_columns: list[str] = []
    item_columns: list[str] = []
    for name in (*data.features, *data.dense):
        if name in names:
            columns = item_columns if name in data.items else user_columns
            columns.append(name)
    towers = {
        "user": _tower(config, data, user_columns),
        "item": _tower(config, data, item_columns),
    }
    widths = [tower.out_features for tower in towers.values()]
    # Under a softmax over the batch no two rows share a user.
    kind = LOSSES[config.loss]
    shared = ("user",) if config.share_user and not kind.shared else ()
    top = interaction_layer(
        config.interaction,
        widths,
        config.top_widths,
        activation=config.activation,
        dropout=config.dropout,
        activate_input=bool(config.tower_widths),
        temperature=config.temperature,
    )
    if not kind.shared:
        # A cosine has divided by the temperature already.
        temperature = 1.0 if top.temperature else config.temperature
        loss = row_loss(config.loss, temperature=temperature, correct=config.correct)
        return TowerModel(
            towers, top, loss=loss, shared=shared, device=torch.device("meta")
        )
    counts = None
    if config.correct and kind.in_batch:
        counts = torch.from_numpy(data.popularity)
    rejected = None
    if config.reject_known:
        rejected = KnownItems(KnownPairs(data.drawable(), *data.taken("train")))
    return RetrievalModel(
        towers,
        top,
        counts=counts,
        known=rejected,
        temperature=config.temperature,
        loss=config.loss,
        hardest=config.hardest,
        shared=shared,
        device=torch.device("meta"),
    )


def _tower(config: TwoTowerConfig, data: Prepared, columns: Sequence[str]) -> Tower:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

    from torchrec_ext.modules.tower import Tower

    tables = []
    dense = []
    for name in columns:
        if name in data.dense:
            dense.append(name)
            continue
        table = EmbeddingBagConfig(
            # Tables of one name are one table, also in two towers.
            name="item_id" if name == "history" and config.share_items else name,
            feature_names=[name],
            num_embeddings=data.vocab[name],
            embedding_dim=config.embedding_dim,
            pooling=PoolingType.MEAN,
        )
        tables.append(table)
    return Tower(
        tables,
        config.tower_widths,
        dense=dense,
        activation=config.activation,
        dropout=config.dropout,
    )

"""The recipe session: which item a user takes next, by a causal transformer over those before; Amazon Beauty."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from torchrec_ext.data.datasets.config import SequenceConfig
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.modules.config import Activation, Attention, Position
from torchrec_ext.schema.validation import OutOfRange
from torchrec_ext.train.config import EarlyStop, TrainConfig
from torchx_apps.tasks.job import Job
from torchx_apps.tasks.loading import session_task

if TYPE_CHECKING:
    from torchrec_ext.data.datasets.sequences import SequenceData
    from torchrec_ext.models.session import NextItemModel


@dataclass(frozen=True, kw_only=True)
class SessionConfig:
    """The model of the recipe ``session``.

    Args:
        embedding_dim: D, columns of the item table and width of the transformer.
        init_std: standard deviation of the table's initial values.
        layers: number of the transformer's layers.
        heads: number of attention heads, a divisor of D.
        hidden: width of the feed-forward network's hidden layer.
        activation: activation of that hidden layer.
        dropout: share of values dropped at the input and in the layers.
        position: learned position vectors, counted from the ``start`` of a session or from its ``end``, or ``none``.
        attention: ``bucketed`` (hardly any padding), ``nested`` (none; on a GPU) or ``padded``; the result is the same.
        out_of_range: what happens to an id outside the table: ``error``, or ``oov``, which reads row 0.
    """

    embedding_dim: int = 64
    init_std: float = 0.05
    layers: int = 2
    heads: int = 2
    hidden: int = 128
    activation: Activation = "gelu"
    dropout: float = 0.3
    position: Position = "start"
    attention: Attention = "bucketed"
    out_of_range: OutOfRange = "error"


def session() -> Job:
    """Items taken so far -> causal transformer -> softmax over the catalogue, one table for both; Amazon Beauty."""
    return Job(
        name="session",
        build=build_session,
        model=SessionConfig(),
        data=SequenceConfig(),
        task=session_task,
        # 256 x 8 = 2,048 candidates that all targets of a step share; with negatives=0 all items.
        loader=LoaderConfig(batch_size=256, negatives=8),
        optimizer=OptimizerConfig(tables_lr=0.1, dense_lr=1e-3),
        # Ends by the validation items: a set of few or long sequences has few steps an epoch, and needs more epochs.
        train=TrainConfig(epochs=60, eval_every=4, early_stop=EarlyStop(metric="ndcg@10", patience=1)),
    )


def build_session(config: SessionConfig, data: SequenceData) -> NextItemModel:
    """Builds the model over the items of ``data``, its table on the meta device."""
    import torch
    from torchrec.modules.embedding_configs import EmbeddingConfig

    from torchrec_ext.models.session import NextItemModel
    from torchrec_ext.modules.session_encoder import SessionEncoder
    from torchrec_ext.modules.tower import check_tables

    table = EmbeddingConfig(
        name="item_id",
        num_embeddings=data.vocab["item_id"],
        embedding_dim=config.embedding_dim,
        init_fn=partial(torch.nn.init.normal_, std=config.init_std),
    )
    check_tables([table])  # before the encoder, which would name its width
    encoder = SessionEncoder(
        config.embedding_dim,
        data.max_length,
        layers=config.layers,
        heads=config.heads,
        hidden=config.hidden,
        activation=config.activation,
        dropout=config.dropout,
        causal=True,
        position=config.position,
        attention=config.attention,
    )
    return NextItemModel(table, encoder, device=torch.device("meta"))

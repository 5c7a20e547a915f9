"""The recipes ncf and contextual_ncf: matrix factorisation beside an MLP, without and with a row's context."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.modules.config import LOSSES, Activation, LossName
from torchrec_ext.schema.validation import OutOfRange
from torchrec_ext.train.config import EarlyStop, TrainConfig
from torchx_apps.tasks.job import Job
from torchx_apps.tasks.loading import labelled_task

if TYPE_CHECKING:
    from torchrec_ext.data.prepared import Prepared
    from torchrec_ext.models.ncf import ContextualNCF


@dataclass(frozen=True, kw_only=True)
class NCFConfig:
    """The network of the recipes ``ncf`` and ``contextual_ncf``.

    Args:
        gmf_dim: columns of the GMF half's tables.
        mlp_dim: columns of the MLP half's tables of ids.
        mlp_widths: widths of the MLP's layers.
        context_dim: columns of each table of categorical context, and of what describes users and items.
        embedding_std: standard deviation of the initial values of the tables of ids.
        activation: activation between layers.
        dropout: share of values dropped after each activation.
        loss: ``bce``, over drawn negatives or over labels; or, over drawn negatives, ``bpr`` or
            ``sampled_softmax``, which compare a positive with its own negatives.
        out_of_range: what happens to an id outside its table: ``error``, or ``oov``, which reads row 0.
    """

    gmf_dim: int = 8
    mlp_dim: int = 32
    mlp_widths: tuple[int, ...] = (32, 16, 8)
    context_dim: int = 4
    embedding_std: float = 0.01
    activation: Activation = "relu"
    dropout: float = 0.0
    loss: LossName = "bce"
    out_of_range: OutOfRange = "error"

    def __post_init__(self) -> None:
        if self.loss in LOSSES and LOSSES[self.loss].shared:
            others = " or ".join(
                name for name, kind in LOSSES.items() if not kind.shared
            )
            raise ValueError(
                f"model.loss={self.loss}: queries share candidates, and NeuMF runs a network for every "
                f"pair; take recipe two_tower or n_tower, or model.loss={others}"
            )


def ncf() -> Job:
    """NeuMF with 8 factors over users and items; 4 drawn negatives for each pair."""
    return Job(
        name="ncf",
        build=build_ncf,
        model=NCFConfig(),
        data=DataConfig(history_length=0),
        # Of batches of 1,024 to 256 positives the smallest rank held-out items best:
        # validation NDCG .549 against .543.
        loader=LoaderConfig(batch_size=256),
        optimizer=OptimizerConfig(tables="adam", tables_lr=1e-3, dense_lr=1e-3),
        train=TrainConfig(epochs=15, eval_every=5),
    )


def contextual_ncf() -> Job:
    """NeuMF that also reads the context of a row (hour, weather, place ...); rows with labels."""
    return Job(
        name="contextual_ncf",
        build=build_contextual_ncf,
        model=NCFConfig(),
        data=DataConfig(ranked=0),
        task=labelled_task,
        loader=LoaderConfig(batch_size=512, negatives=0),
        optimizer=OptimizerConfig(tables="adam", tables_lr=2e-3, dense_lr=2e-3),
        # Stops early, since longer training makes it overconfident: Frappe takes 5 or 6
        # epochs, smaller catalogues 3.
        train=TrainConfig(
            epochs=20, early_stop=EarlyStop(metric="log_loss", mode="min", patience=1)
        ),
    )


def build_ncf(config: NCFConfig, data: Prepared) -> ContextualNCF:
    """Builds the network over users' and items' ids, as published, and over a row's context if there is one."""
    features, dense = data.towers.get("context", ((), ()))
    # The user's vectors are computed once for a positive and its negatives.
    return _network(config, data.vocab, features, dense, shared=("user",))


def build_contextual_ncf(config: NCFConfig, data: Prepared) -> ContextualNCF:
    """Builds the network over the ids, the context, and the users' and items' other columns.

    Raises:
        ValueError: the rows have no user or no item.
    """
    if missing := [name for name in ("user", "item") if f"{name}_id" not in data.vocab]:
        raise ValueError(
            f"recipe contextual_ncf: the rows of '{data.name}' have no column '{missing[0]}', which "
            "NeuMF multiplies; take --recipe n_tower, which needs none"
        )
    features, dense = data.towers.get("context", ((), ()))
    user, user_dense = data.towers["user"]
    item, item_dense = data.towers["item"]
    # The ids have tables of their own, in both halves.
    context = [name for name in (*user, *features) if name != "user_id"]
    item = [name for name in item if name != "item_id"]
    return _network(
        config, data.vocab, context, (*user_dense, *dense), item, item_dense
    )


def _network(
    config: NCFConfig,
    vocab: Mapping[str, int],
    context: Sequence[str],
    dense: Sequence[str],
    item: Sequence[str] = (),
    item_dense: Sequence[str] = (),
    shared: Sequence[str] = (),
) -> ContextualNCF:
    """Builds the network over ids, columns of context, and the item's columns of ids and of numbers beside its id."""
    import torch
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

    from torchrec_ext.models.ncf import ContextualNCF
    from torchrec_ext.modules.losses import row_loss

    def table(name: str) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(
            name=name,
            feature_names=[name],
            num_embeddings=vocab[name],
            embedding_dim=config.context_dim,
            pooling=PoolingType.MEAN,
        )

    return ContextualNCF(
        vocab["user_id"],
        vocab["item_id"],
        gmf_dim=config.gmf_dim,
        mlp_dim=config.mlp_dim,
        mlp_widths=config.mlp_widths,
        context_tables=[table(name) for name in context],
        context_dense=dense,
        item_tables=[table(name) for name in item],
        item_dense=item_dense,
        embedding_std=config.embedding_std,
        activation=config.activation,
        dropout=config.dropout,
        loss=row_loss(config.loss),
        shared=shared,
        device=torch.device("meta"),
    )

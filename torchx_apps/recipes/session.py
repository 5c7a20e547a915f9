"""The recipes session and bst: transformers over what a user took before.

``session`` tells the next item; ``bst`` whether the shown one is clicked, on rows that are read while
it trains.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.modules.config import (
    Activation,
    LossName,
    Position,
)
from torchrec_ext.schema.validation import OutOfRange, check_least
from torchrec_ext.train.config import EarlyStop, TrainConfig
from torchx_apps.recipes.n_tower import tables_of_features
from torchx_apps.tasks.job import Job
from torchx_apps.tasks.loading import logged_task, session_task

if TYPE_CHECKING:
    from torchrec_ext.data.prepared import Prepared
    from torchrec_ext.models.session import NextItemModel
    from torchrec_ext.models.tower_model import TowerModel


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
        loss: ``sampled_softmax`` or ``catalogue``, the softmax over the items of the catalogue: its sum is estimated by
            the candidates that ``loader.negatives`` asks for, or exact with ``loader.negatives=0``, as ``catalogue``
            demands.
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
    loss: LossName = "sampled_softmax"
    out_of_range: OutOfRange = "error"

    def __post_init__(self) -> None:
        if self.loss not in ("sampled_softmax", "catalogue"):
            raise ValueError(
                f"model.loss={self.loss}: a session predicts its next item by a softmax; take "
                "sampled_softmax, or catalogue with loader.negatives=0"
            )


def session() -> Job:
    """Items taken so far -> causal transformer -> softmax over the catalogue, one table for both."""
    return Job(
        name="session",
        build=build_session,
        model=SessionConfig(),
        task=session_task,
        # 256 x 8 = 2,048 candidates that all targets of a step share; with negatives=0
        # all items.
        loader=LoaderConfig(batch_size=256, negatives=8),
        optimizer=OptimizerConfig(tables_lr=0.1, dense_lr=1e-3),
        # Ends by the validation items: a set of few or long sequences has few steps an
        # epoch, and needs more epochs.
        train=TrainConfig(
            epochs=60, eval_every=4, early_stop=EarlyStop(metric="ndcg@10", patience=1)
        ),
    )


def session_length(data: Prepared) -> int:
    """Returns the greatest number of items of a session, by the step that cuts it."""
    from torchrec_ext.data.preprocess import Lists

    lengths = [
        step.max_length
        for step in data.preprocessor.steps
        if isinstance(step, Lists) and step.column == "session" and step.max_length
    ]
    if not lengths:
        raise ValueError(
            f"data.name={data.name}: its preprocessing does not say how long a session is; add Lists(column='session', "
            "max_length=50)"
        )
    return lengths[-1]


def build_session(config: SessionConfig, data: Prepared) -> NextItemModel:
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
    # Checked before the encoder, whose error would name its width instead.
    check_tables([table])
    encoder = SessionEncoder(
        config.embedding_dim,
        session_length(data),
        layers=config.layers,
        heads=config.heads,
        hidden=config.hidden,
        activation=config.activation,
        dropout=config.dropout,
        causal=True,
        position=config.position,
    )
    return NextItemModel(
        table, encoder, whole=config.loss == "catalogue", device=torch.device("meta")
    )


@dataclass(frozen=True, kw_only=True)
class BstConfig:
    """The model of the recipe ``bst`` (Chen et al. 2019); its defaults are the paper's.

    Args:
        embedding_dim: D, columns of every table.
        embedding_std: standard deviation of the tables' initial values.
        window: S, the most steps of a session that are read, the latest, in training and in requests alike; the
            ``length`` of the preprocessing's History where 0.
        layers: number of the transformer's layers.
        heads: number of attention heads, a divisor of a step's width.
        hidden: width of the feed-forward network's hidden layer; 4 times a step's width where not given.
        top_widths: hidden widths over the transformer's output and all other columns.
        activation: activation of transformer and MLP.
        dropout: share of values dropped in both.
        position: learned position vectors, counted from the ``start`` of a session or from its ``end``; ``none`` where
            the time gaps of the History say when its steps were, as in the paper.
        out_of_range: what happens to an id outside its table: ``error``, or ``oov``, which reads row 0.
    """

    embedding_dim: int = 32
    embedding_std: float = 0.1
    window: int = 0
    layers: int = 1
    heads: int = 8
    hidden: int | None = None
    top_widths: tuple[int, ...] = (1024, 512, 256)
    activation: Activation = "leaky_relu"
    dropout: float = 0.2
    position: Position = "none"
    out_of_range: OutOfRange = "error"

    def __post_init__(self) -> None:
        check_least("model.window", self.window, 0)


def bst_job() -> Job:
    """Clicks by what the user clicked before and the shown item in one transformer; a log, or generated rows."""
    return Job(
        name="bst",
        build=build_bst,
        model=BstConfig(),
        # The transformer runs for each pair of a row and an item, so the catalogue is
        # ranked where it is asked for.
        data=DataConfig(ranked=0),
        task=logged_task,
        loader=LoaderConfig(batch_size=256, negatives=0),
        # The paper's Adagrad is further from the best possible prediction after as many
        # steps of the generated rows.
        optimizer=OptimizerConfig(
            tables="row_wise_adagrad", tables_lr=0.05, dense="adam", dense_lr=1e-3
        ),
        train=TrainConfig(epochs=3),
    )


class _Sessions(NamedTuple):
    """The columns of a set's sessions.

    Attributes:
        features: columns of ids of the steps.
        targets: the shown item's columns that have the vocabulary of a column of the steps, one for each such table.
        window: the most steps of a row.
    """

    features: Sequence[str]
    targets: Sequence[str]
    window: int


def _sessions(config: BstConfig, data: Prepared) -> _Sessions:
    """Returns the sessions from the preprocessing.

    Raises:
        DataError: it makes none, or no vocabulary is shared with the item.
    """
    from torchrec_ext.data.preprocess import History
    from torchrec_ext.schema import DataError

    where = f"data.name={data.name}"
    steps = data.preprocessor.steps
    history = next((step for step in steps if isinstance(step, History)), None)
    if history is None:
        raise DataError(
            f"{where}: its preprocessing has no History, so its rows have no session; preprocess by "
            "`--recipe taobao`, or add History(..., gaps=GAPS)"
        )
    item = data.roles.item
    tables = data.tables
    if item is None or tables.get(history.output) != tables[item]:
        raise DataError(
            f"{where}: the session '{history.output}' has not the vocabulary of the shown item ({item}); give "
            f"both one: Categorify(column=ITEM, also=('{history.output}',)), and Prepare(item=)"
        )
    features = [name for name in history.writes if name in data.features]
    if not history.gaps and config.position == "none":
        raise DataError(
            f"{where} with model.position=none: the sessions have no time gaps, so their order would "
            "be lost; set model.position=end, or History(gaps=GAPS)"
        )
    # Of several columns with one vocabulary the first is the target, the item's id
    # before all.
    item_features = {
        tables[name]: name for name in (*reversed(data.towers["item"][0]), item)
    }
    session_tables = dict.fromkeys(tables[name] for name in features)
    targets = [
        item_features[table] for table in session_tables if table in item_features
    ]
    return _Sessions(features, targets, config.window or history.length)


def build_bst(config: BstConfig, data: Prepared) -> TowerModel:
    """Builds towers for the session, the user's and the context's other columns, and the shown item."""
    import torch

    from torchrec_ext.models.session import bst
    from torchrec_ext.modules.tower import Tower

    sessions = _sessions(config, data)
    in_steps = [*sessions.features, *sessions.targets]
    steps = tables_of_features(config, data, in_steps, bags=False)
    others = {}
    for tower, (features, dense) in data.towers.items():
        rest = [name for name in features if name not in in_steps]
        if tower != "item" and (rest or dense):
            others[tower] = Tower(
                tables_of_features(config, data, rest), [], dense=dense
            )
    features, dense = data.towers["item"]
    item_columns = [name for name in features if name not in in_steps]
    # A tower has a table once, and the target's own columns come first in it.
    own_tables = {data.tables[name] for name in sessions.targets}
    return bst(
        steps,
        session=sessions.features,
        target=sessions.targets,
        others=others,
        target_tables=tables_of_features(
            config, data, item_columns, own_tables=own_tables
        ),
        target_dense=dense,
        max_length=sessions.window,
        device=torch.device("meta"),
        top_widths=config.top_widths,
        layers=config.layers,
        heads=config.heads,
        hidden=config.hidden,
        activation=config.activation,
        dropout=config.dropout,
        position=config.position,
    )

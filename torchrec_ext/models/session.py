"""Models of sessions: NextItemModel scores the whole catalogue as the next item; bst() scores one given item.

NextItemModel scores with the table that its sequence is read from. bst() has the item in its sequence and ends in one
logit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import DotProduct
from torchrec_ext.modules.session_encoder import (
    SessionEncoder,
    from_end,
    on_device,
)
from torchrec_ext.modules.session_tower import (
    SessionSteps,
    SessionTop,
    check_features,
    target_slots,
)
from torchrec_ext.modules.softmax import catalogue_softmax, gather_rows
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import BatchSchema, OutOfRange

SESSION = "session"
CANDIDATES = "item_id"


class NextItems(NamedTuple):
    """The detached results of a step.

    Attributes:
        loss: () loss of the batch.
        weights: (B,) weights of the sequences.
    """

    loss: Tensor
    weights: Tensor


class NextItemModel(nn.Module):
    """Predicts each item of a sequence from those before it (SASRec, Kang and McAuley 2018).

    Its loss is a softmax over the catalogue, whose one sharded table is read for the sequence and for the items to be
    scored. A batch has two features: ``session``, the items of B sequences, oldest first, each of which but the first
    is a target; and ``item_id``, the items among which all targets of all ranks are found, the whole catalogue or a
    uniform sample of it. They are spread over the rows in any way, with the same number on every rank; 0 is padding.

    Args:
        table: config of the items' table, ids 1 to num_embeddings - 1, row 0 for unknown items; its feature names are
            set here.
        encoder: causal encoder of the table's width; its ``max_length`` is one less than the items that a training
            sequence may have.
        whole: whether the candidates must be the whole catalogue, so that a loader that samples them is refused.
        device: device of the table; ``meta`` declares it without memory.

    Raises:
        ValueError: an encoder that is not causal, or not of the table's width.

    Example:
        >>> table = EmbeddingConfig(name="item_id", num_embeddings=300_000_000, embedding_dim=64)
        >>> model = NextItemModel(table, SessionEncoder(64, 50, layers=2, causal=True), device=torch.device("meta"))
        >>> model.schema().keys
        ['session', 'item_id']
    """

    def __init__(
        self,
        table: EmbeddingConfig,
        encoder: SessionEncoder,
        *,
        whole: bool = False,
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.whole = whole
        if not encoder.causal:
            raise ValueError(
                "encoder: is not causal, so each step would see the item it must predict; make it with causal=True"
            )
        if encoder.width != table.embedding_dim:
            raise ValueError(
                f"encoder: width D={encoder.width} over table '{table.name}' of embedding_dim={table.embedding_dim}; "
                "must be equal"
            )
        self.table = dataclasses.replace(table, feature_names=[SESSION, CANDIDATES])
        self.embeddings = EmbeddingCollection(
            tables=[self.table], device=device or torch.device("cpu")
        )
        self.network = _NextItemNetwork(encoder, table.num_embeddings - 1)
        self.interaction = DotProduct([encoder.width, encoder.width])

    def schema(self, *, out_of_range: OutOfRange = "error") -> BatchSchema:
        """Returns the schema of the model's batches.

        Args:
            out_of_range: effect of an id outside its table: ``error``, or ``oov`` for row 0.
        """
        schema = BatchSchema.from_tables(
            [self.table], label_range=None, out_of_range=out_of_range
        )
        return dataclasses.replace(schema, catalogue=self.whole)

    def forward(self, batch: TowerBatch) -> tuple[Tensor, NextItems]:
        """Returns the mean loss, (), of the targets of all ranks, and :class:`NextItems`.

        ``batch.total_weight`` is the number of targets of all ranks divided by R.
        """
        embedded = self.embeddings(batch.sparse)
        loss = self.network(embedded, batch)
        return loss, NextItems(loss.detach(), batch.weights)

    def embed(self, tower: str, batch: TowerBatch) -> Tensor:
        """Returns (B, D) vectors of a tower.

        Args:
            tower: ``session`` for vectors that score the next item, zeros for an empty session; ``item`` for each row's
                candidate.
            batch: the rows.

        Raises:
            ValueError: another tower.
        """
        embedded = self.embeddings(batch.sparse)
        if tower == "item":
            return embedded[CANDIDATES].values()  # type: ignore[no-any-return]
        if tower != "session":
            raise ValueError(f"tower {tower!r} is not one of 'session', 'item'")
        return self.network.last(embedded)


class _NextItemNetwork(nn.Module):
    """The model without its table: TorchRec's pipelines do not trace into such modules, so it may branch on values."""

    def __init__(self, encoder: SessionEncoder, num_items: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.num_items = num_items

    def forward(
        self, embedded: Mapping[str, JaggedTensor], batch: TowerBatch
    ) -> Tensor:
        items = embedded[SESSION].values()
        # The one wait for a GPU: the lengths decide how to pad.
        lengths = embedded[SESSION].lengths().long().cpu()
        rows = torch.repeat_interleave(lengths)
        # The last item has no next one, so the encoder does not run on it.
        is_input = torch.arange(len(rows)) < lengths.cumsum(0)[rows] - 1
        inputs = on_device(is_input.nonzero()[:, 0], items.device)
        sessions = on_device(rows[is_input], items.device)
        states = self.encoder.packed(items[inputs], (lengths - 1).clamp(min=0))
        ids = batch.sparse[SESSION].values()
        targets = inputs + 1
        losses = catalogue_softmax(
            states,
            items[targets],
            ids[targets],
            gather_rows(embedded[CANDIDATES].values()),
            gather_rows(batch.sparse[CANDIDATES].values()),
            num_items=self.num_items,
        )
        # The unknown item is none to predict.
        weights = batch.weights[sessions] * (ids[targets] > 0)
        return (losses * weights).sum() / batch.total_weight  # type: ignore[no-any-return]

    def last_padded(self, steps: Tensor, lengths: Tensor) -> Tensor:
        """Returns (B, D) of padded items (B, S, D), as :meth:`last` does."""
        return from_end(self.encoder(steps, lengths), lengths)[:, 0]

    def last(self, embedded: Mapping[str, JaggedTensor]) -> Tensor:
        lengths = embedded[SESSION].lengths().long()
        states = self.encoder.packed(embedded[SESSION].values(), lengths)
        last = torch.where(lengths > 0, lengths.cumsum(0) - 1, len(states))
        return torch.cat([states, states.new_zeros(1, states.shape[1])])[last]


def bst(
    tables: Sequence[EmbeddingConfig],
    *,
    session: Sequence[str],
    target: Sequence[str],
    others: Mapping[str, Tower] | None = None,
    target_tables: Sequence[EmbeddingBagConfig] = (),
    target_dense: Sequence[str] = (),
    max_length: int = 20,
    device: torch.device | None = None,
    **top: Any,
) -> TowerModel:
    """Makes a Behaviour Sequence Transformer (Chen et al. 2019): session and target -> transformer -> MLP -> logit.

    Its towers are ``session``, those of ``others``, and ``target``, and the transformer is part of its top NN, so that
    a bundle can store the targets' vectors.

    Args:
        tables: tables of the steps' features, of one width; the items' table reads both the session and the target.
        session: features of the earlier steps.
        target: features of the target, each of one id.
        others: towers beside the session, such as the user's profile and the context, whose outputs are concatenated
            with the session's.
        target_tables: tables of further features of the target, which are concatenated in the same way.
        target_dense: dense columns of the target, concatenated too.
        max_length: S, the most steps of a session; of a longer one the most recent are read.
        device: device of the tables; ``meta`` declares them without memory.
        top: further arguments of :class:`SessionTop`, whose defaults are the paper's: one layer, 8 heads, MLP
            1024-512-256.

    Raises:
        ValueError: another tower named ``session`` or ``target``, a feature that no table reads, a target that has no
            place in a step, or what a SessionTop refuses.

    Example:
        >>> items = EmbeddingConfig(
        ...     name="item_id", embedding_dim=64, num_embeddings=300_000_000, feature_names=["history", "item_id"]
        ... )
        >>> model = bst([items], session=["history"], target=["item_id"], device=torch.device("meta"))
        >>> model.schema().keys
        ['history', 'item_id']
    """
    check_features(tables, session, target)
    rest = dict(others or {})
    for name in ("session", "target"):
        if name in rest:
            raise ValueError(
                f"others names a tower '{name}', which is the name of the {name}'s tower; choose another"
            )
    steps = []
    shared: dict[str, EmbeddingConfig] = {}
    for table in tables:
        shared |= dict.fromkeys(table.feature_names, table)
        names = [name for name in table.feature_names if name in session]
        # A table of the target alone is not looked up for the session.
        if names:
            steps.append(dataclasses.replace(table, feature_names=names))
    bags = [_as_bag(shared[name], name) for name in target]
    towers: dict[str, Any] = {
        "session": SessionSteps(
            steps,
            session=session,
            max_length=max_length,
        ),
        **rest,
        "target": Tower([*bags, *target_tables], [], dense=target_dense),
    }
    network = SessionTop(
        [tower.out_features for tower in towers.values()],
        width=tables[0].embedding_dim,
        features=len(session),
        slots=target_slots(tables, session, target),
        max_length=max_length,
        **top,
    )
    return TowerModel(towers, network, device=device)


def _as_bag(table: EmbeddingConfig, feature: str) -> EmbeddingBagConfig:
    """Returns the same table as a bag of one feature."""
    fields = {
        field.name: getattr(table, field.name) for field in dataclasses.fields(table)
    }
    return EmbeddingBagConfig(**fields | {"feature_names": [feature]})

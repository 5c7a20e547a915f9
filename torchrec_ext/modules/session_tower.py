"""SessionTower: a transformer over a sequence of steps, the target among them, then an MLP (BST, Chen et al. 2019)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_ext.modules.layers import Recorded
from torchrec_ext.modules.session_encoder import Attention, Packing, Position, SessionEncoder
from torchrec_ext.modules.tower import Activation, LookedUp, by_table, check_tables, mlp
from torchrec_ext.schema.features import dense_names

Pooling = Literal["flatten", "last", "mean"]
BST_WIDTHS = (1024, 512, 256)


class SessionTower(Recorded, nn.Module):
    """Applies a transformer, then an MLP, to the sequence of what a user did before and the target item.

    A TowerModel takes it beside any :class:`torchrec_ext.modules.tower.Tower`; its tables are an EmbeddingCollection,
    sharded like any. Each step is the sum of the embeddings of its features, such as item, category and the gap in time
    to the target. BST concatenates them; a sum applies the same linear maps to each feature and keeps one width. Two
    features of the same things, such as ``history`` and ``item_id``, are read from one table by giving both names in
    its ``feature_names``.

    Args:
        tables: TorchRec EmbeddingConfigs of one width D.
        session: features of the earlier steps, oldest first, equally long in a row; an empty session is allowed beside
            a target.
        target: features of the target, one id per row; none for a tower of the session alone.
        mlp_widths: widths of the MLP's layers; the last is the width of the tower's output.
        max_length: S, the most steps of a session, without the target.
        dense: names of dense columns, concatenated before the MLP.
        layers: number of transformer layers.
        heads: number of attention heads.
        hidden: width of each transformer layer's hidden layer; 4 x D where not given.
        position: a learned vector for each number of steps until the ``end``, so that the target's is 0 and the latest
            step's 1, or since the ``start``; ``none`` where a feature of the steps says when they were.
        pooling: ``flatten`` concatenates S + 1 steps as BST does, the target first and zeros where there is none;
            ``last`` takes the last step, the target; ``mean`` the mean of the steps.
        activation: activation of transformer and MLP.
        dropout: share of values set to 0 in transformer and MLP.
        norm_first: see :class:`TransformerLayer`; BST normalises last.
        attention: see :class:`Packing`.
        device: device of the tables; ``meta`` declares them without memory.

    Raises:
        ValueError: a feature that no table reads, tables of several widths; when run, a session that is too long,
            features of unequal length, or a row of several targets.

    Example:
        >>> items = EmbeddingConfig(
        ...     name="item", embedding_dim=32, num_embeddings=1000, feature_names=["history", "item_id"]
        ... )
        >>> tower = SessionTower([items], session=["history"], target=["item_id"], max_length=20)
        >>> kjt = KeyedJaggedTensor(
        ...     ["history", "item_id"], values=torch.tensor([5, 6, 7, 8]), lengths=torch.tensor([2, 0, 1, 1])
        ... )
        >>> tower(kjt, torch.empty(2, 0)).shape
        torch.Size([2, 256])
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        *,
        session: Sequence[str],
        target: Sequence[str] = (),
        mlp_widths: Sequence[int] = BST_WIDTHS,
        max_length: int = 20,
        dense: Sequence[str] | Mapping[str, int] = (),
        layers: int = 1,
        heads: int = 8,
        hidden: int | None = None,
        position: Position = "end",
        pooling: Pooling = "flatten",
        activation: Activation = "relu",
        dropout: float = 0.0,
        norm_first: bool = False,
        attention: Attention = "bucketed",
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        check_tables(tables)
        _check_features(tables, session, target)
        if pooling not in get_args(Pooling):
            raise ValueError(f"pooling={pooling!r}: must be one of {', '.join(get_args(Pooling))}")
        self.tables, self.dense = list(tables), dense_names(dense)
        self.out_features = mlp_widths[-1] if mlp_widths else 0
        self.device = device or torch.device("cpu")
        self._names = _feature_keys(self.tables)
        self.release_tables(())
        width, steps = self.tables[0].embedding_dim, max_length + (1 if target else 0)
        encoder = SessionEncoder(
            width,
            steps,
            layers=layers,
            heads=heads,
            hidden=hidden,
            activation=activation,
            dropout=dropout,
            norm_first=norm_first,
            position=position,
            attention=attention,
        )
        self.network = _SessionNetwork(encoder, tuple(session), tuple(target), pooling)
        inputs = width * (steps if pooling == "flatten" else 1) + len(self.dense)
        self.mlp = mlp(inputs, mlp_widths, activation=activation, dropout=dropout)

    def release_tables(self, names: Collection[str]) -> None:
        """See :meth:`Tower.release_tables`."""
        self._held = [table for table in self.tables if table.name not in names]
        self.embeddings = EmbeddingCollection(tables=self._held, device=self.device) if self._held else None

    @property
    def released_tables(self) -> list[str]:
        """See :attr:`Tower.released_tables`."""
        return [table.name for table in self.tables if table not in self._held]

    def forward(self, sparse: KeyedJaggedTensor, dense: Tensor, looked_up: LookedUp | None = None) -> Tensor:
        """Returns (B, D').

        Args:
            sparse: the batch's whole KeyedJaggedTensor, stride B.
            dense: (B, Fd), this tower's dense columns.
            looked_up: embeddings of released tables.
        """
        embedded = dict(looked_up or {})
        if self.embeddings is not None:
            embedded |= by_table(self._held, self.embeddings(sparse))
        pooled = self.network({feature: embedded[key] for feature, key in self._names.items()})
        return self.mlp(torch.cat([pooled, dense], dim=1))  # type: ignore[no-any-return]


class _SessionNetwork(nn.Module):
    """Pools looked-up features to (B, pooled width).

    It has no tables, so that TorchRec's pipelines do not trace into it.
    """

    def __init__(
        self, encoder: SessionEncoder, session: tuple[str, ...], target: tuple[str, ...], pooling: Pooling
    ) -> None:
        super().__init__()
        self.encoder, self.session, self.target, self.pooling = encoder, session, target, pooling

    def forward(self, embedded: Mapping[str, JaggedTensor]) -> Tensor:
        steps, lengths = _summed(embedded, self.session)
        if self.target:
            targets, ones = _summed(embedded, self.target)
            _check_targets(ones, self.target)
            steps, lengths = _appended(steps, lengths, targets, ones)
        packing = Packing(lengths, self.encoder.attention)
        return self._pooled(self.encoder.encode(steps, packing), packing)

    def _pooled(self, steps: Tensor, packing: Packing) -> Tensor:
        size, width = len(packing.lengths), steps.shape[1]
        if self.pooling == "flatten":
            padded = steps.new_zeros(size * self.encoder.max_length, width)
            return padded.index_copy(0, packing.rows * self.encoder.max_length + packing.to_end, steps).view(size, -1)
        rows = steps.new_zeros(size, width)
        if self.pooling == "last":
            last = packing.to_end == 0
            return rows.index_copy(0, packing.rows[last], steps[last])
        return rows.index_add(0, packing.rows, steps / packing.lengths[packing.rows, None])


def _summed(embedded: Mapping[str, JaggedTensor], features: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Returns (P, D) steps, the sums of these features' embeddings, and the sessions' lengths (B,)."""
    first, *others = (embedded[name] for name in features)
    values, lengths = first.values(), first.lengths()
    for name, other in zip(features[1:], others, strict=True):
        different = (other.lengths() != lengths).nonzero()
        if len(different):
            row = int(different[0])
            raise ValueError(
                f"feature '{name}' has {int(other.lengths()[row])} values in row {row} of the batch and "
                f"'{features[0]}' {int(lengths[row])}: features of one step must be equally many"
            )
        values = values + other.values()
    return values, lengths


def _appended(steps: Tensor, lengths: Tensor, targets: Tensor, ones: Tensor) -> tuple[Tensor, Tensor]:
    """Returns packed steps with each row's target after its steps, and their lengths (B,)."""
    rows = torch.cat([torch.repeat_interleave(lengths), torch.repeat_interleave(ones)])
    return torch.cat([steps, targets]).index_select(0, rows.argsort(stable=True)), lengths + ones


def _check_targets(lengths: Tensor, target: Sequence[str]) -> None:
    wrong = (lengths > 1).nonzero()
    if len(wrong):
        row = int(wrong[0])
        raise ValueError(
            f"target feature '{target[0]}' has {int(lengths[row])} values in row {row} of the batch: must be one item, "
            "or none in a padding row; give each candidate a row of its own"
        )


def _feature_keys(tables: Sequence[EmbeddingConfig]) -> dict[str, str]:
    return {feature: f"{feature}@{table.name}" for table in tables for feature in table.feature_names}


def _check_features(tables: Sequence[EmbeddingConfig], session: Sequence[str], target: Sequence[str]) -> None:
    widths = {table.name: table.embedding_dim for table in tables}
    if len(set(widths.values())) != 1:
        raise ValueError(
            f"tables have the widths {widths}: the features of a step are added, so all must have one embedding_dim"
        )
    read = [name for table in tables for name in table.feature_names]
    unread = [name for name in (*session, *target) if name not in read]
    if unread or not session:
        raise ValueError(
            f"session={list(session)}, target={list(target)}: must name features of the tables, one of the session at "
            f"least; the tables read {read}"
        )
    unused = sorted(set(read) - {*session, *target})
    if unused:
        raise ValueError(
            f"features {unused} are read by the tables, but are in neither session nor target; name or remove them"
        )

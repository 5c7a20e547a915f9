"""SessionTower: a transformer over a sequence of steps, the target among them, then an MLP (BST, Chen et al. 2019).

SessionSteps and SessionTop are the same cut in two, so that the target has a tower of its own: the steps as they were
looked up, and a top NN that has the transformer, which runs for each pair of a session and a target.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Literal, get_args

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_ext.modules.config import Combine
from torchrec_ext.modules.interaction import InteractionLayer
from torchrec_ext.modules.layers import Recorded
from torchrec_ext.modules.session_encoder import (
    Attention,
    Packing,
    Position,
    SessionEncoder,
    from_end,
)
from torchrec_ext.modules.tower import (
    Activation,
    LookedUp,
    Padded,
    activation_layer,
    by_table,
    check_tables,
    mlp,
)
from torchrec_ext.schema.array_columns import dense_names
from torchrec_ext.schema.validation import check_choice

Pooling = Literal["flatten", "last", "mean"]
BST_WIDTHS = (1024, 512, 256)


class _SequenceTables(Recorded, nn.Module):
    """Base of towers with look-ups id by id and tables that may be released."""

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        dense: Sequence[str] | Mapping[str, int],
        device: torch.device | None,
    ) -> None:
        super().__init__()
        self.tables = list(tables)
        self.dense = dense_names(dense)
        self.device = device or torch.device("cpu")
        self._names: dict[str, str] = {}
        for table in self.tables:
            self._names |= {
                name: f"{name}@{table.name}" for name in table.feature_names
            }
        self.release_tables(())

    def release_tables(self, names: Collection[str]) -> None:
        """See :meth:`Tower.release_tables`."""
        self._own_tables = [table for table in self.tables if table.name not in names]
        self.embeddings = (
            EmbeddingCollection(tables=self._own_tables, device=self.device)
            if self._own_tables
            else None
        )

    @property
    def released_tables(self) -> list[str]:
        """See :attr:`Tower.released_tables`."""
        return [table.name for table in self.tables if table not in self._own_tables]

    def forward(
        self,
        sparse: KeyedJaggedTensor,
        dense: Tensor,
        looked_up: LookedUp | None = None,
        host_lengths: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Returns (B, D').

        Args:
            sparse: the batch's whole KeyedJaggedTensor, stride B.
            dense: (B, Fd), this tower's dense columns.
            looked_up: embeddings of released tables.
            host_lengths: see :class:`torchrec_ext.batch.TowerBatch`.
        """
        embedded = dict(looked_up or {})
        if self.embeddings is not None:
            embedded |= by_table(self._own_tables, self.embeddings(sparse))
        return self.of_steps(
            {feature: embedded[key] for feature, key in self._names.items()},
            dense,
            host_lengths,
        )

    def of_steps(
        self,
        embedded: Mapping[str, JaggedTensor | Padded],
        dense: Tensor,
        host_lengths: Mapping[str, Tensor] | None,
    ) -> Tensor:
        """Returns the tower's output of its features' embeddings by name and its dense columns."""
        raise NotImplementedError


class SessionTower(_SequenceTables):
    """Applies a transformer, then an MLP, to the sequence of a user's earlier steps and the target item.

    A TowerModel takes it beside any :class:`torchrec_ext.modules.tower.Tower`; its tables are an EmbeddingCollection,
    sharded like any. Each step is the sum of the embeddings of its features, such as item, category and the gap in time
    to the target, or, as in BST, their concatenation. Two features of the same things, such as ``history`` and
    ``item_id``, are read from one table by giving both names in its ``feature_names``.

    Args:
        tables: TorchRec EmbeddingConfigs of one width D.
        session: features of the earlier steps, oldest first, equally long in a row; an empty session is allowed beside
            a target.
        target: features of the target, one id per row; none for a tower of the session alone.
        mlp_widths: widths of the MLP's layers; the last is the width of the tower's output.
        max_length: S, the most steps of a session, without the target.
        dense: names of dense columns, concatenated before the MLP.
        combine: ``sum``, which keeps the width D; or ``concat``, steps of D x len(session), in which the embedding of a
            target's feature stands where that of the session's feature of the same table does, and zeros if there
            is none, such as for a gap in time.
        layers: number of transformer layers.
        heads: number of attention heads, a divisor of a step's width.
        hidden: width of each transformer layer's hidden layer; by default 4 times a step's width.
        position: a learned vector for each number of steps until the ``end``, so that the target's is 0 and the latest
            step's 1, or since the ``start``; ``none`` where a feature of the steps says when they were.
        pooling: ``flatten`` concatenates S + 1 steps as BST does, the target first and zeros if there is none;
            ``last`` takes the last step, the target; ``mean`` the mean of the steps.
        activation: activation of transformer and MLP.
        dropout: share of values set to 0 in transformer and MLP.
        norm_first: see :class:`TransformerLayer`; BST normalises last.
        attention: see :class:`Packing`.
        device: device of the tables; ``meta`` declares them without memory.

    Raises:
        ValueError: a feature that no table reads, tables of several widths, with ``concat`` a target of a table that no
            feature of the session reads; when run, a session that is too long, features of unequal length, or a row of
            several targets.

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
        combine: Combine = "sum",
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
        check_tables(tables)
        check_features(tables, session, target)
        super().__init__(tables, dense, device)
        self.out_features = mlp_widths[-1] if mlp_widths else 0
        slots = target_slots(tables, session, target, combine)
        # The target is one more step.
        steps = max_length + 1 if target else max_length
        encoder = SessionEncoder(
            step_width(tables, session, combine),
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
        self.network = _SessionNetwork(
            encoder, tuple(session), tuple(target), pooling, combine, slots
        )
        inputs = self.network.out_features + len(self.dense)
        self.mlp = mlp(inputs, mlp_widths, activation=activation, dropout=dropout)

    def of_steps(
        self,
        embedded: Mapping[str, JaggedTensor | Padded],
        dense: Tensor,
        host_lengths: Mapping[str, Tensor] | None,
    ) -> Tensor:
        """Returns (B, D'), the MLP of the pooled steps and the dense columns."""
        return self.mlp(torch.cat([self.network(embedded, host_lengths), dense], dim=1))  # type: ignore[no-any-return]


class _SessionNetwork(nn.Module):
    """Pools looked-up features to (B, pooled width).

    It has no tables, so that TorchRec's pipelines do not trace into it.
    """

    def __init__(
        self,
        encoder: SessionEncoder,
        session: tuple[str, ...],
        target: tuple[str, ...],
        pooling: Pooling,
        combine: Combine = "sum",
        slots: Sequence[int] = (),
    ) -> None:
        super().__init__()
        check_choice("pooling", pooling, get_args(Pooling))
        self.encoder = encoder
        self.session = session
        self.target = target
        self.pooling = pooling
        self.combine = combine
        self.slots = list(slots)

    def forward(
        self,
        embedded: Mapping[str, JaggedTensor | Padded],
        host_lengths: Mapping[str, Tensor] | None,
    ) -> Tensor:
        first = embedded[self.session[0]]
        if isinstance(first, Padded):
            steps = _combined(embedded, self.session, self.combine)
            return self.pooled_padded(steps, first.lengths())
        lengths = _lengths(embedded, self.session, host_lengths)
        steps = _combined(embedded, self.session, self.combine)
        if not self.target:
            return self.pooled(
                steps, Packing(lengths, self.encoder.attention, device=steps.device)
            )
        ones = _lengths(embedded, self.target, host_lengths)
        wrong = (ones > 1).nonzero()
        if len(wrong):
            row = int(wrong[0])
            raise ValueError(
                f"target feature '{self.target[0]}' has {int(ones[row])} values in row {row} of the batch: must be one "
                "item, or none in a padding row; give each candidate a row of its own"
            )
        targets = _combined(embedded, self.target, self.combine)
        if self.combine == "concat":
            targets = _in_slots(
                targets.reshape(len(targets), len(self.target), -1),
                self.slots,
                len(self.session),
            )
        return self.with_targets(
            steps, lengths.cumsum(0) - lengths, lengths, targets, ones
        )

    def with_targets(
        self,
        steps: Tensor,
        starts: Tensor,
        lengths: Tensor,
        targets: Tensor,
        ones: Tensor,
    ) -> Tensor:
        """Returns (B, pooled width) of B sequences, each followed by its target.

        Args:
            steps: (N, D) steps, those of a sequence one after the other.
            starts: (B,) index of each sequence's first step.
            lengths: (B,) steps of each sequence.
            targets: (T, D) targets, in the order of their sequences.
            ones: (B,) 1 for a sequence with a target, else 0. Like starts and lengths, it is on the host.
        """
        packing = Packing(lengths + ones, self.encoder.attention, device=steps.device)
        rows, index = packing.host.rows, packing.host.before
        of_targets = len(steps) + ones.cumsum(0) - ones
        # By one index, because a mask or a sort would wait for a GPU.
        places = torch.where(
            index < lengths[rows], starts[rows] + index, of_targets[rows]
        )
        return self.pooled(
            torch.cat([steps, targets]).index_select(0, packing.moved(places)), packing
        )

    def pooled_padded(self, steps: Tensor, lengths: Tensor) -> Tensor:
        """Returns (B, pooled width) of padded steps (B, S, D)."""
        last_first = from_end(self.encoder.padded(steps, lengths), lengths)
        if self.pooling == "flatten":
            return last_first.flatten(1)
        if self.pooling == "last":
            return last_first[:, 0]
        return last_first.sum(1) / lengths.clamp(min=1)[:, None]

    @property
    def out_features(self) -> int:
        """The pooled width."""
        width = self.encoder.width
        return width * self.encoder.max_length if self.pooling == "flatten" else width

    def pooled(self, steps: Tensor, packing: Packing) -> Tensor:
        """Returns (B, pooled width) of packed steps (P, D)."""
        steps = self.encoder.encode(steps, packing)
        size = len(packing.lengths)
        width = steps.shape[1]
        if self.pooling == "flatten":
            padded = steps.new_zeros(size * self.encoder.max_length, width)
            return padded.index_copy(
                0, packing.rows * self.encoder.max_length + packing.to_end, steps
            ).view(size, -1)
        rows = steps.new_zeros(size, width)
        if self.pooling == "last":
            with_steps, last = packing.last_steps
            return rows.index_copy(0, with_steps, steps[last])
        return rows.index_add(
            0, packing.rows, steps / packing.lengths[packing.rows, None]
        )


class SessionSteps(_SequenceTables):
    """Passes the embedded steps of a session on to a :class:`SessionTop`, which sees the target too.

    Its output is (B, S x (W + 1) + Fd): S steps, oldest first, each the sum of its features' embeddings, or their
    concatenation, with a last number that is 1, zeros for steps that are not there, then the dense columns.

    Args:
        tables: TorchRec EmbeddingConfigs of one width D.
        session: features of the steps, oldest first, equally long in a row.
        max_length: S; of a longer session the most recent steps are read, in training and in requests alike.
        dense: names of dense columns.
        combine: see :class:`SessionTower`.
        device: device of the tables; ``meta`` declares them without memory.

    Raises:
        ValueError: a feature that no table reads, tables of several widths; when run, features of unequal length.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        *,
        session: Sequence[str],
        max_length: int = 20,
        dense: Sequence[str] = (),
        combine: Combine = "sum",
        device: torch.device | None = None,
    ) -> None:
        check_tables(tables)
        check_features(tables, session, ())
        super().__init__(tables, dense, device)
        self.network = _StepsNetwork(tuple(session), max_length, combine)
        self.out_features = max_length * (
            step_width(tables, session, combine) + 1
        ) + len(self.dense)

    def of_steps(
        self,
        embedded: Mapping[str, JaggedTensor | Padded],
        dense: Tensor,
        host_lengths: Mapping[str, Tensor] | None,
    ) -> Tensor:
        """Returns (B, S x (W + 1) + Fd)."""
        return torch.cat(
            [self.network(embedded, dense.dtype, host_lengths), dense], dim=1
        )


class _StepsNetwork(nn.Module):
    """Pads looked-up steps; has no tables, so TorchRec's pipelines do not trace into it."""

    def __init__(
        self, session: tuple[str, ...], max_length: int, combine: Combine
    ) -> None:
        super().__init__()
        self.session = session
        self.max_length = max_length
        self.combine = combine

    def forward(
        self,
        embedded: Mapping[str, JaggedTensor | Padded],
        dtype: torch.dtype,
        host_lengths: Mapping[str, Tensor] | None,
    ) -> Tensor:
        first = embedded[self.session[0]]
        if isinstance(first, Padded):
            # Its L is S already.
            there = first.mask()[:, :, None].to(dtype)
            steps = _combined(embedded, self.session, self.combine).to(dtype)
            return torch.cat([steps * there, there], dim=2).flatten(1)
        lengths = _lengths(embedded, self.session, host_lengths)
        steps = _combined(embedded, self.session, self.combine)
        packing = Packing(lengths, device=steps.device)
        recent = packing.moved((packing.host.to_end < self.max_length).nonzero()[:, 0])
        rows = packing.rows[recent]
        to_end = packing.to_end[recent]
        indices = (
            rows * self.max_length
            + packing.lengths.clamp(max=self.max_length)[rows]
            - 1
            - to_end
        )
        # A last number of 1 tells a step from one that is not there.
        flagged = torch.nn.functional.pad(steps[recent].to(dtype), (0, 1), value=1.0)
        padded = flagged.new_zeros(len(lengths) * self.max_length, flagged.shape[1])
        return padded.index_copy(0, indices, flagged).view(len(lengths), -1)


class SessionTop(InteractionLayer):
    """A top NN over :class:`SessionSteps`, other towers and a target: a transformer over steps and target, then MLPs.

    With ``position="none"`` the target has a learned vector of its own, as a time gap of 0 would have.

    Args:
        widths: width of each tower's output, in order: the steps', those of other towers, and last the target's, whose
            first ``targets`` x D numbers are the embeddings of the target's features.
        width: D of the features.
        targets: number of the target's features that make its step.
        features: number of features that a step concatenates; 1 if they are added.
        slots: number, from 0, of the feature of a step where each of the target's features stands; where steps are
            added, nothing.
        max_length: S of the steps.
        mlp_widths: widths of an MLP over the transformer's output and the steps' dense columns alone.
        top_widths: hidden widths over that and the other towers' outputs, those of the target after its step among
            them; without any the logit is linear in them.
        layers: see :class:`SessionTower`, for all further arguments.
        heads: see above.
        hidden: see above.
        position: see above.
        pooling: see above.
        activation: see above.
        dropout: see above.
        norm_first: see above.
        attention: see above.

    Raises:
        ValueError: a setting out of its range.
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        width: int,
        targets: int = 1,
        features: int = 1,
        slots: Sequence[int] = (),
        max_length: int = 20,
        mlp_widths: Sequence[int] = BST_WIDTHS,
        top_widths: Sequence[int] = (),
        layers: int = 1,
        heads: int = 8,
        hidden: int | None = None,
        position: Position = "end",
        pooling: Pooling = "flatten",
        activation: Activation = "relu",
        dropout: float = 0.0,
        norm_first: bool = False,
        attention: Attention = "bucketed",
    ) -> None:
        super().__init__()
        step = features * width
        self.widths = list(widths)
        self._steps = (max_length, step + 1)
        self._first = max_length * (step + 1)
        self._target = (targets, width)
        self.features = features
        self.slots = list(slots)
        encoder = SessionEncoder(
            step,
            max_length + 1,
            layers=layers,
            heads=heads,
            hidden=hidden,
            activation=activation,
            dropout=dropout,
            norm_first=norm_first,
            position=position,
            attention=attention,
        )
        self.network = _SessionNetwork(encoder, (), (), pooling)
        # Without positions nothing else would tell the target from the steps; as small
        # as positions begin.
        self.target = (
            nn.Parameter(torch.randn(step) * 0.02) if position == "none" else None
        )
        # A feature of the steps, to find their lengths in the batch; bst() sets it.
        self.session = ""
        session_width = self.network.out_features + widths[0] - self._first
        self.session_mlp: nn.Module | None = None
        if mlp_widths:
            self.session_mlp = mlp(
                session_width, mlp_widths, activation=activation, dropout=dropout
            )
            session_width = mlp_widths[-1]
        # That MLP ends in a linear layer, as towers do.
        self.activation = activation_layer(activation) if mlp_widths else nn.Identity()
        others = sum(widths[1:]) - targets * width
        self.mlp = mlp(
            session_width + others,
            [*top_widths, 1],
            activation=activation,
            dropout=dropout,
        )

    @property
    def last_biases(self) -> list[Tensor]:
        """The bias of the logit, (1,)."""
        return [self.mlp[-1].bias]  # type: ignore[list-item]

    def forward(
        self, outputs: list[Tensor], host_lengths: Mapping[str, Tensor] | None = None
    ) -> Tensor:
        """Returns (B,) logits of the towers' outputs, each (B, D) of any D.

        Args:
            outputs: the towers' outputs.
            host_lengths: see :class:`torchrec_ext.batch.TowerBatch`; else they are read from the steps.
        """
        steps, *others, target = outputs
        padded = steps[:, : self._first].reshape(-1, *self._steps)
        dense = steps[:, self._first :]
        max_length = self._steps[0]
        if host_lengths and self.session in host_lengths:
            lengths = host_lengths[self.session].clamp(max=max_length).long()
        else:
            # Compared with 0.5, because a stored vector may have been rounded.
            lengths = (padded[..., -1] > 0.5).sum(1)
        targets, width = self._target
        last = _in_slots(
            target[:, : targets * width].reshape(-1, targets, width),
            self.slots,
            self.features,
        )
        if self.target is not None:
            last = last + self.target
        if torch.compiler.is_exporting():
            # A graph of a bundle packs nothing.
            places = torch.arange(max_length + 1, device=last.device)
            followed = torch.nn.functional.pad(padded[..., :-1], (0, 0, 0, 1))
            is_target = (places == lengths[:, None])[:, :, None]
            pooled = self.network.pooled_padded(
                torch.where(is_target, last[:, None], followed), lengths + 1
            )
        else:
            lengths = lengths.cpu()
            starts = torch.arange(len(padded)) * max_length
            flat = padded[..., :-1].flatten(0, 1)
            pooled = self.network.with_targets(
                flat, starts, lengths, last, torch.ones_like(lengths)
            )
        session = torch.cat([pooled, dense], dim=1)
        if self.session_mlp is not None:
            session = self.session_mlp(session)
        joined = torch.cat([session, *others, target[:, targets * width :]], dim=1)
        return self.mlp(self.activation(joined)).squeeze(1)  # type: ignore[no-any-return]


def step_width(
    tables: Sequence[EmbeddingConfig], session: Sequence[str], combine: Combine
) -> int:
    """Returns the width of a step of features of ``tables``: D, or D for each feature."""
    width: int = tables[0].embedding_dim
    return len(session) * width if combine == "concat" else width


def target_slots(
    tables: Sequence[EmbeddingConfig],
    session: Sequence[str],
    target: Sequence[str],
    combine: Combine,
) -> list[int]:
    """Returns for each target feature the index of the session's feature with the same table.

    Raises:
        ValueError: there is none, or it is another target's too, or ``combine`` is not known; with ``sum`` any will do.
    """
    check_choice("combine", combine, get_args(Combine))
    if combine == "sum":
        return []
    names: dict[str, str] = {}
    for table in tables:
        names |= dict.fromkeys(table.feature_names, table.name)
    slots: list[int] = []
    for feature in target:
        free = [
            i
            for i, name in enumerate(session)
            if names[name] == names[feature] and i not in slots
        ]
        if not free:
            raise ValueError(
                f"combine=concat: target feature '{feature}' is read from table '{names[feature]}', which "
                f"no feature left in session={list(session)} reads too; give it another tower, or "
                "combine=sum"
            )
        slots.append(free[0])
    return slots


def _in_slots(targets: Tensor, slots: Sequence[int], features: int) -> Tensor:
    """Returns the targets' step (B, W) of their features' embeddings (B, T, D): F x D with zeros, or the sum."""
    if not slots:
        return targets.sum(1)
    parts = [torch.zeros_like(targets[:, 0])] * features
    for number, slot in enumerate(slots):
        parts[slot] = targets[:, number]
    return torch.cat(parts, dim=1)


def _combined(
    embedded: Mapping[str, JaggedTensor | Padded],
    features: Sequence[str],
    combine: Combine,
) -> Tensor:
    """Returns steps (P, W), or padded ones (B, S, W): sums or concatenations of these features' embeddings."""
    values = [embedded[name].values() for name in features]
    if combine == "concat":
        return torch.cat(values, dim=-1)
    return sum(values[1:], values[0])


def _lengths(
    embedded: Mapping[str, JaggedTensor | Padded],
    features: Sequence[str],
    host_lengths: Mapping[str, Tensor] | None,
) -> Tensor:
    """Returns the lengths (B,) that all of ``features`` have, on the host.

    Raises:
        ValueError: the features are not equally long in a row.
    """
    if host_lengths and all(name in host_lengths for name in features):
        lengths = torch.stack([host_lengths[name] for name in features]).long()
    else:
        # All at once, so that a GPU is waited for once.
        lengths = (
            torch.stack([embedded[name].lengths() for name in features]).long().cpu()
        )
    different = (lengths != lengths[0]).nonzero()
    if len(different):
        feature, row = different[0].tolist()
        raise ValueError(
            f"feature '{features[feature]}' has {int(lengths[feature, row])} values in row {row} of the batch and "
            f"'{features[0]}' {int(lengths[0, row])}: features of one step must be equally many"
        )
    return lengths[0]


def check_features(
    tables: Sequence[EmbeddingConfig], session: Sequence[str], target: Sequence[str]
) -> None:
    """Refuses features of a session and its target if they do not fit the tables.

    Raises:
        ValueError: a feature that no table reads or that is in neither, no session, or tables of several widths.
    """
    widths = {table.name: table.embedding_dim for table in tables}
    if len(set(widths.values())) != 1:
        raise ValueError(
            f"tables have the widths {widths}: the features of a step must all have one embedding_dim"
        )
    table_features: list[str] = []
    for table in tables:
        table_features += table.feature_names
    unread = [name for name in (*session, *target) if name not in table_features]
    if unread or not session:
        raise ValueError(
            f"session={list(session)}, target={list(target)}: must name features of the tables, one of the session at "
            f"least; the tables read {table_features}"
        )
    unused = sorted(set(table_features) - {*session, *target})
    if unused:
        raise ValueError(
            f"features {unused} are read by the tables, but are in neither session nor target; name or remove them"
        )

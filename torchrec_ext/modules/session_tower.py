"""SessionSteps and SessionTop: a transformer over a user's steps and the target (BST, Chen et al. 2019).

The target has a tower of its own. So the steps pass through as they were looked up, and the top NN has the transformer,
which runs for each pair of a session and a target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_ext.modules.config import Combine
from torchrec_ext.modules.interaction import InteractionLayer
from torchrec_ext.modules.layers import Recorded
from torchrec_ext.modules.session_encoder import (
    Packing,
    Position,
    SessionEncoder,
    from_end,
)
from torchrec_ext.modules.tower import (
    Activation,
    Padded,
    Vectors,
    activation_layer,
    check_tables,
    mlp,
)
from torchrec_ext.schema.array_columns import dense_names
from torchrec_ext.schema.validation import check_choice

Pooling = Literal["flatten", "last", "mean"]
BST_WIDTHS = (1024, 512, 256)


class _SessionNetwork(nn.Module):
    """Pools the steps of sessions and their targets to (B, pooled width)."""

    def __init__(self, encoder: SessionEncoder, pooling: Pooling) -> None:
        super().__init__()
        check_choice("pooling", pooling, get_args(Pooling))
        self.encoder = encoder
        self.pooling = pooling

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
        packing = Packing(lengths + ones, device=steps.device)
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


class SessionSteps(Recorded, nn.Module):
    """Passes the embedded steps of a session on to a :class:`SessionTop`, which sees the target too.

    Its output is (B, S x (W + 1) + Fd): S steps, oldest first, each the sum of its features' embeddings, or their
    concatenation, with a last number that is 1, zeros for steps that are not there, then the dense columns.

    Args:
        tables: TorchRec EmbeddingConfigs of one width D.
        session: features of the steps, oldest first, equally long in a row.
        max_length: S; of a longer session the most recent steps are read, in training and in requests alike.
        dense: names of dense columns.
        combine: ``sum``, which keeps the width D; or ``concat``, steps of D x len(session).

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
    ) -> None:
        super().__init__()
        check_tables(tables)
        check_features(tables, session, ())
        self.tables = list(tables)
        self.dense = dense_names(dense)
        names: dict[str, str] = {}
        for table in tables:
            names |= {name: f"{name}@{table.name}" for name in table.feature_names}
        self._keys = [names[name] for name in session]
        self._session = tuple(session)
        self.max_length = max_length
        self._combine = combine
        width = step_width(tables, session, combine)
        self.out_features = max_length * (width + 1) + len(self.dense)

    def forward(
        self,
        vectors: Vectors,
        dense: Tensor,
        host_lengths: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Returns (B, S x (W + 1) + Fd).

        Args:
            vectors: embeddings of its tables.
            dense: (B, Fd), this tower's dense columns.
            host_lengths: see :class:`torchrec_ext.batch.TowerBatch`.
        """
        embedded: list[Any] = [vectors[key] for key in self._keys]
        first = embedded[0]
        values = [each.values() for each in embedded]
        steps = torch.cat(values, dim=-1) if self._combine == "concat" else sum(values)
        steps = steps.to(dense.dtype)
        if isinstance(first, Padded):
            # Its L is S already.
            there = first.mask()[:, :, None].to(dense.dtype)
            padded = torch.cat([steps * there, there], dim=2).flatten(1)
        else:
            padded = self._padded(steps, self._lengths(embedded, host_lengths))
        return torch.cat([padded, dense], dim=1)

    def _padded(self, steps: Tensor, lengths: Tensor) -> Tensor:
        packing = Packing(lengths, device=steps.device)
        recent = packing.moved((packing.host.to_end < self.max_length).nonzero()[:, 0])
        rows = packing.rows[recent]
        indices = (
            rows * self.max_length
            + packing.lengths.clamp(max=self.max_length)[rows]
            - 1
            - packing.to_end[recent]
        )
        # A last number of 1 tells a step from one that is not there.
        flagged = torch.nn.functional.pad(steps[recent], (0, 1), value=1.0)
        padded = flagged.new_zeros(len(lengths) * self.max_length, flagged.shape[1])
        return padded.index_copy(0, indices, flagged).view(len(lengths), -1)

    def _lengths(
        self,
        embedded: Sequence[JaggedTensor],
        host_lengths: Mapping[str, Tensor] | None,
    ) -> Tensor:
        """Returns the lengths (B,) that all features have, on the host.

        Raises:
            ValueError: the features are not equally long in a row.
        """
        names = self._session
        if host_lengths and all(name in host_lengths for name in names):
            lengths = torch.stack([host_lengths[name] for name in names]).long()
        else:
            # All at once, so that a GPU is waited for once.
            lengths = torch.stack([each.lengths() for each in embedded]).long().cpu()
        different = (lengths != lengths[0]).nonzero()
        if len(different):
            feature, row = different[0].tolist()
            raise ValueError(
                f"feature '{names[feature]}' has {int(lengths[feature, row])} values in row {row} of the batch and "
                f"'{names[0]}' {int(lengths[0, row])}: features of one step must be equally many"
            )
        return lengths[0]


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
        layers: number of transformer layers.
        heads: number of attention heads, a divisor of a step's width.
        hidden: width of each transformer layer's hidden layer; by default 4 times a step's width.
        position: a learned vector for each number of steps until the ``end``, so that the target's is 0 and the latest
            step's 1, or since the ``start``; ``none`` if a feature of the steps says when they were.
        pooling: ``flatten`` concatenates S + 1 steps as BST does, the target first; ``last`` takes the last step, the
            target; ``mean`` the mean of the steps.
        activation: activation of transformer and MLP.
        dropout: share of values set to 0 in transformer and MLP.
        norm_first: see :class:`TransformerLayer`; BST normalises last.

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
        )
        self.network = _SessionNetwork(encoder, pooling)
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

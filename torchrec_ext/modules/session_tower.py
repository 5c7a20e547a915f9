"""SessionSteps and SessionTop: a transformer over a user's steps and the target (BST, Chen et al. 2019).

The target has a tower of its own. So the steps pass through as they were looked up, and the top NN has the transformer,
which runs for each pair of a session and a target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from torchrec.modules.embedding_configs import EmbeddingConfig

from torchrec_ext.modules.interaction import InteractionLayer
from torchrec_ext.modules.session_encoder import Position, SessionEncoder, from_end
from torchrec_ext.modules.tower import Activation, Padded, Vectors, check_tables, mlp

BST_WIDTHS = (1024, 512, 256)


class SessionSteps(nn.Module):
    """Passes the embedded steps of a session on to a :class:`SessionTop`, which sees the target too.

    Its output is (B, S x (W + 1)): S steps, oldest first, each its features' embeddings side by side, W wide, with a
    last number that is 1, and zeros for steps that are not there.

    Args:
        tables: TorchRec EmbeddingConfigs of one width D.
        session: features of the steps, oldest first, equally long in a row.
        max_length: S; of a longer session the most recent steps are read, in training and in requests alike.

    Raises:
        ValueError: when run, features of unequal length.
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        *,
        session: Sequence[str],
        max_length: int = 20,
    ) -> None:
        super().__init__()
        check_tables(tables)
        self.tables = list(tables)
        self.dense: tuple[str, ...] = ()
        names: dict[str, str] = {}
        for table in tables:
            names |= {name: f"{name}@{table.name}" for name in table.feature_names}
        self._keys = [names[name] for name in session]
        self._session = tuple(session)
        self.max_length = max_length
        self.out_features = max_length * (len(session) * tables[0].embedding_dim + 1)

    def forward(self, vectors: Vectors, dense: Tensor) -> Tensor:
        """Returns (B, S x (W + 1)) of the embeddings of its tables; ``dense`` (B, 0) has the type that steps get."""
        embedded: list[Any] = [vectors[key] for key in self._keys]
        is_padded = isinstance(embedded[0], Padded)
        if not is_padded:
            lengths = self._lengths([each.lengths().long() for each in embedded])
        steps = torch.cat([each.values() for each in embedded], -1).to(dense.dtype)
        if is_padded:
            # Its L is S already.
            is_step = embedded[0].mask()
        else:
            recent = lengths.clamp(max=self.max_length)[:, None]
            index = torch.arange(self.max_length, device=steps.device)
            is_step = index < recent
            # Padding reads a row of zeros after the steps.
            first = lengths.cumsum(0)[:, None] - recent
            places = torch.where(is_step, first + index, len(steps))
            steps = torch.cat([steps, steps.new_zeros(1, steps.shape[1])])
            steps = steps.index_select(0, places.flatten()).view(*places.shape, -1)
        # A last number of 1 tells a step from one that is not there.
        there = is_step[:, :, None].to(dense.dtype)
        return torch.cat([steps * there, there], dim=2).flatten(1)

    def _lengths(self, lengths: Sequence[Tensor]) -> Tensor:
        """Returns the lengths (B,) that all features have."""
        first = lengths[0]
        differs = torch.stack(list(lengths)) != first
        # The one wait for a GPU: an assertion of a kernel would end the process without a line for the user.
        if len(lengths) > 1 and differs.any():
            feature, row = differs.nonzero()[0].tolist()
            raise ValueError(
                f"feature '{self._session[feature]}' has {int(lengths[feature][row])} values in row {row} of the batch "
                f"and '{self._session[0]}' {int(first[row])}: features of one step must be equally many"
            )
        return first


class SessionTop(InteractionLayer):
    """A top NN over :class:`SessionSteps`, other towers and a target: a transformer over steps and target, then an MLP.

    The transformer's S + 1 steps are concatenated, the target first, as BST does. With ``position="none"`` the target
    has a learned vector of its own, as a time gap of 0 would have.

    Args:
        widths: width of each tower's output, in order: the steps', those of other towers, and last the target's, whose
            first D x len(slots) numbers are the embeddings of the target's features.
        width: D of the features.
        features: number of features of a step.
        slots: number, from 0, of the feature of a step where each of the target's features stands.
        max_length: S of the steps.
        top_widths: hidden widths over the transformer's output and the other towers', those of the target after its
            step among them; without any the logit is linear in them.
        layers: number of transformer layers.
        heads: number of attention heads, a divisor of a step's width.
        hidden: width of each transformer layer's hidden layer; by default 4 times a step's width.
        position: a learned vector for each number of steps until the ``end``, so that the target's is 0 and the latest
            step's 1, or since the ``start``; ``none`` if a feature of the steps says when they were.
        activation: activation of transformer and MLP.
        dropout: share of values set to 0 in transformer and MLP.

    Raises:
        ValueError: a setting out of its range.
    """

    def __init__(
        self,
        widths: Sequence[int],
        *,
        width: int,
        features: int = 1,
        slots: Sequence[int] = (0,),
        max_length: int = 20,
        top_widths: Sequence[int] = BST_WIDTHS,
        layers: int = 1,
        heads: int = 8,
        hidden: int | None = None,
        position: Position = "end",
        activation: Activation = "relu",
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        step = features * width
        self.widths = list(widths)
        self._steps = (max_length, step + 1)
        self._target = (len(slots), width)
        self.features = features
        self.slots = list(slots)
        self.encoder = SessionEncoder(
            step,
            max_length + 1,
            layers=layers,
            heads=heads,
            hidden=hidden,
            activation=activation,
            dropout=dropout,
            norm_first=False,
            position=position,
        )
        # Without positions nothing else would tell the target from the steps; as small
        # as positions begin.
        self.target = (
            nn.Parameter(torch.randn(step) * 0.02) if position == "none" else None
        )
        self.mlp = mlp(
            step * (max_length + 1) + sum(widths[1:]) - len(slots) * width,
            [*top_widths, 1],
            activation=activation,
            dropout=dropout,
        )

    def forward(self, outputs: list[Tensor]) -> Tensor:
        """Returns (B,) logits of the towers' outputs, each (B, D) of any D."""
        steps, *others, target = outputs
        padded = steps.reshape(-1, *self._steps)
        max_length = self._steps[0]
        # Compared with 0.5, because a stored vector may have been rounded.
        lengths = (padded[..., -1] > 0.5).sum(1)
        targets, width = self._target
        last = self._in_slots(target[:, : targets * width].reshape(-1, targets, width))
        if self.target is not None:
            last = last + self.target
        index = torch.arange(max_length + 1, device=last.device)
        is_target = (index == lengths[:, None])[:, :, None]
        followed = pad(padded[..., :-1], (0, 0, 0, 1))
        followed = torch.where(is_target, last[:, None], followed)
        encoded = self.encoder(followed, lengths + 1)
        session = from_end(encoded, lengths + 1).flatten(1)
        joined = torch.cat([session, *others, target[:, targets * width :]], dim=1)
        return self.mlp(joined).squeeze(1)  # type: ignore[no-any-return]

    def _in_slots(self, targets: Tensor) -> Tensor:
        """Returns the step (B, F x D) of the target's embeddings (B, T, D), zeros where it has no feature."""
        parts = [torch.zeros_like(targets[:, 0])] * self.features
        for number, slot in enumerate(self.slots):
            parts[slot] = targets[:, number]
        return torch.cat(parts, dim=1)


def target_slots(
    tables: Sequence[EmbeddingConfig],
    session: Sequence[str],
    target: Sequence[str],
) -> list[int]:
    """Returns for each target feature the index of the session's feature with the same table.

    Raises:
        ValueError: there is none, or it is another target's too.
    """
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
                f"target feature '{feature}' is read from table '{names[feature]}', which no feature left in "
                f"session={list(session)} reads too; give it another tower"
            )
        slots.append(free[0])
    return slots


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
    features = {name for table in tables for name in table.feature_names}
    differing = sorted(features ^ {*session, *target})
    if differing or not session:
        raise ValueError(
            f"session={list(session)}, target={list(target)}: {differing} is in only one of these and the tables; name "
            "each feature of the tables once, one of the session at least"
        )

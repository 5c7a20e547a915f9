"""TowerModel: named towers, an interaction over their outputs, and a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.batch import TowerBatch
from torchrec_ext.modules.interaction import Interaction as Interaction
from torchrec_ext.modules.interaction import interaction_layer
from torchrec_ext.modules.layers import row_weights
from torchrec_ext.modules.look_ups import LookUps
from torchrec_ext.modules.losses import PairwiseLoss, bce
from torchrec_ext.modules.tower import Activation, Normalization, Tower, Towers
from torchrec_ext.schema import BatchSchema, OutOfRange

Loss = Callable[[Tensor, TowerBatch], Tensor]


class _LossModule(nn.Module):
    """Wraps a loss: TorchRec's pipelines do not trace into modules without tables, so it may branch on values."""

    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.function = function

    def forward(self, logits: Tensor, batch: TowerBatch) -> Tensor:
        return self.function(logits, batch)


class Prediction(NamedTuple):
    """The detached results of a step.

    Attributes:
        loss: () loss of the batch.
        logits: (B,) logits.
        labels: (B,) labels.
        weights: (B,) weights of the rows.
    """

    loss: Tensor
    logits: Tensor
    labels: Tensor
    weights: Tensor


class TowerModel(nn.Module):
    """Towers over one batch, an interaction from their outputs to a logit, and the loss.

    ``forward`` returns ``(loss, output)``, which TorchRec's train pipelines expect. The model holds the tables of all
    towers and looks them up together, see :class:`LookUps`; its collections take attributes of the batch, which lets
    ``TrainPipelineSparseDist`` overlap all input dists. Towers that name the same table, such as the items' for a
    user's history and for the candidate, share it with one set of weights.

    Args:
        towers: modules by name, in the order of the interaction's inputs.
        interaction: module from the list of tower outputs, each (B, D), to logits (B,).
        loss: function from (logits, batch) to the loss, ().
        shared: names of towers whose input several rows share, such as the user's beside 1 + N candidates: they run
            once per shared row, and their outputs are repeated. Logits and gradients do not change.
        device: device of the tables; ``meta`` declares them without memory, and ``hybrid_parallel`` allocates shards.

    Raises:
        ValueError: tables of one name that differ, a dense column that two towers read, or a feature that is read by a
            shared tower and another.
    """

    def __init__(
        self,
        towers: Mapping[str, Tower],
        interaction: nn.Module,
        *,
        loss: Loss = bce,
        shared: Sequence[str] = (),
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.towers = Towers(towers, shared=shared)
        self.interaction = interaction
        self.loss = _LossModule(loss)
        self._names = list(towers)
        # In the order of the towers, whatever the order of the argument.
        self._shared = [name for name in towers if name in shared]
        self._tables: list[Any] = []
        self._dense: list[str] = []
        for tower in towers.values():
            self._tables += tower.tables
            self._dense += tower.dense
        self._shared_columns = self.towers.columns(shared=True)
        self.look_ups = LookUps(
            towers, self._shared_columns, device or torch.device("cpu")
        )

    def begin_at(self, shares: Sequence[float]) -> list[float]:
        """Sets the last bias to the log-odds of a positive: an untrained model then predicts the positives' share.

        Otherwise the first steps of a model of rare positives only move a bias, and a short training ends far above the
        log loss of a constant prediction. Interactions without a bias and heads with another loss than binary cross
        entropy stay as they are.

        Args:
            shares: share of positives among the training rows, above 0 and below 1, of each task.

        Returns:
            The log-odds that were set.
        """
        log_odds: list[float] = []
        if self.loss.function is not bce:
            return log_odds
        biases = getattr(self.interaction, "last_biases", [])[-len(shares) :]
        # Not strict: an interaction without a bias has none to set.
        for share, bias in zip(shares, biases, strict=False):
            log_odds.append(math.log(share / (1 - share)))
            nn.init.constant_(bias, log_odds[-1])
        return log_odds

    def expect_rows(self, *, negatives: int, label: str | None = None) -> None:
        """Tells the loss about its rows, before the first step.

        Args:
            negatives: N that the loader draws for each positive.
            label: column of the rows' own labels; None if every row is a positive.

        Raises:
            ValueError: the loss cannot learn from such rows.
        """
        if isinstance(self.loss.function, PairwiseLoss):
            self.loss.function.expect_rows(negatives=negatives, label=label)

    @property
    def calibrated(self) -> bool:
        """Whether the logits are trained to be log-odds of the label, as log loss and calibration assume."""
        return not isinstance(self.loss.function, PairwiseLoss)

    def schema(
        self,
        *,
        out_of_range: OutOfRange = "error",
        oov_ids: Mapping[str, int] | None = None,
    ) -> BatchSchema:
        """Returns the schema of the model's batches.

        Args:
            out_of_range: effect of an id outside its table: ``error``, or ``oov`` for its out-of-vocabulary row.
            oov_ids: out-of-vocabulary row of each feature, by feature; by default 0.
        """
        return BatchSchema.from_tables(
            self._tables,
            dense=self._dense,
            shared=self._shared_columns,
            label_range=(0.0, 1.0) if self.loss.function is bce else None,
            out_of_range=out_of_range,
            oov_ids=oov_ids,
        )

    def embed(self, tower: str, batch: TowerBatch) -> Tensor:
        """Returns the output of one tower, (B, D), or (Q, D) of a shared one; features of others may be empty bags.

        Raises:
            ValueError: there is no such tower.
        """
        if tower not in self._names:
            raise ValueError(f"tower {tower!r} is not one of {list(self._names)}")
        return self.towers(self.look_ups(batch, [tower]), batch, [tower])[tower]  # type: ignore[no-any-return]

    def outputs(self, batch: TowerBatch) -> list[Tensor]:
        """Returns the output of each tower, (B, D), in order."""
        outputs = self.towers(self.look_ups(batch, self._names), batch)
        in_order = []
        for name in self._names:
            output = outputs[name]
            if name in self._shared:
                output = batch.shared.spread(output)  # type: ignore[union-attr]
            in_order.append(output)
        return in_order

    def logits(self, batch: TowerBatch) -> Tensor:
        """Returns the logits of the batch, (B,)."""
        outputs = self.outputs(batch)
        with row_weights(batch.weights):
            return self.interaction(outputs)  # type: ignore[no-any-return]

    def forward(self, batch: TowerBatch) -> tuple[Tensor, Prediction]:
        """Returns the loss, (), to call backward on, and the :class:`Prediction`."""
        logits = self.logits(batch)
        loss = self.loss(logits, batch)
        # Detached, so that whoever keeps predictions of many steps keeps no graphs.
        return loss, Prediction(
            loss.detach(), logits.detach(), batch.labels, batch.weights
        )


def two_tower(
    user_tables: Sequence[EmbeddingBagConfig],
    item_tables: Sequence[EmbeddingBagConfig],
    *,
    user_dense: Sequence[str] | Mapping[str, int] = (),
    item_dense: Sequence[str] | Mapping[str, int] = (),
    tower_widths: Sequence[int] = (64, 32),
    interaction: Interaction = "top_nn",
    top_widths: Sequence[int] = (64,),
    activation: Activation = "relu",
    normalization: Normalization = "none",
    dropout: float = 0.0,
    loss: Loss = bce,
    shared: Sequence[str] = (),
    device: torch.device | None = None,
) -> TowerModel:
    """Makes a TowerModel of user features -> NN_user, item features -> NN_item, and an interaction over both outputs.

    Args:
        user_tables: tables of the tower ``user``; may be none if it has dense columns.
        item_tables: tables of the tower ``item``; may be none if it has dense columns.
        user_dense: names of the user tower's dense columns; or the number of values that each has in a row, by name,
            for array columns.
        item_dense: names of the item tower's dense columns, as ``user_dense``.
        tower_widths: MLP widths of both towers; the last is D.
        interaction: ``top_nn`` (concatenation, MLP, logit; Covington et al. 2016), ``dot`` or another of
            :func:`interaction_layer`.
        top_widths: hidden widths of the top NN, where the interaction has one.
        activation: activation between layers.
        normalization: layer before each activation between layers: ``layer``, ``batch`` or ``none``.
        dropout: share of values set to 0 after each activation.
        loss: function from (logits, batch) to the loss, ().
        shared: towers that run once for the rows that share their input, usually ``("user",)``.
        device: device of the tables; ``meta`` declares them without memory.

    Example:
        >>> def table(name: str, rows: int) -> EmbeddingBagConfig:
        ...     return EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=8)
        >>> model = two_tower([table("user_id", 100)], [table("item_id", 50)], user_dense=["age"])
        >>> model.schema().keys, model.schema().dense
        (['user_id', 'item_id'], ('age',))

        Two networks over dense columns alone, one array column each:

        >>> two_tower([], [], user_dense={"profile": 60}, item_dense={"content": 40}).schema().dense[59:61]
        ('profile[59]', 'content[0]')
    """
    layers: dict[str, Any] = {
        "activation": activation,
        "normalization": normalization,
        "dropout": dropout,
    }
    towers = {}
    for name, tables, dense in (
        ("user", user_tables, user_dense),
        ("item", item_tables, item_dense),
    ):
        towers[name] = Tower(
            tables,
            tower_widths,
            dense=dense,
            **layers,
        )
    widths = [tower.out_features for tower in towers.values()]
    top = interaction_layer(interaction, widths, top_widths, **layers)
    return TowerModel(towers, top, loss=loss, shared=shared, device=device)

"""TowerModel: N named towers, an interaction over their outputs, a loss."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.shared_tables import shared_tables
from torchrec_ext.modules.interaction_choice import Interaction as Interaction
from torchrec_ext.modules.interaction_choice import interaction_layer
from torchrec_ext.modules.losses import bce
from torchrec_ext.modules.tower import Activation, Normalization, Tower
from torchrec_ext.schema import BatchSchema, OutOfRange

Loss = Callable[[Tensor, TowerBatch], Tensor]


class _LossModule(nn.Module):
    """The loss as a module: TorchRec's pipelines do not trace into modules without tables, so it may branch on values."""

    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.function = function

    def forward(self, logits: Tensor, batch: TowerBatch) -> Tensor:
        return self.function(logits, batch)


class Prediction(NamedTuple):
    """What a step leaves behind, detached: ``loss`` (), ``logits``, ``labels`` and ``weights`` (B,)."""

    loss: Tensor
    logits: Tensor
    labels: Tensor
    weights: Tensor


class TowerModel(nn.Module):
    """Towers that read one batch, an interaction that turns their outputs into a logit, and the loss.

    ``forward`` returns what TorchRec's train pipelines expect: ``(loss, output)``. Every tower takes the batch's whole
    KeyedJaggedTensor as an attribute of the batch, which is what lets ``TrainPipelineSparseDist`` overlap all their input dists.

    Towers that name the same EmbeddingBagConfig, such as the items' for a user's history and for the candidate, share one table
    with one set of weights: see :class:`SharedTables`.

    Args:
        towers: by name; the order is that of the interaction's inputs.
        interaction: a module from the list of tower outputs, each (B, D), to logits (B,).
        loss: a function of (logits, batch) to ().
        shared: names of towers whose input several rows share, such as the user's beside 1 + N candidates: they run once per
            shared row, and their outputs are repeated. Logits and gradients are those of the plain form.

    Raises:
        ValueError: tables of one name that differ, a dense column of two towers, or a feature of a shared and of another tower, or
            of one with weights and of another without.
    """

    def __init__(
        self, towers: Mapping[str, Tower], interaction: nn.Module, *, loss: Loss = bce, shared: Sequence[str] = ()
    ) -> None:
        super().__init__()
        if not towers:
            raise ValueError("a TowerModel needs at least one tower")
        self.towers = nn.ModuleDict(towers)
        self.interaction = interaction
        self.loss = _LossModule(loss)
        unknown = sorted(set(shared) - set(towers))
        if unknown:
            raise ValueError(f"shared names {unknown}, which are not towers; the towers are {list(towers)}")
        self._shared = frozenset(shared)
        columns = {False: self._columns(False), True: self._columns(True)}
        dense = [name for tower in towers.values() for name in tower.dense]
        twice = sorted({name for name in dense if dense.count(name) > 1})
        if twice:
            raise ValueError(f"dense columns {twice} are read by more than one tower; give each tower a column of its own name")
        both = sorted(set(columns[False]) & set(columns[True]))
        if both:
            raise ValueError(f"features {both} are read by a shared tower and by another; share both towers, or give each its own")
        self.shared_tables = shared_tables(towers, columns[True], _weights(self.towers))
        self._dense: dict[str, slice] = {}
        starts = {False: 0, True: 0}
        for name, tower in towers.items():
            start = starts[name in self._shared]
            starts[name in self._shared] = stop = start + len(tower.dense)
            self._dense[name] = slice(start, stop)

    def _columns(self, shared: bool) -> list[str]:
        """The columns that the shared towers read, or the others."""
        towers: list[Tower] = [tower for name, tower in self.towers.items() if (name in self._shared) == shared]  # type: ignore[misc]
        return [name for tower in towers for table in tower.tables for name in table.feature_names] + [
            name for tower in towers for name in tower.dense
        ]

    def schema(self, *, out_of_range: OutOfRange = "error", oov_ids: Mapping[str, int] | None = None) -> BatchSchema:
        """The columns that a batch for this model needs."""
        towers: list[Tower] = list(self.towers.values())  # type: ignore[arg-type]
        return BatchSchema.from_tables(
            [table for tower in towers for table in tower.tables],
            dense=[name for tower in towers for name in tower.dense],
            shared=self._columns(True),
            label_range=(0.0, 1.0) if self.loss.function is bce else None,
            out_of_range=out_of_range,
            oov_ids=oov_ids,
            weights=_weights(self.towers),
        )

    def embed(self, tower: str, batch: TowerBatch) -> Tensor:
        """(B, D), of a shared tower (Q, D): the output of one tower; the features of the others may be empty bags."""
        if tower not in self._dense:
            raise ValueError(f"tower {tower!r} is not one of {list(self._dense)}")
        return self._output(tower, batch, self._lent(batch, [tower]))

    def _lent(self, batch: TowerBatch, towers: Iterable[str]) -> dict[str, Tensor]:
        """What the tables of several towers hold for ``towers``, looked up once."""
        if self.shared_tables is None or self.shared_tables.readers.isdisjoint(towers):
            return {}
        return self.shared_tables(batch)  # type: ignore[no-any-return]

    def _output(self, tower: str, batch: TowerBatch, lent: dict[str, Tensor]) -> Tensor:
        rows: Any = batch.shared if tower in self._shared else batch
        columns = rows.sparse, rows.dense[:, self._dense[tower]]
        if self.shared_tables is not None and tower in self.shared_tables.readers:
            return self.towers[tower](*columns, lent)  # type: ignore[no-any-return]
        return self.towers[tower](*columns)  # type: ignore[no-any-return]

    def outputs(self, batch: TowerBatch) -> list[Tensor]:
        """(B, D) of each tower, in order."""
        outputs, lent = [], self._lent(batch, self._dense)
        for name in self._dense:
            output = self._output(name, batch, lent)
            outputs.append(output[batch.shared.index] if name in self._shared else output)  # type: ignore[union-attr]
        return outputs

    def logits(self, batch: TowerBatch) -> Tensor:
        """(B,) logits."""
        return self.interaction(self.outputs(batch))  # type: ignore[no-any-return]

    def forward(self, batch: TowerBatch) -> tuple[Tensor, Prediction]:
        """The loss, (), to call backward on, and the :class:`Prediction`."""
        logits = self.logits(batch)
        loss = self.loss(logits, batch)
        return loss, Prediction(loss.detach(), logits.detach(), batch.labels, batch.weights)


def _weights(towers: nn.ModuleDict) -> dict[str, str]:
    """By feature the column of its ids' weights; TorchRec's sharded collections use weights wherever a batch has them."""
    named: dict[str, dict[str | None, str]] = {}
    for name, tower in towers.items():
        weights = getattr(tower, "weights", {})
        for feature in (feature for table in tower.tables for feature in table.feature_names):  # type: ignore[union-attr]
            named.setdefault(feature, {})[weights.get(feature)] = name
    for feature, columns in named.items():
        if len(columns) > 1:
            said = " and ".join(f"{column or 'none'} in tower '{tower}'" for column, tower in columns.items())
            raise ValueError(f"feature '{feature}' has weights {said}; give it the same weights in every tower that reads it")
    return {feature: column for feature, (column, *_) in named.items() if column}


def two_tower(
    user_tables: Sequence[EmbeddingBagConfig],
    item_tables: Sequence[EmbeddingBagConfig],
    *,
    user_dense: Sequence[str] = (),
    item_dense: Sequence[str] = (),
    tower_widths: Sequence[int] = (64, 32),
    interaction: Interaction = "top_nn",
    top_widths: Sequence[int] = (64,),
    activation: Activation = "relu",
    normalization: Normalization = "none",
    dropout: float = 0.0,
    residual: bool = False,
    loss: Loss = bce,
    shared: Sequence[str] = (),
    device: torch.device | None = None,
) -> TowerModel:
    """User features -> NN_user, item features -> NN_item, then a top NN over both outputs or their dot product.

    Args:
        user_tables: tables of the tower ``user``.
        item_tables: tables of the tower ``item``.
        user_dense: names of the user tower's dense columns.
        item_dense: names of the item tower's dense columns.
        tower_widths: MLP widths of both towers; the last is D.
        interaction: ``top_nn`` (concatenation, MLP, logit; Covington et al. 2016), ``dot`` or another of
            :func:`interaction_layer`.
        top_widths: hidden widths of the top NN, where the interaction has one.
        activation: between layers.
        normalization: before each activation between layers: ``layer``, ``batch`` or ``none``.
        dropout: after each activation.
        residual: add the input of each hidden layer of a tower that is as wide as its output.
        loss: a function of (logits, batch).
        shared: towers that run once for the rows that share their input, usually ``("user",)``.
        device: of the tables; ``meta`` declares them without memory.

    Example:
        >>> table = lambda name, rows: EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=8)
        >>> model = two_tower([table("user_id", 100)], [table("item_id", 50)], user_dense=["age"])
        >>> model.schema().keys, model.schema().dense
        (['user_id', 'item_id'], ('age',))
    """
    layers: dict[str, Any] = {"activation": activation, "normalization": normalization, "dropout": dropout}
    towers = {
        name: Tower(tables, tower_widths, dense=dense, residual=residual, device=device, **layers)
        for name, tables, dense in (("user", user_tables, user_dense), ("item", item_tables, item_dense))
    }
    widths = [tower.out_features for tower in towers.values()]
    top = interaction_layer(interaction, widths, top_widths, **layers)
    return TowerModel(towers, top, loss=loss, shared=shared)

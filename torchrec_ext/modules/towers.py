"""Towers: the named towers of a model, run one after the other on each rank, or placed on ranks of their own by a plan."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.modules.layers import weighs_rows
from torchrec_ext.modules.tower import Lent, Tower


class Reads(NamedTuple):
    """What a tower takes from a batch: the shared rows or the others, columns of their dense matrix, and maybe their weights."""

    shared: bool
    dense: slice
    weights: bool = False


class Towers(nn.ModuleDict):
    """Towers by name, called once for all of them, so that a sharder can take them over as one module.

    Args:
        towers: by name; each has ``tables``, ``dense`` and ``out_features``, as :class:`Tower`.
        shared: names of the towers that read the rows that several rows of a batch share.

    Raises:
        ValueError: an unknown name in ``shared``, a dense column of two towers, or a feature of a shared and of another tower.
    """

    def __init__(self, towers: Mapping[str, Tower], *, shared: Collection[str] = ()) -> None:
        super().__init__(towers)
        unknown = sorted(set(shared) - set(towers))
        if unknown:
            raise ValueError(f"shared names {unknown}, which are not towers; the towers are {list(towers)}")
        self.reads: dict[str, Reads] = {}
        ends = {False: 0, True: 0}
        for name, tower in towers.items():
            start = ends[name in shared]
            ends[name in shared] = stop = start + len(tower.dense)
            self.reads[name] = Reads(name in shared, slice(start, stop), weighs_rows(tower))
        _check_columns(self)

    def weigh_rows(self, *, shared: bool) -> bool:
        """Whether one of the shared towers, or of the others, takes the weights of its rows."""
        return any(reads.weights and reads.shared == shared for reads in self.reads.values())

    def columns(self, *, shared: bool) -> list[str]:
        """The features and dense columns that the shared towers read, or the others."""
        towers: list[Tower] = [self[name] for name, reads in self.reads.items() if reads.shared == shared]  # type: ignore[misc]
        return [name for tower in towers for table in tower.tables for name in table.feature_names] + [
            name for tower in towers for name in tower.dense
        ]

    def forward(
        self,
        sparse: KeyedJaggedTensor,
        dense: Tensor,
        shared_sparse: KeyedJaggedTensor | None = None,
        shared_dense: Tensor | None = None,
        *,
        lent: Lent | None = None,
        names: Sequence[str] | None = None,
        weights: Tensor | None = None,
        shared_weights: Tensor | None = None,
    ) -> dict[str, Tensor]:
        """(B, D) of each tower by name, (Q, D) of shared ones.

        Args:
            sparse: the batch's KeyedJaggedTensor, stride B.
            dense: (B, Fd).
            shared_sparse: that of the shared towers, stride Q; None where none of them is called.
            shared_dense: (Q, Fd) likewise.
            lent: see :meth:`Tower.forward`.
            names: the towers to run; all where not given.
            weights: (B,) of the rows, for batch normalisation; all 1 where not given.
            shared_weights: (Q,) of the shared rows, likewise.
        """
        outputs = {}
        for name in self.reads if names is None else names:
            shared, own, weighs = self.reads[name]
            rows, columns = (shared_sparse, shared_dense) if shared else (sparse, dense)
            taken: dict[str, Any] = {"lent": lent} if lent and hasattr(self[name], "lend") else {}
            if weighs:
                taken["weights"] = shared_weights if shared else weights
            outputs[name] = self[name](rows, columns[:, own], **taken)  # type: ignore[index]
        return outputs


def _check_columns(towers: Towers) -> None:
    dense = [name for tower in towers.values() for name in tower.dense]  # type: ignore[union-attr]
    twice = sorted({name for name in dense if dense.count(name) > 1})
    if twice:
        raise ValueError(f"dense columns {twice} are read by more than one tower; give each tower a column of its own name")
    both = sorted(set(towers.columns(shared=False)) & set(towers.columns(shared=True)))
    if both:
        raise ValueError(f"features {both} are read by a shared tower and by another; share both towers, or give each its own")

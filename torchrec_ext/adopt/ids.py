"""StepIds: dynamic ids of an adopted model, whose rows are decided before a captured step.

Dynamo traces each look-up of such an embedding with a mark where ids become rows. Before each call of the graph, the
ids at its marks are computed from the batch, in the order of the forward, and looked up: this admits, evicts and begins
rows anew, as in the eager forward. The captured step then takes the rows as inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchrec_ext.adopt.graph import ForwardGraph, the_rows
from torchrec_ext.adopt.source import AnyBatch, graph_inputs
from torchrec_ext.ids import DynamicEmbeddings


class StepIds:
    """Decides the rows of each step once, also if its forward runs again, as for a comparison.

    Args:
        embeddings: the embeddings with dynamic ids; steps end by :meth:`end_step` from now on.
    """

    def __init__(self, embeddings: DynamicEmbeddings) -> None:
        self.embeddings = embeddings
        # Of the look-ups of this step so far, and the number of those that the current
        # forward has read.
        self._rows: list[Tensor] = []
        self._place = 0
        self.end_step = embeddings.read_by(self._read)

    @property
    def weights(self) -> list[Tensor]:
        """The tables, in which a forward begins rows anew."""
        return self.embeddings.weights

    def begin_step(self) -> None:
        """Forgets the look-ups of the step before."""
        self._rows = []
        self._place = 0

    def repeat(self) -> None:
        """Makes the next forward of this step read the same rows as the forward before."""
        self._place = 0

    def _read(self, path: str, ids: Tensor, is_training: bool) -> Tensor:
        if torch.compiler.is_compiling():
            return the_rows(ids, path, is_training)  # type: ignore[no-any-return]
        return self._rows_of(path, ids, is_training=is_training)

    def _rows_of(self, path: str, ids: Tensor, *, is_training: bool) -> Tensor:
        # Evaluation admits no id, so that it may look up as often as it likes.
        if not is_training:
            return self.embeddings.rows(path, ids, is_training=False)
        if self._place == len(self._rows):
            self._rows.append(self.embeddings.rows(path, ids, is_training=True))
        self._place += 1
        return self._rows[self._place - 1]

    def of_graph(
        self, graph: ForwardGraph, batch: AnyBatch, tensors: Sequence[Tensor]
    ) -> list[Tensor]:
        """Decides the rows of a captured step, in the order of the look-ups in its graph.

        Args:
            graph: the graph.
            batch: the batch.
            tensors: what Dynamo found for the graph's inputs.
        """
        if not graph.row_nodes:
            return []
        rows = []
        ids_of_nodes = graph.raw_ids(*graph_inputs(graph, batch, tensors))
        for node, ids in zip(graph.row_nodes, ids_of_nodes, strict=True):
            _, path, is_training = node.args
            rows.append(self._rows_of(path, ids, is_training=is_training))
        return rows

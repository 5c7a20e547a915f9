"""BatchBuilder: batches of users alone or of items alone, as an evaluation embeds them."""

from __future__ import annotations

import dataclasses

import torch

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.columns import Chunk, Int64, with_elements
from torchrec_ext.data.loader.batch import Answers, RowColumns, assemble, known_items
from torchrec_ext.data.loader.blocks import BlockLayout
from torchrec_ext.data.loader.config import LoaderConfig
from torchrec_ext.data.loader.table import item_table, table_of
from torchrec_ext.schema import BatchSchema, RowNumbers
from torchrec_ext.schema.batch_schema import IdReplacement


class BatchBuilder:
    """Builds batches with all keys of the schema, in its order, that hold the features of users or of items alone.

    TorchRec's sharded modules fix the keys at their first call, so a batch of users alone or of items alone carries the
    other's features as empty bags and zeros. Labels are 0.

    Args:
        schema: the columns that the model reads.
        items: row i holds the features of item i, as in ``Prepared.items``; its columns are the item's, all others the
            user's.
        rows: puts rows of the model's tables in the place of dynamic ids, see :class:`IdHook`; None if there are none.
    """

    def __init__(
        self, schema: BatchSchema, items: Chunk, *, rows: IdReplacement | None = None
    ) -> None:
        self.schema = schema
        if rows is not None:
            self.schema, _ = schema.with_hook(rows)
        self.items = with_elements(items, schema.dense)
        self._table = item_table(self.schema, self.items, torch.device("cpu"))
        # A row's item is told to training batches alone.
        plain = dataclasses.replace(schema, candidate=None)
        self._layout = BlockLayout.of(
            plain, LoaderConfig(negatives=0), (), [*self.items, *schema.tasks]
        )

    def user_batch(self, users: Chunk) -> TowerBatch:
        """Builds B rows with the user's features alone."""
        users = with_elements(users, self.schema.dense)
        table = table_of(self._layout, users, "the rows", torch.device("cpu"))
        return self._batch(table.columns(torch.arange(users.num_rows)), users.num_rows)

    def item_batch(self, item_ids: Int64) -> TowerBatch:
        """Builds B rows with the features of the items ``item_ids`` (B,) alone."""
        numbers = torch.arange(len(item_ids))
        ids = known_items(self.schema, self.items.num_rows, item_ids, numbers.numpy())
        return self._batch(self._table.columns(torch.from_numpy(ids)), len(ids))

    def _batch(self, columns: RowColumns, count: int) -> TowerBatch:
        targets = torch.zeros(count, len(self.schema.tasks))
        return assemble(
            self.schema,
            columns,
            Answers(
                torch.zeros(count),
                torch.ones(count),
                targets if self.schema.tasks else None,
            ),
            total_weight=torch.tensor(float(count)),
            numbers=RowNumbers(torch.arange(count), torch.arange(count)),
        )

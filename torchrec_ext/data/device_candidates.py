"""DeviceCandidates: the draws for rows on a device, and the features of what is drawn."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from torchrec_ext.data.blocks import Layout
from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.device_negatives import on_device
from torchrec_ext.data.device_table import DeviceTable
from torchrec_ext.data.item_features import known_items
from torchrec_ext.data.negatives import Negatives
from torchrec_ext.data.row_groups import RowGroup
from torchrec_ext.schema import BatchSchema

_BLOCK = 1 << 16  # rows drawn at a time where an epoch's bags are counted


class Drawn(NamedTuple):
    """``ids`` (B, 1 + N) int64, the positive first, and their ``log_q``, float32, or None without negatives."""

    ids: Tensor
    log_q: Tensor | None


class DeviceCandidates:
    """The candidates of rows: each one's own item and N negatives, the same as the loader draws in numpy.

    Args:
        schema: the columns of a batch.
        rows: all rows.
        items: row i holds the features of item i.
        sampler: draws the negatives; None for N = 0.
        negatives: N.
        device: where it works.

    Raises:
        DataError: an item without features, a feature that is out of range, or a user of ``rows`` who has taken every item.
        ValueError: a sampler that has no form in torch.
    """

    def __init__(
        self,
        schema: BatchSchema,
        rows: Chunk,
        items: Chunk,
        sampler: Negatives | None,
        negatives: int,
        device: torch.device,
    ) -> None:
        self.ids = ("user_id", "item_id") if negatives else ("item_id",)
        self.features = [name for name in items if name != "item_id"]
        layout = Layout(
            features={feature.name: feature for feature in schema.sparse if feature.name in items},
            floats=tuple(name for name in schema.dense if name in items),
            out_of_range=schema.out_of_range,
        )
        where = RowGroup(name="the features of the items", file=0, number=0, rows=items.num_rows)
        self.table = DeviceTable(*layout.checked(where, items), items.num_rows, device)
        positives = known_items(schema, items.num_rows, rows["item_id"].values, np.arange(rows.num_rows))
        self._positives = torch.from_numpy(positives.astype(np.int64)).to(device)
        self._count = negatives
        self._sampler = None
        # On the CPU the same draws in numpy are several times cheaper.
        self._host = sampler if device.type == "cpu" else None
        if sampler is not None and negatives:
            users = rows["user_id"].values.astype(np.int64)
            self._users = torch.from_numpy(users).to(device)
            self._sampler = on_device(sampler, device, users=np.unique(users))

    def draw(self, rows: Tensor, epoch: int) -> Drawn:
        """The candidates of the rows with the numbers ``rows`` (B,)."""
        positives = self._positives.index_select(0, rows)
        if self._sampler is None:
            return Drawn(positives[:, None], None)
        users = self._users.index_select(0, rows)
        if self._host is not None:
            drawn = self._host.draw(users.numpy(), rows.numpy(), epoch, self._count)
            ids, log_q = torch.from_numpy(drawn.ids), torch.from_numpy(drawn.log_q)
            own = torch.from_numpy(self._host.log_q(users.numpy(), positives.clamp(min=1).numpy()))
        else:
            ids, log_q = self._sampler.draw(users, rows, epoch, self._count)
            own = self._sampler.log_q(users, positives.clamp(min=1))
        return Drawn(torch.cat([positives[:, None], ids], dim=1), torch.cat([own[:, None], log_q], dim=1))

    def lengths(self, rows: Tensor, epoch: int) -> dict[str, Tensor]:
        """(B,) by ragged feature of the items, how many ids the candidates of each row have together."""
        found: dict[str, list[Tensor]] = {name: [rows[:0]] for name in self.table.ragged}
        for block in torch.split(rows, _BLOCK) if found else ():
            ids = self.draw(block, epoch).ids
            for name, parts in found.items():
                parts.append(self.table.lengths(name, ids.reshape(-1)).view(ids.shape).sum(dim=1))
        return {name: torch.cat(parts) for name, parts in found.items()}

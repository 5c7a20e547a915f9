"""labelled_rows(): held-out positives with negatives and labels, for AUC and log loss."""

from __future__ import annotations

import numpy as np

from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.interactions import InteractionData
from torchrec_ext.data.negatives import UniformNegatives


def labelled_rows(data: InteractionData, part: str = "validation", *, negatives: int = 4, seed: int = 0) -> Chunk:
    """The positives of a part with negatives, the same at every call, and a ``label`` column: rows for AUC and log loss.

    Negatives avoid all pairs of the set, held-out ones too. To be loaded with ``LoaderConfig(negatives=0, label="label")``.

    Args:
        data: the set.
        part: ``train``, ``validation`` or ``test``.
        negatives: N per positive.
        seed: of the draws.
    """
    chunk: Chunk = getattr(data, part)
    pairs = data.pairs()
    sampler = UniformNegatives(data.num_items, pairs.users, pairs.items, seed)
    rows = np.arange(chunk.num_rows)
    drawn = sampler.draw(chunk["user_id"].values, rows, 0, negatives).ids
    labels = np.zeros((chunk.num_rows, 1 + negatives), dtype=np.float32)
    labels[:, 0] = 1.0
    ids = np.concatenate([chunk["item_id"].values[:, None], drawn], axis=1)
    return chunk.take(rows.repeat(1 + negatives)).with_columns(
        {"item_id": Column(ids.reshape(-1)), "label": Column(labels.reshape(-1))}
    )

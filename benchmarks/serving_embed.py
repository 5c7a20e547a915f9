"""embed(): 1,000,000 items through a tower into a store: ids, checked batches, tower, digest, write and sync.

Each turn is a process of its own, whose greatest memory counts: the tower's own 245 MiB and torch included.
"""

import sys
import tempfile
import time
from collections.abc import Iterator

import numpy as np
from harness import Options, Row, last_json, peak_mb, row


def main(items: int) -> None:
    import torch
    from torchrec import EmbeddingBagConfig

    from torchrec_ext.batch import TowerBatch
    from torchrec_ext.modules.tower import Tower
    from torchrec_ext.retrieval.store.writer import embed
    from torchrec_ext.schema import BatchSchema, Jagged

    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=rows, embedding_dim=64
        )
        for name, rows in (("item_id", items), ("category", 1_000))
    ]
    tower = Tower(tables, (128, 64), dense=["price"]).eval()
    schema = BatchSchema.from_tables(tables, dense=["price"])

    def blocks(size: int = 4_096) -> Iterator[tuple[np.ndarray, TowerBatch]]:
        for start in range(0, items, size):
            ids = torch.arange(start, min(start + size, items))
            sparse = {"item_id": Jagged(ids), "category": Jagged(ids % 1_000)}
            yield (
                ids.numpy(),
                schema.assemble(
                    sparse,
                    {"price": torch.ones(len(ids))},
                    labels=torch.zeros(len(ids)),
                ),
            )

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        store = embed(
            lambda batch: tower(batch.sparse, batch.dense), blocks(), f"{folder}/store"
        )
        seconds = time.perf_counter() - start
        assert len(store) == items
    print([items / seconds, peak_mb() * 1e6 / 2**30])


def rows(options: Options) -> Iterator[Row]:
    """Times embed() and reads its process's memory."""
    items = 50_000 if options.quick else 1_000_000
    turns = [
        last_json([sys.executable, __file__, items], limit_s=300)
        for _ in range(options.turns)
    ]
    rates, memory = zip(*turns, strict=True)
    yield row(
        "embed, 1,000,000 items x 64",
        rates,
        "items/s",
        better="more",
        required=200_000,
        machine="cores",
    )
    yield row(
        "embed, memory of the process, the tower's own 245 MiB and torch included",
        memory,
        "GiB",
        required=1.4,
    )


if __name__ == "__main__":
    main(int(sys.argv[1]))

"""embed(): 1,000,000 items through a tower into a store, in a process of its own, whose greatest memory counts."""

import multiprocessing
import re
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from serving_rows import Options, Row, row


def _embedded(items: int, queue: Any) -> None:
    import torch
    from torchrec import EmbeddingBagConfig

    from torchrec_ext.batch import TowerBatch
    from torchrec_ext.modules.tower import Tower
    from torchrec_ext.retrieval.store.writer import embed
    from torchrec_ext.schema import BatchSchema, Jagged

    torch.manual_seed(0)
    tables = [
        EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=64)
        for name, rows in (("item_id", items), ("category", 1_000))
    ]
    tower = Tower(tables, (128, 64), dense=["price"]).eval()
    schema = BatchSchema.from_tables(tables, dense=["price"])

    def blocks(size: int = 4_096) -> Iterator[tuple[np.ndarray, TowerBatch]]:
        for start in range(0, items, size):
            ids = torch.arange(start, min(start + size, items))
            sparse = {"item_id": Jagged(ids), "category": Jagged(ids % 1_000)}
            yield ids.numpy(), schema.assemble(sparse, {"price": torch.ones(len(ids))}, labels=torch.zeros(len(ids)))

    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        store = embed(lambda batch: tower(batch.sparse, batch.dense), blocks(), f"{folder}/store")
        seconds = time.perf_counter() - start
        assert len(store) == items
    queue.put((items / seconds, peak_gib()))


def peak_gib() -> float:
    """Of this process. Not ``ru_maxrss``, which a process inherits from the one that started it."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) / 2**20


def rows(options: Options) -> Iterator[Row]:
    """Ids, checked batches, tower, digest, write and sync included."""
    context = multiprocessing.get_context("spawn")
    found = []
    for _ in range(1 if options.quick else 3):
        queue = context.Queue()
        process = context.Process(target=_embedded, args=(50_000 if options.quick else 1_000_000, queue))
        process.start()
        found.append(queue.get(timeout=600))
        process.join()
    rate, memory = sorted(found)[len(found) // 2]
    yield row("embed, 1,000,000 items x 64", rate, "items/s", required=200_000)
    yield row("embed, memory of the process, the tower's own 245 MiB and torch included", memory, "GiB", required=1.4)

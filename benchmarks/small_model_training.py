"""Contextual NCF on the rows of small_model_baseline.py, trained by train() as a command trains it.

`python -m torchx_apps.train` reaches the same with `--loader.device cpu`, which keeps all rows in memory: order,
exact negatives, forward, backward, Adam, the check of each loss, the window of each record. `train.compile=auto`
captures the step where the run is long.
"""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from small_model_baseline import BATCH, NEGATIVES, Shape, positives

from torchrec_ext.batch import TowerBatch
from torchrec_ext.capture.policy import Compile
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
from torchrec_ext.data.negatives.samplers import UniformNegatives
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sync import SyncConfig
from torchrec_ext.models.ncf import ContextualNCF
from torchrec_ext.train.loop import Loader, TrainConfig, train

Side = Callable[[Callable[[], bool]], object]


def network(shape: Shape, shared: Sequence[str] = ("user",)) -> ContextualNCF:
    """Returns the network, its tables on the meta device.

    Args:
        shape: numbers of users and items.
        shared: towers whose input the rows of a positive and its negatives share.
    """
    warnings.filterwarnings("ignore")
    for name in ("", "torch", "torchrec", "fbgemm_gpu"):
        logging.getLogger(name).setLevel(logging.ERROR)
    torch.manual_seed(0)
    context = [f"c{index}" for index in range(21)]
    meta = torch.device("meta")
    return ContextualNCF(
        shape.users, shape.items + 1, context_dense=context, shared=shared, device=meta
    )


def loader_of(
    shape: Shape, model: ContextualNCF, *, rank: int = 0, world_size: int = 1
) -> ChunkLoader:
    """Returns a loader of the positives with 4 exact negatives each, 256 positives a rank and step."""
    user, item, context = positives(shape)
    columns = {
        f"c{index}": Column(np.ascontiguousarray(values))
        for index, values in enumerate(context.T)
    }
    return ChunkLoader(
        Chunk({"user_id": Column(user), "item_id": Column(item), **columns}),
        model.schema(),
        config=LoaderConfig(
            batch_size=BATCH * world_size, negatives=NEGATIVES, device="cpu"
        ),
        items=Chunk({"item_id": Column(np.arange(shape.items + 1))}),
        negatives=UniformNegatives(shape.items, user, item),
        rank=rank,
        world_size=world_size,
    )


def batches_of(shape: Shape, model: ContextualNCF, count: int) -> list[TowerBatch]:
    """Returns the first batches of an epoch."""
    return list(itertools.islice(loader_of(shape, model), count))


def training(
    model: ContextualNCF,
    loader: Loader,
    runtime: Runtime,
    *,
    capture: Compile = "auto",
    sync: SyncConfig | None = None,
) -> Side:
    """Returns a side of :class:`harness.Trainings`: a call of train() that lasts until it is stopped."""
    adam = OptimizerConfig(tables="adam", tables_lr=1e-3, dense_lr=1e-3)
    parallel, optimizer = hybrid_parallel(model, runtime, optimizer=adam)
    config = TrainConfig(epochs=100_000, compile=capture)
    return lambda stop: train(
        parallel, optimizer, loader, runtime, config, sync=sync, stop=stop
    )


def instances(batch: TowerBatch) -> Iterator[torch.Tensor]:
    """Yields users, items, contexts and labels of a batch, each row by itself, as the user's network reads them."""
    if batch.shared is None:
        yield from (
            batch.bags("user_id").values(),
            batch.bags("item_id").values(),
            batch.dense,
            batch.labels,
        )
        return
    index = batch.shared.index
    yield from (
        batch.shared.sparse.values()[index],
        batch.sparse.values(),
        batch.shared.dense[index],
        batch.labels,
    )

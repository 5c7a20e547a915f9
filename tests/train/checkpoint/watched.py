"""Two towers on a checkerboard, and a loader that tells the rows of each step."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.loader.loader import LoaderConfig, training_loader
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.runtime import Runtime
from torchx_apps.recipes import TwoTowerConfig, build_two_tower

Rows = list[tuple[int, ...]]
Note = Callable[[int, int, Rows], object]


class Watched:
    """A loader that tells epoch, step and rows of each step before it hands them out."""

    def __init__(self, loader: Any, note: Note) -> None:
        self._loader = loader
        self._note = note

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[TowerBatch]:
        state = self._loader.state_dict()
        for step, batch in enumerate(self._loader, state["step"]):
            users, items = (
                batch.bags(name).to_dense() for name in ("user_id", "item_id")
            )
            owners: Any = range(len(batch))
            if batch.shared is not None:
                owners = batch.shared.index.tolist()
            labels, weights = batch.labels.tolist(), batch.weights.tolist()
            rows = [
                (*users[owner].tolist(), *item.tolist(), int(label))
                for owner, item, label, weight in zip(
                    owners, items, labels, weights, strict=True
                )
                if weight
            ]
            self._note(state["epoch"], step, rows)
            yield batch

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)

    def state_dict(self, *, step: int | None = None) -> Any:
        return self._loader.state_dict(step=step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._loader.load_state_dict(state)


def towers(
    runtime: Runtime,
    data: Prepared,
    note: Note,
    optimizers: OptimizerConfig,
    *,
    plan: Any,
    dropout: float = 0.0,
    batch_size: int = 16,
) -> tuple[Any, Any, Watched]:
    """The sharded model, its optimizer, and the loader of this rank."""
    torch.manual_seed(3)
    model = build_two_tower(TwoTowerConfig(embedding_dim=8, dropout=dropout), data)
    parallel, optimizer = hybrid_parallel(
        model, runtime, plan=PlanConfig(sharding=plan), optimizer=optimizers, seed=3
    )
    torch.manual_seed(4 + runtime.rank)
    loader = training_loader(
        data,
        model.schema(),
        LoaderConfig(batch_size=batch_size, negatives=2),
        rank=runtime.rank,
        world_size=runtime.world_size,
    )
    return parallel, optimizer, Watched(loader, note)

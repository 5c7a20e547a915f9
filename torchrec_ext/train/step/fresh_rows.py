"""FreshRows: begins rows that were given to new ids anew, weights and optimizer state, under any plan."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torchrec.distributed.model_parallel import (
    DistributedModelParallel,
)
from torchrec.optim.keyed import KeyedOptimizer

from torchrec_ext.batch import Fresh
from torchrec_ext.distributed.tables import (
    draw_rows,
    table_shardings,
    tables_of,
)
from torchrec_ext.ids.index import mixed
from torchrec_ext.train.checkpoint.state import (
    LocalShard,
    Parts,
    model_state,
    table_in_name,
)


class FreshRows:
    """Writes a batch's notes about fresh rows into a model, just before the batch is looked up.

    Each rank writes the rectangles that it holds, and nothing is sent. :func:`train` does it by itself; a loop of one's
    own calls it before each forward.

    Args:
        model: model from :func:`hybrid_parallel`, or unsharded.
        optimizer: the model's optimizer, whose state of fresh rows becomes 0.

    Raises:
        ValueError: a table is in a kernel that keeps copies of its rows in a cache, which a write would miss.

    Example: (after ``model, optimizer = hybrid_parallel(...)``)
        begin_rows = FreshRows(model, optimizer)
        for batch in DynamicIdLoader(loader, schema, {"item_id": Dynamic(capacity=1_000_000)}):
            begin_rows(batch.fresh or ())
            ...
    """

    def __init__(self, model: nn.Module, optimizer: KeyedOptimizer | None) -> None:
        _check_kernels(model)
        self._model = model
        self._optimizer = optimizer
        self._configs = {config.name: config for config in tables_of(model)}
        self._weights: dict[str, list[LocalShard]] | None = None
        self._states: dict[str, list[LocalShard]] = {}

    @torch.no_grad()
    def __call__(self, notes: tuple[Fresh, ...]) -> None:
        """Begins the rows of ``notes`` anew."""
        if self._weights is None:
            # Not before the first step: a checkpoint may be loaded until then.
            self._weights = self._find_shards()
        for note in notes:
            if note.table not in self._configs:
                raise ValueError(
                    f"a note about table '{note.table}', which the model lacks; its tables are "
                    f"{', '.join(self._configs)}"
                )
            if not len(note.rows):
                continue
            values = self._drawn(note.table, note.ids)
            for shard in self._weights.get(note.table, ()):
                column = shard.offsets[1]
                rows, is_here = _here(shard, note.rows)
                block = values[is_here, column : column + shard.tensor.shape[1]]
                shard.tensor.index_copy_(0, rows, block.to(shard.tensor))
            for shard in self._states.get(note.table, ()):
                shard.tensor.index_fill_(0, _here(shard, note.rows)[0], 0)

    def _find_shards(self) -> dict[str, list[LocalShard]]:
        """Returns this rank's rectangles of the weights by table, and keeps those of the optimizer's state."""
        weights: dict[str, list[LocalShard]] = {}
        state = model_state(self._model, self._optimizer)
        for name, value in state.tensors.items():
            table = table_in_name(name)
            # A count of steps belongs to all rows, and goes on.
            if table and isinstance(value, Parts):
                by_table = self._states
                if name.endswith(".weight"):
                    by_table = weights
                by_table.setdefault(table, []).extend(value.parts)
        return weights

    def _drawn(self, table: str, ids: Tensor) -> Tensor:
        """Draws first values by the table's ``init_fn``, alike on every rank: from the ids."""
        seed = int(mixed(ids.cpu()).sum()) & (2**63 - 1)
        return draw_rows(self._configs[table], len(ids), seed)


def _here(shard: LocalShard, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the ``rows`` inside a rectangle, counted from its first one, and a mask of them."""
    local = rows.to(shard.tensor.device) - shard.offsets[0]
    is_here = (local >= 0) & (local < len(shard.tensor))
    return local[is_here], is_here.cpu()


def _check_kernels(model: nn.Module) -> None:
    if not isinstance(model, DistributedModelParallel):
        return
    for table, sharding in table_shardings(model.plan).items():
        kernel = sharding.compute_kernel
        if "caching" in kernel or "key_value" in kernel:
            raise ValueError(
                f"table '{table}': the kernel {kernel} keeps rows in a cache, where fresh rows would be missed; choose "
                "another plan.kernel, such as fused or fused_uvm"
            )

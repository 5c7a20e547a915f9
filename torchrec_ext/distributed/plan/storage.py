"""TableStorage: TorchRec's estimate of each shard's memory, with optimizer state and caches as they are allocated.

state_storage(): bytes of a shard's optimizer state, by the memory that they are in.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.constants import UVM_CACHING_RATIO
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import ShardingOption, Storage

from torchrec_ext.distributed.optim.config import Choice

# By this attribute TorchRec finds a table's optimizer.
_DECLARED = "_optimizer_classes"
_CACHING = "fused_uvm_caching"


class TableStorage(EmbeddingStorageEstimator):
    """Estimates shards as TorchRec does, but counts their optimizer state by :func:`state_storage`.

    TorchRec 1.8 multiplies a shard's bytes by a factor of the optimizer. That is too little for tables in 16 bits,
    whose state has 32, for LAMB and PartialRowWiseAdam, and for a number per row where columns are split. It also
    counts state with the rows, and in their cache, wherever FBGEMM allocates it. And it counts a cached row by its own
    width, where all tables of a cache have rows as wide as the widest of them.

    Args:
        topology: devices.
        constraints: TorchRec's constraints by table name.
        choices: optimizer of each table, by name.
    """

    def __init__(
        self,
        topology: Topology,
        constraints: Mapping[str, ParameterConstraints],
        choices: Mapping[str, Choice],
    ) -> None:
        super().__init__(topology=topology, constraints=constraints)
        self._device = topology.compute_device
        self._asked = constraints
        self._choices = choices

    def estimate(
        self,
        sharding_options: Sequence[ShardingOption],
        *arguments: Any,
        **keywords: Any,
    ) -> None:
        """Sets the storage of each shard of each option."""
        declared = []
        for option in sharding_options:
            # TorchRec counts no state for a table without an optimizer. All options of
            # a table have one tensor.
            if hasattr(option.tensor, _DECLARED):
                declared.append((option.tensor, vars(option.tensor).pop(_DECLARED)))
        try:
            super().estimate(sharding_options, *arguments, **keywords)
        finally:
            for table, classes in declared:
                setattr(table, _DECLARED, classes)
        for option in sharding_options:
            choice = self._choices[option.name]
            for shard in option.shards:
                shard.storage += state_storage(
                    choice, shard.size, option.compute_kernel, self._device
                )
        self._widen_caches(sharding_options)

    def _widen_caches(self, options: Sequence[ShardingOption]) -> None:
        """Counts each row of a cache as wide as the widest that it may share the cache with, as FBGEMM allocates it.

        Only of tables whose kernel is asked for: it is not known yet whether the planner will cache another one.
        """
        cached = []
        widest: dict[Hashable, int] = {}
        for option in options:
            asked = self._asked.get(option.name)
            if asked is None or asked.compute_kernels != [_CACHING]:
                continue
            kind = (option.path, option.sharding_type, option.tensor.dtype)
            cache = (*kind, self._choices[option.name])
            cached.append((cache, option))
            for shard in option.shards:
                widest[cache] = max(widest.get(cache, 0), shard.size[1])
        for cache, option in cached:
            load_factor = option.cache_load_factor or UVM_CACHING_RATIO
            for shard in option.shards:
                rows, columns = shard.size
                shard.storage += Storage(
                    hbm=math.ceil(rows * load_factor)
                    * (widest[cache] - columns)
                    * option.tensor.element_size(),
                    ddr=0,
                )


def state_storage(
    choice: Choice, size: Sequence[int], kernel: str, device: str
) -> Storage:
    """Returns the bytes of a shard's optimizer state on the GPU and in host memory.

    FBGEMM keeps a number per row on the GPU even if the rows are in the host's memory.

    Args:
        choice: optimizer of the table.
        size: (rows, columns) of the shard.
        kernel: compute kernel of the table.
        device: ``cpu`` or ``cuda``.
    """
    rows, columns = size
    per_weight, per_row = choice.state_numbers
    by_weight = 4 * rows * columns * per_weight
    by_row = 4 * rows * per_row
    if device == "cpu":
        return Storage(hbm=0, ddr=by_weight + by_row)
    if kernel in ("fused_uvm", "fused_uvm_caching"):
        return Storage(hbm=by_row, ddr=by_weight)
    return Storage(hbm=by_weight + by_row, ddr=0)

"""TableStorage: TorchRec's estimate of each shard's memory, with optimizer state as it is allocated.

state_storage(): bytes of a shard's optimizer state, by the memory that they are in.

widen_caches(): counts the cache that several tables of a rank share; check_gpus(): refuses what then does not fit.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.constants import UVM_CACHING_RATIO
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import PlannerError, ShardingOption, Storage

from torchrec_ext.distributed.optim.config import Choice
from torchrec_ext.distributed.plan.explain import size_text

# By this attribute TorchRec finds a table's optimizer.
_DECLARED = "_optimizer_classes"


class TableStorage(EmbeddingStorageEstimator):
    """Estimates shards as TorchRec does, but counts their optimizer state by :func:`state_storage`.

    TorchRec 1.8 multiplies a shard's bytes by a factor of the optimizer. That is too little for tables in 16 bits,
    whose state has 32, for LAMB and PartialRowWiseAdam, and for a number per row where columns are split. It also
    counts state with the rows, and in their cache, wherever FBGEMM allocates it.

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


def state_storage(
    choice: Choice, size: Sequence[int], kernel: str, device: str
) -> Storage:
    """Returns the bytes of a shard's optimizer state on the GPU, in host memory and on the SSD.

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
    if kernel == "key_value":
        return Storage(hbm=0, ddr=0, ssd=by_weight + by_row)
    if kernel in ("fused_uvm", "fused_uvm_caching"):
        return Storage(hbm=by_row, ddr=by_weight)
    return Storage(hbm=by_weight + by_row, ddr=0)


def widen_caches(
    options: Sequence[ShardingOption], kinds: Mapping[str, Hashable]
) -> None:
    """Counts each cached row as wide as the widest of the tables in its cache, as FBGEMM allocates it.

    Args:
        options: options of a plan, whose storage is changed.
        kinds: by table name, what else is equal for the tables of a rank and sharding type that share a cache.
    """
    cached = []
    widest: dict[Hashable, int] = {}
    for option in options:
        if option.compute_kernel != "fused_uvm_caching":
            continue
        for shard in option.shards:
            cache = (shard.rank, option.path, option.sharding_type, kinds[option.name])
            cached.append((cache, option, shard))
            widest[cache] = max(widest.get(cache, 0), shard.size[1])
    for cache, option, shard in cached:
        rows, columns = shard.size
        cached_rows = math.ceil(rows * (option.cache_load_factor or UVM_CACHING_RATIO))
        shard.storage.hbm += (
            cached_rows * (widest[cache] - columns) * option.tensor.element_size()
        )


def check_gpus(options: Sequence[ShardingOption], topology: Topology) -> None:
    """Refuses a plan whose caches, as counted by :func:`widen_caches`, are too large for a GPU.

    Raises:
        PlannerError: a GPU has less memory.
    """
    need = [0] * topology.world_size
    for option in options:
        for shard in option.shards:
            need[shard.rank] += shard.storage.hbm
    for device, size in zip(topology.devices, need, strict=True):
        if size > device.storage.hbm:
            raise PlannerError(
                "nothing against it, but caches have rows as wide as their widest table, so rank "
                f"{device.rank} needs {size_text(size)} of its GPU; give the cached tables one width"
            )

"""sharders(): TorchRec's sharders for every kind of collection that a tower may hold."""

from __future__ import annotations

import torch
from torch import nn
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embedding_types import BaseEmbeddingSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ModuleSharder, ParameterSharding, ShardingEnv, ShardingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_ext.distributed.sharded_bags import ShardedBags


class RowWiseOnCpu(BaseEmbeddingSharder):
    """Adds row_wise to what a sharder offers on the CPU.

    TorchRec's kernels and collectives support it there, its own list leaves it out (torchrec #1252, #1396).
    """

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """The sharding types for this device."""
        types: list[str] = super().sharding_types(compute_device_type)
        row_wise = ShardingType.ROW_WISE.value
        return types if row_wise in types else [*types, row_wise]


class BagSharder(RowWiseOnCpu, EmbeddingBagCollectionSharder):
    """TorchRec's sharder of EmbeddingBagCollection, with row_wise on the CPU too; makes :class:`ShardedBags`."""

    def shard(
        self,
        module: EmbeddingBagCollection,
        params: dict[str, ParameterSharding],
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedBags:
        """See TorchRec's."""
        return self.sharded_module_type(
            module,
            params,
            env,
            self.fused_params,
            device,
            qcomm_codecs_registry=self.qcomm_codecs_registry,
            module_fqn=module_fqn,
            sharded_module_order_overwrite=self._sharded_module_order_overwrite,
        )

    @property
    def sharded_module_type(self) -> type[ShardedBags]:
        """ShardedBags."""
        return ShardedBags


class SequenceSharder(RowWiseOnCpu, EmbeddingCollectionSharder):
    """TorchRec's sharder of EmbeddingCollection, with row_wise on the CPU too."""


def sharders() -> list[ModuleSharder[nn.Module]]:
    """The sharders for every kind of collection that a tower may hold."""
    return [BagSharder(), SequenceSharder()]
